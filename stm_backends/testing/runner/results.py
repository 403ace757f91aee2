"""The results of a run of the suite, per clause, from which all reports are made."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import stm_backends
from stm_backends.drivers.contract import CONTRACT
from stm_backends.testing.runner.selection import SLOW, UNREACHED, UNSELECTED, is_installed
from stm_backends.testing.workbench.check import TOO_SLOW, WOULD_WRITE
from stm_backends.testing.workbench.clauses import CLAUSES, Clause

Outcome: TypeAlias = Literal["passed", "failed", "not asked", "opted out", "left out"]
"""The outcome of a check. A check that was left out did not run."""

Standing: TypeAlias = Outcome | Literal["partly"]
"""The outcome of a clause; `partly` means that all checks that ran passed, but some did not run."""

OUTCOMES: Final[Sequence[Outcome]] = ("passed", "not asked", "opted out", "failed")
"""The outcomes of checks that ran, in the order of counting."""


GRADES: Final[Mapping[int, str]] = {
    1: "without faults of the network",
    2: "without {}",
    3: "with all means",
}
"""The extent of each grade; a grade includes those below it. That of the second names the missing means."""

_MEANS: Final = re.compile(r"`(?:Datastore|HandedIn|Stores|Graphs|Memories)\.(\w+)`")
_NETWORK: Final = "through"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check. `subject` is its class, `id` runs it again.

    `reason` says why it was not asked; `message` and `explanation` describe a failure. Failures with the same
    `cause` are one failure, met by several checks.
    """

    id: str
    subject: str
    clause: str
    name: str
    sentence: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    message: str = ""
    explanation: str = ""
    cause: str = ""


