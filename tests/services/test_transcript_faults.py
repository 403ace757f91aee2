"""Transcripts on each datastore while processes die, answers are lost and no model is there.

`STM_TEST_FAULT_TURNS` is how many turns are added, by default 1,500. Run pytest with `-rP` to see the
figures.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest

from stm_backends.drivers.plugins import open_driver
from tests.mutants import transcripts as mutants
from tests.support.contract import opened
from tests.support.message_sim import MessageSim
from tests.support.places import EACH, Place
from tests.support.transcript_sim import Sim, World

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("small_pages")]

AnySim: TypeAlias = Sim | MessageSim

TURNS = int(os.environ.get("STM_TEST_FAULT_TURNS") or 1_500)


async def simulated(place: Place, world: World, kind: type[AnySim] = Sim) -> AnySim:
    """Return what was simulated at a place, by processes that have connections of their own."""
    # Faults are injected; no operation fails because the machine is busy.
    url, began = place.options(deadline_s=30), time.monotonic()
    async with opened(url, create=True):
        pass
    sim = kind(world, partial(open_driver, url))
    await sim.run()
    sys.stdout.write(f"{sim.plain.name}: {time.monotonic() - began:.0f} s, {dict(sim.counts)}\n")
    return sim


@pytest.mark.parametrize("datastore", ["sqlite", *EACH])
async def test_every_turn_is_there_once_and_in_order_after_faults(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    sim = await simulated(place_on(datastore), World(7, turns=TURNS, conversations=4))
    assert sim.problems == []
    assert sim.counts["turns"] >= TURNS
    assert sim.counts["killed"] > 3
    assert sim.counts["readings"] > 3


@pytest.mark.parametrize("datastore", ["sqlite", *EACH])
async def test_every_message_is_there_once_and_in_order_after_faults(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    world = World(19, turns=TURNS // 10, conversations=4)
    sim = await simulated(place_on(datastore), world, MessageSim)
    assert sim.problems == []
    assert sim.counts["messages"] >= 3 * world.turns
    assert sim.counts["killed"] > 3
    assert sim.counts["windows"] > 3


async def test_the_simulation_notices_a_mistake_on_a_datastore(
    place_on: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants.commit_before_archive(monkeypatch)
    assert (await simulated(place_on("sqlite"), World(7))).problems
