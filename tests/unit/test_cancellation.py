"""A cancellation is raised, whatever fails while the work is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.testing.memory_contract import config, turn
from stm_backends.tiers import MemoryManager, MemoryTier
from stm_backends.types import MemoryKey
from tests.support.interrupted import Interrupted

KEY = MemoryKey("acme", "ada", "chat")
OWNER = ("acme", "ada")
SMALL: Final = 2_000
"""Bytes of the largest entry: larger ones are stored in parts."""

Work = Callable[[Backend], Awaitable[object]]


async def remember(backend: Backend) -> None:
    manager = MemoryManager(backend=backend, owner=OWNER)
    await manager.remember("city", "Lisbon", tier=MemoryTier.LONG_TERM)


async def replace_memory(backend: Backend) -> None:
    manager = MemoryManager(backend=backend, owner=OWNER)
    await manager.remember("city", "Porto, " + "far away, " * 300, tier=MemoryTier.LONG_TERM)
    await manager.recall("Porto")
    await manager.gc.on_idle()


async def add_large(backend: Backend) -> None:
    memory = backend.memory(KEY, config("truncation"))
    await memory.add_turn(turn(7, "x" * 3 * SMALL))
    await memory.flush()


async def use_log(backend: Backend) -> None:
    log = backend.item_log(KEY, "openai-agents")
    await log.add([{"n": n, "text": "x" * SMALL} for n in range(3)])
    await log.pop()
    await log.fold()


async def use_states(backend: Backend) -> None:
    await backend.state_store.save_memory_state("acme:ada:other", {"a": "x" * 3 * SMALL})
    await backend.state_store.save_planner_state("token", {"b": 1})
    await backend.state_store.load_planner_state("token")


async def export_and_import(backend: Backend) -> None:
    document = await backend.sessions.export(KEY)
    await backend.sessions.import_(document, on_conflict="replace")


WORK: Final[Mapping[str, Work]] = {
    "a large turn": add_large,
    "a read": lambda backend: backend.memory(KEY, config("truncation")).get_llm_context(),
    "a log": use_log,
    "states": use_states,
    "remembering": remember,
    "replacing a memory": replace_memory,
    "export and import": export_and_import,
    "erasing a user": lambda backend: backend.sessions.erase_user(*OWNER),
    "erasing a tenant": lambda backend: backend.sessions.erase_tenant("acme"),
    "purging": lambda backend: backend.sessions.purge("acme", older_than=0.001),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
async def test_an_outage_hides_no_cancellation(work: Work) -> None:
    at, reached = 1, True
    while reached:
        driver = Interrupted(MemoryDriver(max_entry_bytes=SMALL, max_record_bytes=20 * SMALL))
        async with Backend(driver, close_timeout_s=0) as backend:
            await add_large(backend)
            await remember(backend)
            driver.arm(0)
            task, runs = asyncio.ensure_future(work(backend)), list[bool]()

            async def cancel(
                task: asyncio.Future[object] = task, driver: Interrupted = driver, runs: list[bool] = runs
            ) -> None:
                runs.append(task.cancel())
                driver.down = True

            driver.arm(at, cancel)
            await asyncio.wait([task])
            reached = driver.done >= at
            driver.arm(0)
            assert task.cancelled() == any(runs)
            if not reached:
                await task
        at += 1
    assert at > 2
