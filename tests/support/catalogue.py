"""Waiting for what the background writes to the catalogue."""

from __future__ import annotations

import asyncio

from stm_backends import Backend, MemoryKey


async def touched(backend: Backend, key: MemoryKey) -> None:
    """Wait until a conversation has a card."""
    async with asyncio.timeout(30):
        while True:
            page = await backend.conversations.list(key.tenant_id, key.user_id)
            if any(card.key == key for card in page.cards):
                return
            await asyncio.sleep(0.01)
