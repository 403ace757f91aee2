"""Memory around one call of any agent."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from stm_backends.agents.prompt import apply_memory
from stm_backends.agents.turns import ToolStep, build_turn
from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend
from stm_backends.errors import ConfigurationError
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.records.keys import require_key
from stm_backends.types import MemoryKey, StoredTurn, as_turn, as_turn_id

if TYPE_CHECKING:
    from stm_backends.tiers import MemoryManager

BACKGROUND_TOKENS: Final = 1000
"""The budget of the context window of the tiers, unless the caller sets another."""


class Exchange:
    """One call of an agent within `conversation`: the context to use and the answer to store.

    `context` is the model's context: `{}` or `{"conversation_memory": ...}`. With `tiers`, it also has
    `"background_memory"`, a list of `{"key", "content"}`, unless that is empty.
    """

    def __init__(self, context: dict[str, Any]) -> None:
        self.context = context
        self.recorded: StoredTurn | None = None
        self.ended = False
        self.ends_session = False

    def record(
        self,
        query: str,
        answer: object,
        *,
        tools: Iterable[ToolStep] = (),
        reasoning: str | None = None,
        turn_id: str | None = None,
        artifacts_shown: Mapping[str, Any] | None = None,
        artifacts_hidden_refs: Iterable[str] = (),
    ) -> None:
        """Record the turn to store when the block ends without an exception; the last call counts.

        With an explicit `turn_id`, a turn can be recorded again after `OutcomeUnknown` and is stored once.
        The other arguments are those of `build_turn`. Raises `InvalidState` for values that are not text.
        """
        self._require_open("the turn would not be stored")
        turn = build_turn(
            query,
            answer,
            tools,
            reasoning=reasoning,
            artifacts_shown=artifacts_shown,
            artifacts_hidden_refs=artifacts_hidden_refs,
        )
        self.recorded = StoredTurn(as_turn_id(turn_id), as_turn(turn))

    def end_session(self) -> None:
        """End the tiers' session when the block ends without an exception; a no-op without tiers."""
        self._require_open("the session would not be ended")
        self.ends_session = True

    def _require_open(self, otherwise: str) -> None:
        if self.ended:
            raise ConfigurationError(f"the conversation's block has ended, so {otherwise}")


@asynccontextmanager
async def conversation(
    backend: Backend,
    key: MemoryKey | None,
    config: ConfigLike | None,
    *,
    summarizer: Summarizer | None = None,
    tiers: MemoryManager | None = None,
    tiers_max_tokens: int = BACKGROUND_TOKENS,
) -> AsyncGenerator[Exchange]:
    """Give an agent the memory of its conversation, and store its answer.

    The recorded turn is stored in one round trip when the block ends, unless the block raises. If `key`
    is `None`, the call has no memory: the context is empty and nothing is stored. Entering raises what
    `backend.memory` and `get_llm_context` raise; leaving raises what `add_turn` raises.

    With `tiers`, the context also has the context window of that manager, of at most `tiers_max_tokens`. When
    the block ends, even with an exception, `gc.on_turn_end()` is called. If the exchange ends the session,
    `gc.on_session_end()` is called after the turn was stored. Without a key, nothing is shown or promoted.
    Raises what `get_context_window` and the hooks raise, and `ConfigurationError` if the manager belongs to
    another user than the key.
    """
    require_backend(backend)
    if tiers is not None and key is not None:
        _require_owner(tiers, key)
    memory = None if key is None else backend.memory(key, config, summarizer=summarizer)
    context = await apply_memory(None, memory)
    if tiers is not None and key is not None:
        context |= await _background(tiers, tiers_max_tokens)
    exchange = Exchange(context)
    try:
        yield exchange
    finally:
        exchange.ended = True
        if tiers is not None:
            # Also without a key: the notes of one call must not reach the next one.
            await tiers.gc.on_turn_end()
    if memory is not None and exchange.recorded is not None:
        await memory.add_turn(exchange.recorded.turn, turn_id=exchange.recorded.id)
    if tiers is not None and key is not None and exchange.ends_session:
        await tiers.gc.on_session_end()


def _require_owner(tiers: MemoryManager, key: MemoryKey) -> None:
    """Refuse to show the memories of one user in the conversation of another."""
    require_key(key)
    if tiers.owner not in (None, (key.tenant_id, key.user_id)):
        raise ConfigurationError("the tiers belong to another user than the conversation")


async def _background(tiers: MemoryManager, max_tokens: int) -> dict[str, Any]:
    window = await tiers.get_context_window(max_tokens)
    shown = [{"key": entry.key, "content": _as_json(entry.content)} for entry in window]
    return {"background_memory": shown} if shown else {}


def _as_json(content: Any) -> Any:
    """Return a content, as text if it is not JSON; the content of this process's session may not be."""
    try:
        json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return str(content)
    return content
