"""The driver contract: five atomic operations on records.

A **record** is a *body*, replaced as a whole and only on a condition, and a *tail* of entries that
writers append to without ever conflicting. A conversation keeps its summary in the body and its turns
in the tail; a saved state is only a body; a paused run is a body with a time to live.

Everything else in this library is built on `load`, `append`, `replace`, `delete` and `scan`. There are no
optional operations: `Driver.traits` states what differs between datastores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable


class Key(NamedTuple):
    """The key of a record: `scope` identifies its owner, `name` the record within the scope.

    Both are non-empty text without NUL and without lone surrogates, at most `MAX_KEY_BYTES` bytes of
    UTF-8 each (`records/keys.py` checks this). Otherwise they are arbitrary: a driver joins the two
    injectively and never lets them act as a pattern, a path or a statement.
    """

    scope: str
    name: str


CONTRACT: Final = 1
"""The version of this contract. It rises with each new obligation of drivers; a plugin states the version
that its driver was written for."""

MAX_KEY_BYTES: Final = 1_000

DEFAULT_DEADLINE_S: Final = 5.0
"""Seconds that one operation may take, unless a driver's `deadline_s` setting says otherwise."""

NO_LIMIT: Final = sys.maxsize
"""The `max_drop` of a driver without a limit."""


@dataclass(frozen=True, slots=True)
class Record:
    """One strongly consistent snapshot of a record.

    `version` is ASCII text of at most 64 characters, which is compared for equality only. `body` is `None` if
    `append` created the record and no `replace` has changed it since. `tail` holds the entries that no
    `replace` has dropped, oldest first. If only the newest of them were asked for, `skipped` is the number of
    older entries, which stand before these.
    """

    version: str
    body: bytes | None
    tail: tuple[bytes, ...]
    skipped: int = 0

    @property
    def length(self) -> int:
        """The number of all entries: those of `tail`, and those that were skipped."""
        return self.skipped + len(self.tail)

    def newest(self, last: int | None) -> Record:
        """Return the record as a load with `last` returns it, for drivers that read all entries anyway."""
        skipped = 0 if last is None else max(0, len(self.tail) - last)
        return replace(self, tail=self.tail[skipped:], skipped=self.skipped + skipped) if skipped else self


class Page(NamedTuple):
    """Names of one scope, in the order of their UTF-8 bytes.

    Pass `after` to the next `scan`; only `after=None` marks the last page. A page that is not the last may be
    empty.
    """

    names: tuple[str, ...]
    after: str | None


class Expect(Enum):
    """Conditions of a `replace` other than a version."""

    ABSENT = "absent"
    ANY = "any"


class Ttl(Enum):
    """The time to live of a `replace` that is neither a number of seconds nor `None`."""

    KEEP = "keep"


AbsentType: TypeAlias = Literal[Expect.ABSENT]
AnyType: TypeAlias = Literal[Expect.ANY]
KeepType: TypeAlias = Literal[Ttl.KEEP]

