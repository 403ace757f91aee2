"""What a service does for one tenant, to see whether a user with few permissions may do it."""

from __future__ import annotations

from stm_backends import (
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.backend import Backend

SMALL = 20_000
"""`max_entry_bytes` of the backends: larger values are in parts."""


async def serve(backend: Backend, tenant: str) -> None:
    """Use everything that belongs to a tenant, and erase it again."""
    key = MemoryKey(tenant, "u1", "chat")
    config = ShortTermMemoryConfig(
        "rolling_summary", MemoryBudget(full_zone_turns=1, total_max_tokens=0), session_ttl_s=600
    )
    memory = backend.memory(key, config, summarizer=ExtractiveSummarizer())
    texts = ("Hello", "x" * 5_000, "y" * 2 * SMALL, "Goodbye")
    for text in texts:
        await memory.add_turn(ConversationTurn(text, "Yes"))
    await memory.flush()
    assert (await memory.turns())[-1].user_message == "Goodbye"
    log = backend.item_log(key, "langchain")
    await log.add([{"type": "human"}])
    assert await log.pop() == {"type": "human"}
    store = backend.state_store
    for state in ({"a": 1}, {"a": "z" * 2 * SMALL}):
        await store.save_memory_state(key.composite(), state)
        assert await store.load_memory_state(key.composite()) == state
    shared = backend.tenant_state(tenant)
    for state in ({"a": b"1"}, {"a": b"z" * 2 * SMALL}):
        await shared.save_memory_state("app", state)
        assert await shared.load_memory_state("app") == state
    assert [name async for name in shared.names("a")] == ["app"]
    assert [user async for user in backend.sessions.users(tenant)] == ["u1"]
    assert [one async for one in backend.sessions.list(tenant, "u1")] == [key]
    document = await backend.sessions.export(key)
    await backend.sessions.import_(document, on_conflict="merge")
    await backend.sessions.import_(document, on_conflict="replace")
    assert await backend.sessions.erase_tenant(tenant) > 0
    assert await shared.load_memory_state("app") is None
    assert [user async for user in backend.sessions.users(tenant)] == []
