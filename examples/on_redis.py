# pip install ".[redis]" && python examples/on_redis.py
"""Share a conversation between two pods in Redis, at `REDIS_URL` or redis://localhost:6379/0."""

import asyncio
import os

from stm_backends import (
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    MissingExtra,
    ShortTermMemoryConfig,
    Unavailable,
    open_backend,
)

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
KEY = MemoryKey("acme", "u123", "redis-example")
CONFIG = ShortTermMemoryConfig(
    "rolling_summary", MemoryBudget(full_zone_turns=1), transcript=True, transcript_ttl_s=60
)


async def main():
    # Two pods, as on two machines: they share nothing but the server.
    async with open_backend(URL) as one, open_backend(URL) as two:
        here, there = (pod.memory(KEY, CONFIG, summarizer=ExtractiveSummarizer()) for pod in (one, two))
        await here.add_turn(ConversationTurn("A table for two at Sino, please.", "Booked: Sino, 11:30."))
        await there.add_turn(ConversationTurn("Make it noon.", "Done: Sino, 12:00."))
        await here.flush()  # wait for the summary, whichever pod writes it
        memory = (await there.get_llm_context())["conversation_memory"]
        print("in the summary:", "Sino, 11:30" in memory["summary"])
        print("in full:", [turn["user"] for turn in memory["recent_turns"]])
        await one.sessions.erase(KEY)


try:
    asyncio.run(main())
except MissingExtra:
    raise SystemExit('this example needs the Redis client: pip install ".[redis]"') from None
except Unavailable:
    print("no Redis answers: start one with `redis-server`, or name yours in REDIS_URL")

# in the summary: True
# in full: ['Make it noon.']
