"""Conversation memory that many processes share: `policy` decides, a `Driver` carries it out.

Adding a turn is one `append`, reading is one `load`, for a conversation of any age. Summaries are
written in the background by whichever process holds the conversation's lease; that none is lost or
applied twice rests on one conditional `replace` alone. Everything shared may change during any await:
nothing here concludes anything about the record from what an earlier call has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from stm_backends import keys, policy, records
from stm_backends.codec import Codec
from stm_backends.directory import Directory
from stm_backends.driver import ABSENT, KEEP, Driver, new_version
from stm_backends.errors import (
    Corrupt,
    StorageError,
    TooLarge,
    located,
)
from stm_backends.lease import Lease
from stm_backends.policy import Body, Fold, Step, Trim, Wait
from stm_backends.protocols import Summarizer
from stm_backends.snapshot import Snapshot
from stm_backends.tasks import Background
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey, StoredTurn, as_config, as_turn

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


class DistributedShortTermMemory:
    """The memory of one conversation, shared by every process that opens the same key.

    `config` may be any object with the fields of `ShortTermMemoryConfig`. `slots` bounds the summarizer
    calls in flight, across as many memories as share it. Raises `ConfigurationError` for
    `rolling_summary` without a summarizer.
    """

    def __init__(
        self,
        driver: Driver,
        key: MemoryKey,
        config: object | None = None,
        *,
        summarizer: Summarizer | None = None,
        codec: Codec | None = None,
        directory: Directory | None = None,
        slots: asyncio.Semaphore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = as_config(config)
        self._driver = driver
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._owner = (key.tenant_id, key.user_id)
        self._key = keys.memory_key(key)
        self._lease_key = keys.lease_key(key)
        self._summarizer = policy.summarizer_for(self._config, summarizer)
        self._slots = slots or asyncio.Semaphore()
        self._clock = clock
        self._keep_ids_for = 10 * driver.traits.deadline
        # The summarizer's own time, and then time to load, store and release.
        self._lease_ttl = self._config.summarizer_timeout_s + 3 * driver.traits.deadline

        self._background = Background()
        self._worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        # What the last load found, and the turns that this object has added since.
        self._seen = Snapshot()
        self._added: dict[str, StoredTurn] = {}
        self._waited_for: tuple[int, float] | None = None
        self._recovering = False
        self._flushing = 0
        self.stats = Stats()

    @property
    def health(self) -> MemoryHealth:
        """How summarization is doing, as of the last load; `RECOVERING` only while this process tries."""
        return MemoryHealth.RECOVERING if self._recovering else self._seen.body.health

    def estimate_tokens(self) -> int:
        """Estimate what `get_llm_context` would show, from the last load and our own turns since."""
        seen = self._seen
        return self._render(replace(seen, turns=(*seen.turns, *self._added.values()))).tokens

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Remember a completed turn: one round trip, whatever other processes do meanwhile.

        Adding the same `turn_id` again changes nothing, while the first stands and for some time after
        (the last 256 turns that left, and at least ten operation deadlines). Raises `InvalidState` for a
        turn that is not JSON, `MemoryBudgetExceeded` if `overflow_policy="error"` refuses it, `TooLarge`,
        and `OutcomeUnknown` if it was perhaps stored; nothing else stores half a turn or doubles one.
        """
        if self._config.strategy == "none":
            return
        stored = self.checked(turn, turn_id)
        entry = self._codec.seal_turn(stored)
        if self._config.budget.overflow_policy == "error":
            # The one exception to one round trip: a refusal must rest on what is there now.
            self._require_room(await self._load("add_turn"), stored)
        # Costs a round trip once in a while: see Directory. Written first, so that whoever erases the
        # tenant finds this user; again after a birth, because an erasure may have come in between.
        await self._directory.note(*self._owner)
        length, born = await self._append(entry)
        if born:
            self._background.start(self._note_birth(), name="stm-directory")
        self.stats.appended += 1
        if not (stored.id in self._added or self._seen.holds(stored.id)):
            self._added[stored.id] = stored
            if len(self._added) > length:
                # A tail that is shorter than what we added was folded elsewhere.
                del self._added[next(iter(self._added))]
            self._background.call_back(self._config.on_turn_added, turn)
        self._stir_after_append(length)

    @staticmethod
    def checked(turn: ConversationTurn, turn_id: str | None = None) -> StoredTurn:
        """Return a copy of a turn under its id, a new one unless given. Raises `InvalidState`."""
        return StoredTurn(turn_id or secrets.token_hex(16), as_turn(turn))

    async def get_llm_context(self) -> dict[str, Any]:
        """Return what the model shall know, in one round trip: `{}` or `{"conversation_memory": ...}`."""
        if self._config.strategy == "none":
            return {}
        snapshot = await self._load("get_llm_context")
        self._stir(self._next_step(snapshot))
        view = self._render(snapshot)
        if view.trimmed and self._config.budget.overflow_policy == "error":
            logger.warning("the memory exceeds total_max_tokens and was trimmed for reading")
        return view.patch()

    async def turns(self) -> list[ConversationTurn]:
        """Return every turn that is retained in full, oldest first."""
        record = await self._driver.load(self._key)
        with located(self._driver.name, "turns"):
            # Opened anew, because these are the caller's to keep.
            return [stored.turn for stored in Snapshot.of(record, self._codec).turns]

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or the memory is degraded, or `timeout` seconds have passed.

        Folds even less than `fold_batch_turns`. Unless told otherwise it waits for one lease of another
        process and all retries. Cancelling it stops the waiting and nothing else.
        """
        if self._config.strategy != "rolling_summary":
            return
        until = asyncio.get_running_loop().time() + (self._patience() if timeout is None else timeout)
        self._flushing += 1
        try:
            while True:
                snapshot = await self._load("flush")
                step = self._next_step(snapshot)
                remaining = until - asyncio.get_running_loop().time()
                given_up = self.health is MemoryHealth.DEGRADED or self._closed.is_set()
                if step is None or given_up or remaining <= 0:
                    return
                self._stir(step)
                worker = self._worker
                if worker is not None:
                    await asyncio.wait({worker}, timeout=remaining)
                # A background that cannot do it and ends at once must not make this a busy loop.
                await asyncio.sleep(0.01)
        finally:
            self._flushing -= 1

    async def close(self, *, timeout: float = 0.0) -> None:
        """End the background: what runs may finish within `timeout` seconds, the lease is given back.

        A later call that sees work starts the background again.
        """
        self._closed.set()
        self._wake.set()
        await self._background.close(timeout=timeout)
        self._closed = asyncio.Event()

    def abandon(self) -> None:
        """End the background without waiting for it; the next call that sees work starts it again."""
        if self._worker is not None and not self._worker.get_loop().is_closed():
            self._worker.cancel()

    @property
    def busy(self) -> bool:
        """Whether work of this object is under way or scheduled."""
        return bool(self._background)

    # What is known without asking

    def _render(self, snapshot: Snapshot) -> policy.View:
        pending, recent = policy.split(snapshot.turns, self._config)
        return policy.render(
            self._config,
            health=MemoryHealth.RECOVERING if self._recovering else snapshot.body.health,
            summary=snapshot.body.summary,
            pending=pending,
            recent=recent,
        )

    def _require_room(self, snapshot: Snapshot, stored: StoredTurn) -> None:
        if not snapshot.holds(stored.id):
            pending, recent = policy.split((*snapshot.turns, stored), self._config)
            body = snapshot.body
            policy.require_room(
                self._config, health=body.health, summary=body.summary, pending=pending, recent=recent
            )

    def _next_step(self, snapshot: Snapshot) -> Step:
        pending, _ = policy.split(snapshot.turns, self._config)
        body = snapshot.body
        # Whoever has slept through the whole wait need not ask a clock that may be behind.
        waited = self._waited_for == _attempt(body)
        step = policy.next_step(
            self._config,
            body,
            pending,
            now=body.next_attempt_at if waited else self._clock(),
            batch=1 if self._flushing else None,
        )
        if isinstance(step, (Fold, Trim)):
            going = pending if isinstance(step, Fold) else pending[: step.count]
            count = max(1, snapshot.within(going, self._driver.traits.max_drop))
            return (
                replace(step, turns=going[:count]) if isinstance(step, Fold) else replace(step, count=count)
            )
        return step

    def _patience(self) -> float:
        attempts = min(self._config.retry_attempts, 10)
        retries = sum(policy.delay_after(self._config, attempt + 1) for attempt in range(attempts))
        return self._lease_ttl + retries

    # The record

    async def _load(self, operation: str) -> Snapshot:
        record = await self._driver.load(self._key)
        with located(self._driver.name, operation):
            snapshot = Snapshot.of(record, self._codec, last=self._seen)
        self._seen = snapshot
        # One that was acknowledged while this load was under way may not be in it.
        self._added = {i: stored for i, stored in self._added.items() if not snapshot.holds(i)}
        return snapshot

    async def _append(self, entry: bytes) -> tuple[int, bool]:
        """Return the new length of the tail, and whether this may have been the record's birth."""
        sent = 0

        async def send() -> int:
            nonlocal sent
            sent += 1
            return await self._driver.append(
                self._key, entry, birth=new_version(), ttl=self._config.session_ttl_s
            )

        give_up_at = asyncio.get_running_loop().time() + self._lease_ttl
        while True:
            try:
                length = await records.resent(send)
            except TooLarge as error:
                late = asyncio.get_running_loop().time() >= give_up_at
                if error.what == "entry" or late or not await self._relieve():
                    raise
            else:
                return length, length <= sent

    async def _relieve(self) -> bool:
        """Make room in a full record at once, by a fold or a trim; say whether there may be room now."""
        self._flushing += 1
        try:
            before = self.stats.folded + self.stats.trimmed
            if self._summarizes:
                await self._advance(look=True)
            else:
                snapshot = await self._load("add_turn")
                pending, _ = policy.split(snapshot.turns, self._config)
                if pending:
                    await self._trim(snapshot, Trim(len(pending), lost=False))
            return self.stats.folded + self.stats.trimmed > before
        except _LeaseHeld:
            # Whoever holds it is making room, for all that we know.
            await asyncio.sleep(random.uniform(0, FIRST_POLL_S))
            return True
        finally:
            self._flushing -= 1

    async def _note_birth(self) -> None:
        try:
            await self._directory.note(*self._owner, fresh=True)
        except StorageError as error:
            logger.warning("a user was listed before a conversation was born, not again after: %s", error)

    async def _replace(self, snapshot: Snapshot, body: Body, *, drop: int) -> bool:
        """Store a body if the record is still the one that was read; `False` is a lost race."""
        data, version, expect = self._codec.seal_body(body), new_version(), snapshot.version or ABSENT
        # Sent again under the same token it answers whether the body is there, and that is all we ask.
        stored = await records.resent(
            lambda: self._driver.replace(self._key, data, version=version, expect=expect, drop=drop, ttl=KEEP)
        )
        self.stats.lost_races += not stored
        return stored

    # The background

    @property
    def _summarizes(self) -> bool:
        config = self._config
        return config.strategy == "rolling_summary" and config.budget.summary_max_tokens > 0

    def _stir_after_append(self, length: int) -> None:
        """See to it that the background runs if this tail has something for it."""
        waiting = length - self._config.budget.full_zone_turns
        if self._config.strategy == "truncation":
            due = waiting > self._config.budget.full_zone_turns
        elif self._seen.body.health is MemoryHealth.HEALTHY:
            due = waiting >= (1 if self._flushing else self._config.fold_batch_turns)
        else:
            due = waiting > 0
        if due:
            healthy = self._summarizes and self._seen.body.health is MemoryHealth.HEALTHY
            self._start_worker(0.0, look=not healthy)

    def _stir(self, step: Step) -> None:
        if step is not None:
            wait = step.seconds if isinstance(step, Wait) else 0.0
            self._start_worker(wait, look=not isinstance(step, Fold))

    def _start_worker(self, wait: float, *, look: bool) -> None:
        if self._closed.is_set():
            return
        worker = self._worker
        if worker is None or worker.done() or worker.get_loop() is not asyncio.get_running_loop():
            self._wake, self._closed = asyncio.Event(), asyncio.Event()
            self._worker = self._background.start(self._work(wait, look=look), name="stm-memory")
        elif not wait:
            self._wake.set()

    async def _work(self, wait: float | None, *, look: bool) -> None:
        """Do what is due until nothing is, waiting as long as the policy says."""
        polls = faults = 0
        wake, scheduled = self._wake, True
        while wait is not None:
            attempt = _attempt(self._seen.body) if scheduled and wait > 0 else None
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
                wait = await self._advance(look=look)
                polls, faults, scheduled = 0, 0, True
            except _LeaseHeld:
                # Whoever holds it sees our turns; a wake-up would only make us ask in vain.
                wake = self._closed
                wait = min(FIRST_POLL_S * 2**polls, LONGEST_POLL_S) * random.uniform(0.5, 1.0)
                polls = min(polls + 1, 10)
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

    async def _advance(self, *, look: bool) -> float | None:
        """Do one step. Returns in how many seconds there is another, `None` if there is none in sight.

        `look=False` skips the first load when the caller has just seen that a fold is due.
        """
        if look or not self._summarizes:
            snapshot = await self._load("background")
            step = self._next_step(snapshot)
            if not isinstance(step, Fold):
                return await self._act(snapshot, step)
        async with self._slots, self._leased():
            # Loaded under the lease: its last holder may have stored a summary since anybody looked.
            snapshot = await self._load("background")
            return await self._act(snapshot, self._next_step(snapshot))

    @contextlib.asynccontextmanager
    async def _leased(self) -> AsyncGenerator[None]:
        lease = Lease(
            self._driver, self._lease_key, ttl=self._lease_ttl, content=self._codec.seal("lease", {})
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
        body = policy.after_trim(snapshot.body, trim, gone, now=self._clock(), keep_for=self._keep_ids_for)
        if not await self._replace(snapshot, body, drop=snapshot.entries(len(gone))):
            return 0.0
        self.stats.trimmed += len(gone)
        if trim.lost:
            self.stats.dropped += len(gone)
            logger.warning("%d turns beyond recovery_backlog_limit were dropped", len(gone))
        return 0.0 if trim.lost else None

    async def _fold(self, snapshot: Snapshot, fold: Fold) -> float | None:
        recovering = snapshot.body.health is MemoryHealth.DEGRADED
        if recovering:
            self._recovering = True
            self._health_changed(MemoryHealth.DEGRADED, MemoryHealth.RECOVERING)
        try:
            summary = await self._summarize(fold)
            self._body_after(snapshot, fold, summary)
        except Exception as error:  # noqa: BLE001 -- whatever a user's summarizer raises is one failed attempt
            return await self._store_failure(snapshot, error)
        else:
            if not await self._store_summary(snapshot, fold, summary):
                return 0.0
            pending, _ = policy.split(snapshot.turns, self._config)
            return 0.0 if len(fold.turns) < len(pending) else None
        finally:
            if self._recovering:
                # The conversation has become another one, or was erased.
                self._recovering = False
                self._health_changed(MemoryHealth.RECOVERING, self.health)

    def _body_after(self, snapshot: Snapshot, fold: Fold, summary: str) -> Body:
        """Return the body with this summary, cut to what the datastore takes if need be."""

        def with_summary(text: str) -> Body:
            return policy.after_fold(
                self._config, snapshot.body, fold, text, now=self._clock(), keep_for=self._keep_ids_for
            )

        def fits(text: str) -> bool:
            return len(self._codec.seal_body(with_summary(text))) <= self._driver.traits.max_entry

        if fits(summary):
            return with_summary(summary)
        summary = policy.cut_summary(summary, fits)
        if policy.is_blank(summary):
            raise policy.BadSummary("no summary fits into the largest entry of this datastore")
        return with_summary(summary)

    async def _summarize(self, fold: Fold) -> str:
        self.stats.summarizer_calls += 1
        answer = await self._background.call_within(
            self._config.summarizer_timeout_s, self._summarizer, fold.request(self._config)
        )
        return policy.summary_of(answer)

    async def _store_summary(self, snapshot: Snapshot, fold: Fold, summary: str) -> bool:
        """Store a finished summary, through lost races too while it covers what is there; else `False`."""
        while True:
            before = snapshot.body
            body = self._body_after(snapshot, fold, summary)
            if await self._replace(snapshot, body, drop=snapshot.entries(len(fold.turns))):
                break
            snapshot = await self._load("background")
            if not fold.still_applies(snapshot.body, snapshot.turns):
                return False
        covered = {stored.id for stored in fold.turns}
        left = tuple(stored for stored in self._seen.turns if stored.id not in covered)
        self._seen = Snapshot(None, body, left, ids={stored.id for stored in left})
        self._added = {i: stored for i, stored in self._added.items() if i not in covered}
        self.stats.summaries += 1
        self.stats.folded += len(fold.turns)
        if before.health is not MemoryHealth.HEALTHY:
            logger.info("summarization works again")
        self._background.call_back(self._config.on_summary_updated, before.summary, body.summary)
        shown = MemoryHealth.RECOVERING if self._recovering else before.health
        self._recovering = False
        self._health_changed(shown, body.health)
        return True

    async def _store_failure(self, snapshot: Snapshot, error: Exception) -> float:
        """Store that an attempt failed. Returns how long to wait before the next."""
        self.stats.summarizer_failures += 1
        body = policy.after_failure(self._config, snapshot.body, now=self._clock())
        if not await self._replace(snapshot, body, drop=0):
            return 0.0
        shown = MemoryHealth.RECOVERING if self._recovering else snapshot.body.health
        self._recovering = False
        self._seen = replace(self._seen, version=None, body=body)
        cause = type(error).__name__
        if body.health is MemoryHealth.RETRY:
            logger.warning("summarizing failed (%s), attempt %d will be repeated", cause, body.attempts)
        else:
            logger.warning("summarizing is unavailable (%s): recent turns only until it works", cause)
        self._health_changed(shown, body.health)
        return policy.delay_after(self._config, body.attempts)

    def _health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        if old is not new:
            self._background.call_back(self._config.on_health_changed, old, new)


class _LeaseHeld(Exception):
    """Another process is summarizing this conversation."""


def _attempt(body: Body) -> tuple[int, float]:
    """Return what tells one scheduled summarizer call from the next."""
    return body.attempts, body.next_attempt_at
