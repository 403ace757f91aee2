"""The five operations on an LMDB environment; each is one transaction."""

import asyncio
import hashlib
import json
import os
import struct
import threading
import time
from base64 import b64decode, b64encode
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import lmdb

from stm_backends import Corrupt, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Traits
from stm_backends.drivers.checks import require_append, require_last, require_limit, require_replace
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.home import Home
from stm_backends_lmdb.settings import MIB, LmdbSettings


class Environment:
    """An open folder and its thread; LMDB allows one environment per folder in a process."""

    shared: "dict[Path, Environment]" = {}
    lock = threading.Lock()  # for `shared` and `users`: `leave` runs in the thread
    turn = threading.Lock()  # held by a transaction: see below

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.process, self.users, self.swept = path, os.getpid(), 0, b""
        self.lmdb = lmdb.open(str(path), map_size=1024 * MIB)
        # One thread runs the operations in the order of their calls, including cancelled ones.
        self.thread = ThreadPoolExecutor(1, "stm-lmdb")
        self.shared[path] = self

    def leave(self) -> None:
        """Close the environment if this was its last user."""
        with self.lock:
            self.users -= 1
            if not self.users:
                del self.shared[self.path]
                self.thread.shutdown(wait=False)
                self.lmdb.close()

    def sweep(self, txn) -> None:
        """Remove the expired ones among the next two records; every write calls this."""
        cursor = txn.cursor()
        cursor.set_range(self.swept)
        for _ in range(2):
            (cursor.delete if expired(cursor.value(), time.time()) else cursor.next)()
        self.swept = cursor.key()  # empty past the last record, so the next sweep starts over


# A fork waits for both locks. A child that is forked during a transaction can neither end it nor close the
# environment, and a lock that another thread holds is never released there.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    for held in (Environment.turn, Environment.lock):
        os.register_at_fork(before=held.acquire, after_in_parent=held.release, after_in_child=held.release)

END = struct.Struct(">d")  # seconds since 1970; infinity if the record never expires


def place(*parts: str) -> bytes:
    """Return the LMDB key of a record, or the prefix of a scope: a hash of each part."""
    return b"".join(hashlib.sha256(part.encode()).digest() for part in parts)


def expired(data: bytes | None, now: float) -> bool:
    """Return whether a record is absent or expired."""
    return data is None or (len(data) >= END.size and END.unpack_from(data)[0] <= now)


def head(data: bytes) -> list[str]:
    """Return the name and the version of a stored record."""
    return json.loads(data[END.size :].partition(b"\n")[0])


def find(txn, key: Key, now: float) -> tuple[Record | None, float]:
    """Return a record, and when it expires, as the transaction sees them."""
    data = txn.get(place(*key))
    if expired(data, now):
        return None, inf
    (_, version), values = map(json.loads, data[END.size :].split(b"\n"))
    body, *tail = (None if value is None else b64decode(value, validate=True) for value in values)
    return Record(version, body, tuple(tail)), END.unpack_from(data)[0]


def put(txn, key: Key, record: Record, expires: float) -> None:
    """Store a record: when it expires, a line with name and version, a line with body and tail."""
    values = [None if value is None else b64encode(value).decode() for value in (record.body, *record.tail)]
    lines = "\n".join(map(json.dumps, ([key.name, record.version], values)))
    txn.put(place(*key), END.pack(expires) + lines.encode())


class LmdbDriver:
    """One folder, shared by the processes of a host; LMDB serializes its writers."""

    name = "lmdb"

    def __init__(self, settings: LmdbSettings) -> None:
        self._path = Path(settings.path).absolute()
        self._environment: Environment | None = None
        self.traits = Traits(
            reach="host",
            clock="host",
            durability="survives the death of any process, and a power failure",
            max_entry=settings.max_entry_bytes,
            max_record=16 * MIB,
            max_drop=1_000_000,
            deadline=settings.deadline_s,
        )
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    async def open(self) -> None:
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        await self._home.close(self._end)

    async def _begin(self) -> None:
        if self._environment is None:
            try:
                with Environment.lock:
                    found = Environment.shared.get(self._path)
                    if found and found.process != os.getpid():
                        found = found.lmdb.close()  # what a forked process has inherited
                    self._environment = found or Environment(self._path)
                    self._environment.users += 1
            except (lmdb.Error, OSError) as error:
                raise Unavailable(str(error), backend=self.name, operation="open") from error

    async def _end(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            # In the thread, after all before it. A close that is cancelled ends only its own waiting.
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(environment.thread, environment.leave))

    def _start_over(self) -> None:
        pass  # nothing here belongs to an event loop: the thread serves one after the other

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        require_last(last)
        record = await self._run("load", lambda txn, now: find(txn, key, now)[0])
        return record and record.newest(last)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl) -> int:
        require_append(entry, ttl, self.traits, backend=self.name)

        def work(txn, now):
            found = find(txn, key, now)[0] or Record(initial_version, None, ())
            record = Record(found.version, found.body, (*found.tail, entry))
            self._require_fits("append", record)
            put(txn, key, record, inf if ttl is None else now + ttl)
            return len(record.tail)

        return await self._run("append", work)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        going = drop or len(rewrite)

        def work(txn, now):
            found, expires = find(txn, key, now)
            if found and found.version == version:
                return True
            tail = ()
            if isinstance(expect, str):
                if not found or found.version != expect or going > len(found.tail):
                    return False
                tail = (*rewrite, *found.tail[going:])
            elif expect is ABSENT and found:
                return False
            record = Record(version, body, tail)
            self._require_fits("replace", record)
            if ttl is not KEEP:
                expires = inf if ttl is None else now + ttl
            put(txn, key, record, expires)
            return True

        return await self._run("replace", work)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        def work(txn, now):
            data = txn.get(place(*key))
            matches = not expired(data, now) and (expect is ANY or head(data)[1] == expect)
            return matches and txn.delete(place(*key))

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)

        def work(txn, now):
            start, cursor, names = place(scope), txn.cursor(), []
            for where, data in cursor if cursor.set_range(start) else ():
                if not where.startswith(start):
                    break
                if not expired(data, now) and (name := head(data)[0]).encode() > after.encode():
                    names.append(name)
            names.sort(key=str.encode)
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

        return await self._run("scan", work)

    async def _run(self, operation: str, work):
        environment, write = self._environment, operation not in ("load", "scan")
        if environment is None:
            raise self._edge.not_open(operation)

        def transact():
            with environment.turn, environment.lmdb.begin(write=write) as txn:
                if write:
                    environment.sweep(txn)
                return work(txn, time.time())

        loop = asyncio.get_running_loop()
        return await self._edge.run(operation, lambda: loop.run_in_executor(environment.thread, transact))

    def _require_fits(self, operation: str, record: Record) -> None:
        self._edge.require_fits(operation, "record", sum(map(len, record.tail), len(record.body or b"")))


def meaning(error: Exception):
    """Return the error that a caller receives, and its message; `None` for a bug in this file."""
    if isinstance(error, lmdb.Error):
        return Unavailable, str(error)  # LMDB aborts a transaction that fails, so nothing was done
    # Of JSON, of Base64 or of UTF-8.
    return (Corrupt, "the stored bytes are not a record") if isinstance(error, ValueError) else None
