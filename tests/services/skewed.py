"""A pod on a host whose clock is wrong, as a program.

`python skewed.py SECONDS URL talk NAME COUNT` adds turns to a conversation, which is summarized on the way.
`python skewed.py SECONDS URL lease NAME TTL` prints whether it could create a record that expires then.
`python skewed.py SECONDS URL flush TIMEOUT` flushes the conversation and prints how many summaries it wrote.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    _right, _off = time.time, float(sys.argv[1])
    # Before anything is imported that asks for the time.
    time.time = lambda: _right() + _off

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers import ABSENT
from stm_backends.drivers.contract import Key, new_version

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(full_zone_turns=2, summary_max_tokens=10_000, total_max_tokens=0),
    summarizer_timeout_s=1.0,
)


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Summarize by listing what the user said; it takes as long as a quick model."""
    await asyncio.sleep(0.02)
    said = [request["previous_summary"], *(turn["user"] for turn in request["turns"])]
    return {"summary": " ".join(filter(None, said))}


async def talk(url: str, name: str, count: int) -> None:
    async with open_backend(url) as backend:
        memory = backend.memory(KEY, CONFIG, summarizer=summarize)
        for number in range(count):
            await memory.get_llm_context()
            await memory.add_turn(ConversationTurn(f"{name}{number}", "Yes.", ts=time.time()))
            await asyncio.sleep(0.02)
        await memory.flush()


async def flush(url: str, timeout: float) -> int:
    async with open_backend(url) as backend:
        memory = backend.memory(KEY, CONFIG, summarizer=summarize)
        await memory.flush(timeout=timeout)
        return memory.stats.summaries


async def take(url: str, name: str, ttl: float) -> bool:
    lease = Key("acme:u1:lease", name)
    async with open_backend(url) as backend:
        return await backend.driver.replace(lease, b"", version=new_version(), expect=ABSENT, ttl=ttl)


if __name__ == "__main__":
    _, _, url, command, *rest = sys.argv
    if command == "talk":
        asyncio.run(talk(url, rest[0], int(rest[1])))
    elif command == "flush":
        print(asyncio.run(flush(url, float(rest[0]))))  # noqa: T201 -- read by the test
    else:
        print(asyncio.run(take(url, rest[0], float(rest[1]))))  # noqa: T201 -- read by the test
