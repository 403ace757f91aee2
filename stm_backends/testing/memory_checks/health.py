"""Checks of summarizers that fail."""

from __future__ import annotations

import asyncio

from stm_backends.testing.contract import Contract, check
from stm_backends.testing.memory_bench import MemoryBench, config, shown, turn, until
from stm_backends.testing.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth


class Health(Contract):
    """Checks of summarizers that fail."""

    @check("memory.health")
    async def test_failures_are_retried_without_a_new_turn(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 2
        memory = await bench.memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: len(summarizer.requests) == 3)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert (await shown(memory))["summary"] == ["u0"]

    @check("memory.health")
    async def test_while_retrying_the_old_summary_and_pending_turns_are_shown(
        self, bench: MemoryBench
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(zone=1, retry_backoff_base_s=30.0), summarizer)
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.fail = 1
        await memory.add_turn(turn(2))
        await until(lambda: memory.health is MemoryHealth.RETRY)
        assert await shown(memory) == {"summary": ["u0"], "pending": ["u1"], "recent": ["u2"]}

    @check("memory.health")
    async def test_when_retries_are_used_up_only_recent_turns_are_shown(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(
            config(zone=1, retry_attempts=1, degraded_retry_interval_s=60.0), summarizer
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.fail = 100
        await memory.add_turn(turn(2))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        assert await shown(memory) == {"summary": [], "pending": [], "recent": ["u2"]}
        assert len(summarizer.requests) == 3
        async with asyncio.timeout(2):
            await memory.flush()

    @check("memory.health")
    async def test_degraded_recovers_by_itself_with_the_backlog_in_one_batch(
        self, bench: MemoryBench
    ) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 2
        memory = await bench.memory(
            config(zone=1, retry_attempts=0, degraded_retry_interval_s=0.3), summarizer
        )
        for number in range(4):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert await shown(memory) == {"summary": ["u0", "u1", "u2"], "pending": [], "recent": ["u3"]}
        assert [item["user"] for item in summarizer.requests[-1]["turns"]] == ["u0", "u1", "u2"]

    @check("memory.health")
    async def test_an_interval_of_zero_does_not_spin(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 10_000
        memory = await bench.memory(config(retry_attempts=0), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        before = len(summarizer.requests)
        await asyncio.sleep(0.5)
        assert len(summarizer.requests) - before <= 11

    @check("memory.health")
    async def test_the_backlog_is_bounded_and_its_oldest_turns_go(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        memory = await bench.memory(
            config(zone=1, retry_attempts=0, recovery_backlog_limit=2, degraded_retry_interval_s=0.5),
            summarizer,
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        for number in range(2, 6):
            await memory.add_turn(turn(number))

        async def bounded() -> bool:
            return len(await memory.turns()) <= 3

        await until(bounded)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert await shown(memory) == {"summary": ["u3", "u4"], "pending": [], "recent": ["u5"]}

    @check("memory.health")
    async def test_without_a_backlog_a_degraded_memory_still_recovers(self, bench: MemoryBench) -> None:
        seen: list[MemoryHealth] = []

        async def note(_: MemoryHealth, new: MemoryHealth) -> None:
            seen.append(new)

        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        memory = await bench.memory(
            config(
                zone=1,
                retry_attempts=0,
                recovery_backlog_limit=0,
                degraded_retry_interval_s=0.2,
                on_health_changed=note,
            ),
            summarizer,
        )
        for number in range(4):
            await memory.add_turn(turn(number))
        await until(lambda: MemoryHealth.DEGRADED in seen and seen[-1] is MemoryHealth.HEALTHY)
        assert (await shown(memory))["recent"] == ["u3"]

    @check("memory.callbacks")
    async def test_health_changes_are_reported_in_order(self, bench: MemoryBench) -> None:
        changes: list[tuple[str, str]] = []

        async def note(old: MemoryHealth, new: MemoryHealth) -> None:
            changes.append((old.value, new.value))

        summarizer = LedgerSummarizer()
        summarizer.fail = 3
        memory = await bench.memory(
            config(retry_attempts=1, degraded_retry_interval_s=0.05, on_health_changed=note), summarizer
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: len(changes) >= 6)
        assert changes == [
            ("healthy", "retry"),
            ("retry", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "healthy"),
        ]
