"""Conversation memory that many processes share: `policy` decides, a `Driver` carries it out.

Adding a turn is one `append`, reading is one `load`, for a conversation of any age. Summaries are
written in the background by whichever process holds the conversation's lease; that none is lost or
applied twice rests on one conditional `replace` alone. Everything shared may change during any await:
nothing here concludes anything about the record from what an earlier call has seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from stm_backends import keys, log, policy
from stm_backends.codec import Codec
from stm_backends.directory import Directory
from stm_backends.driver import Driver
from stm_backends.errors import TooLarge
from stm_backends.observer import SILENT, Observer, observed
from stm_backends.protocols import Summarizer
from stm_backends.shared import SharedConversation
from stm_backends.snapshot import Snapshot
from stm_backends.tasks import Background
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    StoredTurn,
    as_config,
    as_turn,
    as_turn_id,
)
from stm_backends.upkeep import Stats, Upkeep
from stm_backends.view import render


class DistributedShortTermMemory:
    """The memory of one conversation, shared by every process that opens the same key.

    `config` may be any object with the fields of `ShortTermMemoryConfig`. `slots` bounds the summarizer
    calls in flight, across as many memories as share it. `observer` hears what it does. Raises
    `ConfigurationError` for `rolling_summary` without a summarizer.
    """

    def __init__(  # noqa: PLR0913 -- a backend gives them all; by hand a driver and a key will do
        self,
        driver: Driver,
        key: MemoryKey,
        config: object | None = None,
        *,
        summarizer: Summarizer | None = None,
        codec: Codec | None = None,
        directory: Directory | None = None,
        slots: asyncio.Semaphore | None = None,
        observer: Observer = SILENT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.observer = observer
        self._config = as_config(config)
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._owner = (key.tenant_id, key.user_id)
        self._background = Background(self)
        self._shared = SharedConversation(driver, key, self._config, self._codec, clock)
        self._upkeep = Upkeep(
            self._shared,
            keys.lease_key(key),
            policy.summarizer_for(self._config, summarizer),
            slots or asyncio.Semaphore(),
            self._background,
            observer,
        )

    @property
    def stats(self) -> Stats:
        """What this object has done so far."""
        return self._upkeep.stats

    @property
    def health(self) -> MemoryHealth:
        """How summarization is doing, as of the last load; `RECOVERING` only while this process tries."""
        return self._shared.health

    def estimate_tokens(self) -> int:
        """Estimate what `get_llm_context` would show, from the last load and our own turns since."""
        return self._shared.view(self._shared.known()).tokens

    @observed
    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Remember a completed turn: one round trip, whatever other processes do meanwhile.

        Adding the same `turn_id` again changes nothing, while the first stands and for some time after
        (the last 256 turns that left, and at least ten operation deadlines). Raises `InvalidState` for a
        turn that is not JSON, `MemoryBudgetExceeded` if `overflow_policy="error"` refuses it, `TooLarge`,
        and `OutcomeUnknown` if it was perhaps stored; nothing else stores half a turn or doubles one.
        """
        if self._config.strategy == "none":
            log.keeps_nothing()
            return
        stored = self.checked(turn, turn_id)
        entry = self._codec.seal_turn(stored)
        if self._config.budget.overflow_policy == "error":
            # The one exception to one round trip: a refusal must rest on what is there now.
            self._require_room(await self._shared.load("add_turn"), stored)
        # Costs a round trip once in a while: see Directory. Written first, so that whoever erases the
        # tenant finds this user; again after a birth, because an erasure may have come in between.
        await self._directory.note(*self._owner)
        length, born = await self._append(entry)
        if born:
            self._background.start(self._directory.note_birth(self._owner), name="stm-directory")
        self.stats.appended += 1
        self.observer.turns("appended", 1)
        if not self._shared.knows(stored.id):
            self._shared.note_added(stored, length)
            self._background.call_back(self._config.on_turn_added, turn)
        self._upkeep.stir_after_append(length)

    @staticmethod
    def checked(turn: ConversationTurn, turn_id: str | None = None) -> StoredTurn:
        """Return a copy of a turn under its id, a new one unless given. Raises `InvalidState`."""
        return StoredTurn(as_turn_id(turn_id), as_turn(turn))

    @observed
    async def get_llm_context(self) -> dict[str, Any]:
        """Return what the model shall know, in one round trip: `{}` or `{"conversation_memory": ...}`."""
        if self._config.strategy == "none":
            return {}
        snapshot = await self._shared.load("get_llm_context")
        self._upkeep.stir(self._upkeep.next_step(snapshot))
        view = self._shared.view(snapshot)
        if view.trimmed and self._config.budget.overflow_policy == "error":
            log.trimmed_for_reading()
        self.observer.context_shown(lambda: view.tokens)
        return view.patch()

    @observed
    async def turns(self) -> list[ConversationTurn]:
        """Return every turn that is retained in full, oldest first."""
        return [stored.turn for stored in (await self._shared.load_anew("turns")).turns]

    @observed
    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or the memory is degraded, or `timeout` seconds have passed.

        Folds even less than `fold_batch_turns`. Unless told otherwise it waits for one summarizer call, of
        this process or another, and all its retries. Cancelling it stops the waiting and nothing else.
        """
        if self._config.strategy != "rolling_summary":
            return
        until = asyncio.get_running_loop().time() + (
            policy.patience(self._config) if timeout is None else timeout
        )
        self._upkeep.hurried += 1
        try:
            while True:
                snapshot = await self._shared.load("flush")
                step = self._upkeep.next_step(snapshot)
                remaining = until - asyncio.get_running_loop().time()
                given_up = self.health is MemoryHealth.DEGRADED or self._upkeep.closing
                if step is None or given_up or remaining <= 0:
                    return
                self._upkeep.stir(step)
                worker = self._upkeep.worker
                if worker is not None:
                    await asyncio.wait({worker}, timeout=remaining)
                # A background that cannot do it and ends at once must not make this a busy loop.
                await asyncio.sleep(0.01)
        finally:
            self._upkeep.hurried -= 1

    async def close(self, *, timeout: float = 0.0) -> None:
        """End the background: what runs may finish within `timeout` seconds, the lease is given back.

        A later call that sees work starts the background again.
        """
        await self._upkeep.close(timeout=timeout)

    def abandon(self) -> None:
        """End the background without waiting for it; the next call that sees work starts it again."""
        self._upkeep.abandon()

    @property
    def busy(self) -> bool:
        """Whether work of this object is under way or scheduled."""
        return bool(self._background)

    def _require_room(self, snapshot: Snapshot, stored: StoredTurn) -> None:
        if not snapshot.holds(stored.id):
            pending, recent = policy.split((*snapshot.turns, stored), self._config)
            body = snapshot.body
            view = render(
                self._config, health=body.health, summary=body.summary, pending=pending, recent=recent
            )
            view.require_room()

    async def _append(self, entry: bytes) -> tuple[int, bool]:
        """Append, making room in a full record if need be; see `SharedConversation.append`."""
        give_up_at = asyncio.get_running_loop().time() + self._upkeep.lease_ttl
        while True:
            try:
                return await self._shared.append(entry)
            except TooLarge as error:
                late = asyncio.get_running_loop().time() >= give_up_at
                if error.what == "entry" or late or not await self._upkeep.relieve():
                    raise
