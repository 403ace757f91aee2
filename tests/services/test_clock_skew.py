"""Hosts whose clocks are five minutes apart: no turn is lost, and no clock ends a lease of another host."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import pytest

from stm_backends import ConversationTurn, MemoryBudget, ShortTermMemoryConfig, open_backend
from stm_backends.records.keys import memory_key
from tests.services import skewed
from tests.services.skewed import CONFIG, KEY, summarize
from tests.support import leases
from tests.support.places import EACH, Place

PlaceOn = Callable[[str], Place]

pytestmark = pytest.mark.full

FIVE_MINUTES = 300.0

BY_THE_SERVER = [each for each in EACH if each != "dynamo"]
"""The datastores whose own clock judges what has expired."""


async def on_a_host_that_is(off: float, *arguments: object) -> str:
    """Run a pod to its end, on a host whose clock is so many seconds ahead."""
    command = [sys.executable, "-W", "error", skewed.__file__, off, *arguments]
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    return out.decode().strip()


async def set_up(place: Place) -> None:
    async with open_backend(place.url, create=True) as backend:
        assert await backend.ping() >= 0


@pytest.mark.parametrize("datastore", EACH)
async def test_pods_whose_clocks_are_apart_lose_and_double_no_turn(datastore: str, place_on: PlaceOn) -> None:
    place = place_on(datastore)
    await set_up(place)
    url, clocks = place.options(deadline_s=2), (-FIVE_MINUTES, 0.0, FIVE_MINUTES)

    pods = (
        on_a_host_that_is(off, url, "talk", f"{name}-", 12) for name, off in zip("abc", clocks, strict=True)
    )
    await asyncio.gather(*pods)

    async with open_backend(url) as backend:
        memory = backend.memory(KEY, CONFIG, summarizer=summarize)
        shown = (await memory.get_llm_context())["conversation_memory"]
    turns = [*shown.get("pending_turns", ()), *shown["recent_turns"]]
    said = [*shown["summary"].split(), *(turn["user"] for turn in turns)]
    for name in "abc":
        assert [one for one in said if one[0] == name] == [f"{name}-{number}" for number in range(12)]
    assert len(said) == 36
    assert len(shown["summary"].split()) >= 30, "summaries went on"


@pytest.mark.parametrize("off", [-FIVE_MINUTES, FIVE_MINUTES])
@pytest.mark.parametrize("datastore", EACH)
async def test_a_wrong_clock_neither_steals_nor_keeps_the_lease_on_a_conversation(
    datastore: str, place_on: PlaceOn, off: float
) -> None:
    place = place_on(datastore)
    await set_up(place)
    async with open_backend(place.url) as backend:
        memory = backend.memory(KEY, ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=50)))
        for number in range(3):
            await memory.add_turn(ConversationTurn(f"a-{number}", "Yes."))
        await leases.take(backend.driver, memory_key(KEY), at=time.time(), ttl=60.0)
        assert await on_a_host_that_is(off, place.url, "flush", 1.0) == "0", "stolen"
        await leases.take(backend.driver, memory_key(KEY), at=time.time(), ttl=0.5)
        assert await on_a_host_that_is(off, place.url, "flush", 30.0) == "1", "kept beyond its time"


@pytest.mark.parametrize("datastore", BY_THE_SERVER)
async def test_a_wrong_clock_neither_ends_nor_keeps_a_record_of_the_server(
    datastore: str, place_on: PlaceOn
) -> None:
    place = place_on(datastore)
    await set_up(place)

    async def contend(off: float) -> None:
        async def ours(name: str, ttl: float) -> bool:
            return await skewed.take(place.url, f"{name} {off}", ttl)

        async def theirs(name: str, ttl: float) -> bool:
            return await on_a_host_that_is(off, place.url, "lease", f"{name} {off}", ttl) == "True"

        assert await ours("long", 60)
        assert await ours("short", 0.2)
        assert not await theirs("long", 60), "stolen"
        assert await theirs("short", 60), "kept beyond its time"
        assert not await ours("short", 60), "ended before its time"
        assert await theirs("brief", 0.5)
        async with asyncio.timeout(30):
            while not await ours("brief", 60):  # noqa: ASYNC110 -- the event is the server's
                await asyncio.sleep(0.1)

    await asyncio.gather(contend(-FIVE_MINUTES), contend(FIVE_MINUTES))


@pytest.mark.parametrize("datastore", ["dynamo"])
async def test_on_dynamodb_a_record_ends_by_the_clock_of_the_caller(
    datastore: str, place_on: PlaceOn
) -> None:
    place = place_on(datastore)
    await set_up(place)
    lease = (place.url, "lease", "chat", 60)
    assert await skewed.take(place.url, "chat", 60) is True
    assert await on_a_host_that_is(-FIVE_MINUTES, *lease) == "False"
    assert await on_a_host_that_is(FIVE_MINUTES, *lease) == "True"
    assert await skewed.take(place.url, "chat", 60) is False
