"""The parts of large values: store, read, list, remove them, and extend their time to live."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.records import keys, ledger, operations
from stm_backends.records.large import pointers
from stm_backends.records.large.pointers import HEADER, Life, Pointer

PART: Final = 1024 * 1024
"""The largest part, in bytes, so that each is stored well within a driver's deadline."""

AT_ONCE: Final = 4
"""Number of parts that one operation reads or writes concurrently."""

PATIENCE_S: Final = 60.0
"""Storing a value fails if its parts take longer than this many seconds."""

CACHED: Final = 32 * 1024 * 1024
"""Number of bytes of recently read or written values that are cached; values never change."""

REMEMBERED: Final = 500
"""Number of records, and of values, for which the last observation is remembered."""

_V = TypeVar("_V")


class Parts:
    """The parts of all values on one driver. `clock` is in epoch seconds, and `steady` never steps back."""

    def __init__(self, driver: Driver, *, clock: Callable[[], float], steady: Callable[[], float]) -> None:
        self._driver = driver
        self._clock = clock
        self._steady = steady
        self._size = min(PART, driver.traits.max_entry - HEADER)
        self._lives: Bounded[str, Life] = Bounded(REMEMBERED)
        self._cache: Bounded[str, bytes] = Bounded(CACHED, size_of=len)

    async def store(self, key: Key, value: bytes, operation: str, ttl: float | None) -> Pointer:
        """Store the parts of a value; returns the pointer to them. Removes them before it raises.

        Never raises `OutcomeUnknown`: parts without a pointer have no effect.
        """
        began = self._steady()
        digests = [b""] * -(-len(value) // self._size)
        pointer = Pointer(pointers.new_id(self._clock()), len(value), "", len(digests), ttl)

        async def put(index: int) -> None:
            digests[index] = pointers.digest(await self._put(key, pointer, value, index))

        try:
            await run_concurrently([partial(put, index) for index in range(len(digests))])
            if self._steady() - began > PATIENCE_S:
                raise Unavailable("storing a large value took too long; nothing was stored")
        except StorageError as error:
            with suppress(StorageError):  # parts that remain are garbage and are found later
                await self.remove(key, pointer.id)
            error.backend, error.operation = self._driver.name, operation
            if isinstance(error, OutcomeUnknown):
                raise Unavailable(
                    "the parts of a large value were not stored",
                    backend=self._driver.name,
                    operation=operation,
                ) from error
            raise
        pointer = pointer.sealed_by(digests)
        self._remember(pointer, value)
        return pointer

    def digest(self, value: bytes) -> str:
        """Return the digest that the pointer to a value has."""
        starts = range(0, len(value), self._size)
        return pointers.digest_of(pointers.digest(value[at : at + self._size]) for at in starts)

    async def complete(self, key: Key, pointer: Pointer, value: bytes, found: Iterable[str]) -> bool:
        """Store missing parts; `found` are names of existing ones. Returns whether any was missing."""
        named = {part_key(key, pointer.id, index).name: index for index in range(pointer.parts)}
        missing = named.keys() - found
        if missing:
            missing -= {name async for name in self.names(key, pointer.id)}
        for name in missing:
            await self._put(key, pointer, value, named[name])
        return bool(missing)

    async def _put(self, key: Key, pointer: Pointer, value: bytes, index: int) -> bytes:
        """Store one part unless it is there; returns its share of the value."""
        chunk = value[index * self._size : (index + 1) * self._size]
        part = ledger.Change(pointers.seal_part(chunk, pointer.life), ttl=pointer.life.given)
        await ledger.replace(self._driver, part_key(key, pointer.id, index), part, expect=ABSENT)
        return chunk

    async def read(self, key: Key, pointer: Pointer) -> bytes | None:
        """Return a value; `None` if a part is missing. Raises `Corrupt` if the value is damaged."""
        value = self._cache.use(pointer.id)
        if value is not None:
            return value
        wheres = [part_key(key, pointer.id, index) for index in range(pointer.parts)]
        found = await run_concurrently([partial(self._driver.load, where) for where in wheres])
        parts = [pointers.open_part(record.body) for record in found if record is not None]
        if len(parts) < len(found):
            return None
        value = pointer.value([chunk for chunk, _ in parts])
        self._lives[pointer.id] = min((life for _, life in parts), key=lambda life: life.at)
        self._remember(pointer, value)
        return value

    def _remember(self, pointer: Pointer, value: bytes) -> None:
        if len(value) <= CACHED // 2:
            self._cache[pointer.id] = value

    async def names(self, key: Key, value_id: str) -> AsyncIterator[str]:
        """Yield the names of the parts of one value."""
        scope, prefix = keys.parts_of(key)
        async for name in operations.names_of(self._driver, scope, f"{prefix}{value_id}:"):
            yield name

    async def oldest(self, key: Key) -> set[str]:
        """Return the names of a record's oldest parts, at most a page of them, in one round trip."""
        scope, prefix = keys.parts_of(key)
        page = await self._driver.scan(scope, after=prefix, limit=operations.PAGE)
        return {name for name in page.names if name.startswith(prefix)}

    async def remove(self, key: Key, value_id: str) -> None:
        """Remove the parts of one value."""
        scope = keys.parts_of(key).scope
        names = [name async for name in self.names(key, value_id)]
        await run_concurrently([partial(self._driver.delete, Key(scope, name)) for name in names])

    async def keep_alive(self, key: Key, pointer: Pointer, ttl: float | None) -> None:
        """Ensure that parts outlive a record with a time to live of `ttl` seconds from now.

        Rewrites them if necessary, the first part last: its header tells whether all were rewritten.
        """
        life, now = Life(ttl, self._clock()), self._clock()
        if (self._lives.get(pointer.id) or pointer.life).covers(ttl, now=now):
            return

        async def renew(index: int) -> None:
            async def decided(record: Record | None) -> tuple[ledger.Change | None, bool]:
                if record is None:
                    return None, True
                chunk, found = pointers.open_part(record.body)
                if found.covers(ttl, now=now):
                    return None, True
                if index == 0:
                    await run_concurrently([partial(renew, other) for other in range(1, pointer.parts)])
                return ledger.Change(pointers.seal_part(chunk, life), ttl=life.given), True

            # A part that is sealed again, or renewed by another process, has another version.
            if not await ledger.update(self._driver, part_key(key, pointer.id, index), decided):
                raise Unavailable("a part of a large value changed each time that it was renewed")

        await renew(0)
        self._lives[pointer.id] = life


def part_key(key: Key, value_id: str, index: int) -> Key:
    """Return the key of one part of a value."""
    scope, prefix = keys.parts_of(key)
    return Key(scope, pointers.part_name(prefix, value_id, index))


async def run_concurrently(jobs: Sequence[Callable[[], Awaitable[_V]]]) -> list[_V]:
    """Run jobs, `AT_ONCE` at a time; returns their results in order. The first error cancels the others."""
    answers: dict[int, _V] = {}
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for index, job in waiting:
            answers[index] = await job()

    await all_of(work() for _ in range(min(AT_ONCE, len(jobs))))
    return [answers[index] for index in range(len(jobs))]
