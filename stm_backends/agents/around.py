"""Memory around one call of any agent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from stm_backends.agents.prompt import apply_memory
from stm_backends.agents.turns import ToolStep, build_turn
from stm_backends.backend import Backend
from stm_backends.errors import ConfigurationError
from stm_backends.protocols import Summarizer
from stm_backends.types import MemoryKey, StoredTurn, as_turn, as_turn_id


class Exchange:
    """One call of an agent within `conversation`: the context to use and the answer to store.

    `context` is what to give the model: `{}` or `{"conversation_memory": ...}`.
    """

    def __init__(self, context: dict[str, Any]) -> None:
        self.context = context
        self.recorded: StoredTurn | None = None
        self.ended = False

    def record(
        self,
        query: str,
        answer: object,
        *,
        tools: Iterable[ToolStep] = (),
        reasoning: str | None = None,
        turn_id: str | None = None,
    ) -> None:
        """Record the turn to store when the block ends without an exception; the last call counts.

        With an explicit `turn_id`, a turn can be recorded again after `OutcomeUnknown` and is stored once.
        The other arguments are those of `build_turn`. Raises `InvalidState` for values that are not text.
        """
        if self.ended:
            raise ConfigurationError("the conversation's block has ended, so the turn would not be stored")
        turn = build_turn(query, answer, tools, reasoning=reasoning)
        self.recorded = StoredTurn(as_turn_id(turn_id), as_turn(turn))


@asynccontextmanager
async def conversation(
    backend: Backend,
    key: MemoryKey | None,
    config: object,
    *,
    summarizer: Summarizer | None = None,
) -> AsyncGenerator[Exchange]:
    """Give an agent the memory of its conversation, and store its answer.

    The recorded turn is stored in one round trip when the block ends, and not if the block raises. If `key`
    is `None`, there is no memory: the context is empty and nothing is stored. Entering raises what
    `backend.memory` and `get_llm_context` raise; leaving raises what `add_turn` raises.
    """
    memory = None if key is None else backend.memory(key, config, summarizer=summarizer)
    exchange = Exchange(await apply_memory(None, memory))
    try:
        yield exchange
    finally:
        exchange.ended = True
    if memory is not None and exchange.recorded is not None:
        turn_id, turn, _ = exchange.recorded
        await memory.add_turn(turn, turn_id=turn_id)
