"""The five operations on RocksDB, a log-structured merge tree that one process has to itself.

Keys are in order, so a record is a run of neighbours: its head, its body, its entries. A `WriteBatch` is
stored as a whole or not at all. One thread does all the work, so nobody acts between a read and its batch.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote

from rocksdict import DbClosedError, Options, Rdict, RdictIter, WriteBatch

from stm_backends import ConfigurationError, Corrupt, OutcomeUnknown
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Settings, Traits, setting
from stm_backends.drivers.checks import require_drop, require_limit, require_rewrite, require_ttl
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.home import Home

MIB = 1024 * 1024
SEQ = struct.Struct(">Q")
END = struct.Struct(">d")
AFTER_ALL_PARTS = b"\xff"


@dataclass(frozen=True, kw_only=True)
class RocksSettings(Settings):
    backend: ClassVar = "rocks"
    url_schemes: ClassVar = ("rocks",)

    path: str = setting("", query=False)
    max_entry_bytes: int = MIB
    max_record_bytes: int = 8 * MIB

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        if parts.netloc or not parts.path[1:]:
            raise ConfigurationError("name a folder: rocks:///relative/folder or rocks:////absolute/folder")
        return {"path": unquote(parts.path[1:])}


def place(key: Key) -> bytes:
    """Return where the head of a record is; its parts have this as their prefix.

    Keys hold no NUL, so two keys never meet, and names keep the order of their bytes.
    """
    return b"%b\0%b\0" % (key.scope.encode(), key.name.encode())


def expired(data: bytes | None, now: float) -> bool:
    """Return whether a record is absent or expired; of a damaged one, too, which is then neither."""
    return data is None or (len(data) >= END.size and END.unpack_from(data)[0] <= now)


@dataclass(frozen=True)
class Head:
    """What every decision depends on; entries `first` to `next - 1` are the tail."""

    version: str
    expires: float = inf
    first: int = 0
    next: int = 0
    size: int = 0
    has_body: bool = False

    @classmethod
    def read(cls, data: bytes | None, now: float) -> Head | None:
        """Return the head of a record that exists; an expired one does not."""
        if data is None or expired(data, now):
            return None
        version, *rest = json.loads(data[END.size :])
        return cls(version, END.unpack_from(data)[0], *rest)

    def written(self) -> bytes:
        """Return when the record expires, which anyone can read, and a line with the rest."""
        version, expires, *rest = vars(self).values()
        return END.pack(expires) + json.dumps([version, *rest]).encode()


class Opened:
    """An open folder and its thread; RocksDB lets nobody open it a second time, this process included."""

    shared: ClassVar[dict[Path, Opened]] = {}
    lock: ClassVar = threading.Lock()  # for `shared` and `users`: `leave` runs in the thread

    def __init__(self, path: Path) -> None:
        self.path, self.users, self.swept = path, 0, b""
        self.db = Rdict(str(path), Options(raw_mode=True))
        self.thread = ThreadPoolExecutor(1, "stm-rocks")
        self.shared[path] = self

    def leave(self) -> None:
        """Close the folder if this was its last user."""
        with self.lock:
            self.users -= 1
            if not self.users:
                del self.shared[self.path]
                self.thread.shutdown(wait=False)
                self.db.close()

    def heads(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the heads from a place on, each without reading what belongs to it."""
        at: RdictIter = self.db.iter()
        at.seek(start)
        while at.valid():
            where = at.key()
            yield where, at.value()
            at.seek(where + AFTER_ALL_PARTS)

    def parts(self, where: bytes, head: Head) -> tuple[bytes | None, list[bytes]]:
        """Return body and tail; raises `Corrupt` if they are not what the head says."""
        body = self.db.get(where + b"b") if head.has_body else None
        tail = [self.db.get(where + b"e" + SEQ.pack(number)) for number in range(head.first, head.next)]
        if (head.has_body and body is None) or None in tail or total(body, tail) != head.size:
            raise Corrupt("a part of the record is missing")
        return body, tail

    def drop(self, batch: WriteBatch, where: bytes) -> None:
        """Remove a record and every part of it, whatever the head says; a damaged one, too."""
        batch.delete_range(where, where + AFTER_ALL_PARTS)

    def sweep(self, now: float) -> None:
        """Remove the expired ones among the next two records; each write calls this."""
        batch, heads = WriteBatch(raw_mode=True), self.heads(self.swept)
        for where, data in (next(heads, (b"", b"")), next(heads, (b"", b""))):
            if where and expired(data, now):
                self.drop(batch, where)
            self.swept = where and where + AFTER_ALL_PARTS
        self.db.write(batch)


