"""The queue of work under faults at random: no turn is lost, none is left without a summary for good."""

from __future__ import annotations

import logging
import random

import pytest

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


def simulated(seed: int, odds: Odds, **more: int) -> Sim:
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
    assert sim.counts["lost answers"] > 10 or not ODDS[name].lose


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", ODDS)
def test_so_it_is_after_many_more_faults(name: str, seed: int) -> None:
    assert simulated(seed, ODDS[name], turns=60).problems == []
