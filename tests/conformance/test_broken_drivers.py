"""A driver that is broken everywhere is told so in a few lines, with the line of its own that is to blame."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stm_backends.cli import conformance
from stm_backends.testing.driver_checks import first_look
from tests.conformance.running import SUITE, command, install, pytest_in, run, stranger

NAMED = ("--pyargs", "stm_backends.testing")

EVERYWHERE = """
class Made(SqliteDriver):
    async def load(self, key, *rest, **named):
        return self.pool[key]
    append = replace = delete = scan = load
"""

SILENT = """
import asyncio
class Made(SqliteDriver):
    async def load(self, key):
        await asyncio.Event().wait()
"""

LITTERING = """
class Litter:
    def __init__(self):
        self.me = self
    def __del__(self):
        raise RuntimeError("the event loop is closed")

class Made(SqliteDriver):
    async def append(self, key, entry, *, initial_version, ttl):
        litter = [Litter() for _ in range(50)]
        return self.once_more(0)
    def once_more(self, depth):
        return self.once_more(depth + 1)
"""
"""A backend whose append calls itself for ever, and leaves objects that complain when they are collected."""

ODD = """
import dataclasses, os, sys
os.environ.setdefault("ODD_MAIN", str(os.getpid()))

class Made(SqliteDriver):
    async def append(self, key, entry, **rest):
        if os.environ["ODD_MAIN"] != str(os.getpid()):
            sys.exit("no licence")
        return await super().append(key, entry, **rest)

    async def load(self, key):
        record = await super().load(key)
        if record and any(len(entry) > 10_000 for entry in record.tail):
            return dataclasses.replace(record, tail=tuple(entry[:-1] for entry in record.tail))
        return record

    async def delete(self, key, *, expect=None):
        await super().delete(key, **({"expect": expect} if expect else {}))
"""
"""A backend that ends other processes, cuts large entries, and answers a delete with nothing."""


@pytest.fixture(scope="module")
def littering(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], str]:
    """What a run printed, its report and its page; in a process, because what is left behind complains."""
    folder = tmp_path_factory.mktemp("littering")
    found, page = folder / "report.json", folder / "report.html"
    _, printed = run(
        *("-m", "pytest", *SUITE),
        *stranger(folder, "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
        *("--stm-backend=littering", f"--stm-url=littering:///{folder}/x.db", "--stm-quick"),
        *(f"--stm-clause=driver.{word}" for word in ("fold", "keys", "processes", "model")),
        *(f"--stm-json={found}", f"--stm-html={page}", *NAMED),
        cwd=folder,
        path=install(folder, "littering", LITTERING),
    )
    return printed, json.loads(found.read_text()), page.read_text()


def checks_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [check for clause in report["clauses"] for check in clause["checks"]]


def test_a_failure_of_many_checks_ends_no_run_and_is_shown_once(littering) -> None:
    printed, report, _ = littering
    alike = [check for check in checks_of(report) if "RecursionError" in check["cause"]]
    # Beside them, that of random histories, of which a quick run may draw none that appends.
    assert len([check for check in alike if check["clause"] != "driver.model"]) == 8
    assert not any("SystemError" in check["message"] for check in checks_of(report))
    shown = printed.partition("short test summary")[0]
    assert shown.count(f"and {len(alike) - 1} more checks in the same way") == 2
    assert len(re.findall("^E +RecursionError", shown, re.MULTILINE)) == 1
    assert f"{len(alike)} failed" in printed
    assert printed.count("FAILED ") == len(alike)
    assert "INTERNALERROR" not in printed
    assert not any(check["reason"] == "the run ended before it" for check in checks_of(report))


def test_endless_recursion_is_a_few_lines_with_the_authors_own(littering) -> None:
    printed, _, _ = littering
    assert len(printed.partition("short test summary")[0].splitlines()) < 150
    assert re.search(
        r"Raised at: littering.py:\d+ in once_more: return self.once_more\(depth \+ 1\)", printed
    )


def test_the_page_shows_a_failure_of_many_checks_once(littering) -> None:
    _, report, page = littering
    count = sum("RecursionError" in check["cause"] for check in checks_of(report))
    assert f"{count} checks fail in the same way" in page
    assert page.count("<pre>RecursionError") == 1
    assert page.count("As in <a href=") == count - 1
    (target,) = set(re.findall(r'As in <a href="#([^"]+)"', page))
    assert f'<li id="{target}">' in page


def test_an_error_of_the_driver_is_not_explained_by_a_usual_cause(littering) -> None:
    printed, report, _ = littering
    assert "Usual cause" not in printed
    assert not any("Usual cause" in check["explanation"] for check in checks_of(report))


def test_a_worker_tells_the_same_failure_as_the_checks_of_one_process(littering) -> None:
    _, report, _ = littering
    (worker,) = (check for check in checks_of(report) if "survive_a_kill" in check["name"])
    assert "its last words:\n" in worker["message"]
    assert "\n  RecursionError: maximum recursion depth" in worker["message"]
    assert re.search(r"raised at littering.py:\d+ in once_more", worker["message"])


CLOSING = """
import ast, gc, sys
import pytest

