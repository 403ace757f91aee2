"""Work in the background: held on to, bounded in time, and never in anybody's way."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from stm_backends.handed_in import Misbehaved
from stm_backends.memory.tasks import Background, LoopLock
from tests.support import clock


async def test_an_unreferenced_task_is_not_lost() -> None:
    background, done = Background(), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.set()

    background.start(work(), name="work")
    gc.collect()
    assert background
    await asyncio.wait_for(done.wait(), 5)
    await asyncio.sleep(0)
    assert not background


async def test_a_callback_that_raises_is_logged_without_what_it_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background = Background()

    async def raises(text: str) -> None:
        raise RuntimeError(text)

    with caplog.at_level(logging.WARNING, logger="stm_backends"):
        background.call_back(raises, "secret")
        await background.close(timeout=5)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_callback_need_not_be_there_nor_awaitable() -> None:
    background, seen = Background(), list[int]()
    background.call_back(None, 1)
    background.call_back(seen.append, 2)
    await background.close(timeout=5)
    assert seen == [2]


async def test_what_a_function_returns_or_raises_reaches_the_caller() -> None:
    background = Background()

    async def answers(value: int) -> int:
        return value

    async def raises(value: int) -> int:
        raise LookupError

    assert await background.call_within(5, answers, 7) == 7
    assert await background.call_within(5, lambda value: value, 8) == 8
    with pytest.raises(LookupError):
        await background.call_within(5, raises, 7)


@clock.virtually
async def test_a_function_that_ignores_its_cancellation_times_out() -> None:
    background, ended = Background(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(10)
            ended.set()

    started = clock.now()
    with pytest.raises(TimeoutError):
        await background.call_within(2, stubborn)
    assert clock.now() - started == 2
    assert not ended.is_set()
    await background.close(timeout=60)
    assert ended.is_set()


def test_a_function_that_fails_after_its_timeout_has_no_effect() -> None:
    async def main() -> None:
        background = Background()

        async def late() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                raise LookupError

        with pytest.raises(TimeoutError):
            await background.call_within(2, late)
        await background.close(timeout=60)

    clock.run(main())
    gc.collect()


async def test_a_function_that_is_cancelled_from_within_has_failed() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(Misbehaved, match="cancelled"):
        await Background().call_within(5, cancelled)


async def test_cancelling_the_caller_cancels_the_function() -> None:
    background, started, ended = Background(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    caller = asyncio.create_task(background.call_within(60, work))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.wait_for(ended.wait(), 5)


@clock.virtually
async def test_closing_waits_and_then_cancels() -> None:
    background, done = Background(), list[str]()

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            done.append(name)
        except asyncio.CancelledError:
            done.append(f"{name} cancelled")
            raise

    background.start(work("quick", 1), name="quick")
    background.start(work("slow", 100), name="slow")
    started = clock.now()
    await background.close(timeout=5)
    assert done == ["quick", "slow cancelled"]
    assert clock.now() - started == 5
    await background.close(timeout=5)


@clock.virtually
async def test_a_cancelled_close_still_lets_tasks_release_what_they_hold() -> None:
    background, given_back = Background(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.5)
            given_back.set()

    background.start(work(), name="work")
    started = clock.now()
    closing = asyncio.create_task(background.close(timeout=100))
    await asyncio.sleep(1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert given_back.is_set()
    assert not background
    assert clock.now() - started == 1.5


@clock.virtually
async def test_closing_covers_tasks_started_during_the_close() -> None:
    background, done = Background(), list[str]()

    async def quick(name: str) -> None:
        await asyncio.sleep(1)
        done.append(name)

    async def starts_another() -> None:
        await asyncio.sleep(1)
        background.start(quick("while waiting"), name="second")

    async def starts_another_at_the_end() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            background.start(asyncio.sleep(3600), name="third")

    background.start(starts_another(), name="first")
    background.start(starts_another_at_the_end(), name="stubborn")
    await background.close(timeout=5)
    assert done == ["while waiting"]
    assert not background


@clock.virtually
async def test_closing_ends_though_a_task_ignores_its_cancellation() -> None:
    background, cancelled = Background(), list[int]()

    async def stubborn() -> None:
        for number in range(2):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(number)

    background.start(stubborn(), name="stubborn")
    background.start(asyncio.sleep(3600), name="willing")
    started = clock.now()
    await background.close(timeout=2)
    assert clock.now() - started == 3
    assert cancelled == [0]
    await asyncio.sleep(60)


async def test_a_task_may_close_its_own_background() -> None:
    background = Background()
    await asyncio.wait_for(background.start(background.close(timeout=5), name="closing"), 5)


def test_a_task_of_a_closed_loop_does_not_count_as_running() -> None:
    background = Background()
    loop = asyncio.new_event_loop()

    async def start() -> None:
        background.start(asyncio.sleep(60), name="forever")
        await asyncio.sleep(0)

    loop.run_until_complete(start())
    assert background
    loop.close()
    assert not background
    asyncio.run(background.close(timeout=5))
    for task in asyncio.all_tasks(loop):
        # It cannot be cancelled on a loop that is closed, and need not be reported as lost.
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001 -- no setting


def test_a_loop_that_is_closed_before_a_task_begins_says_so_at_once() -> None:
    """And not in a later test, where the task is collected."""
    loop = asyncio.new_event_loop()
    late = loop.create_task(asyncio.sleep(0), name="late")
    with pytest.warns(UserWarning, match="closed before late began"):
        loop.close()
    assert not late.done()
    # As above.
    late._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001 -- no setting


def test_a_lock_that_an_ended_event_loop_left_locked_is_free_in_the_next() -> None:
    lock = LoopLock()

    async def leave_locked() -> None:
        await lock.here().acquire()
        assert lock.here().locked()

    async def take() -> None:
        async with asyncio.timeout(5), lock.here():
            assert lock.here().locked()

    for work in (leave_locked, take):
        asyncio.run(work())


def test_a_lock_stays_locked_in_its_event_loop_while_another_loop_uses_it() -> None:
    lock, loop = LoopLock(), asyncio.new_event_loop()

    async def take() -> None:
        await lock.here().acquire()

    async def is_locked() -> bool:
        return lock.here().locked()

    loop.run_until_complete(take())
    asyncio.run(take())
    assert loop.run_until_complete(is_locked())
    loop.close()