ABSENT: Final = Expect.ABSENT
ANY: Final = Expect.ANY
KEEP: Final = Ttl.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about a driver; nothing in the core branches on a driver's type.

    `reach` is how far apart two users of the same data may be. `clock` names whose clock decides expiry.
    `durability` is one sentence: what an acknowledged write survives. `max_entry` and `max_record` are bytes;
    `overhead` is the maximum number of bytes of `max_record` that a value takes in addition to its own. A
    value of more than `max_inline` bytes is kept outside the record, and takes `reference` bytes of it
    instead. `max_drop` is the number of entries that one `replace` may drop or rewrite. `min_ttl` and
    `deadline` are seconds: the shortest time to live that is honoured, and the time limit of one operation.
    `shows_unconfirmed` is true if a `load` may return data that is not yet as durable as an acknowledged
    write: a write whose outcome was unknown may be seen, and be lost with its server.
    """

    reach: Literal["process", "host", "network"]
    clock: Literal["process", "host", "server", "client"]
    durability: str
    max_entry: int
    max_record: int
    max_drop: int
    overhead: int = 0
    max_inline: int = NO_LIMIT
    reference: int = 0
    min_ttl: float = 0.001
    deadline: float = DEFAULT_DEADLINE_S
    shows_unconfirmed: bool = False

    def room(self, size: int) -> int:
        """Return how many bytes of `max_record` a value of `size` bytes takes, at most."""
        return (size if size <= self.max_inline else self.reference) + self.overhead


def new_version() -> str:
    """Return a new, globally unique version of 24 hexadecimal digits.

    Versions are tokens, not counters. A counter would start again after a record has expired, and a writer
    that still holds an old version could mistake the new record for the old one.
    """
    return os.urandom(12).hex()


def version_after(version: str) -> str:
    """Return a new version for a record whose meaning is unchanged; its `first_of` stays the same."""
    return new_version() + first_of(version)


def first_of(version: str) -> str:
    """Return the version with which a record began, if all later ones come from `version_after`."""
    return version[-_VERSION_CHARACTERS:]


_VERSION_CHARACTERS: Final = 24


@runtime_checkable
class Driver(Protocol):
    """Five operations, each atomic, and each one round trip where the datastore allows it.

    An operation may read and decide in Python within one transaction that has locked the record, or commit on
    the condition that nothing has changed since it read; it never otherwise writes back what it has read.

    An expired record is absent in every operation, at once; each operation decides expiry at one point in
    time. A time to live is seconds from now; `None` means that the record never expires. Every operation ends
    within the driver's deadline. An outage is an error (`Unavailable`, `OutcomeUnknown`), never an empty
    answer. A damaged record raises `Corrupt`, and two operations end that. `delete` with `expect=ANY` removes
    it. `replace` with `expect=ANY` may overwrite it whole, or raise `Corrupt`. Nothing else may make it
    readable. Cancelling a call leaves the record as it was before or as it is after; a write that was already
    sent may still be done a moment later.

    An open driver belongs to its process and its event loop. In another event loop, `open` and every
    operation raise `ConfigurationError`, and nothing is sent; so they do in a forked process, where `close`
    does nothing. Once the event loop has ended, `open` in the next one works without waiting for it.
    """

    @property
    def name(self) -> str:
        """The backend's name, as errors and reports show it."""
        ...

    @property
    def traits(self) -> Traits:
        """The facts that differ from one datastore to the next."""
        ...

    async def open(self) -> None:
        """Connect and get ready for operations. Opening twice is harmless."""
        ...

    async def close(self) -> None:
        """Close what this driver created; a client that was handed in stays open. Twice is harmless.

        Running calls end within one deadline: each completes, or raises an error that is true. None continues
        after `close` has returned.
        """
        ...

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist.

        With `last`, the tail has the newest `last` entries at most, in their order, and `skipped` counts the
        older ones; 0 means only the body. It is one snapshot, too, and costs what it returns rather than
        what is stored, as far as the datastore allows. Raises `ValueError` for a negative number.
        """
        ...

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; never conflicts, never rewrites, never reorders.

        Returns the new length of the tail. If append A was acknowledged before append B began, A precedes B.
        The version does not change; a record that this append creates gets the version `initial_version`. The
        time to live is reset to `ttl`. Raises `TooLarge` before anything is written.
        """
        ...

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
        """Store a body and its version if the record is what the caller expects; the conditional write.

        - `expect=ANY`: in any case; the tail is emptied, and `drop` is 0.
        - `expect=ABSENT`: only if no record exists; `drop` is 0.
        - `expect="<version>"`: only if the record carries that version and has at least `drop` entries;
          exactly the `drop` oldest are removed, and entries appended since stay. Instead of `drop`,
          `rewrite` may give entries that take the place of as many of the oldest, one for one. The record
          must have at least as many entries; their number and order stay as they are.

        Returns whether the record now carries `version` through this write. `False` is a lost race and
        changed nothing. For a record that already carries `version`, the answer is `True` and nothing
        changes, so a retry of the same write is harmless. `ttl=KEEP` keeps the time to live (a record that
        did not exist never expires). Raises `TooLarge` before anything is written.
        """
        ...

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`; returns whether it did."""
        ...

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes.

        A name that exists throughout a whole listing appears in it exactly once.
        """
        ...
