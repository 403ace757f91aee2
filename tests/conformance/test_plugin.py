"""The pytest plugin is silent in other runs and reports per clause in runs of the suite."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conformance.running import SUITE, TORN, install, mine, pytest_in, run, stranger
from tests.support.selection import few

NAMED = ("--pyargs", "stm_backends.testing")


@pytest.mark.parametrize("plugin", [(), SUITE], ids=["off", "on"])
def test_a_run_of_other_tests_sees_nothing_of_the_plugin(tmp_path: Path, plugin: tuple[str, ...]) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    loaded = {name for name in sys.modules if name.startswith('stm_backends.')}\n"
        "    suite = 'stm_backends.testing'\n"
        "    assert not loaded & {f'{suite}.runner.results', f'{suite}.workbench.check'}\n"
        f"    assert (f'{{suite}}.runner.plugin' in loaded) is {bool(plugin)}\n"
        f"    assert ('stm_backends' in sys.modules) is {bool(plugin)}\n"
        "async def helper(): pass\n"
    )
    # In a process that has loaded nothing yet.
    alone = stranger(tmp_path, *plugin, "-q", "-p", "no:asyncio", "-W", "error")
    status, printed = run("-m", "pytest", *alone, cwd=tmp_path)
    assert status == 0, printed
    assert "conformance" not in printed


@pytest.mark.parametrize("plugin", [(), SUITE], ids=["off", "on"])
def test_the_help_of_pytest_has_the_options_once_the_plugin_is_on(
    tmp_path: Path, plugin: tuple[str, ...]
) -> None:
    status, printed = pytest_in(tmp_path, *plugin, "--help", suite=False)
    assert status == 0
    assert ("--stm-" in printed) == bool(plugin)


def test_a_subclass_runs_without_the_plugin_and_without_its_report(tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "-q", "-k", "a_fold_removes_exactly", mine(tmp_path), suite=False)
    assert status == 0, printed
    assert "passed" in printed
    assert "conformance" not in printed


def test_without_the_plugin_the_installed_suite_says_how_to_turn_it_on(tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, *NAMED, suite=False)
    assert status != 0
    assert "add `-p stm_backends.testing`" in printed
    assert "fixture 'stm_" not in printed


def test_the_plugin_may_be_turned_on_by_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p stm_backends.testing --stm-quick\n", "utf-8")
    selected = ("-q", "-p", "no:cacheprovider", "-k", "a_fold_removes_exactly", mine(tmp_path))
    status, printed = run("-m", "pytest", *selected, cwd=tmp_path)
    assert status == 0, printed
    assert "TestMine passes a selection of" in printed


@pytest.mark.parametrize(
    "mode", few(1, [("-p", "no:asyncio"), ("-o", "asyncio_mode=strict"), ("-o", "asyncio_mode=auto")])
)
def test_a_subclass_runs_alike_whatever_there_is_for_asynchronous_tests(
    tmp_path: Path, mode: tuple[str, str]
) -> None:
    # What starts checks is the same for all; some others wait for seconds.
    some = "an_append_adds or a_fold or concurrent_appends or any_history_without"
    status, printed = pytest_in(tmp_path, "-q", *mode, "-k", some, mine(tmp_path))
    assert status == 0, printed


def test_a_backend_that_is_installed_is_tested_by_its_name(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=sqlite", f"--stm-url=sqlite:///{tmp_path}/x.db", "--stm-quick", "--stm-profile=all"),
        *(f"--stm-json={found}", f"--stm-html={page}", f"--junit-xml={junit}", "--stm-server=3.99"),
        *("-k", "an_append or state or of_zero", *NAMED),
    )
    assert status == 0, printed
    assert "~ driver.append" in printed
    assert "sqlite passes a selection of" in printed
    report = json.loads(found.read_text())
    assert report["ok"] is True
    assert report["traits"]["reach"] == "host"
    assert report["versions"]["server"] == "3.99"
    assert report["versions"]["driver"].startswith("stm-backends ")
    profiles = {clause["id"].partition(".")[0] for clause in report["clauses"]}
    assert profiles == {"driver", "store", "graph", "memory"}
    text = page.read_text()
    assert "http" not in text
    assert "src=" not in text
    properties = {each.get("name") for each in ElementTree.parse(junit).iter("property")}  # noqa: S314 -- our own
    assert {"clause", "expected", "extent", "left out"} <= properties


def test_a_load_that_only_other_processes_can_tear_is_told_from_a_snapshot(tmp_path: Path) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=torn", f"--stm-url=torn:///{tmp_path}/x.db", "-k", "a_load_is_a_snapshot", *NAMED),
        path=install(tmp_path, "torn", TORN),
    )
    assert status == 1
    assert "1 failed, 1 passed" in printed
    assert "Clause driver." in printed
    assert "Expected: A load is a snapshot while another process appends and folds." in printed
    assert "broken: A load is a snapshot while another process appends and folds." in printed
    assert "mixes two moments" in printed or "a later load" in printed
    assert "driver1.load(" in printed


def test_a_check_that_would_write_too_much_says_how_to_have_it_asked(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db?max_record_bytes=900000000"
    name = "test_a_rewrite_that_makes_a_record_too_large_is_refused"
    status, printed = pytest_in(tmp_path, "--stm-backend=sqlite", f"--stm-url={url}", "-k", name, *NAMED)
    assert status == 0, printed
    assert "smaller limit, by an option of the URL if it has one, such as `max_record_bytes`" in printed


def test_opting_out_prints_the_reason(tmp_path: Path) -> None:
    path = mine(tmp_path, 'opted_out = {"test_a_scan_of_an_empty_scope_ends": "scopes are never empty here"}')
    found = tmp_path / "report.json"
    status, printed = pytest_in(tmp_path, "-rs", "-k", "scan_of_an_empty", f"--stm-json={found}", path)
    assert status == 0, printed
    assert "opted out: scopes are never empty here" in printed
    checks = [check for clause in json.loads(found.read_text())["clauses"] for check in clause["checks"]]
    (reason,) = (check["reason"] for check in checks if check["outcome"] == "opted out")
    assert reason == "scopes are never empty here"


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ('opted_out = {"test_nonsense": "because"}', "opts out of test_nonsense, which is not a check"),
        ('opted_out = {"test_a_scan_of_an_empty_scope_ends": " "}', "without a reason"),
        ("def test_a_scan_of_an_empty_scope_ends(self): pass", "overrides the check test_a_scan"),
        ("test_a_scan_of_an_empty_scope_ends = None", "overrides the check test_a_scan"),
    ],
)
def test_a_check_that_is_done_away_with_in_another_way_fails_the_run(
    tmp_path: Path, extra: str, complaint: str
) -> None:
    found = tmp_path / "report.json"
    status, printed = pytest_in(tmp_path, "-k", "scan", f"--stm-json={found}", mine(tmp_path, extra))
    assert status not in (0, 1)
    assert complaint in printed
    report = json.loads(found.read_text())
    assert report["ok"] is False
    assert complaint in report["broken"][0]


def test_without_a_backend_the_run_says_what_is_missing(tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, *NAMED)
    assert status != 0
    assert "--stm-backend=NAME --stm-url=URL" in printed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--stm-backend=sqlit", "--stm-url=sqlite:///x.db"), "Did you mean 'sqlite'?"),
        (
            ("--stm-backend=sqlite", "--stm-url=memory://x"),
            "the backend 'sqlite' takes only URLs of sqlite://",
        ),
        (("--stm-backend=sqlite", "--stm-url=sqlite:///x.db?foo=1"), "has no such setting in a URL"),
        (("--stm-backend=sqlite", "--stm-url=sqlite://x.db"), "sqlite"),
        (
            ("--stm-backend=half",),
            "the backend 'half' makes no driver: AttributeError: 'NoneType' object has",
        ),
    ],
)
def test_a_mistyped_backend_or_url_ends_the_run_with_one_line(
    tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    path = install(tmp_path, "half", "class Made(SqliteDriver): pass")
    status, printed = pytest_in(tmp_path, *options, "--stm-quick", *NAMED, path=path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert told in printed
    assert printed.startswith("ERROR: ")
    assert len(printed.strip().splitlines()) == 1
    assert "contract" not in printed


def test_a_backend_that_nothing_tests_is_refused_and_not_reported(tmp_path: Path) -> None:
    named = ("--stm-backend=memory", "--stm-url=memory://unused")
    status, printed = pytest_in(tmp_path, *named, "--stm-clause=driver.traits", mine(tmp_path))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "nothing here tests the backend of --stm-backend: add `--pyargs stm_backends.testing`" in printed
    assert "conformance of memory" not in printed
    assert "passed" not in printed


def test_a_named_backend_and_a_class_beside_it_are_both_named_in_the_verdict(tmp_path: Path) -> None:
    named = ("--stm-backend=memory", "--stm-url=memory://beside", *NAMED)
    status, printed = pytest_in(tmp_path, *named, "--stm-clause=driver.traits", mine(tmp_path))
    assert status == 0, printed
    assert "memory, TestMine passes a selection of 2 of " in printed
