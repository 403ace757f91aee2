"""A process that goes on with layout 1 of the SQLite file, as a program: `python sqlite_layout_1.py PATH`.

The statements are those that the first version of the driver sent, and stay as they are. Each line of the
input is a command with its arguments, as JSON; each is answered by a line of JSON.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from typing import Any, Final

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS stm_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO stm_meta VALUES ('schema', 1);
CREATE TABLE IF NOT EXISTS stm_record (
    id      INTEGER PRIMARY KEY,
    scope   TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    version TEXT    NOT NULL,
    expires REAL,
    first   INTEGER NOT NULL,
    next    INTEGER NOT NULL,
    size    INTEGER NOT NULL,
    UNIQUE (scope, name)
);
CREATE INDEX IF NOT EXISTS stm_record_expires ON stm_record (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS stm_entry (
    record  INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    entry   BLOB    NOT NULL,
    PRIMARY KEY (record, seq)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS stm_record_deleted AFTER DELETE ON stm_record
BEGIN
    DELETE FROM stm_entry WHERE record = old.id;
END;
"""

GROW: Final = """
    UPDATE stm_record SET expires = ?, next = next + 1, size = size + ?
    WHERE scope = ? AND name = ? AND (expires IS NULL OR expires > ?) AND size + ? <= ?
    RETURNING id, next - 1, next - first"""
CREATE: Final = """
    INSERT INTO stm_record (scope, name, version, expires, first, next, size) VALUES (?, ?, ?, ?, 1, ?, ?)"""
ENTER: Final = "INSERT INTO stm_entry (record, seq, entry) VALUES (?, ?, ?)"
REPLACE: Final = "UPDATE stm_record SET version = ?, expires = ?, first = ?, size = ? WHERE id = ?"
DELETE_BEFORE: Final = "DELETE FROM stm_entry WHERE record = ? AND seq < ?"
FIND: Final = "SELECT id, version, expires, first, next, size FROM stm_record WHERE scope = ? AND name = ?"
LOAD: Final = """
    SELECT version, next - first, size, seq, entry
    FROM stm_record LEFT JOIN stm_entry ON record = id
    WHERE scope = ? AND name = ? AND (expires IS NULL OR expires > ?)
    ORDER BY seq"""
PURGE: Final = """
    DELETE FROM stm_record
    WHERE id IN (SELECT id FROM stm_record WHERE expires <= ? ORDER BY expires LIMIT ?)"""
LARGEST: Final = 64 * 1024 * 1024


class Process:
    """A connection as the first version of the driver had it."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, timeout=30, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.executescript(SCHEMA)

    def append(self, scope: str, name: str, entry: str, now: float, ttl: float | None) -> int:
        """Add an entry, to a new record if there is none; returns the length of the tail."""
        expires, size = None if ttl is None else now + ttl, len(entry)
        grow = (expires, size, scope, name, now, size, LARGEST)
        grown = self.connection.execute(GROW, grow).fetchone()
        if grown is None:
            new = self.connection.execute(CREATE, (scope, name, "v", expires, 2, size)).lastrowid
            grown = new, 1, 1
        self.connection.execute(ENTER, (*grown[:2], entry.encode()))
        return int(grown[2])

    def fold(self, scope: str, name: str, body: str, drop: int, now: float) -> bool:
        """Replace the body and drop entries; the records of the tests have no body before."""
        record, _, expires, first, _, size = self.connection.execute(FIND, (scope, name)).fetchone()
        first, size = first + drop, size - drop + len(body)
        self.connection.execute(DELETE_BEFORE, (record, first))
        self.connection.execute(ENTER, (record, 0, body.encode()))
        self.connection.execute(REPLACE, ("w", expires, first, size, record))
        return True

    def load(self, scope: str, name: str, now: float) -> list[str]:
        """Return body and entries."""
        rows = self.connection.execute(LOAD, (scope, name, now)).fetchall()
        return [entry.decode() for *_, entry in rows]

    def purge(self, now: float) -> int:
        """Remove what has expired."""
        return self.connection.execute(PURGE, (now, 1000)).rowcount

    def layout(self) -> int:
        """Return what a process of layout 1 that opens the file now looks at; it refuses more than 1."""
        return int(self.connection.execute("SELECT value FROM stm_meta WHERE name = 'schema'").fetchone()[0])

    def answer(self, command: str, *arguments: Any) -> Any:
        """Do in one transaction what a line of the input says."""
        self.connection.execute("BEGIN IMMEDIATE")
        answer = getattr(self, command)(*arguments)
        self.connection.execute("COMMIT")
        return answer


if __name__ == "__main__":
    process = Process(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(process.answer(*json.loads(line))), flush=True)  # noqa: T201 -- read by the test
