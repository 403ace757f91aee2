"""`stm-backends conformance`: the report for those who have written no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.running import BROKEN, CHECKS, SLOW_CHECKS, STORE_CHECKS, command, install

OF_EACH = ("--clause", "driver.fold", "--clause", "store.copies", "--clause", "memory.pods")
"""A few checks of each profile."""


@pytest.mark.full
def test_a_backend_that_keeps_the_contract_is_told_so_per_clause(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    # The configuration of other tests must not be read.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    status, printed = command(
        tmp_path,
        *("memory", "--url", "memory://told", "--quick"),
        *(part for kind, file in files.items() for part in (f"--{kind}", file)),
    )
    assert status == 0, printed
    assert "+ driver.append" in printed
    left_out = f"that left out {SLOW_CHECKS} of {CHECKS} checks"
    assert f"memory passes a quick run {left_out}" in printed
    assert "keeps the contract" not in printed
    assert "reach=process" in printed
    assert all(file.stat().st_size > 1_000 for file in files.values())
    assert json.loads(files["json"].read_text())["quick"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["pytest.ini", *(file.name for file in files.values())]
    )


def test_instances_that_share_nothing_are_one_finding_that_says_what_to_do(tmp_path: Path) -> None:
    status, printed = command(tmp_path, "memory", *OF_EACH)
    assert status == 1
    assert printed.count("two instances do not see each other's records") == 1
    assert printed.count("could not be run: ") == 1
    assert "such as memory://try" in printed
    assert "broken:" not in printed
    assert "No check ran on memory." in printed


def test_a_backend_that_breaks_a_clause_is_told_which_and_how(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    status, printed = command(
        tmp_path,
        *("broken", "--url", f"broken:///{tmp_path}/x.db", "--clause", "driver.fold", "--json", found),
        path=install(tmp_path, "broken", BROKEN),
    )
    assert status == 1
    assert "x driver.fold" in printed
    assert "broken: A fold removes exactly the oldest entries." in printed
    name = (
        "stm_backends.testing.runner.test_installed::TestDriver"
        "::test_a_fold_removes_exactly_the_oldest_entries"
    )
    assert name in printed.split()
    assert "driver1.append(Key(scope1, 'record'), b'd', initial_version='initial', ttl=None) -> 4" in printed
    assert "broken does not keep the contract" in printed
    report = json.loads(found.read_text())
    assert report["ok"] is False
    (clause,) = (clause for clause in report["clauses"] if clause["outcome"] == "failed")
    assert clause["id"] == "driver.fold"
    assert report["versions"]["driver"] == "broken 1.5"


def test_a_datastore_that_cannot_be_opened_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    status, printed = command(tmp_path, "sqlite", "--url", "sqlite:///missing/x.db")
    assert status == 1
    assert "its directory must exist" in printed
    assert "Traceback" not in printed


def test_a_clause_can_be_put_to_the_test_by_itself(tmp_path: Path) -> None:
    status, printed = command(
        tmp_path, "memory", "--url", "memory://one", "--clause", "driver.fold", "--clause", "store.copies"
    )
    assert status == 0, printed
    assert "+ driver.fold" in printed
    assert "+ store.copies" in printed
    assert "driver.append" not in printed
    extent = f"a selection of 5 of {CHECKS + STORE_CHECKS} checks"
    assert f"memory passes {extent}" in printed
