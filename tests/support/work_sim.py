"""Short-lived processes and workers in virtual time, with faults at random; and what must be true afterwards.

Operations take their time, fail, lose their answers, or kill their process. The model is slow, and fails at
times. A turn that was not acknowledged is added again, by another process, under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stm_backends import ConversationTurn, MemoryKey, StorageError, Worker
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.memory.shared.maintenance import NOTED_AGAIN_S
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.telemetry.observer import SILENT
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.workers import CONFIG, World

SIM: Final = replace(CONFIG, retry_attempts=1_000, summarizer_timeout_s=3.0)
READS: Final = ("load", "scan")


@dataclass(frozen=True)
class Odds:
    """How likely faults are, for each operation."""

    kill: float = 0.01
    fail: float = 0.02
    lose: float = 0.02


class Faulty(WrapperDriver):
    """Reaches the store after some time, perhaps in vain, perhaps for the last time."""

    def __init__(self, inner: Driver, chance: random.Random, odds: Odds, counts: Counter[str]) -> None:
        super().__init__(inner)
        self.chance = chance
        self.odds = odds
        self.counts = counts
        self.dead = False

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(self.chance.uniform(0.0, 0.02))
        drawn, odds = self.chance.random(), self.odds
        if self.dead:
            raise Unavailable("this process was killed")
        if drawn < odds.kill:
            self.dead = True
            self.counts["killed"] += 1
            if self.chance.random() < 0.5:
                await send()
            if operation in READS:
                raise Unavailable("this process was killed")
            raise OutcomeUnknown("this process was killed")
        if drawn < odds.kill + odds.fail:
            raise Unavailable("the datastore is away")
        answer = await send()
        if operation not in READS and drawn < odds.kill + odds.fail + odds.lose:
            self.counts["lost answers"] += 1
            raise OutcomeUnknown("the answer was lost")
        return answer


class Sim:
    """One run. `problems` says what is wrong after it."""

    def __init__(
        self,
        seed: int,
        *,
        conversations: int = 9,
        turns: int = 14,
        odds: Odds = Odds(),
        heals: bool = True,
        kind: type[Worker] = Worker,
    ) -> None:
        self.chance = random.Random(seed)
        self.world = World()
        self.odds = odds
        # Without reads, and without faults in the processes that add turns, notes alone bring the summaries.
        self.heals = heals
        self.kind = kind
        self.counts: Counter[str] = Counter()
        self.keys = [MemoryKey(f"t{number % 3}", "u", f"s{number}") for number in range(conversations)]
        self.turns = turns
        self.ledger = LedgerSummarizer()
        self.ended = asyncio.Event()
        self.problems: list[str] = []

    async def summarize(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.counts["calls"] += 1
        await asyncio.sleep(self.chance.uniform(0.0, 1.5))
        if self.chance.random() < 0.05:
            raise RuntimeError("the model failed")
        return await self.ledger(request)

    def driver(self, *, faulty: bool = True) -> Driver:
        inner = self.world.driver()
        return Faulty(inner, self.chance, self.odds, self.counts) if faulty else inner

    async def talk(self, key: MemoryKey) -> None:
        """Add the turns of a conversation, each in a process that ends at once."""
        for number in range(self.turns):
            added = False
            while not added:
                await asyncio.sleep(self.chance.uniform(0.0, 2.0))
                with contextlib.suppress(StorageError):
                    driver = self.driver(faulty=self.heals)
                    async with self.world.opened(driver, summaries="worker") as backend:
                        memory = backend.memory(key, SIM)
                        if self.heals and self.chance.random() < 0.5:
                            await memory.get_llm_context()
                        await memory.add_turn(ConversationTurn(f"u{number}", "fine"), turn_id=f"t{number}")
                        added = True
            self.counts["turns"] += 1

    async def work(self) -> None:
        """Run workers one after another, until the end; some die, and some are told to end."""
        while not self.ended.is_set():
            with contextlib.suppress(StorageError):
                await self._work_once()

    async def _work_once(self) -> None:
        async with self.world.opened(self.driver(), close_timeout_s=0) as backend:
            made = backend.worker(summarizer=self.summarize)
            internals: Any = made
            worker: Any = self.kind(
                internals._queue,  # noqa: SLF001 -- another kind of the same worker
                internals._work,  # noqa: SLF001
                observer=SILENT,
                drain_s=self.chance.uniform(0.0, 3.0),
                clock=self._clock(self.chance.uniform(-3.0, 3.0)),
            )
            running = asyncio.create_task(worker.run())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self.chance.uniform(1.0, 20.0))
            if self.chance.random() < 0.5:
                worker.stop()
            else:
                running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            self.counts["workers"] += 1

    @staticmethod
    def _clock(wrong_by: float) -> Callable[[], float]:
        loop = asyncio.get_running_loop()
        return lambda: loop.time() + wrong_by

    async def run(self) -> None:
        workers = [asyncio.create_task(self.work()) for _ in range(3)]
        await asyncio.gather(*map(self.talk, self.keys))
        self.ended.set()
        await asyncio.gather(*workers)
        # What has left no note, a later read finds.
        await asyncio.sleep(NOTED_AGAIN_S + 5)
        for key in self.keys if self.heals else ():
            async with self.world.opened(summaries="worker") as backend:
                await backend.memory(key, SIM).get_llm_context()
        self.world.summarize = self.ledger
        await self.world.work(240)
        await self._check()

    async def _check(self) -> None:
        said = [f"u{number}" for number in range(self.turns)]
        for key in self.keys:
            async with self.world.reading() as driver:
                record = await driver.load(keys.memory_key(key))
            # Repeats that readers drop may be there.
            entries = () if record is None else record.tail
            tail = [Codec().open_turn(entry).turn.user_message for entry in entries]
            covered = await self.world.covers(key)
            left = [one for one in dict.fromkeys(tail) if one not in covered]
            if covered + left != said:
                self.problems.append(f"{key}: {covered} + {left}")
            if len(left) >= 2 + SIM.fold_batch_turns:
                self.problems.append(f"{key}: {len(left)} turns without a summary")
        if noted := await self.world.noted():
            self.problems.append(f"{noted} notes are left")
        if any(look.state.held for look in await self.world.looks()):
            self.problems.append("a worker holds something that has ended")
