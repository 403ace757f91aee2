"""The base of memories and conversations of messages: one record, one background, and adding entries.

Adding is one `append`, reading is one `load`, for a conversation of any age. The process that holds the
conversation's lease writes summaries in the background. One conditional `replace` ensures that none is lost
or applied twice. The record may change during any await, so no decision here relies on an earlier load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

from stm_backends.drivers.contract import Driver
from stm_backends.errors import LimitReached, OutcomeUnknown, TooLarge
from stm_backends.memory import policy
from stm_backends.memory.defaults import remembering
from stm_backends.memory.estimating import checked_config
from stm_backends.memory.policy import CatchUp, Fold, Recover, Wait
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.due import Held, KeepTranscript, Move
from stm_backends.memory.shared.folds import GIVEN, WRITER, Stats, attempt_of
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import Entry, units_of
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.races import Lost, contend
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import require_key
from stm_backends.records.ledger import Appended
from stm_backends.records.limits import UNLIMITED, Guard, Whose
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer, observed
from stm_backends.types import MemoryHealth, MemoryKey

OVERHEAD: Final = 512
"""Bytes that an entry takes in a record beyond itself: the datastore's overhead, and remembered ids."""


class Added(NamedTuple):
    """The content stored under the id of an entry. `begins` is true if the conversation may begin with it.

    `is_new` is true if this process has not added it before.
    """

    entry: Entry
    is_new: bool
    begins: bool = False


