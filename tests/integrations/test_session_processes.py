"""Two processes that share a session and a graph, on real datastores."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from stm_backends import MemoryKey, open_backend
from stm_backends.tiers import MemoryManager, MemoryTier, SharedShortTermMemory
from tests.support.places import EACH, Place, quick_on

KEY, OWNER = MemoryKey("acme", "u1", "chat"), ("acme", "u1")

POD = """
import asyncio, sys
from stm_backends import MemoryKey, open_backend
from stm_backends.tiers import MemoryManager, SharedShortTermMemory

async def main(url, text):
    async with open_backend(url) as backend:
        session = SharedShortTermMemory(backend, MemoryKey("acme", "u1", "chat"))
        memory = MemoryManager(
            llm_provider=lambda messages: text, backend=backend, owner=("acme", "u1"), short_term=session
        )
        print("ready", flush=True)
        sys.stdin.readline()
        await memory.gc.on_session_end()

asyncio.run(main(*sys.argv[1:]))
"""


async def filled(url: str) -> None:
    """Store 13 entries of a session, two of which are due for long-term memory."""
    async with open_backend(url, create=True) as backend:
        session = SharedShortTermMemory(backend, KEY)
        memory = MemoryManager(backend=backend, owner=OWNER, short_term=session)
        await memory.remember("important", "the key fact", importance=0.9)
        for number in range(12):
            await memory.remember(f"k{number}", f"fact {number}", importance=0.1)
        for _ in range(3):
            await memory.recall("fact 11", tiers=[MemoryTier.SHORT_TERM])


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
def test_two_processes_that_end_a_session_at_once_promote_once(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    url = place_on(datastore).url
    asyncio.run(filled(url))
    pods = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", POD, url, text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for text in ("of the first", "of the second")
    ]
    for pod in pods:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "ready\n"
    for pod in pods:
        assert pod.stdin is not None
        pod.stdin.write("go\n")
        pod.stdin.flush()
    for pod in pods:
        pod.communicate(timeout=120)
    assert [pod.returncode for pod in pods] == [0, 0]

    async def stored() -> None:
        async with open_backend(url) as backend:
            session = SharedShortTermMemory(backend, KEY)
            memory = MemoryManager(backend=backend, owner=OWNER, short_term=session)
            found = {one.key: one for one in await memory.long_term.listed()}
            assert len(await session.listed()) == 11
            summary = found.pop(session.summary_key or "")
            assert summary.content in ("of the first", "of the second")
            assert {key: (one.content, one.access_count) for key, one in found.items()} == {
                "important": ("the key fact", 0),
                "k11": ("fact 11", 3),
            }

    asyncio.run(stored())


# What the other process does at a certain moment

OBEYING = """
import asyncio, sys
from stm_backends import MemoryKey, open_backend
from stm_backends.tiers import MemoryManager, MemoryTier, SharedShortTermMemory

async def main(url):
    async with open_backend(url) as backend:
        session = SharedShortTermMemory(backend, MemoryKey("acme", "u1", "chat"))
        memory = MemoryManager(backend=backend, owner=("acme", "u1"), short_term=session)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await eval(line, {**globals(), "backend": backend, "memory": memory})
            print("done", flush=True)

asyncio.run(main(sys.argv[1]))
"""


class Pair:
    """A manager in this process, and one in another that shares its session and its graph."""

    def __init__(self, memory: MemoryManager, process: asyncio.subprocess.Process) -> None:
        self.memory = memory
        self.process = process
        self.requests = 0
        self.answer = "a summary"
        self.meanwhile: str | None = None
        memory.gc.llm_provider = self.model

    async def other(self, call: str) -> None:
        """Let the other process make a call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{call}\n".encode())
        assert await self.process.stdout.readline() == b"done\n", call

    async def model(self, messages: list[dict[str, str]]) -> str:
        """Answer for the model, after the other process did what it does `meanwhile`, once."""
        del messages
        self.requests += 1
        call, self.meanwhile = self.meanwhile, None
        if call is not None:
            await self.other(call)
        return self.answer

    async def session(self) -> dict[str, object]:
        """Return the contents of the session by key."""
        return {one.key: one.content for one in await self.memory.short_term.listed()}

    async def stored(self) -> dict[str, object]:
        """Return the contents of long-term memory by key, except for summaries."""
        entries = await self.memory.long_term.listed()
        return {one.key: one.content for one in entries if not one.key.startswith("__summary__")}


