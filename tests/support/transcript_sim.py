"""Processes that keep transcripts, are killed, lose answers and have no model.

Each turn that was acknowledged is then once in the transcript and in order, no reader missed one or saw one
twice, and the summary covers exactly the first turns: it is a chain of hashes over them.

The datastore is one in memory, in virtual time, or any other in real time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from stm_backends.drivers.contract import Driver, Key, Record, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.base import SharedBase
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.reading import TranscriptTurn
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.types import ConversationTurn, MemoryBudget, MemoryHealth, MemoryKey, ShortTermMemoryConfig
from tests.support import clock

T = TypeVar("T")
M = TypeVar("M", bound=SharedBase)
PODS = 3
DEADLINE_S = 0.3
"""What memories take for the deadline of an operation: leases are short, so that many end too early."""


@dataclass(frozen=True)
class World:
    """What is simulated: how many turns at least, and what is special about the datastore or the memories.

    `full` is for the datastore in memory.
    """

    seed: int
    turns: int = 600
    conversations: int = 2
    truncates: bool = False
    full: bool = False
    unconfirmed: bool = False
    leaseless: bool = False
    slow: bool = False
    writers: int = PODS
    total_tokens: int = 0


class FaultDriver(WrapperDriver):
    """The operations of one process, which is killed at one of them."""

    def __init__(self, inner: Driver, sim: Faults[Any, Any]) -> None:
        super().__init__(inner)
        self._sim = sim
        self._left = sim.chance.randint(30, 600)
        self._late: set[asyncio.Task[None]] = set()
        self.dead = False

    @property
    def traits(self) -> Traits:
        traits = self.inner.traits
        unconfirmed = self._sim.world.unconfirmed or traits.shows_unconfirmed
        return dataclasses.replace(traits, deadline=DEADLINE_S, shows_unconfirmed=unconfirmed)

    async def close(self) -> None:
        """Close the driver within once all is done that the process has sent."""
        await asyncio.gather(*self._late)
        await super().close()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        sim, chance = self._sim, self._sim.chance
        if sim.calm and not self.dead:
            return await send()
        of_page = (key if isinstance(key, str) else key.scope).endswith(":page")
        writes = operation not in ("load", "scan")
        # Now and then longer than a lease.
        await asyncio.sleep(chance.random() * (0.6 if chance.random() < 0.02 else 0.002))
        if self.dead:
            raise Unavailable("the process is dead", backend="sim", operation=operation)
        # Most of all at the write of a page, and at that of the record which follows.
        self._left -= 15 if of_page and writes else 8 if operation == "replace" else 1
        if self._left <= 0:
            self.dead = True
            sim.counts["killed"] += 1
            await self._perhaps(send, writes)
        elif writes and chance.random() < (0.12 if of_page or operation == "replace" else 0.03):
            sim.counts["lost answers"] += 1
            await self._perhaps(send, writes)
            raise OutcomeUnknown("lost")
        elif chance.random() < 0.015:
            raise Unavailable("away", backend="sim", operation=operation)
        else:
            answer = await send()
            if not self.dead:
                return answer
        raise OutcomeUnknown("killed") if writes else Unavailable("killed")

    async def _perhaps(self, send: Callable[[], Awaitable[Any]], writes: bool) -> None:
        """Do a write, do it later, or do it never."""
        fate = self._sim.chance.random()
        if writes and fate < 0.45:
            await send()
        elif writes and fate < 0.75:
            task = asyncio.create_task(self._later(send))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _later(self, send: Callable[[], Awaitable[Any]]) -> None:
        self._sim.counts["late"] += 1
        await asyncio.sleep(self._sim.chance.random() * 0.3)
        try:
            await send()
        except StorageError:
            self._sim.counts["late and refused"] += 1


Said: TypeAlias = dict[str, tuple[float, float]]
"""When what has an id began to be said, and when that was acknowledged."""


def chained(previous: str, text: str) -> str:
    return hashlib.sha256(f"{previous}|{text}".encode()).hexdigest()[:16]


@dataclass
class Pod:
    driver: FaultDriver
    backgrounds: Backgrounds
    memories: dict[MemoryKey, Any] = field(default_factory=dict[MemoryKey, Any])


class Numbered(Protocol):
    """A turn or a message of a whole conversation."""

    @property
    def number(self) -> int: ...
    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=Numbered)


def in_memory(world: World) -> Callable[[], Driver]:
    """Return what makes drivers of one datastore in this process."""
    store = MemoryStore()
    limits: dict[str, Any] = {"max_record_bytes": 30_000} if world.full else {}
    return lambda: MemoryDriver(store, clock=clock.now, **limits)


class Faults(ABC, Generic[M, N]):
    """One run of processes that speak in anything; `problems` has what was found.

    `make` returns a driver for each process. By default, all are those of a datastore in memory.
    """

    def __init__(self, world: World, make: Callable[[], Driver] | None = None) -> None:
        self.world, self.chance = world, random.Random(world.seed)
        self.counts: Counter[str] = Counter()
        self.make = make or in_memory(world)
        self.plain = self.make()
        """A driver without faults, for readers."""
        self.calm = self._model_down = False
        self.problems: list[str] = []
        self.pods: list[Pod] = []
        self._closing: list[asyncio.Task[None]] = []

    @abstractmethod
    def open_on(self, pod: Pod, key: MemoryKey, config: ShortTermMemoryConfig) -> M:
        """Return a conversation as a process has it."""

    @abstractmethod
    async def writer(self, key: MemoryKey, name: str, turns: int, said: Said) -> None:
        """Say so many turns, and note what was acknowledged."""

    @abstractmethod
    async def reader(self, key: MemoryKey, said: Said, stop: asyncio.Event) -> None:
        """Read a conversation again and again."""

    @abstractmethod
    async def page(self, memory: M, **place: int) -> tuple[Sequence[N], Sequence[int]]:
        """Return a page of the whole conversation, and the numbers that it lacks."""

    @abstractmethod
    async def settle(self, memory: M) -> None:
        """Let one process do what is left to do."""

    @abstractmethod
    async def check(self, key: MemoryKey, memory: M, said: Said) -> None:
        """Note what is wrong in the end."""

    @abstractmethod
    def words_of(self, turn: Any) -> list[str]:
        """Return what a summarizer sees of a turn as the words that a summary chains."""

    async def summarize(self, request: Any) -> dict[str, str]:
        if not self.calm:
            hangs = self.chance.random() < (0.9 if self.world.slow else 0.05)
            await asyncio.sleep(0.14 if hangs else 0.003)
            if self._model_down or self.chance.random() < 0.03:
                raise RuntimeError("the model is down")
        head, _, count = (request["previous_summary"] or "- 0").partition(" ")
        for turn in request["turns"]:
            for word in self.words_of(turn):
                head, count = chained(head, word), str(int(count) + 1)
        return {"summary": f"{head} {count}"}

    def pod(self) -> Pod:
        driver = FaultDriver(self.make(), self)
        return Pod(driver, Backgrounds(driver, Codec(), clock=clock.now))

    def memory(self, pod: Pod, key: MemoryKey) -> M:
        if key not in pod.memories:
            config = ShortTermMemoryConfig(
                strategy="truncation" if self.world.truncates else "rolling_summary",
                budget=MemoryBudget(
                    full_zone_turns=self.chance.choice([2, 5]),
                    summary_max_tokens=500,
                    total_max_tokens=self.world.total_tokens,
                ),
                retry_attempts=1,
                retry_backoff_base_s=0.05,
                degraded_retry_interval_s=0.3,
                recovery_backlog_limit=1 if self.world.slow else 8,
                fold_batch_turns=self.chance.choice([1, 1, 3, 5]),
                fold_max_turns=2 if self.world.slow else 10,
                summarizer_timeout_s=0.15,
                transcript=True,
            )
            pod.memories[key] = self.open_on(pod, key, config)
        return pod.memories[key]

    async def any_pod(self) -> Pod:
        for index, pod in enumerate(self.pods):
            if pod.driver.dead:
                self.end(pod)
                self.pods[index] = self.pod()
        pod = self.chance.choice(self.pods)
        await pod.driver.open()
        return pod

    def end(self, pod: Pod) -> None:
        self._closing.append(asyncio.create_task(pod.driver.close()))
        for memory in pod.memories.values():
            memory.abandon()
            self.counts["races lost"] += memory.stats.lost_races
            self.counts["trimmed"] += memory.stats.trimmed
            self.counts["dropped"] += memory.stats.dropped

    async def read(self, memory: M, limit: int) -> list[N]:
        """Return the whole conversation, read forwards or backwards in pages."""
        backwards = self.chance.random() < 0.5
        found = await (self._backwards if backwards else self._forwards)(memory, limit)
        if [one.number for one in found] != [*range(len(found))]:
            self.problems.append(f"a reader got other numbers than 0 to {len(found) - 1}")
        if len({one.id for one in found}) != len(found):
            self.problems.append("a reader got a turn twice")
        self.counts["readings"] += 1
        return found

    async def _forwards(self, memory: M, limit: int) -> list[N]:
        found: list[N] = []
        while True:
            some, missing = await self.page(memory, after=found[-1].number if found else -1, limit=limit)
            if missing:
                self.problems.append(f"a page lacks {missing[:3]}")
            if missing or not some:
                return found
            found += some
            await asyncio.sleep(self.chance.random() * 0.005)

    async def _backwards(self, memory: M, limit: int) -> list[N]:
        some, missing = await self.page(memory, limit=limit)
        found = [*some]
        while some and found[0].number > 0 and not missing:
            await asyncio.sleep(self.chance.random() * 0.005)
            some, missing = await self.page(memory, before=found[0].number, limit=limit)
            found = [*some, *found]
        if missing:
            self.problems.append(f"a page lacks {missing[:3]}")
        return found

    def require_once(self, said: Said, ids: Sequence[str]) -> None:
        """Note what is missing, there twice, or before what was acknowledged before it was said."""
        twice = [one for one, count in Counter(ids).items() if count > 1]
        missing = said.keys() - set(ids)
        if twice or missing:
            self.problems.append(f"{len(twice)} turns are there twice, and {len(missing)} are missing")
        latest = 0.0
        for one in ids:
            start, end = said.get(one, (latest, latest))
            if end < latest:
                self.problems.append(f"{one} is out of order")
            latest = max(latest, start)
        self.counts["turns"] += len(ids)

    async def at_rest(self, key: MemoryKey, read: Callable[[], AsyncIterator[N]]) -> tuple[list[N], Record]:
        """Return all of a conversation, and its record, which nobody has changed while that was read."""
        place = keys.memory_key(key)
        before = await self.plain.load(place)
        while True:
            found, after = [one async for one in read()], await self.plain.load(place)
            if before and after and (before.version, before.tail) == (after.version, after.tail):
                return found, after
            before = after

    def require_summary(self, record: Record, words: Sequence[str]) -> None:
        """Note it if the summary in a record is not of exactly these words."""
        head, _, count = Snapshot.of(record, Codec()).body.summary.partition(" ")
        expected = "-"
        for word in words:
            expected = chained(expected, word)
        if words and (head, int(count)) != (expected, len(words)):
            self.problems.append(f"the summary covers other turns than the first {len(words)}, or {count}")
        if self.counts["dropped"]:
            self.problems.append("turns were dropped")
        self.counts["summarized"] += len(words)

    async def model(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._model_down = False
            await asyncio.sleep(1.5)
            self._model_down = True
            await asyncio.sleep(1.0)
        self._model_down = False

    async def run(self) -> list[str]:
        """Simulate, and return the problems."""
        await self.plain.open()
        self.pods = [self.pod() for _ in range(PODS)]
        stop, said = asyncio.Event(), dict[MemoryKey, Said]()
        writers: list[Coroutine[Any, Any, None]] = []
        others = [asyncio.create_task(self.model(stop))]
        each = math.ceil(self.world.turns / self.world.conversations / self.world.writers)
        for number in range(self.world.conversations):
            key = MemoryKey("t", "u", f"c{number}")
            said[key] = {}
            writers += [self.writer(key, f"{number}w{w}", each, said[key]) for w in range(self.world.writers)]
            others.append(asyncio.create_task(self.reader(key, said[key], stop)))
        await asyncio.gather(*writers)
        stop.set()
        await asyncio.gather(*others)
        self.calm = True
        for pod in self.pods:
            self.end(pod)
        await asyncio.gather(*self._closing)
        await asyncio.sleep(1.0)
        clean = self.pod()
        await clean.driver.open()
        for key, turns in said.items():
            await self.settle(self.memory(clean, key))
            await self.check(key, self.memory(clean, key), turns)
        self.end(clean)
        await asyncio.gather(self.plain.close(), *self._closing)
        return self.problems


class Sim(Faults[DistributedShortTermMemory, TranscriptTurn]):
    """Processes that speak in turns."""

    def open_on(self, pod: Pod, key: MemoryKey, config: ShortTermMemoryConfig) -> DistributedShortTermMemory:
        return DistributedShortTermMemory(
            pod.driver, key, config, summarizer=self.summarize, backgrounds=pod.backgrounds
        )

    def words_of(self, turn: Any) -> list[str]:
        return [turn["user"].partition("#")[0]]

    async def writer(self, key: MemoryKey, name: str, turns: int, said: Said) -> None:
        now = asyncio.get_running_loop().time
        for number in range(turns):
            turn_id, start = f"{name}-{number}", now()
            size = self.chance.choice([0, 0, 0, 3_000]) if self.world.full else 0
            turn = ConversationTurn(f"{turn_id}#{'x' * size}", "ok")
            while True:
                try:
                    pod = await self.any_pod()
                    await self.memory(pod, key).add_turn(turn, turn_id=turn_id)
                    break
                except StorageError:
                    self.counts["turns added again"] += 1
            said[turn_id] = (start, now())
            if self.chance.random() < 0.6:
                await asyncio.sleep(self.chance.random() * 0.02)

    async def reader(self, key: MemoryKey, said: Said, stop: asyncio.Event) -> None:
        memory = DistributedShortTermMemory(self.plain, key)
        while not stop.is_set():
            tail = len(await memory.turns())
            self.counts["longest tail"] = max(self.counts["longest tail"], tail)
            before, limit = set(said), self.chance.choice([3, 17, 50] if len(said) < 200 else [50, 200])
            found = await self.read(memory, limit)
            if missed := before.difference(one.id for one in found):
                self.problems.append(f"a reader missed {len(missed)} of {len(before)} turns")
            await asyncio.sleep(0.05 + len(found) / 200)

    async def page(
        self, memory: DistributedShortTermMemory, **place: int
    ) -> tuple[Sequence[TranscriptTurn], Sequence[int]]:
        page = await memory.transcript(**place)
        return page.turns, page.missing

    async def settle(self, memory: DistributedShortTermMemory) -> None:
        """Let one process do what is left to do."""
        for number in range(40):
            await memory.flush(timeout=3)
            pending = (await memory.get_llm_context()).get("conversation_memory", {}).get("pending_turns")
            if memory.health is MemoryHealth.HEALTHY and not pending:
                return
            await memory.add_turn(ConversationTurn(f"nudge{number}#", "ok"), turn_id=f"nudge{number}")
            await asyncio.sleep(0.3)

    async def check(self, key: MemoryKey, memory: DistributedShortTermMemory, said: Said) -> None:
        found, record = await self.at_rest(key, memory.each_turn)
        self.require_once(said, [turn.id for turn in found])
        if not self.world.truncates:
            words = [turn.turn.user_message.partition("#")[0] for turn in found if turn.summarized]
            self.require_summary(record, words)
