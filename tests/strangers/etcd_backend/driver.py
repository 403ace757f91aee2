"""The five operations on etcd; each is one read, or a read and a commit on what was read.

A record is a head and values: its body and its entries. The heads of all records stand together, in the order
of their scopes and names, so listings read them alone. Every write changes the head, and its condition is the
head's revision, which no two writes share. A head says when its record expires. Leases would not do for
that: a commit has 128 operations, and moves no more keys to another lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import struct
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import httpx

from stm_backends import Corrupt, Denied, OutcomeUnknown, StorageError, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Remains, Traits
from stm_backends.drivers.checks import (
    not_open,
    require_drop,
    require_last,
    require_limit,
    require_rewrite,
    require_ttl,
)
from stm_backends.drivers.edge import ConcurrencyLimit, Edge, Meaning
from stm_backends.drivers.home import Home
from tests.strangers.etcd_backend.settings import EtcdSettings

T = TypeVar("T")

END: Final = struct.Struct(">d")  # seconds since 1970; infinity if the record never expires
SUM: Final = struct.Struct(">L")
SEQ: Final = struct.Struct(">Q")

MOST_REWRITTEN: Final = 100
"""A commit has 128 operations at most: one for each rewritten entry, and those for the head and the body."""

HEAD: Final = -1
"""The number of newest entries with which a read is of the head alone."""
MOST: Final = 2**31

COMMIT_BY: Final = 0.8
"""The share of the deadline within which a write must send its commit."""

LARGEST_PAGE: Final = 1_000
SWEEPS: Final = 1 / 16
"""How many writes look for records that have expired: among twice as many as are written meanwhile."""
SWEPT: Final = 32

NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no one, and unlike the client's own one loads no certificates, which blocks the event loop."""

Operation: TypeAlias = dict[str, Any]


class Row(NamedTuple):
    """A key, its value, and the revision of its last change."""

    key: bytes
    value: bytes
    revision: int


class Place(NamedTuple):
    """Where a record is: the key of its head, and what the keys of its values begin with."""

    head: bytes
    values: bytes

    @property
    def body(self) -> bytes:
        return self.values + b"b"

    @property
    def entries(self) -> tuple[bytes, bytes]:
        return self.values + b"e", self.values + b"f"

    def entry(self, number: int) -> bytes:
        return self.values + b"e" + SEQ.pack(number)

    def removal(self) -> list[Operation]:
        """Return what removes all of a record; names contain no NUL, so that of `a` leaves `ab` alone."""
        return [deleted(self.head), deleted(self.values, self.values[:-1] + b"\1")]


def joined(key: Key) -> bytes:
    """Return the parts of a key as one: they contain no NUL, so two keys never meet."""
    return key.scope.encode() + b"\0" + key.name.encode()


def place_of(prefix: bytes, key: bytes) -> Place:
    """Return the place of a record: heads are in the order of their keys, and values apart from them."""
    return Place(prefix + b"/h\0" + key, prefix + b"/v\0" + key + b"\0")


@dataclass(frozen=True)
class Head:
    """What every decision depends on; the tail begins at `first`, and `size` is the bytes of all values."""

    version: str
    expires: float = inf
    first: int = 1
    length: int = 0
    has_body: bool = False
    size: int = 0

    @classmethod
    def read(cls, stored: bytes) -> Head:
        """Return the head as it was stored. Raises `Corrupt`."""
        expires, rest = stored[: END.size], stored[END.size :]
        try:
            version, *numbers = json.loads(checked(expires, rest))
            return cls(version, *END.unpack(expires), *numbers)
        except (ValueError, TypeError, struct.error):
            raise Corrupt("the stored bytes are not the head of a record") from None

    def written(self) -> bytes:
        """Return when the record expires, which anyone can read, then a checksum and the rest."""
        version, expires, *numbers = vars(self).values()
        return END.pack(expires) + summed(END.pack(expires), json.dumps([version, *numbers]).encode())


