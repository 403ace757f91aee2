"""Checks of turns that are folded into a summary."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
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
        expected = {"summary": ["u0", "u1", "u2", "u3"], "pending": [], "recent": ["u4", "u5"]}
        must_be(await shown(memory), expected, "the full zone is two turns, and the flush has ended")
        must_be(memory.health, MemoryHealth.HEALTHY, "nothing has failed")

    @check("memory.summary")
    async def test_nothing_is_forgotten_while_a_summary_is_being_written(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        for number in range(5):
            await memory.add_turn(turn(number))
        await until(summarizer.called.is_set, "a summary is begun")
        expected = {"summary": [], "pending": ["u0", "u1", "u2"], "recent": ["u3", "u4"]}
        must_be(await shown(memory), expected, "the summary is still being written")
        summarizer.release()
        await memory.flush()

    @check("memory.summary")
    async def test_turns_added_during_a_summary_survive_the_fold(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(summarizer.called.is_set, "a summary is begun")
        for number in range(3, 8):
            await memory.add_turn(turn(number))
        summarizer.release()
        await memory.flush()
        summarized = [f"u{number}" for number in range(6)]
        expected = {"summary": summarized, "pending": [], "recent": ["u6", "u7"]}
        must_be(await shown(memory), expected, "a fold removes only the turns that its summary covers")
        asked = [item["user"] for request in summarizer.requests for item in request["turns"]]
        must_be(asked, summarized, "each turn is summarized once")

    @check("memory.summary")
    async def test_turns_beyond_one_call_of_the_summarizer_follow_in_others(self, bench: MemoryBench) -> None:
        """All pending turns go into one call, which fails if they are too many for the model."""
        bench.needs("fold_batch_turns")
        summarizer = LedgerSummarizer()
        memory = await bench.memory(
            config(zone=1, fold_batch_turns=9, fold_max_turns=4, summary_max_tokens=1_000), summarizer
        )
        for number in range(10):
            await memory.add_turn(turn(number))
        await memory.flush()
        most = max(len(request["turns"]) for request in summarizer.requests)
        must_be(most, 4, "`fold_max_turns` is four turns")
        users = [f"u{number}" for number in range(10)]
        expected = {"summary": users[:9], "pending": [], "recent": users[9:]}
        must_be(await shown(memory), expected, "the rest follows in further calls, and nothing is lost")

    @check("memory.waiting")
    async def test_adding_never_waits_for_a_summary(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(), summarizer)
        async with must_end(5, "adding does not wait for the summary that is being written"):
            for number in range(20):
                await memory.add_turn(turn(number))
        assert summarizer.most_running <= 1, "a conversation must have one summary written at a time"
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
        must_be(summarizer.requests, [], "two turns are pending, and a batch is three")
        must_be((await shown(memory))["pending"], ["u0", "u1"], "the fold waits for its batch")
        await memory.flush()
        must_be((await shown(memory))["summary"], ["u0", "u1"], "a flush does not wait for a batch")

    @check("memory.summary")
    async def test_the_summarizer_gets_the_previous_summary_and_the_turns(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
            await memory.flush()
        fields = [set(request) for request in summarizer.requests]
        must_be(fields, [{"previous_summary", "turns"}] * 2, "two turns left the full zone, one by one")
        first, second = summarizer.requests
        expected = {"previous_summary": "", "turns": [{"user": "u0", "assistant": "fine"}]}
        must_be(first, expected, "there was no summary before the first")
        must_be(covered(second["previous_summary"]), ["u0"], "the first summary comes before the second")

    @check("memory.budget")
    async def test_a_summary_over_its_budget_is_cut_and_keeps_its_closing_tag(
        self, bench: MemoryBench
    ) -> None:
        summarizer = LedgerSummarizer()
        text = f"the subject {'word ' * 2000} the newest fact"
        summarizer.answers = [{"summary": f"<session_summary>{text}</session_summary>"}]
        memory = await bench.memory(config(summary_max_tokens=50, overflow_policy="error"), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        summary = (await memory.get_llm_context())["conversation_memory"]["summary"]
        assert len(summary) // 4 + 1 <= 50, "the summary must be within `summary_max_tokens`"
        assert summary.endswith("</session_summary>"), "a summary that is cut must keep its closing tag"
        assert len(summary) > 150, "a summary must not be cut to less than its budget allows"
        assert "the newest fact" in summary, "a summary that is cut must keep its end"
        assert "the subject" in summary, "a summary that is cut must keep its head"

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
    @check("memory.health", slow={"nonsense": ("text", 7, {"summary": None}, {"summary": ["x"]})})
    async def test_an_invalid_summary_erases_nothing(self, bench: MemoryBench, nonsense: object) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(config(zone=1), summarizer)
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.answers = [nonsense]
        await memory.add_turn(turn(2))
        # A flush need not wait for the next attempt after an answer of a wrong type.
        await until(lambda: len(summarizer.requests) == 3, "nonsense counts as a failure, which is retried")
        await memory.flush()
        expected = {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
        must_be(await shown(memory), expected, "the next attempt is sound")
        must_be(len(summarizer.requests), 3, "one summary, one answer of nonsense, one more attempt")

    @check("memory.health")
    async def test_a_summarizer_that_hangs_is_timed_out(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await bench.memory(config(summarizer_timeout_s=0.05, retry_attempts=50), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.RETRY, "a summarizer that hangs has failed")
        summarizer.release()
        await memory.flush()
        must_be((await shown(memory))["summary"], ["u0"], "a later attempt succeeded")

    @check("memory.health")
    async def test_a_summary_cut_to_nothing_by_the_budget_erases_nothing(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.answers = [{"summary": "u0!"}, {"summary": "<session_summary>a</session_summary>"}]
        # Three characters are a token, so only the tags of a longer summary are left.
        memory = await bench.memory(
            config(zone=1, summary_max_tokens=1, retry_attempts=0, degraded_retry_interval_s=3600.0),
            summarizer,
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        view = await memory.get_llm_context()
        must_be(view["conversation_memory"].get("summary"), "u0!", "the first summary is within its budget")
        await memory.add_turn(turn(2))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the attempt counts as failed")
        summarizer.answers = [{"summary": "u2!"}]
        request = {"previous_summary": "u0!", "turns": [{"user": "u1", "assistant": "fine"}]}
        must_be(summarizer.requests[-1], request, "the second attempt was the last one")
        must_be(len(await memory.turns()), 2, "a turn is kept until a summary covers it")
