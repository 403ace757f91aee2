"""Conversation memory that many processes share: `policy` decides, a `Driver` carries it out.

Adding a turn is one `append`, reading is one `load`, for a conversation of any age. The process that holds
the conversation's lease writes summaries in the background. One conditional `replace` ensures that none is
lost or applied twice. The record may change during any await, so no decision here relies on an earlier load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Final

from stm_backends.drivers.contract import Driver
from stm_backends.errors import LimitReached, OutcomeUnknown, TooLarge
from stm_backends.memory import log, policy
from stm_backends.memory.defaults import remembering
from stm_backends.memory.estimating import checked_config
from stm_backends.memory.policy import CatchUp, Fold, Recover, Wait
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.due import Held, KeepTranscript, Move
from stm_backends.memory.shared.folds import Stats, attempt_of
from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn, read_all, read_page
from stm_backends.memory.view import artifact_in
from stm_backends.protocols import Summarizer
from stm_backends.races import Lost, contend
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import require_key
from stm_backends.records.ledger import Appended
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_of
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer, observed
from stm_backends.types import (
    AHEAD_S,
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    StoredTurn,
    as_turn,
    as_turn_id,
)

OVERHEAD: Final = 512
"""Bytes that a turn takes in a record beyond its entry: the datastore's own, and remembered ids."""


