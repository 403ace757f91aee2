"""One connection that concurrent tasks share: commands are written together, answers are matched by order.

Commands sent in one turn of the event loop are written in one packet. A command cancelled before it is
written is never sent. A command cancelled afterwards keeps its place: its answer is read and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeAlias, cast

import hiredis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, RedisError

from stm_backends.handed_in import PASSED
from stm_backends_redis.errors import meaning, not_connected

Answer: TypeAlias = "asyncio.Future[Any]"

_Request: TypeAlias = tuple[bytes, Answer, bool]
"""A packed command, its answer, and whether ASKING was packed before it."""

_PACK: Final[Callable[[tuple[bytes | str | int, ...]], bytes]] = cast("Any", hiredis).pack_command
_ASKING: Final = _PACK(("ASKING",))

LARGE: Final = 64 * 1024
"""Maximum size in bytes of a command that shares a connection; others would wait for larger ones."""

PACKET: Final = 4
"""Number of commands written without waiting for more, so that server and process work in parallel."""

MAX_OUTSTANDING: Final = 1024 * 1024
"""Maximum number of bytes of commands in a stream that are not written or not answered."""

_UNFINISHED: Final = object()
_PUSH: Final = getattr(hiredis, "PushNotification", ())


class Connections(Protocol):
    """The source of a stream's connection: the pool of a client."""

    async def get_connection(self) -> AbstractConnection:
        """Return a connection that is logged in."""
        ...

    async def release(self, connection: AbstractConnection) -> None:
        """Return a connection to the pool."""
        ...

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Disconnect the pool's connections; with `inuse_connections=False`, only idle ones."""
        ...


