"""The one place in the core where a record changes: append, replace, update, fold, erase.

Every change keeps the same promises, whichever module asks for it:

- **Lost race.** Another process has replaced the record since it was loaded. Nothing was changed; `update`
  loads again and decides again, with pauses.
- **Unknown outcome.** The write is sent again, which is harmless: a `replace` is idempotent in its version,
  and readers drop a repeated entry. `OutcomeUnknown` is raised if no attempt is answered.
- **Stale server.** A former master that still answers loads may show entries that the new one lacks, under
  the same version. So entries are confirmed before they are dropped; see decision 0037.
- **Cancellation.** The record is as it was before or as it is after; a write on its way may still be done.

Work that must be done while the entries still stand, such as storing them elsewhere, belongs between
`confirmed` and the `replace` that drops them: `fold` is where both meet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from stm_backends.drivers.contract import (
    ABSENT,
    KEEP,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Record,
    new_version,
)
from stm_backends.errors import Corrupt, LimitReached, OutcomeUnknown, StorageError, TooLarge, located
from stm_backends.races import ATTEMPTS, Lost, contend, retried, settled
from stm_backends.records import confirming, keys, operations

logger = logging.getLogger("stm_backends")

FOLD_AT: Final = 64
"""Number of entries after which `append_and_fold` folds a tail."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A body to store under a new version, and what else a `Driver.replace` does with the record."""

    body: bytes
    _: KW_ONLY
    version: str = field(default_factory=new_version)
    drop: int = 0
    rewrite: Sequence[bytes] = ()
    ttl: float | None | KeepType = KEEP

    @property
    def going(self) -> int:
        """Number of oldest entries that the record will no longer have."""
        return max(self.drop, len(self.rewrite))


class Deletion(Enum):
    """The decision to delete a record, with its tail."""

    DELETE = "delete"


DELETE: Final = Deletion.DELETE

Decide: TypeAlias = Callable[[Record | None], Awaitable[tuple[Change | Deletion | None, T]]]
"""Returns the change to a record as it was loaded, `None` for no change, and the result of it."""

BodyOf: TypeAlias = Callable[[Record], bytes]
"""Returns the body of a record once the entries of its tail are part of it."""

Unchanged: TypeAlias = Callable[[Record, str], Awaitable[bytes]]
"""Returns a body with the same meaning as that of a record, to be stored under this version."""


async def _own_body(record: Record, version: str) -> bytes:
    """Return the body of a record that has one."""
    del version
    if record.body is None:
        raise ValueError("the entries of a record without a body are confirmed by `unchanged` alone")
    return record.body


_UNLISTED: Final = nullcontext()


# Append


class Appended(NamedTuple):
    """The new length of the tail, and whether the append may have created the record."""

    length: int
    created: bool


class Creation(Protocol):
    """Learns whether a write may have created a record, such as a `Listing` in the directory."""

    created: bool


async def append(
    driver: Driver,
    key: Key,
    entry: bytes,
    *,
    ttl: float | None,
    listing: AbstractAsyncContextManager[Creation] | None = None,
) -> Appended:
    """Add one entry at the end, retrying while the outcome is unknown: it may be stored more than once.

    `listing` keeps the record's owner listed around the write. Readers recognize a repeat by its id. Ids of
    entries that have left the record are not remembered forever, so a process that was stopped between two
    attempts does not retry: it raises `OutcomeUnknown`.
    """
    if listing is not None:
        async with listing as owner:
            appended = await append(driver, key, entry, ttl=ttl)
            owner.created = appended.created
        return appended
    now, longest = asyncio.get_running_loop().time, (ATTEMPTS + 1) * driver.traits.deadline
    began = now()
    try:
        length = await driver.append(key, entry, initial_version=new_version(), ttl=ttl)
    except OutcomeUnknown as error:
        unknown = error

        async def again() -> int:
            if now() - began > longest:
                raise unknown
            return await driver.append(key, entry, initial_version=new_version(), ttl=ttl)

        length = await retried(again, after=unknown)
        # The first attempt may have created the record, and others may have appended since.
        return Appended(length, created=True)
    return Appended(length, length == 1)


async def append_to_full(
    send: Callable[[], Awaitable[Appended]], make_room: Callable[[], Awaitable[bool]]
) -> Appended:
    """Append with `send`; while the record is full, call `make_room` and append again.

    `make_room` returns whether another attempt may succeed, even after a lost race: the other process has
    made room. Raises `TooLarge` or `LimitReached` if there is still none in the end.
    """

    async def attempt() -> Appended | Lost:
        try:
            return await send()
        except (TooLarge, LimitReached) as error:
            if (isinstance(error, TooLarge) and error.what == "entry") or not await make_room():
                raise
        return Lost(None)

    return await contend(attempt) or await send()


async def append_and_fold(driver: Driver, key: Key, entry: bytes, body_of: BodyOf) -> Appended:
    """Append to a record that never expires; fold a long tail afterwards, and a full record before.

    Only logs a failure of the fold afterwards: a later append folds it.
    """

    async def make_room() -> bool:
        return await fold_tail(driver, key, body_of) is not None

    appended = await append_to_full(lambda: append(driver, key, entry, ttl=None), make_room)
    if appended.length % FOLD_AT == 0:
        try:
            await make_room()
        except StorageError as error:
            logger.warning("could not fold the entries of a record; a later write will: %s", error)
    return appended


# Replace


