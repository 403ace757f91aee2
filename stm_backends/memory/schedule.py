"""Schedules the background of a conversation: it has a task only while it carries out a plan.

A plan waits for its time, and then for a place among a few tasks, so the number of tasks does not depend on
the number of conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Final

from stm_backends.handed_in import Report, ignore
from stm_backends.memory.queues import MAX_WAITING, FairQueue
from stm_backends.memory.tasks import Background

TICK_S: Final = 0.001
"""The shortest wait: timers may fire a little early."""

STEPS: Final = 32
"""Maximum number of conversations of a backend that are looked at or trimmed at once, besides summarizing."""

MAX_SUMMARIES: Final = 8
"""The default number of summarizer calls in flight."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The time and the manner of the background's next action.

    `at` is on the event loop's clock. With `look`, the record is loaded first, because other processes may
    have changed it since; otherwise what this process has seen decides. A plan that `summarizes` waits for
    a place among the summarizer calls. A `firm` plan is not brought forward: another process holds the lease,
    races were lost, or the datastore has failed.
    """

    at: float
    look: bool = True
    summarizes: bool = False
    firm: bool = False


class Timers:
    """The timers of the conversations that wait: at most `most`, and no tasks.

    Beyond that, the least recently used are dropped; a later call, or another process, resumes their work.
    """

    # Not `Bounded`, which is a module of the drivers: the memory in one process does not import them.

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._timers: OrderedDict[PlannedWork, asyncio.TimerHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timers)

    def wait(self, planned: PlannedWork, until: float) -> None:
        """Wake a background at this time of the running loop."""
        self.end(planned)
        self._timers[planned] = asyncio.get_running_loop().call_at(until, planned.wake)
        if len(self._timers) > self._most:
            next(iter(self._timers)).cancel_plan()

    def end(self, planned: PlannedWork) -> None:
        """Cancel the timer of a background."""
        timer = self._timers.pop(planned, None)
        if timer is not None:
            timer.cancel()


class Schedule:
    """The waiting of a process's backgrounds: for a time, a place among `steps`, or one among `calls`."""

    def __init__(self, max_summaries: int = MAX_SUMMARIES) -> None:
        self.timers = Timers()
        # A step that finds a summarizer call to be allowed makes it.
        self.steps = FairQueue(STEPS + max_summaries)
        self.calls = FairQueue(max_summaries)
        # Nothing begins while it is set: a waiting call of `flush` would take a place that closing frees.
        self.closed = False


class PlannedWork:
    """Carries out one plan after another, each in a task once it is due and has a place."""

    def __init__(self, tenant: str, schedule: Schedule, failed: Report = ignore) -> None:
        self.tenant = tenant
        self._schedule = schedule
        self._failed = failed
        self.start_over()

    def start_over(self) -> None:
        """Reset: plans and work of an event loop that has ended are forgotten."""
        self.background = Background(self, failed=self._failed)
        self._closing = False
        self.cancel_plan()
        self._worker: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Future[None]] = set()

    async def _carry_out(self, plan: Plan) -> Plan | None:
        """Take one step. Returns the plan for the next step, or `None` if none is planned."""
        raise NotImplementedError

    @property
    def closing(self) -> bool:
        """True while nothing may begin: this is being closed, or its schedule is closed."""
        return self._closing or self._schedule.closed

    @property
    def busy(self) -> bool:
        """True if anything is running or planned."""
        return bool(self.background) or self._plan is not None

    def abandon(self) -> None:
        """Stop what is running without waiting for it."""
        self.cancel_plan()
        if self._worker is not None and not self._worker.get_loop().is_closed():
            self._worker.cancel()

    @contextlib.contextmanager
    def change(self) -> Generator[asyncio.Future[None]]:
        """Give a future that is done when the background has taken its next step, or has ended."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)
        try:
            yield change
        finally:
            self._changes.discard(change)

    def _notify(self) -> None:
        for change in tuple(self._changes):
            if not change.done() and not change.get_loop().is_closed():
                change.set_result(None)

    @property
    def _running(self) -> bool:
        worker = self._worker
        return worker is not None and not worker.done() and worker.get_loop() is asyncio.get_running_loop()

    def _propose(self, plan: Plan) -> None:
        """Carry out a plan, unless an earlier one exists."""
        if self.closing:
            return
        current = self._plan
        if current is None or (plan.at < current.at and not current.firm):
            self._plan = plan
        self._arm()

    def _arm(self) -> None:
        """Let the plan wait for its time, or for a place if it is due."""
        plan = self._plan
        if plan is not None and not self._running:
            if plan.at <= now():
                self.wake()
            else:
                self._schedule.timers.wait(self, plan.at)

    def wake(self) -> None:
        """Carry out the plan as soon as there is a place."""
        self._schedule.timers.end(self)
        plan = self._plan
        if plan is not None:
            queue = self._schedule.calls if plan.summarizes else self._schedule.steps
            if queue.enter(self) and not plan.look:
                # Other processes may act until then.
                self._plan = replace(plan, look=True)

    def start(self) -> asyncio.Task[None]:
        """Carry out the plan now."""
        plan, self._plan = self._plan or Plan(now()), None
        task = self._worker = self.background.start(self._work(plan), name="stm-memory")
        task.add_done_callback(self._ended)
        return task

    def cancel_plan(self) -> None:
        """Drop the plan; the next call that sees work makes a new one."""
        self._schedule.timers.end(self)
        self._schedule.steps.withdraw(self)
        self._schedule.calls.withdraw(self)
        self._plan: Plan | None = None

    async def _work(self, plan: Plan) -> None:
        """Carry out a plan, and make the next plan."""
        try:
            following = await self._carry_out(plan)
        except BaseException:
            self._plan = None
            raise
        other = self._plan
        if following is not None and (following.firm or other is None or following.at < other.at):
            self._plan = following

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._plan = None
        if self._worker is task:
            self._worker = None
        self._notify()
        if not self.closing:
            self._arm()


def now() -> float:
    """Return the time of the running event loop, which plans use."""
    return asyncio.get_running_loop().time()
