"""Fleeting memory: the scratchpad of one turn."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime
from typing import Any

from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.handed_in import ignore
from stm_backends.tiers import relevance
from stm_backends.tiers.entry import MemoryEntry, MemoryTier, Tier


class FleetingMemory(Tier):
    """Values of one turn in this process; `gc.on_turn_end()` clears them.

    A value may be any object and is kept by reference: it is neither copied nor stored elsewhere. Entries
    have the importance 0.
    """

    def __init__(self, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = guarded_utc_clock(clock, ignore)
        self._entries: dict[str, MemoryEntry] = {}

    async def remember(self, key: str, value: Any) -> None:
        """Store a value, replacing any with the same key; its accesses are carried over."""
        now, known = self._clock(), self._entries.get(key)
        self._entries[key] = MemoryEntry(
            key,
            value,
            MemoryTier.FLEETING,
            created_at=now,
            last_accessed=now,
            access_count=0 if known is None else known.access_count,
            importance=0.0,
        )

    async def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key or value contains the query, the most relevant first."""
        now = self._clock()
        found = [one for one in self._entries.values() if relevance.matches(query, one.key, (), one.content)]
        for one in found:
            self._entries[one.key] = replace(one, **one.access(now))
        return sorted(
            (replace(self._entries[one.key]) for one in found),
            key=lambda one: one.relevance_at(now),
            reverse=True,
        )

    async def forget(self, key: str) -> None:
        """Remove an entry if it exists."""
        self._entries.pop(key, None)

    async def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of all entries; their contents are the objects that were stored."""
        return [replace(one) for one in self._entries.values()]

    def _keys(self) -> Collection[str]:
        return self._entries.keys()
