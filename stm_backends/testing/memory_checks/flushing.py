"""Checks of waiting for summaries."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.testing.contract import Contract, check
from stm_backends.testing.memory_bench import MemoryBench, config, shown, turn
from stm_backends.testing.summarizers import LedgerSummarizer


class Flushing(Contract):
    """Checks of waiting for summaries."""

    @check("memory.waiting")
    async def test_cancelling_a_flush_harms_nobody(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        impatient = asyncio.create_task(memory.flush())
        patient = asyncio.create_task(memory.flush())
        await asyncio.sleep(0.02)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        summarizer.release()
        await asyncio.wait_for(patient, 10)
        assert (await shown(memory))["summary"] == ["u0", "u1"]

    @check("memory.waiting")
    async def test_flush_returns_at_its_deadline(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        async with asyncio.timeout(3):
            await memory.flush(timeout=0.1)
        assert (await shown(memory))["pending"] == ["u0", "u1"]
        summarizer.release()
        await memory.flush()
