"""A user stays listed for as long as what `expire` has given a longer life."""

from __future__ import annotations

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.testing import FakeClock

KEY = MemoryKey("acme", "ada", "trip")


async def test_tenant_erasure_finds_what_expire_made_live_longer() -> None:
    clock, day = FakeClock(), 86_400.0
    async with Backend(MemoryDriver(MemoryStore(), clock=clock)) as backend:
        memory = backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation", session_ttl_s=day))
        await memory.add_turn(ConversationTurn("To Zanzibar!", "Booked."))
        await backend.sessions.expire("acme", ttl=30 * day)
        await clock.pass_time(10 * day)
        assert [user async for user in backend.sessions.users("acme")] == ["ada"]
        assert await backend.sessions.erase_tenant("acme") == 1