async def replace(
    driver: Driver,
    key: Key,
    change: Change,
    *,
    expect: str | AbsentType | AnyType,
    attempts: int = ATTEMPTS,
    repeatable: bool = True,
) -> bool:
    """Make a change if the record is what the caller expects; `False` after a lost race.

    `attempts` is as in `retried`: a retry with the same version returns whether the body is stored. After
    an unknown outcome, a lost race may also mean that the change was made and then replaced: that raises
    `OutcomeUnknown` unless making the change again is harmless, which `repeatable` says. Confirms nothing, so
    changes that drop entries go through `fold`.
    """

    async def write() -> bool:
        return await driver.replace(
            key,
            change.body,
            version=change.version,
            expect=expect,
            drop=change.drop,
            rewrite=change.rewrite,
            ttl=change.ttl,
        )

    return await (retried(write, attempts=attempts) if repeatable else settled(write, write))


async def update(
    driver: Driver,
    key: Key,
    decide: Decide[T],
    *,
    unchanged: Unchanged = _own_body,
    listing: AbstractAsyncContextManager[Creation] | None = None,
    repeatable: bool = True,
) -> T | None:
    """Change a record by a decision on what is stored; returns its result, `None` if all races were lost.

    `decide` is called with the record as it was loaded, `None` if there is none, and again after each lost
    race. `unchanged` is as in `fold`, and `repeatable` as in `replace`. `listing` keeps the owner listed
    around each write.
    """

    async def attempt() -> T | Lost:
        record = await driver.load(key)
        change, result = await decide(record)
        if change is None:
            return result
        if isinstance(change, Deletion):
            if record is None:
                return result
            done = await delete(driver, key, expect=record.version)
            return result if done else Lost(record.version)
        async with listing or _UNLISTED as owner:
            if owner is not None:
                owner.created = record is None
            if record is None:
                stored = await replace(driver, key, change, expect=ABSENT, repeatable=repeatable)
            else:
                stored = await fold(driver, key, record, change, unchanged=unchanged, repeatable=repeatable)
        return result if stored else Lost(record and record.version)

    return await contend(attempt)


# Fold


async def confirmed(
    driver: Driver, key: Key, record: Record, going: int, *, unchanged: Unchanged = _own_body
) -> str | None:
    """Return the version to replace once the oldest `going` entries are confirmed; `None` after a lost race.

    `unchanged` is as in `fold`. See `confirming.confirmed`.
    """

    async def put(body: bytes, version: str) -> bool:
        return await replace(driver, key, Change(body, version=version), expect=record.version, attempts=1)

    async def store(version: str) -> bool:
        return await put(await unchanged(record, version), version)

    return await confirming.confirmed(
        driver,
        record,
        going,
        store=store,
        store_least=None if record.body else partial(put, b""),
        load=lambda: driver.load(key),
    )


async def fold(
    driver: Driver,
    key: Key,
    record: Record,
    change: Change,
    *,
    unchanged: Unchanged = _own_body,
    repeatable: bool = True,
) -> bool:
    """Make a change to the record that was read, once the entries that go are confirmed; see `confirmed`.

    `False` after a lost race. `unchanged` returns the body that is stored to confirm them, by default the
    record's own; a record that has only entries has none.
    """
    version: str | None = record.version
    if change.going:
        version = await confirmed(driver, key, record, change.going, unchanged=unchanged)
    return version is not None and await replace(driver, key, change, expect=version, repeatable=repeatable)


async def fold_tail(driver: Driver, key: Key, body_of: BodyOf) -> bool | None:
    """Move the entries of a tail into the body, as many as one `replace` drops.

    `False` after a lost race, `None` if there are no entries. The others stay, so they must be harmless to a
    body that has them already.
    """
    record = await driver.load(key)
    if record is None or not record.tail:
        return None
    with located(driver.name, "fold"):
        body = body_of(record)
    change = Change(body, drop=min(len(record.tail), driver.traits.max_drop))
    return await fold(driver, key, record, change, unchanged=unchanged_by(body_of))


def unchanged_by(body_of: BodyOf) -> Unchanged:
    """Return a function that keeps the body of a record, or makes that of no entries if it has none."""

    async def unchanged(record: Record, version: str) -> bytes:
        del version
        return body_of(dataclasses.replace(record, tail=())) if record.body is None else record.body

    return unchanged


# Erase


async def erase(driver: Driver, key: Key) -> bool:
    """Remove a record and all of its parts, garbage included; returns whether the record existed.

    For a record without parts, this takes one `scan` more than a `delete`.
    """
    erased = await driver.delete(key)
    while await erase_parts(driver, key) and await erase_dangling(driver, key):
        erased = True
    return erased


async def erase_dangling(driver: Driver, key: Key) -> bool:
    """Remove a record that points to parts which no longer exist; returns whether it did."""
    try:
        await driver.load(key)
    except Corrupt:
        return await driver.delete(key)
    return False


async def erase_parts(driver: Driver, key: Key) -> int:
    """Remove all parts of a record; returns how many."""
    scope, prefix = keys.parts_of(key)
    erased = 0
    async for name in operations.names_of(driver, scope, prefix):
        erased += await driver.delete(Key(scope, name))
    return erased


async def delete(driver: Driver, key: Key, *, expect: str) -> bool:
    """Remove the record that was read; `False` after a lost race.

    After an unknown outcome, a record that is gone counts as removed; another raises `OutcomeUnknown`.
    """

    async def remove() -> bool:
        return await driver.delete(key, expect=expect)

    async def gone() -> bool:
        return await remove() or await driver.load(key) is None

    return await settled(remove, gone)
