"""Histories of a memory that is right, or that has one fault: to see whether the checker tells them apart."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.history import Event, Phase

ZONE: Final = 3
"""How many turns are recent; older ones are pending until a summary covers them."""

LENGTH: Final = 100.0
"""How long pods work, in seconds."""


@dataclass(slots=True)
class State:
    """What is stored of a conversation, as the memory keeps it: `log` has no turn that was dropped."""

    log: list[str] = field(default_factory=list[str])
    covered: int = 0
    dropped: int = 0
    waiting: int = 0
    forgotten: set[str] = field(default_factory=set[str])
    degraded: bool = False

    def add(self, turn: str) -> None:
        if turn not in self.log and turn not in self.forgotten:
            self.log.append(turn)

    def erase(self) -> None:
        self.log, self.covered, self.dropped, self.forgotten, self.degraded = [], 0, 0, set(), False
        self.waiting = 0

    def fold(self, chance: random.Random) -> None:
        before = self.covered
        self.covered = chance.randint(before, max(before, len(self.log) - ZONE))
        self.waiting = max(0, self.waiting - (self.covered - before))
        self.degraded = False

    def move(self, chance: random.Random) -> None:
        """Move some of the oldest pending turns to pages, as from a tail that is too long."""
        pending = len(self.log) - ZONE - self.covered - self.waiting
        if pending > 1:
            self.waiting += chance.randint(1, pending - 1)

    def drop(self, chance: random.Random) -> None:
        """Drop some of the oldest pending turns, except the last, as in a backlog that is full."""
        pending = len(self.log) - ZONE - self.covered
        if self.degraded and pending > 1:
            count = chance.randint(1, pending - 1)
            self.forgotten.update(self.log[self.covered : self.covered + count])
            del self.log[self.covered : self.covered + count]
            self.dropped += count

    def read(self) -> dict[str, Any]:
        kept = self.covered + self.waiting
        zone = max(kept, len(self.log) - ZONE)
        summary, pending = self.log[: self.covered], self.log[kept:zone]
        if self.degraded and pending:
            summary, pending = [], []
        health = "degraded" if self.degraded else "healthy"
        shown: dict[str, Any] = {"summary": [*summary], "pending": [*pending], "recent": self.log[zone:]}
        counts = {"dropped": self.dropped, "waiting": self.waiting, "foreign": 0}
        return {**shown, **counts, "health": health}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What happens in a simulated run."""

    erases: int = 0
    unknown_erases: bool = False
    degrades: bool = False
    moves: bool = False
    adds: int = 25
    reads: int = 25
    unknown_adds: bool = True
    again: float = 0.1
    """Which part of the turns that were acknowledged is added again later."""
    lasts: float = 3.0
    """How long an operation lasts, on average, in seconds; one of unknown outcome may be done much later."""


Fault = Callable[[State, "Simulation"], bool]
"""Does to a state what no memory may do, if it can at the time; returns whether it could."""