class RocksDriver:
    """One folder of one process."""

    name = "rocks"

    def __init__(self, settings: RocksSettings) -> None:
        self._path = Path(settings.path).absolute()
        self._opened: Opened | None = None
        self.traits = Traits(
            reach="process",
            clock="host",
            durability="survives the death of the process; a power failure may take the last writes",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=1_000_000,
            deadline=settings.deadline_s,
        )
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    async def open(self) -> None:
        self._home.enter()
        if self._opened is None:
            self._opened = await self._edge.run("open", self._share)

    async def _share(self) -> Opened:
        with Opened.lock:
            opened = Opened.shared.get(self._path) or Opened(self._path)
            opened.users += 1
            return opened

    async def close(self) -> None:
        if not self._home.may_close():
            return
        opened, self._opened = self._opened, None
        if opened is not None:
            # In the thread, after all before it. A close that is cancelled ends only its own waiting.
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(opened.thread, opened.leave))
        self._home.leave()

    def _start_over(self) -> None:
        pass  # nothing here belongs to an event loop: the thread serves one after the other

    async def load(self, key: Key) -> Record | None:
        def work(opened: Opened, now: float) -> Record | None:
            head = Head.read(opened.db.get(place(key)), now)
            if head is None:
                return None
            body, tail = opened.parts(place(key), head)
            return Record(head.version, body, tuple(tail))

        return await self._run("load", work)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))

        def work(opened: Opened, now: float) -> int:
            where, batch = place(key), WriteBatch(raw_mode=True)
            found = Head.read(opened.db.get(where), now)
            if found is None:
                opened.drop(batch, where)  # what is left of an expired one
            head = found or Head(initial_version)
            self._edge.require_fits("append", "record", head.size + len(entry))
            batch.put(where + b"e" + SEQ.pack(head.next), entry)
            batch.put(
                where,
                Head(
                    head.version,
                    inf if ttl is None else now + ttl,
                    head.first,
                    head.next + 1,
                    head.size + len(entry),
                    head.has_body,
                ).written(),
            )
            opened.db.write(batch)
            return head.next + 1 - head.first

        return await self._run("append", work)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_ttl(ttl)
        require_drop(drop, expect)
        if rewrite:
            require_rewrite(rewrite, drop, expect, self.traits, backend=self.name)
        going = drop or len(rewrite)
        self._edge.require_fits("replace", "entry", len(body))

        def work(opened: Opened, now: float) -> bool:
            where, batch = place(key), WriteBatch(raw_mode=True)
            head = Head.read(opened.db.get(where), now)
            if head and head.version == version:
                return True
            tail: list[bytes] = []
            if isinstance(expect, str):
                if head is None or head.version != expect or going > head.next - head.first:
                    return False
                tail = [*rewrite, *opened.parts(where, head)[1][going:]]
            elif expect is ABSENT and head:
                return False
            size = total(body, tail)
            self._edge.require_fits("replace", "record", size)
            expires = head.expires if head else inf
            if ttl is not KEEP:
                expires = inf if ttl is None else now + ttl
            opened.drop(batch, where)
            batch.put(where + b"b", body)
            for number, entry in enumerate(tail):
                batch.put(where + b"e" + SEQ.pack(number), entry)
            batch.put(where, Head(version, expires, 0, len(tail), size, has_body=True).written())
            opened.db.write(batch)
            return True

        return await self._run("replace", work)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        def work(opened: Opened, now: float) -> bool:
            where, batch = place(key), WriteBatch(raw_mode=True)
            # Parsed only to compare the version: what cannot be read can be deleted.
            if expired(opened.db.get(where), now) or (
                expect is not ANY and Head.read(opened.db.get(where), now).version != expect
            ):
                return False
            opened.drop(batch, where)
            opened.db.write(batch)
            return True

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)

        def work(opened: Opened, now: float) -> Page:
            start, names = scope.encode() + b"\0", []
            for where, data in opened.heads(start + after.encode() + b"\0" + AFTER_ALL_PARTS):
                if not where.startswith(start):
                    break
                if not expired(data, now):
                    names.append(where[len(start) : -1].decode())
                if len(names) > limit:
                    return Page(tuple(names[:limit]), names[limit - 1])
            return Page(tuple(names), None)

        return await self._run("scan", work)

    async def _run(self, operation: str, work: Callable[[Opened, float], Any]) -> Any:
        opened = self._opened
        if opened is None:
            raise self._edge.not_open(operation)

        def act() -> Any:
            if operation not in ("load", "scan"):
                opened.sweep(time.time())
            return work(opened, time.time())

        loop = asyncio.get_running_loop()
        return await self._edge.run(operation, lambda: loop.run_in_executor(opened.thread, act))


def total(body: bytes | None, tail: list[bytes]) -> int:
    return sum(map(len, tail), len(body or b""))


def meaning(error: Exception):
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return Corrupt, "the stored bytes are not a record"
    # rocksdict raises plain `Exception` for what RocksDB reports, such as a failed write to the log.
    if type(error) is Exception or isinstance(error, DbClosedError):
        return OutcomeUnknown, "RocksDB failed"
    return None


async def open_rocks(url: str) -> RocksDriver:
    """Return an open driver; what `Datastore.open` calls."""
    driver = RocksDriver(RocksSettings.from_url(url))
    await driver.open()
    return driver
