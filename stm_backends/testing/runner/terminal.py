"""The report on a terminal: a line per clause, followed by its failures and the checks that did not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from stm_backends.testing.runner.results import Outcome, Result, Run, Standing, counted, standing
from stm_backends.testing.runner.selection import SLOW

_MARKS: Final[Mapping[Standing, str]] = {
    "passed": "+",
    "partly": "~",
    "failed": "x",
    "not asked": "-",
    "left out": "-",
    "opted out": "o",
}
_COLOURS: Final[Mapping[Standing, str]] = {"passed": "green", "failed": "red"}

_LONGEST_MESSAGE: Final = 8
"""Maximum number of lines shown of a failure's message."""

Line: TypeAlias = tuple[str, str]
"""A line of text, and its colour, or `""`."""


def lines(run: Run) -> Iterator[Line]:
    """Yield the whole report."""
    said: set[str] = set()
    alike = run.alike()
    for text in run.findings.values():
        first, *more = text.splitlines()
        yield f"x {first}", "red"
        yield from ((f"    {line}", "") for line in more)
    for clause, results in run.by_clause():
        stands = standing(results)
        if stands == "left out":
            continue
        passed = sum(result.outcome == "passed" for result in results)
        count = f"{passed:>3}/{len(results):<3}"
        yield f"{_MARKS[stands]} {clause.id:<20} {count} {clause.promise}", _COLOURS.get(stands, "yellow")
        yield from _failures([result for result in results if result.outcome == "failed"], alike, said)
        yield from _unasked(results, "opted out")
        yield from _unasked(results, "not asked")
        if left_out := sum(result.outcome == "left out" for result in results):
            yield f"    left out: {counted(left_out)}", "yellow"
    for text in dict.fromkeys(run.broken):
        yield f"could not be run: {text}", "red"
    if run.of("failed"):
        named = f"-p stm_backends.testing --stm-backend={run.backend} --stm-url=URL --pyargs "
        again = named if run.backend else ""
        yield f"to run one check again: pytest {again}ID, with the id printed below its name", ""
    if run.traits:
        yield "traits: " + ", ".join(f"{name}={value}" for name, value in run.traits.items()), ""
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in run.versions().items()), ""
    if run.left_out:
        yield f"left out: {counted(len(run.left_out))}; the JSON and the HTML report list them", "yellow"
    if unasked := run.unasked():
        yield unasked, "yellow"
    yield run.verdict(), _colour(run)


def summary(run: Run) -> Iterator[Line]:
    """Yield a few lines for each class, for a run in which pytest has shown the failures."""
    for text in run.findings.values():
        yield f"x {text.splitlines()[0]}", "red"
    for each in run.by_subject():
        yield each.verdict(), _colour(each)
        for same in each.alike().values():
            yield f"  {counted(len(same))} failed in the same way: {same[0].message.splitlines()[0]}", "red"
        ordered = [result for _, results in each.by_clause() for result in results]
        for outcome in ("failed", "opted out", "not asked", "left out"):
            clauses: dict[str, dict[str, None]] = {}
            for one in ordered:
                # A selection leaves out too many to list.
                if one.outcome == outcome and (outcome != "left out" or one.reason == SLOW):
                    reason = f" ({one.reason})" if outcome in ("opted out", "not asked") else ""
                    clauses.setdefault(reason, {})[one.clause] = None
            for reason, names in clauses.items():
                yield f"  {outcome}{reason}: {', '.join(names)}", "red" if outcome == "failed" else "yellow"
    for text in dict.fromkeys(run.broken):
        yield f"could not be run: {text}", "red"
    yield "--stm-json=FILE and --stm-html=FILE write the whole report", ""


def _failures(failed: list[Result], alike: Mapping[str, list[Result]], said: set[str]) -> Iterator[Line]:
    """Yield the failures of a clause, each cause once in the whole report."""
    again: dict[str, int] = {}
    for result in failed:
        same = alike.get(result.cause, [result])
        if result is not same[0]:
            again[same[0].sentence] = again.get(same[0].sentence, 0) + 1
            continue
        yield from _failure(result, said)
        if len(same) > 1:
            yield f"      and {counted(len(same) - 1, 'more ')} in the same way", "red"
    for first, count in again.items():
        yield f'    broken in the same way as "{first}": {counted(count)}', "red"


def _failure(result: Result, said: set[str]) -> Iterator[Line]:
    yield f"    broken: {result.sentence}", "red"
    yield f"      {result.id}", ""
    message = [line for line in result.message.splitlines() if line.strip()]
    if result.message in said and len(message) > 1:
        message = [message[0], "(as above)"]
    said.add(result.message)
    # The lines above already name the clause and the expectation.
    told = ("Clause ", "Expected: ")
    history = [line for line in result.explanation.splitlines() if not line.startswith(told)]
    for line in (*message[:_LONGEST_MESSAGE], *history):
        yield f"      {line}", ""


def _unasked(results: Sequence[Result], outcome: Outcome) -> Iterator[Line]:
    """Yield each reason once, followed by the checks that were not asked because of it."""
    reasons: dict[str, dict[str, None]] = {}
    for result in results:
        if result.outcome == outcome:
            reasons.setdefault(result.reason, {})[result.sentence] = None
    for reason, sentences in reasons.items():
        yield f"    {outcome}: {reason}", "yellow"
        for sentence in sentences:
            yield f"      {sentence}", ""


def _colour(run: Run) -> str:
    return ("green" if run.complete and run.grade > 1 else "yellow") if run.ok else "red"
