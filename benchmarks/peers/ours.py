"""stm-backends, in two configurations: folding older turns into a summary, and keeping every turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from benchmarks.peers.conversation import Conversation, Opened, summarize
from benchmarks.peers.places import Place
from stm_backends import (
    ConversationTurn,
    DistributedShortTermMemory,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)

FOLDING = ShortTermMemoryConfig(
    "rolling_summary", MemoryBudget(full_zone_turns=5, summary_max_tokens=500), fold_batch_turns=5
)
KEEPING_ALL = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=10_000, total_max_tokens=0))


class Ours(Conversation):
    """A memory that all processes share."""

    def __init__(self, memory: DistributedShortTermMemory) -> None:
        self._memory = memory

    async def store(self, user: str, assistant: str) -> None:
        await self._memory.add_turn(ConversationTurn(user, assistant))

    async def read(self) -> object:
        return await self._memory.get_llm_context()

    async def questions(self) -> list[str]:
        return [turn.user_message for turn in await self._memory.turns()]

    async def settle(self) -> None:
        while self._memory.busy:  # noqa: ASYNC110 -- it has no event for that
            await asyncio.sleep(0.0005)


def opened(config: ShortTermMemoryConfig) -> Opened:
    """Return what opens a backend whose memories have this configuration."""

    @asynccontextmanager
    async def open_(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
        async with open_backend(place.backend_url, create=True) as backend:
            yield lambda name: Ours(
                backend.memory(MemoryKey("acme", "u1", name), config, summarizer=summarize)
            )

    return open_


folding = opened(FOLDING)
keeping_all = opened(KEEPING_ALL)
