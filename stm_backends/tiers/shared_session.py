"""Short-term memory in a conversation of a backend, shared by every process that uses the same session.

Each operation of the session is a turn: `user_message` is its name, `assistant_response` its JSON. The
summary of the conversation is the session that results from the previous turns, as JSON, so folding the
conversation loses nothing of the session. See `stm_backends.tiers.session` for the operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from stm_backends.drivers.checks import require_backend
from stm_backends.errors import Corrupt, TooLarge, Unavailable
from stm_backends.guarded import utc_now
from stm_backends.plain_json import require_json
from stm_backends.records import keys
from stm_backends.telemetry.observer import Observer
from stm_backends.tiers import relevance
from stm_backends.tiers.embedding import Embedder
from stm_backends.tiers.entry import MemoryEntry
from stm_backends.tiers.session import Operation, Session
from stm_backends.tiers.short_term import ShortTermMemory, report_pruned
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
)

if TYPE_CHECKING:
    from stm_backends.backend import Backend

FOLD_AT: Final = 64
"""Number of operations after which they are folded."""

_UNLIMITED: Final = 2**53


class SharedShortTermMemory(ShortTermMemory):
    """The entries of one session, shared by every process that opens the same `key`.

    `key` is the key of the agent's conversation. The entries are kept in a separate conversation, whose
    session id has `#short-term` appended. Listing, export and copying of a user include it, and erasing the
    agent's conversation erases it. It expires `session_ttl_s` seconds after the last operation; `None` means
    never. Writing an entry takes one round trip, reading takes one, and a recall takes both. Contents that
    are not JSON raise `InvalidState`. `entries`, `size`, `len()` and `in` do no I/O: they reflect the last
    read and the later writes of this process. The backend must be open, and stays open.
    """

    def __init__(  # noqa: PLR0913 -- the parameters of `ShortTermMemory`, and the place
        self,
        backend: Backend,
        key: MemoryKey,
        max_entries: int = 100,
        relevance_threshold: float = 0.15,
        refresh_interval: int = 10,
        *,
        session_ttl_s: float | None = None,
        embedder: Embedder | None = None,
        recall_cosine: float = relevance.RECALL_COSINE,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        require_backend(backend)
        keys.require_key(key)
        super().__init__(
            max_entries,
            relevance_threshold,
            refresh_interval,
            session_id=key.session_id,
            embedder=embedder,
            recall_cosine=recall_cosine,
            observer=backend.observer,
            clock=clock,
            journal=ConversationJournal(backend, key, session_ttl_s),
        )
        self.owner = (key.tenant_id, key.user_id)

    def _name_of(self, session: Session) -> str:
        # After this session has expired, a new one begins under the same key.
        return f"{self._session_id}:{session.id}"


class ConversationJournal:
    """A session whose operations are the turns of a conversation."""

    def __init__(self, backend: Backend, key: MemoryKey, session_ttl_s: float | None) -> None:
        self.known = Session()
        self._name = backend.name
        self._observer: Observer = backend.observer
        # A stored text takes up to twice its length in JSON.
        self.largest = backend.traits.max_entry // 2 - 4096
        most = backend.guard.limits.conversation_turns
        config = ShortTermMemoryConfig(
            strategy="rolling_summary",
            budget=MemoryBudget(full_zone_turns=0, summary_max_tokens=_UNLIMITED, total_max_tokens=0),
            # Turns without a fold must never be dropped.
            recovery_backlog_limit=_UNLIMITED,
            # Fold before the record reaches its maximum number.
            fold_batch_turns=FOLD_AT if most is None else max(1, min(FOLD_AT, most // 2)),
            fold_max_turns=4 * FOLD_AT,
            fold_max_tokens=_UNLIMITED,
            session_ttl_s=session_ttl_s,
            on_summary_updated=self._folded,
        )
        self.conversation = backend.short_term_conversation(key, config, summarizer=self.fold)

    async def read(self) -> Session:
        context: dict[str, Any] = (await self.conversation.get_llm_context()).get("conversation_memory", {})
        if self.conversation.health is MemoryHealth.DEGRADED:
            # The context lacks the turns that are not folded.
            raise Unavailable(
                "the operations of a session cannot be folded", backend=self._name, operation="load"
            )
        turns = (*context.get("pending_turns", ()), *context.get("recent_turns", ()))
        self.known = _applied(context.get("summary", ""), turns)
        return self.known

    async def write(self, operation: Operation) -> None:
        await self.conversation.add_turn(ConversationTurn(operation["op"], _encoded(operation)))
        # An estimate until the next read: other processes may have written first.
        self.known = self.known.after(operation)

    async def fold(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Summarize for the conversation: apply the operations of the turns to the session."""
        session = _applied(request["previous_summary"], request["turns"])
        text = json.dumps(session.to_dict(), separators=(",", ":"))
        if len(text) > self.largest:
            # A longer summary would be cut.
            raise TooLarge("entry", size=len(text), limit=self.largest, backend=self._name, operation="fold")
        return {"summary": text}

    async def _folded(self, old: str, new: str) -> None:
        report_pruned(self._observer, _session_of(new).pruned - _session_of(old).pruned)


def _session_of(summary: str) -> Session:
    return Session.from_dict(json.loads(summary)) if summary else Session()


def _applied(summary: str, turns: Iterable[Mapping[str, Any]]) -> Session:
    try:
        session = _session_of(summary)
        for turn in turns:
            session.apply(_decoded(turn["assistant"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Corrupt("a stored session has a field of another type") from None
    return session


def _encoded(operation: Operation) -> str:
    plain = dict(operation)
    require_json(plain.get("content"), "content")
    if "entry" in plain:
        plain["entry"] = plain["entry"].to_dict()
    if "at" in plain:
        plain["at"] = plain["at"].isoformat()
    return json.dumps(plain, separators=(",", ":"))


def _decoded(text: str) -> Operation:
    operation: Operation = json.loads(text)
    if "entry" in operation:
        operation["entry"] = MemoryEntry.from_dict(operation["entry"])
    if "at" in operation:
        operation["at"] = datetime.fromisoformat(operation["at"])
    return operation
