"""Checks of callbacks, and of callbacks that fail."""

from __future__ import annotations

import asyncio
from typing import Any

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.types import ConversationTurn


class Callbacks(Contract):
    """Checks of callbacks, and of callbacks that fail."""

    @check("memory.callbacks")
    async def test_a_callback_that_raises_or_is_not_awaitable_does_no_harm(self, bench: MemoryBench) -> None:
        def not_async(added: ConversationTurn) -> Any:
            return added.user_message

        async def raises(old: str, new: str) -> None:
            raise RuntimeError("a user's mistake")

        memory = await bench.memory(
            config(zone=1, on_turn_added=not_async, on_summary_updated=raises), LedgerSummarizer()
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        must_be(
            (await shown(memory))["summary"], ["u0", "u1"], "a failing callback does not stop the summary"
        )

    @check("memory.callbacks")
    async def test_a_slow_callback_does_not_delay_adding(self, bench: MemoryBench) -> None:
        go = asyncio.Event()
        done: list[str] = []

        async def slow(added: ConversationTurn) -> None:
            await go.wait()
            done.append(added.user_message)

        memory = await bench.memory(config("truncation", on_turn_added=slow))
        async with must_end(2, "adding does not wait for a callback"):
            await memory.add_turn(turn(1))
            await memory.add_turn(turn(2))
        must_be(done, [], "the callback still waits, and adding did not wait for it")
        go.set()
        await until(lambda: sorted(done) == ["u1", "u2"], "both turns are reported in the end")

    @check("memory.callbacks")
    async def test_a_new_summary_is_reported_with_the_previous_one(self, bench: MemoryBench) -> None:
        updates: list[tuple[list[str], list[str]]] = []

        async def note(old: str, new: str) -> None:
            updates.append((covered(old), covered(new)))

        memory = await bench.memory(config(zone=1, on_summary_updated=note), LedgerSummarizer())
        for number in range(3):
            await memory.add_turn(turn(number))
            await memory.flush()
        await until(lambda: len(updates) == 2, "both summaries are reported")
        expected = [(list[str](), ["u0"]), (["u0"], ["u0", "u1"])]
        must_be(updates, expected, "a new summary is reported with the previous one")
