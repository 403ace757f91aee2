"""A TCP proxy that counts the bytes and the round trips of a client."""

from __future__ import annotations

import asyncio
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from stm_backends.testing.faults import Direction, Proxy


@dataclass
class _Connection:
    is_asking: bool = False


_CONNECTION: ContextVar[_Connection] = ContextVar("connection")


@dataclass
class Counted:
    """What has passed in all connections. `sent` and `received` are the client's bytes."""

    sent: int = 0
    received: int = 0
    round_trips: int = 0

    def __sub__(self, before: Counted) -> Counted:
        return Counted(
            self.sent - before.sent, self.received - before.received, self.round_trips - before.round_trips
        )


class Wire(Proxy):
    """Counts what passes. A round trip begins when a client sends after it has received, or first of all."""

    def __init__(self, port: int) -> None:
        super().__init__(f"127.0.0.1:{port}")
        self._counted = Counted()

    @property
    def counted(self) -> Counted:
        """What has passed until now."""
        return Counted(self._counted.sent, self._counted.received, self._counted.round_trips)

    async def _serve(self, client: socket.socket) -> None:
        # The tasks of both directions inherit it.
        _CONNECTION.set(_Connection())
        await super()._serve(client)

    async def _pass(self, connection: Any, direction: Direction, source: asyncio.StreamReader) -> None:
        tapped: Any = _Tapped(source, self._count, direction)
        await super()._pass(connection, direction, tapped)

    def _count(self, data: bytes, direction: str) -> None:
        connection, counted = _CONNECTION.get(), self._counted
        if not data:
            return
        if direction == "requests":
            counted.sent += len(data)
            counted.round_trips += not connection.is_asking
            connection.is_asking = True
        else:
            counted.received += len(data)
            connection.is_asking = False


class _Tapped:
    def __init__(self, source: asyncio.StreamReader, see: object, direction: str) -> None:
        self._source, self._see, self._direction = source, see, direction

    async def read(self, size: int) -> bytes:
        data = await self._source.read(size)
        self._see(data, self._direction)  # type: ignore[operator]
        return data
