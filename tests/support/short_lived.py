"""Processes that add a turn and end, each forked; and the summarizer of the workers that they leave work to.

    python -m tests.support.short_lived URL CONVERSATIONS TURNS AT_ONCE

Adds so many turns to so many conversations, each in a process of its own, that many at once. Prints how many
were acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.testing.workbench.summarizers import LedgerSummarizer

CONFIG: Final = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(full_zone_turns=2, total_max_tokens=0),
    fold_batch_turns=3,
    summarizer_timeout_s=2.0,
    transcript=True,
)
summarize: Final = LedgerSummarizer()


def key_of(number: int) -> MemoryKey:
    return MemoryKey(f"tenant{number % 3}", "u", f"s{number}")


async def add(url: str, number: int, turn: int) -> None:
    async with open_backend(url, summaries="worker", close_timeout_s=1) as backend:
        memory = backend.memory(key_of(number), CONFIG)
        await memory.add_turn(ConversationTurn(f"u{turn}", "fine"), turn_id=f"t{turn}")


def forked(url: str, number: int, turn: int) -> int:
    """Add a turn in a process of its own; returns the id of the process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            asyncio.run(add(url, number, turn))
            status = 0
        finally:
            os._exit(status)
    return child


def main(url: str, conversations: int, turns: int, at_once: int) -> None:
    acknowledged, running = 0, list[int]()
    # The turns of a conversation one after another, and other conversations in between.
    for turn in range(turns):
        for first in range(0, conversations, at_once):
            running = [forked(url, one, turn) for one in range(first, min(first + at_once, conversations))]
            for child in running:
                _, status = os.waitpid(child, 0)
                acknowledged += status == 0
    sys.stdout.write(f"{acknowledged}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
