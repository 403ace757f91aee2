"""Entries and bodies of any size on every datastore: a driver that wraps another driver.

A value that is too large for a record, or would take a large share of it, is stored in parts outside the
record, and the record holds a small pointer (`pointers`). The parts never change. They are written before the
pointer and removed after it, so an interruption leaves garbage and never half a value. The decision
docs/decisions/0018-large-entries-beside-the-record.md tells how garbage is found, and why parts outlive their
record.

A record without pointers takes no additional round trip, with one exception: see `LargeEntries.append`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_append, require_replace
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
from stm_backends.drivers.wrapper import with_last
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable, located
from stm_backends.records import keys
from stm_backends.records.large.parts import REMEMBERED, Parts
from stm_backends.records.large.pointers import (
    FRESH,
    MARK,
    POINTER,
    Life,
    Pointer,
    id_in,
    open_pointer,
    time_of,
)
from stm_backends.records.operations import SEALED

logger = logging.getLogger("stm_backends")

LARGEST: Final = 64 * 1024 * 1024
"""The largest entry and the largest body, in bytes, unless the inner driver takes larger ones."""

SHARE: Final = 16
"""A value larger than `max_record // SHARE` is stored in parts, so that a record has room for several."""

REUSED_S: Final = 30.0
"""Seconds for which a retry after an unknown outcome uses the same parts."""

ORPHANED_S: Final = 3600.0
"""Parts that no pointer refers to are removed once they are this old, in seconds, so that none is on its way.

