"""A model that is down, and two processes that keep adding turns, on each kind of datastore."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from stm_backends import open_backend
from stm_backends.types import MemoryKey
from tests.support.places import Place, quick_on

KEY = MemoryKey("acme", "u1", "chat")

pytestmark = pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", "redis", "postgres"]))

_POD = """
import asyncio, sys
from stm_backends import open_backend
from stm_backends.testing.memory_contract import config, turn
from stm_backends.types import MemoryKey

async def fails(request):
    print("called", flush=True)
    raise RuntimeError("the model is down")

async def main():
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=1000.0, recovery_backlog_limit=2)
    # Closing gives a trim time to end: killed, it would keep the lease from the other process for a minute.
    async with open_backend(sys.argv[1], close_timeout_s=20) as backend:
        memory = backend.memory(MemoryKey("acme", "u1", "chat"), settings, summarizer=fails)
        for number in range(20):
            await memory.add_turn(turn(f"{sys.argv[2]}-{number}"))
            await asyncio.sleep(0.01)
        while memory.busy and len(await memory.turns()) > 3:
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def test_processes_make_one_attempt_together_and_keep_the_same_backlog(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        pods = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", _POD, place.url, str(number), stdout=subprocess.PIPE
            )
            for number in range(2)
        ]
        async with asyncio.timeout(60):
            said = [(await pod.communicate())[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0]
        assert b"".join(said).split() == [b"called"]
        exported = await backend.sessions.export(KEY)
        assert exported["body"]["attempts"] == 1
        assert exported["body"]["dropped"] + len(exported["turns"]) == 40
        assert len(exported["turns"]) == 3
