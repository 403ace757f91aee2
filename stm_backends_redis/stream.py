"""One connection on which the commands of concurrent tasks are written together.

Commands that tasks send in one turn of the event loop are written in one packet, and answers are matched to
them by their order. A command that was cancelled before it was written is never sent. One that was cancelled
afterwards keeps its place: its answer is read and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, RedisError, ResponseError

Answer: TypeAlias = "asyncio.Future[Any]"

MAX_PACKET: Final = 256
"""How many commands are written at once, so that the first answers are read before the last are packed."""


class Stream:
    """A connection of a client's pool, taken when it is first needed and kept until `close`.

    If it is lost, every command that was written fails with the client library's error; what still waits goes
    out on the next connection. A connection on which nothing is answered for `silence_s` seconds is lost.
    """

    def __init__(self, pool: ConnectionPool[Any], *, silence_s: float) -> None:
        self._pool = pool
        self._silence_s = silence_s
        self._unsent: deque[tuple[Sequence[bytes | str | int], Answer]] = deque()
        self._sent: deque[Answer] = deque()
        self._wake = asyncio.Event()
        self._stale = False
        self._task: asyncio.Task[None] | None = None

    def send(self, command: Sequence[bytes | str | int]) -> Answer:
        """Return the answer to come: bytes, never decoded, or the server's error as a value."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._unsent.append((command, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="stm-redis-stream")
        else:
            self._wake.set()
        return answer

    def leave(self) -> None:
        """Send nothing more on this connection; once its last answer has come, a new one takes its place."""
        if self._task is not None and not self._task.done():
            self._stale = True
            self._wake.set()

    async def close(self) -> None:
        """Wait for all answers, each limited by its caller's deadline, and return the connection."""
        while pending := [one for one in (*self._sent, *(one for _, one in self._unsent)) if not one.done()]:
            await asyncio.wait(pending)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        """Connect, and write and read as long as the connection lasts; again while commands wait."""
        while self._unsent:
            try:
                connection = await self._pool.get_connection()
            except Exception as error:  # noqa: BLE001 -- nothing was sent; it is the answer to all that wait
                self._fail([answer for _, answer in self._unsent], error)
                self._unsent.clear()
                return
            lost: Exception = ConnectionLost("the connection was lost")
            try:
                async with asyncio.TaskGroup() as group:
                    for part in (self._write, self._read, self._watch):
                        group.create_task(part(connection))
            except* (RedisError, OSError) as errors:
                lost = next(error for error in errors.exceptions if isinstance(error, Exception))
            finally:
                sent, self._sent, self._stale = self._sent, deque(), False
                self._fail(sent, lost)
                with contextlib.suppress(RedisError, OSError):
                    await connection.disconnect(nowait=True)
                await self._pool.release(connection)

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            if self._stale and not self._sent:
                self._stale = False
                raise ConnectionLost("left for a new connection")
            if self._stale or not self._unsent:
                self._wake.clear()
                await self._wake.wait()
                continue
            packet: list[bytes] = []
            for _ in range(min(len(self._unsent), MAX_PACKET)):
                command, answer = self._unsent.popleft()
                if not answer.done():
                    packet += connection.pack_command(*command)
                    self._sent.append(answer)
            if packet:
                await connection.send_packed_command(packet, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            try:
                found = await connection.read_response(
                    disable_decoding=True, timeout=math.inf, disconnect_on_error=False
                )
            except ResponseError as error:
                found = error
            if not self._sent:
                raise InvalidResponse("an answer to no command")
            answer = self._sent.popleft()
            if not answer.done():
                answer.set_result(found)
            if self._stale:
                self._wake.set()

    async def _watch(self, connection: AbstractConnection) -> None:
        del connection
        while True:
            oldest = self._sent[0] if self._sent else None
            await asyncio.sleep(self._silence_s)
            if oldest is not None and self._sent and self._sent[0] is oldest:
                raise ConnectionLost("the server did not answer")

    def _fail(self, answers: Sequence[Answer] | deque[Answer], error: Exception) -> None:
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
