"""What a run of the suite has found, per clause: the numbers behind every kind of report."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import stm_backends
from stm_backends.testing.clauses import CLAUSES, Clause

Outcome: TypeAlias = Literal["passed", "failed", "not asked", "opted out"]

WORST_FIRST: Final[Sequence[Outcome]] = ("failed", "opted out", "not asked", "passed")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one check. `subject` is the class that it was asked of.

    `reason` says why it was not asked; `message` and `explanation` what a failure found.
    """

    subject: str
    clause: str
    name: str
    sentence: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    message: str = ""
    explanation: str = ""


@dataclass(kw_only=True)
class Run:
    """One run of the suite, and on what."""

    backend: str = ""
    distribution: str = ""
    server: str = ""
    quick: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    results: list[Result] = field(default_factory=list[Result])
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        """Whether everything that was asked was kept, and anything was asked at all."""
        return bool(self.results) and not self.broken and not self.of("failed")

    def of(self, outcome: Outcome) -> list[Result]:
        """Return the results of one kind."""
        return [result for result in self.results if result.outcome == outcome]

    def by_clause(self) -> Iterator[tuple[Clause, list[Result]]]:
        """Yield each clause that was looked at with its results, in the order of the contract."""
        for clause in CLAUSES.values():
            found = [result for result in self.results if result.clause == clause.id]
            if found:
                yield clause, found

    def versions(self) -> dict[str, str]:
        """Return what was run with what."""
        versions = {
            "suite": f"stm-backends {stm_backends.__version__}",
            "driver": self.distribution,
            "server": self.server,
            "Python": f"{platform.python_version()} on {platform.system()}",
        }
        return {name: version for name, version in versions.items() if version}

    def verdict(self) -> str:
        """Return the outcome as a sentence."""
        counts = ", ".join(f"{len(self.of(outcome))} {outcome}" for outcome in reversed(WORST_FIRST))
        kind = "a quick run" if self.quick else "a full run"
        who = self.backend or "what was tested"
        if not self.results:
            return f"No check was carried out on {who}."
        verb = "keeps the contract" if self.ok else "does not keep the contract"
        return f"{who} {verb}: {counts} ({kind}, {self.seconds:.1f} s)."

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON objects."""
        return {
            "format": 1,
            "ok": self.ok,
            "verdict": self.verdict(),
            "backend": self.backend,
            "versions": self.versions(),
            "traits": dict(self.traits),
            "quick": self.quick,
            "seconds": round(self.seconds, 3),
            "broken": self.broken,
            "clauses": [
                {
                    "id": clause.id,
                    "promise": clause.promise,
                    "outcome": worst(results),
                    "checks": [asdict(result) for result in results],
                }
                for clause, results in self.by_clause()
            ],
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield a report for people, line by line, each with its colour or `""`."""
        for clause, results in self.by_clause():
            outcome = worst(results)
            passed = sum(result.outcome == "passed" for result in results)
            yield (
                f"{MARKS[outcome]} {clause.id:<20} {passed:>3}/{len(results):<3} {clause.promise}",
                COLOURS[outcome],
            )
            for result in results:
                if result.outcome == "failed":
                    yield f"    broken: {result.sentence}", "red"
                    yield from ((f"      {line}", "") for line in result.message.splitlines()[:8])
                    yield from ((f"      {line}", "") for line in _history(result.explanation))
        for outcome in ("opted out", "not asked"):
            for reason, count in _reasons(self.of(outcome)).items():
                yield f"{outcome} ({count}): {reason}", "yellow"
        for text in self.broken:
            yield f"could not be run: {text}", "red"
        if self.traits:
            yield "traits: " + ", ".join(f"{name}={value}" for name, value in self.traits.items()), ""
        yield "versions: " + ", ".join(f"{name} {version}" for name, version in self.versions().items()), ""
        yield self.verdict(), "green" if self.ok else "red"


MARKS: Final[Mapping[Outcome, str]] = {"passed": "+", "failed": "x", "not asked": "-", "opted out": "o"}
COLOURS: Final[Mapping[Outcome, str]] = {
    "passed": "green",
    "failed": "red",
    "not asked": "yellow",
    "opted out": "yellow",
}


def worst(results: Sequence[Result]) -> Outcome:
    """Return what a clause is shown as: failed if one check failed, passed if any was kept."""
    outcomes = {result.outcome for result in results}
    for outcome in ("failed", "opted out", "passed"):
        if outcome in outcomes:
            return outcome
    return "not asked"


def _history(explanation: str) -> Sequence[str]:
    """Return what the line above does not say already: the usual cause and the history."""
    return [line for line in explanation.splitlines() if not line.startswith(("Clause ", "Expected: "))]


def _reasons(results: Sequence[Result]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for result in results:
        text = result.reason if result.outcome == "not asked" else f"{result.sentence} {result.reason}"
        counted[text] = counted.get(text, 0) + 1
    return counted
