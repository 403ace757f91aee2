"""The sessions of the OpenAI Agents SDK, used as its runner uses them."""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from agents import SQLiteSession

from benchmarks.peers.conversation import NEWEST, Conversation, Message
from benchmarks.peers.places import TOGETHER, Place


class Session(Conversation):
    """A session. With `limit` the model is shown only so many of the newest items."""

    def __init__(self, session: Any, limit: int | None = None) -> None:
        self._session = session
        self._limit = limit

    async def store(self, user: str, assistant: str) -> None:
        await self._session.add_items(
            [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        )

    async def read(self) -> object:
        return await self._session.get_items(limit=self._limit)

    async def newest(self) -> Sequence[object]:
        return await self._session.get_items(limit=NEWEST)

    async def questions(self) -> list[str]:
        return [item["content"] for item in await self._session.get_items() if item["role"] == "user"]

    async def add(self, *messages: Message) -> None:
        await self._session.add_items([item for message in messages for item in _items(message)])

    async def said(self) -> list[str]:
        items = await self._session.get_items()
        return [item["content"] if "content" in item else item["call_id"] for item in items]

    async def whole(self) -> Sequence[object]:
        return await self._session.get_items()


def _items(message: Message) -> list[dict[str, Any]]:
    """Return a message as items of the Responses API, which is what the runner stores."""
    if message["role"] == "tool":
        result = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"type": "function_call_output", **result}]
    if calls := message.get("tool_calls"):
        return [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return [message]


@asynccontextmanager
async def sqlite(place: Place, limit: int | None = None) -> AsyncIterator[Callable[[str], Conversation]]:
    """`SQLiteSession`, on one file."""
    async with AsyncExitStack() as stack:

        def conversation(name: str) -> Conversation:
            session = SQLiteSession(name, place.url)
            stack.callback(session.close)
            return Session(session, limit)

        yield conversation


@asynccontextmanager
async def redis(place: Place, limit: int | None = None) -> AsyncIterator[Callable[[str], Conversation]]:
    """`RedisSession`, on one shared client."""
    from agents.extensions.memory.redis_session import RedisSession
    from redis.asyncio import Redis

    async with Redis.from_url(place.url) as client:
        yield lambda name: Session(RedisSession(name, redis_client=client), limit)


@asynccontextmanager
async def sqlalchemy(place: Place, limit: int | None = None) -> AsyncIterator[Callable[[str], Conversation]]:
    """`SQLAlchemySession` on asyncpg, with one shared engine."""
    from agents.extensions.memory.sqlalchemy_session import SQLAlchemySession
    from sqlalchemy.ext.asyncio import create_async_engine

    url = place.url.replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(url, pool_size=TOGETHER)
    # Once, before many conversations ask for the tables.
    await SQLAlchemySession("tables", engine=engine, create_tables=True).get_items()
    yield lambda name: Session(SQLAlchemySession(name, engine=engine), limit)
    await engine.dispose()


@asynccontextmanager
async def mongo(place: Place, limit: int | None = None) -> AsyncIterator[Callable[[str], Conversation]]:
    """`MongoDBSession`, on one shared client."""
    from agents.extensions.memory.mongodb_session import MongoDBSession
    from pymongo import AsyncMongoClient

    async with AsyncMongoClient[dict[str, Any]](place.url) as client:
        yield lambda name: Session(MongoDBSession(name, client=client, database=place.name), limit)


@asynccontextmanager
async def ours_limited(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`StmSession` on any datastore, of which the model is shown the newest items."""
    from stm_backends import MemoryKey, open_backend
    from stm_backends.integrations.openai_agents import StmSession

    async with open_backend(place.backend_url, create=True) as backend:
        yield lambda name: Session(StmSession(backend, MemoryKey("acme", "u1", name)), NEWEST)


def redis_limited(place: Place) -> AbstractAsyncContextManager[Callable[[str], Conversation]]:
    """`RedisSession`, of which the model is shown the newest items."""
    return redis(place, NEWEST)


def sqlalchemy_limited(place: Place) -> AbstractAsyncContextManager[Callable[[str], Conversation]]:
    """`SQLAlchemySession`, likewise."""
    return sqlalchemy(place, NEWEST)
