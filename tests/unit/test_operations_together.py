"""Concurrent work ends as a whole: at its first error, or when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stm_backends.errors import Unavailable
from stm_backends.records import operations


async def fails_while_another_ends(item: str, failed: asyncio.Event, may_end: asyncio.Event) -> None:
    """Fail, or need some time to end once cancelled."""
    if item == "fails":
        failed.set()
        raise Unavailable("no server")
    try:
        await asyncio.Event().wait()
    finally:
        await may_end.wait()


async def listed(*items: str) -> AsyncIterator[str]:
    for item in items:
        yield item


@pytest.mark.parametrize("way", ["together", "each"])
async def test_a_cancellation_after_an_error_is_not_lost(way: str) -> None:
    failed, may_end = asyncio.Event(), asyncio.Event()

    async def work(item: str) -> None:
        await fails_while_another_ends(item, failed, may_end)

    items = ("waits", "fails")
    ways = {
        "together": lambda: operations.together(items, work),
        "each": lambda: operations.each(listed(*items), work),
    }
    task = asyncio.ensure_future(ways[way]())
    await failed.wait()
    await asyncio.sleep(0)
    task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", ["together", "each"])
async def test_the_first_error_is_raised_and_leaves_the_task_uncancelled(way: str) -> None:
    failed, may_end = asyncio.Event(), asyncio.Event()
    may_end.set()

    async def work(item: str) -> None:
        await fails_while_another_ends(item, failed, may_end)

    items = ("waits", "fails")
    doing = operations.together(items, work) if way == "together" else operations.each(listed(*items), work)
    with pytest.raises(Unavailable):
        await doing
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
