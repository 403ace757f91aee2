"""A proxy that deliberately does what networks do, for tests of drivers and their users."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

Direction: TypeAlias = Literal["requests", "answers"]
"""The data that clients send, or those that the server sends."""

_DIRECTIONS: Final[tuple[Direction, Direction]] = ("requests", "answers")
_PIECE_BYTES: Final = 65_536
_SETTLING_S: Final = 0.05
"""Seconds for a server, after a lost answer began, to finish requests that were sent before it."""

_HELLO: Final = re.compile(rb"\x16\x03.{3}\x01", re.DOTALL)
"""The beginning of the first TLS message."""


class LostAnswer:
    """One answer for a proxy to lose. `happened` says whether it was lost."""

    def __init__(self) -> None:
        self.happened = False
        self._is_cancelled = False

    def cancel(self) -> None:
        """Do not lose the answer any more."""
        self._is_cancelled = True


class HeldAnswer:
    """One answer for a proxy to hold back. `happened` says whether it has come.

    `followed` is the number of requests of the same kind that have come since. `release` lets the answer pass
    and stops holding answers; calling it twice is harmless.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self.happened = False
        self.followed = 0
        self.release = release


class Fault:
    """A fault of a proxy while a context lasts; `with` and `async with` do the same."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()

    async def __aenter__(self) -> None:
        self._begin()

    async def __aexit__(self, *_: object) -> None:
        self._end()


class Proxy:
    """A TCP proxy that does to connections what networks do, while the server behind it is unaffected.

    `server` is the server's address, `host:port`; `address` is the proxy's own address, once entered. The
    proxy runs in a separate thread with its own event loop, so its methods may be called from any loop or
    thread. Faults add up, and each ends with its context. With `tls`, it speaks TLS to clients but not to the
    server.

    ```python
    async with Proxy("127.0.0.1:6379") as proxy:
        driver = await open_at(f"redis://{proxy.address}")
        async with proxy.stalled("answers"):
            ...
    ```
    """

    def __init__(self, server: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._server = _parsed(server)
        self._tls = tls
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stm-proxy", daemon=True)
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._cuts = 0
        self._stalls: dict[Direction, int] = dict.fromkeys(_DIRECTIONS, 0)
        self._flowing: dict[Direction, asyncio.Event] = {one: asyncio.Event() for one in _DIRECTIONS}
        self._delays: dict[Direction, float] = dict.fromkeys(_DIRECTIONS, 0.0)
        self._losses: list[_Loss] = []
        self._holds: list[_Hold] = []
        self._placeholder: socket.socket | None = None
        self.port = 0
        self.accepted = 0
        self.encrypted = False

    @property
    def address(self) -> str:
        """The address of the proxy, as `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """The number of connections that clients have open to the proxy. `accepted` counts all so far.

        `encrypted` says whether a client has begun TLS with the server, so that requests cannot be read.
        """
        return len(self._connections)

    def start(self) -> None:
        """Start listening. `with` and `async with` do the same, and stop at the end."""
        self._thread.start()
        self._do(self._open)

    def stop(self) -> None:
        """Reset all connections and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Proxy:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def cut(self) -> Fault:
        """Reset all connections and refuse new ones, as when the server's process ends."""
        return Fault(lambda: self._do(self._cut), lambda: self._do(self._mend))

    def stalled(self, direction: Direction | None = None) -> Fault:
        """Accept connections and let nothing pass, in one direction or both.

        Data held back pass at the end, even if their sender has given up by then: a request sent into the
        stall reaches the server late.
        """
        directions = _DIRECTIONS if direction is None else (direction,)
        return Fault(
            lambda: self._do(lambda: self._stall(directions, 1)),
            lambda: self._do(lambda: self._stall(directions, -1)),
        )

    def slow(self, seconds: float, direction: Direction | None = None) -> Fault:
        """Delay every piece of data by `seconds`, in one direction or both."""
        directions = _DIRECTIONS if direction is None else (direction,)
        return Fault(
            lambda: self._do(lambda: self._slow_down(directions, seconds)),
            lambda: self._do(lambda: self._slow_down(directions, -seconds)),
        )

    def half_open(self) -> Fault:
        """Close the current connections to the server, while clients believe that they are open.

        A firewall that forgets connections does this. New connections work.
        """
        dead: list[_Connection] = []
        return Fault(
            lambda: dead.extend(self._do(self._deaden)),
            lambda: self._do(lambda: [connection.reset() for connection in dead]),
        )

    def lose_answer(self, to: bytes = b"", *, skip: int = 0) -> LostAnswer:
        """Lose one answer after the server has done the work: the request passes, its answer does not.

        Then the connection is reset. The lost answer is the next one on the first connection that from now on
        carries a request containing `to`; without `to`, any request. `skip` answers pass first, for
        operations of several requests. The request must be in clear text to be found.
        """
        loss = _Loss(to, skip)
        self._do(lambda: self._expect(loss))
        return loss

    def hold_answer(self, to: bytes = b"", *, skip: int = 0) -> HeldAnswer:
        """Hold one answer back after the server has done the work, so that others can act before it arrives.

        Only answers on connections that from now on carry a request containing `to` count; without `to`, any
        request. `skip` of them pass first: raise it from 0 until an operation ends, and the operation is
        paused between each two of its requests. Later data on the same connection wait, too. The request must
        be in clear text to be found.
        """
        hold = _Hold(to, skip, self._do)
        self._do(lambda: self._await(hold))
        return hold

    def lead_to(self, server: str) -> None:
        """Lead new connections to another server, as after a failover. Current connections stay."""
        self._server = _parsed(server)

    def _do(self, work: Callable[[], Any]) -> Any:
        # Blocks the caller's loop while waiting, so that a cancelled caller still undoes its fault.
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- raised again when the result is awaited
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(30)

    def _open(self) -> None:
        for event in self._flowing.values():
            event.set()
        # Bound but not listening: it keeps the port, and new connections are refused while it is alone.
        self._placeholder = self._bound()
        self.port = self._placeholder.getsockname()[1]
        self._listen()

    def _listen(self) -> None:
        self._listener = self._bound()
        self._listener.setblocking(False)
        self._listener.listen()
        self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        # An asyncio.Server closed while accepting leaves a connection that no task serves or closes.
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            self.accepted += 1
            task = self._loop.create_task(self._serve(client))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _bound(self) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", self.port))
        return bound

    async def _close(self) -> None:
        self._cut()
        if self._placeholder is not None:
            self._placeholder.close()
        # Gives each task the chance to start, so that it cleans up after itself.
        await asyncio.sleep(0)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _cut(self) -> None:
        self._cuts += 1
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.reset()

    def _mend(self) -> None:
        self._cuts -= 1
        if self._cuts == 0:
            self._listen()

    def _stall(self, directions: tuple[Direction, ...], change: int) -> None:
        for direction in directions:
            self._stalls[direction] += change
            if self._stalls[direction]:
                self._flowing[direction].clear()
            else:
                self._flowing[direction].set()

    def _slow_down(self, directions: tuple[Direction, ...], change: float) -> None:
        for direction in directions:
            self._delays[direction] += change

    def _expect(self, loss: _Loss) -> None:
        self._losses = [*(one for one in self._losses if not one.is_over), loss]

    def _await(self, hold: _Hold) -> None:
        self._holds = [*(one for one in self._holds if not one.passed.is_set()), hold]

    def _deaden(self) -> list[_Connection]:
        dead = [connection for connection in self._connections if connection.server is not None]
        for connection in dead:
            connection.is_dead = True
            if connection.server is not None:
                _reset(connection.server)
        return dead

    async def _serve(self, client: socket.socket) -> None:
        from_client = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(from_client)
        try:
            client.setblocking(False)
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, client, ssl=self._tls)
        except (OSError, asyncio.CancelledError):
            client.close()
            return
        connection = _Connection(asyncio.StreamWriter(transport, protocol, from_client, self._loop))
        self._connections.add(connection)
        try:
            if self._cuts:
                return
            from_server, to_server = await asyncio.open_connection(*self._server)
            if connection.is_reset:
                _reset(to_server)
                return
            connection.server = to_server
            requests = asyncio.ensure_future(self._pass(connection, "requests", from_client))
            answers = asyncio.ensure_future(self._pass(connection, "answers", from_server))
            connection.passing = (requests, answers)
            await asyncio.wait(connection.passing, return_when=asyncio.FIRST_COMPLETED)
            if connection.is_dead:
                await asyncio.wait([requests])
            # The end of one side comes after all its data, so it is passed on.
            for ended, target in ((requests, connection.server), (answers, connection.client)):
                if ended.done() and not connection.is_reset:
                    target.close()
                    with contextlib.suppress(OSError):
                        await target.wait_closed()
        except (OSError, asyncio.CancelledError):
            # The server cannot be reached, or the proxy stops.
            pass
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _pass(
        self, connection: _Connection, direction: Direction, source: asyncio.StreamReader
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                await asyncio.sleep(self._delays[direction])
                await self._flowing[direction].wait()
                if connection.is_dead:
                    continue
                if direction == "requests":
                    self.encrypted = self.encrypted or _HELLO.match(piece) is not None
                    for one in (*self._losses, *self._holds):
                        one.sees_request(connection, piece)
                elif any(loss.takes_answer(connection) for loss in self._losses):
                    await asyncio.sleep(_SETTLING_S)
                    connection.reset()
                    return
                else:
                    for hold in self._holds:
                        if hold.takes_answer(connection):
                            await hold.passed.wait()
                target = connection.server if direction == "requests" else connection.client
                if target is not None:
                    target.write(piece)
                    await target.drain()


class _Connection:
    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.passing: tuple[asyncio.Future[None], ...] = ()
        self.is_dead = False
        self.is_reset = False

    def reset(self) -> None:
        if not self.is_reset:
            self.is_reset = True
            for writer in (self.client, self.server):
                if writer is not None:
                    _reset(writer)
            for task in self.passing:
                task.cancel()


class _Loss(LostAnswer):
    def __init__(self, to: bytes, skip: int) -> None:
        super().__init__()
        self._to = to
        self._left = skip
        self._connection: _Connection | None = None

    @property
    def is_over(self) -> bool:
        return self.happened or self._is_cancelled

    def sees_request(self, connection: _Connection, piece: bytes) -> None:
        if self._connection is None and self._to in piece:
            self._connection = connection

    def takes_answer(self, connection: _Connection) -> bool:
        if self._connection is not connection or self.is_over:
            return False
        self._left -= 1
        self.happened = self._left < 0
        return self.happened


class _Hold(HeldAnswer):
    def __init__(self, to: bytes, skip: int, within: Callable[[Callable[[], Any]], Any]) -> None:
        self.passed = asyncio.Event()
        super().__init__(lambda: within(self.passed.set))
        self._to = to
        self._left = skip
        # Clients may send the requests of one operation on several connections.
        self._connections: set[_Connection] = set()

    def sees_request(self, connection: _Connection, piece: bytes) -> None:
        if self._to in piece:
            self._connections.add(connection)
            self.followed += self.happened

    def takes_answer(self, connection: _Connection) -> bool:
        if self.happened or self.passed.is_set() or connection not in self._connections:
            return False
        self._left -= 1
        self.happened = self._left < 0
        return self.happened


def _reset(writer: asyncio.StreamWriter) -> None:
    # Without this option, the peer would see an orderly end.
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"The address of a server is host:port, not {address!r}.")
    return host.strip("[]"), int(port)
