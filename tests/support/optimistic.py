"""A driver that reads a record, decides, and writes it if nothing has changed since: right, and small.

Its datastore is a server of cells, as a key-value store is. The mutants in `tests/mutants/stepping.py` are
variations of it. It has what the checks ask that pause it; sizes, for example, it does not limit.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    DEFAULT_DEADLINE_S,
    KEEP,
    AbsentType,
    AnyType,
    KeepType,
    Key,
    Page,
    Record,
)
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing import Datastore
from stm_backends.testing.workbench.faulty import FaultyDriver, FaultyStore
from tests.support.networked import DictionaryServer, NetworkedDriver, networked_datastore


class Cell(NamedTuple):
    """What is stored under a key, and what a write may be compared with.

    `revision` is another one after each write of any key. `born` is the revision at which the record began.
    `writes` counts those since the key was deleted, and `life` those since a record that had expired was
    replaced by another.
    """

    record: Record
    expires: float | None
    revision: int
    born: int
    writes: int
    life: int

    @property
    def length(self) -> int:
        return len(self.record.tail)

    @property
    def version(self) -> str:
        return self.record.version

    def is_alive(self, now: float) -> bool:
        return self.expires is None or self.expires > now


Change: TypeAlias = tuple[Record | None, float | None]
"""What is to be stored, `None` to delete it, and when it expires."""

Decision: TypeAlias = Callable[[Cell | None, float], tuple[Any, Change | None]]
"""Returns the answer of an operation, and what it changes, for what is there at a time."""


class Cells(FaultyDriver):
    """The server: it reads a cell, and writes one on a condition."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__(store)
        self._cells: dict[Key, Cell] = {}
        self._lives: dict[Key, int] = {}
        self._locks: dict[Key, float] = {}
        self._revisions = itertools.count(1)

    async def read(self, key: Key) -> Cell | None:
        return self._cells.get(key)

    async def write(
        self, key: Key, change: Change, compared: Sequence[str], since: Sequence[object] | None, *, anew: bool
    ) -> bool:
        """Change a cell of which nothing that is `compared` has changed `since` it was read."""
        found, (record, expires) = self._cells.get(key), change
        if seen(found, compared) != since:
            return False
        if record is None:
            del self._cells[key]
            return True
        revision = next(self._revisions)
        self._lives[key] = 1 if found and anew else self._lives.get(key, 0) + 1
        self._cells[key] = Cell(
            record,
            expires,
            revision,
            revision if found is None or anew else found.born,
            found.writes + 1 if found else 1,
            self._lives[key],
        )
        return True

    async def lock(self, key: Key, seconds: float) -> bool:
        """Lock a key for a while, unless it is locked."""
        if self._locks.get(key, 0.0) > time.monotonic():
            return False
        self._locks[key] = time.monotonic() + seconds
        return True

    async def unlock(self, key: Key) -> None:
        self._locks.pop(key, None)

    async def cells(self, scope: str) -> list[tuple[str, Cell]]:
        return [(key.name, cell) for key, cell in self._cells.items() if key.scope == scope]


def seen(cell: Cell | None, compared: Sequence[str]) -> tuple[object, ...] | None:
    return cell and tuple(getattr(cell, name) for name in compared)


class OptimisticDriver(NetworkedDriver):
    """The five operations as a read, a decision and a conditional write, again if the condition fails."""

    compared: ClassVar[tuple[str, ...]] = ("revision",)

    def __init__(self, address: str) -> None:
        super().__init__(address)
        # Many writers of one record take turns.
        self.traits = replace(self.traits, deadline=DEFAULT_DEADLINE_S)

    def start_over(self) -> None:
        super().start_over()
        # The writers of one driver queue for a record, instead of refusing each other at the server.
        self._queues: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def load(self, key: Key) -> Record | None:
        cell = await self.ask("load", "read", key)
        return cell.record if cell and cell.is_alive(time.time()) else None

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        def decide(cell: Cell | None, now: float) -> tuple[int, Change]:
            old = cell.record if cell else Record(initial_version, None, ())
            new = Record(old.version, old.body, (*old.tail, entry))
            return len(new.tail), (new, None if ttl is None else now + ttl)

        return await self.change("append", key, decide)

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        going = drop or len(rewrite)

        def decide(cell: Cell | None, now: float) -> tuple[bool, Change | None]:
            if cell and cell.version == version:
                return True, None
            tail: tuple[bytes, ...] = ()
            if isinstance(expect, str):
                if cell is None or cell.version != expect or going > cell.length:
                    return False, None
                tail = (*rewrite, *cell.record.tail[going:])
            elif expect is ABSENT and cell:
                return False, None
            kept = cell.expires if cell else None
            expires = kept if ttl is KEEP else None if ttl is None else now + ttl
            return True, (Record(version, body, tail), expires)

        return await self.change("replace", key, decide)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        def decide(cell: Cell | None, now: float) -> tuple[bool, Change | None]:
            del now
            is_meant = cell is not None and expect in (ANY, cell.version)
            return is_meant, (None, None) if is_meant else None

        return await self.change("delete", key, decide)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        cells, now = await self.ask("scan", "cells", scope), time.time()
        names = sorted(name for name, cell in cells if cell.is_alive(now) and name > after)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

    async def change(self, operation: str, key: Key, decide: Decision) -> Any:
        """Write what is decided about what is there, and decide again if that has changed meanwhile."""
        try:
            async with asyncio.timeout(self.traits.deadline), self.turn(key):
                while True:
                    cell, now = await self.ask(operation, "read", key), self.moment()
                    alive = cell if cell and cell.is_alive(now) else None
                    answer, change = decide(alive, now)
                    if change is None:
                        return answer
                    since = seen(cell, self.compared)
                    if await self.ask(operation, "write", key, change, self.compared, since, anew=not alive):
                        return answer
        except TimeoutError:
            raise self._located(OutcomeUnknown("no answer in time"), operation) from None

    async def ask(self, operation: str, request: str, *given: object, **named: object) -> Any:
        """Send a request of an operation; only that to write leaves a doubt when its answer is lost."""
        try:
            return await self._ask(request, *given, **named)
        except OutcomeUnknown as error:
            kind = OutcomeUnknown if request == "write" and operation != "load" else Unavailable
            raise self._located(kind(str(error)), operation) from error
        except Unavailable as error:
            raise self._located(error, operation) from error

    # What the mutants do otherwise:

    def turn(self, key: Key) -> Any:
        return self._queues.setdefault(key, asyncio.Lock())

    def moment(self) -> float:
        return time.time()


@functools.cache
def the_server() -> DictionaryServer:
    return DictionaryServer(Cells)


def optimistic_datastore(kind: Callable[[str], OptimisticDriver] = OptimisticDriver) -> Datastore:
    """Return a datastore of drivers of a class, with its address."""
    return replace(networked_datastore(kind, the_server()), tick=0.3)
