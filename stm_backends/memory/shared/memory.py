"""Conversation memory that many processes share: `policy` decides, a `Driver` carries it out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from stm_backends.memory import log
from stm_backends.memory.shared.base import SharedBase
from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn, read_all, read_page
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import as_turns
from stm_backends.memory.view import artifact_in
from stm_backends.records.limits import characters_of
from stm_backends.telemetry.observer import observed
from stm_backends.types import AHEAD_S, ConversationTurn, StoredTurn, as_turn, as_turn_id


class DistributedShortTermMemory(SharedBase):
    """The memory of one conversation, shared by every process that opens the same key.

    `config` may be any object with the fields of `ShortTermMemoryConfig`; without one, the memory keeps a
    rolling summary and the transcript, and needs no summarizer. `backgrounds` holds the clock and
    the background of each conversation, shared by several memories; by default this memory creates its own.
    `observer` receives events. Raises `ConfigurationError` for `rolling_summary` without a summarizer.

    For a conversation of messages, it shows each turn with its texts and tools.
    """

    _adding = "add_turn"

    def estimate_tokens(self) -> int:
        """Estimate the tokens of `get_llm_context`, from the last load and this process's turns since.

        A process that has used thousands of other conversations since then may have forgotten the load.
        """
        return self._shared.view(self._shared.known(), self._config).tokens

    def get_artifact(self, ref: str) -> Any | None:
        """Return the artifact `ref` of the newest turn that shows it, or `None`.

        Answers from the last load and this process's turns since, for turns that are retained in full. Of
        hidden artifacts, turns have only the references.
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
            await self._add_turn(turn, turn_id)

    async def _add_turn(self, turn: ConversationTurn, turn_id: str | None) -> None:
        stored = self.checked(turn, turn_id)
        refuses = self._config.budget.overflow_policy == "error"

        def accept(snapshot: Snapshot) -> None:
            # By the stored health, so that every process decides the same.
            snapshot.plus(stored).view(self._config).require_room()

        added = await self._add(
            stored,
            self._codec.seal_turn(stored),
            given=turn_id is not None,
            accept=accept if refuses else None,
        )
        if added.is_new:
            # With the time of what is stored.
            entry = added.entry if isinstance(added.entry, StoredTurn) else stored
            self._appended(turn, entry.turn.ts, begins=added.begins)

    def _appended(self, turn: ConversationTurn, ts: float, *, begins: bool = False) -> None:
        """Report a stored turn, once for each turn, with its time."""
        self._noted(1, begins=begins)
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
        return [stored.turn for stored in as_turns((await self._shared.load_copy("turns")).turns)]

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

        Returns the turns before, after or around a number; by default the newest. Reads the record and one or
        two pages, however long the conversation is. Each result is as of one moment, so that continuing at
        the number of a turn neither skips nor repeats any. A conversation without a transcript has the turns
        that are retained in full.
        """
        return await read_page(self._shared, before=before, after=after, at=at, limit=limit)

    async def each_turn(self, *, after: int | None = None) -> AsyncGenerator[TranscriptTurn]:
        """Yield all turns of the conversation after a number, oldest first, in memory of a few pages.

        Each turn is yielded once. Turns that are added meanwhile are included.
        """
        async for turn in read_all(self._shared, after=after):
            yield turn
