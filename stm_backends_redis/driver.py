"""The Redis driver: records in one Redis, in a master found by sentinels, or spread over a Redis Cluster.

Every operation is one command or one script, and takes one round trip, with four exceptions that do nothing
twice. A server that does not know a script (it was restarted, or its scripts were flushed) is sent the text.
A cluster that moves a slot redirects the operation, or asks for a retry a moment later. Large records are
loaded in slices.

The keys of one scope share a hash tag, so that a record and the index of its scope are in one slot.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import NoScriptError

from stm_backends.drivers.checks import (
    LONGEST_S,
    require_append,
    require_last,
    require_limit,
    require_replace,
    skipped_of,
)
from stm_backends.drivers.coalesced import ALL
from stm_backends.drivers.contract import ANY, AbsentType, AnyType, KeepType, Key, Page, Record, Traits, Ttl
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import Home
from stm_backends.errors import Corrupt, Unavailable
from stm_backends_redis import statements
from stm_backends_redis.client import Client, make_client, require_client
from stm_backends_redis.durability import Safeguard
from stm_backends_redis.errors import NODE, REFUSALS, before_sending, meaning
from stm_backends_redis.servers import Argument, Command, Connected, Exchange
from stm_backends_redis.settings import RedisSettings
from stm_backends_redis.slices import Slices, measured
from stm_backends_redis.statements import Statement
from stm_backends_redis.tidying import Tidying, indexes

_MAX_DROP: Final = 1_000
"""Maximum number of entries that a script drops, which blocks other clients for a few milliseconds."""

_REMAINS: Final = Remains(
    "Redis: the commands that wrote the deleted records remain in the append-only file until its next "
    "rewrite (BGREWRITEAOF), the records in the last snapshot until the next one (BGSAVE), in replicas "
    "until they apply the deletion, and in copies of these files."
)

_MAX_PAGE: Final = 10_000
"""Maximum page size; a larger page would block the server's other clients for too long."""

_SHARED_PAGE: Final = 1_000
"""Larger pages do not use the connection that other commands share."""


