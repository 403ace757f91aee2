"""A pod strikes itself, at a moment that only it can know: while an operation of a kind is under way.

An operation may take half a millisecond. A signal that another process sends when it hears of one comes late.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.chaos.history import Phase, Writer

KINDS: Final = ("add", "summarize", "replace", "read")
"""What a strike may be aimed at. `replace` is one write of a driver: it takes a lease, or folds turns."""

WEIGHTS: Final = (4, 3, 2, 2)
WEIGHTS_OF_LONG: Final = (1, 6, 2, 1)
"""A holder of a lease that is stopped for longer than it lasts finds another one when it wakes up."""

UNAIMED: Final = 0.25
"""The share of strikes that come at any moment."""

WITHIN_S: Final = 1.5
"""How long a pod waits for an operation of the kind; then it strikes all the same."""

LATE_S: Final = 0.5
"""So long after that it strikes no more: the nemesis does it soon after."""

UNKNOWN: Final = 4
ACKNOWLEDGED: Final = 2
"""How many turns of a pod that is killed are handed to others, beside those that it was adding."""

ANY_MOMENT_S: Final = 0.2
USUAL_S: Final = 0.003


def aimed(chance: random.Random, *, is_long: bool) -> str:
    """Draw what a strike is aimed at; `""` is nothing: it comes at any moment."""
    if chance.random() < UNAIMED:
        return ""
    (kind,) = chance.choices(KINDS, WEIGHTS_OF_LONG if is_long else WEIGHTS)
    return kind


class Watch(Writer):
    """Writes a history, knows what is under way, and how long each kind of operation usually takes."""

    def __init__(self, folder: Path, process: str) -> None:
        super().__init__(folder, process)
        self.under_way: dict[int, tuple[str, float]] = {}
        self._adding: dict[int, tuple[str, str]] = {}
        self._added: dict[Phase, deque[tuple[str, str]]] = {
            "unknown": deque(maxlen=UNKNOWN),
            "ok": deque(maxlen=ACKNOWLEDGED),
        }
        self.on_begin: Callable[[str], None] = lambda _: None
        self._took: dict[str, deque[float]] = {}
        self._unnoted = 0

    def invoke(self, what: str, conversation: str = "", **data: Any) -> int:
        op = super().invoke(what, conversation, **data)
        if what == "add":
            self._adding[op] = conversation, data["turn"]
        self._begin(op, what)
        return op

    def end(self, op: int, phase: Phase, what: str, conversation: str = "", **data: Any) -> None:
        # First, so that nothing is said to be under way whose end is noted.
        self.over(op)
        if (turn := self._adding.pop(op, None)) and phase in self._added:
            self._added[phase].append(turn)
        super().end(op, phase, what, conversation, **data)

    def begin(self, what: str) -> int:
        """Say that something begins that is not noted; returns its number, for `over`."""
        self._unnoted -= 1
        self._begin(self._unnoted, what)
        return self._unnoted

    def over(self, op: int) -> None:
        """Say that it has ended."""
        what, began = self.under_way.pop(op)
        self._took.setdefault(what, deque(maxlen=50)).append(time.monotonic() - began)

    def turns(self) -> list[tuple[str, str]]:
        """Return the conversations and the ids of turns that another process may add again.

        These are those that are being added, and the last of unknown outcome and that were acknowledged.
        """
        return [*dict.fromkeys((*self._adding.values(), *self._added["unknown"], *self._added["ok"]))]

    def usual(self, what: str) -> float:
        """Return the median of how long the last operations of this kind took, in seconds."""
        took = self._took.get(what)
        return statistics.median(took) if took else USUAL_S

    def _begin(self, op: int, what: str) -> None:
        self.under_way[op] = what, time.monotonic()
        self.on_begin(what)


class Striker:
    """Sends this process a signal while an operation of a kind is under way, and tells before what was.

    A timer interrupts the process at that moment, whatever it does.
    """

    def __init__(self, watch: Watch, tell: Callable[..., None]) -> None:
        self._watch = watch
        self._tell = tell
        self._aim: str | None = None
        self._signal, self._until, self._moment = signal.SIGSTOP, 0.0, 0.0
        watch.on_begin = self._begun
        signal.signal(signal.SIGALRM, self._strike)

    def arm(self, number: int, aim: str, moment: float, until: float) -> None:
        """Strike when such an operation has begun, at `moment` of its usual time; `until` then at the latest.

        `moment` is from 0 to 1. `until` is a time of the monotonic clock.
        """
        self._signal, self._until, self._moment = signal.Signals(number), until, moment
        self._aim = aim
        if any(what == aim for what, _ in self._watch.under_way.values()):
            self._begun(aim)
        else:
            _wait(until - time.monotonic() if aim else moment * ANY_MOMENT_S)

    def _begun(self, what: str) -> None:
        if what == self._aim:
            self._aim = ""
            _wait(self._moment * self._watch.usual(what))

    def _strike(self, *_: object) -> None:
        if self._aim is None:
            return
        self._aim = None
        if time.monotonic() < self._until + LATE_S:
            kinds = Counter(what for what, _ in self._watch.under_way.values())
            self._tell(struck=kinds, at=time.monotonic(), turns=self._watch.turns())
            os.kill(os.getpid(), self._signal)


def _wait(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def shown(kinds: Sequence[str]) -> Sequence[str]:
    """Return the kinds under way of which a strike is counted; `nothing` if there was none."""
    return [kind for kind in KINDS if kind in kinds] or ["others" if kinds else "nothing"]
