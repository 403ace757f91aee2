# pip install . && python examples/callbacks.py
"""Receive a callback for each turn and summary, and when a summarizer fails and recovers."""

import asyncio

from stm_backends import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)

failures = [RuntimeError("the model is overloaded")]


async def summarize(request: dict) -> dict:
    """Fail once, then summarize by listing."""
    if failures:
        raise failures.pop()
    return {"summary": ", ".join(turn["user"] for turn in request["turns"])}


async def on_turn_added(turn: ConversationTurn) -> None:
    print("turn:", turn.user_message)


async def on_summary_updated(old: str, new: str) -> None:
    print(f"summary: {old!r} -> {new!r}")


async def on_health_changed(old: MemoryHealth, new: MemoryHealth) -> None:
    print(f"health: {old.value} -> {new.value}")


CONFIG = ShortTermMemoryConfig(
    strategy="rolling_summary",
    budget=MemoryBudget(full_zone_turns=1),
    retry_backoff_base_s=0.1,
    on_turn_added=on_turn_added,
    on_summary_updated=on_summary_updated,
    on_health_changed=on_health_changed,
    transcript=True,
)


async def main() -> None:
    async with open_backend("sqlite:///callbacks.db") as backend:
        memory = backend.memory(MemoryKey("acme", "u123", "chat_001"), CONFIG, summarizer=summarize)
        for text in ("one", "two"):
            await memory.add_turn(ConversationTurn(text, "Fine."))
        await memory.flush()


asyncio.run(main())

# turn: one
# turn: two
# health: healthy -> retry
# summary: '' -> 'one'
# health: retry -> healthy
