"""Races for a record: how long to wait after a lost one, and when to give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

RACES: Final = 10
"""How many races in a row may be lost over one version. Another process that wins a race changes the version,
so whoever loads it again reads from a former master, and no write finds it."""

CONTENDED: Final = 50
"""How many races may be lost to processes that change the record."""


class Lost(NamedTuple):
    """A lost race: the record was loaded in this state, such as a version, and nothing was changed."""

    state: object


def pause(first: float, doublings: int = 0, longest: float = 1.0) -> float:
    """Return how many seconds to wait: `first`, doubled so often, at most `longest`, less a random half."""
    return random.uniform(0.5, 1.0) * min(first * 2.0 ** min(doublings, 30), longest)


def pause_after(races: int) -> float:
    """Return how many seconds to wait after so many lost races in a row, before the next one.

    None after one or two, as every contention loses them. Where a former master still answers loads and the
    new one does the writes, all are lost: each load shows a version that the writes no longer find.
    """
    return 0.0 if races <= 2 else pause(0.01, races, 1.0)


async def contend(attempt: Callable[[], Awaitable[T | Lost]]) -> T | None:
    """Make an attempt until it is not `Lost`, and return its result; `None` once too many races were lost.

    Each attempt loads the record and ends with a conditional write. After a race that another process has
    won, the next one follows within a tenth of a second. Over a version that does not change, the pauses
    grow to a second.
    """
    lost = futile = 0
    last: object = ""
    while True:
        outcome = await attempt()
        if not isinstance(outcome, Lost):
            return outcome
        lost += 1
        futile = futile + 1 if outcome.state == last else 1
        last = outcome.state
        if futile == RACES or lost == CONTENDED:
            return None
        await asyncio.sleep(pause_after(futile) or pause(0.0005, lost, 0.1))
