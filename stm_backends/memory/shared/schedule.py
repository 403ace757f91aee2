"""When the background of a conversation acts: a plan, a task only while it is carried out, else a timer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Final

from stm_backends.memory.tasks import Background

TICK_S: Final = 0.001
"""The shortest wait: timers may fire a little early."""

WAITING_KEPT: Final = 10_000
"""So many conversations of a backend may wait for their time. Past that, those touched longest ago are let
go, until a call or another process sees to them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """When the background acts next, and how.

    `at` is on the event loop's clock. `look` loads first, to see whether anything is due at all; otherwise
    the lease is taken at once. `calls` says that a summarizer call is expected, which takes a slot. A `firm`
    plan is not brought forward: another process holds the lease, or the datastore has failed.
    """

    at: float
    look: bool = True
    calls: bool = False
    firm: bool = False


class Waiting:
    """The conversations of a backend that wait for their time: a timer each, no task, and not too many."""

    def __init__(self, most: int = WAITING_KEPT) -> None:
        self._most = most
        self._timers: OrderedDict[Planned, asyncio.TimerHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timers)

    def wait(self, planned: Planned, until: float) -> None:
        """Wake a background at this time of the running loop, and not before."""
        self.end(planned)
        self._timers[planned] = asyncio.get_running_loop().call_at(until, planned.wake)
        if len(self._timers) > self._most:
            next(iter(self._timers)).rest()

    def end(self, planned: Planned) -> None:
        """Do not wake it any more."""
        timer = self._timers.pop(planned, None)
        if timer is not None:
            timer.cancel()


class Planned:
    """Carries out one plan after another, in a task while one is due; until then it has only a timer."""

    def __init__(self, waiting: Waiting) -> None:
        self.background = Background(self)
        self.closing = False
        self._waiting = waiting
        self._plan: Plan | None = None
        self._worker: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Future[None]] = set()

    async def _carry_out(self, plan: Plan) -> Plan | None:
        """Take one step. Returns the plan for the next, `None` if there is none in sight."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether anything is under way or planned."""
        return bool(self.background) or self._plan is not None

    def abandon(self) -> None:
        """End what runs without waiting for it."""
        self.rest()
        if self._worker is not None and not self._worker.get_loop().is_closed():
            self._worker.cancel()

    @contextlib.contextmanager
    def change(self) -> Generator[asyncio.Future[None]]:
        """Give what is done when the background has taken its next step, or ends."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)
        try:
            yield change
        finally:
            self._changes.discard(change)

    def _tell_change(self) -> None:
        for change in tuple(self._changes):
            if not change.done() and not change.get_loop().is_closed():
                change.set_result(None)

    @property
    def _running(self) -> bool:
        worker = self._worker
        return worker is not None and not worker.done() and worker.get_loop() is asyncio.get_running_loop()

    def _want(self, plan: Plan) -> None:
        """Carry out a plan, unless another comes before it."""
        if self.closing:
            return
        current = self._plan
        if current is None or (plan.at < current.at and not current.firm):
            # What runs may just be doing it.
            self._plan = replace(plan, look=True, calls=False) if self._running else plan
        self._arm()

    def _arm(self) -> None:
        """See to it that the plan is carried out when its time comes."""
        plan = self._plan
        if plan is not None and not self._running:
            if plan.at <= now():
                self.wake()
            else:
                self._waiting.wait(self, plan.at)

    def wake(self) -> None:
        """Carry out the plan now."""
        self._waiting.end(self)
        self._worker = self.background.start(self._work(), name="stm-memory")

    def rest(self) -> None:
        """Plan nothing; the next call that sees work does."""
        self._waiting.end(self)
        self._plan = None

    async def _work(self) -> None:
        """Carry out one plan after another until none is due."""
        task, due = asyncio.current_task(), True
        try:
            while not self.closing and due and (plan := self._plan) is not None:
                self._plan = None
                following = await self._carry_out(plan)
                other = self._plan
                if following is not None and (following.firm or other is None or following.at < other.at):
                    self._plan = following
                due = self._plan is not None and self._plan.at <= now()
                self._tell_change()
        except BaseException:
            self._plan = None
            raise
        finally:
            if self._worker is task:
                self._worker = None
                self._tell_change()
                if not self.closing:
                    self._arm()


def now() -> float:
    """Return the time of the running event loop, by which plans are made."""
    return asyncio.get_running_loop().time()
