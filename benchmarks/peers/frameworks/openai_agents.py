"""The OpenAI Agents SDK: its sessions and ours. Both are wrapped alike, to be given the same calls."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

from benchmarks.peers import openai_sessions
from benchmarks.peers.conversation import NEWEST, Conversation, Message
from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, report, time_both, turn_of
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place

_OWN = {
    "sqlite": openai_sessions.sqlite,
    "postgres": openai_sessions.sqlalchemy,
    "redis": openai_sessions.redis,
}
_AT_ONCE = 200


async def measure(place: Place, plan: Plan) -> None:
    """Time items that are added and read, and cancel calls."""
    async with (
        _OWN[place.datastore](place) as theirs,
        openai_sessions.ours_limited(place.beside) as mine,
    ):
        both = (theirs, mine)
        with reporting(f"{plan.longest:,} items"):
            sessions = [one("long") for one in both]
            for session in sessions:
                for first in range(0, plan.longest, _AT_ONCE):
                    await session.add(*_items(first, min(first + _AT_ONCE, plan.longest)))
            adds = (partial(session.store, *turn_of(plan.longest)) for session in sessions)
            await time_both(f"`add_items` of 2, after {plan.longest:,}", plan, *adds)
            reads = (partial(session.newest) for session in sessions)
            await time_both(f"`get_items(limit={NEWEST})`, after {plan.longest:,}", plan, *reads)
        with reporting("cancelled calls"):
            what = "cancelled `add_items` that landed after a later read"
            report(what, "count", *[await cancelled(one("cancelled"), plan.cancelled) for one in both])


def _items(first: int, last: int) -> list[Message]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": turn_of(number // 2)[number % 2]}
        for number in range(first, last)
    ]


async def cancelled(session: Conversation, times: int) -> Side:
    """Cancel calls in the middle; return how many of these stored an item after a read that came later."""
    taken = [await _timed(session, number) for number in range(5)]
    errors, given_up, unseen = Counter[str](), 0, set[str]()
    for number in range(times):
        text = f"cancelled {number}"
        call = asyncio.create_task(session.add({"role": "user", "content": text}))
        until = time.perf_counter() + random.uniform(0, statistics.median(taken))
        while time.perf_counter() < until:  # noqa: ASYNC110 -- a timer of the loop is exact to a millisecond
            await asyncio.sleep(0)
        call.cancel()
        # An exception of the call is an outcome, too; it is not raised here.
        await asyncio.wait({call})
        if not call.cancelled():
            if error := call.exception():
                errors[type(error).__name__] += 1
            continue
        given_up += 1
        items: Any = await session.newest()
        if text not in [item["content"] for item in items]:
            unseen.add(text)
    # For what goes on in threads, and on the server.
    await asyncio.sleep(0.5)
    return Side(len(unseen & {*await session.said()}), given_up, right=0, errors=dict(errors))


async def _timed(session: Conversation, number: int) -> float:
    start = time.perf_counter()
    await session.add({"role": "user", "content": f"timed {number}"})
    return time.perf_counter() - start
