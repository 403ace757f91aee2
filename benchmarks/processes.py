"""The same blocks in several processes at once, each with its own client and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from benchmarks.datastores import Address, connect
from benchmarks.machine import Meter
from benchmarks.measuring import Bench, Block

_START_S = 0.2
"""How long after a command a block begins, so that all processes have received it."""

_LONGEST_S = 300.0


class Workers:
    """Processes on one datastore, each with so many conversations."""

    def __init__(self, address: Address, processes: int, conversations: int) -> None:
        self._meter = Meter(watches=not address.external)
        address = address.shared_by(processes)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for number in range(processes):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, address, number, conversations))
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    async def __aenter__(self) -> Workers:
        await self._answers()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            await asyncio.to_thread(process.join, 20)
            process.kill()

    async def _answers(self) -> list[Block | None]:
        return [await asyncio.to_thread(_receive, pipe) for pipe in self._pipes]

    async def block(self, side: str, seconds: float) -> Block:
        """Measure one side in all processes at the same time."""
        start = time.monotonic() + _START_S
        for pipe in self._pipes:
            pipe.send((side, start, seconds))
        await asyncio.sleep(_START_S)
        with self._meter.reading() as usage:
            blocks = [block for block in await self._answers() if block is not None]
        client = sum(block.client for block in blocks)
        return Block(
            turns=sum(block.turns for block in blocks),
            wall=max(block.wall for block in blocks),
            client=client,
            server=max(0.0, usage.family - client),
            p99=statistics.median(block.p99 for block in blocks),
            busy=usage.busy,
            errors=sum(block.errors for block in blocks),
        )


def _receive(pipe: Connection) -> Block | None:
    if not pipe.poll(_LONGEST_S):
        raise TimeoutError("a worker process does not answer")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _work(pipe: Connection, address: Address, number: int, conversations: int) -> None:
    try:
        asyncio.run(_serve(pipe, address, number, conversations))
    except Exception as error:  # noqa: BLE001 -- the main process reports it
        with contextlib.suppress(OSError):
            pipe.send(f"in a worker: {type(error).__name__}: {error}")


async def _serve(pipe: Connection, address: Address, number: int, conversations: int) -> None:
    async with AsyncExitStack() as stack:
        datastore = await stack.enter_async_context(connect(address))
        bench = Bench(datastore, f"p{number + 1}")
        await bench.prepare(conversations)
        pipe.send(None)
        while True:
            try:
                side, start, seconds = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            pipe.send(await bench.block(side, conversations, seconds))
