"""Lost races: tried again soon while others win them, given up where a former master answers loads."""

from __future__ import annotations

import asyncio

from stm_backends.races import CONTENDED, RACES, Lost, contend
from tests.support import clock


@clock.virtually
async def test_races_that_others_win_are_tried_again_soon() -> None:
    version = 0

    async def attempt() -> str | Lost:
        nonlocal version
        version += 1
        return "done" if version == CONTENDED else Lost(version)

    began = asyncio.get_running_loop().time()
    assert await contend(attempt) == "done"
    assert asyncio.get_running_loop().time() - began < 0.1 * CONTENDED


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