class RedisDriver:
    """The five operations on Redis.

    A `client` of `redis.asyncio` is never closed here, and works without `open()`, which then only checks the
    server. Without a client, `open` creates one and `close` closes it.
    """

    name = "redis"

    def __init__(self, settings: RedisSettings | None = None, *, client: Client | None = None) -> None:
        self._settings = settings = settings or RedisSettings()
        self._handed_in = client
        self._start_over()
        self._home = Home(self._start_over, client=client)
        self._sent: set[Statement] = set()
        self._safeguard = Safeguard(settings)
        self.traits = Traits(
            reach="network",
            clock="server",
            durability=self._safeguard.sentence,
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=_MAX_DROP,
            deadline=settings.deadline_s,
            shows_unconfirmed=self._safeguard.is_asked,
        )
        self._edge = Edge(
            backend=self.name,
            traits=self.traits,
            meaning=meaning,
            before_sending=before_sending,
            home=self._home,
        )

    async def open(self) -> None:
        """Connect, log in, and check that the server supports the durability settings. Harmless twice."""
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        """Wait for operations in progress; close the client unless it was passed in. Harmless twice."""
        await self._home.close(self._end)

    async def _begin(self) -> None:
        client = self._given or make_client(self._settings)
        try:
            await self._edge.run("open", lambda: self._greet(client))
        except BaseException:
            await client.close()
            raise
        self._client = client

    async def _end(self) -> None:
        client, self._client, self._tidying = self._client, None, None
        if client is not None:
            await client.close()

    def _start_over(self) -> None:
        """Create the objects that belong to one event loop."""
        given, silence_s = self._handed_in, self._settings.deadline_s
        self._given = None if given is None else require_client(given, silence_s=silence_s)
        self._client = self._given
        self._slices = Slices()
        self._tidying: Tidying | None = None

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        require_last(last)
        self._require_open("load")
        record, _ = self._keys(key)
        give_up_at = self._give_up_at()

        async def ask(statement: Statement, *arguments: int, apart: bool = False) -> list[bytes]:
            keys = (record,) if statement is statements.LOAD else (1, record)
            return await self._ask(
                "load", statement, (*keys, *arguments), key=record, apart=apart, give_up_at=give_up_at
            )

        async def read() -> Record | None:
            try:
                elements = await self._slices.read(record, ask, ALL if last is None else min(last, ALL))
                return _record(elements, last) if elements else None
            except ValueError:
                raise Corrupt("a part of the record is missing") from None

        return await self._edge.run("load", read)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end. Keeps the version and resets the time to live."""
        require_append(entry, ttl, self.traits, backend=self.name)
        most = self.traits.max_record
        length: int = await self._write(
            "append", statements.APPEND, key, initial_version.encode(), _milliseconds(ttl), most, entry
        )
        return self._fitting("append", length)

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
        condition, expected = ("is", expect) if isinstance(expect, str) else (expect.value, "")
        if rewrite:
            rewritten: int = await self._write(
                "replace",
                statements.REWRITE,
                key,
                version.encode(),
                expected.encode(),
                _milliseconds(ttl),
                self.traits.max_record,
                body,
                int(self._safeguard.is_asked),
                *rewrite,
            )
            return self._fitting("replace", rewritten) == 1
        stored: int = await self._write(
            "replace",
            statements.REPLACE,
            key,
            version.encode(),
            condition,
            expected.encode(),
            drop,
            _milliseconds(ttl),
            self.traits.max_record,
            body,
            int(self._safeguard.is_asked),
        )
        return self._fitting("replace", stored) == 1

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`, and return whether it did."""
        condition, expected = ("any", "") if expect is ANY else ("is", expect)
        removed: int = await self._write(
            "delete", statements.DELETE, key, condition, expected.encode(), int(self._safeguard.is_asked)
        )
        return removed == 1

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)
        index = self._index(scope)
        arguments = (1, index, after.encode(), limit)
        found: list[bytes] = await self._run(
            "scan", statements.SCAN, arguments, key=index, apart=limit > _SHARED_PAGE
        )
        try:
            following, *names = (name.decode() for name in found)
        except UnicodeDecodeError:
            raise Corrupt(
                "the index of the scope has a name that is not UTF-8, written by another program",
                backend=self.name,
                operation="scan",
            ) from None
        return Page(tuple(names), following or None)

    async def finish_erasure(self) -> Remains:
        """Describe what remains of deleted records."""
        return _REMAINS

    async def expired(self) -> int:
        """Return the number of names of expired records that the indexes of all scopes still hold."""
        tidying, total = self._new_tidying(count_only=True), 0
        while (step := await tidying.step(_MAX_PAGE)) is not None:
            total += step
        return total

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` names of expired records from the indexes, and return their number.

        After a call that removed `limit` names, the next call continues. On a cluster, all masters are asked.
        """
        require_limit(limit)
        client = self._client
        tidying, self._tidying = self._tidying or self._new_tidying(), None
        gone = 0
        while gone < limit:
            step = await tidying.step(limit - gone)
            if step is None:
                return gone
            gone += step
        if self._client is client:
            self._tidying = tidying
        return gone

    def _new_tidying(self, *, count_only: bool = False) -> Tidying:
        client = self._client
        if client is None:
            raise self._edge.not_open("purge")

        async def ask(master: Exchange, command: Command) -> Any:
            async def send() -> Any:
                if self._client is not client:  # sending after `close` would reconnect
                    raise self._edge.not_open("purge")
                (answer,) = await master(b"", command)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return await self._edge.run("purge", send)

        async def look(index: bytes, after: bytes, limit: int) -> tuple[int, bytes]:
            arguments = (1, index, after, limit, int(count_only))
            expired, rest = await self._run("purge", statements.TIDY, arguments, key=index)
            return expired, rest

        return Tidying(indexes(client, self._settings.key_prefix, ask), look)

    # Sending

    async def _write(self, operation: str, script: Statement, key: Key, *arguments: Argument) -> Any:
        record, index = self._keys(key)
        return await self._run(
            operation,
            script,
            (2, record, index, key.name.encode(), *arguments),
            key=index,
            behind=self._safeguard.behind,
        )

    async def _run(
        self,
        operation: str,
        statement: Statement,
        arguments: tuple[Argument, ...],
        *,
        key: bytes,
        behind: tuple[Command, ...] = (),
        apart: bool = False,
    ) -> Any:
        """Return the answer to a command or a script, within the deadline."""
        self._require_open(operation)
        give_up_at = self._give_up_at()
        return await self._edge.run(
            operation,
            lambda: self._ask(
                operation, statement, arguments, key=key, behind=behind, apart=apart, give_up_at=give_up_at
            ),
        )

    def _require_open(self, operation: str) -> None:
        """Raise if there is no client. The edge makes its event loop the driver's home."""
        if self._client is None:
            raise self._edge.not_open(operation)

    def _give_up_at(self) -> float:
        """Return the time until which a refused operation that begins now is sent again.

        All commands and retries of the operation share this time, so that the reason of the last refusal is
        raised before the deadline ends them.
        """
        return asyncio.get_running_loop().time() + self._settings.deadline_s * 0.8

    async def _ask(
        self,
        operation: str,
        statement: Statement,
        arguments: tuple[Argument, ...],
        *,
        key: bytes,
        behind: tuple[Command, ...] = (),
        apart: bool = False,
        give_up_at: float,
    ) -> Any:
        """Return the answer to a command or a script; `behind` is sent after it in the same packet.

        `apart` keeps it off the shared connection, where a large answer would hold up other commands.
        """
        client = self._client
        # A WAIT after a script unknown to the server would wait for nothing.
        command = statement.command if not behind or statement in self._sent else statement.in_full
        while True:
            if client is None or self._client is not client:  # sending after `close` would reconnect
                raise self._edge.not_open(operation)
            try:
                answer, *rest = await client.exchange(key, (*command, *arguments), *behind, apart=apart)
                if isinstance(answer, Exception):
                    raise answer
                if not behind:
                    return answer
                self._sent.add(statement)
                return self._safeguard.confirmed(answer, *rest)
            except NoScriptError:
                command = statement.in_full
            except REFUSALS:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
                await asyncio.sleep(random.uniform(0.005, 0.05))

    async def _greet(self, client: Connected) -> None:
        """Check the login, the server and its kind without a key: a user may have only one tenant's keys."""
        if not client.is_cluster:
            (facts,) = await client.exchange(b"", statements.HELLO)
            if statements.is_node_of_cluster(facts):
                raise Unavailable(NODE)
        (answer,) = await client.exchange(b"", statements.GREET)
        if isinstance(answer, Exception):
            raise answer
        await self._safeguard.require(client)

    def _index(self, scope: str) -> bytes:
        """Return the key of a scope's index. Its braces put all keys of the scope in one slot of a cluster.

        The prefix has no brace and the escaped scope no closing brace, so no two scopes share a key.
        """
        tag = scope.replace("%", "%25").replace("}", "%7D")
        return f"{self._settings.key_prefix}{{{tag}}}".encode()

    def _keys(self, key: Key) -> tuple[bytes, bytes]:
        """Return the keys of a record and of its scope's index."""
        index = self._index(key.scope)
        return index + b":" + key.name.encode(), index

    def _fitting(self, operation: str, answer: int) -> int:
        """Return the answer of a script. Raises `TooLarge` for a negative one, the size of a record."""
        self._edge.require_fits(operation, "record", -answer)
        return answer


def _record(elements: list[bytes], last: int | None) -> Record:
    """Return the record in a list. Raises `ValueError` if the list is incomplete."""
    length, size, body_size = measured(elements)
    version, _, body, *tail = elements
    skipped, loaded = skipped_of(length, last), sum(map(len, tail))
    if (len(tail), len(body)) != (length - skipped, max(body_size, 0)):
        raise ValueError
    if loaded > size or (not skipped and loaded < size):
        raise ValueError
    return Record(version.decode(), None if body_size < 0 else body, tuple(tail), skipped)


def _milliseconds(ttl: float | None | KeepType) -> Argument:
    """Return a time to live as the scripts expect it."""
    if isinstance(ttl, Ttl):
        return ttl.value
    return "" if ttl is None else math.ceil(min(ttl, LONGEST_S) * 1000)
