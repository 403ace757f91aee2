"""The session services of Google's Agent Development Kit, used as its runner uses them.

A run loads the session once, and appends each event to what it has loaded. Where another process has appended
meanwhile, the services on SQL and MongoDB raise `StaleSessionError`, and the run ends.
"""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from google.adk.events import Event
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from benchmarks.peers.conversation import NEWEST, Conversation, Message
from benchmarks.peers.places import TOGETHER, Place


class Session(Conversation):
    """A session. With `limit` only so many of the newest events are loaded."""

    def __init__(self, service: Any, name: str, limit: int | None = None) -> None:
        self._service = service
        self._key = {"app_name": "acme", "user_id": "u1", "session_id": name}
        self._config = None if limit is None else GetSessionConfig(num_recent_events=limit)

    async def read(self) -> Sequence[Event]:
        return (await self._loaded(self._config)).events

    async def add(self, *messages: Message) -> None:
        await self._append(await self._loaded(self._config), messages)

    async def seed_messages(self, exchanges: Sequence[Sequence[Message]]) -> None:
        await self.add(*(message for exchange in exchanges for message in exchange))

    async def speak(self, exchange: Sequence[Message], thinking_s: float = 0) -> Sequence[Event]:
        question, *answer = exchange
        session = await self._loaded(self._config)
        await self._append(session, [question])
        shown = [*session.events]
        await asyncio.sleep(thinking_s)
        await self._append(session, answer)
        return shown

    async def said(self) -> list[str]:
        return [_text(event.content.parts[0]) for event in await self.whole()]

    async def whole(self) -> Sequence[Any]:
        return (await self._loaded(None)).events

    async def _loaded(self, config: GetSessionConfig | None) -> Any:
        found = await self._service.get_session(**self._key, config=config)
        return found or await self._service.create_session(**self._key)

    async def _append(self, session: Any, messages: Sequence[Message]) -> None:
        for message in messages:
            await self._service.append_event(session, _event(message))


def _event(message: Message) -> Event:
    """Return a message as an event, with what a run would say of it."""
    if message["role"] == "tool":
        response = {"result": json.loads(message["content"])}
        # The service reads by its id alone; the model would be given the name.
        part = types.Part(
            function_response=types.FunctionResponse(
                id=message["tool_call_id"], name="tool", response=response
            )
        )
    elif calls := message.get("tool_calls"):
        call, arguments = calls[0], json.loads(calls[0]["function"]["arguments"])
        part = types.Part(
            function_call=types.FunctionCall(id=call["id"], name=call["function"]["name"], args=arguments)
        )
    else:
        part = types.Part(text=message["content"])
    by_model = message["role"] == "assistant"
    return Event(
        invocation_id="one",
        author="user" if message["role"] == "user" else "agent",
        content=types.Content(role="model" if by_model else "user", parts=[part]),
    )


def _text(part: types.Part) -> str:
    called = part.function_call or part.function_response
    return (called.id if called else part.text) or ""


@asynccontextmanager
async def sqlite(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`SqliteSessionService`, which its command line takes for `sqlite://`."""
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    service = SqliteSessionService(place.url)
    yield lambda name: Session(service, name)


@asynccontextmanager
async def database(place: Place) -> AsyncIterator[Any]:
    """Open a `DatabaseSessionService`, on aiosqlite or asyncpg."""
    from google.adk.sessions import DatabaseSessionService

    if place.datastore == "sqlite":
        made = DatabaseSessionService(f"sqlite+aiosqlite:///{place.url}")
    else:
        url = place.url.replace("postgresql://", "postgresql+asyncpg://")
        made = DatabaseSessionService(url, pool_size=TOGETHER)
    async with made as service:
        yield service


@asynccontextmanager
async def _database(place: Place, limit: int | None = None) -> AsyncIterator[Callable[[str], Conversation]]:
    async with database(place) as service:
        yield lambda name: Session(service, name, limit)


def sqlite_database(place: Place) -> AbstractAsyncContextManager[Callable[[str], Conversation]]:
    """`DatabaseSessionService` on aiosqlite."""
    return _database(place)


def postgres(place: Place) -> AbstractAsyncContextManager[Callable[[str], Conversation]]:
    """`DatabaseSessionService` on asyncpg."""
    return _database(place)


def postgres_limited(place: Place) -> AbstractAsyncContextManager[Callable[[str], Conversation]]:
    """`DatabaseSessionService` on asyncpg, of which a run loads the newest events."""
    return _database(place, NEWEST)


@asynccontextmanager
async def redis(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`RedisSessionService`, on one shared client."""
    from google.adk.integrations.redis import RedisSessionService
    from redis.asyncio import Redis

    async with Redis.from_url(place.url, decode_responses=True) as client:
        service = RedisSessionService(redis_client=client)
        yield lambda name: Session(service, name)


@asynccontextmanager
async def mongo(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`MongoDbSessionService`, on one shared client, whose calls run in threads."""
    from google.adk.integrations.mongodb import MongoDbSessionService
    from pymongo import MongoClient

    with MongoClient[dict[str, Any]](place.url) as client:
        service = MongoDbSessionService(database_name=place.name, mongo_client=client)
        yield lambda name: Session(service, name)
