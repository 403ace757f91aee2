"""The meaning of each of SQLite's result codes for a caller."""

from __future__ import annotations

import sqlite3
from typing import Final

from stm_backends.drivers.sqlite.jobs import LockedOut, NotBegun, NotEnded, primary_code
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, StorageError, Unavailable

LOCKED: Final = "the database is locked by another process"
_CANNOT_OPEN: Final = (
    "the database file cannot be opened; its directory must exist, and this process must have "
    "permission to write there"
)
_NO_DATABASE: Final = "the file is not an SQLite database; it was not changed"
_DAMAGED: Final = "the database file is damaged; restore it, or save what `sqlite3 FILE .recover` can read"
_READ_ONLY: Final = "the database file is read-only, for this process or for all"
_ALTERED: Final = "the tables of this library were changed or removed by another program"

_ERRORS: Final[dict[int, tuple[type[StorageError], str]]] = {
    sqlite3.SQLITE_FULL: (Unavailable, "the disk is full; nothing was written"),
    sqlite3.SQLITE_CANTOPEN: (Unavailable, _CANNOT_OPEN),
    sqlite3.SQLITE_INTERRUPT: (Unavailable, "interrupted at the deadline and rolled back"),
    sqlite3.SQLITE_NOMEM: (Unavailable, "SQLite ran out of memory"),
    sqlite3.SQLITE_NOTADB: (Corrupt, _NO_DATABASE),
    sqlite3.SQLITE_CORRUPT: (Corrupt, _DAMAGED),
    sqlite3.SQLITE_ERROR: (Corrupt, _ALTERED),
    sqlite3.SQLITE_CONSTRAINT: (Corrupt, _ALTERED),
    sqlite3.SQLITE_MISMATCH: (Corrupt, _ALTERED),
    sqlite3.SQLITE_READONLY: (Denied, _READ_ONLY),
    sqlite3.SQLITE_PERM: (Denied, _READ_ONLY),
    sqlite3.SQLITE_AUTH: (Denied, _READ_ONLY),
    sqlite3.SQLITE_IOERR: (OutcomeUnknown, "the disk or file system reported an error"),
}

_READS: Final = frozenset({"open", "load", "scan"})
"""Operations that change nothing, so an unknown outcome is the same as a failure."""


def translate(error: sqlite3.Error | NotBegun | NotEnded, operation: str) -> StorageError:
    """Return this library's error for a failed operation; its message never quotes data."""
    if isinstance(error, sqlite3.Error):
        kind, message = _ERRORS.get(
            primary_code(error), (OutcomeUnknown, f"unexpected {type(error).__name__} from SQLite")
        )
    elif isinstance(error, LockedOut):
        kind, message = Unavailable, LOCKED
    elif isinstance(error, NotBegun):
        kind, message = Unavailable, "not started before the deadline, or before the driver was closed"
    else:
        kind, message = OutcomeUnknown, "still running after it was interrupted at the deadline"
    if kind is OutcomeUnknown and operation in _READS:
        kind = Unavailable
    return kind(message)
