"""Work in small steps: at once, or with other tasks' turns in between."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.records import steps
from stm_backends.records.steps import Steps, run_in_slices, run_now


def counting(to: int, done: list[int]) -> Steps[str]:
    for number in range(to):
        done.append(number)
        yield
    return "done"


def test_at_once_does_all_of_it() -> None:
    done: list[int] = []
    assert run_now(counting(3, done)) == "done"
    assert done == [0, 1, 2]


async def test_others_go_on_after_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SLICE_S", 0.0)
    done: list[int] = []
    seen: list[int] = []
    ended: list[bool] = []

    async def look() -> None:
        while not ended:
            seen.append(len(done))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    assert await run_in_slices(counting(3, done)) == "done"
    ended.append(True)
    await looking
    assert seen == [1, 2, 3, 3], "the code that continues with the result begins a new slice"


async def test_what_is_done_within_a_slice_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SLICE_S", 3600.0)
    done: list[int] = []
    other = asyncio.ensure_future(asyncio.sleep(0))
    await run_in_slices(counting(1000, done))
    assert not other.done()
    await other
    assert len(done) == 1000


async def test_an_error_in_a_step_is_raised() -> None:
    def failing() -> Steps[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_in_slices(failing())
    with pytest.raises(ValueError, match="no"):
        run_now(failing())
