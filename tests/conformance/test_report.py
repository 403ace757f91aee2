"""What a run has found, as numbers, lines and a page."""

from __future__ import annotations

from stm_backends.testing.page import page
from stm_backends.testing.results import Outcome, Result, Run, worst


def result(outcome: Outcome, clause: str = "driver.fold", **fields: str) -> Result:
    return Result(
        subject="TestMine",
        clause=clause,
        name="test_x",
        sentence="A <b> is kept.",
        outcome=outcome,
        seconds=0.25,
        **fields,
    )


def test_one_broken_check_breaks_its_clause_and_the_run() -> None:
    run = Run(backend="x", results=[result("passed"), result("failed", message="1 == 2")])
    assert not run.ok
    assert worst(run.results) == "failed"
    assert "x does not keep the contract: 1 passed" in run.verdict()


def test_a_clause_that_was_not_asked_is_not_passed() -> None:
    run = Run(results=[result("not asked", reason="needs a fault switch"), result("passed", "driver.load")])
    assert run.ok
    outcomes = {clause["id"]: clause["outcome"] for clause in run.as_json()["clauses"]}
    assert outcomes == {"driver.load": "passed", "driver.fold": "not asked"}
    assert any("needs a fault switch" in line for line, _ in run.lines())


def test_a_run_without_a_single_check_proves_nothing() -> None:
    assert not Run(backend="x").ok
    assert "No check was carried out on x" in Run(backend="x").verdict()


def test_a_run_in_which_a_class_could_not_be_made_is_not_ok() -> None:
    assert not Run(results=[result("passed")], broken=["TestMine overrides a check"]).ok


def test_the_page_shows_the_failure_and_lets_nothing_through_as_markup() -> None:
    run = Run(
        backend="<script>",
        traits={"max_entry": 1_000_000},
        results=[
            result("failed", message="<i>", explanation="Clause\nHistory:\n  a"),
            result("opted out", reason="r"),
        ],
    )
    text = page(run)
    assert "<script" not in text
    assert "<i>" not in text
    assert "A &lt;b&gt; is kept." in text
    assert "1,000,000" in text
    assert "Opted out: r" in text
    assert '<details id="driver.fold" open>' in text
