"""LlamaIndex: its chat stores and ours, edited, used by several processes, and timed."""

# ruff: noqa: PLC0415 -- each store is imported where it is used, so that others need not be there

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TypeAlias

from llama_index.core.llms import ChatMessage
from llama_index.core.storage.chat_store import BaseChatStore

from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, lost_in, report, time_both, turn_of
from benchmarks.peers.losses import PROCESSES, Ready, count, in_processes
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import open_backend
from stm_backends.integrations.llama_index import StmChatStore

_EDITED = 20

_TRIMMED_AFTER = 4
"""After how many additions each process deletes the oldest message, as one that keeps a history short."""

_ADDED = "Message"

Opened: TypeAlias = Callable[[Place], AbstractAsyncContextManager[BaseChatStore]]


async def measure(place: Place, plan: Plan) -> None:
    """Edit conversations, time turns, and add and delete in several processes."""
    async with _own(place) as theirs, _ours(place.beside) as mine:
        both = (theirs, mine)
        with reporting("edits"):
            what = f"messages in their order, of {_EDITED} without the one in the middle"
            report(what, "count", *[await _deleted(store) for store in both])
            what = f"messages that are read after {_EDITED // 2} were set in the place of {_EDITED}"
            report(what, "count", *[await _replaced(store) for store in both])
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} messages"):
                for store in both:
                    await store.aset_messages(str(length), _messages(0, length))
                turns = (partial(_turn, store, str(length), length) for store in both)
                await time_both(f"read all and add a turn, after {length:,} messages", plan, *turns)
    with reporting(f"{PROCESSES} processes"):
        what = f"messages lost or doubled, of those that {PROCESSES} processes added, and deleted older ones"
        report(what, "count", await _lost(place, plan, _own), await _lost(place.beside, plan, _ours))


@asynccontextmanager
async def _redis(place: Place) -> AsyncIterator[BaseChatStore]:
    from llama_index.storage.chat_store.redis import RedisChatStore
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

    async with AsyncRedis.from_url(place.url) as client:
        with Redis.from_url(place.url) as blocking:
            yield RedisChatStore(redis_client=blocking, aredis_client=client)


@asynccontextmanager
async def _sqlite(place: Place) -> AsyncIterator[BaseChatStore]:
    from llama_index.storage.chat_store.sqlite import SQLiteChatStore
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
    from sqlalchemy.orm import sessionmaker

    # It makes its table in the constructor, which blocks.
    blocking = create_engine(f"sqlite:///{place.url}")
    engine = create_async_engine(f"sqlite+aiosqlite:///{place.url}")
    try:
        yield SQLiteChatStore(sessionmaker(blocking), async_sessionmaker(engine), "chatstore")
    finally:
        await engine.dispose()
        blocking.dispose()


_STORES: dict[str, Opened] = {"redis": _redis, "sqlite": _sqlite}


def _own(place: Place) -> AbstractAsyncContextManager[BaseChatStore]:
    return _STORES[place.datastore](place)


@asynccontextmanager
async def _ours(place: Place) -> AsyncIterator[BaseChatStore]:
    async with open_backend(place.backend_url, create=True) as backend:
        yield StmChatStore(backend, "acme", "u1")


def _messages(first: int, last: int) -> list[ChatMessage]:
    """Return the messages of a conversation from one on, and before another; turns have two."""
    roles = ("user", "assistant")
    return [ChatMessage(turn_of(n // 2)[n % 2], role=roles[n % 2]) for n in range(first, last)]


async def _turn(store: BaseChatStore, key: str, length: int) -> None:
    """Do what a memory does for a turn: read all, and add what was said."""
    await store.aget_messages(key)
    for message in _messages(length, length + 2):
        await store.async_add_message(key, message)


async def _deleted(store: BaseChatStore) -> Side:
    """Delete a message in the middle; return how many of the others stand where they should."""
    messages = _messages(0, _EDITED)
    await store.aset_messages("deleted", messages)
    await store.adelete_message("deleted", _EDITED // 2)
    del messages[_EDITED // 2]
    found = await store.aget_messages("deleted")
    right = sum(one.content == message.content for one, message in zip(found, messages, strict=False))
    return Side(right, len(messages), len(messages))


async def _replaced(store: BaseChatStore) -> Side:
    """Set other messages in the place of those that are there; return how many are read."""
    await store.aset_messages("replaced", _messages(0, _EDITED))
    await store.aset_messages("replaced", _messages(0, _EDITED // 2))
    return Side(len(await store.aget_messages("replaced")), right=_EDITED // 2)


async def _lost(place: Place, plan: Plan, opened: Opened) -> Side:
    async with opened(place) as store:
        # As many as are deleted. Nobody has to make a table while others write.
        await store.aset_messages("shared", _messages(0, PROCESSES * plan.writes // _TRIMMED_AFTER))
    said = await asyncio.to_thread(in_processes, partial(_write, opened, place, plan.writes), __name__)
    async with opened(place) as store:
        found = [str(one.content) for one in await store.aget_messages("shared")]
    acknowledged = [text for texts, _ in said for text in texts]
    added = [text for text in found if text.startswith(_ADDED)]
    return lost_in(count(acknowledged, added, (errors for _, errors in said)))


async def _write(
    opened: Opened, place: Place, writes: int, number: int, ready: Ready
) -> tuple[list[str], dict[str, int]]:
    acknowledged, errors = list[str](), Counter[str]()
    async with opened(place) as store:
        await ready()
        for nth in range(1, writes + 1):
            text = f"{_ADDED} {nth} of process {number}."
            try:
                await store.async_add_message("shared", ChatMessage(text))
                acknowledged.append(text)
                if not nth % _TRIMMED_AFTER:
                    await store.adelete_message("shared", 0)
            except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
                errors[type(error).__name__] += 1
    return acknowledged, dict(errors)
