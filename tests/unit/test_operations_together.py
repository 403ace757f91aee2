"""Concurrent work ends as a whole: at its first error, or when it is cancelled."""

from __future__ import annotations

import asyncio
import gc
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


async def test_a_single_item_is_worked_on_without_a_task_of_its_own() -> None:
    async def work(item: str) -> bool:
        return item == "only" and asyncio.current_task() is caller

    caller = asyncio.current_task()
    assert await operations.together(["only"], work) == [True]


@pytest.mark.parametrize("first", ["fails", "is cancelled"])
async def test_all_work_has_ended_when_a_caller_is_cancelled_again(first: str) -> None:
    failed, may_end, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def work(item: str) -> None:
        try:
            await fails_while_another_ends(item, failed, may_end)
        finally:
            ended.append(item)

    task = asyncio.ensure_future(operations.together(("waits", first), work))
    await asyncio.sleep(0.01)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == sorted(("waits", first))


async def test_an_error_of_work_that_ends_is_not_logged_as_never_retrieved() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))

    async def work(item: str) -> None:
        try:
            await (asyncio.sleep(0) if item == "fails" else asyncio.Event().wait())
        finally:
            raise Unavailable(item)

    with pytest.raises(Unavailable, match="fails"):
        await operations.together(("waits", "fails"), work)
    gc.collect()
    assert reported == []
