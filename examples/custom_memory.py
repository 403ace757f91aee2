# pip install . && python examples/custom_memory.py
"""Write your own memory: requests that begin with `remember` are always shown.

It is built on a memory and the state store of a backend. An agent uses it like any other memory.
"""

import asyncio

from stm_backends import (
    Backend,
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemory,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.agents import apply_memory


class PinningMemory:
    """The last turns, and every request that began with `remember`."""

    def __init__(self, backend: Backend, key: MemoryKey, config: ShortTermMemoryConfig) -> None:
        self._turns = backend.memory(key, config)
        self._store = backend.state_store
        self._pins = f"kv:v1:{key.composite()}:pins"  # a key of this user's, so it is erased with them

    @property
    def health(self) -> MemoryHealth:
        return self._turns.health

    async def add_turn(self, turn: ConversationTurn) -> None:
        await self._turns.add_turn(turn)
        saved = not turn.user_message.startswith("remember")
        while not saved:  # Save only if no other process saved in between.
            state, version = await self._store.load_versioned(self._pins)
            pins = dict.fromkeys([*(state or {"pins": []})["pins"], turn.user_message])
            saved = await self._store.save_if(self._pins, {"pins": list(pins)}, expect=version)

    async def get_llm_context(self) -> dict:
        context = await self._turns.get_llm_context()
        state = await self._store.load_memory_state(self._pins)
        return {"conversation_memory": {**context["conversation_memory"], **(state or {})}}

    def estimate_tokens(self) -> int:
        return self._turns.estimate_tokens()

    async def flush(self) -> None:
        await self._turns.flush()


async def main() -> None:
    config = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=1))
    async with open_backend("sqlite:///custom_memory.db") as backend:
        memory: ShortTermMemory = PinningMemory(backend, MemoryKey("acme", "u123", "chat_001"), config)
        for text in ("remember: no nuts", "hello", "a cake, please"):
            await memory.add_turn(ConversationTurn(text, "Fine."))
        context = await apply_memory({"status": "open"}, memory)
        print(context["status"], context["conversation_memory"])


asyncio.run(main())

# open {'recent_turns': [{'user': 'a cake, please', 'assistant': 'Fine.'}], 'pins': ['remember: no nuts']}
