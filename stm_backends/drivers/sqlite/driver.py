"""The SQLite driver: one file, shared by the processes of one host, without a server.

The file may be the application's own database. The driver uses only tables whose names begin with `stm_`. It
sets the journal mode to WAL, so that readers and the writer do not wait for each other.

Every operation runs in the thread that owns the connection. Appends and replaces that are queued at the same
time share a transaction, and so a commit; each is answered after it. They wait for the write lock together
while another process holds it, and reads go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from stm_backends.drivers.checks import (
    checked_clock,
    not_open,
    require_append,
    require_fits,
    require_last,
    require_limit,
    require_replace,
    skipped_of,
)
from stm_backends.drivers.coalesced import LARGE_BYTES, LargeKeys
from stm_backends.drivers.compacts import Compacted
from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    KEEP,
    NO_LIMIT,
    AbsentType,
    AnyType,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import Home
from stm_backends.drivers.sqlite import files, purging, statements
from stm_backends.drivers.sqlite.errors import LOCKED, translate
from stm_backends.drivers.sqlite.jobs import Kind, NotBegun, NotEnded, is_busy, pause
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.drivers.sqlite.thread import ConnectionThread
from stm_backends.errors import Corrupt, StorageError, Unavailable, located

T = TypeVar("T")

_CUT: Final = Remains(
    "SQLite: deleted data is overwritten in the file, and the write-ahead log was cut. Backups, "
    "snapshots of the file system and the disk's own copies are not reached."
)
_NOT_CUT: Final = (
    "SQLite: the write-ahead log was not cut ({}). The log and the file may contain deleted data until "
    "the log is cut: after a later write, or when the last process closes the file. Erase again to repeat "
    "it."
)

_COMPACTING_S: Final = 86_400.0
"""Seconds that compacting may wait for other connections, and work."""

_ALL: Final = 2**31
"""More entries than a record has."""

_MAX_PAGE: Final = 10_000
"""A larger page would keep the thread from other operations for too long."""


class _Found(NamedTuple):
    """A row of stm_record."""

    id: int
    version: str
    expires: float | None
    written: float | None
    first: int
    next: int
    size: int


class SqliteDriver:
    """The five operations on a database file. Each instance has its own connection and thread.

    `clock` is the host's, in seconds since the epoch, and must be the same for all processes that share the
    file. If it is set back, the next write that finds a record resets the record's time to live: a lease
    lasts at most twice as long, and nothing expires early.
    """

    name = "sqlite"

    def __init__(self, settings: SqliteSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        # SQLite does not take an absolute path for a `file:` URI, and a change of the working directory does
        # not affect it.
        self._path = Path(settings.path).absolute()
        self._clock = checked_clock(clock)
        self._files = files.OpenFiles(self._path)
        self._thread: ConnectionThread | None = None
        # The second thread begins with the first load of a large record; other operations wait for none.
        self._large_thread: ConnectionThread | None = None
        self._large = LargeKeys()
        self._home = Home(self._start_over)
        # Set from the event loop and from the thread; either may only be late.
        self._log_is_due = False
        self.traits = Traits(
            reach="host",
            clock="host",
            durability=(
                "survives the death of any process, and a power cut"
                if settings.synchronous == "full"
                else "survives the death of any process; a power cut may lose the last transactions"
            ),
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=NO_LIMIT,
            deadline=settings.deadline_s,
        )

    async def open(self) -> None:
        """Open the file; create it and the tables if they are missing. Opening twice is harmless."""
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        """Wait for operations in progress, close the connection and end the thread. Twice is harmless.

        Waits at most one deadline and two seconds. If SQLite hangs, as on a network file system that does not
        answer, the thread closes the connection and ends when it can.
        """
        await self._home.close(self._end)

    async def _begin(self) -> None:
        if self._thread is not None:
            return
        self._files = files.OpenFiles(self._path)
        self._thread = ConnectionThread(
            self._connect,
            functools.partial(self._disconnect, self._files),
            check=self._require_own_files,
            purge=self._clean,
            name="stm-sqlite",
        )
        await self._run("open", lambda _: None)

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.deadline_s
        threads, self._large_thread, self._thread = (self._thread, self._large_thread), None, None

        async def end(thread: ConnectionThread) -> None:
            await thread.close(timeout=max(until - loop.time(), 0.0))

        async with contextlib.AsyncExitStack() as ending:
            # One after the other: of two that are closed at once, neither removes the log.
            for thread in filter(None, threads):
                ending.push_async_callback(end, thread)

    def _start_over(self) -> None:
        """Keep everything: the threads with the connections serve one event loop after the other."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist.

        The first load of a large record takes two statements: one finds its size, one reads it. So does each
        load of `last` entries that are large together.
        """
        require_last(last)
        until = asyncio.get_running_loop().time() + self._settings.deadline_s
        statement, which = statements.LOAD, ()
        if last is not None:
            statement, which = statements.LOAD_LAST, (min(last, _ALL),)

        async def rows_of(most: int, *, large: bool) -> list[Any]:
            def work(connection: sqlite3.Connection) -> list[Any]:
                return connection.execute(statement, (*which, most, *key, self._clock())).fetchall()

            return await self._run("load", work, Kind.READ, until=until, large=large)

        rows: list[Any] = []
        is_large = last is None and key in self._large
        if not is_large:
            rows = await rows_of(LARGE_BYTES, large=False)
            is_large = _size_in(rows) > LARGE_BYTES
        if is_large:
            rows = await rows_of(NO_LIMIT, large=True)
        if last is None:
            self._large.note(key, _size_in(rows))
        if not rows:
            return None
        version, length, size, seq, _ = rows[0]
        values = [row[4] for row in rows]
        body = None if seq else values.pop(0)
        skipped = skipped_of(length, last)
        if len(values) != length - skipped or sum(map(len, values), len(body or b"")) != size:
            raise Corrupt("a part of the record is missing", backend=self.name, operation="load")
        return Record(version, body, tuple(values), skipped)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live is reset."""
        require_append(entry, ttl, self.traits, backend=self.name)

        def work(connection: sqlite3.Connection) -> int:
            now = self._clock()
            expires, size, limit = None if ttl is None else now + ttl, len(entry), self.traits.max_record
            grow = (expires, now, size, *key, now, size, limit)
            grown = connection.execute(statements.GROW, grow).fetchone()
            if grown is None:
                found = _find(connection, key, now)
                self._require_fits("record", size + (found.size if found else 0), "append")
                new = connection.execute(
                    statements.CREATE, (*key, initial_version, expires, now, 2, size)
                ).lastrowid
                grown = new, 1, 1
            record, seq, length = grown
            connection.execute(statements.ENTER, (record, seq, entry))
            return int(length)

        return await self._run("append", work, Kind.WRITE, size=len(entry))

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
        """Store a body and its version if the record is what the caller expects."""
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        going, rewritten = drop or len(rewrite), sum(map(len, rewrite))

        def work(connection: sqlite3.Connection) -> bool:
            now = self._clock()
            found = _find(connection, key, now)
            if ttl is KEEP:
                expires, written = (found.expires, found.written) if found else (None, now)
            else:
                expires, written = None if ttl is None else now + ttl, now
            if found is None:
                if isinstance(expect, str):
                    return False
                self._require_fits("record", len(body), "replace")
                record = connection.execute(
                    statements.CREATE, (*key, version, expires, written, 1, len(body))
                ).lastrowid
                connection.execute(statements.ENTER, (record, 0, body))
                return True
            if found.version == version:
                return True
            if expect is ABSENT:
                return False
            if isinstance(expect, str) and (found.version != expect or going > found.next - found.first):
                return False
            if expect is ANY:
                # Nothing is kept or relied on, so that a damaged record is overwritten whole.
                first, size, until = found.next, len(body), NO_LIMIT
            else:
                first = until = found.first + going
                (replaced,) = connection.execute(statements.MEASURE_BEFORE, (found.id, first)).fetchone()
                size = found.size - int(replaced) + len(body) + rewritten
            self._require_fits("record", size, "replace")
            connection.execute(statements.DELETE_BEFORE, (found.id, until))
            connection.execute(statements.ENTER, (found.id, 0, body))
            if rewrite:
                first = found.first
                entries = ((found.id, seq, entry) for seq, entry in enumerate(rewrite, first))
                connection.executemany(statements.ENTER, entries)
            connection.execute(statements.REPLACE, (version, expires, written, first, size, found.id))
            return True

        return await self._run("replace", work, Kind.WRITE, size=len(body) + rewritten)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`; returns whether it did.

        The first transaction removes a large record from view; others remove its entries, until the deadline.
        """

        def work(connection: sqlite3.Connection) -> _Found | None:
            found = _find(connection, key, self._clock())
            if found is None or expect not in (ANY, found.version):
                return None
            purging.remove(connection, found.id, found.first, found.next, found.size)
            return found

        until = asyncio.get_running_loop().time() + self._settings.deadline_s
        found = await self._run("delete", work, Kind.WRITE, until=until)
        if found is not None and not purging.fits_a_step(found.first, found.next, found.size):
            # The record is gone, even if removing the rest fails.
            with contextlib.suppress(StorageError):
                await self._remove_buried(until)
        return found is not None

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self._names(statements.SCAN, scope, after, limit)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that have expired and are still in the file; `delete` removes them."""
        return await self._names(statements.SCAN_EXPIRED, scope, after, limit)

    async def _names(self, statement: str, scope: str, after: str, limit: int) -> Page:
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)

        def work(connection: sqlite3.Connection) -> list[Any]:
            return connection.execute(statement, (scope, after, self._clock(), limit + 1)).fetchall()

        names = [name for (name,) in await self._run("scan", work, Kind.READ)]
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

    async def next_scope(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`."""

        def work(connection: sqlite3.Connection) -> Any:
            return connection.execute(statements.NEXT_SCOPE, (after,)).fetchone()

        found = await self._run("scan", work, Kind.READ)
        return found[0] if found else None

    async def finish_erasure(self) -> Remains:
        """Remove the rest of large deleted records, and cut the write-ahead log; returns what remains.

        Waits for other connections that read an older state, at most one deadline. If one does not end by
        then, the log is cut after a later write of this driver.
        """
        loop = asyncio.get_running_loop()
        until, attempt, why = loop.time() + self._settings.deadline_s, 0, ""
        self._log_is_due = True
        try:
            await self._remove_buried(until)
            while not await self._run("erase", self._cut_log, until=until):
                why, wait = "another connection is reading an older state", pause(attempt)
                if loop.time() + wait >= until:
                    return Remains(_NOT_CUT.format(why), finished=False)
                attempt += 1
                await asyncio.sleep(wait)
        except StorageError as error:
            return Remains(_NOT_CUT.format(why or str(error)), finished=False)
        return _CUT

    async def _remove_buried(self, until: float) -> None:
        """Remove the entries of deleted records that were too large for one transaction."""

        def step(connection: sqlite3.Connection) -> bool:
            return self._purge_step(connection, until=statements.BURIED_UNTIL).more

        while await self._run("delete", step, until=until):
            pass

    def _cut_log(self, connection: sqlite3.Connection) -> bool:
        self._log_is_due = not statements.cut_log(connection)
        return not self._log_is_due

    def _clean(self, connection: sqlite3.Connection) -> bool:
        """Remove some expired records, and cut the log if an erasure could not; returns whether to repeat."""
        if self._log_is_due:
            self._cut_log(connection)
        return self._purge_step(connection).more

    async def expired(self) -> int:
        """Return how many expired records the file still holds."""

        def work(connection: sqlite3.Connection) -> int:
            return connection.execute(statements.COUNT_EXPIRED, (self._clock(),)).fetchone()[0]

        return await self._run("purge", work, Kind.READ)

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records from the file; returns how many.

        It runs in short transactions, so that other writers do not wait long. Each has its own deadline.
        """
        require_limit(limit)
        gone, more = 0, True
        while more and gone < limit:
            left = limit - gone
            done, more = await self._run(
                "purge", lambda connection, left=left: self._purge_step(connection, left)
            )
            gone += done
        return gone

    async def compact(self) -> Compacted:
        """Convert the tables of an older version to those of a new file, and give back free space."""

        def work(connection: sqlite3.Connection) -> Compacted:
            statements.cut_log(connection)
            before = self._path.stat().st_size
            statements.compact(connection)
            statements.cut_log(connection)
            return Compacted(before, self._path.stat().st_size)

        until = asyncio.get_running_loop().time() + _COMPACTING_S
        return await self._run("compact", work, until=until)

    def _purge_step(
        self,
        connection: sqlite3.Connection,
        limit: int = purging.STEP_RECORDS,
        *,
        until: float | None = None,
    ) -> purging.Step:
        """Remove some records that expired before `until`, or before now. Without any, takes no lock."""
        until = self._clock() if until is None else until
        if not connection.execute(statements.EXPIRED, (until, 1)).fetchone():
            return purging.Step(0, more=False)
        limit = min(limit, purging.STEP_RECORDS)
        with statements.transaction(connection):
            return purging.step(connection, until, limit)

    async def _run(
        self,
        operation: str,
        work: Callable[[sqlite3.Connection], T],
        kind: Kind = Kind.ALONE,
        *,
        size: int = 0,
        until: float | None = None,
        large: bool = False,
    ) -> T:
        """Run work in the thread; retry while another process holds a lock that it needs.

        `until` is a time of the event loop, by default one deadline from now. `large` loads have a separate
        thread.
        """
        loop = asyncio.get_running_loop()
        if until is None:
            until = loop.time() + self._settings.deadline_s
        attempt = 0
        with located(self.name, operation):
            if self._thread is not None:
                self._home.require()
            while (thread := self._thread_for_large() if large else self._thread) is not None:
                try:
                    return await thread.run(work, kind=kind, until=until, size=size)
                except (sqlite3.Error, NotBegun, NotEnded) as error:
                    # A retry after "locked" that did not begin before the deadline counts as locked, too.
                    if not is_busy(error) and not (attempt and isinstance(error, NotBegun)):
                        raise translate(error, operation) from error
                    wait = pause(attempt)
                    if loop.time() + wait >= until:
                        raise Unavailable(LOCKED) from error
                attempt += 1
                await asyncio.sleep(wait)
            raise not_open(opened=self._home.was_entered, backend=self.name, operation=operation)

    def _thread_for_large(self) -> ConnectionThread | None:
        if self._large_thread is None and self._thread is not None:
            opened = files.OpenFiles(self._path)
            self._large_thread = ConnectionThread(
                functools.partial(self._connect_for_large, opened),
                functools.partial(self._disconnect, opened),
                check=functools.partial(self._require_own_files, opened),
                purge=lambda _: False,
                name="stm-sqlite-large",
            )
        return self._large_thread

    def _connect(self) -> sqlite3.Connection:
        self._require_own_files()  # if they were replaced before a fork closed the connection
        private = self._settings.private and not self._settings.must_exist
        if private:
            files.create_private(self._path)
        # Only a URI can say, when the file is opened, that a missing one must not be created.
        uri = private or self._settings.must_exist
        target = f"{self._path.as_uri()}?mode=rw" if uri else self._path
        try:
            connection = sqlite3.connect(target, timeout=0, isolation_level=None, uri=uri)
        except sqlite3.OperationalError as error:
            if self._settings.must_exist and not self._path.exists():
                raise Unavailable(f"there is no database file at {self._path}") from error
            raise
        try:
            statements.prepare(connection, self._settings)
        except BaseException:
            connection.close()
            raise
        self._files.note()
        if self._settings.private:
            self._files.warn_if_shared()
        return connection

    def _connect_for_large(self, opened: files.OpenFiles) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{self._path.as_uri()}?mode=rw", timeout=0, uri=True)
        try:
            self._require_own_files()
            connection.execute("SELECT 1 FROM sqlite_master").close()  # opens the files next to it
        except BaseException:
            # It may have opened the file that replaced ours, to which `_disconnect` would then write.
            connection.close()
            raise
        opened.note()
        return connection

    def _disconnect(self, opened: files.OpenFiles, connection: sqlite3.Connection) -> None:
        """Close the connection; its log is not copied into a file that is no longer the one it belongs to."""
        is_ours = opened.are_in_place()
        if not is_ours:
            statements.leave_log(connection, is_lost=opened.is_log_lost())
        connection.close()
        if is_ours:
            opened.forget()

    def _require_own_files(self, beside: files.OpenFiles | None = None) -> None:
        """Raise `Unavailable` if the file was removed or replaced since it was opened.

        SQLite itself does not notice. It would write to a file that disappears with the last process that has
        it open. The same holds for the two files next to it, through which processes coordinate.
        """
        if not self._files.are_in_place() or not (beside is None or beside.are_in_place()):
            raise Unavailable(
                "the database file, or the -wal or -shm file next to it, was removed or replaced "
                "while it was open; nothing was done. Close the backend and open it again"
            )

    def _require_fits(self, what: Literal["entry", "record"], size: int, operation: str) -> None:
        limit = self.traits.max_entry if what == "entry" else self.traits.max_record
        require_fits(what, size, limit, backend=self.name, operation=operation)


def _size_in(rows: Sequence[Any]) -> int:
    """Return the bytes that the rows of a load state, or 0 if another program has changed the number."""
    size = rows[0][2] if rows else 0
    return size if isinstance(size, int) else 0


def _find(connection: sqlite3.Connection, key: Key, now: float) -> _Found | None:
    """Return the row of a record within a write transaction; removes it first if it has expired."""
    row = connection.execute(statements.FIND, key).fetchone()
    if row is None:
        return None
    found = _Found._make(row)
    if found.expires is None:
        return found
    if found.written is not None and now < found.written < found.expires:
        # The clock was set back. The part of the time to live that had passed is unknown.
        found = found._replace(expires=now + found.expires - found.written, written=now)
        connection.execute(statements.RESTART, (found.expires, found.written, found.id))
    elif found.expires <= now:
        purging.remove(connection, found.id, found.first, found.next, found.size)
        return None
    return found
