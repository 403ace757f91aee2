"""Surviving an outage: entries that long-term memory holds, and reads that cannot be counted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.errors import ConfigurationError, Corrupt, Denied, LimitReached, TooLarge
from stm_backends.memory.tasks import LoopLock
from stm_backends.telemetry.observer import Observer
from stm_backends.tiers.entry import MemoryEntry, MemoryTier

logger = logging.getLogger("stm_backends")

REFUSALS: Final = (ConfigurationError, Corrupt, LimitReached, TooLarge)
"""Errors about one entry; other entries may still be stored."""


def is_outage(error: Exception) -> bool:
    """Return whether an entry may be held because a retry may help."""
    return not isinstance(error, (*REFUSALS, Denied))


def report_uncounted(observer: Observer, tier: MemoryTier, count: int, error: Exception) -> None:
    """Report that accesses were not counted; the read still succeeds."""
    logger.warning(
        "accesses to entries of memory that were not counted (%s): %d", type(error).__name__, count
    )
    observer.memories("uncounted", tier.value, count)


class HeldEntries:
    """Entries by key, held until `store` has stored them."""

    def __init__(self, store: Callable[[MemoryEntry], Awaitable[None]]) -> None:
        self._store = store
        self._reconciling = LoopLock()
        self._refused: dict[str, MemoryEntry] = {}
        self.entries: dict[str, MemoryEntry] = {}

    def hold(self, entry: MemoryEntry, error: Exception) -> None:
        """Hold an entry after an error of the graph."""
        self.entries[entry.key] = entry
        logger.warning(
            "entries that long-term memory holds in this process, because the graph failed (%s): %d",
            type(error).__name__,
            len(self.entries),
        )

    def replaced_by(self, stored: MemoryEntry) -> None:
        """Release an entry once a later one with its key is stored."""
        held = self.entries.get(stored.key)
        if held is not None and held.created_at <= stored.created_at:
            del self.entries[stored.key]

    async def forget(self, key: str, remove: Callable[[], Awaitable[object]]) -> None:
        """Release an entry, and remove it after a running reconciliation that may store it."""
        self.entries.pop(key, None)
        async with self._reconciling.here():
            await remove()

    async def reconcile(self, *, again: bool = False) -> Exception | None:
        """Store the held entries and return the first refusal. Raises any other error of the graph.

        A refused entry stays held, and is tried again only with `again`.
        """
        refused: Exception | None = None
        if again:
            self._refused.clear()
        if all(self._refused.get(key) is entry for key, entry in self.entries.items()):
            return refused
        async with self._reconciling.here():
            for key, entry in list(self.entries.items()):
                if self.entries.get(key) is not entry or self._refused.get(key) is entry:
                    continue
                try:
                    await self._store(entry)
                except REFUSALS as error:
                    refused = refused or error
                    self._refused[key] = entry
                    logger.warning(
                        "long-term memory refuses an entry that was held in an outage (%s); it stays held",
                        type(error).__name__,
                    )
                    continue
                if self.entries.get(key) is entry:
                    del self.entries[key]
                    logger.warning("an entry of long-term memory that was held in an outage is stored")
        return refused
