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
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from stm_backends.drivers.checks import require_drop, require_fits, require_ttl
from stm_backends.drivers.contract import (
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
)
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable, located
from stm_backends.records.large.parts import REMEMBERED, Parts, keep
from stm_backends.records.large.pointers import FRESH, MARK, POINTER, Pointer, id_in, open_pointer, time_of

logger = logging.getLogger("stm_backends")

LARGEST: Final = 64 * 1024 * 1024
"""The largest entry and the largest body, in bytes, unless the driver within takes larger ones."""

SHARE: Final = 16
"""What takes more than this part of a record is kept beside it, so that several such stand in one."""

REUSED_S: Final = 30.0
"""For so long the parts of a value serve again when it is sent again, because the outcome was unknown."""

ORPHANED_S: Final = 3600.0
"""Parts that no pointer refers to are removed once they are so old, in seconds, that none is on its way.

Clocks of processes that share a datastore may differ by nearly as much.
"""

SETTLED: Final = 2
"""Parts of what was dropped are removed once they are `REUSED_S` and so many deadlines old: until then a
write that is sent again, by us or by a client library, may put the pointer there again."""

_ROUNDS: Final = 5
_UNSETTLED: Final = 16

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
    pointers: tuple[Pointer, ...] = ()
    left: frozenset[str] = frozenset()

    @property
    def ids(self) -> set[str]:
        """The ids of the pointers."""
        return {pointer.id for pointer in self.pointers}


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
        self._unsettled: OrderedDict[tuple[Key, bytes], Pointer] = OrderedDict()
        self._parts = Parts(inner, clock=clock, steady=steady)
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
            record, pointers = await self._look(key)
            if record is None or not pointers:
                return record
            if missing & pointers.keys():
                raise Corrupt("parts beside the record are missing", backend=self.name, operation="load")
            values: dict[str, bytes] = {}
            for pointer in pointers.values():
                with located(self.name, "load"):
                    value = await self._parts.read(key, pointer)
                if value is None:
                    missing.add(pointer.id)
                    break
                values[pointer.id] = value
            else:
                return _resolved(record, values)
        raise Unavailable(
            "the record changed each time that it was read", backend=self.name, operation="load"
        )

    async def _look(self, key: Key) -> tuple[Record | None, Mapping[str, Pointer]]:
        """Return a record as it is stored, and its pointers by id, and remember what stands there."""
        found, pointers = _Seen(self._steady()), dict[str, Pointer]()
        record = await self.inner.load(key)
        if record is not None:
            found.version = record.version
            if any(value.startswith(MARK) for value in (record.body or b"", *record.tail)):
                with located(self.name, "load"):
                    body, *tail = [open_pointer(value or b"") for value in (record.body, *record.tail)]
                found.body, found.order = body and body.id, [one and one.id for one in tail]
                pointers = {one.id: one for one in (body, *tail) if one is not None}
                found.pointers = tuple(pointers.values())
        before = self._seen.get(key)
        if before is not None:
            found.left, found.ttl = before.left.difference(pointers), before.ttl
        keep(self._seen, key, found, REMEMBERED)
        return record, pointers

    # Writing

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; a large one in parts first, then the pointer to them.

        The time to live starts anew, and with it that of what is kept beside the record. So an append with a
        time to live by a process that has not looked at the record lately takes one load more.
        """
        send = partial(self.inner.append, key, initial_version=initial_version, ttl=ttl)
        if self._fits(entry):
            length = await send(entry)
        else:
            require_ttl(ttl)
            length = await self._send(key, entry, "append", ttl, send)
        with self._harmless():
            await self._outlive(key, ttl, created=length == 1)
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
                    await self._outlive(key, ttl, created=False)
        return done

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did.

        Parts that this process knows of are removed after it; `records.erase` removes all there are.
        """
        done = await self.inner.delete(key, expect=expect)
        seen = self._seen.get(key)
        if done and seen is not None:
            seen.left |= seen.ids
            seen.version, seen.body, seen.order, seen.pointers = None, None, (), ()
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
            pointer = await self._parts.store(key, value, operation, ttl)
        try:
            answer = await send(pointer.seal())
        except (OutcomeUnknown, asyncio.CancelledError):
            keep(self._unsettled, (key, value), pointer, _UNSETTLED)
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
            keep(self._seen, key, seen, REMEMBERED)
        if pointer not in seen.pointers:
            seen.pointers += (pointer,)
        with self._harmless():
            await self._settle(key, pointer, value)
        return answer

    async def _settle(self, key: Key, pointer: Pointer, value: bytes) -> None:
        """Look whether the parts are still there now that the pointer is, and remove old garbage.

        An erasure that began before the pointer was stored may have removed the parts after it.
        """
        oldest = await self._parts.oldest(key)
        missing = await self._parts.complete(key, pointer, value, oldest)
        if missing and pointer.id not in (await self._look(key))[1]:
            await self._parts.remove(key, pointer.id)
        await self._sweep(key, map(id_in, oldest))

    async def _sweep(self, key: Key, ids: Iterable[str]) -> None:
        """Remove those of these values that are old and that no pointer refers to."""
        now, seen = self._clock(), self._seen.get(key)
        left = frozenset[str]() if seen is None else seen.left
        settled = REUSED_S + SETTLED * self.traits.deadline
        old = {one for one in ids if now - time_of(one) > (settled if one in left else ORPHANED_S)}
        if old:
            # Read again, so that it is seen what has been written since whoever dropped them looked.
            _, standing = await self._look(key)
            for one in old - standing.keys():
                await self._parts.remove(key, one)
                if (seen := self._seen.get(key)) is not None:
                    seen.left -= {one}

    async def _discard(self, key: Key, pointer: Pointer) -> None:
        """Remove the parts of a value whose pointer was not stored; what cannot be is garbage."""
        with self._harmless():
            await self._parts.remove(key, pointer.id)

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
            gone = seen.ids if drop or expect is ANY else set[str]()
            seen.order = ()
        gone.discard(ours or "")
        seen.version, seen.body = version, ours
        seen.left |= gone
        seen.pointers = tuple(one for one in seen.pointers if one.id not in gone)
        await self._sweep(key, seen.left)

    # Time to live

    def _last_ttl(self, key: Key) -> float | None:
        """Return the time to live that a record was given last, as far as this process knows."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        return seen.ttl or max((one.ttl for one in seen.pointers if one.ttl is not None), default=None)

    async def _outlive(self, key: Key, ttl: float | None, *, created: bool) -> None:
        """Give what is kept beside a record as long a life as the record has just been given, and longer.

        `created` says that the tail has no other entry.
        """
        seen, now = self._seen.get(key), self._steady()
        if created:
            seen = seen or _Seen(now)
            seen.at = now
            keep(self._seen, key, seen, REMEMBERED)
        elif ttl is not None and (seen is None or now - seen.at > FRESH * ttl):
            await self._look(key)
            seen = self._seen[key]
        if seen is None:
            return
        seen.ttl = ttl
        for pointer in seen.pointers:
            await self._parts.keep_alive(key, pointer, ttl)

    @contextmanager
    def _harmless(self) -> Generator[None]:
        """Log an error in what follows a write: the write was done, and a later one does the rest."""
        try:
            yield
        except StorageError as error:
            logger.warning("the maintenance of what is kept beside a record was put off: %s", error)


def _resolved(record: Record, values: Mapping[str, bytes]) -> Record:
    """Return a record with its values in place of the pointers."""

    def value(data: bytes) -> bytes:
        pointer = open_pointer(data)
        return data if pointer is None else values[pointer.id]

    body = None if record.body is None else value(record.body)
    return Record(record.version, body, tuple(value(entry) for entry in record.tail))