Clocks of processes that share a datastore may differ by nearly as much.
"""

SETTLED: Final = 2
"""Parts of dropped values are removed once they are `REUSED_S` plus this many deadlines old: until then a
retry, by this library or a client library, may store the pointer again."""

_NO_POINTERS: Final[Mapping[str, Pointer]] = {}

_ROUNDS: Final = 5
_UNSETTLED: Final = 16

_Answer = TypeVar("_Answer", int, bool)


@dataclass(slots=True)
class _Seen:
    """This process's knowledge of one record; `at` is the time of the last load, by the monotonic clock.

    `pointers` has those of the last load and those that this process has written since. `order` has the id of
    each entry of the tail as of `version` (`None` for a small entry), and `body` is the id of the body.
    `left` has the ids of values that this process removed from the record, whose parts may still exist.
    `ttl` is the time to live that this process set last.
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

    A record has the room that it has in `inner`, of which a large value takes that of a pointer. One
    operation on a large value takes several round trips, each of which has the driver's deadline. `clock` is
    in epoch seconds, and `steady` never steps back.
    """

    def __init__(
        self,
        inner: Driver,
        *,
        largest: int = LARGEST,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner = with_last(inner)
        self.name = inner.name
        self._largest = largest
        self._clock = clock
        self._steady = steady
        self._seen: Bounded[Key, _Seen] = Bounded(REMEMBERED)
        self._unsettled: Bounded[tuple[Key, str, int], Pointer] = Bounded(_UNSETTLED)
        self._parts = Parts(inner, clock=clock, steady=steady)
        self.before_parts: Callable[[Key, float | None], Awaitable[None]] | None = None
        """Called with the key of a record and the time to live of its parts, before they are stored."""
        # Small values stay in the record, where one round trip loads them.
        self._inline = min(inner.traits.max_entry, max(inner.traits.max_record // SHARE, 4 * POINTER))
        self.traits = self._limits(inner.traits)

    def _limits(self, traits: Traits) -> Traits:
        if traits.max_entry < 4 * POINTER:
            return traits
        largest = max(self._largest, traits.max_entry)
        return replace(traits, max_entry=largest, max_inline=self._inline, reference=POINTER)

    async def open(self) -> None:
        """Open the inner driver."""
        await self.inner.open()

    async def close(self) -> None:
        """Close the inner driver."""
        await self.inner.close()

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope; parts have separate scopes."""
        return await self.inner.scan(scope, after=after, limit=limit)

    # Reading

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, with the complete values.

        If parts are missing, their value was dropped after the record was read, so the record is read again.
        Raises `Corrupt` if it still points to them.
        """
        missing: set[str] = set()
        for _ in range(_ROUNDS):
            at = self._steady()
            record = await self.inner.load(key, last=last)
            pointers = self._note(key, record, at)
            if record is None or not pointers:
                return record
            if missing & pointers.keys():
                raise Corrupt("parts of a large value are missing", backend=self.name, operation="load")
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

    async def _look(self, key: Key) -> Mapping[str, Pointer]:
        """Return the pointers of a record by id, as they are stored now."""
        at = self._steady()
        return self._note(key, await self.inner.load(key), at)

    def _note(self, key: Key, record: Record | None, at: float) -> Mapping[str, Pointer]:
        """Remember a record whose load began `at` this time; returns its pointers by id.

        If entries of the record were skipped, some pointers are unknown, so nothing is remembered.
        """
        body, order, pointers = None, (), _NO_POINTERS
        if record is not None and _has_pointer(record):
            with located(self.name, "load"):
                found, *tail = [open_pointer(value or b"") for value in (record.body, *record.tail)]
            body, order = found and found.id, [one and one.id for one in tail]
            pointers = {one.id: one for one in (found, *tail) if one is not None}
        if record is not None and record.skipped:
            return pointers
        seen = self._remembered(key)
        seen.at, seen.version = at, None if record is None else record.version
        seen.body, seen.order, seen.pointers = body, order, tuple(pointers.values())
        if seen.left:
            seen.left = seen.left.difference(pointers)
        return pointers

    def _remembered(self, key: Key) -> _Seen:
        """Return this process's knowledge of a record; at first, that it was never loaded."""
        seen = self._seen.use(key)
        if seen is None:
            seen = self._seen[key] = _Seen(-math.inf)
        return seen

    # Writing

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; for a large one, store the parts and then the pointer to them.

        Restarts the time to live of the record and of its parts. An append with a time to live therefore
        takes an additional load if this process has not loaded the record recently.
        """
        if self._fits(entry):
            length = await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)
        else:
            require_append(entry, ttl, self.traits, backend=self.name)

            async def send(data: Sequence[bytes]) -> int:
                return await self.inner.append(key, data[0], initial_version=initial_version, ttl=ttl)

            length = await self._send(key, (entry,), "append", ttl, send)
        if length == 1:
            # The record is new, or its other values were dropped.
            self._remembered(key).at = self._steady()
        seen = self._seen.get(key)
        if ttl is not None or (seen is not None and (seen.pointers or seen.ttl is not None)):
            await self._extend_life(key, ttl)
        return length

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
        """Store a body if the record is what the caller expects, then remove the parts of replaced values."""
        values = sent = (body, *rewrite)

        def send(data: Sequence[bytes]) -> Awaitable[bool]:
            nonlocal sent
            sent = data = tuple(data)
            return self.inner.replace(
                key, data[0], version=version, expect=expect, drop=drop, rewrite=data[1:], ttl=ttl
            )

        if all(map(self._fits, values)):
            done = await send(values)
        else:
            require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
            life = self._last_ttl(key) if isinstance(ttl, Ttl) else ttl
            done = await self._send(key, values, "replace", life, send)
        if done:
            with self._logging_errors(key):
                await self._dropped(key, sent, version, expect, drop)
            if isinstance(expect, str) and not isinstance(ttl, Ttl):
                await self._extend_life(key, ttl)
        return done

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did.

        Then removes the parts that this process knows of; `ledger.erase` removes all parts.
        """
        done = await self.inner.delete(key, expect=expect)
        seen = self._seen.get(key)
        if done and seen is not None:
            seen.left |= seen.ids
            seen.version, seen.body, seen.order, seen.pointers = None, None, (), ()
            with self._logging_errors(key):
                await self._sweep(key, seen.left)
        return done

    def _fits(self, value: bytes) -> bool:
        """Say whether a value is stored in its record: it is sealed, or small and not like a pointer.

        A sealed value, which only a copy without keys writes here, is stored as it is: a pointer in clear
        text would make it unreadable, and its own pointers cannot be seen.
        """
        if len(value) <= self._inline:
            return not value.startswith(MARK)
        return value.startswith(SEALED)

    async def _send(
        self,
        key: Key,
        values: Sequence[bytes],
        operation: str,
        ttl: float | None,
        send: Callable[[Sequence[bytes]], Awaitable[_Answer]],
    ) -> _Answer:
        """Store the parts of large values, then send the values with pointers in place of these.

        A retry after an unknown outcome sends the same pointers, so that there is one set of parts regardless
        of which attempt succeeds.
        """
        pointers: dict[int, Pointer] = {}
        ours: list[Pointer] = []  # those that no earlier attempt may have stored
        try:
            for place, value in enumerate(values):
                if self._fits(value):
                    continue
                pointer = self._sent_before(key, value, place)
                if pointer is None:
                    await self._announce(key, operation, ttl)
                    pointer = await self._parts.store(key, value, operation, ttl)
                    ours.append(pointer)
                pointers[place] = pointer
            sent = [pointers[at].seal() if at in pointers else one for at, one in enumerate(values)]
            answer = await send(sent)
        except (OutcomeUnknown, asyncio.CancelledError):
            for place, pointer in pointers.items():
                self._unsettled[key, pointer.digest, place] = pointer
            raise
        except StorageError:
            await self._discard(key, ours)
            raise
        for place, pointer in pointers.items():
            self._unsettled.pop((key, pointer.digest, place))
        if answer is False:
            # A lost race. An earlier attempt with an unknown outcome may have won it.
            await self._discard(key, ours)
            return answer
        seen = self._remembered(key)
        seen.pointers += tuple(one for one in pointers.values() if one not in seen.pointers)
        with self._logging_errors(key):
            for place, pointer in pointers.items():
                await self._settle(key, pointer, values[place])
        return answer

    def _sent_before(self, key: Key, value: bytes, place: int) -> Pointer | None:
        """Return the pointer to the same value at the same place of a write whose outcome is unknown."""
        if not self._unsettled:
            return None
        pointer = self._unsettled.get((key, self._parts.digest(value), place))
        return None if pointer is None or self._clock() - pointer.at > REUSED_S else pointer

    async def _settle(self, key: Key, pointer: Pointer, value: bytes) -> None:
        """Check that the parts still exist now that the pointer is stored, and remove old garbage.

        An erasure that began before the pointer was stored may have removed the parts afterwards.
        """
        oldest = await self._parts.oldest(key)
        missing = await self._parts.complete(key, pointer, value, oldest)
        if missing and pointer.id not in await self._look(key):
            await self._parts.remove(key, pointer.id)
        await self._sweep(key, map(id_in, oldest))

    async def _sweep(self, key: Key, ids: Iterable[str]) -> None:
        """Remove the values among these that are old and that no pointer refers to."""
        now, seen = self._clock(), self._seen.get(key)
        left = frozenset[str]() if seen is None else seen.left
        settled = REUSED_S + SETTLED * self.traits.deadline
        old = {one for one in ids if now - time_of(one) > (settled if one in left else ORPHANED_S)}
        if old:
            # Read again, because a pointer may have been written since the values were dropped.
            for one in old - (await self._look(key)).keys():
                await self._parts.remove(key, one)
                if (seen := self._seen.get(key)) is not None:
                    seen.left -= {one}

    async def _discard(self, key: Key, pointers: Iterable[Pointer]) -> None:
        """Remove the parts of values whose pointers were not stored; parts that remain are garbage."""
        with self._logging_errors(key):
            for pointer in pointers:
                await self._parts.remove(key, pointer.id)

    async def _dropped(
        self, key: Key, sent: Sequence[bytes], version: str, expect: str | AbsentType | AnyType, drop: int
    ) -> None:
        """Remove the parts of values that a replace has replaced, as far as this process knows them.

        `sent` has the body and the rewritten entries as they are stored now.
        """
        seen = self._seen.get(key)
        if seen is None:
            return
        body, *entries = [pointer and pointer.id for pointer in map(open_pointer, sent)]
        going = drop or len(entries)
        if expect == seen.version:
            gone = {one for one in (seen.body, *seen.order[:going]) if one is not None}
            seen.order = (*entries, *seen.order[going:])
        else:
            gone = seen.ids if going or expect is ANY else set[str]()
            seen.order = ()
        gone.difference_update(one for one in (body, *entries) if one is not None)
        seen.version, seen.body = version, body
        seen.left |= gone
        seen.pointers = tuple(one for one in seen.pointers if one.id not in gone)
        await self._sweep(key, seen.left)

    # Time to live

    def _last_ttl(self, key: Key) -> float | None:
        """Return the time to live that a record was given last, as far as known."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        return seen.ttl or max((one.ttl for one in seen.pointers if one.ttl is not None), default=None)

    async def _extend_life(self, key: Key, ttl: float | None) -> None:
        """Extend the time to live of a record's parts to that of the record, and beyond.

        Loads the record if this process has not done so recently: another may have added parts.
        """
        seen = self._seen.get(key)
        with self._logging_errors(key):
            if ttl is not None and (seen is None or self._steady() - seen.at > FRESH * ttl):
                await self._look(key)
                seen = self._seen.get(key)
            if seen is not None:
                seen.ttl = ttl
                if seen.pointers:
                    await self._announce(key, "append", ttl)
                for pointer in seen.pointers:
                    await self._parts.keep_alive(key, pointer, ttl)

    async def _announce(self, key: Key, operation: str, ttl: float | None) -> None:
        """Call `before_parts` with the time to live of the parts of a record with a time to live of `ttl`."""
        if self.before_parts is not None:
            try:
                await self.before_parts(key, Life(ttl, 0.0).given)
            except OutcomeUnknown as error:
                raise Unavailable(
                    "the owner of a large value could not be listed; nothing was stored",
                    backend=self.name,
                    operation=operation,
                ) from error

    @contextmanager
    def _logging_errors(self, key: Key) -> Generator[None]:
        """Log an error of the work after a write: the write was done, and a later one completes the work."""
        try:
            yield
        except StorageError as error:
            logger.warning(
                "could not maintain the parts of a record; a later write will: %s (conversation %s)",
                error,
                keys.log_name(key),
            )


def _has_pointer(record: Record) -> bool:
    if record.body is not None and record.body.startswith(MARK):
        return True
    for entry in record.tail:  # noqa: SIM110 -- `any` takes longer, and every load passes through here
        if entry.startswith(MARK):
            return True
    return False


def _resolved(record: Record, values: Mapping[str, bytes]) -> Record:
    """Return a record with its values in place of the pointers."""

    def value(data: bytes) -> bytes:
        pointer = open_pointer(data)
        return data if pointer is None else values[pointer.id]

    body = None if record.body is None else value(record.body)
    return replace(record, body=body, tail=tuple(value(entry) for entry in record.tail))