class DistributedShortTermMemory:
    """The memory of one conversation, shared by every process that opens the same key.

    `config` may be any object with the fields of `ShortTermMemoryConfig`; without one, the memory keeps a
    rolling summary and the transcript, and needs no summarizer. `backgrounds` holds the clock and
    the background of each conversation, shared by several memories; by default this memory creates its own.
    `observer` receives events. Raises `ConfigurationError` for `rolling_summary` without a summarizer.
    """

    def __init__(  # noqa: PLR0913 -- a backend passes them all; a driver and a key suffice
        self,
        driver: Driver,
        key: MemoryKey,
        config: object | None = None,
        *,
        summarizer: Summarizer | None = None,
        codec: Codec | None = None,
        directory: Directory | None = None,
        backgrounds: Backgrounds | None = None,
        guard: Guard = UNLIMITED,
        observer: Observer = SILENT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_key(key)
        self.observer = observer = guarded(observer)
        given = 2 if config is not None else int(summarizer is not None)
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
        writer = policy.summarizer_for(self._config, summarizer)
        self._maintenance.use(self._config, writer, given=given)
        self._maintenance.memories.add(self)
        self._shared = self._maintenance.shared
        self._before = replace(self._maintenance.stats)

    @property
    def stats(self) -> Stats:
        """What this process has done for the conversation since this object was created."""
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

    def estimate_tokens(self) -> int:
        """Estimate the tokens of `get_llm_context`, from the last load and this process's turns since.

        A process that has used thousands of other conversations since then may have forgotten the load.
        """
        return self._shared.view(self._shared.known(), self._config).tokens

    def get_artifact(self, ref: str) -> Any | None:
        """Return what the newest turn that has `ref` in `artifacts_shown` stored there, or `None`.

        Answers from the last load and this process's turns since, for turns that are retained in full. Of
        hidden artifacts a turn has only the references.
        """
        return artifact_in(self._shared.known().turns, ref)

    @observed
    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Store a completed turn in one round trip, regardless of what other processes do.

        Adding the same `turn_id` again has no effect while the first is stored and for some time after (for
        the last 256 turns that left the record, and for at least ten operation deadlines). If the first was
        acknowledged to this process, it loads instead of writing; any other repeat is acknowledged once it is
        as durable as the datastore promises. A full record is summarized at once; while summarizing fails, it
        loses its oldest pending turns, so that this turn is stored. A turn without a time (`ts=0`), or with
        one more than a day ahead, gets the current one.

        Raises `InvalidState` for a turn that is not JSON, `MemoryBudgetExceeded` if `overflow_policy="error"`
        rejects the turn, `LimitReached`, `TooLarge`, and `OutcomeUnknown` if the turn was perhaps stored.
        After any other error the turn is not stored.
        """
        if self._config.strategy == "none":
            log.keeps_nothing()
            return
        with self._guard.reporting(self._whose, "add_turn"):
            await self._add(turn, turn_id)

    async def _add(self, turn: ConversationTurn, turn_id: str | None) -> None:
        stored = self.checked(turn, turn_id)
        entry = self._codec.seal_turn(stored)
        # Before anything is written; the other limits are the driver's, which knows the record.
        self._guard.require("conversation_bytes", len(entry))
        refuses = self._config.budget.overflow_policy == "error"
        ts = stored.turn.ts
        if refuses or (turn_id is not None and self._shared.may_hold(stored.id)):
            # The exceptions to one round trip: rejecting a turn or recognizing a repeat needs a current load.
            snapshot = await self._shared.load("add_turn")
            if snapshot.holds(stored.id):
                shown = snapshot.entry_of(stored.id)
                ts = ts if shown is None else shown[0].turn.ts
                if stored.id in self._shared.acknowledged or not self._shared.driver.traits.shows_unconfirmed:
                    self._maintenance.notice(snapshot)
                    if self._shared.outcome_unknown.pop(stored.id, False) is None:
                        self._appended(turn, ts)
                    return
                # Only the answer to a write says that this is durable. The same entry is written, because the
                # next server may lack what this one showed.
                stored, entry = shown or (stored, entry)
            elif refuses:
                # By the stored health, so that every process decides the same.
                snapshot.plus(stored).view(self._config).require_room()
        # Occasionally costs a round trip, see Directory. After a creation the user is listed again in the
        # background, because an erasure may have come in between.
        known = turn_id is not None and self._shared.remembers(stored.id)
        try:
            if not self._directory.knows(self._owner, self._config.record_ttl_s):
                await self._directory.note(*self._owner, ttl=self._config.record_ttl_s)
            try:
                length, created = await self._shared.append(stored, entry, ttl=self._config.record_ttl_s)
            except (TooLarge, LimitReached) as refused:
                length, created = await self._append_refused(stored, entry, turn_id, refused)
        except (OutcomeUnknown, asyncio.CancelledError):
            self._directory.doubt(self._owner)
            if turn_id is not None and not known:
                self._shared.note_outcome_unknown(stored.id)
            raise
        if created:
            self._maintenance.background.start(
                self._directory.note_creation(self._owner, self._config.record_ttl_s), name="stm-directory"
            )
        if self._shared.outcome_unknown.pop(stored.id, False) is None or not (
            known or stored.id in self._shared.added
        ):
            self._shared.note_added(stored, len(entry), length)
            self._appended(turn, ts, begins=created)
        if turn_id is not None:
            self._shared.note_acknowledged(stored.id)
        self._maintenance.schedule_after_append(length)

    def _appended(self, turn: ConversationTurn, ts: float, *, begins: bool = False) -> None:
        """Report a stored turn, once for each turn, with its time."""
        self._maintenance.stats.appended += 1
        self._maintenance.touch(begins=begins)
        self.observer.turns("appended", 1)
        if self._config.on_turn_added is not None:
            if getattr(turn, "ts", ts) != ts:
                turn = as_turn(turn)
                turn.ts = ts
            self._maintenance.background.call_back(self._config.on_turn_added, turn)

    def checked(self, turn: ConversationTurn, turn_id: str | None = None) -> StoredTurn:
        """Return a copy of a turn with its id and its time, by default a new one and the current one.

        Raises `InvalidState`, and `LimitReached` for a turn of too many characters.
        """
        stored = StoredTurn(as_turn_id(turn_id), as_turn(turn))
        now = self._shared.clock()
        if not 0 < stored.turn.ts <= now + AHEAD_S:
            stored.turn.ts = now
        with self._guard.reporting(self._whose, "add_turn"):
            self._guard.require("turn_characters", lambda: characters_of(stored.turn))
        return stored

    @observed
    async def get_llm_context(self) -> dict[str, Any]:
        """Return the context for the model, in one round trip: `{}` or `{"conversation_memory": ...}`."""
        if self._config.strategy == "none":
            return {}
        snapshot = await self._shared.load("get_llm_context")
        self._maintenance.notice(snapshot)
        view = self._shared.view(snapshot, self._config)
        if view.trimmed and self._config.budget.overflow_policy == "error":
            log.trimmed_for_reading(self._shared.log_name)
        self.observer.context_shown(lambda: view.tokens)
        return view.patch()

    @observed
    async def turns(self) -> list[ConversationTurn]:
        """Return every turn that is retained in full, oldest first."""
        return [stored.turn for stored in (await self._shared.load_copy("turns")).turns]

    @observed
    async def transcript(
        self,
        *,
        before: int | None = None,
        after: int | None = None,
        at: int | None = None,
        limit: int = 50,
    ) -> TranscriptPage:
        """Return up to `limit` turns of the whole conversation by their numbers, oldest first.

        Those before a number, after one, or around one; by default the newest. However long the conversation
        is, the record and one or two pages are read. A page of turns is as of one moment, so that reading the
        next page by the number of a turn misses none and repeats none. A conversation without a
        transcript has the turns that are retained in full.
        """
        return await read_page(self._shared, before=before, after=after, at=at, limit=limit)

    async def each_turn(self, *, after: int | None = None) -> AsyncGenerator[TranscriptTurn]:
        """Yield all turns of the conversation after a number, oldest first, in memory of a few pages.

        Each comes once. Turns that are added meanwhile come, too.
        """
        async for turn in read_all(self._shared, after=after):
            yield turn

    @observed
    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or summarizing has failed, or `timeout` seconds have passed.

        Folds fewer turns than `fold_batch_turns`, too. A degraded memory makes the attempt that is due, or
        waits for the one that is under way in any process; it waits for no later one, nor for a retry after
        an answer of a wrong type. The default timeout allows for one summarizer call, of this process or
        another, and all its retries. Cancelling stops only the waiting.
        """
        if self._config.strategy != "rolling_summary":
            return
        loop, maintenance = asyncio.get_running_loop(), self._maintenance
        until = loop.time() + (policy.patience(self._config) if timeout is None else timeout)
        failures, first = maintenance.failures, None
        # A call that an ended event loop left is not one of those that wait in this one.
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
        """Whether work for this conversation is running or planned in this process."""
        return self._maintenance.busy

    async def _append_refused(
        self, stored: StoredTurn, entry: bytes, turn_id: str | None, refused: TooLarge | LimitReached
    ) -> Appended:
        """Append to a record that has no room, unless the turn is stored, as durably as by an append.

        A repeat costs no other turn, and is not refused; see decision 0037.
        """

        async def repeated() -> Appended | bool | Lost:
            if turn_id is None or not (snapshot := await self._shared.load("add_turn")).holds(turn_id):
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
                operation="add_turn",
            ) from refused
        if isinstance(refused, LimitReached):
            raise refused
        return await self._append_to_full(stored, entry, refused)

    async def _append_to_full(self, stored: StoredTurn, entry: bytes, full: TooLarge) -> Appended:
        """Append to a record that was `full`, as the background makes room in it."""
        loop, size = asyncio.get_running_loop(), self._shared.driver.traits.room(len(entry)) + OVERHEAD
        # As long as a lease that is held now, and two requests of the fold that makes room.
        give_up_at = loop.time() + self._maintenance.lease_s + 2 * self._shared.driver.traits.deadline
        with self._maintenance.room.request(size) as request:
            while full.what == "record" and (remaining := give_up_at - loop.time()) > 0:
                if not await self._maintenance.make_room(request, within=remaining):
                    break
                try:
                    return await self._shared.append(stored, entry, ttl=self._config.record_ttl_s)
                except TooLarge as error:
                    full = error
        raise full
