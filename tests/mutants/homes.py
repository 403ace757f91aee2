"""Drivers that are used by processes and event loops that did not open them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from stm_backends.drivers.contract import Key
from stm_backends.drivers.home import Home
from stm_backends.errors import ConfigurationError
from stm_backends.testing.workbench.faulty import FaultyDriver, FaultyStore
from tests.support.networked import Connection, NetworkedDriver, packed


class Anywhere(Home):
    """A home that refuses nothing."""

    __slots__ = ()

    def require(self) -> None:
        pass

    def enter(self) -> None:
        pass

    def may_close(self) -> bool:
        return True


class SharesItsConnections(NetworkedDriver):
    """Lets each event loop and each process use its connections."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.home = Anywhere()


class OfItsProcess(Anywhere):
    """A home that compares processes alone."""

    __slots__ = ("_process",)

    def enter(self) -> None:
        self._process = os.getpid()

    def require(self) -> None:
        if os.getpid() != self._process:
            raise ConfigurationError("opened in another process")


class ChecksItsProcessAlone(NetworkedDriver):
    """Lets the event loop of each thread use its connections."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.home = OfItsProcess()


class OfAnyProcess(Home):
    """A home that a forked process may enter."""

    __slots__ = ()

    def enter(self) -> None:
        self._is_inherited = False
        super().enter()


class OpensForItsChildren(NetworkedDriver):
    """Lets a forked process open it again, with the connections that its parent has."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.home = OfAnyProcess(self.start_over)


class ClosesForItsParent(NetworkedDriver):
    """Says farewell on its connections, which are those of its parent, when a forked process closes it."""

    def start_over(self) -> None:
        super().start_over()
        self.opened: list[Connection] = []

    async def close(self) -> None:
        if not self.home.may_close():
            for connection in self.opened:
                socket = connection.writer.get_extra_info("socket")
                os.write(socket.fileno(), packed(("load", [Key("bye", "bye")], {})))
        await super().close()

    async def _connected(self) -> Connection:
        connection = await super()._connected()
        self.opened.append(connection)
        return connection


class StaysWithItsFirstLoop(FaultyDriver):
    """Belongs to its first event loop for good."""

    first: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        here = asyncio.get_running_loop()
        self.first = self.first or here
        if self.first is not here:
            raise ConfigurationError("opened in another event loop")
        await super().open()


class WorksWithoutBeingOpenedAgain(FaultyDriver):
    """Goes on in the next event loop with what belongs to the one that has ended."""

    def __init__(self, store: FaultyStore, **options: Any) -> None:
        super().__init__(store, **options)
        self._home = Home()


class ClosesWhatAnotherOpens(FaultyDriver):
    """Cleans up after each opening that fails, also where another one is in progress."""

    def __init__(self, store: FaultyStore, **options: Any) -> None:
        super().__init__(store, **options)
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        try:
            async with self._opening:
                await super().open()
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await self.close()
            raise


class ClosesWhatWasOpenedMeanwhile(FaultyDriver):
    """Closes late, and then also closes a driver that was opened meanwhile."""

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        await super().close()


class LeavesTheCallersClientUnguarded(FaultyDriver):
    """Takes care of the clients that it makes, and of no others."""

    def __init__(self, store: FaultyStore, **options: Any) -> None:
        super().__init__(store, **options)
        self._home = Anywhere()
