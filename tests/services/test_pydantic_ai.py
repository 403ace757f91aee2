"""Pydantic AI's conversation store on each datastore: random calls, kills, processes that save at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from pydantic_ai.conversation_store import ConversationEntry

from stm_backends import open_backend
from stm_backends.integrations.pydantic_ai import StmConversationStore
from tests.support.conversation_walk import Walk
from tests.support.dying_conversation import FORKED_AT, TENANT, TURNS, say
from tests.support.places import EACH, Place, quick_on
from tests.support.selection import few

PlaceOn = Callable[[str], Place]


def texts(entries: list[ConversationEntry] | None) -> list[str] | None:
    return None if entries is None else [str(one.message.parts[0].content) for one in entries]  # type: ignore[union-attr]


@pytest.mark.parametrize("datastore", EACH)
async def test_random_calls_are_answered_as_by_the_official_store(
    datastore: str, place_on: PlaceOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_backend(place_on(datastore).url, create=True) as backend:
        walk = Walk(StmConversationStore(backend, TENANT, "MARKER é"), 7, monkeypatch)
        for _ in range(60):
            await walk.step()
        await walk.compare()
        assert "Conversation" in walk.answers
        receipt = await backend.sessions.erase_with_receipt(TENANT)
        assert receipt.complete
        assert not await backend.sessions.has(TENANT)


@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [11, pytest.param(3, marks=pytest.mark.full)])
async def test_of_what_a_killed_process_saved_all_is_there_and_nothing_by_halves(
    datastore: str, place_on: PlaceOn, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_conversation", place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    *lines, operations = ran.stdout.splitlines()
    acknowledged: dict[str, list[str]] = {}
    for line in lines:
        user, step = line.split()
        acknowledged.setdefault(user, []).append(step)
    everything = [f"{number}{end}" for number in range(TURNS) for end in "?!"]
    async with open_backend(place.url) as backend:
        for user in ("whole", *(f"u{at}" for at in range(1, int(operations) + 1, every))):
            steps = acknowledged.get(user, [])
            saves = len([step for step in steps if step.isdigit()])
            store = StmConversationStore(backend, TENANT, user)
            chat, fork = texts(await store.load_entries("chat")), texts(await store.load_entries("fork"))
            if "delete" in steps:
                assert chat is None, user
            elif chat is None:
                # Nothing was acknowledged, or it was being deleted.
                assert not saves or "fork" in steps, user
            else:
                # The next save may have been stored before its process was killed.
                assert chat in (everything[: 2 * saves], everything[: 2 * saves + 2]), user
            if fork is None:
                assert "fork" not in steps, user
            else:
                assert saves == TURNS, user
                assert fork == everything[:FORKED_AT], user
            there = {"chat": chat, "fork": fork}
            listed = {one.conversation_id for one in await store.list_conversations()}
            assert listed == {name for name, found in there.items() if found is not None}, user
            await say(store, 99)
            assert texts(await store.load_entries("chat")) == [*(chat or []), "99?", "99!"], user


POD = """
import asyncio, random, sys
from pydantic_ai.conversation_store import ConversationConflict
from stm_backends import open_backend
from stm_backends.integrations.pydantic_ai import StmConversationStore
from tests.support.dying_conversation import say

async def main(url, pod):
    async with open_backend(url) as backend:
        store = StmConversationStore(backend, "acme", "u1")
        for number in range(8):
            while True:
                try:
                    await say(store, f"{pod}.{number}")
                except ConversationConflict:
                    await asyncio.sleep(random.uniform(0, 0.1))
                    continue
                break

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
async def test_turns_of_four_processes_that_try_again_are_all_there_once(
    datastore: str, place_on: PlaceOn
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        pods = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", POD, place.url, str(pod))
            for pod in range(4)
        ]
        assert await asyncio.gather(*(pod.wait() for pod in pods)) == [0] * 4
        store = StmConversationStore(backend, "acme", "u1")
        there = texts(await store.load_entries("chat"))
        assert there is not None
        for pod in range(4):
            own = [text for text in there if text.startswith(f"{pod}.")]
            assert own == [f"{pod}.{number}{end}" for number in range(8) for end in "?!"]
        assert len(there) == 4 * 8 * 2
