"""The in-memory driver: the driver contract in plain Python.

It is the reference for the other drivers. An operation yields to other tasks once before it begins, as it
would with any datastore, so that a loop of operations does not block the event loop. After that it awaits
nothing, so it is atomic on its event loop, and a lock makes it atomic between threads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stm_backends.drivers.checks import (
    checked_clock,
    not_open,
    require_append,
    require_count,
    require_fits,
    require_known,
    require_last,
    require_limit,
    require_replace,
    require_seconds,
    skipped_of,
)
from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    CONTRACT,
    DEFAULT_DEADLINE_S,
    KEEP,
    NO_LIMIT,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import Home
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.settings import merged
from stm_backends.errors import ConfigurationError, StorageError

_MIB: Final = 1024 * 1024

_REMAINS: Final = Remains(
    "memory: nothing remains, except what the operating system may have swapped or dumped."
)

_READS: Final = ("load", "scan", "expired", "purge")

_STEP: Final = 1_000
"""Number of expiring records that a purge checks at once."""


@dataclass(slots=True)
class _Stored:
    """One record. `size` is the bytes of body and tail, updated with each write."""

    version: str
    body: bytes | None = None
    tail: list[bytes] = field(default_factory=list[bytes])
    expires: float | None = None
    size: int = 0


@dataclass(slots=True)
class _Scope:
    records: dict[str, _Stored] = field(default_factory=dict[str, _Stored])

    def find(self, name: str, now: float) -> _Stored | None:
        """Return a record that has not expired."""
        found = self.records.get(name)
        if found is None or (found.expires is not None and found.expires <= now):
            return None
        return found


class MemoryStore:
    """The datastore of this driver: it outlives the drivers, and several drivers may share it.

    `mortal` has the keys of all records that expire. Each write checks a few of them in turn, in any scope,
    and removes those that have expired. So the cost of a write is bounded, and expired records do not
    accumulate.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scopes: dict[str, _Scope] = {}
        self.mortal: OrderedDict[Key, None] = OrderedDict()

    def scope(self, name: str) -> _Scope:
        """Return a scope; an empty one is not stored until a record is put into it."""
        return self.scopes.get(name) or _Scope()

    def put(self, key: Key, stored: _Stored) -> None:
        """Store a record."""
        scope = self.scopes.get(key.scope)
        if scope is None:
            scope = self.scopes[key.scope] = _Scope()
        scope.records[key.name] = stored
        if stored.expires is None:
            self.mortal.pop(key, None)
        else:
            self.mortal[key] = None

    def remove(self, key: Key) -> None:
        """Remove a record that exists."""
        records = self.scopes[key.scope].records
        del records[key.name]
        if not records:
            del self.scopes[key.scope]
        self.mortal.pop(key, None)

    def is_expired(self, key: Key, now: float) -> bool:
        """Say whether a record has expired and is still stored."""
        return key in self.mortal and self.scopes[key.scope].find(key.name, now) is None

    def sweep(self, now: float, count: int) -> None:
        """Check the next `count` records that expire, and remove those that have expired."""
        for key in list(itertools.islice(self.mortal, count)):
            if self.is_expired(key, now):
                self.remove(key)
            else:
                self.mortal.move_to_end(key)


_named_stores: Final[dict[str, MemoryStore]] = {}


