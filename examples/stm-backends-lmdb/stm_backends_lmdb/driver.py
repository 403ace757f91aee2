"""The five operations on an LMDB environment; each is one transaction."""

import asyncio
import binascii
import hashlib
import json
import struct
import time
from base64 import b64decode, b64encode
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import lmdb

from stm_backends import Corrupt, OutcomeUnknown, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Traits
from stm_backends.drivers.checks import require_drop, require_fits, require_limit, require_ttl
from stm_backends.errors import located

MIB = 1024 * 1024


class Environment:
    """An open folder and the one thread that works on it: LMDB wants no more than one in a process."""

    shared: "dict[Path, Environment]" = {}

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.users, self.swept = 0, b""
        self.lmdb = lmdb.open(str(path), map_size=1024 * MIB)
        # One thread keeps operations in the order in which they were called, cancelled ones included.
        self.thread = ThreadPoolExecutor(1, "stm-lmdb")

    def sweep(self, txn) -> None:
        """Remove what has expired among the next two records; every write does, so that nothing piles up."""
        cursor = txn.cursor()
        cursor.set_range(self.swept)
        for _ in range(2):
            # Past the last record there is neither value nor key, and the next write begins anew.
            (cursor.delete if ended(cursor.value(), time.time()) else cursor.next)()
        self.swept = cursor.key()


END = struct.Struct(">d")  # seconds since 1970; infinity is for ever


def place(*parts: str) -> bytes:
    """Return where a key's record is. LMDB's keys end at 511 bytes and ours do not, so it is a hash."""
    return b"".join(hashlib.sha256(part.encode()).digest() for part in parts)


def ended(data: bytes | None, now: float) -> bool:
    """Return whether there is no record, or one whose time has come."""
    return data is None or (len(data) >= END.size and END.unpack_from(data)[0] <= now)


def head(data: bytes) -> list[str]:
    """Return a stored record's name and version."""
    return json.loads(data[END.size :].partition(b"\n")[0])


def find(txn, key: Key, now: float) -> tuple[Record | None, float]:
    """Return a record and when it ends, as a transaction sees them."""
    data = txn.get(place(*key))
    if ended(data, now):
        return None, inf
    (_, version), values = map(json.loads, data[END.size :].split(b"\n"))
    body, *tail = (None if value is None else b64decode(value, validate=True) for value in values)
    return Record(version, body, tuple(tail)), END.unpack_from(data)[0]


def put(txn, key: Key, record: Record, expires: float) -> None:
    values = [None if value is None else b64encode(value).decode() for value in (record.body, *record.tail)]
    lines = "\n".join(map(json.dumps, ([key.name, record.version], values)))
    txn.put(place(*key), END.pack(expires) + lines.encode())


class LmdbDriver:
    """One folder, shared by the processes of one machine; LMDB's lock orders its writers."""

    name = "lmdb"
    traits = Traits(
        reach="host",
        clock="host",
        durability="survives the death of any process, and a power cut",
        max_entry=4 * MIB,
        max_record=16 * MIB,
        max_drop=16 * MIB,
    )

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._environment: Environment | None = None

    async def open(self) -> None:
        if self._environment is None:
            try:
                if self._path not in Environment.shared:
                    Environment.shared[self._path] = Environment(self._path)
            except (lmdb.Error, OSError) as error:
                raise Unavailable(str(error), backend=self.name, operation="open") from error
            self._environment = Environment.shared[self._path]
            self._environment.users += 1

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.users -= 1
            if not environment.users:
                del Environment.shared[self._path]
                environment.thread.shutdown()
                environment.lmdb.close()

    async def load(self, key: Key) -> Record | None:
        return await self._run("load", lambda txn, now: find(txn, key, now)[0], write=False)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl) -> int:
        require_ttl(ttl)

        def work(txn, now):
            found = find(txn, key, now)[0] or Record(initial_version, None, ())
            record = Record(found.version, found.body, (*found.tail, entry))
            self._require_room("append", entry, record)
            put(txn, key, record, inf if ttl is None else now + ttl)
            return len(record.tail)

        return await self._run("append", work)

    async def replace(self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, ttl) -> bool:
        require_ttl(ttl)
        require_drop(drop, expect)

        def work(txn, now):
            found, expires = find(txn, key, now)
            if found and found.version == version:
                return True
            tail = ()
            if isinstance(expect, str):
                if not found or found.version != expect or drop > len(found.tail):
                    return False
                tail = found.tail[drop:]
            elif expect is ABSENT and found:
                return False
            record = Record(version, body, tail)
            self._require_room("replace", body, record)
            if ttl is not KEEP:
                expires = inf if ttl is None else now + ttl
            put(txn, key, record, expires)
            return True

        return await self._run("replace", work)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        def work(txn, now):
            data = txn.get(place(*key))
            there = not ended(data, now) and (expect is ANY or head(data)[1] == expect)
            return there and txn.delete(place(*key))

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)

        def work(txn, now):
            start, cursor, names = place(scope), txn.cursor(), []
            for where, data in cursor if cursor.set_range(start) else ():
                if not where.startswith(start):
                    break
                if not ended(data, now) and (name := head(data)[0]).encode() > after.encode():
                    names.append(name)
            names.sort(key=str.encode)
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

        return await self._run("scan", work, write=False)

    async def _run(self, operation: str, work, *, write: bool = True):
        environment = self._environment
        if environment is None:
            raise Unavailable("the driver is not open", backend=self.name, operation=operation)

        def transact():
            with environment.lmdb.begin(write=write) as txn:
                if write:
                    environment.sweep(txn)
                return work(txn, time.time())

        with located(self.name, operation):
            try:
                async with asyncio.timeout(self.traits.deadline):
                    return await asyncio.get_running_loop().run_in_executor(environment.thread, transact)
            except TimeoutError:
                raise (OutcomeUnknown if write else Unavailable)("no answer in time") from None
            except lmdb.Error as error:
                # LMDB aborts a transaction that fails, so nothing was done.
                raise Unavailable(str(error)) from error
            except (json.JSONDecodeError, UnicodeDecodeError, binascii.Error) as error:
                raise Corrupt("the stored bytes are not a record") from error

    def _require_room(self, operation: str, value: bytes, record: Record) -> None:
        size, where = sum(map(len, record.tail), len(record.body or b"")), {"backend": self.name}
        require_fits("entry", len(value), self.traits.max_entry, operation=operation, **where)
        require_fits("record", size, self.traits.max_record, operation=operation, **where)
