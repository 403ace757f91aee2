"""Drivers that are wrong about what a network did to their requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AbstractAsyncContextManager
from typing import Any

from stm_backends.drivers.contract import ANY, AnyType, Key
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from tests.support.networked import Connection, NetworkedDriver, receive, send


class UnavailableAfterUnknown(NetworkedDriver):
    """Takes each lost connection for a request that was not done."""

    def kind_of(self, error: Exception) -> type[StorageError]:
        return super().kind_of(error) if isinstance(error, TimeoutError) else Unavailable


class LateIsUndone(NetworkedDriver):
    """Takes a request that was not answered in time for one that was not done."""

    def kind_of(self, error: Exception) -> type[StorageError]:
        return Unavailable if isinstance(error, TimeoutError) else super().kind_of(error)


class RetriesAppends(NetworkedDriver):
    """Sends an append again when the connection was lost."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except OutcomeUnknown:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class QueuesWhatFailed(NetworkedDriver):
    """Says that an append failed, and sends it after the outage."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.waiting: list[tuple[Key, bytes]] = []

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        while self.waiting:
            late, text = self.waiting.pop()
            try:
                await super().append(late, text, initial_version=initial_version, ttl=ttl)
            except Unavailable:
                self.waiting.append((late, text))
                raise
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except Unavailable:
            self.waiting.append((key, entry))
            raise


class LossIsALostRace(NetworkedDriver):
    """Answers a replace whose connection was lost as if another writer had won."""

    async def replace(self, *given: Any, **named: Any) -> bool:
        try:
            return await super().replace(*given, **named)
        except OutcomeUnknown:
            return False


class RetriesDeletes(NetworkedDriver):
    """Sends a delete again, and answers what the second one found."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        try:
            return await super().delete(key, expect=expect)
        except OutcomeUnknown:
            return await super().delete(key, expect=expect)


class NoDeadline(NetworkedDriver):
    """Waits for an answer for ever."""

    def limit(self) -> AbstractAsyncContextManager[object]:
        return contextlib.nullcontext()


class KeepsDeadConnections(NetworkedDriver):
    """Uses a connection again whose answer did not come in time."""

    def drop(self, connection: Connection) -> None:
        if connection.is_broken:
            super().drop(connection)
        else:
            self.keep(connection)


class LeaksConnections(NetworkedDriver):
    """Forgets the connection of an operation that failed, and does not close it."""

    def drop(self, connection: Connection) -> None:
        # Another descriptor keeps the connection open; a transport that is never closed would be reported.
        if not connection.is_broken:
            os.dup(connection.writer.get_extra_info("socket").fileno())
        super().drop(connection)


class LeaksConnectionsOfErrors(NetworkedDriver):
    """Forgets the connection of an operation that the datastore refused, and does not close it."""

    def answered(self, connection: Connection, answer: object) -> None:
        if isinstance(answer, StorageError):
            os.dup(connection.writer.get_extra_info("socket").fileno())
            self.drop(connection)
        else:
            self.keep(connection)


class OpensTwice(NetworkedDriver):
    """Makes another pool when it is opened again, and forgets the first."""

    async def open(self) -> None:
        for connection in self._idle:
            os.dup(connection.writer.get_extra_info("socket").fileno())
            self.drop(connection)
        self._idle.clear()
        await super().open()


class ClosesNothing(NetworkedDriver):
    """Forgets its connections when it is closed."""

    async def close(self) -> None:
        for connection in self._idle:
            if not connection.is_broken:
                os.dup(connection.writer.get_extra_info("socket").fileno())
        await super().close()


class CountsTimeAfterItsQueue(NetworkedDriver):
    """Has the writers of a record queue, and begins to count the time when it is a writer's turn."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._turns: dict[Key, asyncio.Lock] = {}

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        async with self._turns.setdefault(key, asyncio.Lock()):
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class GreetsTheServer(NetworkedDriver):
    """Not wrong: asks something when it is opened, and fails if there is no answer."""

    async def open(self) -> None:
        await super().open()
        try:
            async with asyncio.timeout(self.traits.deadline):
                connection = await self._connected()
                try:
                    send(connection.writer, ("load", (Key("scope", "name"),), {}))
                    await receive(connection.reader)
                except BaseException:
                    self.forget(connection)
                    raise
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise Unavailable("no greeting", backend=self.name, operation="open") from error
        self.keep(connection)

    def forget(self, connection: Connection) -> None:
        self.drop(connection)


class LeaksAFailedOpening(GreetsTheServer):
    """Does not close the connection on which nobody has answered."""

    def forget(self, connection: Connection) -> None:
        os.dup(connection.writer.get_extra_info("socket").fileno())
        self.drop(connection)


class LateCommitsAreUndone(LateIsUndone):
    """Looks at the record first, and takes an append that was not answered in time for one not done."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        await self.load(key)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class ClosesTheConnectionsOfOthers(NetworkedDriver):
    """Closes its connections when a call is cancelled, also those on which other calls wait."""

    def start_over(self) -> None:
        super().start_over()
        self.opened: list[Connection] = []

    async def _connected(self) -> Connection:
        connection = await super()._connected()
        self.opened.append(connection)
        return connection

    def drop(self, connection: Connection) -> None:
        while self.opened:
            super().drop(self.opened.pop())
        super().drop(connection)


class ForgetsWhatRuns(NetworkedDriver):
    """Does not wait for the calls that run when it is closed, and does not end them."""

    async def finished(self) -> None:
        pass
