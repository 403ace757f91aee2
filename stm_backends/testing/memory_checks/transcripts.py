"""Checks that a conversation with a transcript can always be read as a whole, even while turns move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, told, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig

ZONE: Final = 2

PAGE: Final = 64
"""Number of turns stored together once they have left the record."""

ALL: Final = "every turn that was acknowledged is there once, in order"


class Transcripts(Contract):
    """Checks that a conversation with a transcript can always be read as a whole."""

    @check("memory.transcript")
    async def test_every_turn_can_be_read_after_it_has_left_the_record(self, bench: MemoryBench) -> None:
        """Turns are counted wrongly as they leave, or some are not stored before they go."""
        key = bench.key()
        one, two = [
            await bench.memory(_kept(bench, fold_batch_turns=7), LedgerSummarizer(), key=key) for _ in "12"
        ]
        for number in range(30):
            await (one, two)[number % 2].add_turn(turn(number), turn_id=f"t{number}")
            if number % 10 == 9:
                await one.flush()
        for memory in (one, two):
            must_be(await told(memory), list(enumerate(_users(30))), ALL)
        must_be((await shown(two))["summary"], _users(28), "the last turns are in full")

    @check("memory.transcript")
    async def test_turns_of_an_outage_of_the_model_are_summarized_afterwards(
        self, bench: MemoryBench
    ) -> None:
        """A turn that moves without a summary counts as summarized."""
        summarizer = LedgerSummarizer()
        summarizer.fail = 1_000_000
        settings = _kept(bench, retry_attempts=0, recovery_backlog_limit=1, degraded_retry_interval_s=0.5)
        memory = await bench.memory(settings, summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        for number in range(3, 12):
            await memory.add_turn(turn(number))
            await memory.get_llm_context()

        async def moved() -> bool:
            return len(await memory.turns()) < 12

        await until(moved, "turns beyond `recovery_backlog_limit` leave the record", within=10.0)
        must_be(await told(memory), list(enumerate(_users(12))), ALL)
        summarizer.fail = 0

        async def made_up_for() -> bool:
            await memory.flush()
            return len((await shown(memory))["summary"]) >= 12 - ZONE

        await until(made_up_for, "the model is back, and the missed turns are summarized", within=10.0)
        must_be((await shown(memory))["summary"], _users(12 - ZONE), "each turn is summarized once, in order")

    @check("memory.transcript")
    async def test_a_long_tail_moves_while_a_summary_is_being_written(self, bench: MemoryBench) -> None:
        """A slow model makes every read load all turns added meanwhile."""
        model, key = LedgerSummarizer(), bench.key()
        model.hold()
        settings = _kept(bench, fold_max_turns=2, recovery_backlog_limit=1, summarizer_timeout_s=60.0)
        one = await bench.memory(settings, model, key=key)
        two = await bench.memory(settings, LedgerSummarizer(), key=key)
        for number in range(3):
            await one.add_turn(turn(number))
        await until(model.called.is_set, "a summary is begun")
        for number in range(3, 20):
            await (one, two)[number % 2].add_turn(turn(number))

        async def short() -> bool:
            return len(await two.turns()) <= ZONE + 8

        await until(short, "pending turns of more than four calls leave the record")
        must_be(await told(two), list(enumerate(_users(20))), ALL)
        must_be((await shown(two))["summary"], [], "the first summary is still being written")
        model.release()
        for memory in (one, two):
            await memory.flush()
        must_be((await shown(two))["summary"], _users(20 - ZONE), "each turn is summarized once, in order")

    @pytest.mark.parametrize(("operation", "kind"), [("append", "page"), ("replace", "memory")])
    @check("memory.transcript")
    async def test_a_process_killed_within_a_fold_takes_no_turn_with_it(
        self, bench: MemoryBench, operation: str, kind: str
    ) -> None:
        """The record drops its turns before their page has them."""
        key, model = bench.key(), LedgerSummarizer()
        model.hold()
        memory = await bench.memory(_kept(bench), model, key=key)
        for number in range(5):
            await memory.add_turn(turn(number), turn_id=f"t{number}")
        await until(model.called.is_set, "a summary is begun")
        killed = asyncio.Event()

        async def kill(send: Callable[[], Awaitable[Any]]) -> Any:
            killed.set()
            await bench.kill(memory)
            return await send()

        bench.around(memory, operation, kind, kill)
        model.release()
        await until(killed.is_set, f"the fold makes an `{operation}` of its {kind}")
        other = await bench.memory(_kept(bench), LedgerSummarizer(), key=key)
        must_be(await told(other), list(enumerate(_users(5))), ALL)

    @check("memory.transcript")
    async def test_a_copy_that_comes_late_does_not_undo_a_change(self, bench: MemoryBench) -> None:
        """The last copy of a turn is shown, even if its revision is older."""
        copy_first, key = bench.memories.copy_first, bench.key()
        if copy_first is None:
            not_asked("needs `Memories.copy_first`")
        memory = await bench.memory(_kept(bench), LedgerSummarizer(), key=key)
        for number in range(5):
            await memory.add_turn(turn(number), turn_id=f"t{number}")
        await memory.flush()
        bench.history.say("a later version changes the first turn, and a slow process copies it as it was")
        await copy_first(key, "t0", turn("changed"), 1)
        await copy_first(key, "t0", turn(0), 0)
        other = await bench.memory(_kept(bench), LedgerSummarizer(), key=key)
        expected = list(enumerate(["uchanged", *_users(5)[1:]]))
        must_be(await told(other), expected, "the highest revision counts")

    @check("memory.transcript", slow=True)
    async def test_rewriting_a_full_page_keeps_what_comes_meanwhile(self, bench: MemoryBench) -> None:
        """A page is rewritten without the condition that it is unchanged."""
        copy_first, key = bench.memories.copy_first, bench.key()
        if copy_first is None:
            not_asked("needs `Memories.copy_first`")
        settings = _kept(bench, fold_batch_turns=PAGE, fold_max_turns=PAGE)
        memory = await bench.memory(settings, LedgerSummarizer(), key=key)
        rewritten = asyncio.Event()

        async def change(send: Callable[[], Awaitable[Any]]) -> Any:
            bench.history.say("a later version changes the first turn as its page is rewritten")
            await copy_first(key, "t0", turn("changed"), 1)
            answer = await send()
            rewritten.set()
            return answer

        bench.around(memory, "replace", "page", change)
        for number in range(PAGE + ZONE):
            await memory.add_turn(turn(number), turn_id=f"t{number}")
        await until(rewritten.is_set, "a page that is full is rewritten as one value", within=10.0)
        other = await bench.memory(settings, LedgerSummarizer(), key=key)
        expected = list(enumerate(["uchanged", *_users(PAGE + ZONE)[1:]]))
        must_be(await told(other), expected, "turns added to the page are kept")


def _kept(bench: MemoryBench, **settings: Any) -> ShortTermMemoryConfig:
    bench.needs("transcript")
    budget: dict[str, Any] = {"total_max_tokens": 0, "summary_max_tokens": 100_000}
    return config(zone=ZONE, transcript=True, **budget, **settings)


def _users(count: int) -> list[str]:
    return [f"u{number}" for number in range(count)]