class Stream:
    """Sends commands on one connection, taken on first use and kept until `close`.

    If the connection is lost, each written command fails with the client library's `ConnectionError`, because
    its outcome is unknown. Commands that were not written go out on the next connection. A connection is
    closed if no command is answered for `silence_s` seconds, or if opening it takes longer.
    """

    def __init__(self, pool: Connections, *, silence_s: float) -> None:
        self._pool = pool
        self._silence_s = silence_s
        self._queue: list[_Request] = []
        self._queued = 0
        self._line: Line | None = None
        self._lines: set[Line] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_due = False

    def send(self, command: Sequence[bytes | str | int], *, asking: bool = False) -> Answer | None:
        """Return the pending answer: bytes, never decoded, or the server's error as a value.

        Returns `None`, and sends nothing, if the command is too large to share a connection, or too much is
        unanswered. `asking` sends ASKING, whose answer is dropped, directly before the command.
        """
        line = self._line
        packed = _PACK(tuple(command))
        outstanding = self._queued + (line.unanswered if line is not None else 0)
        if len(packed) > LARGE or outstanding + len(packed) > MAX_OUTSTANDING:
            return None
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        self._queue.append((packed, answer, asking))
        self._queued += len(packed)
        if line is not None and line.is_stale:
            self.leave(line)
            line = None
        if line is None:
            self._connect()
        elif len(self._queue) >= PACKET or (not line.sent and line.batch < 2):
            self._write()  # the server can begin, or only one task is active
        elif not self._is_due:
            self._is_due = True
            loop.call_soon(self._write)
        return answer

    def leave(self, line: Line | None = None) -> None:
        """Stop sending on the connection, which closes after its last answer."""
        line = line or self._line
        if line is not None:
            if self._line is line:
                self._line = None
            line.leave()

    def lost(self, line: Line) -> None:
        """Return a lost connection to the pool, and connect again if commands are waiting."""
        if line in self._lines:
            self._lines.remove(line)
            self._begin(self._give_back(line))
        if self._line is line:
            self._line = None
        if self._line is None and self._queue:
            self._connect()

    async def close(self) -> None:
        """Wait for all answers, each limited by its caller's deadline, and return the connection."""
        while pending := [
            answer
            for requests in (self._queue, *(line.sent for line in self._lines))
            for _, answer, _ in requests
            if not answer.done()
        ]:
            await asyncio.wait(pending)
        self._clear()  # the rest was cancelled and needs no further connection
        if self._connecting is not None:
            self._connecting.cancel()
        for line in list(self._lines):
            self.lost(line)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _connect(self) -> None:
        if self._connecting is None:
            self._connecting = self._begin(self._take_connection())

    async def _take_connection(self) -> None:
        try:
            # All callers wait for this one attempt, so no single deadline ends it.
            async with asyncio.timeout(self._silence_s):
                connection = await self._pool.get_connection()
                try:
                    transport = await _transport(connection)
                except BaseException:
                    await self._pool.release(connection)
                    raise
            self._line = Line(self, connection, transport, self._silence_s)
            self._lines.add(self._line)
        except (asyncio.CancelledError, *PASSED):
            raise
        except BaseException as error:  # noqa: BLE001 -- nothing was sent, whatever the error
            for _, answer, _ in self._queue:
                if not answer.done():
                    answer.set_exception(not_connected(error))
            self._clear()
            if meaning(error) is None:
                # The client keeps a connection that did not log in because its credential provider failed.
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(self._silence_s):
                        await self._pool.disconnect(inuse_connections=False)
        finally:
            self._connecting = None
        self._write()

    def _write(self) -> None:
        """Write all waiting commands, except cancelled ones."""
        self._is_due = False
        line = self._line
        if line is None:
            if self._queue:
                self._connect()
        elif not line.is_closing:  # if it is, `lost` connects again
            if requests := [request for request in self._queue if not request[1].done()]:
                line.write(requests)
            self._clear()

    def _clear(self) -> None:
        self._queue.clear()
        self._queued = 0

    async def _give_back(self, line: Line) -> None:
        try:
            with contextlib.suppress(Exception):
                await line.connection.disconnect()
        finally:
            line.abort("the connection was closed")
            with contextlib.suppress(KeyError):  # a reset pool does not know its connections
                await self._pool.release(line.connection)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="stm-redis-stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Line(asyncio.Protocol):
    """A logged-in connection of the client library. From now on, its answers are read here."""

    def __init__(
        self, stream: Stream, connection: AbstractConnection, transport: asyncio.Transport, silence_s: float
    ) -> None:
        self.connection = connection
        self.sent: deque[_Request] = deque()
        self.unanswered = 0
        """Bytes of the commands in `sent`."""
        self.batch = 0
        """Number of commands written last."""
        self._stream = stream
        self._transport = transport
        self._silence_s = min(silence_s, connection.socket_timeout or math.inf)
        self._rest_s = connection.health_check_interval or math.inf
        self._is_left = False
        self._failure: type[RedisError] = ConnectionLost
        self._why = "the connection was lost"
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        parser: Any = DefaultParser
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=parser.parse_error, notEnoughData=_UNFINISHED
        )
        self._library = transport.get_protocol()
        transport.set_protocol(self)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def is_stale(self) -> bool:
        """True if the connection was idle for longer than the client's interval between health checks."""
        return not self.sent and self._loop.time() - self._answered_at > self._rest_s

    def write(self, requests: Sequence[_Request]) -> None:
        """Write commands in one packet."""
        if not self.sent:
            self._answered_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_at(self._answered_at + self._silence_s, self._check)
        packet: list[bytes] = []
        for request in requests:
            packed, _, asking = request
            if asking:
                dropped: Answer = self._loop.create_future()
                dropped.cancel()
                self.sent.append((b"", dropped, False))
                packet.append(_ASKING)
            packet.append(packed)
            self.sent.append(request)
            self.unanswered += len(packed)
        self.batch = len(requests)
        self._transport.write(b"".join(packet))

    def leave(self) -> None:
        """Close the connection after the last answer."""
        self._is_left = True
        if not self.sent:
            self._transport.close()

    def abort(self, why: str, failure: type[RedisError] = ConnectionLost) -> None:
        """Close the connection now; unanswered commands fail."""
        self._why, self._failure = why, failure
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Assign each answer to the oldest unanswered command."""
        self._reader.feed(data)
        sent = self.sent
        before = len(sent)
        try:
            while (found := self._reader.gets()) is not _UNFINISHED:
                if isinstance(found, _PUSH):
                    if found[0] == b"MOVING":  # a new connection leads to the server's new address
                        self._stream.leave(self)
                    continue
                if not sent:
                    raise InvalidResponse("an answer to no command")
                packed, answer, _ = sent.popleft()
                self.unanswered -= len(packed)
                if isinstance(found, ConnectionLost):  # such as a refused login: the next one may succeed
                    self._stream.leave(self)
                    if not answer.done():
                        answer.set_exception(found)
                elif not answer.done():
                    answer.set_result(found)
        except InvalidResponse as error:
            self.abort(str(error), InvalidResponse)
        if len(sent) < before:
            self._answered_at = self._loop.time()
        if self._is_left and not sent:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the unanswered commands, whose outcome is unknown."""
        self._library.connection_lost(exc)  # the client library waits for this when it disconnects
        if self._timer is not None:
            self._timer.cancel()
        for _, answer, _ in self.sent:
            if not answer.done():
                failure = self._failure(self._why)
                failure.__cause__ = exc
                answer.set_exception(failure)
        self.sent.clear()
        self._stream.lost(self)

    def _check(self) -> None:
        """Give up a connection that answers no command."""
        self._timer = None
        if self.sent:
            ends = self._answered_at + self._silence_s
            if self._loop.time() >= ends:
                self.abort("the server did not answer")
            else:
                self._timer = self._loop.call_at(ends, self._check)


async def _transport(connection: AbstractConnection) -> asyncio.Transport:
    """Return the transport of a connection that has received nothing; reconnects if necessary."""
    # The attribute's name before version 8 of the client library.
    has_data = getattr(connection, "can_read", connection.can_read_destructive)
    for _ in range(2):
        writer: asyncio.StreamWriter = cast("Any", connection)._writer  # noqa: SLF001 -- no public API
        if not (writer.transport.is_closing() or await has_data()):
            return cast("asyncio.Transport", writer.transport)
        await connection.disconnect()
        await connection.connect()
    raise ConnectionLost("the server sent data before the first command")
