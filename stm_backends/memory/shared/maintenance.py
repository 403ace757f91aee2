"""The background work on a shared conversation: what is due, and when this process does it.

Every process that notices due work plans it, so any pod resumes the work of one that died. `due.next_step`
determines the due step, a `Plan` the time at which this process takes it, and `Writes` carries it out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Mapping
from typing import Final
from weakref import WeakSet

from stm_backends.errors import Corrupt, StmError, StorageError
from stm_backends.memory import log, policy
from stm_backends.memory.policy import CatchUp, Fold, Recover, Trim, Wait
from stm_backends.memory.schedule import TICK_S, Plan, Schedule, now
from stm_backends.memory.shared import due
from stm_backends.memory.shared.due import Compact, Due, Held, KeepTranscript, Mend, Move
from stm_backends.memory.shared.folds import AGAIN, LOST, Writes, attempt_of
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.room import RoomRequest
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.races import pause, pause_after
from stm_backends.telemetry.observer import Observer
from stm_backends.types import MemoryHealth

logger = logging.getLogger("stm_backends")

FIRST_POLL_S: Final = 0.2
LONGEST_POLL_S: Final = 5.0
"""Wait before the next look while another process holds the lease: doubling, with jitter."""

CLOCKS_APART_S: Final[Mapping[str, float]] = {"process": 600.0, "host": 600.0, "network": 86_400.0}
"""Maximum difference of two processes' clocks, in seconds, at which neither ends a lease of the other: by the
reach of the datastore. The processes of one host share a clock."""

JOB_S: Final = 60.0
"""Seconds that a worker spends on one conversation before others have their turn. A conversation is left
alone as long if a step has failed there for a reason other than the datastore or the summarizer."""

NOTED_AGAIN_S: Final = 60.0
"""Seconds after which a read notes overdue work for a worker once more. A process that was killed after its
turn has left no note."""

FAULTS_BEFORE_REST: Final = 3
"""Number of storage errors in a row that are retried. One more ends the background; the next call that sees
work starts it."""


class _FirstSeen:
    """The time at which this process first saw a value that other processes change."""

    __slots__ = ("_moment", "_value")

    def __init__(self) -> None:
        self._value: Hashable = None
        self._moment = 0.0

    def ago(self, value: Hashable) -> float:
        """Return how many seconds ago this value was seen first, if it has been the value since."""
        moment = now()
        if value != self._value:
            self._value, self._moment = value, moment
        return moment - self._moment + TICK_S


class Maintenance(Writes):
    """The background of one conversation in one process, shared by its memory objects there.

    `flush_waiters` has the callers that wait in `flush`: while there are any, fewer turns than
    `fold_batch_turns` are folded, too. `schedule` limits the work of all conversations that share it.
    """

    def __init__(
        self, shared: SharedConversation, tenant: str, schedule: Schedule, observer: Observer
    ) -> None:
        super().__init__(shared, tenant, schedule, observer)
        self.memories: WeakSet[object] = WeakSet()
        self._attempt, self._lease, self._edit = _FirstSeen(), _FirstSeen(), _FirstSeen()
        self.failures = 0
        self._owes_note = False

    def start_over(self) -> None:
        """Reset: plans and work of an event loop that has ended are forgotten."""
        super().start_over()
        self._held = False
        self._poll: Plan | None = None
        self._polls = self._faults = self._lost = 0
        self._noted_at = -math.inf
        self.flush_waiters: set[object] = set()

    async def close(self, *, timeout: float) -> None:
        """Stop the work, which may finish within `timeout` seconds, and release the lease."""
        self._closing = True
        self.cancel_plan()
        self._notify()
        try:
            await self.background.close(timeout=timeout)
        finally:
            self._closing = False

    # Due steps

    def next_step(self, snapshot: Snapshot) -> Due:
        """Return the step that is due, in portions that this datastore accepts."""
        snapshot = self.ready(snapshot)
        if self.elsewhere:
            return self._next_step(snapshot)
        step, transcript = self._next_step(snapshot), snapshot.body.transcript
        if transcript is not None and transcript.patches:
            # Whoever has made the edit is about to do so.
            left = self.shared.driver.traits.deadline - self._edit.ago((transcript.epoch, transcript.rev))
            return Mend() if left <= 0 else step or Wait(left)
        return step if snapshot.version == self._unmarked else due.or_mark(step, snapshot)

    def _next_step(self, snapshot: Snapshot) -> Due:
        shared, time = self.shared, self.shared.clock()
        body = snapshot.body
        step = due.next_step(
            self.config,
            snapshot,
            now=time,
            traits=shared.driver.traits,
            room=self.room.needed,
            batch=1 if self.flush_waiters else None,
            known_for=self._attempt.ago(attempt_of(body)) if body.attempts else 0.0,
        )
        if self.elsewhere:
            step = due.without_model(
                self.config, snapshot, step, traits=shared.driver.traits, room=self.room.needed
            )
        lease, ours = body.lease, shared.leased
        if lease is None or (ours is not None and ours.version == snapshot.version):
            return step
        # Not by the version: an older version of this library keeps the lease when it replaces the body.
        known_for, apart = self._lease.ago(lease), CLOCKS_APART_S[shared.driver.traits.reach]
        left = policy.lease_left(
            lease, now=time, known_for=known_for, clocks_apart=apart, overdue=body.overdue
        )
        overdue = lease != self._unnoted and policy.is_overdue(lease, body.overdue, now=time)
        return due.unless_held(step, self.next_move(snapshot), left, overdue=overdue)

    # When it is done

    async def after_append(self, length: int, units: int) -> None:
        """Plan, or note for a worker, the work that a tail of this length calls for.

        An entry of `units` turns or messages has been added.
        """
        if self.elsewhere:
            await self.note_after_append(length, units)
        else:
            self.schedule_after_append(length)

    def schedule_after_append(self, length: int) -> None:
        """Plan the work that a tail of this length calls for, without a load."""
        config, seen = self.config, self.shared.seen
        zone, health = config.budget.full_zone_turns, seen.body.health
        # The repeats of a tail that was folded since the last load are not known.
        count = length - zone - (seen.repeats if length > len(seen.tail) else 0)
        if config.strategy == "truncation":
            is_due = count > zone
        elif health is MemoryHealth.HEALTHY:
            is_due = count >= (1 if self.flush_waiters else config.fold_batch_turns)
        elif self._plan is None and not self._running:
            is_due = count > 0
        else:
            is_due = health is MemoryHealth.DEGRADED and count > max(config.recovery_backlog_limit, 1)
        if self.keeps_transcript and count > policy.longest_tail(config):
            is_due = True
            self.hurry()
        if is_due:
            self._propose(Plan(now(), look=not self.shared.current))

    def notice(self, snapshot: Snapshot) -> None:
        """Plan the step that a load shows to be due; while a step is running, check afterwards instead."""
        if self.elsewhere:
            self._note_overdue(snapshot)
        if not self._running:
            self.schedule(self.next_step(snapshot))
            return
        self._propose(Plan(now(), look=False))
        if self.next_move(self.ready(snapshot)) is not None:
            self.hurry()

    def schedule(self, step: Due) -> None:
        """Plan a step that a load has shown to be due."""
        plan = self._plan_for(step)
        if plan is not None:
            if isinstance(step, Move):
                self.hurry()
            self._propose(plan)

    def hurry(self) -> None:
        """Have turns moved to pages before a summary that this process or another waits for."""
        super().hurry()
        if self._plan is not None and self._plan is self._poll:
            self.cancel_plan()

    # What is left to workers, and what they do

    async def work_through(self, *, everything: bool = False, timeout: float = JOB_S) -> float | None:
        """Do what is due now, for a worker; returns after how many seconds more is due, `None` if nothing is.

        With `everything`, fewer turns than `fold_batch_turns` are folded, too. Returns 0 if more is due after
        `timeout` seconds. Raises `StorageError` if the conversation cannot be read.
        """
        loop, failures, this = asyncio.get_running_loop(), self.failures, object()
        until = loop.time() + timeout
        if everything:
            self.flush_waiters.add(this)
        try:
            while True:
                # Created before the load, so that no step after the load is missed.
                with self.change() as change:
                    step = self.next_step(await self.shared.load("work"))
                    match step:
                        case None:
                            return None
                        case Wait(seconds):
                            if not self.memories:
                                # The note of the retry brings it back.
                                self.cancel_plan()
                            return seconds
                        case Held(seconds):
                            # Notes that the lease is overdue, and looks again by itself.
                            self.schedule(step)
                            return min(seconds, LONGEST_POLL_S)
                        case _:
                            pass
                    if self.failures > failures:
                        return JOB_S
                    remaining = until - loop.time()
                    if remaining <= 0 or self.closing:
                        return 0.0
                    self.schedule(step)
                    await asyncio.wait({change}, timeout=remaining)
        finally:
            self.flush_waiters.discard(this)

    async def note_after_append(self, length: int, units: int) -> None:
        """Note the conversation for a worker if an entry of so many turns or messages makes work due.

        `length` is that of the tail with the entry. Raises no error: the turn is stored.
        """
        config, seen = self.config, self.shared.seen
        if self.shared.current:
            after = len(seen.split(config).pending)
        else:
            # As in `schedule_after_append`. Each length is returned to one process only.
            repeats = seen.repeats if length > len(seen.tail) else 0
            after, units = length - config.budget.full_zone_turns - repeats, 1
        if self._owes_note or policy.falls_due(config, after - units, after):
            await self.note()

    async def note(self, *, everything: bool = False) -> None:
        """Note for a worker that there is work. Raises no error: what cannot be stored is owed.

        With `everything`, fewer turns than `fold_batch_turns` are summarized, too.
        """
        if self.telling is None:
            return
        self._owes_note, self._noted_at = True, now()
        try:
            await self.telling(self.config, everything)
        except (StmError, TimeoutError) as error:
            self._observer.work("lost", 1)
            logger.warning(
                "could not note work for a worker (%s); a later turn or read does (conversation %s)",
                type(error).__name__,
                self.shared.log_name,
            )
        else:
            self._owes_note = False
            self._observer.work("noted", 1)

    def _note_overdue(self, snapshot: Snapshot) -> None:
        """Note in the background what has been due for long, or what this process owes."""
        time, lease = self.shared.clock(), snapshot.body.lease
        is_held = lease is not None and time < lease.at + lease.ttl
        pending = snapshot.split(self.config).pending
        since = policy.due_since(self.config, snapshot.body, pending, now=time)
        overdue = since is not None and not is_held and time - since >= NOTED_AGAIN_S
        if (overdue or self._owes_note) and now() - self._noted_at >= NOTED_AGAIN_S and not self.closing:
            self.background.start(self.note(), name="stm-note")

    async def make_room(self, request: RoomRequest, *, within: float) -> bool:
        """Make room in a full record; returns whether a retry of the append may succeed.

        Waits for one step of the background, at most `within` seconds.
        """
        if self.closing:
            return False
        asked = self.room.ask(request)
        if self.keeps_transcript:
            self.hurry()
        with self.change() as change:
            self._propose(Plan(now()))
            if self._plan is not None or self._running:
                await asyncio.wait({change}, timeout=within)
        return self.room.may_help(request, since=asked)

    async def _carry_out(self, plan: Plan) -> Plan | None:
        """Take one step. Returns the plan for the next step, or `None`."""
        try:
            with self._observer.background():
                return await self._advance_unless_held(plan)
        except Corrupt as error:
            logger.error("the memory's background stopped: %s (conversation %s)", error, self.shared.log_name)
            self.failures += 1
        except StorageError as error:
            logger.warning(
                "background work on a memory failed: %s (conversation %s)", error, self.shared.log_name
            )
            self._faults += 1
            if self._faults <= FAULTS_BEFORE_REST:
                return Plan(now() + 2.0**self._faults, firm=True)
        except Exception as error:  # noqa: BLE001 -- a mistake of the library must be logged
            log.background_stopped(self.shared.log_name, error)
            self.failures += 1
        self._plan, self._faults = None, 0
        self.room.refuse()
        return None

    async def _advance_unless_held(self, plan: Plan) -> Plan | None:
        """Take one step, or plan another look if another process holds the lease, which is not an error."""
        if self._held and self.room.needed:
            # The holder may have made room, so the waiting appends are retried first.
            self._held = False
            return Plan(now() + FIRST_POLL_S)
        step, following = await self._advance(plan)
        if isinstance(step, Fold | CatchUp) and following is not None and following.summarizes:
            # Nothing was done: it waits for its call.
            return following
        self._faults, self._held = 0, isinstance(step, Held)
        self._polls = min(self._polls + 1, 10) if self._held else 0
        self._lost = self._lost + 1 if following is LOST else 0
        if following is LOST:
            return Plan(now() + pause_after(self._lost), firm=True)
        if following is AGAIN and self.shared.current:
            # Plans made during the step are seen by now.
            self._plan = self._plan if self._plan is not None and self._plan.look else None
            following = self._plan_for(self.next_step(self.shared.seen))
        return following

    async def _advance(self, plan: Plan) -> tuple[Due, Plan | None]:
        """Take the step that is due; returns it and the plan for the next one."""
        shared = self.shared
        snapshot = self.ready(await self._load() if plan.look or not shared.current else shared.seen)
        step = self.next_step(snapshot)
        match step:
            case Fold():
                if plan.summarizes or self._schedule.calls.take(self.tenant):
                    return step, await self.fold(snapshot.unleased(), step)
            case CatchUp(gap):
                if plan.summarizes or self._schedule.calls.take(self.tenant):
                    return step, await self.catch_up(snapshot.unleased(), gap)
            case Trim():
                return step, await self.trim(snapshot.unleased(), step)
            case Move(count):
                return step, await self.trim(snapshot, Trim(count, lost=True))
            case Compact():
                return step, await self.compact(snapshot.unleased(), step)
            case KeepTranscript() | Mend():
                write = self.mark if isinstance(step, KeepTranscript) else self.mend
                return step, await write(snapshot)
            case Recover():
                return step, await self.recover(snapshot.unleased())
            case None | Wait():
                self.room.refuse()
            case Held(seconds, overdue=True):
                await self.note_overdue(snapshot)
                step = Held(seconds)
            case _:
                pass
        return step, self._plan_for(step)

    def _plan_for(self, step: Due) -> Plan | None:
        """Return the plan for a step."""
        match step:
            case None:
                return None
            case Wait(seconds):
                return Plan(now() + max(seconds, TICK_S))
            case Held(overdue=True):
                # This process may end before the next look.
                return Plan(now(), look=False)
            case Held(seconds):
                # The holder sees the turns of this process, too, so an earlier look would find nothing to do.
                poll = pause(FIRST_POLL_S, self._polls, LONGEST_POLL_S)
                self._poll = Plan(now() + min(poll, seconds + TICK_S), firm=True)
                return self._poll
            case _:
                return Plan(now(), look=False, summarizes=isinstance(step, Fold | CatchUp))
