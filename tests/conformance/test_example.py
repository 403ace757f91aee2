"""The package that the page for authors of backends prints passes the suite in all three ways."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conformance.pages import ROOT, printed_files, write_files
from tests.conformance.running import command, pytest_in, run

pytest.importorskip("lmdb", reason="the dependency group `test` brings what the example stores in")

EXAMPLE = ROOT / "examples" / "stm-backends-lmdb"
FILES = printed_files("writing-a-backend.md", "stm-backends-lmdb")

LONGEST_DRIVER = 180
"""Lines of the example's driver, without blank lines, comments and docstrings."""

STORING = """
import asyncio, os, sys, threading, time
from stm_backends import Corrupt
from stm_backends.drivers import Key
from stm_backends.drivers.plugins import open_driver
from stm_backends_lmdb.driver import END, Environment, place

async def main(url):
    driver = open_driver(url)
    await driver.open()
    (environment,) = Environment.shared.values()
"""
"""The beginning of a program that uses the driver and its LMDB environment."""


def code_of(text: str) -> set[int]:
    """Return the numbers of the lines that are code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return {number for number, line in lines if not re.match(r"\s*(#|$)", line)} - docstrings


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package that the page prints."""
    folder = tmp_path_factory.mktemp("printed")
    write_files(FILES, folder)
    return folder


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with that package installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    status, printed = run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package), cwd=folder
    )
    assert status == 0, printed
    return folder


def test_the_page_prints_every_line_of_the_example() -> None:
    files = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text("utf-8")
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    assert FILES.keys() == files.keys()
    for path, text in FILES.items():
        assert lines_of(text) == lines_of(files[path]), path


def test_the_driver_stays_short() -> None:
    assert len(code_of(FILES["stm_backends_lmdb/driver.py"])) < LONGEST_DRIVER


@pytest.mark.full
def test_the_example_passes_the_full_suite_by_its_name(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=lmdb", f"--stm-url=lmdb:///{tmp_path}/data", f"--stm-json={report}"),
        *("--pyargs", "stm_backends.testing"),
        path=installed,
    )
    assert status == 0, printed
    found = json.loads(report.read_text())
    assert found["versions"]["driver"] == "stm-backends-lmdb 0.1.0"
    assert found["traits"]["reach"] == "host"


@pytest.mark.full
def test_the_tests_of_the_example_pass(installed: Path, package: Path, tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "--stm-quick", "-rs", package / "tests", path=installed)
    assert status == 0, printed
    assert "needs `Datastore.damage`" not in printed
    assert "needs `Datastore.outage`" in printed


def test_the_example_passes_the_conformance_command(installed: Path, tmp_path: Path) -> None:
    options = ("--url", f"lmdb:///{tmp_path}/data", "--clause", "driver.fold")
    status, printed = command(tmp_path, "lmdb", *options, path=installed)
    assert status == 0, printed
    assert "a selection of" in printed


@pytest.mark.full
def test_stores_and_memories_on_the_example_pass(installed: Path, tmp_path: Path) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=lmdb", f"--stm-url=lmdb:///{tmp_path}/data", "--stm-quick"),
        *("--stm-profile=store", "--stm-profile=memory", "--pyargs", "stm_backends.testing"),
        path=installed,
    )
    assert status == 0, printed


def on_driver(installed: Path, folder: Path, body: str) -> str:
    """Run a program on the driver of a folder; returns what it printed."""
    program = STORING + textwrap.indent(textwrap.dedent(body), "    ") + "\nasyncio.run(main(sys.argv[1]))"
    status, printed = run("-c", program, f"lmdb:///{folder}/data", cwd=folder, path=installed)
    assert status == 0, printed
    return printed


def test_a_close_that_is_cancelled_is_done_nevertheless(installed: Path, tmp_path: Path) -> None:
    printed = on_driver(
        installed,
        tmp_path,
        """
        await driver.append(Key("s", "a"), b"a", initial_version="v", ttl=None)
        other, busy = open_driver(url), threading.Event()
        environment.thread.submit(busy.wait)
        closing = asyncio.create_task(driver.close())
        await asyncio.sleep(0)
        closing.cancel()
        print("cancelled:", await asyncio.gather(closing, return_exceptions=True))
        await other.open()
        busy.set()
        print("loaded:", (await other.load(Key("s", "a"))).tail, "users:", environment.users)
        await other.close()
        print("left:", len(Environment.shared))
        (thread,) = environment.thread._threads
        thread.join(30)
        print("alive:", thread.is_alive())
        """,
    )
    assert "cancelled: [CancelledError" in printed
    assert "loaded: (b'a',) users: 1\n" in printed
    assert "left: 0\n" in printed
    assert "alive: False\n" in printed


