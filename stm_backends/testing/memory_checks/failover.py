"""Checks that a replaced server takes no turns with it that its successor has acknowledged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey, Strategy

ZONE: Final = 20
LOST: Final = 2 * ZONE
"""Number of turns of which a memory with this zone drops or summarizes some."""


class Failover(Contract):
    """Checks that a replaced server takes no turns with it that its successor has acknowledged."""

    @pytest.mark.parametrize("strategy", ["rolling_summary", "truncation"])
    @check("memory.failover")
    async def test_no_turn_is_dropped_for_those_that_a_former_server_shows(
        self, bench: MemoryBench, strategy: Strategy
    ) -> None:
        """The turns that a load has shown are dropped, on a server that has others under the same version."""
        fail_over, stored = bench.memories.fail_over, bench.memories.stored
        if fail_over is None or stored is None:
            not_asked("needs `Memories.fail_over` and `Memories.stored`")
        key, settings = bench.key(), config(strategy, zone=ZONE)
        writer = await bench.memory(config("truncation", zone=10 * ZONE), key=key)
        for number in range(1 + LOST):
            await writer.add_turn(turn(number))
        other = await bench.memory(config("truncation", zone=10 * ZONE), key=key)
        bench.history.say(f"the server fails over, and {LOST} turns are lost")
        await fail_over(key, LOST)
        kept = [f"kept-{number}" for number in range(ZONE)]
        for number in kept:
            await other.add_turn(turn(number))
        behind = await bench.memory(settings, LedgerSummarizer(), key=key)
        bench.history.say("the former server still answers loads")
        before = await stored(key)
        await behind.get_llm_context()
        # Before anything is dropped, the first write of this memory reaches the server that took over.
        await until(lambda: _has_changed(stored, key, before), "a write finds out what that server has")
        await behind.flush()
        found = (await shown(await bench.memory(settings, LedgerSummarizer(), key=key)))["recent"]
        must_be(found, [f"u{number}" for number in kept], "the server that took over has acknowledged these")


async def _has_changed(
    stored: Callable[[MemoryKey], Awaitable[object]], key: MemoryKey, before: object
) -> bool:
    return await stored(key) != before
