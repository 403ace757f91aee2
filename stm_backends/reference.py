"""The in-memory driver: the waist, spelled out in plain Python.

Read it as the specification of what the other drivers do. An operation lets other tasks run once before
it begins, as it would with any datastore, so that a loop that only reads and adds starves nobody; then it
awaits nothing, so it is atomic on its event loop, and a lock makes it so between threads.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stm_backends.checks import (
    not_open,
    require_clock,
    require_count,
    require_drop,
    require_fits,
    require_known,
    require_limit,
    require_seconds,
    require_ttl,
)
from stm_backends.driver import (
    ABSENT,
    ANY,
    DEFAULT_DEADLINE_S,
    KEEP,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.errors import ConfigurationError
from stm_backends.plugins import BackendPlugin, hookimpl

_MIB: Final = 1024 * 1024


@dataclass(slots=True)
class _Stored:
    """One record. `size` is the bytes of body and tail, kept up to date rather than counted."""

    version: str
    body: bytes | None = None
    tail: list[bytes] = field(default_factory=list[bytes])
    expires: float | None = None
    size: int = 0

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


@dataclass(slots=True)
class _Scope:
    records: dict[str, _Stored] = field(default_factory=dict[str, _Stored])
    sweep_at: int = 64

    def find(self, name: str, now: float) -> _Stored | None:
        """Return a record that has not expired."""
        found = self.records.get(name)
        return None if found is None or found.is_expired(now) else found

    def put(self, name: str, stored: _Stored, now: float) -> None:
        """Store a record, and now and then forget the expired ones, at a cost that is constant on average."""
        self.records[name] = stored
        if len(self.records) >= self.sweep_at:
            self.records = {n: found for n, found in self.records.items() if not found.is_expired(now)}
            self.sweep_at = 64 + 2 * len(self.records)


class MemoryStore:
    """What a datastore is to other drivers: it outlives the drivers, and several may share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scopes: dict[str, _Scope] = {}


_named_stores: Final[dict[str, MemoryStore]] = {}


class MemoryDriver:
    """The five operations on a dictionary. Each instance has its own life; a store may be shared."""

    name = "memory"

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_entry_bytes: int = 16 * _MIB,
        max_record_bytes: int = 64 * _MIB,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        require_clock(clock)
        require_count("max_entry_bytes", max_entry_bytes)
        require_count("max_record_bytes", max_record_bytes)
        require_seconds("deadline_s", deadline_s)
        self._store = MemoryStore() if store is None else store
        self._clock = clock
        self._is_open = False
        self.traits = Traits(
            reach="process",
            clock="process",
            durability="nothing survives the process",
            max_entry=max_entry_bytes,
            max_record=max_record_bytes,
            max_drop=max_record_bytes,
            deadline=deadline_s,
        )

    async def open(self) -> None:
        """Make ready. Opening twice is harmless."""
        self._is_open = True

    async def close(self) -> None:
        """Let go of the store, which keeps what it holds. Twice is harmless."""
        self._is_open = False

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, or `None` only if it is not there."""
        await asyncio.sleep(0)
        with self._scope(key.scope, "load") as (scope, now):
            found = scope.find(key.name, now)
            return Record(found.version, found.body, tuple(found.tail)) if found else None

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live starts anew."""
        require_ttl(ttl)
        self._require_entry("append", entry)
        await asyncio.sleep(0)
        with self._scope(key.scope, "append") as (scope, now):
            stored = scope.find(key.name, now) or _Stored(version=birth)
            self._require_record("append", stored.size + len(entry))
            stored.tail.append(entry)
            stored.size += len(entry)
            stored.expires = None if ttl is None else now + ttl
            scope.put(key.name, stored, now)
            return len(stored.tail)

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body and its version if the record is what the caller expects."""
        require_ttl(ttl)
        require_drop(drop, expect)
        self._require_entry("replace", body)
        await asyncio.sleep(0)
        with self._scope(key.scope, "replace") as (scope, now):
            found = scope.find(key.name, now)
            if found and found.version == version:
                return True
            if expect is ABSENT and found:
                return False
            if isinstance(expect, str) and not (
                found and found.version == expect and drop <= len(found.tail)
            ):
                return False
            tail, size = [], len(body)
            if found and isinstance(expect, str):
                tail = found.tail[drop:]
                size += found.size - len(found.body or b"") - sum(map(len, found.tail[:drop]))
            if ttl is KEEP:
                expires = found.expires if found else None
            else:
                expires = None if ttl is None else now + ttl
            self._require_record("replace", size)
            scope.put(key.name, _Stored(version, body, tail, expires, size), now)
            return True

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did."""
        await asyncio.sleep(0)
        with self._scope(key.scope, "delete") as (scope, now):
            found = scope.find(key.name, now)
            if not found or expect not in (ANY, found.version):
                return False
            del scope.records[key.name]
            return True

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        require_limit(limit)
        await asyncio.sleep(0)
        with self._scope(scope, "scan") as (found, now):
            start = after.encode()
            names = heapq.nsmallest(
                limit + 1,
                (name for name in found.records if name.encode() > start and found.find(name, now)),
                key=str.encode,
            )
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[_Scope, float]]:
        """Yield a scope to one operation at a time, with the instant at which expiry is judged."""
        if not self._is_open:
            raise not_open(backend=self.name, operation=operation)
        with self._store.lock:
            scope = self._store.scopes.setdefault(name, _Scope())
            try:
                yield scope, self._clock()
            finally:
                if not scope.records:
                    del self._store.scopes[name]

    def _require_entry(self, operation: str, value: bytes) -> None:
        require_fits("entry", len(value), self.traits.max_entry, backend=self.name, operation=operation)

    def _require_record(self, operation: str, size: int) -> None:
        require_fits("record", size, self.traits.max_record, backend=self.name, operation=operation)


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver on the store that `memory://NAME` names in this process, or on a new one.

    `options` are the keyword arguments of `MemoryDriver`.
    """
    del create  # a dictionary needs no setting up
    require_known(options, ("clock", "max_entry_bytes", "max_record_bytes", "deadline_s"), backend="memory")
    parts = urlsplit(url or "memory://")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError("a memory URL is memory:// (a new store) or memory://NAME (a shared one)")
    store = _named_stores.setdefault(unquote(parts.netloc), MemoryStore()) if parts.netloc else None
    return MemoryDriver(store, **options)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `memory`."""
    return BackendPlugin(name="memory", url_schemes=("memory",), requires=(), open=open_driver)
