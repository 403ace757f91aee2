# pip install . && python examples/truncation.py
"""Keep only the last turns, without a summarizer. The key of a conversation comes from the request."""

import asyncio

from stm_backends import MemoryBudget, MemoryIsolation, ShortTermMemoryConfig, open_backend
from stm_backends.agents import conversation, resolve_memory_key

CONFIG = ShortTermMemoryConfig(
    strategy="truncation",
    budget=MemoryBudget(full_zone_turns=2),
    isolation=MemoryIsolation("auth.tenant", "auth.user", "chat"),
    transcript=True,
)


async def main() -> None:
    ann = {"auth": {"tenant": "acme", "user": "ann"}, "chat": "1"}
    bob = {"auth": {"tenant": "acme", "user": "bob"}, "chat": "1"}
    lost = {"auth": {"tenant": "acme", "user": "ann"}}  # no chat id: no memory is opened
    requests = [(ann, "one"), (bob, "hello"), (ann, "two"), (ann, "three"), (lost, "?"), (ann, "four")]

    async with open_backend("sqlite:///truncation.db") as backend:
        for request, query in requests:
            key = resolve_memory_key(request, CONFIG.isolation)
            async with conversation(backend, key, CONFIG) as turn:
                memory = turn.context.get("conversation_memory", {"recent_turns": []})
                known = [one["user"] for one in memory["recent_turns"]]
                print(f"{key.user_id if key else 'no memory'}: {query}; known: {known}")
                turn.record(query, "Fine.")


asyncio.run(main())

# ann: one; known: []
# bob: hello; known: []
# ann: two; known: ['one']
# ann: three; known: ['one', 'two']
# no memory: ?; known: []
# ann: four; known: ['two', 'three']
