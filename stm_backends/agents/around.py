"""Memory around one call of an agent, whatever the agent is."""

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
    """What an agent is asked and answers, within `conversation`.

    `context` is what the model shall know: `{}` or `{"conversation_memory": ...}`.
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
        """Say what is to be remembered once the block ends well; said again, the last one counts.

        With a `turn_id` of one's own, a turn of which nobody knows whether it was stored can be recorded
        again, and is stored once. See `build_turn` for the rest. Raises `InvalidState` for what is no text.
        """
        if self.ended:
            raise ConfigurationError("the conversation's block has ended: nothing of this would be stored")
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
    """Give an agent the memory of its conversation, and remember what it answered.

    What was recorded is stored when the block ends, in one round trip, and not if it raises. A `key` that
    is `None` means no memory: the context is empty and nothing is stored. Raises what `backend.memory`
    and its `get_llm_context` raise on the way in, and what its `add_turn` raises on the way out.
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
