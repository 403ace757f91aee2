"""A datastore behind a network: a dictionary in a server, and a small correct driver that speaks to it.

The mutants in `tests/mutants/network.py` are variations of the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from stm_backends.drivers.contract import ANY, AbsentType, AnyType, Driver, KeepType, Key, Page, Record
from stm_backends.drivers.home import Home
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import Datastore
from stm_backends.testing.workbench.faulty import FaultyDriver, FaultyStore

DEADLINE_S = 0.5

_LENGTH = struct.Struct(">I")


class DictionaryServer:
    """Serves the in-memory driver's operations on a port of the loopback, from a thread of its own."""

    def __init__(self, kind: Callable[[FaultyStore], FaultyDriver] = FaultyDriver) -> None:
        self._store = FaultyStore()
        self._driver = kind(self._store)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="dictionary", daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def damage(self, key: Key) -> None:
        self._store.damaged.add(key.scope)

    async def _start(self) -> asyncio.Server:
        await self._driver.open()
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                operation, given, named = await receive(reader)
                try:
                    answer = await getattr(self._driver, operation)(*given, **named)
                except (StorageError, ValueError) as error:
                    answer = error
                send(writer, answer)
        writer.transport.abort()


def send(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(packed(message))


def packed(message: object) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # noqa: S301 -- from this process


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def is_broken(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None or self.writer.is_closing()


class NetworkedDriver:
    """The five operations as requests to that server, by a pool of connections."""

    name = "networked"

    def __init__(self, address: str) -> None:
        self._address = address.split(":")
        self.start_over()
        self.home = Home(self.start_over)
        self.traits = replace(MemoryDriver().traits, deadline=DEADLINE_S)

    def start_over(self) -> None:
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(4)
        self._is_open = False
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    async def open(self) -> None:
        await self.home.open(self._begin, self._end)

    async def close(self) -> None:
        await self.home.close(self._end)

    async def _begin(self) -> None:
        self._is_open = True

    async def _end(self) -> None:
        self._is_open = False
        try:
            await self.finished()
        finally:
            for connection in self._idle:
                connection.writer.transport.abort()
            self._idle.clear()

    async def load(self, key: Key) -> Record | None:
        return await self._ask("load", key)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        return await self._ask("append", key, entry, initial_version=initial_version, ttl=ttl)

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
        options = {"version": version, "expect": expect, "drop": drop, "rewrite": rewrite, "ttl": ttl}
        return await self._ask("replace", key, body, **options)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        return await self._ask("delete", key, expect=expect)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        return await self._ask("scan", scope, after=after, limit=limit)

    async def _ask(self, operation: str, *given: object, **named: object) -> Any:
        if not self._is_open:
            raise self._located(Unavailable("the driver is closed"), operation)
        self.home.require()
        self._running += 1
        self._none_runs.clear()
        try:
            return await self._answer(operation, *given, **named)
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    async def _answer(self, operation: str, *given: object, **named: object) -> Any:
        is_sent = False
        try:
            async with self.limit(), self._free:
                connection = await self._connected()
                try:
                    is_sent = True
                    send(connection.writer, (operation, given, named))
                    answer = await receive(connection.reader)
                except BaseException:
                    self.drop(connection)
                    raise
                self.answered(connection, answer)
        except (OSError, EOFError, TimeoutError) as error:
            is_read = operation in ("load", "scan")
            kind = self.kind_of(error) if is_sent and not is_read else Unavailable
            raise self._located(kind(type(error).__name__), operation) from error
        if isinstance(answer, Exception):
            raise answer if isinstance(answer, ValueError) else self._located(answer, operation)
        return answer

    async def _connected(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_broken:
                return connection
            self.drop(connection)
        return Connection(*await asyncio.open_connection(*self._address))

    def _located(self, error: Any, operation: str) -> Exception:
        error.backend, error.operation = self.name, operation
        return error

    # What the mutants do otherwise:

    async def finished(self) -> None:
        """Wait for the requests that are under way; each ends with its answer, or at its deadline."""
        await self._none_runs.wait()

    def limit(self) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(self.traits.deadline)

    def kind_of(self, error: Exception) -> type[StorageError]:
        """Return what to raise for a write that was sent and not answered."""
        del error
        return OutcomeUnknown

    def answered(self, connection: Connection, answer: object) -> None:
        del answer
        self.keep(connection)

    def keep(self, connection: Connection) -> None:
        if self._is_open:
            self._idle.append(connection)
        else:
            connection.writer.transport.abort()

    def drop(self, connection: Connection) -> None:
        connection.writer.transport.abort()


@functools.cache
def the_server() -> DictionaryServer:
    return DictionaryServer()


def networked_datastore(
    kind: Callable[[str], NetworkedDriver] = NetworkedDriver, server: DictionaryServer | None = None
) -> Datastore:
    """Return a datastore of drivers of a class, with its address."""
    server = server or the_server()
    address = server.address

    async def through(address: str) -> Driver:
        driver = kind(address)
        await driver.open()
        return driver

    return Datastore(
        open=functools.partial(through, address),
        tick=0.1,
        address=address,
        through=through,
        damage=server.damage,
        server="a server",
    )
