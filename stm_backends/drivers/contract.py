"""The waist: a datastore driver is five atomic operations on records.

A **record** is a *body*, replaced as a whole and only on a condition, and a *tail* of entries that
writers append to without ever conflicting. A conversation keeps its summary in the body and its turns
in the tail; a saved state is a body alone; a lease is a body with a time to live.

Everything this library does is built on `load`, `append`, `replace`, `delete` and `scan`. There are no
optional operations: what differs between datastores is stated as facts in `Driver.traits`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable


class Key(NamedTuple):
    """Where a record lives. `scope` says whose it is, `name` which one of theirs.

    Both are non-empty text without NUL and without lone surrogates, at most `MAX_KEY_BYTES` bytes of
    UTF-8 each (`keys.py` sees to that). Beyond it they are arbitrary: a driver joins the two injectively
    and never lets them act as a pattern, a path or a statement.
    """

    scope: str
    name: str


MAX_KEY_BYTES: Final = 1_000

DEFAULT_DEADLINE_S: Final = 5.0
"""How long one operation may take unless a driver's `deadline_s` setting says otherwise."""


@dataclass(frozen=True, slots=True)
class Record:
    """One strongly consistent snapshot of a record.

    `body` is `None` when the record was created by `append` and never replaced since. `tail` holds the
    entries that no `replace` has dropped yet, oldest first.
    """

    version: str
    body: bytes | None
    tail: tuple[bytes, ...]


class Page(NamedTuple):
    """Some names of one scope in the order of their UTF-8 bytes.

    `after` is passed to the next `scan`; only `after=None` says that there are no more. A page may be
    empty and still not be the last.
    """

    names: tuple[str, ...]
    after: str | None


class Expect(Enum):
    """The two conditions of a `replace` that are not a version."""

    ABSENT = "absent"
    ANY = "any"


class Ttl(Enum):
    """The one time to live of a `replace` that is not a number of seconds or `None`."""

    KEEP = "keep"


AbsentType: TypeAlias = Literal[Expect.ABSENT]
AnyType: TypeAlias = Literal[Expect.ANY]
KeepType: TypeAlias = Literal[Ttl.KEEP]

ABSENT: Final = Expect.ABSENT
ANY: Final = Expect.ANY
KEEP: Final = Ttl.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about a driver that its users may need; nothing in the core branches on a driver's type.

    `reach` is how far apart two users of the same data may be. `clock` names whose clock judges expiry.
    Sizes are bytes. `durability` is one sentence: what survives once acknowledged. `min_ttl` and
    `deadline` are seconds: the shortest time to live that is honoured, and how long one operation may take.
    """

    reach: Literal["process", "host", "network"]
    clock: Literal["process", "host", "server", "client"]
    durability: str
    max_entry: int
    max_record: int
    max_drop: int
    min_ttl: float = 0.001
    deadline: float = DEFAULT_DEADLINE_S


def new_version() -> str:
    """Mint a version that was never used before and never will be.

    Versions are tokens, not counters: a counter that starts again after a record has expired would let
    a writer that slept through the expiry mistake the new record for the old one.
    """
    return secrets.token_hex(12)


@runtime_checkable
class Driver(Protocol):
    """Five operations, each atomic and each one round trip.

    Expired means absent, in every operation, at once, judged at one instant per operation. A time to
    live is seconds from now; `None` is for ever. Every operation ends within the driver's deadline.
    An outage is an error (`Unavailable`, `OutcomeUnknown`), never an empty answer. Cancelling a call
    leaves the record as it was before or as it is after; a write that was sent already may still be done
    a moment later.
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
        """Make ready: connect what must be connected. Opening twice is harmless."""
        ...

    async def close(self) -> None:
        """Let go of what this driver made itself; a client handed in stays open. Twice is harmless."""
        ...

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, or `None` only if it is not there."""
        ...

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; never conflicts, never rewrites, never reorders.

        Returns the new length of the tail. If append A was acknowledged before append B began, A stands
        before B. It does not change `version`; a record that this append creates gets the version
        `initial_version`. The time to live starts anew. Raises `TooLarge` before anything is written.
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
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body and its version if the record is what the caller expects; the conditional write.

        - `expect=ANY`: whatever is there is replaced and its tail emptied; `drop` is 0.
        - `expect=ABSENT`: only if there is no record; `drop` is 0.
        - `expect="<version>"`: only if the record carries that version and has at least `drop` entries;
          exactly the `drop` oldest are removed, and entries appended since stay.

        Returns whether the record now carries `version` through this write. `False` is a lost race and
        changed nothing. A record that already carries `version` answers `True` and is not changed, so
        that sending the same write twice is harmless. `ttl=KEEP` leaves the time to live alone (on a
        record that was not there: for ever).
        """
        ...

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did."""
        ...

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes.

        A name that is there throughout a whole listing appears in it exactly once.
        """
        ...
