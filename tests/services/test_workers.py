"""Workers on each datastore, as the command runs them: killed again and again, and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stm_backends import Backend, open_backend
from stm_backends.testing.workbench.summarizers import covered
from tests.support import dying_worker
from tests.support.places import EACH, Place, quick_on
from tests.support.short_lived import CONFIG, key_of

ROOT = Path(__file__).parents[2]
CONVERSATIONS, TURNS = 12, 9


@asynccontextmanager
async def working(url: str, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the command `work`, and end it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stm_backends", "work", "--url", url),
        *("--summarizer", "tests.support.short_lived:summarize", *options),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def until_empty(backend: Backend, within: float = 120.0) -> None:
    """Wait until nothing waits for a worker."""
    async with asyncio.timeout(within):
        while (found := await backend.stats.work()) is None or found.waiting:  # noqa: ASYNC110 -- of others
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", *EACH]))
async def test_short_processes_lose_no_turn_while_workers_are_killed(
    place_on: Callable[[str], Place], datastore: str
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True):
        pass
    ended = asyncio.Event()

    async def mortal() -> None:
        while not ended.is_set():
            async with working(url):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 4)

    async with working(url):
        killing = asyncio.create_task(mortal())
        program = [sys.executable, "-m", "tests.support.short_lived"]
        numbers = [str(one) for one in (CONVERSATIONS, TURNS, 4)]
        adding = await asyncio.create_subprocess_exec(
            *program, url, *numbers, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await adding.communicate()
        assert int(printed) == CONVERSATIONS * TURNS
        async with open_backend(url, summaries="worker") as backend:
            await until_empty(backend)
            ended.set()
            await killing
            for number in range(CONVERSATIONS):
                memory = backend.memory(key_of(number), CONFIG)
                told = [one.turn.user_message async for one in memory.each_turn()]
                assert told == [f"u{turn}" for turn in range(TURNS)], number
                # All but those that are shown, and those that are no batch.
                kept = [one.user_message for one in await memory.turns()]
                assert len(kept) < 2 + CONFIG.fold_batch_turns
                shown = (await memory.get_llm_context())["conversation_memory"]
                assert [*covered(shown["summary"]), *kept] == told, number


@pytest.mark.parametrize(
    ("datastore", "every"),
    [("sqlite", 9), *(pytest.param(one, 4, marks=pytest.mark.full) for one in ("sqlite", *EACH))],
)
async def test_a_worker_killed_anywhere_leaves_its_work_to_the_next(
    place_on: Callable[[str], Place], datastore: str, every: int
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_worker", url, str(every)]
    ran = await asyncio.to_thread(
        subprocess.run, program, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    count = int(ran.stdout)
    async with working(url), open_backend(url, summaries="worker") as backend:
        await until_empty(backend)
        for tenant in ("whole", *(f"t{at}" for at in range(1, count + 1, every))):
            memory = backend.memory(dying_worker.key_of(tenant), CONFIG)
            shown = (await memory.get_llm_context())["conversation_memory"]
            assert covered(shown["summary"]) == [f"u{turn}" for turn in range(dying_worker.TURNS - 2)], tenant


async def test_a_worker_drains_when_it_is_told_to_end(
    place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    url, alive = place_on("sqlite").url, tmp_path / "alive"
    async with open_backend(url, create=True):
        pass
    async with working(url, "--alive", str(alive), "--concurrency", "2") as process:
        began = time.time()
        async with asyncio.timeout(60):
            while not alive.exists() or alive.stat().st_mtime < began - 1:  # noqa: ASYNC110 -- a file
                await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, said
        assert b"Working on sqlite:" in said
