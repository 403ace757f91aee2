"""Entries and bodies of any size on every datastore: a driver around a driver, which is one itself.

What is too large for a record, or would take a large share of it, is stored in parts beside the record, and
a small pointer stands in its place (`pointers`). The parts never change. They are written before the pointer
and removed after it, so that what an interruption leaves is garbage and never half a value. How garbage is
found, and why parts outlive their record, is in docs/decisions/0018-large-entries-beside-the-record.md.

A record without pointers takes no round trip more than on the driver within, with one exception: see
`LargeEntries.append`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from stm_backends import keys, records
from stm_backends.checks import require_drop, require_fits, require_ttl
from stm_backends.driver import (
    ABSENT,
    ANY,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
    Ttl,
    new_version,
)
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable, located
from stm_backends.pointers import (
    FRESH,
    HEADER,
    MARK,
    POINTER,
    Life,
    Pointer,
    digest,
    digest_of,
    id_in,
    new_id,
    open_part,
    open_pointer,
    part_name,
    seal_part,
    time_of,
)

logger = logging.getLogger("stm_backends")

LARGEST: Final = 64 * 1024 * 1024
"""The largest entry and the largest body, in bytes, unless the driver within takes larger ones."""

PART: Final = 1024 * 1024
"""The largest part, in bytes, so that each is stored well within a driver's deadline."""

SHARE: Final = 16
"""What takes more than this part of a record is kept beside it, so that several such stand in one."""

AT_ONCE: Final = 4
"""How many parts one operation reads or writes at one time."""

PATIENCE_S: Final = 60.0
"""A value whose parts take longer to store than this many seconds is given up: `ORPHANED_S` rests on it."""

REUSED_S: Final = 30.0
"""For so long the parts of a value serve again when it is sent again, because the outcome was unknown."""

ORPHANED_S: Final = 3600.0
"""Parts that no pointer refers to are removed once they are so old, in seconds, that none is on its way.

Clocks of processes that share a datastore may differ by nearly as much.
"""

SETTLED: Final = 2
"""Parts of what was dropped are removed once they are so many deadlines old: until then a write that a client
library sent twice may put the pointer there again."""

CACHED: Final = 32 * 1024 * 1024
"""How many bytes of values that were read or written lately are kept; they never change."""

REMEMBERED: Final = 10_000
"""Of how many records, and of how many values, it is remembered what was seen of them last."""

_ROUNDS: Final = 5
_UNSETTLED: Final = 16

_K = TypeVar("_K")
_V = TypeVar("_V")
_Answer = TypeVar("_Answer", int, bool)


@dataclass(slots=True)
class _Seen:
    """What this process knows of one record; `at` is when it was looked at, by the monotonic clock.

    `pointers` has, by id, all that stood there then and all that this process has written since. `order` is
    the id of each entry of the tail (`None`: a small one) as of `version`, and `body` that of the body.
    `left` are ids of what this process has removed from the record, whose parts may still be there. `ttl` is
    the time to live that this process gave it last.
    """

    at: float
    ttl: float | None = None
    version: str | None = None
    body: str | None = None
    order: Sequence[str | None] = ()
    pointers: dict[str, Pointer] = field(default_factory=dict[str, Pointer])
    left: set[str] = field(default_factory=set[str])


