"""Transcripts on real datastores: a model that is down for hundreds of turns, and what is read afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support.places import Place

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
