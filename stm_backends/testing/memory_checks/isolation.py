"""Checks that conversations share nothing."""

from __future__ import annotations

import asyncio
from typing import Final

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey

ALIKE: Final = (
    ("a", "b", "c"),
    ("a:b", "c", "d"),
    ("a", "b:c", "d"),
    ("a", "b", "c:d"),
    ("a%3Ab", "c", "d"),
    ("A", "b", "c"),
    ("a", "b", "c*"),
    ("a", "b", "{c}"),
    ("a", "b", "\U0001f600"),
    ("a", "b", "e\u0301"),
    ("a", "b", "\u00e9"),
    ("ab", "c", "d"),
    ("a", "bc", "d"),
)
"""Keys that collide if their parts are joined, case-folded or matched carelessly."""


class Isolation(Contract):
    """Checks that conversations share nothing."""

    @check("memory.isolation")
    async def test_conversations_with_keys_that_look_alike_share_nothing(self, bench: MemoryBench) -> None:
        """The parts of a key are joined unescaped, or one memory object serves all conversations."""
        word = bench.key().user_id
        keys = [MemoryKey(f"{word}{tenant}", user, session) for tenant, user, session in ALIKE]
        memories = [await bench.memory(config("truncation"), key=key) for key in keys]
        for number, memory in enumerate(memories):
            await memory.add_turn(turn(number))
        for number, memory in enumerate(memories):
            recent = (await shown(memory))["recent"]
            must_be(recent, [f"u{number}"], f"the key like {ALIKE[number]} is not another key")

    @check("memory.isolation")
    async def test_conversations_at_the_same_time_keep_their_own_summaries(self, bench: MemoryBench) -> None:
        """State of one conversation is kept by the class, the module or the summarizer."""
        memories = [await bench.memory(config(zone=1), LedgerSummarizer()) for _ in range(6)]

        async def converse(number: int) -> None:
            for place in range(5):
                await memories[number].add_turn(turn(f"{number}-{place}"))
                await asyncio.sleep(0)
            await memories[number].flush()

        await asyncio.gather(*(converse(number) for number in range(6)))
        for number, memory in enumerate(memories):
            expected = {
                "summary": [f"u{number}-{place}" for place in range(4)],
                "pending": [],
                "recent": [f"u{number}-4"],
            }
            must_be(await shown(memory), expected, "this is its whole conversation, and no other")