@pytest.fixture(params=["sqlite", "redis"])
async def pair(request: pytest.FixtureRequest, place_on: Callable[[str], Place]) -> AsyncIterator[Pair]:
    url = place_on(request.param).url
    async with open_backend(url, create=True) as backend:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", OBEYING, url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        session = SharedShortTermMemory(backend, KEY)
        yield Pair(MemoryManager(backend=backend, owner=OWNER, short_term=session), process)
        process.stdin.close()
        assert await process.wait() == 0


async def fill(pair: Pair) -> None:
    for number in range(12):
        await pair.memory.remember(f"k{number}", f"fact {number}", importance=0.1)


LONG = MemoryTier.LONG_TERM


async def test_an_update_during_the_summary_of_another_process_is_kept(pair: Pair) -> None:
    await fill(pair)
    pair.meanwhile = "memory.remember('k0', 'newer', importance=0.9)"
    await pair.memory.gc.on_session_end()
    assert (await pair.session())["k0"] == "newer"
    assert await pair.stored() == {"k0": "newer"}


async def test_what_another_process_forgets_during_the_summary_is_gone(pair: Pair) -> None:
    await fill(pair)
    pair.meanwhile = "memory.forget('k0')"
    await pair.memory.gc.on_session_end()
    assert pair.requests == 2
    assert (await pair.session()).keys() == {"__summary__", *(f"k{number}" for number in range(2, 12))}


async def test_an_entry_that_another_process_summarized_is_promoted(pair: Pair) -> None:
    await pair.memory.remember("important", "the key fact", importance=0.9)
    await fill(pair)
    await pair.other("memory.short_term.summarize()")
    assert "important" not in await pair.session()
    await pair.memory.gc.on_session_end()
    assert await pair.stored() == {"important": "the key fact"}


async def test_an_update_during_the_improvement_of_another_process_is_kept(pair: Pair) -> None:
    await pair.memory.remember("k", "old content", LONG)
    pair.answer = "improved content"
    pair.meanwhile = "memory.remember('k', 'newer content', MemoryTier.LONG_TERM)"
    assert await pair.memory.gc.improve_memory(LONG) == 0
    assert await pair.stored() == {"k": "newer content"}
    assert [one.key for one in await pair.memory.long_term.recall("newer")] == ["k"]
    assert await pair.memory.long_term.recall("improved") == []


async def test_what_another_process_forgot_is_not_promoted_again(pair: Pair) -> None:
    await pair.memory.remember("k", "the key fact", importance=0.9)
    await pair.memory.gc.on_session_end()
    await pair.other("memory.forget('k', MemoryTier.LONG_TERM)")
    await pair.memory.gc.on_session_end()
    await pair.memory.recall("key", tiers=[MemoryTier.SHORT_TERM])
    await pair.memory.gc.on_session_end()
    assert await pair.stored() == {}


async def test_merges_of_two_processes_at_once_count_accesses_once(pair: Pair) -> None:
    for number in range(6):
        await pair.memory.remember(f"k{number}", "one two three four", LONG, importance=number / 10)
        await pair.memory.recall("three", tiers=[LONG])
    [merged, _] = await asyncio.gather(
        pair.memory.long_term.consolidate(), pair.other("memory.long_term.consolidate()")
    )
    while await pair.memory.long_term.consolidate():
        pass
    [left] = await pair.memory.long_term.listed()
    assert merged <= 5
    assert (left.key, left.access_count, left.importance) == ("k5", 1 + 2 + 3 + 4 + 5 + 6, 0.5)


async def test_an_erasure_by_another_process_leaves_nothing_to_bring_back(pair: Pair) -> None:
    await fill(pair)
    await pair.memory.remember("important", "the key fact", importance=0.9)
    await pair.memory.remember("k", "the key fact, too", LONG)
    pair.meanwhile = "backend.sessions.erase_user('acme', 'u1')"
    await pair.memory.gc.on_session_end()
    await pair.memory.gc.on_idle()
    assert (await pair.session(), await pair.stored()) == ({}, {})
    await pair.other("asyncio.sleep(0)")
