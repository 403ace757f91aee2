"""Libraries that store a conversation as one value: PenguiFlow's memory and py-key-value.

Each loads the value, changes it, and saves the whole.
"""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from benchmarks.peers.conversation import Conversation, summarize
from benchmarks.peers.places import REGION, Place


class Value(Conversation):
    """Messages under one key of a py-key-value store."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self._messages: list[dict[str, str]] | None = None

    async def read(self) -> object:
        stored = await self._store.get(self._name)
        self._messages = list(stored["messages"]) if stored else []
        return self._messages

    async def store(self, user: str, assistant: str) -> None:
        await self.seed([(user, assistant)])

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        if self._messages is None:
            await self.read()
        messages = self._messages or []
        for user, assistant in turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        self._messages = messages
        await self._store.put(self._name, {"messages": messages})

    async def questions(self) -> list[str]:
        await self.read()
        return [one["content"] for one in self._messages or [] if one["role"] == "user"]


def _values(make: Callable[[Place], Any]) -> Callable[[Place], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def open_(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
        async with make(place) as store:
            yield lambda name: Value(store, name)

    return open_


def _disk(place: Place) -> Any:
    from key_value.aio.stores.disk import DiskStore

    return DiskStore(directory=f"{place.folder}/{place.name}")


def _redis(place: Place) -> Any:
    from key_value.aio.stores.redis import RedisStore

    return RedisStore(url=place.url)


def _postgres(place: Place) -> Any:
    from key_value.aio.stores.postgresql import PostgreSQLStore

    return PostgreSQLStore(url=place.url)


def _mongo(place: Place) -> Any:
    from key_value.aio.stores.mongodb import MongoDBStore

    return MongoDBStore(url=place.url, db_name=place.name)


def _dynamo(place: Place) -> Any:
    from key_value.aio.stores.dynamodb import DynamoDBStore

    return DynamoDBStore(table_name=place.name, region_name=REGION, endpoint_url=place.url)


disk, redis, postgres, mongo, dynamo = map(_values, (_disk, _redis, _postgres, _mongo, _dynamo))


class JsonInRedis:
    """A state store with PenguiFlow's two methods, on one Redis key for each conversation."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        await self._client.set(f"state:{key}", json.dumps(state))

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        data = await self._client.get(f"state:{key}")
        return None if data is None else json.loads(data)


class Penguin(Conversation):
    """PenguiFlow's memory, loaded before and saved after each turn, as its planner does."""

    def __init__(self, config: Any, store: JsonInRedis, name: str) -> None:
        self._config, self._store, self._name = config, store, name
        self._memory: Any = None

    async def read(self) -> object:
        from penguiflow.planner.memory import DefaultShortTermMemory

        self._memory = DefaultShortTermMemory(config=self._config, summarizer=summarize)
        await self._memory.hydrate(self._store, self._name)
        return await self._memory.get_llm_context()

    async def store(self, user: str, assistant: str) -> None:
        from penguiflow.planner.memory import ConversationTurn

        if self._memory is None:
            await self.read()
        await self._memory.add_turn(ConversationTurn(user, assistant))
        await self._memory.flush()
        await self._memory.persist(self._store, self._name)

    async def questions(self) -> list[str]:
        state = await self._store.load_memory_state(self._name) or {"turns": []}
        return [turn["user_message"] for turn in state["turns"]]


@asynccontextmanager
async def penguiflow(place: Place, *, keep_all: bool = False) -> AsyncIterator[Callable[[str], Conversation]]:
    """`DefaultShortTermMemory` with the strategy and the budget that ours has."""
    from penguiflow.planner.memory import MemoryBudget, ShortTermMemoryConfig
    from redis.asyncio import Redis

    budget = MemoryBudget(full_zone_turns=5, summary_max_tokens=500)
    everything = MemoryBudget(full_zone_turns=10_000, total_max_tokens=10**9)
    config = (
        ShortTermMemoryConfig(strategy="truncation", budget=everything)
        if keep_all
        else ShortTermMemoryConfig(strategy="rolling_summary", budget=budget)
    )
    async with Redis.from_url(place.url) as client:
        store = JsonInRedis(client)
        yield lambda name: Penguin(config, store, name)


@asynccontextmanager
async def penguiflow_keeping_all(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """The same, told to keep all turns, so that lost ones can be counted."""
    async with penguiflow(place, keep_all=True) as conversations:
        yield conversations