@dataclass(frozen=True)
class Seen:
    """What a read has found at the place of a record that has not expired."""

    place: Place
    stored: bytes
    values: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def head(self) -> Head:
        return Head.read(self.stored)

    def record(self, last: int | None = None) -> Record:
        """Return the record, of which a load of the newest has read no more. Raises `Corrupt`."""
        head = self.head
        skipped = 0 if last is None else max(0, head.length - last)
        body = self._value(self.place.body) if head.has_body else None
        numbers = range(head.first + skipped, head.first + head.length)
        tail = tuple(self._value(self.place.entry(number)) for number in numbers)
        return Record(head.version, body, tail, skipped)

    def _value(self, key: bytes) -> bytes:
        if (value := self.values.get(key)) is None:
            raise Corrupt("a part of the record is missing")
        return checked(b"", value)


class Refused(Exception):
    """The server has answered with an error: a status of HTTP, the number of gRPC, and its words."""

    def __init__(self, status: int, code: int, words: str) -> None:
        super().__init__(f"HTTP {status}, gRPC {code}")
        self.status, self.code, self.words = status, code, words


class EtcdDriver:
    """Records in an etcd cluster, by one of its servers."""

    name = "etcd"

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._heads = place_of(self._prefix, b"").head
        self.traits = Traits(
            reach="network",
            clock="client",
            durability="survives power failures, and the loss of a minority of the servers",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=MOST_REWRITTEN,
            deadline=settings.deadline_s,
        )
        self._start_over()
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    def _start_over(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._swept = self._heads
        # Weak, so that a lock goes when nobody waits for it.
        self._turns: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def open(self) -> None:
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        await self._home.close(self._end)

    async def _begin(self) -> None:
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._limit = ConcurrencyLimit(settings.pool_size, patience_s=settings.deadline_s / 2)
        self._client = httpx.AsyncClient(
            base_url=f"http://{host}:{settings.port}/v3/kv/",
            verify=NO_TLS,
            trust_env=False,  # a proxy for the web is none for a datastore
            timeout=httpx.Timeout(None, connect=settings.deadline_s / 2),  # the edge has the deadline
            limits=httpx.Limits(max_connections=settings.pool_size, keepalive_expiry=60),
        )
        await self._edge.run("open", lambda: self._range(self._heads, limit=1))

    async def _end(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            # A close that is cancelled ends only its own waiting.
            self._closing = asyncio.ensure_future(_finish(client, self._limit))
            await asyncio.shield(self._closing)

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        require_last(last)

        async def work() -> Record | None:
            place = self._place(key)
            seen = self._alive(place, *await self._read(place, last))
            return seen.record(last) if seen else None

        return await self._run("load", work)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))

        def decide(place: Place, seen: Seen | None, now: float) -> tuple[int, list[Operation]]:
            head = seen.head if seen else Head(initial_version)
            size = head.size + len(entry)
            self._edge.require_fits("append", "record", size)
            after = replace(head, expires=ends(ttl, now), length=head.length + 1, size=size)
            added = put(place.entry(head.first + head.length), valued(entry))
            return after.length, [put(place.head, after.written()), added]

        return await self._change("append", key, decide)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_ttl(ttl)
        require_drop(drop, expect)
        if rewrite:
            require_rewrite(rewrite, drop, expect, self.traits, backend=self.name)
        self._edge.require_fits("replace", "entry", len(body))
        going = drop or len(rewrite)

        def decide(place: Place, seen: Seen | None, now: float) -> tuple[bool, list[Operation]]:
            try:
                head = seen.head if seen else None
            except Corrupt:
                if expect is not ANY:
                    raise
                head = None
            if head and head.version == version:
                return True, []
            kept = expiry(seen.stored) if seen else inf
            after = Head(version, kept if ttl is KEEP else ends(ttl, now), has_body=True)
            if isinstance(expect, str):
                if head is None or head.version != expect or going > head.length:
                    return False, []
                # All of it, because a fold must not make a damaged record look healthy.
                tail = (*rewrite, *seen.record().tail[going:])
                after = replace(after, first=head.first + drop, length=len(tail))
                change = [put(place.entry(head.first + i), valued(one)) for i, one in enumerate(rewrite)]
                if drop:
                    change.append(deleted(place.entry(head.first), place.entry(after.first)))
            elif expect is ABSENT and seen:
                return False, []
            else:
                tail, change = (), [deleted(*place.entries)]
            after = replace(after, size=sum(map(len, tail), len(body)))
            self._edge.require_fits("replace", "record", after.size)
            return True, [put(place.head, after.written()), put(place.body, valued(body)), *change]

        return await self._change("replace", key, decide, whole=isinstance(expect, str))

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        def decide(place: Place, seen: Seen | None, now: float) -> tuple[bool, list[Operation]]:
            # Parsed only to compare the version: what cannot be read can be deleted.
            if seen is None or (expect is not ANY and seen.head.version != expect):
                return False, []
            return True, place.removal()

        return await self._change("delete", key, decide)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        return await self._list(scope, after, limit, expired=False)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List the names of one scope that have expired and are still stored."""
        return await self._list(scope, after, limit, expired=True)

    async def finish_erasure(self) -> Remains:
        """Return what remains; when etcd compacts is for the cluster to decide, which others use, too."""
        return Remains(
            "earlier revisions stay in each server of etcd until the cluster compacts them, then in free "
            "pages of its file until a defragmentation; its log and snapshots have them for a while"
        )

    async def next_scope(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`."""

        async def work() -> str | None:
            rows = await self._range(self._heads + after.encode() + b"\1", limit=1)
            return self._parts(rows[0].key)[0].decode() if rows else None

        return await self._run("scan", work)

    async def expired(self) -> int:
        """Return how many records have expired and are still stored; reads the heads of all."""
        count, first = 0, self._heads
        while first:
            rows, first = await self._run("scan", lambda first=first: self._heads_from(first, LARGEST_PAGE))
            count += len(self._expired(rows))
        return count

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` records that have expired; returns how many."""
        count, first = 0, self._heads
        while first and count < limit:

            async def step(first: bytes = first, left: int = limit - count) -> tuple[int, bytes]:
                rows, following = await self._heads_from(first, SWEPT)
                return await self._remove(self._expired(rows)[:left]), following

            removed, first = await self._run("purge", step)
            count += removed
        return count

    async def _list(self, scope: str, after: str, limit: int, *, expired: bool) -> Page:
        require_limit(limit)

        async def work() -> Page:
            start, most = self._heads + scope.encode(), min(limit, LARGEST_PAGE)
            rows = await self._range(start + b"\0" + after.encode() + b"\0", start + b"\1", limit=most + 1)
            now, listed = time.time(), [(self._parts(row.key)[1].decode(), row) for row in rows[:most]]
            # A page may be empty, because all of its names are of the other kind, and is not the last one.
            names = tuple(name for name, row in listed if (expiry(row.value) <= now) is expired)
            return Page(names, listed[-1][0] if len(rows) > most else None)

        return await self._run("scan", work)

    async def _change(
        self,
        operation: str,
        key: Key,
        decide: Callable[[Place, Seen | None, float], tuple[T, list[Operation]]],
        *,
        whole: bool = False,
    ) -> T:
        """Read, decide and commit until nobody else has changed the record in between.

        What has failed before the commit was sent has changed nothing, and is `Unavailable`.
        """
        place, is_sent = self._place(key), False

        async def work() -> T:
            nonlocal is_sent
            until = asyncio.get_running_loop().time() + self.traits.deadline * COMMIT_BY
            turn = self._turns.setdefault(key, asyncio.Lock())
            async with asyncio.timeout_at(until) as before_commit, turn:
                if random.random() < SWEEPS:
                    await self._sweep()
                while True:
                    stored, values = await self._read(place, None if whole else HEAD)
                    seen, now = self._alive(place, stored, values), time.time()
                    if stored and not seen:
                        # Nobody can see what has expired, so it goes in a commit of its own.
                        await self._remove([stored])
                        continue
                    answer, change = decide(place, seen, now)
                    if not change:
                        return answer
                    before_commit.reschedule(None)  # from here on, the deadline of the operation applies
                    is_sent = True
                    if await self._commit({place.head: stored.revision if stored else 0}, change):
                        return answer
                    is_sent = False
                    before_commit.reschedule(until)
                    await asyncio.sleep(random.uniform(0, 0.01))

        async def unsent() -> T:
            try:
                return await work()
            except TimeoutError as error:
                raise Unavailable("the time to begin a write has passed; nothing was written") from error
            except (httpx.RequestError, Refused) as error:
                kind, message = meaning(error) or (OutcomeUnknown, "")
                if is_sent or kind is not OutcomeUnknown:
                    raise
                raise Unavailable(f"{message}; nothing was written") from error

        return await self._run(operation, unsent)

    async def _sweep(self) -> None:
        """Remove what has expired among the next heads; what fails is done another time."""
        with contextlib.suppress(httpx.RequestError, Refused, StorageError):
            rows, following = await self._heads_from(self._swept, SWEPT)
            self._swept = following or self._heads
            await self._remove(self._expired(rows))

    async def _remove(self, heads: list[Row]) -> int:
        """Remove records by their heads, each unless it has changed meanwhile; returns how many."""
        change = [one for row in heads for one in self._place_at(row.key).removal()]
        if not heads or await self._commit({row.key: row.revision for row in heads}, change):
            return len(heads)
        # One of them has changed, and stays.
        return sum([await self._remove([row]) for row in heads]) if len(heads) > 1 else 0

    async def _read(self, place: Place, last: int | None) -> tuple[Row | None, list[Row]]:
        """Return the head and values of one moment: all, or the body and so many of the newest entries."""
        ranges = [ranged(place.head)]
        if last is None:
            ranges.append(ranged(place.values, place.values[:-1] + b"\1"))
        elif last > HEAD:
            ranges.append(ranged(place.body))
        if last and last > 0:  # to the server, a limit of 0 is none
            newest = {"limit": str(min(last, MOST)), "sort_order": "DESCEND", "sort_target": "KEY"}
            ranges.append(ranged(*place.entries, **newest))
        heads, *values = await self._ask(ranges)
        return heads[0] if heads else None, [row for rows in values for row in rows]

    def _alive(self, place: Place, stored: Row | None, values: list[Row]) -> Seen | None:
        if stored is None or expiry(stored.value) <= time.time():
            return None
        return Seen(place, stored.value, {row.key: row.value for row in values})

    def _expired(self, heads: list[Row]) -> list[Row]:
        now = time.time()
        return [row for row in heads if expiry(row.value) <= now]

    async def _heads_from(self, first: bytes, limit: int) -> tuple[list[Row], bytes]:
        """Return so many heads from a key on, and the key to go on from; it is empty at the end."""
        rows = await self._range(first, limit=limit)
        return rows, rows[-1].key + b"\0" if len(rows) == limit else b""

    async def _range(self, first: bytes, last: bytes | None = None, *, limit: int) -> list[Row]:
        last = last or self._heads[:-1] + b"\1"
        (rows,) = await self._ask([ranged(first, last, limit=str(limit))])
        return rows

    def _place(self, key: Key) -> Place:
        return place_of(self._prefix, joined(key))

    def _place_at(self, head: bytes) -> Place:
        return place_of(self._prefix, head.removeprefix(self._heads))

    def _parts(self, head: bytes) -> list[bytes]:
        """Return the scope and the name in the key of a head."""
        return head.removeprefix(self._heads).split(b"\0")

    async def _ask(self, ranges: list[Operation]) -> list[list[Row]]:
        """Return the rows of ranges, all of one moment."""
        question = {"success": ranges}
        try:
            answer = await self._post(question)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            answer = await self._post(question)  # a connection that had died while it was not in use
        return [rows_of(one["response_range"]) for one in answer["responses"]]

    async def _commit(self, revisions: dict[bytes, int], change: list[Operation]) -> bool:
        """Do everything, or nothing if a key has another revision; 0 is that of a key that is not there."""
        compare = [
            {"key": text(key), "target": "MOD", "mod_revision": str(revision)}
            for key, revision in revisions.items()
        ]
        answer = await self._post({"compare": compare, "success": change})
        return answer.get("succeeded", False)

    async def _post(self, transaction: dict[str, Any]) -> dict[str, Any]:
        async with self._limit:
            if self._client is None:
                raise not_open()
            response = await self._client.post("txn", content=json.dumps(transaction))
        try:
            answer = response.json()
        except ValueError:
            raise Refused(response.status_code, -1, "") from None
        if response.status_code != httpx.codes.OK:
            raise Refused(response.status_code, answer.get("code", -1), str(answer.get("message", "")))
        return answer

    async def _run(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        if self._client is None:
            raise self._edge.not_open(operation)
        return await self._edge.run(operation, work)


async def _finish(client: httpx.AsyncClient, limit: ConcurrencyLimit) -> None:
    """Wait for the answers that are due, each at its deadline at the latest; no request is sent any more."""
    await limit.drain()
    await client.aclose()


def ends(ttl: float | None, now: float) -> float:
    return inf if ttl is None else now + ttl


def expiry(stored: bytes) -> float:
    """Return when a record expires; one that is too damaged to say so does not, and can be deleted."""
    return END.unpack_from(stored)[0] if len(stored) >= END.size else inf


def summed(before: bytes, data: bytes) -> bytes:
    """Return data after a checksum of it and of what stands before it."""
    return SUM.pack(zlib.crc32(before + data)) + data


def checked(before: bytes, stored: bytes) -> bytes:
    """Return the data behind its checksum. Raises `Corrupt`."""
    total, data = stored[: SUM.size], stored[SUM.size :]
    if total != SUM.pack(zlib.crc32(before + data)):
        raise Corrupt("the stored bytes have another checksum")
    return data


def valued(data: bytes) -> bytes:
    return summed(b"", data)


def text(data: bytes) -> str:
    return b64encode(data).decode()


def put(key: bytes, value: bytes) -> Operation:
    return {"request_put": {"key": text(key), "value": text(value)}}


def deleted(first: bytes, last: bytes | None = None) -> Operation:
    return {"request_delete_range": {"key": text(first)} | ({"range_end": text(last)} if last else {})}


def ranged(first: bytes, last: bytes | None = None, **options: str) -> Operation:
    return {"request_range": {"key": text(first)} | ({"range_end": text(last)} if last else {}) | options}


def rows_of(answer: dict[str, Any]) -> list[Row]:
    """Return the rows of a range; the gateway leaves out what is empty or 0."""
    return [
        Row(b64decode(one["key"]), b64decode(one.get("value", "")), int(one["mod_revision"]))
        for one in answer.get("kvs", [])
    ]


def meaning(error: Exception) -> Meaning | None:
    """Return the error that a caller receives, and its message; `None` for a bug in this file."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return Unavailable, "the server cannot be reached"
    if isinstance(error, httpx.RequestError):
        return OutcomeUnknown, "the connection was lost before the answer came"
    if not isinstance(error, Refused):
        return None
    if error.code in (7, 16) or "user name is empty" in error.words:
        return Denied, "the server wants a user with a password, which this driver does not know"
    if error.code == 3:
        return Unavailable, "--max-request-bytes or --max-txn-ops of the server is lower than by default"
    if error.code == 8:
        return Unavailable, "the server has no space left, or admits only fewer or smaller requests"
    # Also 14: what the server gave up may have been done by the cluster.
    return OutcomeUnknown, f"unexpected answer of the server ({error}); it must be etcd 3.4 or later"


async def open_etcd(url: str) -> EtcdDriver:
    """Return an open driver; what `Datastore.open` calls."""
    driver = EtcdDriver(EtcdSettings.from_url(url))
    await driver.open()
    return driver
