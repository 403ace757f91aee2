"""What a run carries out, and that every kind of report tells the same of what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stm_backends.testing import DriverContract, MemoryContract, PodsContract, StoreContract
from stm_backends.testing.workbench.check import check_of
from tests.conformance.running import BROKEN, CHECKS, SLOW_CHECKS, command, install, mine, pytest_in


def told(
    folder: Path, *options: object, path: Path | None = None
) -> tuple[int, str, dict[str, Any], dict[str | None, list[str | None]]]:
    """Run a subclass; returns the status, what was printed, the report, and the properties of the suite."""
    found, junit = folder / "report.json", folder / "report.xml"
    status, printed = pytest_in(
        folder, "-q", f"--stm-json={found}", f"--junit-xml={junit}", *options, path=path
    )
    properties: dict[str | None, list[str | None]] = {}
    for each in ElementTree.parse(junit).iterfind("testsuite/properties/property"):  # noqa: S314 -- our own
        properties.setdefault(each.get("name"), []).append(each.get("value"))
    return status, printed, json.loads(found.read_text()), properties


@pytest.mark.parametrize("by", ["word", "clause", "id"])
def test_a_selection_is_told_as_one_however_it_was_made(tmp_path: Path, by: str) -> None:
    path = mine(tmp_path)
    options = {
        "word": ("-k", "test_the_traits_are_valid", path),
        "clause": ("--stm-clause=driver.traits", path),
        "id": (f"{path}::TestMine::test_the_traits_are_valid",),
    }
    status, printed, report, properties = told(tmp_path, *options[by])
    assert status == 0, printed
    extent = f"a selection of 1 of {CHECKS} checks"
    assert f"TestMine passes {extent}: 1 passed" in printed
    assert report["extent"] == extent
    assert report["verdict"].startswith(f"TestMine passes {extent}: 1 passed")
    assert len(report["left_out"]) == CHECKS - 1
    assert properties["extent"] == [extent]
    assert len(properties["left out"]) == CHECKS - 1


@pytest.mark.full
def test_a_complete_run_is_told_as_one(tmp_path: Path) -> None:
    status, printed, report, properties = told(tmp_path, mine(tmp_path))
    assert status == 0, printed
    assert "TestMine keeps the contract, grade 3 of 3 (with all means): " in printed
    assert (report["complete"], report["left_out"]) == (True, [])
    assert properties == {"extent": ["a full run"]}


@pytest.mark.full
def test_a_quick_run_is_told_as_one(tmp_path: Path) -> None:
    status, printed, report, properties = told(tmp_path, "--stm-quick", mine(tmp_path))
    assert status == 0, printed
    extent = f"a quick run that left out {SLOW_CHECKS} of {CHECKS} checks"
    assert f"TestMine passes {extent}" in printed
    assert report["extent"] == extent
    assert len(properties["left out"]) == len(report["left_out"]) == SLOW_CHECKS
    assert any("test_entries_of_four_processes" in left_out for left_out in report["left_out"])


def test_a_run_that_ended_early_is_told_as_one(tmp_path: Path) -> None:
    status, printed, report, _ = told(
        tmp_path,
        *("-x", "--stm-backend=broken", f"--stm-url=broken:///{tmp_path}/x.db", "--stm-clause=driver.fold"),
        *("--pyargs", "stm_backends.testing"),
        path=install(tmp_path, "broken", BROKEN),
    )
    assert status != 0
    assert "broken does not keep the contract" in printed
    assert report["extent"].startswith("a run that ended after ")
    assert "the run ended before it" in json.dumps(report["clauses"])


def test_a_clause_selects_its_checks_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    mine(tmp_path)
    status, printed = pytest_in(
        tmp_path, "--collect-only", "-q", "--stm-clause=driver.traits", "--stm-clause=driver.resent", tmp_path
    )
    assert status == 0, printed
    assert "test_other" not in printed
    assert f"10/{CHECKS + 1} tests collected ({CHECKS - 9} deselected)" in printed


def test_a_mistyped_clause_ends_the_run_with_what_was_meant(tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "--stm-clause=resnt", mine(tmp_path))
    assert status == 4
    assert "no clause is called 'resnt'. Did you mean driver.resent?" in printed
    status, printed = pytest_in(tmp_path, "--stm-clause=driver.nope", mine(tmp_path))
    assert status == 4
    assert "no clause is called 'driver.nope'. There are: driver.load, driver.last, driver.append" in printed
    status, printed = pytest_in(tmp_path, "--stm-clause=xyzzy", mine(tmp_path))
    assert status == 4
    assert "There are: driver.load, driver.last, driver.append" in printed


def test_the_id_that_a_report_prints_runs_that_check_again(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    status, _ = command(tmp_path, "memory", "--url=memory://a", "--clause=driver.traits", "--json", found)
    assert status == 0
    (check,) = (
        check
        for clause in json.loads(found.read_text())["clauses"]
        for check in clause["checks"]
        if check["outcome"] == "passed"
    )
    status, printed = pytest_in(
        tmp_path, "--stm-backend=memory", "--stm-url=memory://b", "--pyargs", check["id"]
    )
    assert status == 0, printed
    assert "1 passed" in printed
    assert "+ driver.traits" in printed


def test_classes_in_ones_own_tests_are_summed_up_at_the_end(tmp_path: Path) -> None:
    path = mine(tmp_path, other=True)
    status, printed = pytest_in(tmp_path, "-q", "--stm-clause=driver.traits", path)
    assert status == 0, printed
    assert f"TestMine passes a selection of 1 of {CHECKS} checks" in printed
    assert f"TestOther passes a selection of 1 of {CHECKS} checks" in printed
    assert "+ driver.traits" not in printed


@pytest.mark.full
def test_a_class_may_be_quick_by_itself(tmp_path: Path) -> None:
    path = mine(tmp_path, other=True)
    status, printed = pytest_in(tmp_path, "-q", "-k", "TestOther", path)
    assert status == 0, printed
    extent = f"a quick run that left out {SLOW_CHECKS} of {CHECKS} checks"
    assert f"TestOther passes {extent}" in printed
    assert "  left out: driver." in printed


@pytest.mark.parametrize(
    ("contract", "given", "slow"),
    [
        (MemoryContract, {"total": 5, "policy": "error"}, True),
        (MemoryContract, {"total": 60, "policy": "error"}, False),
    ],
)
def test_of_a_check_with_parameters_a_quick_run_leaves_out_some(contract, given, slow) -> None:
    check = check_of(contract.checks()["test_what_the_model_sees_is_within_the_budget"])
    assert check is not None
    assert check.is_slow(given) is slow


def test_every_value_that_a_quick_run_leaves_out_is_one_of_several() -> None:
    for contract in (DriverContract, StoreContract, PodsContract):
        for run in contract.checks().values():
            check = check_of(run)
            assert check is not None
            for name, left_out in () if isinstance(check.slow, bool) else check.slow.items():
                (values,) = (mark.args[1] for mark in run.pytestmark if mark.args[0] == name)  # pyright: ignore[reportFunctionMemberAccess] -- pytest's
                kept = [value for value in values if value not in left_out]
                assert len(kept) == len(values) - len(left_out) > 0, (check.name, name)


def test_simple_checks_run_before_races_and_races_before_random_histories(tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "--collect-only", "-q", mine(tmp_path))
    assert status == 0, printed
    names = [line.rpartition("::")[2] for line in printed.splitlines() if "::" in line]
    ordered = (
        "test_a_record_that_is_not_there_is_none",
        "test_a_fold_removes_exactly_the_oldest_entries",
        "test_an_expired_record_is_absent_in_load",
        "test_of_writers_that_wait_for_a_record_exactly_one_wins",
        "test_concurrent_appends_are_all_stored_in_each_writers_order",
        "test_any_history_without_expiry_matches_the_model",
    )
    places = [names.index(name) for name in ordered]
    assert places == sorted(places)
    assert places[0] == 0
