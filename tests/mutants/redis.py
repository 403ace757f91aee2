"""Broken ways to send and read on Redis; `tests/services/redis` and `test_redis_slices.py` reject each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from stm_backends.drivers.coalesced import ALL
from stm_backends_redis.servers import Capacity, Command, Server
from stm_backends_redis.slices import Ask, Slices
from stm_backends_redis.statements import LOAD_SMALL, Statement
from stm_backends_redis.stream import Line

T = TypeVar("T")


class AnswersTheNextCaller(Line):
    """Forgets the commands that were cancelled after they were written, although their answers still come."""

    def data_received(self, data: bytes) -> None:
        waiting = [request for request in self.sent if not request[1].done()]
        self.sent.clear()
        self.sent.extend(waiting)
        super().data_received(data)


class WritesTwice(Line):
    """Writes again, on the next connection, what was written when the connection was lost."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream._queue[:0] = self.sent  # noqa: SLF001 -- no driver does this
        self.sent.clear()
        super().connection_lost(exc)


class SendsThroughTheClient(Server):
    """Leaves a command to the client, which repeats it if its answer is lost."""

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)


class FailsWithoutRoom(Capacity):
    """Fails a command that gets no connection, although others will be free in a moment."""

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        return await work()


class MixesTwoMoments(Slices):
    """Does not look whether a large record was changed between two of its slices."""

    async def _in_slices(self, ask: Ask, last: int, before: int) -> list[bytes]:
        seen: list[list[bytes]] = []

        async def answer(statement: Statement, *arguments: int, apart: bool = False) -> list[bytes]:
            if arguments == (0, 0):
                return seen[0][:1]
            seen.append(await ask(statement, *arguments, apart=apart))
            return [*seen[-1]]

        return await super()._in_slices(answer, last, before)


class ReadsAtOnce(Slices):
    """Asks for a large record in one piece."""

    async def _in_slices(self, ask: Ask, last: int, before: int) -> list[bytes]:
        return await ask(LOAD_SMALL, 2**53, last, apart=True)


class SharesTheConnection(Slices):
    """Asks for the newest entries at once, however large they are, on the connection of all others."""

    async def read(self, key: bytes, ask: Ask, last: int = ALL) -> list[bytes]:
        return await (super().read(key, ask) if last == ALL else ask(LOAD_SMALL, 2**53, last))


class KnowsRecordsOnly(Slices):
    """Remembers the size of a record for loads of all its entries and of the newest ones."""

    async def read(self, key: bytes, ask: Ask, last: int = ALL) -> list[bytes]:
        return (await super().read(key, ask))[: 3 if last == 0 else None]
