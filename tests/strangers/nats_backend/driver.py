"""The five operations on a stream of JetStream; a write is one message, if the last one is as it was read."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import TypeAlias, TypeVar
from weakref import WeakValueDictionary

import nats.errors
from nats.aio.client import Client

from stm_backends import Corrupt, OutcomeUnknown, StorageError, Unavailable
from stm_backends.drivers import (
    ABSENT,
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    KeepType,
    Key,
    Page,
    Record,
    Remains,
    Traits,
)
from stm_backends.drivers.checks import (
    require_drop,
    require_last,
    require_limit,
    require_rewrite,
    require_ttl,
)
from stm_backends.drivers.edge import ConcurrencyLimit, Edge
from stm_backends.drivers.home import Home
from tests.strangers.nats_backend.layout import (
    GONE,
    Stored,
    decode,
    encode,
    name_of,
    scope_of,
    size_of,
    subject_of,
)
from tests.strangers.nats_backend.link import Link, LinkLost
from tests.strangers.nats_backend.settings import OVERHEAD, NatsSettings
from tests.strangers.nats_backend.stream import (
    Found,
    last_of,
    last_of_each,
    next_of,
    prepare,
    put,
    remove,
    subjects_of,
)

T = TypeVar("T")

AT_ONCE = 32
"""How many records a listing reads at once: each may be a whole message."""

Decision: TypeAlias = tuple[T, bytes | None]
"""The answer of a write, and the message to store; `None` if the write changes nothing."""


class Clock:
    """When an operation must have begun its last request, and when it must have ended."""

    def __init__(self, deadline_s: float) -> None:
        now = asyncio.get_running_loop().time()
        self.half, self.end = now + deadline_s / 2, now + deadline_s * 0.9


class NatsDriver:
    """One stream, shared by all that reach its servers."""

    name = "nats"

    def __init__(
        self,
        settings: NatsSettings,
        *,
        create: bool = False,
        client: Client | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._create, self._client, self._clock = settings, create, client, clock
        self.traits = Traits(
            reach="network",
            clock="client",
            durability="survives the death of a server process; of a power failure only what the server had "
            "synced to its disk, every two minutes unless sync_interval says otherwise, or has on replicas",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=1_000_000,
            overhead=OVERHEAD,
            deadline=settings.deadline_s,
        )
        self._start_over()
        self._home = Home(self._start_over, client=client)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    def _start_over(self) -> None:
        self._is_open = False
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._farewells: set[asyncio.Task[None]] = set()
        # Weak, so that a lock goes when nobody waits for it.
        self._turns: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def open(self) -> None:
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        await self._home.close(self._end)

    async def _begin(self) -> None:
        async def work() -> None:
            async with asyncio.timeout(self.traits.deadline * 0.9):
                link = await self._connected()
                await prepare(link, self._settings, create=self._create)

        self._limit = ConcurrencyLimit(self._settings.pool_size, patience_s=self.traits.deadline / 2)
        await self._edge.run("open", work)
        self._is_open = True

    async def _end(self) -> None:
        # In a task of its own: a close that is cancelled ends only its own waiting.
        self._ending = asyncio.ensure_future(self._finish())
        await asyncio.shield(self._ending)

    async def _finish(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._limit.drain()  # each ends with its result, or at its deadline with an error
        if self._link is not None:
            self._retire(self._link)
        if self._farewells:
            await asyncio.wait(self._farewells)

    # Connections

    async def _connected(self) -> Link:
        """Return the connection, which is made anew if it was lost."""
        async with self._connecting:
            if self._link is not None and not self._link.is_lost:
                return self._link
            if self._link is not None:
                self._retire(self._link)
            link = Link(self._client)
            try:
                await link.open(self._settings, timeout_s=self.traits.deadline / 4)
            except BaseException:
                self._close_soon(link)
                raise
            self._link = link
            return link

    def _retire(self, link: Link) -> None:
        """Use a connection no more, and close it once the others that wait on it have ended."""
        if self._link is link:
            self._link = None
            link.when_idle(lambda: self._close_soon(link))

    def _close_soon(self, link: Link) -> None:
        task = asyncio.ensure_future(link.close())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _ask(self, request: Callable[[Link], Awaitable[T]]) -> T:
        """Make a request that changes nothing, on a new connection if the first one does not answer."""
        for last in (False, True):
            link = await self._connected()
            try:
                async with asyncio.timeout(self.traits.deadline / 3):
                    return await request(link)
            except (TimeoutError, LinkLost) as error:
                self._retire(link)
                if last:
                    raise Unavailable("the server did not answer") from error
        raise AssertionError

    # Reading

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        require_last(last)

        async def work() -> Record | None:
            found = await self._find(key)
            stored = self._living(found)
            return stored and stored.record.newest(last)

        return await self._run("load", work)

    async def _find(self, key: Key) -> Found:
        stream = self._settings.stream
        return await self._ask(lambda link: last_of(link, stream, subject_of(stream, key)))

    def _living(self, found: Found) -> Stored | None:
        """Return a record that has not expired by now, which is after it was read."""
        stored = None if found.data is None else decode(found.data)
        return stored if stored and stored.expires > self._clock() else None

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)
        return await self._run("scan", lambda: self._page(scope, after, limit, living=True))

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names whose record has expired, or was deleted by a process that died before it had ended."""
        require_limit(limit)
        return await self._run("scan", lambda: self._page(scope, after, limit, living=False))

    async def _page(self, scope: str, after: str, limit: int, *, living: bool) -> Page:
        stream = self._settings.stream
        prefix = scope_of(stream, scope)
        subjects = await self._ask(lambda link: subjects_of(link, stream, prefix))
        beginning = prefix + after.encode().hex()
        subjects = [subject for subject in subjects if subject > beginning]
        listed: list[str] = []
        for at in range(0, min(limit, len(subjects)), AT_ONCE):
            some = subjects[at : min(limit, at + AT_ONCE)]
            found = await self._ask(lambda link, some=some: last_of_each(link, stream, some))
            listed += [
                name_of(one) for one, what in zip(some, found, strict=True) if self._lives(what) is living
            ]
        return Page(tuple(listed), name_of(subjects[limit - 1]) if len(subjects) > limit else None)

    def _lives(self, found: Found) -> bool | None:
        """Return whether a record exists, and `None` if nothing is stored of it. A damaged one exists."""
        if not found.sequence:
            return None
        try:
            return self._living(found) is not None
        except Corrupt:
            return True

    # Writing

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))

        def decide(found: Found) -> Decision[int]:
            stored, now = self._living(found), self._clock()
            record = stored.record if stored else Record(initial_version, None, ())
            record = Record(record.version, record.body, (*record.tail, entry))
            return len(record.tail), self._message("append", record, inf if ttl is None else now + ttl)

        return await self._change("append", key, decide)

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
        require_ttl(ttl)
        require_drop(drop, expect)
        if rewrite:
            require_rewrite(rewrite, drop, expect, self.traits, backend=self.name)
        self._edge.require_fits("replace", "entry", len(body))
        going = drop or len(rewrite)

        def decide(found: Found) -> Decision[bool]:
            stored, now, tail = self._living(found), self._clock(), ()
            if stored and stored.record.version == version:
                return True, None
            if isinstance(expect, str):
                if not stored or stored.record.version != expect or len(stored.record.tail) < going:
                    return False, None
                tail = (*rewrite, *stored.record.tail[going:])
            elif expect is ABSENT and stored:
                return False, None
            kept = stored.expires if stored else inf
            expires = kept if ttl is KEEP else inf if ttl is None else now + ttl
            return True, self._message("replace", Record(version, body, tail), expires)

        return await self._change("replace", key, decide)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        def decide(found: Found) -> Decision[bool]:
            try:
                stored = self._living(found)
            except Corrupt:
                if expect is not ANY:
                    raise
                return True, GONE
            if stored is None:
                # What has expired, and what another delete has left, goes as well.
                return False, GONE if found.sequence else None
            matches = expect is ANY or stored.record.version == expect
            return matches, GONE if matches else None

        return await self._change("delete", key, decide)

    def _message(self, operation: str, record: Record, expires: float) -> bytes:
        self._edge.require_fits(operation, "record", size_of(record))
        return encode(record, expires)

    async def _change(self, operation: str, key: Key, decide: Callable[[Found], Decision[T]]) -> T:
        """Read, decide and store until nobody else has changed the record in between.

        A conflict is no answer: `decide` alone says `False`. The queue is within the deadline, like all else.
        """

        async def work() -> T:
            clock = Clock(self.traits.deadline)
            async with self._turn(key, clock):
                while True:
                    async with before(
                        clock.half, "the record could not be read in time; nothing was written"
                    ):
                        found = await self._find(key)
                        answer, message = decide(found)
                        if message is None:
                            return answer
                        link = await self._connected()
                    if await self._store(link, key, message, found, clock):
                        return answer
                    async with before(clock.half, "other writers changed the record again and again"):
                        await asyncio.sleep(random.uniform(0, 0.01))

        return await self._run(operation, work)

    @asynccontextmanager
    async def _turn(self, key: Key, clock: Clock) -> AsyncGenerator[None]:
        """Let the writers of this process write in turn, so that they do not refuse each other."""
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with before(clock.half, "other writers of this process were first for too long"):
            await turn.acquire()
        try:
            yield
        finally:
            turn.release()

    async def _store(self, link: Link, key: Key, message: bytes, found: Found, clock: Clock) -> bool:
        """Store a message in the place of the one that was read; returns whether it was still the last."""
        stream = self._settings.stream
        subject = subject_of(stream, key)
        try:
            async with asyncio.timeout_at(clock.end):
                sequence = await put(link, stream, subject, message, sequence=found.sequence)
        except TimeoutError:
            self._retire(link)
            raise OutcomeUnknown("no answer within the deadline") from None
        except OutcomeUnknown:
            self._retire(link)
            raise
        if sequence and message == GONE:
            await self._remove(link, sequence, clock)
        return bool(sequence)

    async def _remove(self, link: Link, sequence: int, clock: Clock) -> None:
        """Remove what says that a record is gone. Without this, it is as gone, and `purge` does it."""
        try:
            async with asyncio.timeout_at(clock.end):
                await remove(link, self._settings.stream, sequence)
        except (TimeoutError, LinkLost):
            self._retire(link)
        except StorageError:
            pass

    # Beside the operations

    async def expired(self) -> int:
        """Return how many expired records are still stored; changes nothing."""
        return len([sequence async for sequence in self._expired()])

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records; returns how many."""
        require_limit(limit)
        stream, removed = self._settings.stream, 0
        async for sequence in self._expired():
            # A writer that has read this record takes it for absent, so nothing but it can be lost.
            gone = functools.partial(remove, stream=stream, sequence=sequence)
            removed += await self._run("scan", functools.partial(self._ask, gone))
            if removed == limit:
                break
        return removed

    async def _expired(self) -> AsyncIterator[int]:
        """Yield the sequences of the messages of expired records, and of deletes that were interrupted."""
        stream, at = self._settings.stream, 1
        while True:
            following_at = functools.partial(next_of, stream=stream, sequence=at)
            following = await self._run("scan", functools.partial(self._ask, following_at))
            if following is None:
                return
            _, found = following
            if self._lives(found) is False:
                yield found.sequence
            at = found.sequence + 1

    async def finish_erasure(self) -> Remains:
        """Return what a stream keeps of deleted records."""
        return Remains(
            "the files of the stream may hold bytes of former messages until the servers compact them, and "
            "backups, mirrors and snapshots of the stream are not touched"
        )

    async def _run(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        if not self._is_open:
            raise self._edge.not_open(operation)

        async def counted() -> T:
            async with self._limit:
                return await work()

        return await self._edge.run(operation, counted)


@asynccontextmanager
async def before(when: float, otherwise: str) -> AsyncGenerator[None]:
    """Raise `Unavailable` if something that changes nothing takes too long."""
    try:
        async with asyncio.timeout_at(when):
            yield
    except TimeoutError:
        raise Unavailable(otherwise) from None


def meaning(error: Exception) -> tuple[type[StorageError], str] | None:
    """Return the error to raise for one of the client; `None` for a bug of this package."""
    if isinstance(error, LinkLost):
        return OutcomeUnknown, "the connection was lost before the answer came"
    if isinstance(error, (nats.errors.Error, OSError)):
        return OutcomeUnknown, f"the client failed ({type(error).__name__})"
    return (Corrupt, "the answer of the server cannot be read") if isinstance(error, ValueError) else None


async def open_nats(url: str, *, clock: Callable[[], float] = time.time) -> NatsDriver:
    """Return an open driver, and make its stream if need be; what `Datastore.open` calls."""
    driver = NatsDriver(NatsSettings.from_url(url), create=True, clock=clock)
    await driver.open()
    return driver
