"""Lost races and lost answers: when the next attempt follows, and when there is none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.races import ATTEMPTS, CONTENDED, RACES, Lost, contend, pause, pause_after, retried, settled
from tests.support import clock


@clock.virtually
async def test_races_that_others_win_are_tried_again_soon() -> None:
    times: list[float] = []

    async def attempt() -> str | Lost:
        times.append(asyncio.get_running_loop().time())
        return "done" if len(times) == CONTENDED else Lost(len(times))

    assert await contend(attempt) == "done"
    assert times[2] - times[0] < 0.01
    assert all(0.05 <= later - earlier <= 0.1 for earlier, later in itertools.pairwise(times[-5:]))


@clock.virtually
async def test_races_over_one_version_are_given_up_after_growing_pauses() -> None:
    times: list[float] = []

    async def attempt() -> str | Lost:
        times.append(asyncio.get_running_loop().time())
        return Lost("stale")

    assert await contend(attempt) is None
    assert len(times) == RACES
    assert times[-1] - times[-2] > 0.3 > times[3] - times[2]


@clock.virtually
async def test_races_that_others_always_win_end() -> None:
    version = 0

    async def attempt() -> str | Lost:
        nonlocal version
        version += 1
        return Lost(version)

    assert await contend(attempt) is None
    assert version == CONTENDED


def answers(*outcomes: object) -> tuple[Callable[[], Awaitable[Any]], list[float]]:
    """Return a write with these outcomes, errors are raised, and the times of its calls."""
    times: list[float] = []

    async def write() -> object:
        times.append(asyncio.get_running_loop().time())
        outcome = outcomes[len(times) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return write, times


UNKNOWN, DOWN = OutcomeUnknown("lost"), Unavailable("down")


def test_pauses_double_up_to_the_longest_and_differ_by_half() -> None:
    assert all(0.2 <= pause(0.1, 2) <= 0.4 for _ in range(100))
    assert all(0.05 <= pause(0.1) <= 0.1 for _ in range(100))
    assert all(0.5 <= pause(0.1, 10**6) <= 1.0 for _ in range(100))


def test_two_lost_races_in_a_row_cost_no_pause_and_more_cost_up_to_a_second() -> None:
    assert pause_after(1) == pause_after(2) == 0.0
    assert 0.04 <= pause_after(3) <= 0.08
    assert all(0.5 <= pause_after(50) <= 1.0 for _ in range(100))


@clock.virtually
async def test_a_write_is_repeated_after_pauses_while_its_outcome_is_unknown() -> None:
    write, times = answers(UNKNOWN, UNKNOWN, "done")
    assert await retried(write) == "done"
    first, second = (later - earlier for earlier, later in itertools.pairwise(times))
    assert 0.05 <= first <= 0.1 <= second <= 0.2


@pytest.mark.parametrize("attempts", [1, 2, ATTEMPTS])
@clock.virtually
async def test_a_write_without_a_known_outcome_is_given_up(attempts: int) -> None:
    write, times = answers(*[UNKNOWN] * attempts)
    with pytest.raises(OutcomeUnknown):
        await retried(write, attempts=attempts)
    assert len(times) == attempts


@clock.virtually
async def test_an_attempt_of_the_caller_counts_and_is_paused_after() -> None:
    write, times = answers(*[UNKNOWN] * (ATTEMPTS - 1))
    with pytest.raises(OutcomeUnknown):
        await retried(write, after=UNKNOWN)
    assert len(times) == ATTEMPTS - 1
    assert 0.05 <= times[0] - clock.START <= 0.1


async def test_a_write_that_was_certainly_not_done_is_not_repeated() -> None:
    write, times = answers(DOWN)
    with pytest.raises(Unavailable):
        await retried(write)
    assert len(times) == 1


@pytest.mark.parametrize("after", [None, UNKNOWN])
@clock.virtually
async def test_a_later_error_does_not_say_that_nothing_was_done(after: OutcomeUnknown | None) -> None:
    write, _ = answers(DOWN) if after else answers(UNKNOWN, DOWN)
    with pytest.raises(OutcomeUnknown) as raised:
        await retried(write, after=after)
    assert raised.value.__cause__ is DOWN


@pytest.mark.parametrize("done", [True, False])
async def test_a_conditional_write_that_answers_is_settled(*, done: bool) -> None:
    write, _ = answers(done)
    again, repeats = answers()
    assert await settled(write, again) is done
    assert repeats == []


@clock.virtually
async def test_a_conditional_write_with_a_lost_answer_is_done_or_unknown() -> None:
    write, _ = answers(UNKNOWN)
    again, _ = answers(True)
    assert await settled(write, again) is True
    write, _ = answers(UNKNOWN)
    again, _ = answers(False)
    with pytest.raises(OutcomeUnknown):
        await settled(write, again)
