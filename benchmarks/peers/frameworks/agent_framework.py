"""Microsoft Agent Framework: `RedisHistoryProvider` and ours, used as a run of an agent uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from agent_framework import HistoryProvider, Message
from agent_framework_redis import RedisHistoryProvider
from redis.asyncio import Redis

from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, report, time_both, turn_of
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import MemoryKey, open_backend
from stm_backends.integrations.agent_framework import StmHistoryProvider

_REPLAYED = 20
_TIMES = 4

Providers: TypeAlias = Callable[[], HistoryProvider]
"""Makes a provider, as each process has one."""


async def measure(place: Place, plan: Plan) -> None:
    """Send messages again, one client after the other and at once, and time the storage of runs."""
    async with _own(place) as theirs, _ours(place.beside) as mine:
        both = (theirs, mine)
        with reporting("replays"):
            what = f"messages stored of {_REPLAYED}, which one client sent {_TIMES} times"
            report(what, "count", *[await _again(providers) for providers in both])
            what = f"the same, where {_TIMES} clients at once sent all that was said, after each exchange"
            report(what, "count", *[await _at_once(providers) for providers in both])
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} messages"):
                runs: list[Callable[[], Any]] = []
                # One call more of each than those that are timed.
                said = [_messages(length + 2 * n, length + 2 * n + 2) for n in range(plan.rounds + 1)]
                for providers in both:
                    provider = providers()
                    await provider.save_messages(str(length), _messages(0, length))
                    runs.append(partial(_run, provider, str(length), iter(said)))
                await time_both(f"read and store for a run, after {length:,} messages", plan, *runs)


@asynccontextmanager
async def _own(place: Place) -> AsyncIterator[Providers]:
    async with Redis.from_url(place.url, decode_responses=True) as client:
        yield lambda: RedisHistoryProvider(redis_client=client, application_id="acme")


@asynccontextmanager
async def _ours(place: Place) -> AsyncIterator[Providers]:
    async with open_backend(place.backend_url, create=True) as backend:
        yield lambda: StmHistoryProvider(backend, lambda session_id: MemoryKey("acme", "u1", session_id))


def _messages(first: int, last: int) -> list[Message]:
    """Return the messages of a conversation from one on, and before another; turns have two."""
    roles = ("user", "assistant")
    return [Message(roles[number % 2], [turn_of(number // 2)[number % 2]]) for number in range(first, last)]


async def _run(provider: HistoryProvider, session: str, said: Iterator[list[Message]]) -> None:
    """Do what the framework does for a run: read all, and add what was said."""
    await provider.get_messages(session)
    await provider.save_messages(session, next(said))


async def _again(providers: Providers) -> Side:
    for _ in range(_TIMES):
        await providers().save_messages("again", _messages(0, _REPLAYED))
    return await _count(providers, "again")


async def _at_once(providers: Providers) -> Side:
    async def replay() -> None:
        provider = providers()
        for end in range(2, _REPLAYED + 1, 2):
            await provider.save_messages("at once", _messages(0, end))

    await asyncio.gather(*(replay() for _ in range(_TIMES)))
    return await _count(providers, "at once")


async def _count(providers: Providers, session: str) -> Side:
    return Side(len(await providers().get_messages(session)), right=_REPLAYED)
