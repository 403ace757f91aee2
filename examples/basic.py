# pip install . && python examples/basic.py
"""Give an agent a memory. Run it again, or in several terminals at once: the conversation continues."""

import asyncio

from stm_backends import (
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.agents import ToolStep, conversation, render_memory_message

KEY = MemoryKey("acme", "u123", "chat_001")
CONFIG = ShortTermMemoryConfig(
    strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=2), transcript=True
)
SUMMARIZER = ExtractiveSummarizer()  # needs no model; yours may ask one


async def agent(query: str, context: dict) -> str:
    """Stand in for your agent, which would put the context into its prompt."""
    return f"({len(context['conversation_memory']['recent_turns'])} recent turns known) Done: {query}."


async def main() -> None:
    async with open_backend("sqlite:///basic.db") as backend:
        for query in ("a table for two", "make it three", "in the garden"):
            async with conversation(backend, KEY, CONFIG, summarizer=SUMMARIZER) as turn:
                answer = await agent(query, turn.context)
                turn.record(query, answer, tools=[ToolStep("book", {"status": "ok"})])
                print(answer)

        # Summaries are written in the background. A service need not wait for them.
        await backend.memory(KEY, CONFIG, summarizer=SUMMARIZER).flush()
        async with conversation(backend, KEY, CONFIG, summarizer=SUMMARIZER) as turn:
            memory = turn.context["conversation_memory"]
            print("recent:", [one["user"] for one in memory["recent_turns"]])
            print("summarized:", "a table for two" in memory["summary"])
            print("for the prompt:", render_memory_message(turn.context).splitlines()[0])


asyncio.run(main())

# (0 recent turns known) Done: a table for two.
# (1 recent turns known) Done: make it three.
# (2 recent turns known) Done: in the garden.
# recent: ['make it three', 'in the garden']
# summarized: True
# for the prompt: <read_only_conversation_memory>
