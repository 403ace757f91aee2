"""Fleeting memory: the scratchpad of one turn."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from stm_backends.tiers import relevance
from stm_backends.tiers.entry import MemoryEntry, MemoryTier, copied, utc_now


class FleetingMemory:
    """Values of one turn in this process; `gc.on_turn_end()` clears them.

    Values are copied on the way in and out. Entries have the importance 0.
    """

    def __init__(self, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock
        self._entries: dict[str, MemoryEntry] = {}

    async def remember(self, key: str, value: Any) -> None:
        """Store a value; it replaces one with the same key."""
        now = self._clock()
        self._entries[key] = MemoryEntry(
            key, copied(value), MemoryTier.FLEETING, created_at=now, last_accessed=now, importance=0.0
        )

    async def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key or value contains the query, the most relevant first."""
        now = self._clock()
        found = [one for one in self._entries.values() if relevance.matches(query, one.key, (), one.content)]
        for one in found:
            self._entries[one.key] = one.accessed(now)
        return sorted(
            (self._entries[one.key].copied() for one in found),
            key=lambda one: one.relevance_at(now),
            reverse=True,
        )

    async def forget(self, key: str) -> None:
        """Remove an entry, if there is one."""
        self._entries.pop(key, None)

    async def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of all entries."""
        return [one.copied() for one in self._entries.values()]

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self._entries)
