"""Transcripts on real datastores: a model that is down for hundreds of turns, and what is read afterwards."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.memory import policy
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support.places import EACH, Place, quick_on
from tests.support.talking import HURRIED, MOMENTS, key_of
from tests.support.talking import SETTINGS as KILLED

KEY = MemoryKey("acme", "u1", "chat")
TURNS = 500
SETTINGS = config(
    transcript=True,
    retry_attempts=1,
    degraded_retry_interval_s=0.05,
    total_max_tokens=0,
    summary_max_tokens=1_000_000,
)


class Model(LedgerSummarizer):
    """A model that is down until it is told otherwise."""

    down = True

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        self.fail = int(self.down)
        return await super().__call__(request)


async def said(memory: DistributedShortTermMemory) -> list[str]:
    return [one.turn.user_message async for one in memory.each_turn()]


@pytest.mark.parametrize(
    "datastore",
    [
        "sqlite",
        "redis",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("postgres", "mongo", "dynamo")),
    ],
)
async def test_an_outage_of_500_turns_loses_none_and_is_made_up_for(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place, model = place_on(datastore), Model()
    everything = [f"u{number}" for number in range(TURNS)]
    async with open_backend(place.url, create=True) as backend:
        memory = backend.memory(KEY, SETTINGS, summarizer=model)
        for number in range(TURNS):
            await memory.add_turn(turn(number))
        assert memory.health is not MemoryHealth.HEALTHY
        assert await said(memory) == everything
        model.down = False

        async def made_up_for() -> bool:
            await memory.flush(30)
            view = await shown(memory)
            return memory.health is MemoryHealth.HEALTHY and len(view["summary"]) == TURNS - 2

        await until(made_up_for, within=60.0)
        assert (await shown(memory))["summary"] == everything[:-2]
        assert memory.stats.dropped == 0
        assert await said(memory) == everything
        page = await memory.transcript(before=300)
        assert [one.turn.user_message for one in page.turns] == everything[250:300]
        receipt = await backend.sessions.erase_with_receipt("acme", "u1")
        assert receipt.erased["pages"] == -(-(TURNS - 2) // 64)
        assert receipt.complete


async def run(*given: str) -> dict[str, list[str]]:
    """Run a program of processes that talk; returns what they acknowledged, by session."""
    program = [sys.executable, "-m", "tests.support.talking", *given]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        session, what = line.split()
        found.setdefault(session, []).append(what)
    return found


@pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", *EACH]))
async def test_a_process_killed_at_any_moment_of_a_fold_loses_no_turn(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        acknowledged = await run("killed", place.options(deadline_s=2), *MOMENTS)
        assert acknowledged.keys() == MOMENTS.keys()

        async def check(session: str) -> None:
            memory = backend.memory(key_of(session), KILLED, summarizer=LedgerSummarizer())
            there = [one.id async for one in memory.each_turn()]
            assert there == [f"t{number}" for number in range(len(there))], session
            # One more may be there that was not acknowledged.
            assert 0 <= len(there) - len(acknowledged[session]) <= 1, session
            await require_the_first_are_summarized(memory, session)
            for number in range(len(there), len(there) + 3):
                await memory.add_turn(turn(number), turn_id=f"t{number}")
            # The lease of the dead process has to end.
            await memory.flush(60)
            everything = [f"u{number}" for number in range(len(there) + 3)]
            assert await said(memory) == everything, session
            assert (await shown(memory))["summary"] == everything[:-2], session

        await asyncio.gather(*map(check, MOMENTS))


async def require_the_first_are_summarized(memory: DistributedShortTermMemory, session: str) -> None:
    """Require that the summary covers exactly the first turns of the transcript."""
    turns = [one async for one in memory.each_turn()]
    summary = (await shown(memory))["summary"]
    assert summary == [one.turn.user_message for one in turns[: len(summary)]], session
    assert [one.summarized for one in turns] == [one.number < len(summary) for one in turns], session


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", *EACH])
async def test_turns_leave_the_tail_while_processes_hurry_and_no_model_answers(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place, model, tails = place_on(datastore), LedgerSummarizer(), [0]
    model.hold()
    async with open_backend(place.url, create=True) as backend:
        memory = backend.memory(key_of("shared"), HURRIED, summarizer=model)
        for number in range(5):
            await memory.add_turn(turn(number))
        await until(model.called.is_set)
        writers = [asyncio.create_task(run("hurrying", place.url, name, "800", "8")) for name in "abc"]
        while not all(writer.done() for writer in writers):
            tails.append(len(await memory.turns()))
            await asyncio.sleep(0.02)
        acknowledged = [f"u{number}" for number in range(6)]
        for writer in writers:
            acknowledged += [f"u{each}" for each in writer.result()["shared"]]
        # The length of a tail is up to the machine: a load has the turns that come while those before move.
        assert len(acknowledged) > 2_400
        assert any(later < earlier for earlier, later in itertools.pairwise(tails))

        async def short() -> bool:
            return len(await memory.turns()) <= HURRIED.budget.full_zone_turns + policy.longest_tail(HURRIED)

        # The next turn has all those move that the processes left when they ended.
        await memory.add_turn(turn(5))
        await until(short, within=120.0)
        model.release()

        async def made_up_for() -> bool:
            await memory.flush(30)
            return len((await shown(memory))["summary"]) == len(acknowledged) - 2

        await until(made_up_for, within=120.0)
        found = await said(memory)
        assert sorted(found) == sorted(acknowledged)
        for writer in {each.rpartition("-")[0] for each in acknowledged[6:]}:
            mine = [each for each in found if each.startswith(f"{writer}-")]
            assert mine == [f"{writer}-{number}" for number in range(len(mine))]
        await require_the_first_are_summarized(memory, "shared")
