"""Short-lived processes and workers on one store, in virtual time, and drivers that die at an operation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from stm_backends import Backend, ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, Worker
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.records import keys
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.work.queue import Look, WorkQueue
from tests.support import clock

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(full_zone_turns=2),
    fold_batch_turns=3,
    summarizer_timeout_s=2.0,
    retry_backoff_base_s=1.0,
)

Moment = Literal["before", "after"]


class DyingDriver(WrapperDriver):
    """Reaches the store no more from the `at`-th operation on, which is done itself if it dies `after` it.

    For the store, that is a process that was killed there.
    """

    def __init__(self, inner: Driver, at: int = 0, moment: Moment = "before") -> None:
        super().__init__(inner)
        self.at = at
        self.moment = moment
        self.done = 0

    @property
    def dead(self) -> bool:
        return bool(self.at) and self.done >= self.at

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        del operation, key
        if self.dead:
            raise Unavailable("this process was killed")
        self.done += 1
        if self.dead:
            if self.moment == "after":
                await send()
            raise OutcomeUnknown("this process was killed")
        return await send()


class World:
    """One store, and what processes do on it. `limits` are those of the driver."""

    def __init__(self, **limits: int) -> None:
        self.store = MemoryStore()
        self.limits = limits
        self.summarize = LedgerSummarizer()

    def driver(self) -> Driver:
        return MemoryDriver(self.store, clock=clock.now, **self.limits)

    @asynccontextmanager
    async def opened(
        self, driver: Driver | None = None, *, close_timeout_s: float = 5.0, **settings: Any
    ) -> AsyncIterator[Backend]:
        """Open a backend whose clocks are virtual, as one process has it."""
        backend = Backend(driver or self.driver(), close_timeout_s=close_timeout_s, **settings)
        internals: Any = backend
        internals._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
            backend.driver,
            backend.codec,
            observer=backend.observer,
            clock=clock.now,
            work=internals._work,  # noqa: SLF001
            summaries=settings.get("summaries", "process"),
        )
        async with backend:
            yield backend

    async def add(
        self,
        key: MemoryKey,
        numbers: Sequence[int],
        *,
        driver: Driver | None = None,
        config: ShortTermMemoryConfig = CONFIG,
    ) -> None:
        """Add turns in a process that ends at once."""
        async with self.opened(driver, summaries="worker") as backend:
            memory = backend.memory(key, config)
            for number in numbers:
                await memory.add_turn(ConversationTurn(f"u{number}", "fine"), turn_id=f"t{number}")

    def worker(self, backend: Backend, **settings: Any) -> Worker:
        made = backend.worker(summarizer=self.summarize, **settings)
        internals: Any = made
        internals._clock = clock.now  # noqa: SLF001 -- no setting
        return made

    async def work(self, seconds: float = 120.0, *, driver: Driver | None = None, **settings: Any) -> None:
        """Have a worker work for so long, and drain."""
        async with self.opened(driver, close_timeout_s=0) as backend:
            worker = self.worker(backend, **settings)
            running = asyncio.create_task(worker.run())
            await asyncio.wait({running}, timeout=seconds)
            worker.stop()
            await running

    async def die_working(self, driver: DyingDriver, seconds: float = 5.0) -> None:
        """Have a worker work until it is killed by its driver; then nothing of it reaches the store."""
        async with self.opened(driver, close_timeout_s=0) as backend:
            running = asyncio.create_task(self.worker(backend).run())
            await asyncio.wait({running}, timeout=seconds)
            # Nor does what it does now.
            driver.at = driver.at or driver.done or 1
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    # What is stored

    async def body(self, key: MemoryKey = KEY) -> Body:
        async with self.reading() as driver:
            record = await driver.load(keys.memory_key(key))
        return Codec().open_body(None if record is None else record.body)

    async def stored(self, key: MemoryKey = KEY) -> int:
        """Return how many turns the record has that no summary covers."""
        async with self.reading() as driver:
            record = await driver.load(keys.memory_key(key))
        return 0 if record is None else len(record.tail)

    async def covers(self, key: MemoryKey = KEY) -> list[str]:
        return covered((await self.body(key)).summary)

    async def looks(self) -> list[Look]:
        async with self.reading() as driver:
            queue = WorkQueue(driver, Codec())
            found = [await queue.look(shard) for shard in await queue.shards()]
        return [look for look in found if look is not None]

    async def noted(self) -> int:
        """Return how many notes are there that are not done."""
        return sum(
            note is not None and not note.is_void and note.id not in look.state.done
            for look in await self.looks()
            for note in look.notes
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Driver]:
        driver = self.driver()
        await driver.open()
        try:
            yield driver
        finally:
            await driver.close()
