"""LlamaIndex's chat store on each datastore: random calls, kills, processes that add and remove at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from stm_backends import open_backend
from stm_backends.integrations.llama_index import StmChatStore
from tests.support.chat_walk import Walk
from tests.support.dying_chat import KEY, STEPS, TENANT
from tests.support.places import EACH, Place, quick_on
from tests.support.selection import few

PlaceOn = Callable[[str], Place]


@pytest.mark.parametrize("datastore", EACH)
async def test_random_calls_are_answered_as_by_the_official_store(datastore: str, place_on: PlaceOn) -> None:
    async with open_backend(place_on(datastore).url, create=True) as backend:
        walk = Walk(StmChatStore(backend, TENANT, "MARKER é"), 7)
        for _ in range(80):
            await walk.step()
        await walk.compare()
        assert {"delete", "last", "clear"} <= walk.said
        receipt = await backend.sessions.erase_with_receipt(TENANT)
        assert receipt.complete
        assert not await backend.sessions.has(TENANT)


@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [5, pytest.param(2, marks=pytest.mark.full)])
async def test_of_what_a_killed_process_did_the_last_step_is_done_or_not(
    datastore: str, place_on: PlaceOn, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_chat", place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    *lines, operations = ran.stdout.splitlines()
    acknowledged = dict.fromkeys(["whole", *(f"u{at}" for at in range(1, int(operations) + 1, every))], -1)
    for line in lines:
        user, number = line.split()
        acknowledged[user] = int(number)
    assert acknowledged["whole"] == len(STEPS) - 1
    left = [list[str](), *(texts for _, texts in STEPS)]
    async with open_backend(place.url) as backend:
        for user, last in acknowledged.items():
            found = [one.content for one in await StmChatStore(backend, TENANT, user).aget_messages(KEY)]
            # The next step may have been done before its process was killed.
            assert found in (left[last + 1], left[min(last + 2, len(STEPS))]), user


PROGRAM = """
import asyncio, sys
from llama_index.core.llms import ChatMessage
from stm_backends import open_backend
from stm_backends.integrations.llama_index import StmChatStore

async def main(url, name):
    async with open_backend(url) as backend:
        store = StmChatStore(backend, "acme", "u1")
        for number in range(25):
            await store.async_add_message("chat", ChatMessage(f"{name} {number}"))
            if number % 5 == 4:
                removed = await store.adelete_message("chat", 0)
                await store.async_add_message("chat", removed, 0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
async def test_four_processes_that_add_and_edit_lose_nothing(datastore: str, place_on: PlaceOn) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    pods = [await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, place.url, n) for n in "abcd"]
    assert await asyncio.gather(*(pod.wait() for pod in pods)) == [0, 0, 0, 0]
    async with open_backend(place.url) as backend:
        found = [str(one.content) for one in await StmChatStore(backend, "acme", "u1").aget_messages("chat")]
    assert sorted(found) == sorted(f"{name} {number}" for name in "abcd" for number in range(25))
