"""Lost races and lost answers: how long to wait before the next attempt, and when to give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from stm_backends.errors import OutcomeUnknown, StorageError

T = TypeVar("T")

ATTEMPTS: Final = 3
"""Maximum number of attempts of a write while its outcome is unknown. Both kinds of write may be repeated."""

RACES: Final = 10
"""Maximum number of races lost in a row over one version. A process that wins a race changes the version,
so a load that shows it again comes from a former master, and no write finds it."""

CONTENDED: Final = 50
"""Maximum number of races lost to processes that change the record."""


class Lost(NamedTuple):
    """A lost race: the record was loaded in this state, such as a version, and nothing was changed."""

    state: object


def pause(first: float, doublings: int = 0, longest: float = 1.0) -> float:
    """Return seconds to wait: `first`, doubled `doublings` times, at most `longest`, less a random half."""
    return random.uniform(0.5, 1.0) * min(first * 2.0 ** min(doublings, 30), longest)


def pause_after(races: int) -> float:
    """Return how many seconds to wait after this many lost races in a row, before the next one.

    Zero after one or two, which any contention costs. While a former master still answers loads and the new
    one does the writes, every race is lost: each load shows a version that the writes no longer find.
    """
    return 0.0 if races <= 2 else pause(0.01, races, 1.0)


async def contend(attempt: Callable[[], Awaitable[T | Lost]]) -> T | None:
    """Repeat an attempt until it is not `Lost`, and return its result; `None` once too many races were lost.

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


async def retried(
    write: Callable[[], Awaitable[T]], *, after: OutcomeUnknown | None = None, attempts: int = ATTEMPTS
) -> T:
    """Carry out a repeatable write, again while its outcome is unknown, at most `attempts` times.

    Once the outcome of one attempt is unknown, only a later success settles it: any other error of a later
    attempt raises `OutcomeUnknown`, too. `after` is the error of a first attempt by the caller.
    """
    unknown, attempt = after, 0 if after is None else 1
    while True:
        if attempt:
            await asyncio.sleep(pause(0.05, attempt, 1.0))
        attempt += 1
        try:
            return await write()
        except OutcomeUnknown as error:
            unknown = error
            if attempt >= attempts:
                raise
        except StorageError as error:
            if unknown is None:
                raise
            raise unknown from error


async def settled(write: Callable[[], Awaitable[bool]], again: Callable[[], Awaitable[bool]]) -> bool:
    """Carry out a conditional write; `False` if it was certainly not done.

    While the outcome is unknown, `again` is called; it returns whether the write was done. Raises
    `OutcomeUnknown` if that cannot be told: the write may have been done, and others may have followed it.
    """
    try:
        return await write()
    except OutcomeUnknown as unknown:
        if await retried(again, after=unknown):
            return True
        raise
