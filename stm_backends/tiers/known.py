"""A process's knowledge of a long-term memory that other processes change, too."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeAlias

from stm_backends.tiers import relevance, stored
from stm_backends.tiers.entry import MemoryEntry
from stm_backends.tiers.stored import Stored

Reading: TypeAlias = dict[str, tuple[MemoryEntry, Stored]]
"""All entries by key, with the properties of their vertices, as read at one time."""


class KnownEntries:
    """The keys of the entries that this process knows of, and the entries that it has seen.

    `reading` has all entries as a task has read them within its `reading_once`.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.seen: dict[str, MemoryEntry] = {}
        self._readings: ContextVar[list[Reading] | None] = ContextVar("stm_readings", default=None)

    def see(self, key: str, properties: Stored | None) -> MemoryEntry | None:
        """Return the entry in the properties of its vertex, unless it is gone or superseded."""
        known = stored.live(properties)
        if known is None:
            self.drop(key)
            return None
        entry = MemoryEntry.from_dict(known)
        self.keys.add(key)
        self.seen[key] = entry.copied()
        return entry

    def drop(self, key: str) -> None:
        """Note that an entry is gone."""
        self.keys.discard(key)
        self.seen.pop(key, None)
        if (reading := self.reading) is not None:
            reading.pop(key, None)

    def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> None:
        """Note that an entry was merged into another."""
        self.drop(loser.key)
        reading = self.reading or {}
        if survivor.key in reading:
            changed = replace(survivor, **relevance.absorbed(vars(survivor), vars(loser)))
            reading[survivor.key] = changed, reading[survivor.key][1]

    def has_all(self, keys: Iterable[str], before: set[str]) -> None:
        """Note which entries exist, except those that other tasks changed since `before`."""
        added, removed = self.keys - before, before - self.keys
        self.keys = ({*keys} | added) - removed
        for key in self.seen.keys() - self.keys:
            del self.seen[key]

    @contextlib.contextmanager
    def reading_once(self) -> Generator[None]:
        """Keep this task's reading of all entries until the end of the block."""
        token = self._readings.set([])
        try:
            yield
        finally:
            self._readings.reset(token)

    @property
    def reading(self) -> Reading | None:
        """The task's reading of all entries, if it keeps one."""
        readings = self._readings.get()
        return readings[-1] if readings else None

    def keep(self, reading: Reading) -> None:
        """Keep a reading of all entries, within `reading_once`."""
        readings = self._readings.get()
        if readings is not None:
            readings.append(reading)
