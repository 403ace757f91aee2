"""Touches while processes are killed and answers are lost: each conversation is in the list once."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from stm_backends.catalogue.index import Catalogue
from tests.mutants.catalogue import UNDER_FAULTS
from tests.support import clock
from tests.support.catalogue_sim import Sim, World

WORLDS = {
    "all-faults": World(1),
    "no-kills": World(2, kills=False, late=False),
    "in-time": World(3, steps=600, late=False),
    "no-erasures": World(4, erases=False),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are as random as the rest."""
    random.seed(1)
    monkeypatch.setattr(logging.getLogger("stm_backends"), "disabled", True)


def simulated(world: World, kind: type[Catalogue] = Catalogue) -> Sim:
    sim = Sim(world, kind)
    clock.run(sim.run())
    return sim


@pytest.mark.parametrize("name", WORLDS)
def test_each_conversation_is_listed_once_and_in_order_after_faults(name: str) -> None:
    sim = simulated(WORLDS[name])
    assert sim.problems == []
    assert sim.counts["touches"] + sim.counts["titles"] > 300
    assert sim.counts["lost answers"] > 10
    assert sim.counts["killed"] > 20 * WORLDS[name].kills - 1
    assert sim.counts["erasures"] > 10 * WORLDS[name].erases - 1
    assert sim.counts["listings"] > 30


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", WORLDS)
def test_so_they_are_after_many_more_faults(name: str, seed: int) -> None:
    sim = simulated(replace(WORLDS[name], seed=100 + seed, steps=4_000))
    assert sim.problems == []


@pytest.mark.parametrize("kind", UNDER_FAULTS, ids=lambda kind: kind.__name__)
def test_the_simulation_notices_a_mistake(kind: type[Catalogue]) -> None:
    assert any(simulated(World(seed, steps=600), kind).problems for seed in range(20))
