"""What a run has found, as numbers, lines and a page."""

from __future__ import annotations

from stm_backends.testing.runner.page import page
from stm_backends.testing.runner.results import Outcome, Result, Run, standing
from stm_backends.testing.runner.selection import SLOW, UNREACHED, UNSELECTED
from stm_backends.testing.runner.terminal import lines, summary
from stm_backends.testing.workbench.check import too_slow, would_write


def result(outcome: Outcome, clause: str = "driver.fold", **fields: str) -> Result:
    given = {"id": "test_mine.py::TestMine::test_x", "sentence": "A <b> is kept.", **fields}
    return Result(subject="TestMine", clause=clause, name="test_x", outcome=outcome, seconds=0.25, **given)


def planned(*reasons: str, clause: str = "driver.fold") -> dict[str, Result]:
    """Return checks that are left out, if they have no result, for these reasons."""
    ids = [f"test_mine.py::TestMine::test_{number}" for number in range(len(reasons))]
    return {
        name: result("left out", clause, id=name, reason=reason)
        for name, reason in zip(ids, reasons, strict=True)
    }


def printed(run: Run) -> list[str]:
    return [line for line, _ in lines(run)]


def test_one_broken_check_breaks_its_clause_and_the_run() -> None:
    run = Run(backend="x", results=[result("passed"), result("failed", message="1 == 2")])
    assert not run.ok
    assert standing(run.results) == "failed"
    assert "x does not keep the contract: 1 passed" in run.verdict()


def test_a_clause_that_was_not_asked_is_not_passed() -> None:
    run = Run(results=[result("not asked", reason="needs a fault switch"), result("passed", "driver.load")])
    assert run.ok
    outcomes = {clause["id"]: clause["outcome"] for clause in run.as_json()["clauses"]}
    assert outcomes == {"driver.load": "passed", "driver.fold": "not asked"}
    assert any("needs a fault switch" in line for line in printed(run))


def test_a_run_without_a_single_check_proves_nothing() -> None:
    assert not Run(backend="x").ok
    assert "No check ran on x" in Run(backend="x").verdict()


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


def test_only_a_complete_run_is_told_that_the_contract_is_kept() -> None:
    passed = [result("passed")]
    all_means = ", grade 3 of 3 (with all means)"
    whole = Run(backend="x", results=passed).verdict()
    assert whole.startswith(f"x keeps the contract{all_means}: 1 passed")
    quick = "a quick run that left out 1 of 2 checks"
    for run, extent, grade in (
        (Run(results=passed, quick=True), "a quick run", all_means),
        (Run(results=passed, quick=True, planned=planned(SLOW)), quick, all_means),
        (Run(results=passed, planned=planned(*[UNSELECTED] * 77)), "a selection of 1 of 78 checks", ""),
        (Run(results=passed, planned=planned(UNREACHED, SLOW)), "a run that ended after 1 of 3 checks", ""),
    ):
        run.backend = "x"
        assert run.verdict().startswith(f"x passes {extent}{grade}: 1 passed")
        assert run.as_json()["extent"] == extent
        assert run.as_json()["complete"] is False
        assert run.verdict() in printed(run)
        assert run.verdict() in page(run)


NETWORK = "needs `Datastore.address` and `Datastore.through`"


def of_reasons(*reasons: str, reach: str = "network") -> Run:
    """Return a run in which one check has passed, and one was not asked for each of these reasons."""
    results = [result("not asked", id=f"{number}", reason=reason) for number, reason in enumerate(reasons)]
    return Run(backend="x", traits={"reach": reach}, results=[result("passed"), *results])


def test_what_was_not_asked_and_what_was_opted_out_of_weaken_the_verdict() -> None:
    run = of_reasons("needs `Datastore.peek`")
    run.results.append(result("opted out", id="out"))
    assert run.verdict().startswith("x keeps the contract, except for what it opts out of, grade 2 of 3 (")


def test_the_verdict_says_how_much_was_asked_and_the_line_before_it_what_would_ask_the_rest() -> None:
    peek, hold = "needs `Datastore.peek`", "needs `Datastore.hold`"
    large, none = would_write(10**9), "the driver has no `next_scope`"
    outage = f"needs `Datastore.outage`, or {NETWORK.removeprefix('needs ')}: the connection uses TLS"
    asks = "not asked, and what would ask it: "
    proxy = "a URL of one host and port without TLS, or `address` and `through` of a test class"
    tls = f"2 checks with a proxy before the server (the connection uses TLS): {proxy}"
    of_full = "1 check of full records: a smaller `max_record_bytes` or the like"
    of_slow = "1 check for which this was too slow: a quicker machine or datastore"
    for run, grade, line in (
        (of_reasons(none), 3, ""),
        (of_reasons(peek, hold, peek), 2, f"{asks}3 checks with `hold`, `peek`: a test class"),
        (of_reasons(large), 2, f"{asks}{of_full}"),
        (of_reasons(NETWORK), 1, f"{asks}1 check with a proxy before the server: {proxy}"),
        (
            of_reasons(outage, NETWORK, peek, large, none),
            1,
            f"{asks}{tls}; 1 check with `peek`: a test class; {of_full}",
        ),
        # What a busy machine keeps from being asked says nothing of the means.
        (of_reasons(too_slow("4,000 records are needed"), none), 3, f"{asks}{of_slow}"),
        # There is no network before a file.
        (of_reasons(outage, NETWORK, reach="host"), 3, ""),
    ):
        assert (run.grade, run.unasked()) == (grade, line)
        assert f"grade {grade} of 3" in run.verdict()
        assert run.as_json()["grade"] == grade
        assert run.as_json()["unasked"] == line
        shown = printed(run)
        assert shown[-1] == run.verdict()
        assert shown[-2] == line if line else not any(asks in one for one in shown)
        assert line in page(run)
        # A green that was asked nothing of the network is none.
        assert [colour for _, colour in lines(run)][-1] == ("yellow" if grade == 1 else "green")


