"""The DynamoDB driver: one table, one item a record, one request an operation.

DynamoDB has no clock that a condition could ask, so the clock of the host that asks judges what has
expired: hosts whose clocks differ by a second disagree for a second about when a record ends.

Exceptions to one request an operation, each because a condition can say no more than yes or no:

- A birth takes two: the append that finds nothing alive, and the write that creates the record.
- A replace with `expect=ANY, ttl=KEEP` of a record that is not there takes two, likewise.
- On servers older than June 2023, which do not say what a refused write has met, a lost `replace` takes
  a read more, to tell it from one that was sent again.
- A record that is refused as too large is read, to say so and how large it would be, and the write sent
  again if there is room by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar

from stm_backends.checks import (
    not_open,
    require_clock,
    require_drop,
    require_fits,
    require_limit,
    require_ttl,
)
from stm_backends.driver import ABSENT, ANY, KEEP, AbsentType, AnyType, KeepType, Key, Page, Record, Traits
from stm_backends.edge import Edge, Places
from stm_backends.errors import Corrupt, TooLarge, Unavailable, located
from stm_backends_dynamo import statements, table
from stm_backends_dynamo.client import Requests, made, require_client
from stm_backends_dynamo.errors import INVALID, ClientError, code_of, meaning
from stm_backends_dynamo.items import Item, is_alive, item_of, key_of, record_of, size_of
from stm_backends_dynamo.settings import MAX_RECORD, DynamoSettings

T = TypeVar("T")

_MAX_ITEM: Final = 400 * 1024

_MAX_PAGE: Final = 10_000
"""DynamoDB ends a page after a megabyte, whatever it is asked for."""

_ROUNDS: Final = 5
"""How often a record may appear and vanish between two requests of one operation."""


class DynamoDriver:
    """The five operations on a table. A client that is handed in works at once and is never closed.

    `clock` is the host's, in seconds since the epoch, and should be that of all who share the table.
    `create=True` lets `open` create the table, and its time to live, if they are missing.
    """

    name = "dynamo"

    def __init__(
        self,
        settings: DynamoSettings,
        *,
        client: Any = None,
        create: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_clock(clock)
        if client is not None:
            require_client(client)
        self._settings = settings
        self._given = client
        self._client = client
        self._create = create
        self._clock = clock
        # Of a client that is handed in its owner decides how much it does at once.
        self._places: Places | None = None
        self._closing = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._running: set[asyncio.Future[None]] = set()
        self._edge = Edge(backend=self.name, deadline_s=settings.deadline_s, meaning=meaning)
        self.traits = Traits(
            reach="network",
            clock="client",
            durability="an acknowledged write is stored in several availability zones of the region",
            max_entry=settings.max_entry_bytes,
            max_record=MAX_RECORD,
            max_drop=statements.MAX_DROP,
            # Hosts whose clocks differ by half a second agree for half a second that such a record lives.
            min_ttl=1.0,
            deadline=settings.deadline_s,
        )

    async def open(self) -> None:
        """Make the client, and with `create=True` the table. Opening twice is harmless."""
        async with self._opening:
            try:
                if self._client is None:
                    self._client = self._given or await self._edge.run("open", self._make_client)
                if self._create:
                    await table.prepare(self._client, self._settings.table, backend=self.name)
                    self._create = False
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Let what has been sent end, and close the client if it is ours. Twice is harmless."""
        self._client = None
        closing, self._closing = self._closing, AsyncExitStack()
        try:
            if self._running:
                await asyncio.wait(self._running)
        finally:
            await closing.aclose()

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, or `None` only if it is not there."""

        async def work(requests: Requests, now: float) -> Record | None:
            return await self._load(requests, key, now, "load")

        return await self._run("load", work)

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live starts anew."""
        require_ttl(ttl)
        require_fits("entry", len(entry), self.traits.max_entry, backend=self.name, operation="append")

        async def work(requests: Requests, now: float) -> int:
            for _ in range(_ROUNDS):
                added = await requests.attempt(statements.append(key, entry, ttl=ttl, now=now))
                if added.done:
                    return int(added.content["Attributes"]["entries"]["N"])
                # Nothing is alive there, so this is a birth, in the place of an expired record if need be.
                born = item_of(Record(birth, None, (entry,)), ttl=ttl, now=now)
                if (await requests.attempt(statements.create(key, born, now=now))).done:
                    return 1
            raise self._unsettled("append")

        def grown(record: Record) -> Record:
            return replace(record, tail=(*record.tail, entry))

        return await self._run("append", self._measuring(work, key, grown, "append"))

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
        if drop > self.traits.max_drop:
            raise ValueError(f"one replace drops at most {self.traits.max_drop} entries, not {drop}")
        require_fits("entry", len(body), self.traits.max_entry, backend=self.name, operation="replace")

        async def work(requests: Requests, now: float) -> bool:
            async def carries(found: Item) -> bool:
                """Return whether a record that refused this write was written by it before."""
                found = found or (await requests.send(statements.load_version(key))).get("Item", {})
                return found.get("version") == {"S": version} and self._is_alive(found, now, "replace")

            if isinstance(expect, str):
                folded = await requests.attempt(
                    statements.fold(key, body, version=version, expect=expect, drop=drop, ttl=ttl, now=now)
                )
                return folded.done or await carries(folded.content)
            fresh = item_of(Record(version, body, ()), ttl=None if ttl is KEEP else ttl, now=now)
            if expect is ABSENT:
                created = await requests.attempt(statements.create(key, fresh, now=now))
                return created.done or await carries(created.content)
            if ttl is not KEEP:
                # Nothing refuses this but the record that it has written before.
                await requests.attempt(statements.save(key, fresh, now=now))
                return True
            for _ in range(_ROUNDS):
                keeping = statements.save_keeping(key, body, version=version, now=now)
                if (await requests.attempt(keeping)).done:
                    return True
                created = await requests.attempt(statements.create(key, fresh, now=now))
                if created.done or await carries(created.content):
                    return True
            raise self._unsettled("replace")

        def folded(record: Record) -> Record:
            return Record(version, body, record.tail[drop:])

        return await self._run("replace", self._measuring(work, key, folded, "replace"))

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did."""

        async def work(requests: Requests, now: float) -> bool:
            statement = statements.delete(key, expect=None if expect is ANY else expect, now=now)
            return (await requests.attempt(statement)).done

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        require_limit(limit)

        async def work(requests: Requests, now: float) -> Page:
            statement = statements.scan(scope, after=after, limit=min(limit, _MAX_PAGE), now=now)
            found = await requests.send(statement)
            names = tuple(item["sk"]["S"] for item in found["Items"])
            last = found.get("LastEvaluatedKey")
            return Page(names, last["sk"]["S"] if last else None)

        return await self._run("scan", work)

    async def _make_client(self) -> Any:
        closing = AsyncExitStack()
        client = await closing.enter_async_context(made(self._settings))
        # Only now, and together: whoever closes meanwhile has closed nothing of this.
        self._closing = closing
        self._places = Places(self._settings.pool_size, patience_s=self._settings.deadline_s / 2)
        return client

    async def _run(self, operation: str, work: Callable[[Requests, float], Awaitable[T]]) -> T:
        """Run the requests of one operation, which are judged at one instant, within the deadline."""
        if self._client is None:
            raise not_open(backend=self.name, operation=operation)
        loop = asyncio.get_running_loop()
        requests = Requests(self._client, self._settings.table, until=loop.time() + self._settings.deadline_s)

        async def in_turn() -> T:
            async with self._places or contextlib.nullcontext():
                return await work(requests, round(self._clock(), 6))

        ended: asyncio.Future[None] = loop.create_future()
        self._running.add(ended)
        try:
            with located(self.name, operation):
                return await self._edge.run(operation, in_turn)
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    async def _load(self, requests: Requests, key: Key, now: float, operation: str) -> Record | None:
        item = (await requests.send(statements.load(key))).get("Item")
        if item is None or not self._is_alive(item, now, operation):
            return None
        try:
            return record_of(item)
        except ValueError as error:
            raise self._corrupt(operation, error) from error

    def _measuring(
        self,
        work: Callable[[Requests, float], Awaitable[T]],
        key: Key,
        changed: Callable[[Record], Record],
        operation: str,
    ) -> Callable[[Requests, float], Awaitable[T]]:
        """Let a write that DynamoDB calls invalid raise `TooLarge`, if that is what is wrong with it.

        A record that has room by now was folded or erased between the refusal and the look: the write, of
        which nothing was done, is sent again.
        """

        async def measured(requests: Requests, now: float) -> T:
            rounds = _ROUNDS
            while True:
                try:
                    return await work(requests, now)
                except ClientError as error:
                    rounds -= 1
                    if code_of(error) != INVALID:
                        raise
                    record = await self._load(requests, key, now, operation)
                    if record is not None:
                        size = size_of({**key_of(key), **item_of(changed(record), ttl=1.0, now=now)})
                        if size > MAX_RECORD:
                            where = {"backend": self.name, "operation": operation}
                            raise TooLarge("record", size=size, limit=_MAX_ITEM, **where) from error
                    if not rounds:
                        raise

        return measured

    def _is_alive(self, item: Item, now: float, operation: str) -> bool:
        try:
            return is_alive(item, now)
        except ValueError as error:
            raise self._corrupt(operation, error) from error

    def _corrupt(self, operation: str, error: ValueError) -> Corrupt:
        return Corrupt(f"the record is not whole: {error}", backend=self.name, operation=operation)

    def _unsettled(self, operation: str) -> Unavailable:
        return Unavailable(
            "the record came and went between one request and the next, again and again",
            backend=self.name,
            operation=operation,
        )