class LargeEntries:
    """The five operations of `inner`, for entries and bodies of up to `largest` bytes.

    One operation on a large value takes several round trips, each of which has the driver's deadline. `clock`
    is in epoch seconds, and `steady` never steps back.
    """

    def __init__(
        self,
        inner: Driver,
        *,
        largest: int = LARGEST,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self._largest = largest
        self._clock = clock
        self._steady = steady
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._lives: OrderedDict[str, Life] = OrderedDict()
        self._unsettled: OrderedDict[tuple[Key, bytes], Pointer] = OrderedDict()
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached = 0
        self._traits = self._limits(inner.traits)
        # Most of a record: what is small stays where one round trip finds it.
        self._inline = min(inner.traits.max_entry, max(inner.traits.max_record // SHARE, 4 * POINTER))

    def _limits(self, traits: Traits) -> Traits:
        if traits.max_entry < 4 * POINTER:
            return traits
        largest = max(self._largest, traits.max_entry)
        most = max(traits.max_record, traits.max_record // POINTER * largest)
        return replace(traits, max_entry=largest, max_record=most)

    @property
    def name(self) -> str:
        """The name of the driver within."""
        return self.inner.name

    @property
    def traits(self) -> Traits:
        """The facts about the driver within, with the limits that are in force around it."""
        return self._traits

    async def open(self) -> None:
        """Open the driver within."""
        await self.inner.open()

    async def close(self) -> None:
        """Close the driver within."""
        await self.inner.close()

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope; parts have scopes of their own."""
        return await self.inner.scan(scope, after=after, limit=limit)

    # Reading

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, every value whole.

        A value whose parts are gone was dropped since the record was read, so the record is read again.
        Raises `Corrupt` if it still points to them then.
        """
        missing: set[str] = set()
        for _ in range(_ROUNDS):
            record = await self.inner.load(key)
            with located(self.name, "load"):
                pointers = self._look(key, record)
                if record is None or not pointers:
                    return record
                if missing & pointers.keys():
                    raise Corrupt("what is kept beside the record is missing")
                values: dict[str, bytes] = {}
                for pointer in pointers.values():
                    value = await self._value(key, pointer)
                    if value is None:
                        missing.add(pointer.id)
                        break
                    values[pointer.id] = value
                else:
                    return _resolved(record, values)
        raise Unavailable(
            "the record changed each time that it was read", backend=self.name, operation="load"
        )

    def _look(self, key: Key, record: Record | None) -> dict[str, Pointer]:
        """Remember what stands in a record; returns its pointers by id."""
        if record is None:
            found = _Seen(self._steady())
        else:
            body = None if record.body is None else open_pointer(record.body)
            tail = [open_pointer(entry) for entry in record.tail if entry.startswith(MARK)]
            found = _Seen(self._steady(), version=record.version, body=body and body.id)
            if tail:
                of = iter(tail)
                ids = (next(of) if entry.startswith(MARK) else None for entry in record.tail)
                found.order = [pointer and pointer.id for pointer in ids]
            found.pointers = {one.id: one for one in (body, *tail) if one is not None}
        before = self._seen.get(key)
        if before is not None:
            found.left = before.left - found.pointers.keys()
            found.ttl = before.ttl
        _keep(self._seen, key, found, REMEMBERED)
        return found.pointers

    async def _value(self, key: Key, pointer: Pointer) -> bytes | None:
        """Return the value that a pointer stands for; `None` if a part of it is not there."""
        value = self._cache.get(pointer.id)
        if value is not None:
            self._cache.move_to_end(pointer.id)
            return value
        parts = await _at_once([self._part_reader(key, pointer, i) for i in range(pointer.parts)])
        chunks = [part[0] for part in parts if part is not None]
        if len(chunks) < len(parts):
            return None
        value = pointer.value(chunks)
        lives = [part[1] for part in parts if part is not None]
        _keep(self._lives, pointer.id, min(lives, key=lambda life: life.at), REMEMBERED)
        self._remember(pointer, value)
        return value

    def _part_reader(
        self, key: Key, pointer: Pointer, index: int
    ) -> Callable[[], Awaitable[tuple[bytes, Life] | None]]:
        async def read() -> tuple[bytes, Life] | None:
            record = await self.inner.load(_part_key(key, pointer.id, index))
            return None if record is None else open_part(record.body)

        return read

    def _remember(self, pointer: Pointer, value: bytes) -> None:
        if len(value) > CACHED // 2:
            return
        self._cached += len(value) - len(self._cache.pop(pointer.id, b""))
        self._cache[pointer.id] = value
        while self._cached > CACHED:
            self._cached -= len(self._cache.popitem(last=False)[1])

    # Writing

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        """Add one entry at the end; a large one in parts first, then the pointer to them.

        The time to live starts anew, and with it that of what is kept beside the record. So an append with a
        time to live by a process that has not looked at the record lately takes one load more.
        """

        def send(data: bytes) -> Awaitable[int]:
            return self.inner.append(key, data, birth=birth, ttl=ttl)

        if self._fits(entry):
            length = await send(entry)
        else:
            require_ttl(ttl)
            length = await self._send(key, entry, "append", ttl, send)
        with self._harmless():
            await self._outlive(key, ttl, born=length == 1)
        return length

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body if the record is what the caller expects; parts of what went are removed after it."""
        sent = body

        def send(data: bytes) -> Awaitable[bool]:
            nonlocal sent
            sent = data
            return self.inner.replace(key, data, version=version, expect=expect, drop=drop, ttl=ttl)

        if self._fits(body):
            done = await send(body)
        else:
            require_ttl(ttl)
            require_drop(drop, expect)
            life = self._last_ttl(key) if isinstance(ttl, Ttl) else ttl
            done = await self._send(key, body, "replace", life, send)
        if done:
            with self._harmless():
                await self._dropped(key, sent, version, expect, drop)
                if isinstance(expect, str) and not isinstance(ttl, Ttl):
                    await self._outlive(key, ttl, born=False)
        return done

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did.

        Parts that this process knows of are removed after it; `records.erase` removes all there are.
        """
        done = await self.inner.delete(key, expect=expect)
        seen = self._seen.get(key)
        if done and seen is not None:
            seen.left |= seen.pointers.keys()
            seen.version, seen.body, seen.order, seen.pointers = None, None, (), {}
            with self._harmless():
                await self._sweep(key, seen.left)
        return done

    def _fits(self, value: bytes) -> bool:
        """Say whether a value stands in its record: it is small, and cannot be mistaken for a pointer."""
        return len(value) <= self._inline and not value.startswith(MARK)

    async def _send(
        self,
        key: Key,
        value: bytes,
        operation: str,
        ttl: float | None,
        send: Callable[[bytes], Awaitable[_Answer]],
    ) -> _Answer:
        """Store the parts of a value, then send the pointer to them.

        A value that is sent again because the outcome was unknown gets the pointer that it had, so that
        whichever arrives there is one set of parts.
        """
        require_fits("entry", len(value), self.traits.max_entry, backend=self.name, operation=operation)
        pointer = self._unsettled.get((key, value)) if self._unsettled else None
        if pointer is not None and self._clock() - pointer.at > REUSED_S:
            pointer = None
        again = pointer is not None
        if pointer is None:
            pointer = await self._store(key, value, operation, ttl)
        try:
            answer = await send(pointer.seal())
        except (OutcomeUnknown, asyncio.CancelledError):
            _keep(self._unsettled, (key, value), pointer, _UNSETTLED)
            raise
        except StorageError:
            if not again:
                await self._discard(key, pointer)
            raise
        self._unsettled.pop((key, value), None)
        if answer is False and not again:
            # A lost race. What was sent before with an unknown outcome may have won it.
            await self._discard(key, pointer)
        if answer is False:
            return answer
        seen = self._seen.get(key)
        if seen is None:
            # Older than any look: whatever else stands there has not been seen.
            seen = _Seen(-math.inf)
            _keep(self._seen, key, seen, REMEMBERED)
        seen.pointers[pointer.id] = pointer
        self._remember(pointer, value)
        with self._harmless():
            await self._settle(key, pointer, value)
        return answer

    # Parts

    async def _store(self, key: Key, value: bytes, operation: str, ttl: float | None) -> Pointer:
        """Store the parts of a value; returns the pointer to them. Raises `StorageError` with none left."""
        began, value_id = self._steady(), new_id(self._clock())
        size = self._part_size
        digests = [b""] * -(-len(value) // size)
        pointer = Pointer(value_id, len(value), "", len(digests), ttl)

        def storing(index: int) -> Callable[[], Awaitable[None]]:
            async def store() -> None:
                chunk = value[index * size : (index + 1) * size]
                digests[index] = digest(chunk)
                await self._put(key, pointer, index, chunk)

            return store

        try:
            await _at_once([storing(index) for index in range(len(digests))])
            if self._steady() - began > PATIENCE_S:
                raise Unavailable("storing a large value took too long, and nothing of it stands")
        except StorageError as error:
            await self._discard(key, pointer)
            error.operation = operation
            if not isinstance(error, OutcomeUnknown):
                raise
            raise Unavailable(
                "the parts of a large value were not stored", backend=self.name, operation=operation
            ) from error
        return replace(pointer, digest=digest_of(digests))

    @property
    def _part_size(self) -> int:
        return min(PART, self.inner.traits.max_entry - HEADER)

    async def _put(self, key: Key, pointer: Pointer, index: int, chunk: bytes) -> None:
        """Store one part unless it is there."""
        where, data, version = (
            _part_key(key, pointer.id, index),
            seal_part(chunk, pointer.life),
            new_version(),
        )
        await records.resent(
            lambda: self.inner.replace(where, data, version=version, expect=ABSENT, ttl=pointer.life.given)
        )

    async def _settle(self, key: Key, pointer: Pointer, value: bytes) -> None:
        """Look whether the parts are still there now that the pointer is, and remove old garbage.

        An erasure that began before the pointer was stored may have removed the parts after it.
        """
        oldest = await self._page(key)
        own = {_part_key(key, pointer.id, index).name: index for index in range(pointer.parts)}
        missing = own.keys() - oldest
        if missing:
            missing -= {name async for name in self._names(key, pointer.id)}
        for name in missing:
            start = own[name] * self._part_size
            await self._put(key, pointer, own[name], value[start : start + self._part_size])
        if missing and pointer.id not in self._look(key, await self.inner.load(key)):
            await self._remove(key, [pointer.id])
        await self._sweep(key, map(id_in, oldest))

    async def _page(self, key: Key) -> set[str]:
        """Return the names of the oldest parts of a record, at most one page."""
        scope, prefix = keys.parts_of(key)
        page = await self.inner.scan(scope, after=prefix, limit=records.PAGE)
        return {name for name in page.names if name.startswith(prefix)}

    async def _names(self, key: Key, value_id: str) -> AsyncIterator[str]:
        """Yield the names of the parts of one value."""
        scope, prefix = keys.parts_of(key)
        async for name in records.names_of(self.inner, scope, f"{prefix}{value_id}:"):
            yield name

    async def _sweep(self, key: Key, ids: Iterable[str]) -> None:
        """Remove those of these values that are old and that no pointer refers to."""
        now, seen = self._clock(), self._seen.get(key)
        left = set[str]() if seen is None else seen.left
        settled = SETTLED * self.traits.deadline
        old = {one for one in ids if now - time_of(one) > (settled if one in left else ORPHANED_S)}
        if old:
            # Read again, so that it is seen what has been written since whoever dropped them looked.
            gone = old - self._look(key, await self.inner.load(key)).keys()
            await self._remove(key, gone)

    async def _remove(self, key: Key, ids: Iterable[str]) -> None:
        """Remove the parts of some values."""
        for value_id in ids:
            scope = keys.parts_of(key).scope
            names = [name async for name in self._names(key, value_id)]
            await _at_once([partial(self.inner.delete, Key(scope, name)) for name in names])
            if (seen := self._seen.get(key)) is not None:
                seen.left.discard(value_id)

    async def _discard(self, key: Key, pointer: Pointer) -> None:
        """Remove the parts of a value whose pointer was not stored; what cannot be is garbage."""
        with self._harmless():
            await self._remove(key, [pointer.id])

    async def _dropped(
        self, key: Key, sent: bytes, version: str, expect: str | AbsentType | AnyType, drop: int
    ) -> None:
        """Remove what a replace has dropped from the record, as far as this process has seen it.

        `sent` is what stands as the body now.
        """
        seen = self._seen.get(key)
        if seen is None:
            return
        pointer = open_pointer(sent)
        ours = pointer and pointer.id
        if expect == seen.version:
            gone = {one for one in (seen.body, *seen.order[:drop]) if one is not None}
            seen.order = seen.order[drop:]
        else:
            gone = set(seen.pointers) if drop or expect is ANY else set[str]()
            seen.order = ()
        gone.discard(ours or "")
        seen.version, seen.body = version, ours
        seen.left |= gone
        for one in gone:
            seen.pointers.pop(one, None)
        await self._sweep(key, seen.left)

    # Time to live

    def _last_ttl(self, key: Key) -> float | None:
        """Return the time to live that a record was given last, as far as this process knows."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        return seen.ttl or max(
            (one.ttl for one in seen.pointers.values() if one.ttl is not None), default=None
        )

    async def _outlive(self, key: Key, ttl: float | None, *, born: bool) -> None:
        """Give what is kept beside a record as long a life as the record has just been given, and longer.

        `born` says that the tail has no other entry.
        """
        seen, now = self._seen.get(key), self._steady()
        if born:
            seen = seen or _Seen(now)
            seen.at = now
            _keep(self._seen, key, seen, REMEMBERED)
        elif ttl is not None and (seen is None or now - seen.at > FRESH * ttl):
            self._look(key, await self.inner.load(key))
            seen = self._seen[key]
        if seen is None:
            return
        seen.ttl = ttl
        for pointer in tuple(seen.pointers.values()):
            life = self._lives.get(pointer.id, pointer.life)
            if not life.covers(ttl, now=self._clock()):
                await self._renew(key, pointer, ttl)

    async def _renew(self, key: Key, pointer: Pointer, ttl: float | None) -> None:
        """Write the parts of a value again with another time to live; the first of them last.

        So the first one says of all whether another process has done it.
        """
        life = Life(ttl, self._clock())

        def renewing(index: int) -> Callable[[], Awaitable[bool]]:
            async def renew() -> bool:
                """Renew one part; returns whether it had to be."""
                where, version = _part_key(key, pointer.id, index), new_version()
                record = await self.inner.load(where)
                if record is None:
                    return False
                chunk, found = open_part(record.body)
                if found.covers(ttl, now=life.at):
                    return False
                if index == 0:
                    await _at_once([renewing(other) for other in range(1, pointer.parts)])
                await records.resent(
                    lambda: self.inner.replace(
                        where, seal_part(chunk, life), version=version, expect=record.version, ttl=life.given
                    )
                )
                return True

            return renew

        await renewing(0)()
        _keep(self._lives, pointer.id, life, REMEMBERED)

    @contextmanager
    def _harmless(self) -> Generator[None]:
        """Log an error in what follows a write: the write was done, and a later one does the rest."""
        try:
            yield
        except StorageError as error:
            logger.warning("the upkeep of what is kept beside a record was put off: %s", error)


def _part_key(key: Key, value_id: str, index: int) -> Key:
    scope, prefix = keys.parts_of(key)
    return Key(scope, part_name(prefix, value_id, index))


def _resolved(record: Record, values: Mapping[str, bytes]) -> Record:
    """Return a record with its values in place of the pointers."""

    def value(data: bytes) -> bytes:
        pointer = open_pointer(data)
        return data if pointer is None else values[pointer.id]

    body = None if record.body is None else value(record.body)
    return Record(record.version, body, tuple(value(entry) for entry in record.tail))


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Remember a value as the newest, and forget the oldest beyond so many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


async def _at_once(jobs: Sequence[Callable[[], Awaitable[_V]]]) -> list[_V]:
    """Do some jobs, `AT_ONCE` at one time; returns their answers in order. The first error ends them all."""
    answers: dict[int, _V] = {}
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for index, job in waiting:
            answers[index] = await job()

    workers = [asyncio.ensure_future(work()) for _ in range(min(AT_ONCE, len(jobs)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[index] for index in range(len(jobs))]
