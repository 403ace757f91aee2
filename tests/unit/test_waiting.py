"""Callers that wait in line: who is served, and that nothing that was served is lost."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.drivers.waiting import WaitingLine


class Line:
    """A line of waiting tasks, and what each cancelled one did not use."""

    def __init__(self) -> None:
        self.line = WaitingLine[str]()
        self.unused: list[str] = []

    async def join(self, count: int, *, seconds: float = 30) -> list[asyncio.Task[str]]:
        """Let `count` tasks wait."""
        tasks = [
            asyncio.create_task(self.line.wait(seconds, unused=self.unused.append)) for _ in range(count)
        ]
        await asyncio.sleep(0)
        return tasks


async def test_callers_are_served_in_order_of_arrival() -> None:
    here = Line()
    assert not here.line.serve("nobody waits")
    first, second = await here.join(2)
    (third,) = await here.join(1)
    assert all(here.line.serve(value) for value in "abc")
    assert (len(here.line), here.line.serve("d")) == (0, False)
    assert await asyncio.gather(first, second, third) == ["a", "b", "c"]
    assert here.unused == []


async def test_a_caller_that_was_cancelled_leaves_the_line() -> None:
    here = Line()
    first, second = await here.join(2)
    first.cancel()
    await asyncio.wait({first})
    assert len(here.line) == 1
    assert here.line.serve("a")
    assert await second == "a"
    assert here.unused == []


async def test_what_was_served_to_a_cancelled_caller_is_passed_on() -> None:
    here = Line()
    first, second = await here.join(2)
    here.line.serve("a")
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    assert here.unused == ["a"]
    here.line.serve(here.unused.pop())
    assert await second == "a"


async def test_a_caller_that_waited_too_long_leaves_the_line() -> None:
    here = Line()
    (late,) = await here.join(1, seconds=0.01)
    with pytest.raises(TimeoutError):
        await late
    assert not here.line.serve("a")


async def test_all_that_wait_can_be_failed_each_with_an_error_of_its_own() -> None:
    here = Line()
    tasks = await here.join(3)
    here.line.fail(lambda: OSError("closed"))
    tasks[0].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError, OSError, OSError]
    assert ended[1] is not ended[2]
    assert (len(here.line), here.unused) == (0, [])
