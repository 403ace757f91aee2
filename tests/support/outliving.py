"""A conversation that folds and keeps its transcript while another server takes over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.backend import Backend
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey

SETTINGS: Final = config(
    transcript=True,
    total_max_tokens=0,
    summary_max_tokens=1_000_000,
    fold_batch_turns=3,
    # The lease of a process whose connection is lost lasts as long.
    summarizer_timeout_s=5.0,
)
BEFORE, MEANWHILE, AFTERWARDS = 100, 100, 40
PATIENCE_S: Final = 90.0


async def outlives(
    backend: Backend,
    fail_over: Callable[[], Awaitable[object]],
    *,
    user: str = "u1",
    quiet: bool = False,
) -> None:
    """Add turns before, during and after a failover, and require each of them once, in order.

    `quiet`: none is added during it, because the datastore promises nothing for what is.
    """
    key = MemoryKey("tenant", user, "chat")
    memory = backend.memory(key, SETTINGS, summarizer=LedgerSummarizer())
    await _add(memory, range(BEFORE))
    if quiet:
        await memory.flush()
        await fail_over()
        await _add(memory, range(BEFORE, BEFORE + MEANWHILE))
    else:
        failing = asyncio.ensure_future(fail_over())
        await _add(memory, range(BEFORE, BEFORE + MEANWHILE))
        await failing
    count = BEFORE + MEANWHILE + AFTERWARDS
    await _add(memory, range(BEFORE + MEANWHILE, count))

    async def summarized() -> bool:
        with contextlib.suppress(StorageError):
            await memory.flush(10)
            return len((await shown(memory))["summary"]) == count - 2
        return False

    await until(summarized, within=PATIENCE_S)
    everything = [f"u{number}" for number in range(count)]
    assert (await shown(memory))["summary"] == everything[:-2]
    turns = [one async for one in memory.each_turn()]
    assert [one.id for one in turns] == [f"t{number}" for number in range(count)]
    assert [one.number for one in turns] == [*range(count)]
    assert [one.turn.user_message for one in turns] == everything
    assert sum(one.summarized for one in turns) == count - 2


async def _add(memory: DistributedShortTermMemory, turns: range) -> None:
    """Add turns one after another, each until it is acknowledged."""
    for number in turns:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await memory.add_turn(turn(number), turn_id=f"t{number}")
                    break
                except (Unavailable, OutcomeUnknown):
                    await asyncio.sleep(0.05)
