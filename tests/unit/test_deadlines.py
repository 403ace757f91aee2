"""`Deadlines` cancels as `asyncio.timeout` does, with one timer for all operations."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest

from stm_backends.drivers.deadlines import Deadlines

Within = Callable[[float], AbstractAsyncContextManager[object]]


@asynccontextmanager
async def ours(seconds: float) -> AsyncGenerator[object]:
    with Deadlines(seconds).start() as deadline:
        yield deadline


REFERENCES = [asyncio.timeout] if sys.version_info >= (3, 11, 4) else []
"""Before Python 3.11.4, `asyncio.timeout` does not work in a task that was cancelled before (gh-102780)."""


@pytest.fixture(params=[ours, *REFERENCES], ids=lambda within: within.__name__)
def within(request: pytest.FixtureRequest) -> Within:
    return request.param


def current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def forever() -> None:
    await asyncio.Event().wait()


# The same as asyncio.timeout


async def test_a_block_that_takes_too_long_raises_a_timeout_error(within: Within) -> None:
    with pytest.raises(TimeoutError) as caught:
        async with within(0.01):
            await forever()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert current().cancelling() == 0


async def test_a_block_that_ends_in_time_is_not_cancelled_later(within: Within) -> None:
    async with within(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)
    assert current().cancelling() == 0


@pytest.mark.parametrize("seconds", [0, -1])
async def test_a_deadline_in_the_past_cancels_at_the_first_await(within: Within, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with within(seconds):
            await forever()


async def test_an_error_of_the_block_passes_as_it_is(within: Within) -> None:
    with pytest.raises(ZeroDivisionError):
        async with within(5):
            raise ZeroDivisionError


@pytest.mark.parametrize("cancelled_after_s", [0.005, 0.015])
async def test_a_cancellation_at_the_same_time_wins(within: Within, cancelled_after_s: float) -> None:
    async def work() -> None:
        async with within(0.01):
            asyncio.get_running_loop().call_later(cancelled_after_s, current().cancel)
            time.sleep(0.05)  # noqa: ASYNC251 -- so that both are due at once
            await forever()

    task = asyncio.ensure_future(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_cancellation_before_the_block_does_not_hide_its_timeout(within: Within) -> None:
    async def work() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            with pytest.raises(TimeoutError):
                async with within(0.01):
                    await forever()
        assert current().cancelling() == 1
        return "done"

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "done"


async def test_a_block_that_swallows_the_cancellation_goes_on(within: Within) -> None:
    async with within(0.01):
        with suppress(asyncio.CancelledError):
            await forever()
    assert current().cancelling() == 0
    await asyncio.sleep(0)


async def test_an_error_in_place_of_the_cancellation_is_raised(within: Within) -> None:
    async def work() -> None:
        async with within(0.01):
            try:
                await forever()
            finally:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert current().cancelling() == 0


async def test_the_inner_of_two_deadlines_ends_only_its_own_block(within: Within) -> None:
    async with within(5):
        with pytest.raises(TimeoutError):
            async with within(0.01):
                await forever()
        await asyncio.sleep(0)
    assert current().cancelling() == 0


async def test_the_outer_of_two_deadlines_ends_both_blocks(within: Within) -> None:
    async def work() -> None:
        async with within(0.01):
            async with within(5):
                await forever()
            raise AssertionError

    with pytest.raises(TimeoutError):
        await work()
    assert current().cancelling() == 0


async def test_two_deadlines_at_once_end_the_outer_block(within: Within) -> None:
    async def work() -> None:
        async with within(0):
            async with within(0):
                await forever()
            await forever()

    with pytest.raises(TimeoutError):
        await work()
    assert current().cancelling() == 0


async def test_a_deadline_cancels_the_tasks_of_a_group_in_the_block(within: Within) -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await forever()
        finally:
            ended.append("child")

    async def work() -> None:
        async with within(0.01), asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    with pytest.raises(TimeoutError):
        await work()
    assert ended == ["child", "child"]
    assert current().cancelling() == 0


async def test_an_error_in_a_group_is_raised_before_the_deadline(within: Within) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        async with within(5), asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(forever())

    with pytest.raises(ExceptionGroup):
        await work()


def test_a_block_outside_a_task_raises_a_runtime_error(within: Within) -> None:
    async def enter() -> None:
        async with within(5):
            raise AssertionError

    loop, errors = asyncio.new_event_loop(), list[BaseException]()

    def step() -> None:
        try:
            enter().send(None)
        except RuntimeError as error:
            errors.append(error)
        loop.stop()

    loop.call_soon(step)
    loop.run_forever()
    loop.close()
    assert len(errors) == 1


# One timer


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts timers, and steps its clock by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers = list[float]()
        super().__init__()

    def time(self) -> float:
        return self.now

    def call_at(self, when, callback, *args, **options):
        self.timers.append(when)
        return super().call_at(when, callback, *args, **options)


def run(main) -> CountingLoop:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main(runner.get_loop()))
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        return loop


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_operations_one_after_another_share_a_timer() -> None:
    async def main(loop: CountingLoop) -> None:
        deadlines = Deadlines(5.0)
        for _ in range(50):
            with deadlines.start():
                await asyncio.sleep(0)
            loop.now += 0.1
        await settle()

    assert run(main).timers == [105.0]


def test_a_timer_that_finds_nothing_due_is_set_for_the_oldest() -> None:
    async def main(loop: CountingLoop) -> None:
        deadlines, late = Deadlines(5.0), list[float]()

        async def work() -> None:
            with pytest.raises(TimeoutError), deadlines.start():
                await forever()
            late.append(loop.now)

        with deadlines.start():
            loop.now += 2
            tasks = [asyncio.ensure_future(work())]
            await settle()
            loop.now += 1
            tasks.append(asyncio.ensure_future(work()))
            await settle()
        loop.now = 105.5
        await settle()
        assert late == []
        loop.now = 107.0
        await settle()
        assert late == [107.0]
        loop.now = 108.0
        await settle()
        assert late == [107.0, 108.0]
        await asyncio.gather(*tasks)

    assert run(main).timers == [105.0, 107.0, 108.0]


def test_deadlines_that_are_due_together_expire_together() -> None:
    async def main(loop: CountingLoop) -> None:
        deadlines = Deadlines(5.0)

        async def work(seconds: float) -> float:
            with deadlines.start() as deadline:
                if seconds:
                    await forever()
            assert not deadline.expired
            return 0

        tasks = [asyncio.ensure_future(work(seconds)) for seconds in (1, 0, 1, 0, 1)]
        await settle()
        loop.now = 106.0
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [TimeoutError, int, TimeoutError, int, TimeoutError]

    assert run(main).timers == [105.0]


def test_a_task_that_is_about_to_leave_keeps_its_answer() -> None:
    async def main(loop: CountingLoop) -> None:
        deadlines = Deadlines(5.0)

        async def work() -> str:
            with deadlines.start():
                pass
            loop.now = 105.0
            await settle()
            return "answer"

        assert await asyncio.ensure_future(work()) == "answer"

    run(main)


def test_deadlines_work_on_the_event_loop_after_the_first() -> None:
    deadlines = Deadlines(0.01)

    async def main(loop: CountingLoop) -> None:
        with deadlines.start():
            await asyncio.sleep(0)

    async def late() -> None:
        with deadlines.start():
            await forever()

    run(main)
    with pytest.raises(TimeoutError):
        asyncio.run(late())


async def test_what_is_left_of_a_deadline_is_known() -> None:
    with Deadlines(60.0).start() as deadline:
        assert 59 < deadline.left_s() <= 60
        assert deadline.when == pytest.approx(asyncio.get_running_loop().time() + 60, abs=1)
