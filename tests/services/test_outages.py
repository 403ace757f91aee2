"""A model that is down for a while, and two pods that go on talking, on each kind of datastore."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.testing.memory_contract import config, turn, until
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support.places import Place, quick_on

KEY = MemoryKey("acme", "u1", "chat")

pytestmark = pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", "redis", "postgres"]))

SETTINGS = config(
    zone=2,
    retry_attempts=0,
    degraded_retry_interval_s=0.2,
    recovery_backlog_limit=5,
    total_max_tokens=0,
    summary_max_tokens=100_000,
)


class Model:
    """A summarizer that fails until `works` is set, and then waits for `go`."""

    def __init__(self) -> None:
        self.works = False
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.calls = 0

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls += 1
        if not self.works:
            raise RuntimeError("the model is down")
        self.begun.set()
        await self.go.wait()
        users = " ".join(item["user"] for item in request["turns"])
        return {"summary": f"{request['previous_summary']} {users}".strip()}


async def test_nothing_is_dropped_under_a_summary_that_is_being_written(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place, model = place_on(datastore), Model()
    async with (
        open_backend(place.url, create=True, close_timeout_s=0) as here,
        open_backend(place.url, close_timeout_s=0) as there,
    ):
        pods = [backend.memory(KEY, SETTINGS, summarizer=model) for backend in (here, there)]
        for number in range(12):
            await pods[number % 2].add_turn(turn(number))
        await until(lambda: sum(pod.stats.dropped for pod in pods) == 5, within=20)
        model.works = True
        async with asyncio.timeout(20):
            await model.begun.wait()
        dropped = sum(pod.stats.dropped for pod in pods)
        for number in range(12, 30):
            await pods[number % 2].add_turn(turn(number))
            await pods[number % 2].get_llm_context()
        # Time enough for either pod to ask for the lease again.
        await asyncio.sleep(0.5)
        model.go.set()
        await asyncio.gather(*(pod.flush() for pod in pods))
        body = (await here.sessions.export(KEY))["body"]
        assert (body["health"], body["dropped"], body["folded"]) == ("healthy", dropped, 28 - dropped)
        assert sum(pod.stats.lost_races for pod in pods) == 0
        assert body["summary"].split() == [f"u{number}" for number in range(dropped, 28)]


async def test_two_pods_ask_a_model_that_fails_once_an_interval(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    place, calls = place_on(datastore), list[float]()

    async def fails(request: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(time.monotonic())
        await asyncio.sleep(0.1)
        raise RuntimeError("the model is down")

    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=1.0, recovery_backlog_limit=2)
    async with (
        open_backend(place.url, create=True, close_timeout_s=0) as here,
        open_backend(place.url, close_timeout_s=0) as there,
    ):
        pods = [backend.memory(KEY, settings, summarizer=fails) for backend in (here, there) for _ in "ab"]
        number = 0
        async with asyncio.timeout(30):
            while len(calls) < 4:
                await pods[number % 4].add_turn(turn(number))
                await asyncio.sleep(0.02)
                number += 1
        gaps = [later - earlier for earlier, later in itertools.pairwise(calls)]
        assert min(gaps) >= 1.0
        await until(lambda: pods[0].health is MemoryHealth.DEGRADED)


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
