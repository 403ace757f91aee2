"""Checks of waiting for summaries."""

from __future__ import annotations

import asyncio

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth


class Flushing(Contract):
    """Checks of waiting for summaries."""

    @check("memory.waiting")
    async def test_cancelling_a_flush_does_not_stop_the_summary(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(summarizer.called.is_set, "a summary is begun")
        impatient = asyncio.create_task(memory.flush())
        patient = asyncio.create_task(memory.flush())
        await asyncio.sleep(0.02)
        impatient.cancel()
        await asyncio.wait([impatient], timeout=5)
        must_be(impatient.cancelled(), True, "waiting for a flush can be cancelled")
        summarizer.release()
        async with must_end(10, "the summary is released"):
            await patient
        must_be((await shown(memory))["summary"], ["u0", "u1"], "cancelling a wait does not stop the summary")

    @check("memory.waiting")
    async def test_flush_returns_at_its_deadline(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        async with must_end(3, "the flush was given 0.1 s"):
            await memory.flush(timeout=0.1)
        must_be((await shown(memory))["pending"], ["u0", "u1"], "the summary is not written yet")
        summarizer.release()
        await memory.flush()

    @check("memory.waiting")
    async def test_flush_returns_when_the_memory_becomes_degraded(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 10_000
        # The next attempt is an hour away, and an attempt may take an hour.
        memory = await bench.memory(
            config(zone=1, retry_attempts=0, degraded_retry_interval_s=3600.0, summarizer_timeout_s=3600.0),
            summarizer,
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        async with must_end(10, "the only attempt has failed"):
            await memory.flush()
        must_be(memory.health, MemoryHealth.DEGRADED, "no retries were asked for")
