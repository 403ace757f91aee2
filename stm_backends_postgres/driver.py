"""The PostgreSQL driver: each operation is one statement on the tables of one schema."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import (
    LONGEST_S,
    require_append,
    require_last,
    require_limit,
    require_replace,
    skipped_of,
)
from stm_backends.drivers.coalesced import LARGE_BYTES, Coalesced, LoadKey
from stm_backends.drivers.contract import (
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    Expect,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import OF_ANOTHER_LOOP, Home
from stm_backends.errors import ConfigurationError, Corrupt, OutcomeUnknown, StorageError, located
from stm_backends_postgres.cleaning import Cleaner
from stm_backends_postgres.client import Connection, HandedIn, Lender, Row, Standby, connect
from stm_backends_postgres.connections import Connections
from stm_backends_postgres.errors import before_sending, is_spent, meaning, unsent
from stm_backends_postgres.grouped import Append, Grouped
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import DUE_S, STEP_RECORDS, Statements
from stm_backends_postgres.tables import make_ready

T = TypeVar("T")

logger = logging.getLogger("stm_backends")

_PURGE_EVERY: Final = 16
"""The average number of writes between two removals of expired records."""

_MAX_PAGE: Final = 10_000

_REMAINS: Final = Remains(
    "PostgreSQL: the deleted rows remain in the table's files until VACUUM FULL or later rows overwrite "
    "them, in the write-ahead log until it is recycled, and in WAL archives, replicas, snapshots and "
    "backups."
)

_LEFT: Final = "Rows of expired or large records may remain until a later write"

REMEMBERED: Final = 10_000
"""Maximum number of existing records that a driver remembers. Each takes some 130 bytes."""

_DURABILITY: Final = {
    "off": "survives the death of any client; a crash of the server may lose the last moments",
    "local": "survives a crash of the server, but perhaps not the loss of the primary",
    "remote_write": "survives a crash of the server, and of its synchronous standbys' PostgreSQL",
    "on": "survives a crash of the server, and the loss of the primary if it has synchronous standbys",
    "remote_apply": "survives a crash of the server, and can be read on its synchronous standbys",
    None: "as set by `synchronous_commit` in the role, the database or the pool",
}


class _Found(NamedTuple):
    """The rows of one load, not yet compared with the length and the size of the record."""

    version: str
    body: bytes | None
    length: int
    size: int
    tail: list[bytes]
    last: int

    @property
    def loaded(self) -> int:
        """The size in bytes of the rows loaded."""
        return sum(map(len, self.tail), len(self.body or b""))

    @property
    def weight(self) -> int:
        """The size of the load in bytes, by the average entry as in `LOAD`, or that of the rows if larger."""
        if self.last < self.length:
            return max(self.size * self.last // self.length, self.loaded)
        return self.size


class PostgresDriver:
    """The five operations on the tables of one schema.

    A `client` that was passed in, an `asyncpg.Pool`, is never closed, and works without `open()`: the first
    operation checks it. Without a client, the driver opens connections on demand, and `close()` closes them.
    With `create=True`, `open` sets the tables up, or brings them up to date.
    """

    name = "postgres"

    def __init__(
        self, settings: PostgresSettings, *, client: object | None = None, create: bool = False
    ) -> None:
        self._settings = settings
        self._create = create
        # Half of the deadline is for getting a connection, and half for the statement.
        self._patience_s = settings.deadline_s / 2
        self._handed_in = client
        self._start_over()
        self._home = Home(self._start_over)
        self._has_warned = False
        self._statements = Statements(settings.schema)
        self._purge_statement = self._statements.purge
        self._purge_small_statement = self._statements.purge_small
        self._count_statement = self._statements.count_expired
        ours = self._given is None and not settings.pgbouncer
        # Hashes of keys, the most recently used last; `None` if the server may let a statement wait for
        # longer than the deadline, so that `extend` could judge expiry too early.
        self._known: Bounded[int, bool] | None = Bounded(REMEMBERED) if ours else None
        self.traits = Traits(
            reach="network",
            clock="server",
            durability=_DURABILITY[settings.synchronous_commit or "on" if ours else None],
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=settings.max_record_bytes,
            deadline=settings.deadline_s,
            # A write that was not confirmed by a synchronous standby in time is visible to all readers.
            shows_unconfirmed=True,
        )
        self._edge = Edge(
            backend=self.name,
            traits=self.traits,
            meaning=meaning,
            before_sending=before_sending,
            home=self._home,
        )

    async def open(self) -> None:
        """Connect, and check the tables or, with `create`, set them up. Opening twice is harmless.

        Raises `Unavailable` if the tables do not exist or the server is a standby, and `ConfigurationError`
        if the tables, the role or the connections do not match the settings.
        """
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        """Close the connections, but not a pool that was passed in. Closing twice is harmless.

        Waits at most one deadline for operations in progress, and another for a purge. If it is cancelled
        meanwhile, it closes them at once.
        """
        await self._home.close(self._end)

    async def _begin(self) -> None:
        if self._is_ready:
            return
        self._lender = self._given or Connections(
            functools.partial(connect, self._settings),
            size=self._settings.pool_size,
            patience_s=self._patience_s,
        )
        if self._given is None:
            self._settings.require_files()
        await self._make_ready()
        if self._given is None and self._settings.is_open_to_others:
            logger.warning(
                "postgres: with this sslmode, the connection to another host may be unencrypted, and the "
                "server's certificate is not checked; set sslmode=verify-full, or sslmode=disable if "
                "something else protects the connection"
            )

    async def _end(self) -> None:
        patience_s, cancelled = self._settings.deadline_s, None
        # The appends come first, because they may start the cleaner.
        for close in (self._groups.drain, self._cleaner.close, self._disconnect):
            try:
                await close(patience_s)
            except asyncio.CancelledError as error:
                # Everything is closed all the same, but nothing more is waited for.
                patience_s, cancelled = 0.0, error
        await self._loads.close()
        if cancelled is not None:
            raise cancelled

    async def _disconnect(self, patience_s: float) -> None:
        lender, self._lender, self._is_ready = self._lender, None, False
        if lender is not None:
            await lender.close(patience_s)

    def _start_over(self) -> None:
        """Create the objects that belong to one event loop."""
        given = self._handed_in
        self._lender = self._given = None if given is None else HandedIn(given, patience_s=self._patience_s)
        self._is_ready = False
        self._loads = Coalesced(self._find, size=lambda found: found.weight)
        self._groups = Grouped(self._append_alone, self._append_together, patience_s=self._patience_s)
        self._cleaner = Cleaner(lambda: self._purge_step(DUE_S), self._sweep_step)

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist.

        Concurrent loads share statements; each statement reads all its records from one snapshot.
        """
        require_last(last)
        await self._require_ready("load")
        found = await self._edge.run("load", lambda: self._loads.load(LoadKey.of(key, last)))
        if found is None:
            return None
        skipped, loaded = skipped_of(found.length, last), found.loaded
        missing = len(found.tail) != found.length - skipped or (not skipped and loaded < found.size)
        if missing or loaded > found.size:
            raise Corrupt("a part of the record is missing", backend=self.name, operation="load")
        self._remember(key)
        return Record(found.version, found.body, tuple(found.tail), skipped)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end. Keeps the version and resets the time to live.

        Concurrent appends share statements, but only on connections that the driver opened.
        """
        require_append(entry, ttl, self.traits, backend=self.name)
        seconds = _seconds(ttl)
        # `extend` finds no record that expires soon.
        lasts = seconds is None or seconds > 2 * self.traits.deadline
        is_known = lasts and self._known is not None and hash(key) in self._known
        # Converted to bytes, because another type could fail the other appends in the same statement.
        one = Append(key, bytes(entry), initial_version, seconds, is_known)
        await self._require_ready("append")
        send = self._append_alone if self._known is None else self._groups.append
        row = await self._edge.run("append", lambda: send(one))
        if row["length"] is None:
            # The size comes from the snapshot; the size that caused the refusal may be newer.
            limit = self.traits.max_record
            self._edge.require_fits("append", "record", max((row["size"] or 0) + len(entry), limit + 1))
        self._remember(key)
        self._clean_after(row)
        return row["length"]

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
        """Store a body and its version if the record meets the condition."""
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        what = (*key, version, body, _seconds(ttl))
        if isinstance(expect, Expect):
            (row,) = await self._ask("replace", self._statements.store, *what, expect is ANY, ttl is KEEP)
            self._clean_after(row)
            return row["stored"]
        limit = self.traits.max_record
        if rewrite:
            statement, given = self._statements.rewrite, _joined(rewrite)
        else:
            statement, given = self._statements.fold, ()
        count = drop or len(rewrite)
        rows = await self._ask("replace", statement, *what, count, ttl is KEEP, expect, *given, limit)
        for row in rows:
            if row["may"] and not row["stored"]:
                self._edge.require_fits("replace", "record", row["size"])
            self._clean_after(row)
            return row["stored"]
        return False

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`, and return whether it did.

        The rows of a record with more than 1,000 entries or 16 MiB are removed in steps, after the answer.
        """
        version = None if expect is ANY else expect
        rows = await self._ask("delete", self._statements.delete, *key, version)
        if self._known:
            self._known.pop(hash(key))
        if any(row["unfinished"] for row in rows):
            self._cleaner.purge()
        return any(row["alive"] for row in rows)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self._names(self._statements.scan, scope, after, limit)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that have expired and still have a row; `delete` removes them."""
        return await self._names(self._statements.scan_expired, scope, after, limit)

    async def _names(self, statement: str, scope: str, after: str, limit: int) -> Page:
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)
        rows = await self._ask("scan", statement, scope, after, limit + 1)
        names = tuple(row["name"] for row in rows[:limit])
        return Page(names, names[-1] if len(rows) > limit else None)

    async def next_scope(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`."""
        rows = await self._ask("scan", self._statements.next_scope, after)
        return rows[0]["scope"] if rows else None

    async def finish_erasure(self) -> Remains:
        """Remove the rows of large deleted records, within one deadline, and describe what remains."""
        now = asyncio.get_running_loop().time
        until = now() + self._settings.deadline_s
        try:
            # The rows of deleted records come first.
            while now() < until:
                if await self._purge_step(0) is None:
                    return _REMAINS
        except StorageError as error:
            return Remains(f"{_REMAINS.text} {_LEFT} ({error}).", finished=False)
        return Remains(f"{_REMAINS.text} {_LEFT}.", finished=False)

    async def expired(self) -> int:
        """Return the number of expired records that the tables still hold."""
        (row,) = await self._ask("purge", self._count_statement)
        return row["expired"]

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records from the tables, and return their number.

        Each statement removes up to 64 small records, or 1,000 entries of a larger one.
        """
        require_limit(limit)
        removed = 0
        while removed < limit:
            # First records ended by a deletion, whose rows go entry by entry; then small records together.
            step = await self._purge_step(0)
            if step is None:
                break
            removed += step
            if step and removed < limit:
                most = min(STEP_RECORDS, limit - removed)
                (row,) = await self._ask("purge", self._purge_small_statement, most)
                removed += row["purged"]
        return removed

    async def _purge_step(self, since_s: float) -> int | None:
        """Return the number of records that one step removed; `None` if there was nothing to remove.

        Records that expired less than `since_s` seconds ago may stay.
        """
        rows = await self._ask("purge", self._purge_statement, since_s)
        return rows[0]["purged"] if rows else None

    async def _sweep_step(self, record: int) -> bool:
        """Remove entries below the bounds of a record's tail, and return whether any are left."""
        (row,) = await self._ask("purge", self._statements.sweep, record)
        return row["unswept"] is not None

    def _clean_after(self, row: Row) -> None:
        """Start removing a write's leftovers and, at random, expired records."""
        if row["unswept"] is not None:
            self._cleaner.sweep(row["unswept"])
        if _is_purging():
            self._cleaner.purge()

    def _remember(self, key: Key) -> None:
        """Note that a record exists."""
        if self._known is not None:
            self._known[hash(key)] = True

    async def _append_alone(self, one: Append) -> Row:
        return await self._borrow(
            "append", lambda connection: self._append_one(connection, one), until=one.until
        )

    async def _append_one(self, connection: Connection, one: Append) -> Row:
        """Send the statement for a known record, then the general one if that did nothing."""
        here, limit = self._statements, self.traits.max_record
        key, entry, version, seconds, is_known, _ = one
        rows: list[Row] = []
        if is_known:
            rows = await connection.fetch(here.extend, *key, entry, seconds, limit, self.traits.deadline)
        (row,) = rows or await connection.fetch(here.append, *key, version, entry, seconds, limit)
        return row

    async def _append_together(self, take: Callable[[], Sequence[Append]]) -> list[Row | None]:
        """Send the appends that can be taken once there is a connection; returns a row for each one done."""

        async def send(connection: Connection) -> list[Row | None]:
            appends = take()
            if len(appends) < 2:
                return [await self._append_one(connection, one) for one in appends]
            statement, limit = self._statements.append_many, self.traits.max_record
            rows = await connection.fetch(statement, *_columns(appends), limit)
            found = {row["place"]: row for row in rows}
            return [found.get(place) for place in range(1, len(appends) + 1)]

        return await self._borrow("append", send)

    async def _find(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, _Found]:
        """Return the records for several loads from one snapshot; among several, large ones come empty."""
        here = self._statements
        if len(wanted) > 1:
            keys, lasts = zip(*wanted, strict=True)
            statement, arguments = here.load_many, (*zip(*keys, strict=True), lasts, LARGE_BYTES)
        else:
            ((key, last),) = wanted
            statement, arguments = here.load, (*key, last)
        rows = await self._borrow("load", lambda connection: connection.fetch(statement, *arguments))
        return _by_place(wanted, rows)

    async def _ask(self, operation: str, statement: str, *arguments: object) -> list[Row]:
        """Send one statement and return the rows of its answer."""
        return await self._run(operation, lambda connection: connection.fetch(statement, *arguments))

    async def _run(self, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection within the deadline."""
        await self._require_ready(operation)
        return await self._edge.run(operation, lambda: self._borrow(operation, send))

    async def _require_ready(self, operation: str) -> None:
        """Check the server and the tables, once.

        A pool that was passed in may be used without `open()`, so its check is made here. Waiting for another
        operation's check counts towards the deadline.
        """
        if self._lender is None:
            raise self._edge.not_open(operation)
        if not self._is_ready:
            await self._edge.run("open", self._first_look)

    async def _first_look(self) -> None:
        async with self._home.changing:
            if not self._is_ready:
                await self._make_ready()

    async def _make_ready(self) -> None:
        """Check that the server, the role and the tables can be used; may set the tables up."""

        async def send(use: Callable[[Connection], Awaitable[T]]) -> T:
            return await self._edge.run("open", lambda: self._borrow("open", use))

        with located(self.name, "open"):
            is_dated = await make_ready(send, self._settings, self._statements, create=self._create)
        here = self._statements
        self._purge_statement = here.purge if is_dated else here.purge_undated
        self._purge_small_statement = here.purge_small if is_dated else here.purge_small_undated
        self._count_statement = here.count_expired if is_dated else here.count_expired_undated
        self._is_ready = True

    async def _borrow(
        self, operation: str, send: Callable[[Connection], Awaitable[T]], *, until: float = math.inf
    ) -> T:
        """Use a connection, or raise an error if there is none by `until`, a time of the event loop."""
        lender = self._lender
        if lender is None:
            raise self._edge.not_open(operation)
        if lender.loop is not asyncio.get_running_loop():
            raise ConfigurationError(OF_ANOTHER_LOOP)
        try:
            return await self._use(lender, operation, send, until)
        except (exceptions.PostgresError, exceptions.InternalClientError) as error:
            if not is_spent(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                _, message = meaning(error) or (None, "")
                logger.warning("postgres: reconnecting: %s", message)
        # The server refused the statement, so nothing was done. Other connections lead to the same server.
        await lender.expire()
        return await self._use(lender, operation, send, until)

    async def _use(
        self, lender: Lender, operation: str, send: Callable[[Connection], Awaitable[T]], until: float
    ) -> T:
        try:
            connection = await lender.take(until)
        except exceptions.ClientConfigurationError as error:
            # Its message quotes hosts, files and modes.
            raise ConfigurationError(
                "asyncpg cannot connect with these settings; check the URL, the environment (PGHOST, "
                "PGUSER, ...) and the files that they name; sslmode=verify-full needs sslrootcert=FILE "
                f"or sslrootcert=system ({type(error).__name__})"
            ) from None
        except Exception as error:
            ours = unsent(error, operation)
            if ours is None:
                raise
            raise ours from error
        try:
            with Standby(connection) as standby:
                answer = await send(connection)
            if standby.is_missed:
                raise OutcomeUnknown("committed, but the wait for a synchronous standby was cancelled")
        except BaseException as error:
            lender.give_up(connection, error)
            raise
        await lender.give_back(connection)
        return answer


def _by_place(wanted: Sequence[LoadKey], rows: Iterable[Row]) -> dict[LoadKey, _Found]:
    """Return the records in the rows of a load; `place` is the number of the load, from 1."""
    found: dict[LoadKey, _Found] = {}
    before, tail = 0, list[bytes]()
    place: int
    for place, version, body, length, size, entry in rows:
        if place != before:
            before, tail = place, []
            found[wanted[place - 1]] = _Found(version, body, length, size, tail, wanted[place - 1].last)
        if entry is not None:
            tail.append(entry)
    return found


def _columns(appends: Sequence[Append]) -> tuple[Sequence[str] | bytes, ...]:
    """Return the columns of the records, and then the entries with theirs, as in `APPEND_MANY`."""
    records: dict[Key, list[Append]] = {}
    ranks: list[int] = []
    for one in appends:
        same = records.setdefault(one.key, [])
        ranks.append(len(same))
        same.append(one)
    numbers = {key: number for number, key in enumerate(records, 1)}
    together, starts, lengths = _joined([one.entry for one in appends])
    return (
        *zip(*records, strict=True),
        [same[0].version for same in records.values()],
        # The last append of a record resets its time to live.
        _text("-" if same[-1].seconds is None else same[-1].seconds for same in records.values()),
        _text(map(len, records.values())),
        _text(sum(len(one.entry) for one in same) for same in records.values()),
        together,
        " ".join(starts),
        " ".join(lengths),
        _text(numbers[one.key] for one in appends),
        _text(ranks),
    )


def _text(column: Iterable[object]) -> str:
    return " ".join(map(str, column))


def _joined(entries: Sequence[bytes]) -> tuple[bytes, list[str], list[str]]:
    """Return all entries joined, and their start positions, from 1, and lengths, both as text."""
    lengths = [len(entry) for entry in entries]
    starts = accumulate(lengths[:-1], initial=1)
    return b"".join(entries), [*map(str, starts)], [*map(str, lengths)]


def _seconds(ttl: float | None | KeepType) -> float | None:
    """Return a time to live for the statements. `KEEP` means that an absent record never expires."""
    return None if ttl is None or ttl is KEEP else min(float(ttl), LONGEST_S)


def _is_purging() -> bool:
    # Random instead of counted, so that short-lived processes remove expired records too.
    return random.random() * _PURGE_EVERY < 1
