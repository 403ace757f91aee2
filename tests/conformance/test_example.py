"""The page for authors of backends is true: the package printed there passes the suite in all three ways."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conformance.running import command, pytest_in, run

pytest.importorskip("lmdb", reason="the dependency group `test` brings what the example stores in")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "stm-backends-lmdb"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text("utf-8")

# A paragraph that begins with a file's name, and the block below it.
_NAMED = re.compile(
    r"^`stm-backends-lmdb/([\w./]+)` (?:[^\n]+\n)+\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL
)

LONGEST_DRIVER = 150
"""Lines of all that an author writes to store records, without blank lines, comments and docstrings."""

STORING = """
import asyncio, sys, time
from stm_backends import Corrupt
from stm_backends.drivers import Key
from stm_backends.drivers.plugins import open_driver
from stm_backends_lmdb.driver import END, Environment, place

async def main(url):
    driver = open_driver(url)
    await driver.open()
    (environment,) = Environment.shared.values()
"""
"""The beginning of a program that works on the driver and looks past it."""


def printed_files() -> dict[str, str]:
    """Return the files that the page prints, each put together from its blocks."""
    files: dict[str, list[str]] = {}
    for path, block in _NAMED.findall(PAGE):
        files.setdefault(path, []).append(block)
    return {path: "\n".join(blocks) for path, blocks in files.items()}


def code_of(text: str) -> set[int]:
    """Return the numbers of the lines that are neither blank nor only there for people."""
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
    """The package as the page prints it."""
    folder = tmp_path_factory.mktemp("printed")
    for path, text in printed_files().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which that package is installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    status, printed = run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package), cwd=folder
    )
    assert status == 0, printed
    return folder


def test_the_page_prints_the_example_to_the_last_line() -> None:
    files = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text("utf-8")
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    assert printed_files().keys() == files.keys()
    for path, text in printed_files().items():
        assert lines_of(text) == lines_of(files[path]), path


def test_the_driver_is_as_short_as_was_promised() -> None:
    assert len(code_of(printed_files()["stm_backends_lmdb/driver.py"])) < LONGEST_DRIVER


@pytest.mark.full
def test_by_its_name_it_passes_the_whole_suite_within_a_minute(installed: Path, tmp_path: Path) -> None:
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


def test_its_own_tests_pass(installed: Path, package: Path, tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "--stm-quick", "-rs", package / "tests", path=installed)
    assert status == 0, printed
    assert "needs `Datastore.damage`" not in printed
    assert "needs `Datastore.outage`" in printed


def test_the_command_finds_and_passes_it(installed: Path, tmp_path: Path) -> None:
    options = ("--url", f"lmdb:///{tmp_path}/data", "--clause", "driver.fold")
    status, printed = command(tmp_path, "lmdb", *options, path=installed)
    assert status == 0, printed
    assert "lmdb passes a selection of" in printed


@pytest.mark.full
def test_what_is_built_on_it_passes_too(installed: Path, tmp_path: Path) -> None:
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


def test_what_has_expired_is_removed_by_writers_as_they_pass(installed: Path, tmp_path: Path) -> None:
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


def test_a_name_that_cannot_be_read_is_corrupt_and_not_left_out_of_a_listing(
    installed: Path, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("url", ["lmdb://tmp/x", "lmdb:///", "lmdb:///x?y=1", "lmdb:///x#y"])
def test_a_url_of_which_a_part_would_be_ignored_is_refused(installed: Path, tmp_path: Path, url: str) -> None:
    program = """
import sys
from stm_backends import ConfigurationError
from stm_backends.drivers.plugins import open_driver
try:
    open_driver(sys.argv[1])
except ConfigurationError as error:
    print("refused:", error)
"""
    status, printed = run("-c", program, url, cwd=tmp_path, path=installed)
    assert status == 0, printed
    assert "refused: an lmdb URL names a folder and nothing else" in printed


def test_it_is_installed_as_a_backend_that_is_ready(installed: Path, tmp_path: Path) -> None:
    program = (
        "from stm_backends.drivers.plugins import diagnose; print([(d.name, d.state) for d in diagnose()])"
    )
    status, printed = run("-c", program, cwd=tmp_path, path=installed)
    assert status == 0
    assert "('lmdb', 'ready')" in printed
    assert sys.prefix not in str(installed)