class MemoryDriver:
    """The five operations on a dictionary, which instances may share."""

    name = "memory"

    _swept = 8
    """Number of expiring records that each write checks."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_entry_bytes: int = 16 * _MIB,
        max_record_bytes: int = 64 * _MIB,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        require_count("max_entry_bytes", max_entry_bytes)
        require_count("max_record_bytes", max_record_bytes)
        require_seconds("deadline_s", deadline_s)
        self._store = MemoryStore() if store is None else store
        self._clock = checked_clock(clock)
        self._is_open = False
        self._home = Home(self._start_over)
        self.traits = Traits(
            reach="process",
            clock="process",
            durability="nothing survives the process",
            max_entry=max_entry_bytes,
            max_record=max_record_bytes,
            max_drop=NO_LIMIT,
            deadline=deadline_s,
        )

    async def open(self) -> None:
        """Get ready for operations. Opening twice is harmless."""
        self._home.enter()
        self._is_open = True

    async def close(self) -> None:
        """Stop using the store, which keeps its records. Twice is harmless."""
        if self._home.may_close():
            self._is_open = False
            self._home.leave()

    def _start_over(self) -> None:
        self._is_open = False

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        require_last(last)
        await _others()
        with self._scope(key.scope, "load") as (scope, now):
            found = scope.find(key.name, now)
            if found is None:
                return None
            skipped = skipped_of(len(found.tail), last)
            return Record(found.version, found.body, tuple(found.tail[skipped:]), skipped)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live is reset."""
        require_append(entry, ttl, self.traits, backend=self.name)
        await _others()
        with self._scope(key.scope, "append") as (scope, now):
            stored = scope.find(key.name, now) or _Stored(version=initial_version)
            size = stored.size + len(entry)
            require_fits("record", size, self.traits.max_record)
            stored.tail.append(entry)
            stored.size = size
            stored.expires = None if ttl is None else now + ttl
            self._store.put(key, stored)
            return len(stored.tail)

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
        going = drop or len(rewrite)
        await _others()
        with self._scope(key.scope, "replace") as (scope, now):
            found = scope.find(key.name, now)
            if found and found.version == version:
                return True
            if expect is ABSENT and found:
                return False
            if isinstance(expect, str) and not (
                found and found.version == expect and going <= len(found.tail)
            ):
                return False
            tail, size = [], len(body)
            if found and isinstance(expect, str):
                tail = [*rewrite, *found.tail[going:]]
                size += found.size - len(found.body or b"") - sum(map(len, found.tail[:going]))
                size += sum(map(len, rewrite))
            if ttl is KEEP:
                expires = found.expires if found else None
            else:
                expires = None if ttl is None else now + ttl
            require_fits("record", size, self.traits.max_record)
            self._store.put(key, _Stored(version, body, tail, expires, size))
            return True

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did."""
        await _others()
        with self._scope(key.scope, "delete") as (scope, now):
            found = scope.find(key.name, now)
            if found and expect not in (ANY, found.version):
                return False
            if key.name in scope.records:
                # An expired record, too.
                self._store.remove(key)
            return found is not None

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self._names(scope, after, limit, expired=False)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that have expired and are still in the store; `delete` removes them."""
        return await self._names(scope, after, limit, expired=True)

    async def finish_erasure(self) -> Remains:
        """Return what remains of deleted records: nothing that this driver can reach."""
        return _REMAINS

    async def _names(self, scope: str, after: str, limit: int, *, expired: bool) -> Page:
        require_limit(limit)
        await _others()
        with self._scope(scope, "scan") as (found, now):
            start = after.encode()
            names = heapq.nsmallest(
                limit + 1,
                (
                    name
                    for name in found.records
                    if name.encode() > start and (found.find(name, now) is None) is expired
                ),
                key=str.encode,
            )
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

    async def next_scope(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`."""
        await _others()
        with self._scope("", "scan"):
            start = after.encode()
            later = (scope for scope in self._store.scopes if scope.encode() > start)
            return min(later, key=str.encode, default=None)

    async def expired(self) -> int:
        """Return how many expired records the store still holds."""
        await _others()
        with self._scope("", "expired") as (_, now):
            return sum(self._store.is_expired(key, now) for key in self._store.mortal)

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records; returns how many. Other tasks and threads run in between."""
        require_limit(limit)
        await _others()
        with self._scope("", "purge"):
            keys, gone = iter([*self._store.mortal]), 0
        while gone < limit and (step := [*itertools.islice(keys, _STEP)]):
            await _others()
            with self._scope("", "purge") as (_, now):
                expired = [key for key in step if self._store.is_expired(key, now)][: limit - gone]
                for key in expired:
                    self._store.remove(key)
                gone += len(expired)
        return gone

    def _scope(self, name: str, operation: str) -> AbstractContextManager[tuple[_Scope, float]]:
        """Give a scope to one operation at a time, with the time at which expiry is judged."""
        if self._is_open:
            # Before the lock is taken, which another thread may have held when this process was forked.
            self._home.require()
        return _Operation(self._store.lock, self._begin, self.name, name, operation)

    def _begin(self, name: str, operation: str) -> tuple[_Scope, float]:
        """Return a scope and the time; called with the lock of the store held."""
        if not self._is_open:
            raise not_open(opened=self._home.was_entered, backend=self.name, operation=operation)
        now = self._clock()
        if self._store.mortal and operation not in _READS:
            self._store.sweep(now, self._swept)
        return self._store.scope(name), now


class _Operation:
    """One operation in one scope: it holds the store's lock, and its errors say where they happened.

    A class, because each operation enters one, and a generator takes more steps.
    """

    __slots__ = ("_backend", "_begin", "_lock", "_name", "_operation")

    def __init__(
        self,
        lock: threading.Lock,
        begin: Callable[[str, str], tuple[_Scope, float]],
        backend: str,
        name: str,
        operation: str,
    ) -> None:
        self._lock = lock
        self._begin = begin
        self._backend = backend
        self._name = name
        self._operation = operation

    def __enter__(self) -> tuple[_Scope, float]:
        self._lock.acquire()
        try:
            return self._begin(self._name, self._operation)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if isinstance(error, StorageError):
            error.backend = error.backend or self._backend
            error.operation = error.operation or self._operation


@types.coroutine
def _others() -> Generator[None]:
    """Let other tasks run once: `asyncio.sleep(0)` in one step."""
    yield


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver on the store named by `memory://NAME` or the option `name`, or on a new store.

    All drivers of this process with the same name share a store, which lasts as long as the process.
    The other `options` are the keyword arguments of `MemoryDriver`.
    """
    del create  # a dictionary needs no setup
    known = ("name", "clock", "max_entry_bytes", "max_record_bytes", "deadline_s")
    require_known(options, known, backend="memory")
    try:
        parts = urlsplit(url or "memory://")
    except ValueError:
        parts = None
    if parts is None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError("a memory URL is memory:// (a new store) or memory://NAME (a shared one)")
    options = merged({"name": unquote(parts.netloc)} if parts.netloc else {}, options)
    name: object = options.pop("name", None)
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(
            "name must be a string that is not empty: the name of a store that drivers of this process share"
        )
    store = None if name is None else _named_stores.setdefault(name, MemoryStore())
    return MemoryDriver(store, **options)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `memory`."""
    return BackendPlugin(name="memory", url_schemes=("memory",), open=open_driver, contract=CONTRACT)
