"""What has to be done to a shared conversation, done in the background by whichever process sees it.

One pod at a time summarizes, under a lease; whoever sees a due fold, trim or retry starts to see to it, so
any pod resumes what a dead one left. `policy.next_step` says what is to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Final

from stm_backends import log, policy
from stm_backends.driver import Key
from stm_backends.errors import Corrupt, StorageError
from stm_backends.lease import Lease
from stm_backends.observer import Observer
from stm_backends.policy import Body, Fold, Step, Trim, Wait
from stm_backends.shared import SharedConversation
from stm_backends.snapshot import Snapshot
from stm_backends.tasks import Background
from stm_backends.types import MemoryHealth
from stm_backends.view import cut_summary

logger = logging.getLogger("stm_backends")

FIRST_POLL_S: Final = 0.2
LONGEST_POLL_S: Final = 5.0
"""How long to wait before looking again while another process holds the lease: doubling, with jitter."""

FAULTS_BEFORE_REST: Final = 3
"""After so many storage errors in a row the background ends; the next call that sees work starts it."""


@dataclass(slots=True)
class Stats:
    """What this object has done so far. `lost_races` counts summaries and trims that came too late."""

    appended: int = 0
    summaries: int = 0
    folded: int = 0
    trimmed: int = 0
    dropped: int = 0
    lost_races: int = 0
    summarizer_calls: int = 0
    summarizer_failures: int = 0


class Upkeep:
    """The background of one conversation in one process.

    `hurried` counts those who wait for it: for them even less than `fold_batch_turns` is folded. `slots`
    bounds the summarizer calls in flight, across as many conversations as share it.
    """

    def __init__(
        self,
        shared: SharedConversation,
        lease_key: Key,
        summarizer: Callable[..., object],
        slots: asyncio.Semaphore,
        background: Background,
        observer: Observer,
    ) -> None:
        self._shared = shared
        self._lease_key = lease_key
        self._summarizer = summarizer
        self._slots = slots
        self._background = background
        self._observer = observer
        deadline = shared.driver.traits.deadline
        self._keep_ids_for = 10 * deadline
        # The summarizer's own time, and then time to load, store and release.
        self.lease_ttl = shared.config.summarizer_timeout_s + 3 * deadline
        self.worker: asyncio.Task[None] | None = None
        self.hurried = 0
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._waited_for: tuple[int, float] | None = None
        self.stats = Stats()

    @property
    def closing(self) -> bool:
        """Whether `close` is under way."""
        return self._closed.is_set()

    async def close(self, *, timeout: float) -> None:
        """End what runs, within `timeout` seconds if it does so by itself, and give the lease back."""
        self._closed.set()
        self._wake.set()
        await self._background.close(timeout=timeout)
        self._closed = asyncio.Event()

    def abandon(self) -> None:
        """End what runs without waiting for it."""
        if self.worker is not None and not self.worker.get_loop().is_closed():
            self.worker.cancel()

    def next_step(self, snapshot: Snapshot) -> Step:
        pending, _ = policy.split(snapshot.turns, self._shared.config)
        body = snapshot.body
        # Whoever has slept through the whole wait need not ask a clock that may be behind.
        waited = self._waited_for == _attempt(body)
        step = policy.next_step(
            self._shared.config,
            body,
            pending,
            now=body.next_attempt_at if waited else self._shared.clock(),
            batch=1 if self.hurried else None,
        )
        if isinstance(step, (Fold, Trim)):
            going = pending if isinstance(step, Fold) else pending[: step.count]
            count = max(1, snapshot.within(going, self._shared.driver.traits.max_drop))
            return (
                replace(step, turns=going[:count]) if isinstance(step, Fold) else replace(step, count=count)
            )
        return step

    async def relieve(self) -> bool:
        """Make room in a full record at once, by a fold or a trim; say whether there may be room now."""
        self.hurried += 1
        try:
            before = self.stats.folded + self.stats.trimmed
            if self._summarizes:
                await self._advance(look=True)
            else:
                snapshot = await self._shared.load("add_turn")
                pending, _ = policy.split(snapshot.turns, self._shared.config)
                if pending:
                    await self._trim(snapshot, Trim(len(pending), lost=False))
            return self.stats.folded + self.stats.trimmed > before
        except _LeaseHeld:
            # Whoever holds it is making room, for all that we know.
            await asyncio.sleep(random.uniform(0, FIRST_POLL_S))
            return True
        finally:
            self.hurried -= 1

    async def _replace(self, snapshot: Snapshot, body: Body, *, drop: int) -> str | None:
        version = await self._shared.replace(snapshot, body, drop=drop)
        if version is None:
            self.stats.lost_races += 1
            self._observer.race_lost()
        return version

    @property
    def _summarizes(self) -> bool:
        config = self._shared.config
        return config.strategy == "rolling_summary" and config.budget.summary_max_tokens > 0

    def stir_after_append(self, length: int) -> None:
        """See to it that the background runs if this tail has something for it."""
        waiting = length - self._shared.config.budget.full_zone_turns
        if self._shared.config.strategy == "truncation":
            due = waiting > self._shared.config.budget.full_zone_turns
        elif self._shared.seen.body.health is MemoryHealth.HEALTHY:
            due = waiting >= (1 if self.hurried else self._shared.config.fold_batch_turns)
        else:
            due = waiting > 0
        if due:
            healthy = self._summarizes and self._shared.seen.body.health is MemoryHealth.HEALTHY
            self._start_worker(0.0, look=not healthy)

    def stir(self, step: Step) -> None:
        if step is not None:
            wait = step.seconds if isinstance(step, Wait) else 0.0
            self._start_worker(wait, look=not isinstance(step, Fold))

    def _start_worker(self, wait: float, *, look: bool) -> None:
        if self._closed.is_set():
            return
        worker = self.worker
        if worker is None or worker.done() or worker.get_loop() is not asyncio.get_running_loop():
            self._wake, self._closed = asyncio.Event(), asyncio.Event()
            self.worker = self._background.start(self._work(wait, look=look), name="stm-memory")
        elif not wait:
            self._wake.set()

    async def _work(self, wait: float | None, *, look: bool) -> None:
        """Do what is due until nothing is, waiting as long as the policy says."""
        polls = faults = 0
        wake, scheduled = self._wake, True
        while wait is not None:
            attempt = _attempt(self._shared.seen.body) if scheduled and wait > 0 else None
            try:
                async with asyncio.timeout(wait):
                    await wake.wait()
            except TimeoutError:
                self._waited_for = attempt or self._waited_for
            if self._closed.is_set():
                return
            self._wake.clear()
            wake, scheduled = self._wake, False
            try:
                with self._observer.background():
                    held, wait = await self._advance_unless_held(look=look)
                if held:
                    # Whoever holds it sees our turns; a wake-up would only make us ask in vain.
                    wake = self._closed
                    wait = min(FIRST_POLL_S * 2**polls, LONGEST_POLL_S) * random.uniform(0.5, 1.0)
                    polls = min(polls + 1, 10)
                else:
                    polls, faults, scheduled = 0, 0, True
            except Corrupt as error:
                logger.error("the memory's background stopped: %s", error)
                return
            except StorageError as error:
                faults += 1
                logger.warning("the memory's background met an error: %s", error)
                wait = None if faults > FAULTS_BEFORE_REST else 2.0**faults
            except Exception as error:
                # A user's token estimator, say; its message may quote the conversation.
                logger.error("the memory's background stopped: %s", type(error).__name__)
                logger.debug("the background's traceback", exc_info=True)
                return
            look = True
            if wait is None and self._wake.is_set():
                wait = 0.0

    async def _advance_unless_held(self, *, look: bool) -> tuple[bool, float | None]:
        """Do one step, see `_advance`; says whether another process holds the lease, which is no error."""
        try:
            return False, await self._advance(look=look)
        except _LeaseHeld:
            return True, None

    async def _advance(self, *, look: bool) -> float | None:
        """Do one step. Returns in how many seconds there is another, `None` if there is none in sight.

        `look=False` skips the first load when the caller has just seen that a fold is due.
        """
        if look or not self._summarizes:
            snapshot = await self._shared.load("background")
            step = self.next_step(snapshot)
            if not isinstance(step, Fold):
                return await self._act(snapshot, step)
        async with self._slots, self._leased():
            # Loaded under the lease: its last holder may have stored a summary since anybody looked.
            snapshot = await self._shared.load("background")
            return await self._act(snapshot, self.next_step(snapshot))

    @contextlib.asynccontextmanager
    async def _leased(self) -> AsyncGenerator[None]:
        lease = Lease(
            self._shared.driver,
            self._lease_key,
            ttl=self.lease_ttl,
            content=self._shared.codec.seal("lease", {}),
        )
        try:
            if not await lease.acquire():
                raise _LeaseHeld
            yield
        finally:
            try:
                await lease.release()
            except StorageError as error:
                logger.warning("a lease was not given back and will expire: %s", error)

    async def _act(self, snapshot: Snapshot, step: Step) -> float | None:
        match step:
            case None:
                return None
            case Wait(seconds):
                return seconds
            case Trim():
                return await self._trim(snapshot, step)
            case Fold():
                return await self._fold(snapshot, step)

    async def _trim(self, snapshot: Snapshot, trim: Trim) -> float | None:
        gone = snapshot.turns[: trim.count]
        body = policy.after_trim(
            snapshot.body, trim, gone, now=self._shared.clock(), keep_for=self._keep_ids_for
        )
        if await self._replace(snapshot, body, drop=snapshot.entries(len(gone))) is None:
            return 0.0
        self.stats.trimmed += len(gone)
        if trim.lost:
            self.stats.dropped += len(gone)
            self._observer.turns("dropped", len(gone))
            log.dropped(len(gone))
        return 0.0 if trim.lost else None

    async def _fold(self, snapshot: Snapshot, fold: Fold) -> float | None:
        recovering = snapshot.body.health is MemoryHealth.DEGRADED
        if recovering:
            self._shared.recovering = True
            self._health_changed(MemoryHealth.DEGRADED, MemoryHealth.RECOVERING)
        try:
            summary = await self._summarize(fold)
            self._body_after(snapshot, fold, summary)
        except Exception as error:  # noqa: BLE001 -- whatever a user's summarizer raises is one failed attempt
            return await self._store_failure(snapshot, error)
        else:
            if not await self._store_summary(snapshot, fold, summary):
                return 0.0
            pending, _ = policy.split(snapshot.turns, self._shared.config)
            return 0.0 if len(fold.turns) < len(pending) else None
        finally:
            if self._shared.recovering:
                # The conversation has become another one, or was erased.
                self._shared.recovering = False
                self._health_changed(MemoryHealth.RECOVERING, self._shared.health)

    def _body_after(self, snapshot: Snapshot, fold: Fold, summary: str) -> Body:
        """Return the body with this summary, cut to what the datastore takes if need be."""

        def with_summary(text: str) -> Body:
            return policy.after_fold(
                self._shared.config,
                snapshot.body,
                fold,
                text,
                now=self._shared.clock(),
                keep_for=self._keep_ids_for,
            )

        def fits(text: str) -> bool:
            return bool(text) and (
                len(self._shared.codec.seal_body(with_summary(text))) <= self._shared.driver.traits.max_entry
            )

        summary = cut_summary(summary, fits)
        if not summary:
            raise policy.BadSummary("no summary fits into the largest entry of this datastore")
        return with_summary(summary)

    async def _summarize(self, fold: Fold) -> str:
        self.stats.summarizer_calls += 1
        with self._observer.call("summarize"):
            answer = await self._background.call_within(
                self._shared.config.summarizer_timeout_s, self._summarizer, fold.request(self._shared.config)
            )
            return policy.summary_of(answer)

    async def _store_summary(self, snapshot: Snapshot, fold: Fold, summary: str) -> bool:
        """Store a finished summary, through lost races too while it covers what is there; else `False`."""
        while True:
            before = snapshot.body
            body = self._body_after(snapshot, fold, summary)
            version = await self._replace(snapshot, body, drop=snapshot.entries(len(fold.turns)))
            if version is not None:
                break
            snapshot = await self._shared.load("background")
            if not fold.still_applies(snapshot.body, snapshot.turns):
                return False
        self._shared.note_fold(fold, body, version)
        self.stats.summaries += 1
        self.stats.folded += len(fold.turns)
        self._observer.turns("folded", len(fold.turns))
        if before.health is not MemoryHealth.HEALTHY:
            log.recovered()
        self._background.call_back(self._shared.config.on_summary_updated, before.summary, body.summary)
        shown = MemoryHealth.RECOVERING if self._shared.recovering else before.health
        self._shared.recovering = False
        self._health_changed(shown, body.health)
        return True

    async def _store_failure(self, snapshot: Snapshot, error: Exception) -> float:
        """Store that an attempt failed. Returns how long to wait before the next."""
        self.stats.summarizer_failures += 1
        self._observer.summarizer_failed(error)
        body = policy.after_failure(self._shared.config, snapshot.body, now=self._shared.clock())
        if await self._replace(snapshot, body, drop=0) is None:
            return 0.0
        shown = MemoryHealth.RECOVERING if self._shared.recovering else snapshot.body.health
        self._shared.recovering = False
        self._shared.note_body(body)
        if body.health is MemoryHealth.RETRY:
            log.retrying(body.attempts, error)
        elif snapshot.body.health is not MemoryHealth.DEGRADED:
            log.degraded(error)
        self._health_changed(shown, body.health)
        return policy.delay_after(self._shared.config, body.attempts)

    def _health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        if old is not new:
            self._observer.health_changed(old, new)
            self._background.call_back(self._shared.config.on_health_changed, old, new)


class _LeaseHeld(Exception):
    """Another process is summarizing this conversation."""


def _attempt(body: Body) -> tuple[int, float]:
    """Return what tells one scheduled summarizer call from the next."""
    return body.attempts, body.next_attempt_at
