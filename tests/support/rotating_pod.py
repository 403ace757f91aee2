"""A pod that adds turns and items of a log until its standard input ends: `python -m ... URL KEYS NAME`.

It writes one line for each acknowledged addition, `SESSION TAG`. The name makes its tags unique.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from stm_backends import (
    Backend,
    ConversationTurn,
    MemoryBudget,
    MemoryKey,
    OutcomeUnknown,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    Unavailable,
    open_backend,
)
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.testing.workbench.summarizers import LedgerSummarizer

SESSIONS: Final = ("one", "two", "three")
LOG: Final = "log"
LOG_KEY: Final = MemoryKey("acme", "ada", LOG)

CONFIG: Final = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(full_zone_turns=3, summary_max_tokens=1_000_000, total_max_tokens=0),
    summarizer_timeout_s=2.0,
)


def memory_of(backend: Backend, session: str) -> DistributedShortTermMemory:
    """Return a memory whose summary lists the turns that it covers."""
    return backend.memory(MemoryKey("acme", "ada", session), CONFIG, summarizer=LedgerSummarizer())


async def _settled(write: Callable[[], Awaitable[object]]) -> None:
    """Write until it is acknowledged; a turn has an id, so that a retry adds it once."""
    while True:
        try:
            await write()
        except (Unavailable, OutcomeUnknown):
            await asyncio.sleep(0.05)
        else:
            return


def _acknowledge(session: str, tag: str) -> None:
    sys.stdout.write(f"{session} {tag}\n")
    sys.stdout.flush()


async def main(url: str, keys: str, name: str) -> None:
    """Add until standard input ends."""
    logging.getLogger("stm_backends").setLevel(logging.ERROR)
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    async with open_backend(url, sealing=Sealing(StaticKeys.from_file(Path(keys)))) as backend:
        memories = {session: memory_of(backend, session) for session in SESSIONS}
        log = backend.item_log(LOG_KEY, "langchain")
        for number in itertools.count():
            if ended.done():
                return
            tag = f"{name}.{number}"
            for session, memory in memories.items():
                turn = ConversationTurn(tag, "noted")
                await _settled(
                    lambda memory=memory, turn=turn: memory.add_turn(turn, turn_id=turn.user_message)
                )
                _acknowledge(session, tag)
                await _settled(memory.get_llm_context)
            if number % 5 == 0:
                # Not retried: an item has no id, so another attempt might add it twice.
                await log.add([{"tag": tag}])
                _acknowledge(LOG, tag)
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