@dataclass(kw_only=True)
class Run:
    """One run of the suite, and its subject.

    `planned` has all checks of the contracts under test, as they are reported if they do not run. `broken`
    has the reasons why whole classes could not be tested, and `findings` the problems outside of checks, by
    cause.
    """

    backend: str = ""
    distribution: str = ""
    server: str = ""
    quick: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    results: list[Result] = field(default_factory=list[Result])
    planned: dict[str, Result] = field(default_factory=dict[str, Result])
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list[str])
    findings: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def ok(self) -> bool:
        """True if at least one check passed and none failed."""
        return bool(self.of("passed")) and not (self.broken or self.findings or self.of("failed"))

    @property
    def left_out(self) -> list[Result]:
        """The checks that did not run."""
        done = {result.id for result in self.results}
        return [result for name, result in self.planned.items() if name not in done]

    @property
    def complete(self) -> bool:
        """True if every check ran in full."""
        return not self.quick and not self.left_out

    @property
    def checks(self) -> int:
        """The number of checks, including those that were left out."""
        return len({result.id for result in self.results} | self.planned.keys())

    def of(self, outcome: Outcome) -> list[Result]:
        """Return the results of one kind."""
        return [result for result in (*self.results, *self.left_out) if result.outcome == outcome]

    def alike(self) -> dict[str, list[Result]]:
        """Return the failures that several checks have met, by cause, in report order."""
        found: dict[str, list[Result]] = {}
        for _, results in self.by_clause():
            for result in results:
                if result.cause:
                    found.setdefault(result.cause, []).append(result)
        return {cause: results for cause, results in found.items() if len(results) > 1}

    def by_clause(self) -> Iterator[tuple[Clause, list[Result]]]:
        """Yield each clause that has checks with its results, in the order of the contract.

        The checks of a clause are in pytest's order of collection, simple ones first.
        """
        place = {name: number for number, name in enumerate(self.planned)}
        everything = [*self.results, *self.left_out]
        everything.sort(key=lambda result: place.get(result.id, len(place)))
        for clause in CLAUSES.values():
            found = [result for result in everything if result.clause == clause.id]
            if found:
                yield clause, found

    def by_subject(self) -> Iterator[Run]:
        """Yield the results of each class of checks as a separate run, named after the class."""
        classes = {_class_of(result): result.subject for result in self.results}
        for name, subject in classes.items():
            results = [result for result in self.results if _class_of(result) == name]
            yield replace(
                self,
                backend=subject,
                results=results,
                planned={key: result for key, result in self.planned.items() if _class_of(result) == name},
                seconds=sum(result.seconds for result in results),
                broken=[],
                findings={why: text for why, text in self.findings.items() if why.startswith(f"{subject}: ")},
            )

    def versions(self) -> dict[str, str]:
        """Return the versions of everything involved."""
        versions = {
            "suite": f"stm-backends {stm_backends.__version__}",
            "contract": str(CONTRACT),
            "driver": self.distribution,
            "server": self.server,
            "Python": f"{platform.python_version()} on {platform.system()}",
        }
        return {name: version for name, version in versions.items() if version}

    def wanted(self) -> dict[str, list[Result]]:
        """Return the checks that were not asked for lack of a means, by the means' name.

        Checks about the network do not apply to a datastore within the process or its host.
        """
        found: dict[str, list[Result]] = {}
        for result in self.of("not asked"):
            names = _MEANS.findall(result.reason) if result.reason.startswith("needs ") else []
            if _NETWORK in names:
                names = [_NETWORK] if self.traits.get("reach", "network") == "network" else []
            elif result.reason.startswith(WOULD_WRITE):
                names = [WOULD_WRITE]
            for name in names:
                found.setdefault(name, []).append(result)
        return found

    @property
    def grade(self) -> int:
        """The extent of the checks that need a means, from 1 to 3; see `GRADES`."""
        wanted = self.wanted()
        return 1 if _NETWORK in wanted else 2 if wanted else 3

    def unasked(self) -> str:
        """Return a line on checks not asked for lack of means or time, and how to ask them; or `""`."""
        wanted, parts = self.wanted(), list[str]()
        if network := wanted.pop(_NETWORK, []):
            reasons = (result.reason.partition(": ")[2] for result in network)
            why = next((f" ({reason})" for reason in reasons if reason), "")
            parts.append(
                f"{counted(len(network))} with a proxy before the server{why}: a URL of one host and port "
                "without TLS, or `address` and `through` of a test class"
            )
        large = wanted.pop(WOULD_WRITE, [])
        if wanted:
            checks = {result.id: result for results in wanted.values() for result in results}
            names = ", ".join(f"`{name}`" for name in sorted(wanted))
            parts.append(f"{counted(len(checks))} with {names}: a test class")
        if large:
            parts.append(f"{counted(len(large))} of full records: a smaller `max_record_bytes` or the like")
        if slow := [result for result in self.of("not asked") if result.reason.startswith(TOO_SLOW)]:
            parts.append(f"{counted(len(slow))} for which this was too slow: a quicker machine or datastore")
        return f"not asked, and what would ask it: {'; '.join(parts)}" if parts else ""

    def extent(self) -> str:
        """Return how much of the contract was checked."""
        left_out, checks = self.left_out, self.checks
        reasons = {result.reason for result in left_out}
        if reasons and reasons <= {SLOW}:
            return f"a quick run that left out {len(left_out)} of {checks} checks"
        if UNREACHED in reasons:
            return f"a run that ended after {checks - len(left_out)} of {checks} checks"
        if reasons:
            return f"a selection of {checks - len(left_out)} of {checks} checks"
        return "a quick run" if self.quick else "a full run"

    def verdict(self) -> str:
        """Return the outcome as a sentence that claims no more than was checked."""
        counts = ", ".join(f"{len(self.of(outcome))} {outcome}" for outcome in OUTCOMES)
        who = ", ".join(self._tested()) or "what was tested"
        reasons = {result.reason for result in self.left_out}
        took = f"{self.seconds:.1f} s"
        if not self.results:
            return f"No check ran on {who}."
        if self.of("failed") or self.broken or self.findings:
            return f"{who} does not keep the contract: {counts} ({self.extent()}, {took})."
        if not self.ok:
            return f"{who} was not tested: {counts} ({self.extent()}, {took})."
        # For a selection, the selection itself says what was asked.
        grade = "" if UNSELECTED in reasons or UNREACHED in reasons else f", {self.graded()}"
        if not self.complete:
            return f"{who} passes {self.extent()}{grade}: {counts} ({took})."
        but = ", except for what it opts out of" if self.of("opted out") else ""
        return f"{who} keeps the contract{but}{grade}: {counts} ({self.extent()}, {took})."

    def graded(self) -> str:
        """Return the grade in words."""
        words = GRADES[self.grade].format(self._lacking())
        return f"grade {self.grade} of {len(GRADES)} ({words})"

    def _lacking(self) -> str:
        """Return the means that are missing, so that an author sees whether the datastore has them."""
        wanted = self.wanted()
        full = ["full records"] if wanted.pop(WOULD_WRITE, None) else []
        if wanted and all(is_installed(one.id) for one in self.results):
            return "the means of a test class"
        names = ", ".join([*(f"`{name}`" for name in sorted(wanted)), *full])
        return f"{names}: complete where the datastore has none of these" if wanted else names

    def _tested(self) -> list[str]:
        """Return the named backend, and the author's own classes that also ran."""
        if not self.backend:
            return [run.backend for run in self.by_subject()]
        own = {_class_of(one): one.subject for one in self.results if not is_installed(one.id)}
        beside = own.values() if any(is_installed(one.id) for one in self.results) else ()
        return [self.backend, *beside]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON objects."""
        return {
            "format": 1,
            "ok": self.ok,
            "verdict": self.verdict(),
            "grade": self.grade,
            "unasked": self.unasked(),
            "backend": self.backend,
            "versions": self.versions(),
            "traits": dict(self.traits),
            "quick": self.quick,
            "extent": self.extent(),
            "complete": self.complete,
            "checks": self.checks,
            "left_out": [result.id for result in self.left_out],
            "seconds": round(self.seconds, 3),
            "broken": self.broken,
            "findings": list(self.findings.values()),
            "clauses": [
                {
                    "id": clause.id,
                    "promise": clause.promise,
                    "outcome": standing(results),
                    "checks": [asdict(result) for result in results],
                }
                for clause, results in self.by_clause()
            ],
        }


def standing(results: Sequence[Result]) -> Standing:
    """Return the outcome of a clause: passed only if every check passed, failed if any failed."""
    outcomes = {result.outcome for result in results}
    for outcome in ("failed", "opted out"):
        if outcome in outcomes:
            return outcome
    if "passed" in outcomes:
        return "passed" if outcomes == {"passed"} else "partly"
    return "not asked" if "not asked" in outcomes else "left out"


def counted(count: int, which: str = "") -> str:
    """Return a number of checks in words."""
    return f"{count} {which}check{'' if count == 1 else 's'}"


def _class_of(result: Result) -> str:
    return result.id.partition("[")[0].rpartition("::")[0]
