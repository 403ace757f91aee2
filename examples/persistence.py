# pip install . && python examples/persistence.py
"""Save a memory of this process in a store. Two processes that save at once lose nothing."""

import asyncio

from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    ShortTermMemoryConfig,
    open_backend,
)

CONFIG = ShortTermMemoryConfig(strategy="truncation")
KEY = "acme:u123:chat_001"


async def main() -> None:
    async with open_backend("sqlite:///persistence.db") as backend:
        store = backend.state_store  # or any object with save_memory_state and load_memory_state

        # Two processes have the conversation open, and each adds a turn.
        one, two = (DefaultShortTermMemory(config=CONFIG) for _ in range(2))
        for memory, text in ((one, "from one"), (two, "from two")):
            await memory.hydrate(store, KEY)
            await memory.add_turn(ConversationTurn(text, "Noted."))
        await one.persist(store, KEY)
        await two.persist(store, KEY)

        later = DefaultShortTermMemory(config=CONFIG)
        await later.hydrate(store, KEY)
        print([turn.user_message for turn in await later.turns()])

        # The state is a JSON object; you may save it anywhere.
        print(sorted(later.to_dict()))


asyncio.run(main())

# ['from one', 'from two']
# ['backlog', 'config_snapshot', 'health', 'pending', 'stm', 'summary', 'turns', 'version']
