"""The SQL of the SQLite driver, and why each operation is atomic.

A read is one statement, and one statement reads one snapshot. A write is several statements between
BEGIN and COMMIT: BEGIN takes the write lock before FIND reads, so that nothing, in this process or
another, is written between what a transaction reads and what it writes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import textwrap
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final

from stm_backends.drivers.layouts import Layout, is_outdated
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.errors import ConfigurationError

LAYOUT: Final = Layout(version=2, readable_since=1)

OLDEST_SQLITE: Final = (3, 35, 0)
"""The first SQLite that supports RETURNING (2021)."""

# The body is the row with seq 0, the tail are the rows from 1. An append writes one small row of stm_record
# and one of stm_entry, independent of the size of the record. In a table WITHOUT ROWID, as older versions of
# this library made it, an entry of more than some 1,000 bytes takes a separate page; see decision 0062.
_ENTRIES: Final = """CREATE TABLE IF NOT EXISTS stm_entry (
            record  INTEGER NOT NULL,
            seq     INTEGER NOT NULL,
            entry   BLOB    NOT NULL,
            PRIMARY KEY (record, seq)
        )"""
_DELETE_ENTRIES: Final = """CREATE TRIGGER IF NOT EXISTS stm_record_deleted AFTER DELETE ON stm_record
        BEGIN
            DELETE FROM stm_entry WHERE record = old.id;
        END"""

STEPS: Final[dict[int, tuple[str, ...]]] = {
    1: (
        # Code of layout 1 reads only this row, and uses the file while it says 1. So a step that raises
        # `readable_since` raises this row as well.
        "CREATE TABLE IF NOT EXISTS stm_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
        "INSERT OR IGNORE INTO stm_meta VALUES ('schema', 1)",
        # `first` and `next` bound the sequence numbers of the tail, `size` is the bytes of body and tail. The
        # default collation compares the bytes of UTF-8, which is the order that `scan` promises.
        """CREATE TABLE IF NOT EXISTS stm_record (
            id      INTEGER PRIMARY KEY,
            scope   TEXT    NOT NULL,
            name    TEXT    NOT NULL,
            version TEXT    NOT NULL,
            expires REAL,
            first   INTEGER NOT NULL,
            next    INTEGER NOT NULL,
            size    INTEGER NOT NULL,
            UNIQUE (scope, name)
        )""",
        "CREATE INDEX IF NOT EXISTS stm_record_expires ON stm_record (expires) WHERE expires IS NOT NULL",
        _ENTRIES,
        _DELETE_ENTRIES,
    ),
    # When the time to live was set, to detect a clock that was set back. Code of layout 1 names the columns
    # that it writes, and does not change this one.
    2: ("ALTER TABLE stm_record ADD COLUMN written REAL",),
}
"""The migration to each layout from the one before; a new file takes all of these steps."""

_SET_META: Final = "INSERT OR REPLACE INTO stm_meta VALUES ('version', {}), ('readable_since', {})"

_HAS_ROWIDS: Final = """
    SELECT sql NOT LIKE '%WITHOUT ROWID%' FROM sqlite_master WHERE type = 'table' AND name = 'stm_entry'"""
# The entries of a record next to each other, as a table without rowids had them.
CONVERT: Final = (
    "DROP TRIGGER IF EXISTS stm_record_deleted",
    "ALTER TABLE stm_entry RENAME TO stm_entry_before",
    _ENTRIES,
    "INSERT INTO stm_entry SELECT record, seq, entry FROM stm_entry_before ORDER BY record, seq",
    "DROP TABLE stm_entry_before",
    _DELETE_ENTRIES,
)

# Readers and the writer do not wait for each other; the file stores this mode.
JOURNAL: Final = "PRAGMA journal_mode = WAL"

# Overwrites what is deleted with zeros, in used and in free pages. The default of a build may be off.
SECURE_DELETE: Final = "PRAGMA secure_delete = ON"
# The first write after all of the log was copied into the file starts the log again. By default, the rest of
# the old log stays behind that write; this cuts it off, whichever process writes.
LOG_LIMIT: Final = "PRAGMA journal_size_limit = 0"
CUT_LOG: Final = "PRAGMA wal_checkpoint(TRUNCATE)"

BEGIN: Final = "BEGIN IMMEDIATE"
COMMIT: Final = "COMMIT"
ROLLBACK: Final = "ROLLBACK"

# Returns neither the body nor an entry of a record with more bytes than the first parameter.
LOAD: Final = """
    SELECT version, next - first, size, seq, entry
    FROM stm_record LEFT JOIN stm_entry ON record = id AND size <= ?
    WHERE scope = ? AND name = ? AND (expires IS NULL OR expires > ?)
    ORDER BY seq"""

# The same for only the newest entries; the size is that of these and of the body. The body is in the first
# row, as NULL if there is none. The parameters: the number of entries, the most bytes, and the others.
LOAD_LAST: Final = """
    WITH found AS (
        SELECT id, version, next - first AS length, max(first, next - ?) AS start, ? AS most
        FROM stm_record WHERE scope = ? AND name = ? AND (expires IS NULL OR expires > ?)
    ), wanted AS (
        SELECT *, CAST(
            (SELECT total(length(entry)) FROM stm_entry WHERE record = id AND seq = 0)
            + (SELECT total(length(entry)) FROM stm_entry WHERE record = id AND seq >= start) AS INTEGER
        ) AS size FROM found
    )
    SELECT version, length, size, 0 AS seq,
        (SELECT entry FROM stm_entry WHERE record = id AND seq = 0 AND size <= most) AS entry
    FROM wanted
    UNION ALL
    SELECT version, length, size, stm_entry.seq, stm_entry.entry
    FROM wanted JOIN stm_entry ON record = id AND stm_entry.seq >= start AND size <= most
    ORDER BY 4"""

SCAN: Final = """
    SELECT name FROM stm_record
    WHERE scope = ? AND name > ? AND (expires IS NULL OR expires > ?)
    ORDER BY name LIMIT ?"""

# One search in the index of the keys.
NEXT_SCOPE: Final = "SELECT scope FROM stm_record WHERE scope > ? ORDER BY scope LIMIT 1"

SCAN_EXPIRED: Final = """
    SELECT name FROM stm_record
    WHERE scope = ? AND name > ? AND expires <= ?
    ORDER BY name LIMIT ?"""

FIND: Final = """
    SELECT id, version, expires, written, first, next, size FROM stm_record WHERE scope = ? AND name = ?"""
DELETE: Final = "DELETE FROM stm_record WHERE id = ?"
CREATE: Final = """
    INSERT INTO stm_record (scope, name, version, expires, written, first, next, size)
    VALUES (?, ?, ?, ?, ?, 1, ?, ?)"""
# Finds the record, checks that it has not expired and has room, and moves its end, in one statement. If it
# returns no row, FIND and CREATE follow.
GROW: Final = """
    UPDATE stm_record SET expires = ?, written = ?, next = next + 1, size = size + ?
    WHERE scope = ? AND name = ? AND (expires IS NULL OR expires > ?) AND size + ? <= ?
    RETURNING id, next - 1, next - first"""
REPLACE: Final = """
    UPDATE stm_record SET version = ?, expires = ?, written = ?, first = ?, size = ? WHERE id = ?"""
RESTART: Final = "UPDATE stm_record SET expires = ?, written = ? WHERE id = ?"
# The body has seq 0, so what precedes the new `first` is the old body and the dropped entries.
MEASURE_BEFORE: Final = "SELECT total(length(entry)) FROM stm_entry WHERE record = ? AND seq < ?"
DELETE_BEFORE: Final = "DELETE FROM stm_entry WHERE record = ? AND seq < ?"
ENTER: Final = "INSERT INTO stm_entry (record, seq, entry) VALUES (?, ?, ?)"

EXPIRED: Final = """
    SELECT id, first, next, size FROM stm_record WHERE expires <= ? ORDER BY expires LIMIT ?"""
COUNT_EXPIRED: Final = "SELECT count(*) FROM stm_record WHERE expires <= ?"
OLDEST: Final = "SELECT seq, length(entry) FROM stm_entry WHERE record = ? ORDER BY seq LIMIT ?"
# No key has an empty scope, so no operation can see the record again, even if the clock is set back. Its id
# is a unique name.
BURY: Final = """
    UPDATE stm_record SET scope = '', name = id, expires = 0, first = ?, size = ? WHERE id = ?"""
BURIED_UNTIL: Final = 0.0
"""A time by which only buried records have expired."""


def script() -> str:
    """Return the work of `prepare` on a new file, as SQL for `sqlite3`."""
    statements = (BEGIN, *_steps_from(0), COMMIT)
    return "".join(f"{textwrap.dedent(' ' * 8 + each)};\n" for each in (JOURNAL, *statements))


def prepare(connection: sqlite3.Connection, settings: SqliteSettings) -> None:
    """Set up the connection, and the tables if they are missing. Safe in many processes at once."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise ConfigurationError(
            f"SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer is needed; "
            f"this Python comes with {sqlite3.sqlite_version}"
        )
    outdated = is_outdated(_layout(connection), LAYOUT)
    (encoding,) = connection.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        raise ConfigurationError(
            f"the database must store text as UTF-8, not {encoding}: names would sort differently"
        )
    connection.execute(f"PRAGMA synchronous = {settings.synchronous}")
    connection.execute(JOURNAL)
    connection.execute(SECURE_DELETE)
    connection.execute(LOG_LIMIT)
    if outdated:
        with transaction(connection):
            # Read again, because another process may have migrated the file in between.
            for statement in _steps_from(_layout(connection).version):
                connection.execute(statement)


