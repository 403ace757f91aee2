"""Sessions of the Claude Agent SDK on real servers: its kit, several processes, and killed ones."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from claude_agent_sdk import fold_session_summary
from claude_agent_sdk.testing import run_session_store_conformance

from stm_backends import MemoryKey, open_backend
from stm_backends.integrations.claude_agent_sdk import StmSessionStore
from tests.support.dying_transcript import AGENT, BATCHES, KEY, write
from tests.support.places import EACH, Place, quick_on
from tests.support.selection import few

PlaceOn = Callable[[str], Place]

PODS, APPENDS = 4, 15

POD = """
import asyncio, sys
from stm_backends import open_backend
from stm_backends.integrations.claude_agent_sdk import StmSessionStore

async def main(url, pod, appends):
    async with open_backend(url) as backend:
        store = StmSessionStore(backend)
        for number in range(int(appends)):
            entry = {"type": "user", "uuid": f"{pod}-{number}", "gitBranch": f"{pod}-{number}"}
            for _ in range(2):
                await store.append({"project_key": "p", "session_id": "s"}, [entry])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
async def test_the_kit_of_the_sdk_passes(datastore: str, place_on: PlaceOn) -> None:
    users = itertools.count()
    async with open_backend(place_on(datastore).url, create=True) as backend:

        def make() -> StmSessionStore:
            user = str(next(users))  # each contract needs an empty store
            return StmSessionStore(backend, lambda project, one: MemoryKey("kit", user, f"{project}/{one}"))

        await run_session_store_conformance(make)
        receipt = await backend.sessions.erase_with_receipt("kit")
        assert receipt.complete
        assert [user async for user in backend.sessions.users("kit")] == []


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
async def test_processes_that_append_at_once_lose_nothing(datastore: str, place_on: PlaceOn) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True) as backend:
        command = (sys.executable, "-W", "error", "-c", POD, url)
        pods = [await asyncio.create_subprocess_exec(*command, str(pod), str(APPENDS)) for pod in range(PODS)]
        assert await asyncio.gather(*(pod.wait() for pod in pods)) == [0] * PODS
        store, key = StmSessionStore(backend), {"project_key": "p", "session_id": "s"}
        loaded: Any = await store.load(key)  # type: ignore[arg-type]
        for pod in range(PODS):
            own = [one["uuid"] for one in loaded if one["uuid"].startswith(f"{pod}-")]
            assert own == [f"{pod}-{number}" for number in range(APPENDS)]
        assert len(loaded) == PODS * APPENDS
        (summary,) = await store.list_session_summaries("p")
        assert summary["data"] == fold_session_summary(None, key, loaded)["data"]  # type: ignore[arg-type]


@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.full)])
async def test_a_process_killed_at_any_write_loses_and_doubles_nothing(
    place_on: PlaceOn, datastore: str, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_transcript", place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    operations, *acknowledged = map(int, ran.stdout.split())
    assert operations > 20
    users = [f"u{at}" for at in range(1, operations + 1, every)]
    assert len(acknowledged) == len(users)
    entries = [entry for batch in BATCHES for entry in batch]
    async with open_backend(place.url) as backend:
        for user, done in zip(users, acknowledged, strict=True):
            store = StmSessionStore(backend, lambda p, s, user=user: MemoryKey("acme", user, f"{p}/{s}"))
            loaded: Any = await store.load(KEY) or []
            # What was acknowledged is there, and at most the batch that was under way.
            whole = [sum(map(len, BATCHES[:count])) for count in (done, done + 1)]
            assert loaded == entries[: len(loaded)], user
            assert len(loaded) in whole, user
            # A listing shows all that is there, whether or not its summary was stored.
            listed = await store.list_session_summaries(KEY["project_key"])
            folded = fold_session_summary(None, KEY, loaded)["data"]
            assert [one["data"] for one in listed] == ([folded] if loaded else []), user
            # Another process sends all again, and the rest.
            await write(store)
            assert await store.load(KEY) == entries, user
            assert await store.load(AGENT) == entries, user
            (summary,) = await store.list_session_summaries(KEY["project_key"])
            assert summary["data"] == fold_session_summary(None, KEY, entries)["data"], user
            await store.delete(KEY)
            assert [key async for key in backend.sessions.logs("acme", user)] == [], user
