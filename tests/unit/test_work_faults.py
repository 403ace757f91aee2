"""The queue of work under faults at random: no turn is lost, none is left without a summary for good."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from stm_backends import Worker
from tests.mutants.work import WORKERS
from tests.support import clock
from tests.support.work_sim import Odds, Sim

ODDS = {
    "all-faults": Odds(),
    "kills": Odds(kill=0.03, fail=0.0, lose=0.0),
    "lost-answers": Odds(kill=0.0, fail=0.0, lose=0.1),
    "none": Odds(0.0, 0.0, 0.0),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are as random as the rest."""
    random.seed(1)
    monkeypatch.setattr(logging.getLogger("stm_backends"), "disabled", True)


def simulated(seed: int, odds: Odds, **more: Any) -> Sim:
    made: list[Sim] = []

    async def run() -> None:
        made.append(Sim(seed, odds=odds, **more))
        await made[0].run()

    clock.run(run())
    return made[0]


@pytest.mark.parametrize("name", ODDS)
def test_every_conversation_is_summarized_and_no_turn_is_lost(name: str) -> None:
    sim = simulated(1, ODDS[name])
    assert sim.problems == []
    assert sim.counts["turns"] == 9 * 14
    assert sim.counts["workers"] > 3
    assert sim.counts["killed"] > 10 or not ODDS[name].kill
    assert sim.counts["lost answers"] > 2 or not ODDS[name].lose


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", ODDS)
def test_so_it_is_after_many_more_faults(name: str, seed: int) -> None:
    assert simulated(seed, ODDS[name], turns=60).problems == []


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_notes_alone_bring_all_summaries_wherever_workers_are_killed(seed: int) -> None:
    sim = simulated(seed, ODDS["kills"], heals=False)
    assert sim.problems == []
    assert sim.counts["killed"] > 5


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.__name__)
def test_the_simulation_notices_a_mistake(kind: type[Worker]) -> None:
    assert any(simulated(seed, ODDS["kills"], heals=False, kind=kind).problems for seed in range(10))