class Simulation:
    """One conversation under operations that overlap, each of which takes effect at a moment of its own."""

    def __init__(self, seed: int, kind: Kind, *, fault: Fault | None = None, name: str = "c") -> None:
        self.chance = random.Random(seed)
        self.kind = kind
        self.name = name
        self.state = State()
        self.events: list[Event] = []
        self.acked: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        self.seen: list[tuple[float, list[str]]] = []
        self.erased_by: list[tuple[float, set[str]]] = []
        self.now = 0.0
        self.faulty = False
        self._numbers = itertools.count()
        self._moments: list[tuple[float, int, Callable[[], object]]] = []
        self._fault = fault
        self._plan()
        self._run()

    def _at(self, moment: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._moments, (moment, next(self._numbers), act))

    def _event(self, t: float, op: int, phase: Phase, what: str, **data: Any) -> None:
        self.events.append(
            Event(t=t, process="p", op=op, phase=phase, what=what, conversation=self.name, data=data)
        )

    def _plan(self) -> None:
        chance, kind = self.chance, self.kind
        for number in range(kind.adds):
            self._plan_add(f"t{number}", chance.uniform(0, LENGTH))
        for _ in range(kind.reads):
            start = chance.uniform(0, LENGTH)
            self._plan_read(start, start + chance.expovariate(1 / kind.lasts))
        for _ in range(kind.erases):
            self._plan_erase(chance.uniform(0, LENGTH))
        if kind.degrades:
            self._event(0.0, -1, "info", "model", how="raises")
            self._event(1.9 * LENGTH, -1, "info", "model", how="well")
        for _ in range(8):
            self._at(chance.uniform(0, LENGTH), self._fold)
            if kind.degrades:
                self._at(chance.uniform(0, LENGTH), self._degrade)
                self._at(chance.uniform(0, LENGTH), lambda: self.state.drop(self.chance))
            if kind.moves:
                self._at(chance.uniform(0, LENGTH), lambda: self.state.move(self.chance))
        if self._fault is not None:
            # Where a turn can go for a good reason, the fault comes when that is over.
            calm = not kind.erases and not kind.degrades
            for _ in range(20):
                part = chance.uniform(0.5, 1.1) if calm else chance.uniform(1.1, 1.8)
                self._at(part * LENGTH, self._strike)
        self._at(1.9 * LENGTH, self._settle)
        self._at(2 * LENGTH, lambda: self._event(2 * LENGTH, -1, "info", "final"))
        self._plan_read(2 * LENGTH + 1, 2 * LENGTH + 2)

    def _degrade(self) -> None:
        if not self.state.degraded:
            self.state.degraded = True
            self._event(self.now, -1, "info", "health", old="retry", new="degraded")

    def _settle(self) -> None:
        self.state.degraded = False
        self.state.covered, self.state.waiting = self.state.covered + self.state.waiting, 0

    def _fold(self) -> None:
        if self.state.degraded:
            self._event(self.now, -1, "info", "health", old="degraded", new="healthy")
        self.state.fold(self.chance)

    def _erase(self) -> None:
        self.state.erase()
        self.faulty = False

    def _strike(self) -> None:
        if not self.faulty and self._fault is not None:
            self.faulty = self._fault(self.state, self)

    def _plan_add(self, turn: str, start: float) -> None:
        chance, kind, op = self.chance, self.kind, next(self._numbers)
        end = start + chance.expovariate(1 / kind.lasts)
        phase = chance.choices(("ok", "unknown", "fail"), (8, 2 * kind.unknown_adds, 1))[0]
        self.begun[turn] = min(start, self.begun.get(turn, start))
        self._event(start, op, "invoke", "add", turn=turn)
        add = lambda: self.state.add(turn)  # noqa: E731 -- what happens at a moment
        if phase == "ok":
            # An erasure of unknown outcome between two attempts is the case that the checker leaves out.
            attempts = 1 if kind.unknown_erases else chance.choice((1, 1, 2))
            for _ in range(attempts):
                self._at(chance.uniform(start, end), add)
            self._at(end, lambda: self.acked.setdefault(turn, end))
            if kind.again and chance.random() < kind.again:
                self._plan_add(turn, end + chance.expovariate(0.05))
        elif phase == "unknown":
            for _ in range(chance.randint(0, 2)):
                self._at(start + chance.expovariate(0.2 / kind.lasts), add)
            if chance.random() < 0.5:
                self._plan_add(turn, end + chance.expovariate(1))
        if phase != "unknown" or chance.random() < 0.5:
            self._event(end, op, phase, "add", turn=turn)

    def _plan_erase(self, start: float) -> None:
        chance, kind, op = self.chance, self.kind, next(self._numbers)
        end = start + chance.expovariate(1 / kind.lasts)
        phases: list[Phase] = ["ok", "unknown", "fail"]
        phase = chance.choice(phases) if kind.unknown_erases else "ok"
        self._event(start, op, "invoke", "erase", by="backend")
        if phase == "ok":
            self._at(chance.uniform(start, end), self._erase)
            self._at(start, lambda: self._note_before(op))
            self._at(end, lambda: self._note_erased(op))
        elif chance.random() < 0.7:
            late = start + chance.expovariate(0.2 / kind.lasts)
            self._at(late if phase == "unknown" else chance.uniform(start, end), self._erase)
        self._event(end, op, phase, "erase", by="backend")

    def _note_before(self, op: int) -> None:
        self._before = {**getattr(self, "_before", {}), op: set(self.acked)}

    def _note_erased(self, op: int) -> None:
        self.erased_by.append((self.now, self._before[op]))

    def _plan_read(self, start: float, end: float) -> None:
        op = next(self._numbers)
        self._event(start, op, "invoke", "read")

        def take() -> None:
            data = self.state.read()
            self.seen.append((end, [*data["summary"], *data["pending"], *data["recent"]]))
            self._event(end, op, "ok", "read", **data)

        self._at(self.chance.uniform(start, end), take)

    def _run(self) -> None:
        while self._moments:
            self.now, _, act = heapq.heappop(self._moments)
            act()
        self.events.sort(key=lambda event: event.t)


# Faults


def loses(state: State, run: Simulation) -> bool:
    """Lose a turn that was acknowledged."""
    sure = [turn for turn in state.log if turn in run.acked]
    if sure:
        place = state.log.index(run.chance.choice(sure))
        state.forgotten.add(state.log.pop(place))
        state.covered -= place < state.covered
    return bool(sure)


def repeats(state: State, run: Simulation) -> bool:
    """Store a turn twice."""
    if state.log:
        state.log.append(run.chance.choice(state.log))
    return bool(state.log)


def covers_twice(state: State, run: Simulation) -> bool:
    """Apply a summary twice."""
    if state.covered:
        state.log[: state.covered] *= 2
        state.covered *= 2
    return bool(state.covered)


def reorders(state: State, run: Simulation) -> bool:
    """Swap two turns that a read has shown in their order."""
    shown = [turn for turn in state.log if any(end < run.now and turn in ids for end, ids in run.seen)]
    for first, second in itertools.pairwise(state.log):
        if (
            first in shown
            and second in shown
            and any(end < run.now and first in ids and second in ids for end, ids in run.seen)
        ):
            at = state.log.index(first)
            state.log[at : at + 2] = second, first
            return True
    return False


def mixes_in(state: State, run: Simulation) -> bool:
    """Store a turn of another conversation."""
    state.log.insert(run.chance.randint(0, len(state.log)), "another's")
    return True


def brings_back(state: State, run: Simulation) -> bool:
    """Store again what was acknowledged before an acknowledged erasure began."""
    old = [turn for _, turns in run.erased_by for turn in sorted(turns) if turn not in state.log]
    if old:
        state.log.insert(run.chance.randint(0, len(state.log)), run.chance.choice(old))
    return bool(old)


def forgets_all(state: State, run: Simulation) -> bool:
    """Begin again without an erasure."""
    sure = any(turn in run.acked for turn in state.log)
    if sure:
        state.erase()
    return sure


def keeps_dropping(state: State, run: Simulation) -> bool:
    """Drop a turn and do not count it."""
    before = state.dropped
    state.drop(run.chance)
    gone = state.dropped > before
    state.dropped = before
    return gone
