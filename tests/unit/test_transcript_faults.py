"""Transcripts while processes die, answers are lost and no model is there: every turn is there once."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory.shared import due
from stm_backends.memory.shared.archive import Archive
from stm_backends.memory.shared.due import Due, Move
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import pages
from stm_backends.records.body import Transcript
from stm_backends.records.pages import Leaving
from tests.support import clock
from tests.support.transcript_sim import Sim, World

WORLDS = {
    "summaries": World(1),
    "truncation": World(2, truncates=True),
    "full-records": World(3, full=True),
    "unconfirmed": World(4, unconfirmed=True),
    "all-at-once": World(5, leaseless=True),
    "slow-model": World(6, slow=True),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few turns, so that many are completed; pauses are as random as the rest."""
    monkeypatch.setattr(pages, "TURNS", 8)
    random.seed(1)
    monkeypatch.setattr(logging.getLogger("stm_backends"), "disabled", True)


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


def commit_before_archive(patch: pytest.MonkeyPatch) -> None:
    put, left = Archive.put, Archive.left

    async def nothing(self: Archive, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        pass

    async def afterwards(self: Archive, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        await put(self, snapshot, leaving)
        await left(self, snapshot, leaving)

    patch.setattr(Archive, "put", nothing)
    patch.setattr(Archive, "left", afterwards)


def no_gap(patch: pytest.MonkeyPatch) -> None:
    moved = Transcript.moved

    def summarized(self: Transcript, ids: Sequence[str], **_: Any) -> Transcript:
        return moved(self, ids, summarized=True)

    patch.setattr(Transcript, "moved", summarized)


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    moved = Transcript.moved

    def fewer(self: Transcript, ids: Sequence[str], *, summarized: bool) -> Transcript:
        return replace(moved(self, ids, summarized=summarized), base=self.base + max(1, len(ids) - 1))

    patch.setattr(Transcript, "moved", fewer)


@pytest.mark.parametrize("mistake", [commit_before_archive, no_gap, wrong_base])
def test_the_simulation_notices_a_mistake(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert simulated(World(1)).problems


@pytest.mark.full
def test_the_simulation_notices_a_page_whose_end_nothing_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_differ", lambda candidates, number: False)
    world = replace(WORLDS["truncation"], seed=100, turns=7_000, conversations=4)
    assert simulated(world).problems