class Litter:
    def __init__(self):
        self.me = self
    def __del__(self):
        # As when the traceback of an error in it is formatted.
        ast.parse("a = b + c")

SOURCE = "\\n".join(f"x{number} = [a + {number}, (b, c), f(d)]" for number in range(3_000))

def parse():
    gc.set_threshold(100)
    try:
        for _ in range(5):
            [Litter() for _ in range(50)]
            ast.parse(SOURCE)
    finally:
        gc.set_threshold(700, 10, 10)

def pytest_runtest_call(item):
    parse()

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    parse()

def pytest_terminal_summary(terminalreporter):
    parse()
    terminalreporter.write_line("all was parsed")
"""
"""A plugin that parses among objects whose finalizers parse, which Python 3.11 cannot do by itself."""


def test_no_finalizer_spoils_what_is_parsed_until_the_run_has_ended(tmp_path: Path) -> None:
    (tmp_path / "closing.py").write_text(CLOSING)
    parse = ast.parse
    status, printed = pytest_in(
        tmp_path,
        *("-p", "closing", "--stm-backend=memory", "--stm-url=memory://parsed", "--stm-clause=driver.traits"),
        *NAMED,
        path=tmp_path,
    )
    assert status == 0, printed
    assert "all was parsed" in printed
    assert ast.parse is parse


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("odd")
    words = ("limits", "processes", "delete")
    status, printed = command(
        folder,
        *("odd", "--url", f"odd:///{folder}/x.db?max_entry_bytes=50000", "--quick"),
        *(part for word in words for part in ("--clause", f"driver.{word}")),
        path=install(folder, "odd", ODD),
    )
    assert status == 1
    return printed


def test_what_a_worker_process_ended_with_is_among_its_last_words(odd: str) -> None:
    assert "after 0 acknowledged writes; its last words:" in odd
    assert re.search(r"SystemExit: no licence\n +raised at odd.py:\d+ in append: sys.exit", odd)


def test_an_answer_of_another_type_is_one_failure(odd: str) -> None:
    assert odd.startswith("x `delete` returned None, and not `bool`\n")
    assert odd.count("      `delete` returned None, and not `bool`") == 1
    assert re.search(r"and \d more checks in the same way", odd)
    assert "AttributeError" not in odd


def test_a_large_value_is_told_by_its_length_and_where_it_differs(odd: str) -> None:
    assert "49,999 long instead of 50,000" in odd
    assert "... (50,000 long), initial_version=" in odd
    assert max(map(len, odd.splitlines())) < 350


def test_the_command_does_not_name_an_option_that_it_lacks(odd: str) -> None:
    assert "-vv" not in odd
    assert "get more diff" not in odd


def test_the_command_tells_of_a_driver_that_fails_everywhere_in_one_line(tmp_path: Path) -> None:
    status, printed = command(
        tmp_path,
        *("everywhere", "--url", f"everywhere:///{tmp_path}/x.db"),
        path=install(tmp_path, "everywhere", EVERYWHERE),
    )
    assert status == 1
    assert "AttributeError: 'Made' object has no attribute 'pool'" in printed
    assert printed.count("in load: return self.pool[key])") == 1
    assert "No check ran on everywhere." in printed
    assert len(printed.splitlines()) < 6


def test_the_command_does_not_wait_for_a_driver_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "_SLACK_S", 0.01)
    monkeypatch.setattr(conformance, "_SLACK_S", 0.01)
    status, printed = command(
        tmp_path,
        *("silent", "--url", f"silent:///{tmp_path}/x.db?deadline_s=0.2"),
        path=install(tmp_path, "silent", SILENT),
    )
    assert status == 1
    assert "could not be run: `load` does not end within 0.21 s" in printed


@pytest.mark.full
def test_a_named_driver_that_fails_everywhere_is_one_error_of_pytest(tmp_path: Path) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=everywhere", f"--stm-url=everywhere:///{tmp_path}/x.db", "--stm-quick", *NAMED),
        path=install(tmp_path, "everywhere", EVERYWHERE),
    )
    assert status == 1
    assert "1 error" in printed
    assert "every operation fails: AttributeError" in printed