def compact(connection: sqlite3.Connection) -> None:
    """Store the entries in the table of a new file, if they are in one of an older version; free the space.

    One transaction converts the table; older versions of this library use the new one, too. Freeing the space
    waits for no other connection: it raises SQLite's error if one is in the way.
    """
    with transaction(connection):
        (has_rowids,) = connection.execute(_HAS_ROWIDS).fetchone()
        for statement in () if has_rowids else CONVERT:
            connection.execute(statement)
    connection.execute("VACUUM")


def cut_log(connection: sqlite3.Connection) -> bool:
    """Copy all of the write-ahead log into the file, and cut the log; `False` if a reader needs it."""
    (busy, *_) = connection.execute(CUT_LOG).fetchone()
    return not busy


def leave_log(connection: sqlite3.Connection, *, is_lost: bool) -> None:
    """Let the connection close without copying its write-ahead log into the file, or removing a log.

    `is_lost` is true if no path leads to its log any longer, because another file has that path.
    """
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
        return
    if is_lost:
        # With nothing to copy, closing would remove the file at that path. This goes into the lost log.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA user_version = 0")
    # An interrupted checkpoint ends before it copies a page, and SQLite then keeps the log.
    connection.interrupt()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Hold the write lock from the beginning to the end, and commit unless the block raises."""
    connection.execute(BEGIN)
    try:
        yield
        connection.execute(COMMIT)
    except BaseException:
        # SQLite rolls back by itself after some errors, such as a full disk.
        if connection.in_transaction:
            connection.execute(ROLLBACK)
        raise


def _layout(connection: sqlite3.Connection) -> Layout:
    """Return the layout of the tables; 0 if there are none."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'stm_meta'").fetchone():
        return Layout(0, 0)
    found = dict(connection.execute("SELECT name, value FROM stm_meta").fetchall())
    first = found.get("schema", 0)
    return Layout(found.get("version", first), max(first, found.get("readable_since", first)))


def _steps_from(version: int) -> Iterator[str]:
    """Yield the statements that migrate an older layout to the current one."""
    if version < LAYOUT.version:
        for step in range(version + 1, LAYOUT.version + 1):
            yield from STEPS[step]
        yield _SET_META.format(*LAYOUT)
