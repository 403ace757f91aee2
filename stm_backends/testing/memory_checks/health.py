"""Checks of summarizers that fail."""

from __future__ import annotations

import asyncio

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth


class Panic(BaseException):
    """Not an `Exception`."""


class Health(Contract):
    """Checks of summarizers that fail."""

    @check("memory.health")
    async def test_failures_are_retried_without_a_new_turn(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 2
        memory = await bench.memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: len(summarizer.requests) == 3, "two failures are retried, without a new turn")
        await until(lambda: memory.health is MemoryHealth.HEALTHY, "a success makes the memory healthy")
        must_be((await shown(memory))["summary"], ["u0"], "the third attempt succeeded")

    @check("memory.health")
    async def test_a_panic_of_the_summarizer_is_a_failed_attempt(self, bench: MemoryBench) -> None:
        """An extension in Rust raises a `BaseException`."""
        summarizer = LedgerSummarizer()
        summarizer.fail, summarizer.error = 1, Panic
        memory = await bench.memory(config(retry_backoff_base_s=30.0), summarizer)
        for number in range(4):
            await memory.add_turn(turn(number))
            await memory.get_llm_context()
        await until(lambda: memory.health is MemoryHealth.RETRY, "a panic makes the health `retry`")
        await asyncio.sleep(0.05)
        must_be(len(summarizer.requests), 1, "the next attempt is 30 seconds later")

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
        await until(lambda: memory.health is MemoryHealth.RETRY, "a failure makes the health `retry`")
        expected = {"summary": ["u0"], "pending": ["u1"], "recent": ["u2"]}
        must_be(await shown(memory), expected, "a failed attempt takes nothing away")

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
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        expected = {"summary": [], "pending": [], "recent": ["u2"]}
        must_be(await shown(memory), expected, "a degraded memory shows only the full zone")
        must_be(len(summarizer.requests), 3, "one turn was summarized, one attempt failed and one retry")
        async with must_end(2, "a flush does not wait for a degraded memory"):
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
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        await until(lambda: memory.health is MemoryHealth.HEALTHY, "the memory recovers by itself")
        expected = {"summary": ["u0", "u1", "u2"], "pending": [], "recent": ["u3"]}
        must_be(await shown(memory), expected, "the backlog is summarized after the recovery")
        asked = [item["user"] for item in summarizer.requests[-1]["turns"]]
        must_be(asked, ["u0", "u1", "u2"], "the backlog is one batch")

    @check("memory.health")
    async def test_an_interval_of_zero_does_not_spin(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 10_000
        memory = await bench.memory(config(retry_attempts=0), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        clock, before = asyncio.get_running_loop().time, len(summarizer.requests)
        began = clock()
        await asyncio.sleep(0.3)
        asked, seconds = len(summarizer.requests) - before, clock() - began
        assert asked <= 1 + seconds * 20, f"a failing summarizer was called {asked} times in {seconds:g} s"

    @check("memory.health")
    async def test_the_backlog_is_bounded_and_its_oldest_turns_go(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 10_000
        memory = await bench.memory(
            config(zone=1, retry_attempts=0, recovery_backlog_limit=2, degraded_retry_interval_s=0.5),
            summarizer,
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        for number in range(2, 6):
            await memory.add_turn(turn(number))

        async def bounded() -> bool:
            return len(await memory.turns()) <= 3

        await until(bounded, "a backlog of two turns and the full zone are left")
        # Not before: an earlier recovery would cover the turns to be dropped.
        summarizer.fail = 0
        await until(lambda: memory.health is MemoryHealth.HEALTHY, "the memory recovers by itself")
        expected = {"summary": ["u3", "u4"], "pending": [], "recent": ["u5"]}
        must_be(await shown(memory), expected, "the oldest turns of the backlog have gone")

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
        await until(
            lambda: MemoryHealth.DEGRADED in seen and seen[-1] is MemoryHealth.HEALTHY,
            "the memory is degraded, and recovers by itself",
        )
        must_be((await shown(memory))["recent"], ["u3"], "the full zone is one turn")

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
        await until(lambda: len(changes) >= 6, "six changes are reported")
        expected = [
            ("healthy", "retry"),
            ("retry", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "healthy"),
        ]
        must_be(changes, expected, "changes are reported in the order in which they happen")
