"""Conversations of messages while processes die, answers are lost or cut off, and no model is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory import speech
from stm_backends.memory.shared import due
from tests.mutants import conversations as mutants
from tests.support import clock
from tests.support.message_sim import MessageSim
from tests.support.selection import few
from tests.support.transcript_sim import World
from tests.unit.test_transcript_faults import held_by_nobody

pytestmark = pytest.mark.usefixtures("small_pages")

ALONE = World(11, turns=200, conversations=2, writers=1)
WORLDS = {
    "turn-by-turn": ALONE,
    "many-at-once": World(12, turns=200),
    "truncation": World(13, turns=200, truncates=True),
    "full-records": World(14, turns=200, full=True),
    "unconfirmed": World(15, turns=150, unconfirmed=True),
    "all-at-once": World(16, turns=150, leaseless=True),
    "slow-model": World(17, turns=200, slow=True, writers=1),
    "long-turns": World(18, turns=200, writers=1, total_tokens=900),
}


def simulated(world: World) -> MessageSim:
    sim = MessageSim(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "LONG_TURN", 8)
        if world.leaseless:
            patch.setattr(due, "unless_held", held_by_nobody)
        clock.run(sim.run())
    return sim


@pytest.mark.parametrize("name", few(1, WORLDS))
def test_every_message_is_there_once_and_in_order_after_faults(name: str) -> None:
    sim = simulated(WORLDS[name])
    assert sim.problems == []
    assert sim.counts["turns"] > 3 * sim.world.turns
    assert sim.counts["killed"] > 3
    assert sim.counts["windows"] > 3
    assert sim.counts["checkpoints that stayed"] > 0
    assert sim.world.truncates or sim.counts["summarized"] > sim.world.turns


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORLDS)
def test_so_it_is_after_many_more_faults(name: str, seed: int) -> None:
    sim = simulated(replace(WORLDS[name], seed=100 + seed, turns=400, conversations=4))
    assert sim.problems == []
    assert sim.counts["killed"] > 10


@pytest.mark.parametrize("mistake", few(1, mutants.MISTAKES))
def test_the_simulation_notices_a_mistake(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert simulated(ALONE).problems
