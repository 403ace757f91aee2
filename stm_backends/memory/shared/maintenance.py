"""The background work on a shared conversation: folds, trims, compactions and recoveries.

One pod at a time does it, under a lease. Every process that notices due work plans it, so any pod resumes
the work of one that died. `due.next_step` says what is due; a `Plan` says when this process acts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias
from weakref import WeakSet

from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt, StorageError
from stm_backends.memory import log, policy
from stm_backends.memory.policy import Fold, Recover, Trim, Wait
from stm_backends.memory.shared import due
from stm_backends.memory.shared.concurrency import FairConcurrencyLimit
from stm_backends.memory.shared.due import Compact, Due
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.room import Room, RoomRequest
from stm_backends.memory.shared.schedule import TICK_S, Plan, PlannedWork, Timers, now
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.view import cut_summary
from stm_backends.records.body import Body
from stm_backends.records.lease import Lease
from stm_backends.telemetry.observer import Observer
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig

logger = logging.getLogger("stm_backends")

FIRST_POLL_S: Final = 0.2
LONGEST_POLL_S: Final = 5.0
"""How long to wait before the next look while another process holds the lease: doubling, with jitter."""

FAULTS_BEFORE_REST: Final = 3
"""How many storage errors in a row are retried. One more ends the background; the next call that sees work
starts it."""

RACES: Final = 10
"""How many lost races end the attempt to store a failure; the next attempt stores it then."""


@dataclass(slots=True)
class Stats:
    """Counters of what was done. `lost_races` counts summaries and trims that came too late."""

    appended: int = 0
    summaries: int = 0
    folded: int = 0
    trimmed: int = 0
    dropped: int = 0
    lost_races: int = 0
    summarizer_calls: int = 0
    summarizer_failures: int = 0

    def since(self, before: Stats) -> Stats:
        """Return what was done after `before`."""
        return Stats(**{name: getattr(self, name) - getattr(before, name) for name in self.__match_args__})


class Maintenance(PlannedWork):
    """The background of one conversation in one process, shared by its memory objects there.

    `flush_waiters` counts the callers that wait in `flush`: while there are any, fewer turns than
    `fold_batch_turns` are folded, too. `slots` limits the summarizer calls of all conversations that share
    it.
    """

    def __init__(
        self,
        shared: SharedConversation,
        lease_key: Key,
        tenant: str,
        slots: FairConcurrencyLimit,
        timers: Timers,
        observer: Observer,
    ) -> None:
        super().__init__(timers)
        self.shared = shared
        self.memories: WeakSet[object] = WeakSet()
        self.config = ShortTermMemoryConfig()
        self._summarizer = policy.summarizer_for(self.config, None)
        self._lease_key = lease_key
        self._tenant = tenant
        self._slots = slots
        self._observer = observer
        self._keep_ids_for = 10 * shared.driver.traits.deadline
        self._queued = False
        self._attempt: tuple[_Attempt, float] | None = None
        self._unstored: tuple[_Attempt, Exception] | None = None
        self._polls = self._faults = 0
        self.room = Room()
        self._held = False
        self.flush_waiters = 0
        self.failures = 0
        self.stats = Stats()

    def use(self, config: ShortTermMemoryConfig, summarizer: Callable[..., object]) -> None:
        """Use these settings from now on, unless they store nothing; the newest memory object wins."""
        if config.strategy != "none":
            self.config, self._summarizer = config, summarizer

    @property
    def lease_ttl(self) -> float:
        """The summarizer's timeout in seconds, plus time to load, store and release."""
        return self.config.summarizer_timeout_s + 3 * self.shared.driver.traits.deadline

    async def close(self, *, timeout: float) -> None:
        """Stop the work, which may finish within `timeout` seconds, and release the lease."""
        self.closing = True
        self.cancel_plan()
        if self._queued and self._worker is not None:
            # It has not begun a summarizer call.
            self._worker.cancel()
        self._notify()
        try:
            await self.background.close(timeout=timeout)
        finally:
            self.closing = False

    # What is due

    def next_step(self, snapshot: Snapshot) -> Due:
        """Say what is due, in portions that this datastore takes."""
        return due.next_step(
            self.config,
            snapshot,
            now=self.shared.clock(),
            max_drop=self.shared.driver.traits.max_drop,
            room=self.room.needed,
            batch=1 if self.flush_waiters else None,
            known_for=self._known_for(snapshot.body),
        )

    def _known_for(self, body: Body) -> float:
        """Return how many seconds ago this process first saw the attempt that a body records."""
        attempt, moment = _attempt(body), now()
        if self._attempt is None or self._attempt[0] != attempt:
            self._attempt = attempt, moment
        return moment - self._attempt[1] + TICK_S

    @property
    def _summarizes(self) -> bool:
        return self.config.strategy == "rolling_summary" and self.config.budget.summary_max_tokens > 0

    # When it is done

    def schedule_after_append(self, length: int) -> None:
        """Plan the work that a tail of this length calls for, without a load."""
        config, seen = self.config, self.shared.seen
        zone, health = config.budget.full_zone_turns, seen.body.health
        # The repeats of a tail that was folded since the last load are not known.
        count = length - zone - (seen.repeats if length > len(seen.entries) else 0)
        if config.strategy == "truncation":
            is_due = count > zone
        elif health is MemoryHealth.HEALTHY:
            is_due = count >= (1 if self.flush_waiters else config.fold_batch_turns)
        elif self._plan is None and not self._running:
            is_due = count > 0
        else:
            is_due = health is MemoryHealth.DEGRADED and count > max(config.recovery_backlog_limit, 1)
        if is_due:
            calls = self._summarizes and health is MemoryHealth.HEALTHY
            self._propose(Plan(now(), look=not calls, calls=calls))

    def schedule(self, step: Due) -> None:
        """Plan a step that a load has shown to be due."""
        plan = _plan_for(step)
        if plan is not None:
            self._propose(plan)

    async def make_room(self, request: RoomRequest, *, within: float) -> bool:
        """Make room in a full record; returns whether a retry of the append may succeed.

        Waits for one step of the background, at most `within` seconds.
        """
        if self.closing:
            return False
        asked = self.room.ask(request)
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
            logger.error("the memory's background stopped: %s", error)
            self.failures += 1
        except StorageError as error:
            logger.warning("background work on a memory failed: %s", error)
            self._faults += 1
            if self._faults <= FAULTS_BEFORE_REST:
                return Plan(now() + 2.0**self._faults, firm=True)
        except Exception as error:
            # For example of a user's token estimator; its message may quote the conversation.
            logger.error("the memory's background stopped: %s", type(error).__name__)
            logger.debug("the background's traceback", exc_info=True)
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
        try:
            following = await self._advance(plan)
        except _LeaseHeld:
            self._held = True
            # The holder sees the turns of this process, too, so an earlier look would find nothing to do.
            wait = min(FIRST_POLL_S * 2**self._polls, LONGEST_POLL_S) * random.uniform(0.5, 1.0)
            self._polls = min(self._polls + 1, 10)
            return Plan(now() + wait, firm=True)
        self._polls, self._faults, self._held = 0, 0, False
        return following

    async def _advance(self, plan: Plan) -> Plan | None:
        calls = plan.calls
        if plan.look:
            step = self.next_step(await self.shared.load("background"))
            if step is None or isinstance(step, Wait):
                return self._nothing_to_do(step)
            calls = isinstance(step, Fold)
        async with self._slot() if calls else contextlib.nullcontext(), self._leased():
            # Loaded under the lease: its last holder may have stored a summary since the previous load.
            snapshot = await self.shared.load("background")
            step = self.next_step(snapshot)
            match step:
                case Fold():
                    # A call needs a slot, and the lease is not held while waiting for one.
                    return await self._fold(snapshot, step) if calls else _plan_for(step)
                case Trim():
                    return await self._trim(snapshot, step)
                case Compact():
                    return await self._compact(snapshot, step)
                case Recover():
                    return await self._recover(snapshot)
                case _:
                    return self._nothing_to_do(step)

    def _nothing_to_do(self, step: Wait | None) -> Plan | None:
        self.room.refuse()
        return _plan_for(step)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        self._queued = True
        try:
            async with self._slots.slot(self._tenant):
                self._queued = False
                yield
        finally:
            self._queued = False

    @contextlib.asynccontextmanager
    async def _leased(self) -> AsyncGenerator[None]:
        lease = Lease(
            self.shared.driver,
            self._lease_key,
            ttl=self.lease_ttl,
            content=self.shared.codec.seal("lease", {}),
        )
        try:
            if not await lease.acquire():
                raise _LeaseHeld
            yield
        finally:
            try:
                await lease.release()
            except StorageError as error:
                logger.warning("could not release a lease, it will expire: %s", error)

    async def _replace(self, snapshot: Snapshot, body: Body, *, drop: int) -> str | None:
        version = await self.shared.replace(snapshot, body, drop=drop)
        if version is None:
            self.stats.lost_races += 1
            self._observer.race_lost()
        elif drop:
            self.room.made()
        return version

    async def _trim(self, snapshot: Snapshot, trim: Trim) -> Plan | None:
        gone = snapshot.turns[: trim.count]
        drop, full = snapshot.entries_of(len(gone)), self.room.needed > 0
        body = policy.after_trim(
            snapshot.body,
            trim,
            gone,
            now=self.shared.clock(),
            keep_for=self._keep_ids_for,
            copies=snapshot.copies(drop),
        )
        if await self._replace(snapshot, body, drop=drop) is None:
            return Plan(now())
        self.stats.trimmed += len(gone)
        if trim.lost:
            self.stats.dropped += len(gone)
            self._observer.turns("dropped", len(gone))
            (log.dropped_for_room if full else log.dropped)(len(gone))
        return Plan(now()) if trim.lost else None

    async def _compact(self, snapshot: Snapshot, compact: Compact) -> Plan:
        await self._replace(snapshot, snapshot.body, drop=compact.entries)
        return Plan(now())

    async def _recover(self, snapshot: Snapshot) -> Plan | None:
        body = policy.after_recovery(snapshot.body)
        if await self._replace(snapshot, body, drop=0) is None:
            return Plan(now())
        self.shared.note_body(body)
        log.recovered()
        self._health_changed(snapshot.body.health, body.health)
        return None

    async def _fold(self, snapshot: Snapshot, fold: Fold) -> Plan | None:
        if self._unstored is not None and self._unstored[0] == _attempt(snapshot.body):
            return await self._store_failure(snapshot, self._unstored[1])
        if snapshot.body.health is MemoryHealth.DEGRADED:
            self.shared.recovering = True
            self._health_changed(MemoryHealth.DEGRADED, MemoryHealth.RECOVERING)
        try:
            summary = await self._summarize(fold)
            self._body_after(snapshot, fold, summary)
        except Exception as error:  # noqa: BLE001 -- any error of a user's summarizer is one failed attempt
            self.stats.summarizer_failures += 1
            self._observer.summarizer_failed(error)
            return await self._store_failure(snapshot, error)
        else:
            if not await self._store_summary(snapshot, fold, summary):
                return Plan(now())
            left = len(snapshot.split(self.config).pending) - len(fold.turns)
            another = left >= (1 if self.flush_waiters else self.config.fold_batch_turns)
            return Plan(now(), look=False, calls=True) if another else None
        finally:
            if self.shared.recovering:
                # The conversation was replaced or erased.
                self.shared.recovering = False
                self._health_changed(MemoryHealth.RECOVERING, self.shared.health)

    def _body_after(self, snapshot: Snapshot, fold: Fold, summary: str) -> Body:
        """Return the body with this summary, cut if necessary to what the datastore takes."""
        body = policy.after_fold(
            self.config,
            snapshot.body,
            fold,
            summary,
            now=self.shared.clock(),
            keep_for=self._keep_ids_for,
            copies=snapshot.copies(snapshot.entries_of(len(fold.turns))),
        )
        most, seal = self.shared.driver.traits.max_entry, self.shared.codec.seal_body
        kept = cut_summary(body.summary, lambda text: len(seal(replace(body, summary=text))) <= most)
        if not kept:
            raise policy.BadSummary("no summary fits into the largest entry of this datastore")
        return replace(body, summary=kept)

    async def _summarize(self, fold: Fold) -> str:
        self.stats.summarizer_calls += 1
        with self._observer.call("summarize"):
            answer = await self.background.call_within(
                self.config.summarizer_timeout_s, self._summarizer, fold.request(self.config)
            )
            return policy.summary_of(answer)

    async def _store_summary(self, snapshot: Snapshot, fold: Fold, summary: str) -> bool:
        """Store a finished summary, retrying lost races while it applies; returns whether it was stored."""
        while True:
            before = snapshot.body
            body = self._body_after(snapshot, fold, summary)
            version = await self._replace(snapshot, body, drop=snapshot.entries_of(len(fold.turns)))
            if version is not None:
                break
            snapshot = await self.shared.load("background")
            if not fold.still_applies(snapshot.body, snapshot.turns):
                return False
        self.shared.note_fold(fold, body, version)
        self.stats.summaries += 1
        self.stats.folded += len(fold.turns)
        self._observer.turns("folded", len(fold.turns))
        if before.health is not MemoryHealth.HEALTHY:
            log.recovered()
        self.background.call_back(self.config.on_summary_updated, before.summary, body.summary)
        shown = MemoryHealth.RECOVERING if self.shared.recovering else before.health
        self.shared.recovering = False
        self._health_changed(shown, body.health)
        return True

    async def _store_failure(self, snapshot: Snapshot, error: Exception) -> Plan | None:
        """Store a failed attempt, retrying lost races unless another process has stored a newer attempt.

        Until it is stored, this process makes no further attempt.
        """
        attempt = _attempt(snapshot.body)
        self._unstored = attempt, error
        for _ in range(RACES):
            body = policy.after_failure(self.config, snapshot.body, now=self.shared.clock())
            if await self._replace(snapshot, body, drop=0) is not None:
                break
            snapshot = await self.shared.load("background")
            if snapshot.version is None or _attempt(snapshot.body) != attempt:
                self._unstored = None
                return Plan(now())
        else:
            return Plan(now() + policy.delay_after(self.config, snapshot.body.attempts + 1))
        self._unstored = None
        shown = MemoryHealth.RECOVERING if self.shared.recovering else snapshot.body.health
        self.shared.recovering = False
        self.shared.note_body(body)
        if body.health is MemoryHealth.RETRY:
            log.retrying(body.attempts, error)
        elif snapshot.body.health is not MemoryHealth.DEGRADED:
            log.degraded(error)
        self._health_changed(shown, body.health)
        return _plan_for(self.next_step(replace(snapshot, body=body)))

    def _health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        if old is not new:
            self._observer.health_changed(old, new)
            self.background.call_back(self.config.on_health_changed, old, new)


class _LeaseHeld(Exception):
    """Another process holds the lease on this conversation."""


_Attempt: TypeAlias = tuple[str, int, float]


def _attempt(body: Body) -> _Attempt:
    """Return what identifies one summarizer call, made or planned."""
    return body.summary, body.attempts, body.next_attempt_at


def _plan_for(step: Due) -> Plan | None:
    """Return the plan for a step; a summarizer call needs a slot."""
    if step is None:
        return None
    wait = max(step.seconds, TICK_S) if isinstance(step, Wait) else 0.0
    return Plan(now() + wait, look=False, calls=isinstance(step, (Fold, Wait)))
