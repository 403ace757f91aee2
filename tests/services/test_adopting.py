"""PenguiFlow's conversations are taken over on each datastore: once, whole, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import penguiflow.planner.memory as pf
import pytest

from stm_backends import MemoryKey, ShortTermMemoryConfig, open_backend
from tests.support.dying_adoption import SAID, SUMMARY, TENANT, OldStore, key_of
from tests.support.places import EACH, Place, quick_on

PlaceOn = Callable[[str], Place]

LONG = ShortTermMemoryConfig(strategy="truncation")


@pytest.mark.parametrize("datastore", EACH)
async def test_a_service_that_switches_keeps_its_conversations(datastore: str, place_on: PlaceOn) -> None:
    url = place_on(datastore).url
    keys = [MemoryKey("acme é", "u 1", f"chat {number}") for number in range(3)]
    async with open_backend(url, create=True) as one, open_backend(url) as two:
        for key in keys:
            theirs = pf.DefaultShortTermMemory(config=pf.ShortTermMemoryConfig(strategy="truncation"))
            for text in ("é\0", key.session_id):
                await theirs.add_turn(pf.ConversationTurn(text, "a", artifacts_shown={"n": [1, None]}))
            await theirs.persist(one.state_store, key.composite())

        routers = [backend.router(LONG, adopt_from=backend.state_store) for backend in (one, two)]

        async def talks(pod: int, key: MemoryKey) -> None:
            await routers[pod].hydrate(None, key)
            context = await routers[pod].get_llm_context()
            users = [turn["user"] for turn in context["conversation_memory"]["recent_turns"]]
            assert users[:2] == ["é\0", key.session_id]
            await routers[pod].add_turn(pf.ConversationTurn(f"from {pod}", "a"))  # type: ignore[arg-type]
            await routers[pod].persist(None, key)

        await asyncio.gather(*(talks(pod, key) for pod in range(2) for key in keys))
        for key in keys:
            turns = await two.memory(key, LONG).turns()
            assert [turn.user_message for turn in turns[:2]] == ["é\0", key.session_id]
            assert turns[0].artifacts_shown == {"n": [1, None]}
            assert sorted(turn.user_message for turn in turns[2:]) == ["from 0", "from 1"]
        receipt = await one.sessions.erase_with_receipt("acme é")
        assert receipt.complete
        for router in routers:
            await router.hydrate(None, keys[0])
        assert not await one.sessions.has("acme é")


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
async def test_after_a_killed_process_the_next_one_takes_over(datastore: str, place_on: PlaceOn) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_adoption", place.url]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    operations = int(ran.stdout)
    assert operations > 8
    async with open_backend(place.url) as backend:
        for at in range(1, operations + 1):
            key = key_of(at)
            found = [turn.user_message for turn in await backend.memory(key, LONG).turns()]
            assert found in ([], SAID), at
            router = backend.router(LONG, adopt_from=OldStore())
            await router.hydrate(None, key)
            await router.add_turn(pf.ConversationTurn("next", "a"))  # type: ignore[arg-type]
            await router.persist(None, key)
            document = await backend.sessions.export(key)
            assert [turn["user_message"] for turn in document["turns"]] == [*SAID, "next"], at
            assert document["body"]["summary"] == SUMMARY
        assert (await backend.sessions.erase_with_receipt(TENANT)).complete
