"""The heads of a user's memories: their ranking data in one record, without their contents.

```
body   {"heads": {vertex id: head, ...}}
entry  {"heads": {vertex id: head, ...}, "gone": [vertex id, ...]}
```

A head is `[importance, access_count, created_at, last_accessed, size]`, with times in seconds since 1970 and
the size in characters, or `null` for a vertex that is not a memory or is superseded. Heads are hints: the
listing of vertices decides which exist, and each vertex decides what it contains. So nothing fails without
heads. They may be written after the vertex, and only by some processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

from stm_backends.drivers.contract import Driver, Record
from stm_backends.errors import Corrupt, StorageError
from stm_backends.memory.tasks import LoopLock
from stm_backends.records import keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.tiers.relevance import EntryHead

logger = logging.getLogger("stm_backends")

AT_ONCE: Final = 1000
"""Maximum number of heads in one entry."""


Known: TypeAlias = dict[str, tuple[str, EntryHead | None]]
"""Vertex ids and heads, by the name of the vertex's record."""


class Heads:
    """The heads of one owner's graph, kept between reads while their record has the same version."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, owner: tuple[str, str]) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._owner = owner
        self._at = keys.heads_key(*owner)
        self._known: Known = {}
        self._version, self._length = "", 0
        self._waiting: dict[str, EntryHead | None] = {}
        self._gone: set[str] = set()
        self._writing = LoopLock()

    async def read(self) -> Known:
        """Return the stored heads, in one load. If they cannot be read, logs this and returns none."""
        version, tail = "", ()
        try:
            record = await self._driver.load(self._at)
            if record is not None:
                version, tail = record.version, record.tail
            if version != self._version or len(tail) < self._length:
                self._known, self._length = self._bodied(record), 0
            for entry in tail[self._length :]:
                self._apply(self._known, self._codec.open("heads", entry))
        except Corrupt as error:
            logger.warning("could not read the ranks of memories; loading each memory instead: %s", error)
            self._known, version, tail = {}, "", ()
        self._version, self._length = version, len(tail)
        return {**self._known}

    def had(self, vertex_id: str) -> EntryHead | None:
        """Return the head that a vertex had when the heads were last read."""
        return self._known.get(self._name(vertex_id), ("", None))[1]

    async def note(self, heads: Mapping[str, EntryHead | None], gone: Iterable[str] = ()) -> None:
        """Store heads by vertex id. A failure is only logged, and the next call stores them.

        Concurrent calls share one append.
        """
        self._waiting.update(heads)
        self._gone.update(gone)
        async with self._writing.here():
            noted, self._waiting = self._waiting, {}
            removed, self._gone = sorted(self._gone), set()
            waiting = iter(noted.items())
            try:
                while (some := dict(islice(waiting, AT_ONCE))) or removed:
                    await self._append(self._codec.seal("heads", {"heads": some, "gone": removed}))
                    removed = []
            except BaseException as error:
                # Some belong to other callers. A late `null` hides a vertex; without it, that vertex is read.
                kept = {one: head for one, head in noted.items() if head is not None}
                self._waiting = {**kept, **self._waiting}
                if not isinstance(error, StorageError):
                    raise
                logger.warning("could not store the ranks of memories; a later call will: %s", error)

    async def _append(self, entry: bytes) -> None:
        async with self._directory.listed(self._owner) as listing:
            appended = await ledger.append_and_fold(self._driver, self._at, entry, self._folded)
            listing.created = appended.created
        if appended.created and not await self._has_vertices():
            # The user was erased since the vertices were written or read, so none of their ids may stay.
            await ledger.erase(self._driver, self._at)
            await self._directory.forget_if_unused(*self._owner)

    async def _has_vertices(self) -> bool:
        async for _ in operations.names_of(self._driver, self._at.scope, keys.VERTICES):
            return True
        return False

    def _name(self, vertex_id: str) -> str:
        return keys.vertex_key(*self._owner, vertex_id).name

    def _bodied(self, record: Record | None) -> Known:
        known: Known = {}
        if record is not None and record.body:
            self._apply(known, self._codec.open("heads", record.body))
        return known

    def _apply(self, known: Known, content: Mapping[str, Any]) -> None:
        try:
            for vertex_id in content.get("gone", ()):
                known.pop(self._name(vertex_id), None)
            for vertex_id, head in content.get("heads", {}).items():
                known[self._name(vertex_id)] = vertex_id, None if head is None else _head(head)
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise Corrupt("the stored heads of a graph have a field of another type") from None

    def _folded(self, record: Record) -> bytes:
        known = self._bodied(record)
        for entry in record.tail:
            self._apply(known, self._codec.open("heads", entry))
        return self._codec.seal("heads", {"heads": dict(known.values())})


def _head(numbers: list[Any]) -> EntryHead:
    """Return a stored head; a later version of this library may add numbers at the end."""
    importance, access_count, created_at, last_accessed, size, *_ = numbers
    return EntryHead(float(importance), int(access_count), float(created_at), float(last_accessed), int(size))