def test_a_process_forked_during_a_transaction_can_open_the_same_folder(
    installed: Path, tmp_path: Path
) -> None:
    printed = on_driver(
        installed,
        tmp_path,
        """
        from stm_backends.testing.workbench.forks import in_a_forked_process
        await driver.append(Key("s", "a"), b"a", initial_version="v", ttl=None)
        began, goes_on = threading.Event(), threading.Event()

        def read(txn, now):
            began.set()
            while not goes_on.is_set():
                txn.get(place("s", "a"))

        async def use():
            another = open_driver(url)
            await another.open()
            assert (await another.load(Key("s", "a"))).tail == (b"a",)
            await another.close()

        os.register_at_fork(before=goes_on.set)  # called before the driver's own
        reading = asyncio.create_task(driver._run("load", read))
        await asyncio.to_thread(began.wait)
        print("said:", repr(await in_a_forked_process(use, within=20)))
        await reading
        """,
    )
    assert printed == "said: ''\n"


def test_writers_remove_expired_records(installed: Path, tmp_path: Path) -> None:
    printed = on_driver(
        installed,
        tmp_path,
        """
        for number in range(40):
            await driver.append(Key("old", str(number)), b"a", initial_version="v", ttl=0.001)
        await driver.append(Key("old", "lasting"), b"a", initial_version="v", ttl=None)
        time.sleep(0.01)
        for number in range(60):
            await driver.append(Key("new", "one"), b"a", initial_version="v", ttl=None)
        with environment.lmdb.begin() as txn:
            print("records:", txn.stat()["entries"])
        print("names:", (await driver.scan("old", limit=50)).names)
        """,
    )
    assert "records: 2\n" in printed
    assert "names: ('lasting',)" in printed


def test_an_unreadable_name_makes_a_listing_corrupt(installed: Path, tmp_path: Path) -> None:
    printed = on_driver(
        installed,
        tmp_path,
        """
        await driver.append(Key("s", "damaged"), b"a", initial_version="v", ttl=None)
        with environment.lmdb.begin(write=True) as txn:
            txn.put(place("s", "damaged"), txn.get(place("s", "damaged"))[: END.size + 4])
        for number in range(9):
            await driver.append(Key("s", "sound"), b"a", initial_version="v", ttl=None)
        for call in (driver.scan("s", limit=5), driver.load(Key("s", "damaged"))):
            try:
                print(await call)
            except Corrupt as error:
                print("corrupt:", error)
        print("erased:", await driver.delete(Key("s", "damaged")))
        print("names:", (await driver.scan("s", limit=5)).names)
        """,
    )
    assert printed.splitlines()[-4:] == [
        "corrupt: lmdb.scan: the stored bytes are not a record",
        "corrupt: lmdb.load: the stored bytes are not a record",
        "erased: True",
        "names: ('sound',)",
    ]


REFUSED = {
    "lmdb://tmp/x": "an lmdb URL has no host",
    "lmdb:///": "name a folder",
    "lmdb:///x?y=1": "has no such setting in a URL",
    "lmdb:///x?deadline_s=soon": "deadline_s in the URL is not a number",
    "lmdb:///x#y": "has no fragment",
}


def test_a_url_with_a_part_that_has_no_meaning_is_refused(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
from stm_backends import ConfigurationError
from stm_backends.drivers.plugins import open_driver
for url in sys.argv[1:]:
    try:
        open_driver(url)
    except ConfigurationError as error:
        print("refused:", error)
"""
    status, printed = run("-c", program, *REFUSED, cwd=tmp_path, path=installed)
    assert status == 0, printed
    for line, reason in zip(printed.splitlines(), REFUSED.values(), strict=True):
        assert re.search(f"^refused: .*{re.escape(reason)}", line)


def test_the_installed_example_is_a_ready_backend(installed: Path, tmp_path: Path) -> None:
    program = (
        "from stm_backends.drivers.plugins import diagnose; print([(d.name, d.state) for d in diagnose()])"
    )
    status, printed = run("-c", program, cwd=tmp_path, path=installed)
    assert status == 0
    assert "('lmdb', 'ready')" in printed
    assert sys.prefix not in str(installed)
