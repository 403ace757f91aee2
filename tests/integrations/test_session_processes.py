"""Two processes that end a shared session at once promote each entry once, on each datastore."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from stm_backends import MemoryKey, open_backend
from stm_backends.tiers import MemoryManager, MemoryTier, SharedShortTermMemory
from tests.support.places import EACH, Place

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


@pytest.mark.parametrize("datastore", ["sqlite", *EACH])
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
