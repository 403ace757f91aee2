"""Transcripts while processes die, answers are lost and no model is there: every turn is there once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory.shared import due
from stm_backends.memory.shared.due import Due, Move
from tests.mutants import transcripts as mutants
from tests.support import clock
from tests.support.transcript_sim import Sim, World

pytestmark = pytest.mark.usefixtures("small_pages")

WORLDS = {
    "summaries": World(1),
    "truncation": World(2, truncates=True),
    "full-records": World(3, full=True),
    "unconfirmed": World(4, unconfirmed=True),
    "all-at-once": World(5, leaseless=True),
    "slow-model": World(6, slow=True),
}


def held_by_nobody(step: Due, move: Move | None, lease_left: float, *, overdue: bool = False) -> Due:
    """Let every process fold at once."""
    del move, lease_left, overdue
    return step


def simulated(world: World) -> Sim:
    sim = Sim(world)
    with pytest.MonkeyPatch.context() as patch:
        if world.leaseless:
            patch.setattr(due, "unless_held", held_by_nobody)
        clock.run(sim.run())
    return sim


@pytest.mark.parametrize("name", WORLDS)
def test_every_turn_is_there_once_and_in_order_after_faults(name: str) -> None:
    sim = simulated(WORLDS[name])
    assert sim.problems == []
    assert sim.counts["turns"] >= 600
    assert sim.counts["killed"] > 3
    assert sim.counts["readings"] > 3
    if sim.world.slow:
        assert sim.counts["trimmed"] > 100
        assert sim.counts["longest tail"] < 150


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORLDS)
def test_so_it_is_after_many_more_faults(name: str, seed: int) -> None:
    sim = simulated(replace(WORLDS[name], seed=100 + seed, turns=7_000, conversations=4))
    assert sim.problems == []
    assert sim.counts["killed"] > 30


@pytest.mark.parametrize("mistake", [mutants.commit_before_archive, mutants.no_gap, mutants.wrong_base])
def test_the_simulation_notices_a_mistake(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert simulated(World(1)).problems
