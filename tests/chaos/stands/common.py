"""What the stands share: faults that any server has, and one at a time on each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from stm_backends.testing import open_at
from tests.chaos.stands import Fault
from tests.chaos.stands.disk import Disk
from tests.chaos.stands.network import Proxy, network_faults
from tests.support.servers import START_S, Server

SETTLED_WITHIN_S = 0.5
"""How long servers have to answer that they are settled, before a fault."""


class Base:
    """A stand whose servers have the faults of any server.

    A subclass starts its servers in `_start` and names in `_faults` what only they have.
    Whatever it enters into `self._stack` is left in the end, in the reverse order.
    """

    name = url = direct_url = ""
    programs: Sequence[str] = ()
    pooled = 0
    megabytes = 512
    """The size of the file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[str, str] = {}
        self.servers: list[Server] = []
        self.proxies: list[Proxy] = []
        self.doubts: list[tuple[float, float]] = []
        self._settled_at = 0.0
        self._epoch: object = None
        self.disk = Disk(folder / "disk", self.megabytes)
        self._stack = contextlib.AsyncExitStack()
        self._busy = asyncio.Lock()

    async def start(self) -> None:
        """Start the servers, with durable settings, and set up what the datastore needs."""
        try:
            self.disk.open()
            self._stack.callback(self.disk.close)
            await self._start()
            await until(self._set_up, "a datastore that is set up")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the servers; a second call is a no-op."""
        await self._stack.aclose()

    def faults(self) -> Mapping[str, Fault]:
        """What can be done to the servers, one at a time, and to the network before them."""
        own = {"server-kill": self._kill, "server-pause": self._pause, **self._faults()}
        if self.disk.can_fill:
            own["disk-full"] = self._fill
        alone = {name: _alone(self._busy, self._noting(fault)) for name, fault in own.items()}
        network = network_faults(self.proxies)
        return {**alone, **{name: self._settling(fault) for name, fault in network.items()}}

    async def _set_up(self) -> bool:
        await (await open_at(self.direct_url, create=True)).close()
        return True

    async def _start(self) -> None:
        raise NotImplementedError

    def _faults(self) -> Mapping[str, Fault]:
        return {}

    async def _when_full(self) -> None:
        """Have the servers write to a disk that is full, if nothing that pods do makes them."""

    async def _settle(self) -> None:
        """Wait until all servers serve as they did in the beginning."""

    def _note_epoch(self, epoch: object) -> None:
        """Note that the servers are settled; if another one has taken over since, reads were in doubt."""
        now = time.monotonic()
        if self._epoch not in (None, epoch):
            self.doubts.append((self._settled_at, now))
        self._settled_at, self._epoch = now, epoch

    async def _run(self, server: Server) -> None:
        """Start a server that is stopped in the end."""
        await asyncio.to_thread(server.start)
        self.servers.append(server)
        # Killed, because an orderly end may take a server long that was hurt, and nobody needs its data.
        self._stack.push_async_callback(asyncio.to_thread, server.kill)

    async def _lead_to(self, port: int, host: str = "127.0.0.1") -> Proxy:
        """Return a new proxy before a server."""
        proxy = await self._stack.enter_async_context(Proxy(f"{host}:{port}"))
        self.proxies.append(proxy)
        return proxy

    def _noting(self, fault: Fault) -> Fault:
        """Return the fault, before which it is noted if the servers are settled; no earlier read is in doubt.

        A network fault may be in force, so this is not waited for.
        """

        @contextlib.asynccontextmanager
        async def noting(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
            with contextlib.suppress(Exception):  # whatever a client raises while servers are in trouble
                async with asyncio.timeout(SETTLED_WITHIN_S):
                    await self._settle()
            async with fault(chance, seconds) as figures:
                yield figures

        return noting

    def _settling(self, fault: Fault) -> Fault:
        """Return the fault, which may coincide with others and after which the servers are waited for."""

        @contextlib.asynccontextmanager
        async def settling(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
            async with fault(chance, seconds) as figures:
                yield figures
            began = time.monotonic()
            async with self._busy:
                await self._settle()
            figures["settled_s"] = round(time.monotonic() - began, 3)

        return settling

    @contextlib.asynccontextmanager
    async def _kill(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        server = chance.choice(self.servers)
        await asyncio.to_thread(server.kill)
        figures: dict[str, Any] = {"server": self.servers.index(server)}
        async with self._mended(figures):
            try:
                yield figures
            finally:
                await asyncio.to_thread(server.start)

    @contextlib.asynccontextmanager
    async def _pause(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        server = chance.choice(self.servers)
        await asyncio.to_thread(server.pause)
        figures: dict[str, Any] = {"server": self.servers.index(server)}
        async with self._mended(figures):
            try:
                yield figures
            finally:
                server.go_on()
                await asyncio.to_thread(server.recover)

    @contextlib.asynccontextmanager
    async def _fill(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        figures: dict[str, Any] = {"bytes": await asyncio.to_thread(self.disk.fill)}
        async with self._mended(figures):
            try:
                await self._when_full()
                yield figures
            finally:
                await asyncio.to_thread(self.disk.free)
                # Some servers end themselves when they cannot write.
                for server in self.servers:
                    await asyncio.to_thread(server.recover)

    @contextlib.asynccontextmanager
    async def _mended(self, figures: dict[str, Any]) -> AsyncIterator[None]:
        """Wait for the healthy state, and note how long the fault lasted until then."""
        began = time.monotonic()
        try:
            yield
        finally:
            await self._settle()
            figures["lasted_s"] = round(time.monotonic() - began, 3)


class Act(Protocol):
    """Does something to a server; what it returns, if a number, is added up."""

    def __call__(self, chance: random.Random, /) -> Awaitable[int | None]: ...


def repeated(act: Act, *, every: float = 0.3) -> Fault:
    """Return the fault that something is done at once, and again and again while the fault is held."""

    @contextlib.asynccontextmanager
    async def fault(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        figures: dict[str, Any] = {"times": 0, "sum": 0}

        async def once() -> None:
            figures["sum"] += await act(chance) or 0
            figures["times"] += 1

        async def go_on() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.1, 2) * every)
                await once()

        await once()
        going_on = asyncio.ensure_future(go_on())
        try:
            yield figures
        finally:
            going_on.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await going_on

    return fault


def _alone(busy: asyncio.Lock, fault: Fault) -> Fault:
    """Return the fault, which begins when no other one that has the lock is in progress."""

    @contextlib.asynccontextmanager
    async def alone(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        async with busy, fault(chance, seconds) as figures:
            yield figures

    return alone


def libraries(*names: str) -> dict[str, str]:
    """Return the versions of packages."""
    return {name: version(name) for name in names}


async def until(ask: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Return what a question is answered, once that is a yes and no error."""
    give_up_at, problem = time.monotonic() + START_S, ""
    while time.monotonic() < give_up_at:
        try:
            if answer := await ask():
                return answer
        except Exception as error:  # noqa: BLE001 -- whatever a client raises while servers are in trouble
            problem = f": {error!r}"
        await asyncio.sleep(0.1)
    raise TimeoutError(f"in vain for {START_S:.0f} s: {what}{problem}")


async def asked(server: Any, *command: Any) -> Any:
    """Return a server's answer, without holding up the loop."""
    return await asyncio.to_thread(server.ask, *command)
