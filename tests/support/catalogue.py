"""Waiting for what the background writes to the catalogue, and to the index of words."""

from __future__ import annotations

import asyncio
from typing import Any

from stm_backends import Backend, MemoryKey


async def touched(backend: Backend, key: MemoryKey) -> None:
    """Wait until a conversation has a card."""
    async with asyncio.timeout(30):
        while True:
            page = await backend.conversations.list(key.tenant_id, key.user_id)
            if any(card.key == key for card in page.cards):
                return
            await asyncio.sleep(0.01)


async def indexed(backend: Backend) -> None:
    """Wait until the pages that are full, and what searches have read, are indexed."""
    internals: Any = backend
    await internals._searching._background.close(timeout=60)  # noqa: SLF001 -- no operation waits for it
