"""Long-term memory under SIGKILL and in several processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.tiers import BackendGraph, MemoryEntry, MemoryManager, MemoryTier
from tests.support.dying_session import TENANT, end_session
from tests.support.places import Place

LONG = MemoryTier.LONG_TERM

ON_BOTH = pytest.mark.parametrize("datastore", ["sqlite", "redis"])


def facts(entries: list[MemoryEntry]) -> dict[str, tuple[Any, ...]]:
    return {one.key: (one.content, one.access_count, one.importance, sorted(one.tags)) for one in entries}


EXPECTED: dict[str, tuple[Any, ...]] = {
    "strong": ("the customer wants a red bike", 1, 0.9, ["bike", "soon"]),
    "used": ("often asked", 3, 0.1, []),
    "__summary__:s": ("the gist of it", 0, 0.8, []),
}


@ON_BOTH
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.full)])
async def test_a_session_end_killed_anywhere_and_repeated_is_done_once(
    place_on: Callable[[str], Place], datastore: str, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_session", place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    operations = int(ran.stdout)
    assert operations > 50
    async with open_backend(place.url) as backend:
        for user in ("whole", *(f"u{at}" for at in range(1, operations + 1, every))):
            memory = await end_session(backend, user)
            entries = await memory.long_term.listed()
            assert facts(entries) == EXPECTED, user
            again = await end_session(backend, user)
            assert await again.long_term.listed() == entries, user
            graph = BackendGraph(backend, (TENANT, user))
            for entry in entries:
                found = [one["properties"]["key"] for one in await graph.search_vertices("memory", entry.key)]
                assert found == [entry.key], user
            assert await graph.reindex() == 0, user
            assert await backend.sessions.has(TENANT, user)


PROGRAM = """
import asyncio, sys
from stm_backends import open_backend
from stm_backends.tiers import MemoryManager, MemoryTier

async def main():
    async with open_backend(sys.argv[1]) as backend:
        memory = MemoryManager(backend=backend, owner=("acme", "u1"))
        for _ in range(10):
            await memory.recall("qubits", tiers=[MemoryTier.LONG_TERM])
            await memory.get_context_window(1000)

asyncio.run(main())
"""


@ON_BOTH
async def test_accesses_of_three_processes_are_all_counted(
    place_on: Callable[[str], Place], datastore: str
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        memory = MemoryManager(backend=backend, owner=("acme", "u1"))
        await memory.remember("finding", "Quantum uses qubits", tier=LONG)
        command = (sys.executable, "-c", PROGRAM, place.url)
        pods = [await asyncio.create_subprocess_exec(*command) for _ in range(3)]
        assert await asyncio.gather(*(pod.wait() for pod in pods)) == [0, 0, 0]
        [found] = await memory.long_term.listed()
        assert found.access_count == 3 * 10 * 2