class SharedBase:
    """One conversation, shared by every process that opens the same key, whatever is said in it."""

    _adding: ClassVar[str]
    """The name of the adding operation in errors."""

    def __init__(  # noqa: PLR0913 -- a backend passes them all; a driver and a key suffice
        self,
        driver: Driver,
        key: MemoryKey,
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | None = None,
        codec: Codec | None = None,
        directory: Directory | None = None,
        backgrounds: Backgrounds | None = None,
        guard: Guard = UNLIMITED,
        observer: Observer = SILENT,
        clock: Callable[[], float] = time.time,
        given: int | None = None,
    ) -> None:
        require_key(key)
        self.observer = observer = guarded(observer)
        if given is None:
            given = GIVEN if config is not None else WRITER if summarizer is not None else 0
        config, summarizer = remembering(config, summarizer)
        self._config = checked_config(config, observer.function_failed)
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._owner = (key.tenant_id, key.user_id)
        self._whose = Whose(*self._owner, key.session_id)
        self._guard = guard
        if backgrounds is None:
            most = guard.limits.transcript_turns
            backgrounds = Backgrounds(
                driver, self._codec, observer=observer, clock=clock, transcript_turns=most
            )
        self._maintenance = backgrounds.of(key)
        elsewhere = backgrounds.leaves_to_workers(self._config)
        writer = policy.summarizer_for(self._config, summarizer, needed=not elsewhere)
        self._maintenance.use(self._config, writer, given=given, elsewhere=elsewhere)
        self._maintenance.memories.add(self)
        self._shared = self._maintenance.shared
        self._before = replace(self._maintenance.stats)

    @property
    def shared(self) -> SharedConversation:
        """The record of the conversation as this process has it, for other parts of this library."""
        return self._shared

    @property
    def stats(self) -> Stats:
        """Counts of this process's work for the conversation since this object was created."""
        return self._maintenance.stats.since(self._before)

    @property
    def health(self) -> MemoryHealth:
        """The health as of the last load; `RECOVERING` only while this process makes an attempt."""
        return self._shared.health

    @property
    def waiting(self) -> int:
        """The number of turns that wait in pages of the transcript for a summary, as of the last load.

        They have left the record while the summarizer failed or fell behind, and the model is not shown them.
        """
        transcript = self._shared.seen.body.transcript
        return 0 if transcript is None else transcript.waiting

    async def _add(
        self,
        entry: Entry,
        data: bytes,
        *,
        given: bool,
        accept: Callable[[Snapshot], None] | None = None,
    ) -> Added:
        """Store an entry, whose id was `given` by the caller or is new.

        Before a new entry is stored, `accept` is called with the present snapshot, and may raise.
        """
        # Before anything is written; the other limits are the driver's, which knows the record.
        self._guard.require("conversation_bytes", len(data))
        shared, ttl = self._shared, self._config.record_ttl_s
        if accept is not None or (given and shared.may_hold(entry.id)):
            # The exceptions to one round trip: rejecting a turn or recognizing a repeat needs a current load.
            snapshot = await shared.load(self._adding)
            if snapshot.holds(entry.id):
                shown = snapshot.entry_of(entry.id)
                if entry.id in shared.acknowledged or not shared.driver.traits.shows_unconfirmed:
                    self._maintenance.notice(snapshot)
                    is_new = shared.outcome_unknown.pop(entry.id, False) is None
                    return Added(entry if shown is None else shown[0], is_new)
                # Only the answer of a write shows that this is durable. The same entry is written: the
                # next server may lack what this one showed.
                entry, data = shown or (entry, data)
            elif accept is not None:
                accept(snapshot)
        # Occasionally costs a round trip, see Directory. After a creation the user is listed again in the
        # background, because an erasure may have come in between.
        known = given and shared.remembers(entry.id)
        try:
            if not self._directory.knows(self._owner, ttl):
                await self._directory.note(*self._owner, ttl=ttl)
            try:
                length, created = await shared.append(entry, data, ttl=ttl)
            except (TooLarge, LimitReached) as refused:
                length, created = await self._append_refused(entry, data, refused, given=given)
        except (OutcomeUnknown, asyncio.CancelledError):
            self._directory.doubt(self._owner)
            if given and not known:
                shared.note_outcome_unknown(entry.id)
            raise
        if created:
            self._maintenance.background.start(
                self._directory.note_creation(self._owner, ttl), name="stm-directory"
            )
        is_new = shared.outcome_unknown.pop(entry.id, False) is None or not (
            known or entry.id in shared.added
        )
        if is_new:
            shared.note_added(entry, len(data), length)
        if given:
            shared.note_acknowledged(entry.id)
        await self._maintenance.after_append(length, len(units_of(entry)))
        return Added(entry, is_new, begins=created)

    def _noted(self, count: int, *, begins: bool) -> None:
        """Report the number of turns or messages that were added."""
        self._maintenance.stats.appended += count
        self._maintenance.touch(begins=begins)
        self.observer.turns("appended", count)

    @observed
    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or summarizing has failed, or `timeout` seconds have passed.

        Also folds fewer turns than `fold_batch_turns`. A degraded memory makes the attempt that is due, or
        waits for the one under way in any process; it does not wait for later attempts, or for a retry after
        an answer of the wrong type. The default timeout allows for one summarizer call, of this process or
        another, and all its retries. Cancelling stops only the waiting.

        With `summaries="worker"`, it notes for a worker that all pending turns are to be summarized, and
        returns.
        """
        if self._config.strategy != "rolling_summary":
            return
        if self._maintenance.elsewhere:
            await self._note_all()
            return
        loop, maintenance = asyncio.get_running_loop(), self._maintenance
        until = loop.time() + (policy.patience(self._config) if timeout is None else timeout)
        failures, first = maintenance.failures, None
        # A call that an ended event loop left does not wait in this one.
        waiters, this = maintenance.flush_waiters, object()
        waiters.add(this)
        try:
            while True:
                # Created before the load, so that no step after the load is missed.
                with maintenance.change() as change:
                    snapshot = await self._shared.load("flush")
                    step, attempt = maintenance.next_step(snapshot), attempt_of(snapshot.body)
                    first = first or attempt
                    # An attempt that is under way is still due by the record, or its lease is held.
                    degraded = snapshot.body.health is MemoryHealth.DEGRADED
                    in_vain = degraded and (
                        attempt != first
                        or not isinstance(step, Fold | CatchUp | Held | KeepTranscript | Move | Recover)
                    )
                    hopeless = maintenance.hopeless and isinstance(step, Wait)
                    # Work that fails is not started over and over.
                    given_up = in_vain or hopeless or maintenance.failures > failures
                    remaining = until - loop.time()
                    if step is None or given_up or maintenance.closing or remaining <= 0:
                        return
                    maintenance.schedule(step)
                    await asyncio.wait({change}, timeout=remaining)
        finally:
            waiters.discard(this)

    async def _note_all(self) -> None:
        """Note for a worker that pending turns are to be summarized, however few, if there are any."""
        snapshot = await self._shared.load("flush")
        transcript = snapshot.body.transcript
        if snapshot.split(self._config).pending or (transcript is not None and transcript.waiting):
            await self._maintenance.note(everything=True)

    async def close(self, *, timeout: float = 0.0) -> None:
        """Stop the background; running work may finish within `timeout` seconds. Releases the lease.

        The background continues while other memory objects of this process use the conversation. A later
        call that sees work starts it again.
        """
        self._maintenance.memories.discard(self)
        if not self._maintenance.memories:
            await self._maintenance.close(timeout=timeout)

    def abandon(self) -> None:
        """Stop the background without waiting; the next call that sees work starts it again."""
        self._maintenance.abandon()

    @property
    def busy(self) -> bool:
        """True while work for this conversation is running or planned in this process."""
        return self._maintenance.busy

    async def _append_refused(
        self, entry: Entry, data: bytes, refused: TooLarge | LimitReached, *, given: bool
    ) -> Appended:
        """Append to a record that has no room, unless the entry is stored, as durably as by an append.

        A repeat costs no turn, and is not refused; see decision 0037.
        """

        async def repeated() -> Appended | bool | Lost:
            if not given or not (snapshot := await self._shared.load(self._adding)).holds(entry.id):
                return False
            if await self._maintenance.confirmed(snapshot, len(snapshot.tail)) is None:
                return Lost(snapshot.version)
            return Appended(len(snapshot.tail), created=False)

        appended = await contend(repeated)
        if isinstance(appended, Appended):
            return appended
        if appended is None and isinstance(refused, LimitReached):
            raise OutcomeUnknown(
                "a load shows the turn, and each race to confirm it was lost",
                backend=self._shared.driver.name,
                operation=self._adding,
            ) from refused
        if isinstance(refused, LimitReached):
            raise refused
        return await self._append_to_full(entry, data, refused)

    async def _append_to_full(self, entry: Entry, data: bytes, full: TooLarge) -> Appended:
        """Append to a record that was `full`, as the background makes room in it."""
        loop, size = asyncio.get_running_loop(), self._shared.driver.traits.room(len(data)) + OVERHEAD
        # As long as a lease that is held now, and two requests of the fold that makes room.
        give_up_at = loop.time() + self._maintenance.lease_s + 2 * self._shared.driver.traits.deadline
        with self._maintenance.room.request(size) as request:
            while full.what == "record" and (remaining := give_up_at - loop.time()) > 0:
                if not await self._maintenance.make_room(request, within=remaining):
                    break
                try:
                    return await self._shared.append(entry, data, ttl=self._config.record_ttl_s)
                except TooLarge as error:
                    full = error
        raise full
