"""The removal of expired records from the file, in short transactions bounded by entries and bytes.

No operation sees an expired record; this only frees its space. A record too large for one step is buried
first: it gets a name that no key can have, its entries are removed step by step, and its row is removed last.
If the process ends in between, the next purge continues.
"""

from __future__ import annotations

import random
import sqlite3
from typing import Final, NamedTuple

from stm_backends.drivers.sqlite import statements

STEP_ENTRIES: Final = 1_000
STEP_BYTES: Final = 1024 * 1024
STEP_RECORDS: Final = 64
"""The most that one transaction removes. A single larger entry is removed at once."""

_CHANCE: Final = 1 / 8


class Step(NamedTuple):
    """The number of removed records, and whether more have expired."""

    gone: int
    more: bool


def steps_after(size: int, *, writes: int = 1) -> int:
    """Return a random number of steps to follow this many writes of `size` bytes in all.

    On average they remove more records, entries and bytes than are written. A counter would have to be
    stored, and short-lived processes would never reach it.
    """
    return int(writes * _CHANCE + size / STEP_BYTES + random.random())


def fits_a_step(first: int, end: int, size: int) -> bool:
    """Return whether a record with this many entries and bytes can be removed at once."""
    return end - first < STEP_ENTRIES and size <= STEP_BYTES


def remove(connection: sqlite3.Connection, record: int, first: int, end: int, size: int) -> None:
    """Remove a record from view within a write transaction; many entries are removed later."""
    if fits_a_step(first, end, size):
        connection.execute(statements.DELETE, (record,))
    else:
        connection.execute(statements.BURY, (first, size, record))


def step(connection: sqlite3.Connection, now: float, limit: int) -> Step:
    """Remove expired records, at most `limit`, or a part of one, within a write transaction."""
    found = connection.execute(statements.EXPIRED, (now, limit)).fetchall()
    entries = size = 0
    for gone, (record, first, end, bytes_) in enumerate(found):
        entries, size = entries + end - first, size + bytes_
        if not fits_a_step(0, entries, size):
            return Step(gone or _shorten(connection, record, first, bytes_), more=True)
        connection.execute(statements.DELETE, (record,))
    return Step(len(found), more=len(found) == limit)


def _shorten(connection: sqlite3.Connection, record: int, first: int, size: int) -> int:
    """Bury a record and remove its oldest entries, or its row if no entry is left; returns how many rows."""
    removed, place = 0, None
    # SQLite returns the length of an entry without reading it.
    for seq, length in connection.execute(statements.OLDEST, (record, STEP_ENTRIES)).fetchall():
        removed, place = removed + length, seq
        if removed >= STEP_BYTES:
            break
    if place is None:
        connection.execute(statements.DELETE, (record,))
        return 1
    connection.execute(statements.DELETE_BEFORE, (record, place + 1))
    connection.execute(statements.BURY, (max(first, place + 1), size - removed, record))
    return 0