def test_the_second_grade_names_the_means_that_a_test_class_does_not_give() -> None:
    hold, lag, kept = "needs `Datastore.hold`", "needs `Datastore.lag`", "needs `HandedIn.kept`"
    grade = "grade 2 of 3 (without "
    complete = "complete where the datastore has none of these)"
    assert f"{grade}`hold`, `lag`: {complete}" in of_reasons(lag, hold, lag).verdict()
    assert f"{grade}`kept`: {complete}" in of_reasons(kept).verdict()
    assert f"{grade}full records)" in of_reasons(would_write(10**9)).verdict()
    assert f"{grade}`hold`, full records: {complete}" in of_reasons(would_write(10**9), hold).verdict()
    installed = "stm_backends.testing.runner.test_installed::TestDriver"
    run = Run(
        backend="x",
        results=[
            result("passed", id=f"{installed}::test_a"),
            result("not asked", id=f"{installed}::test_b", reason=hold),
        ],
    )
    assert f"{grade}the means of a test class)" in run.verdict()


def test_a_run_in_which_nothing_could_be_asked_proves_nothing() -> None:
    run = Run(backend="x", results=[result("not asked", reason="needs a fault switch")])
    assert not run.ok
    assert run.verdict().startswith("x was not tested")


def test_the_checks_that_were_left_out_are_listed() -> None:
    run = Run(results=[result("passed", "driver.load")], planned=planned(UNSELECTED, UNSELECTED))
    found = run.as_json()
    assert found["left_out"] == list(run.planned)
    assert (found["checks"], found["ok"]) == (3, True)
    (clause,) = (clause for clause in found["clauses"] if clause["id"] == "driver.fold")
    assert [check["reason"] for check in clause["checks"]] == [UNSELECTED] * 2
    assert "Left out: not selected" in page(run)
    assert "left out: 2 checks; the JSON and the HTML report list them" in printed(run)
    assert not any("driver.fold" in line for line in printed(run))


def test_a_clause_of_which_a_part_was_asked_has_a_mark_of_its_own_and_says_why() -> None:
    results = [result("passed"), result("not asked", reason="needs `Datastore.peek`", id="test_mine.py::y")]
    run = Run(results=results)
    assert standing(results) == "partly"
    assert printed(run)[0].startswith("~ driver.fold            1/2 ")
    assert printed(run)[1:3] == ["    not asked: needs `Datastore.peek`", "      A <b> is kept."]
    assert '<span class="partly" title="partly">~</span>' in page(run)
    assert "Not asked: needs `Datastore.peek`" in page(run)
    assert run.as_json()["clauses"][0]["outcome"] == "partly"
    quick = Run(results=[result("passed")], planned=planned(SLOW, SLOW), quick=True)
    assert printed(quick)[0].startswith("~ driver.fold            1/3 ")
    assert printed(quick)[1] == "    left out: 2 checks"


def test_what_two_failures_have_in_common_is_printed_once() -> None:
    message = "it is not there\nassert 1 == 2\n\n  a very long difference"
    first, second = (result("failed", id=f"test_mine.py::test_{n}", message=message) for n in (1, 2))
    shown = printed(Run(results=[first, second]))
    assert shown.count("        a very long difference") == 1
    assert shown.count("      it is not there") == 2
    assert "      (as above)" in shown
    assert "      test_mine.py::test_2" in shown


def test_what_keeps_a_class_from_being_tested_is_printed_once() -> None:
    run = Run(broken=["the driver lacks scan"] * 3)
    assert printed(run).count("could not be run: the driver lacks scan") == 1
    assert page(run).count("the driver lacks scan") == 1


def test_a_summary_has_a_verdict_for_each_class() -> None:
    other = Result(
        **{**vars(result("failed")), "subject": "TestOther", "id": "test_mine.py::TestOther::test_x"}
    )
    shown = [line for line, _ in summary(Run(results=[result("passed"), other]))]
    assert shown[0].startswith("TestMine keeps the contract")
    assert shown[1].startswith("TestOther does not keep the contract")
    assert shown[2] == "  failed: driver.fold"


def test_a_summary_names_the_means_that_are_missing_in_the_order_of_the_contract() -> None:
    results = [
        result("not asked", "driver.races", id="a", reason="needs `Datastore.hold`"),
        result("passed", "driver.model", id="b"),
        result("not asked", "driver.load", id="c", reason="needs `Datastore.peek`"),
        result("not asked", "driver.expiry", id="d", reason="needs `Datastore.hold`"),
    ]
    for order in (results, results[::-1]):
        shown = [line for line, _ in summary(Run(results=order))]
        assert shown[1:3] == [
            "  not asked (needs `Datastore.peek`): driver.load",
            "  not asked (needs `Datastore.hold`): driver.expiry, driver.races",
        ]


def test_the_checks_of_a_clause_are_in_the_order_of_their_collection() -> None:
    run = Run(planned=planned(UNREACHED, UNREACHED, UNREACHED))
    first, second, third = run.planned
    # As the processes of pytest-xdist may send them.
    run.results = [result("failed", id=third), result("failed", id=first), result("passed", id=second)]
    ((_, results),) = run.by_clause()
    assert [one.id for one in results] == [first, second, third]
