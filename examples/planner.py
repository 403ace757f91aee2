# pip install . penguiflow==3.11.2 && python examples/planner.py
"""Run PenguiFlow's planner on two pods that share one conversation. See docs/how-to/penguiflow.md."""

import asyncio
import json

from stm_backends import ExtractiveSummarizer, MemoryKey, ShortTermMemoryConfig, open_backend

try:
    from penguiflow.planner import ReactPlanner
except ModuleNotFoundError:
    raise SystemExit("this example needs PenguiFlow: pip install . penguiflow==3.11.2") from None

KEY = MemoryKey("acme", "u123", "chat_001")
CONFIG = ShortTermMemoryConfig(strategy="rolling_summary", transcript=True)


class Model:
    """Stand in for a model, to run without one: leave out `llm_client=` and name yours, `llm="..."`."""

    async def complete(self, *, messages: list[dict], **_: object) -> str:
        memory = [one["content"] for one in messages if "conversation_memory" in one["content"]]
        answer = "Teal, you said." if "teal" in "".join(memory) else "I will remember that."
        return json.dumps({"next_node": "final_response", "args": {"answer": answer}})


async def pod(query: str) -> None:
    """Answer as a separate process does: with its own backend and planner."""
    async with open_backend("sqlite:///planner.db") as backend:
        planner = ReactPlanner(
            llm_client=Model(),
            catalog=[],
            short_term_memory=backend.router(CONFIG, summarizer=ExtractiveSummarizer()),
            state_store=backend.state_store,
        )
        result = await planner.run(query, memory_key=KEY)
        print(result.payload["raw_answer"])


asyncio.run(pod("My favourite colour is teal."))
asyncio.run(pod("What is my favourite colour?"))

# I will remember that.
# Teal, you said.
