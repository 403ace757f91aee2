"""What the transcripts of a run show: every turn once, as it was, in the order in which models were shown it.

A read of a whole conversation takes many requests, while pods add turns and fold. So it is compared with
later reads: what it shows is the beginning of what each later one shows.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos.conversations import Violation
from tests.chaos.history import Event

_TIMED: Final = 3
"""The ids of turns of a soak have more parts: there, conversations expire and are purged by their age."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A read of a transcript that was answered."""

    invoked: float
    end: Event

    @property
    def ids(self) -> Sequence[str]:
        """The turns, oldest first."""
        return self.end.data["ids"]


def judged(events: Iterable[Event]) -> tuple[list[Violation], dict[str, float]]:
    """Return what no correct transcript shows, and how much was looked at."""
    begun: dict[tuple[str, int], Event] = {}
    wholes: dict[str, list[Whole]] = defaultdict(list)
    added: dict[str, dict[str, Event]] = defaultdict(dict)
    shown: dict[str, Event] = {}
    changed, doubts = set[str](), list[tuple[float, float]]()
    for event in events:
        name, data = event.conversation, event.data
        if event.phase == "invoke":
            begun[event.process, event.op] = event
        if event.what == "erase" or (event.what == "people" and data.get("kind") == "import"):
            # An import brings no transcript.
            changed.add(name)
        elif event.what == "doubt":
            doubts.append((data["begin"], data["end"]))
        elif event.phase != "ok" or (began := begun.get((event.process, event.op))) is None:
            continue
        elif event.what == "transcript":
            wholes[name].append(Whole(began.t, event))
        elif event.what == "add":
            added[name].setdefault(began.data["turn"], event)
        elif event.what == "read" and event.process == "final":
            shown[name] = event
    violations = list[Violation]()
    for name, reads in wholes.items():
        violations += _each(name, reads)
        if name not in changed and not any(turn.count("/") >= _TIMED for turn in reads[-1].ids):
            sure = [one for one in reads if not any(a < one.end.t and one.invoked < b for a, b in doubts)]
            violations += _lost(name, sure, added[name])
            violations += _together(name, sure)
            violations += _final(name, sure, shown.get(name))
    figures: dict[str, float] = {
        "transcripts read": sum(map(len, wholes.values())),
        "transcripts compared": len(wholes.keys() - changed),
        "turns in transcripts": sum(len(reads[-1].ids) for reads in wholes.values()),
    }
    return violations, figures


def _each(name: str, reads: Iterable[Whole]) -> Iterable[Violation]:
    for one in reads:
        if twice := [turn for turn, count in Counter(one.ids).items() if count > 1]:
            yield Violation("transcript", name, f"{twice[0]} is there twice", (one.end,))
        if one.end.data["foreign"]:
            yield Violation("transcript", name, "a turn is altered, or of another conversation", (one.end,))


def _lost(name: str, reads: Iterable[Whole], added: dict[str, Event]) -> Iterable[Violation]:
    for one in reads:
        has = set(one.ids)
        for turn, event in added.items():
            if event.t < one.invoked and turn not in has:
                yield Violation(
                    "transcript", name, f"{turn} was acknowledged, and is missing", (event, one.end)
                )


def _together(name: str, reads: Sequence[Whole]) -> Iterable[Violation]:
    for one, later in itertools.pairwise(reads):
        # Reads may overlap: the shorter one is the beginning of the longer one.
        length = min(len(one.ids), len(later.ids))
        if one.ids[:length] != later.ids[:length]:
            yield Violation("transcript", name, "two reads show different turns", (one.end, later.end))


def _final(name: str, reads: Sequence[Whole], shown: Event | None) -> Iterable[Violation]:
    """Compare the last read with the turns that the model was shown at the end, summarized or in full."""
    if shown is None or not reads or reads[-1].end.process != "final":
        return
    model = [*shown.data["summary"], *shown.data["pending"], *shown.data["recent"]]
    if shown.data["health"] == "healthy" and list(reads[-1].ids) != model:
        what = "it has other turns than the model was shown, or another order"
        yield Violation("transcript", name, what, (shown, reads[-1].end))
