"""Transcripts with a limit while processes die and answers are lost: the newest turns, each once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records import keys, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.shortening import Shortening
from stm_backends.types import MemoryKey
from tests.support import clock
from tests.support.transcript_sim import Pod, Said, Sim, World

pytestmark = pytest.mark.usefixtures("small_pages")

MOST = 40


class Limited(Sim):
    """Processes that keep the newest turns; the readers and the check know that."""

    def pod(self) -> Pod:
        pod = super().pod()
        pod.backgrounds = Backgrounds(pod.driver, Codec(), clock=clock.now, transcript_turns=MOST)
        return pod

    async def reader(self, key: MemoryKey, said: Said, stop: asyncio.Event) -> None:
        memory = DistributedShortTermMemory(self.plain, key)
        while not stop.is_set():
            oldest = (await memory.transcript(limit=1)).oldest
            found = [turn async for turn in memory.each_turn()]
            numbers, ids = [turn.number for turn in found], [turn.id for turn in found]
            if len({*ids}) != len(ids):
                self.problems.append("a reader got a turn twice")
            if numbers and numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
                # The limit may have passed the reader, but it leaves nothing out within.
                self.problems.append(f"a reader got numbers with holes from {numbers[0]}")
            if numbers and numbers[0] < oldest:
                self.problems.append("a reader got a turn that was gone")
            self.counts["readings"] += 1
            await asyncio.sleep(0.1)

    async def check(self, key: MemoryKey, memory: DistributedShortTermMemory, said: Said) -> None:
        found = [turn async for turn in memory.each_turn()]
        in_pages = [turn for turn in found if not turn.retained]
        if len(in_pages) != MOST:
            self.problems.append(f"{len(in_pages)} turns are in pages")
        # What was acknowledged before one of them began, and is not there, was older than all of them.
        starts = [said[turn.id][0] for turn in found if turn.id in said]
        ids = {turn.id for turn in found}
        lost = [one for one, (start, _) in said.items() if one not in ids and start > max(starts)]
        if lost:
            self.problems.append(f"{len(lost)} of the newest turns are missing")
        latest = 0.0
        for turn in found:
            start, end = said.get(turn.id, (latest, latest))
            if end < latest:
                self.problems.append(f"{turn.id} is out of order")
            latest = max(latest, start)
        self.counts["left over"] += await self.left_over(key, found[0].number)
        self.counts["turns"] += found[-1].number + 1

    async def left_over(self, key: MemoryKey, first: int) -> int:
        """Return how many pages are stored of which all turns are gone."""
        scope, prefix = keys.pages_of(keys.memory_key(key))
        names = [name async for name in operations.names_of(self.plain, scope, prefix)]
        return sum((keys.page_number(name) + 1) * pages.TURNS <= first for name in names)


def simulated(world: World) -> Limited:
    sim = Limited(world)
    clock.run(sim.run())
    return sim


@pytest.mark.parametrize("seed", range(3))
def test_the_newest_turns_are_there_once_and_in_order_after_faults(seed: int) -> None:
    sim = simulated(World(50 + seed))
    assert sim.problems == []
    assert sim.counts["killed"] > 3
    assert sim.counts["readings"] > 3
    assert sim.counts["left over"] <= 2, "they go with the next page"


def test_a_limit_that_lets_waiting_turns_go_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Transcript.keeping

    def too_few(self: Transcript, most: int | None) -> Transcript:
        return keeping(self, None if most is None else most // 2)

    monkeypatch.setattr(Transcript, "keeping", too_few)
    assert simulated(World(50)).problems


def test_removing_pages_before_the_record_says_so_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = Shortening.removed_below

    async def one_page_more(self: Shortening, key: Any, epoch: str, first: int) -> int:
        return await removed(self, key, epoch, first + pages.TURNS)

    monkeypatch.setattr(Shortening, "removed_below", one_page_more)
    assert simulated(World(50)).problems
