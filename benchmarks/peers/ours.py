"""stm-backends: folding older turns into a summary, keeping all, what a product shows, and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks.peers.conversation import (
    NEWEST,
    SHOWN,
    Conversation,
    Message,
    Opened,
    summarize,
    text_of,
)
from benchmarks.peers.places import Place
from stm_backends import (
    Backend,
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

SHOWN_TOKENS = 8_000
"""What the documentation's programs show their models."""

EVERY_TOKENS = 10_000_000


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
        await _until_idle(self._memory)


async def _until_idle(memory: Any) -> None:
    while memory.busy:  # noqa: ASYNC110 -- it has no event for that
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


class Shown(Ours):
    """A memory with its transcript, and beside it the same conversation as items of a session."""

    def __init__(self, backend: Backend, name: str) -> None:
        from stm_backends.integrations.openai_agents import StmSession  # noqa: PLC0415 -- only here

        config = replace(FOLDING, transcript=True)
        super().__init__(backend.memory(MemoryKey("acme", "u1", name), config, summarizer=summarize))
        self._session = StmSession(backend, MemoryKey("acme", "u2", name))
        self._list = backend.conversations

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        # At once, and so in any order.
        await asyncio.gather(*(self._add(*turn) for turn in turns))

    async def _add(self, user: str, assistant: str) -> None:
        await self.store(user, assistant)
        await self._session.add_items(
            [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        )

    async def history(self, middle: int) -> Sequence[object]:
        return (await self._memory.transcript(at=middle, limit=SHOWN)).turns

    async def newest(self) -> Sequence[object]:
        return await self._session.get_items(limit=NEWEST)

    async def sidebar(self) -> Sequence[object]:
        return (await self._list.list("acme", "u1", limit=SHOWN)).cards


@asynccontextmanager
async def shown(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """Open a backend whose conversations have a transcript, items, and a place in the list."""
    async with open_backend(place.backend_url, create=True) as backend:
        yield lambda name: Shown(backend, name)


class Talk(Conversation):
    """A conversation of messages that all processes share."""

    def __init__(self, backend: Backend, name: str, max_tokens: int | None) -> None:
        self._chat = backend.conversation("acme", "u1", name, max_tokens=max_tokens)
        self._shown = SHOWN_TOKENS if max_tokens is None else None

    async def add(self, *messages: Message) -> None:
        await self._chat.add(*messages)

    async def read(self) -> object:
        return await self._chat.messages(max_tokens=self._shown)

    async def said(self) -> list[str]:
        return [text_of(one.message) async for one in self._chat.each_message()]

    async def history(self, middle: int) -> Sequence[object]:
        return (await self._chat.history(at=middle, limit=SHOWN)).messages

    async def settle(self) -> None:
        await _until_idle(self._chat)


def talking(max_tokens: int | None = None) -> Opened:
    """Return what opens a backend with conversations of messages, of which so many tokens are shown."""

    @asynccontextmanager
    async def open_(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
        async with open_backend(place.backend_url, create=True) as backend:
            yield lambda name: Talk(backend, name, max_tokens)

    return open_


messages = talking()
every_message = talking(EVERY_TOKENS)
