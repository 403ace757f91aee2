"""Checks of turns that are folded into a summary."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.testing.contract import Contract, check
from stm_backends.testing.memory_bench import MemoryBench, config, shown, turn, until
from stm_backends.testing.summarizers import LedgerSummarizer, covered
from stm_backends.types import MemoryHealth


class Summarizing(Contract):
    """Checks of turns that are folded into a summary."""

    @check("memory.summary")
    async def test_turns_that_leave_the_full_zone_are_summarized(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(), summarizer)
        for number in range(6):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert await shown(memory) == {
            "summary": ["u0", "u1", "u2", "u3"],
            "pending": [],
            "recent": ["u4", "u5"],
        }
        assert memory.health is MemoryHealth.HEALTHY

    @check("memory.summary")
    async def test_nothing_is_forgotten_while_a_summary_is_being_written(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        for number in range(5):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        assert await shown(memory) == {
            "summary": [],
            "pending": ["u0", "u1", "u2"],
            "recent": ["u3", "u4"],
        }
        summarizer.release()
        await memory.flush()

    @check("memory.summary")
    async def test_turns_added_during_a_summary_survive_the_fold(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        for number in range(3, 8):
            await memory.add_turn(turn(number))
        summarizer.release()
        await memory.flush()
        assert await shown(memory) == {
            "summary": [f"u{number}" for number in range(6)],
            "pending": [],
            "recent": ["u6", "u7"],
        }
        asked = [item["user"] for request in summarizer.requests for item in request["turns"]]
        assert asked == [f"u{number}" for number in range(6)]

    @check("memory.waiting")
    async def test_adding_never_waits_for_a_summary(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        async with asyncio.timeout(5):
            for number in range(20):
                await memory.add_turn(turn(number))
        assert summarizer.most_running <= 1
        summarizer.release()
        await memory.flush()

    @check("memory.waiting")
    async def test_a_fold_waits_for_its_batch_and_flush_does_not(self, bench: MemoryBench) -> None:
        bench.needs("fold_batch_turns")
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(fold_batch_turns=3), summarizer)
        for number in range(4):
            await memory.add_turn(turn(number))
        await asyncio.sleep(0.05)
        assert summarizer.requests == []
        assert (await shown(memory))["pending"] == ["u0", "u1"]
        await memory.flush()
        assert (await shown(memory))["summary"] == ["u0", "u1"]

    @check("memory.summary")
    async def test_the_summarizer_gets_the_previous_summary_and_the_turns(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
            await memory.flush()
        assert [set(request) for request in summarizer.requests] == [{"previous_summary", "turns"}] * 2
        first, second = summarizer.requests
        assert (first["previous_summary"], first["turns"]) == ("", [{"user": "u0", "assistant": "fine"}])
        assert covered(second["previous_summary"]) == ["u0"]

    @check("memory.budget")
    async def test_a_summary_over_its_budget_is_cut_and_keeps_its_closing_tag(
        self, bench: MemoryBench
    ) -> None:
        summarizer = LedgerSummarizer()
        summarizer.answers = [{"summary": f"<session_summary>{'word ' * 2000}</session_summary>"}]
        memory = await bench.memory(config(summary_max_tokens=50, overflow_policy="error"), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        summary = (await memory.get_llm_context())["conversation_memory"]["summary"]
        assert len(summary) // 4 + 1 <= 50
        assert summary.endswith("</session_summary>")
        assert len(summary) > 150

    @pytest.mark.parametrize(
        "nonsense",
        [
            None,
            "text",
            7,
            {},
            {"summary": None},
            {"summary": ["x"]},
            {"summary": "  "},
            {"summary": "<session_summary></session_summary>"},
        ],
    )
    @check("memory.health")
    async def test_a_summarizer_that_answers_nonsense_erases_nothing(
        self, bench: MemoryBench, nonsense: object
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.answers = [nonsense]
        await memory.add_turn(turn(2))
        await memory.flush()
        assert await shown(memory) == {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
        assert len(summarizer.requests) == 3

    @check("memory.health")
    async def test_a_summarizer_that_hangs_is_timed_out(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(summarizer_timeout_s=0.05, retry_attempts=50), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.RETRY)
        summarizer.release()
        await memory.flush()
        assert (await shown(memory))["summary"] == ["u0"]
