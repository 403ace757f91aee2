"""How calls are timed: beside a bare round trip of the same bytes, in turns with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from benchmarks.datastores import TOGETHER, Bare, Datastore
from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    DistributedShortTermMemory,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.drivers.contract import Driver, Key
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import memory_key

CONFIG = ShortTermMemoryConfig(
    strategy="rolling_summary",
    budget=MemoryBudget(full_zone_turns=5, summary_max_tokens=500),
    fold_batch_turns=5,
)
SUMMARY = "The user wants a table for two and the guide found one with seats outdoors. " * 25

REQUESTS_OF_A_FOLD = 4
"""Taking the lease, loading, storing the summary and giving the lease back."""

_ADDED_AT_ONCE = 10
"""Turns that are added at once where nothing is measured, to get there sooner."""


async def summarize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer at once: what a model takes is no time of ours."""
    return {"summary": SUMMARY}


def turn(number: int) -> ConversationTurn:
    """Return a turn of about the size of a real one: 455 bytes of text."""
    return ConversationTurn(
        f"Turn {number}: I want to book a table for two at half past eleven in San Jose, please.",
        "Your reservation is made. " + "They have good vegetarian options and outdoor seating. " * 6,
        ts=float(number),
    )


class Library:
    """How much processor time this process has spent within a client library, in nanoseconds."""

    spent = 0

    @classmethod
    @contextlib.contextmanager
    def watched(cls, functions: Iterable[tuple[type, str]]) -> Iterator[None]:
        """Count what is spent in coroutine functions, of one call at a time."""
        with contextlib.ExitStack() as stack:
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, cls._counting(getattr(owner, name))))
            yield

    @classmethod
    def _counting(cls, function: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def counting(*arguments: object, **named: object) -> object:
            before = time.process_time_ns()
            try:
                return await function(*arguments, **named)
            finally:
                cls.spent += time.process_time_ns() - before

        return counting


@dataclass
class Calls:
    """What each of some calls took, in microseconds.

    `cpu` is the processor time of this process meanwhile, and `own` the part of it outside of a client
    library that is watched.
    """

    times: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    own: list[float] = field(default_factory=list[float])

    async def time(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Make a call and remember what it took."""
        library, cpu, start = Library.spent, time.process_time_ns(), time.perf_counter_ns()
        await call(*arguments)
        end, cpu_end = time.perf_counter_ns(), time.process_time_ns()
        self.times.append((end - start) / 1e3)
        self.cpu.append((cpu_end - cpu) / 1e3)
        self.own.append((cpu_end - cpu - (Library.spent - library)) / 1e3)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.times, n=20)[-1]


@dataclass
class Compared:
    """Calls of a memory, and bare ones made in turns with them."""

    ours: Calls = field(default_factory=Calls)
    bare: Calls = field(default_factory=Calls)

    @property
    def ratio(self) -> float:
        return self.ours.median / self.bare.median

    @property
    def own_cpu(self) -> float:
        """The processor time of our own code."""
        return statistics.median(self.ours.own)

    @property
    def more_cpu(self) -> float:
        """The processor time that ours take beyond a bare call's, the client library's part included."""
        return statistics.median(self.ours.cpu) - statistics.median(self.bare.cpu)


@dataclass
class AtLength:
    """A conversation to which so many turns had been added before.

    `blocking` are bare writes and bare reads that the event loop waited for, where they were measured.
    """

    length: int
    add: Compared = field(default_factory=Compared)
    read: Compared = field(default_factory=Compared)
    blocking: tuple[Calls, Calls] = field(default_factory=lambda: (Calls(), Calls()))


@dataclass
class Together:
    """Many conversations at once, each adding and reading in turns. `seconds` were spent on each side."""

    seconds: float
    add: Compared = field(default_factory=Compared)
    read: Compared = field(default_factory=Compared)
    folds: int = 0

    @property
    def turns_a_second(self) -> float:
        return len(self.add.ours.times) / self.seconds

    @property
    def bare_turns_a_second(self) -> float:
        return len(self.add.bare.times) / self.seconds

    @property
    def throughput(self) -> float:
        """Turns as a share of the bare ones."""
        return self.turns_a_second / self.bare_turns_a_second

    @property
    def requests(self) -> float:
        """Requests as a share of the bare ones, those of folding included."""
        return (self.turns_a_second * 2 + self.folds * REQUESTS_OF_A_FOLD / self.seconds) / (
            self.bare_turns_a_second * 2
        )


class Conversation:
    """A memory on a driver, and its record.

    By its clock a turn comes every ten seconds: the ids of some time's turns are remembered, and at the
    machine's own pace that would be all.
    """

    def __init__(self, driver: Driver, directory: Directory, name: str) -> None:
        key = MemoryKey("acme", "u1", name)
        self.key: Key = memory_key(key)
        self.added = 0
        self._driver = driver
        self.memory = DistributedShortTermMemory(
            driver,
            key,
            CONFIG,
            summarizer=summarize,
            directory=directory,
            clock=lambda: 1e9 + 10 * self.added,
        )

    async def add(self) -> None:
        self.added += 1
        await self.memory.add_turn(turn(self.added))

    async def grow(self, length: int) -> None:
        """Add turns until there were so many."""
        while self.added < length:
            count = min(_ADDED_AT_ONCE, length - self.added)
            await asyncio.gather(*(self.add() for _ in range(count)))
            await settled(self.memory)

    async def show(self, bare: Bare, place: int) -> bytes:
        """Have the bare client keep the bytes that this conversation consists of; returns an entry."""
        record = await self._driver.load(self.key)
        if record is None:
            raise LookupError("the conversation is gone")
        await bare.keep(place, b"".join((record.body or b"", *record.tail)))
        return record.tail[-1]


async def settled(memory: DefaultShortTermMemory | DistributedShortTermMemory) -> bool:
    """Let the background end, so that it is not measured with the next call; says whether there was one."""
    was_busy = memory.busy
    while memory.busy:  # noqa: ASYNC110 -- it tells nobody when it is done
        await asyncio.sleep(0.0005)
    return was_busy


def _rounds_of(length: int, rounds: int) -> Iterator[int]:
    """Divide rounds among conversations, so that none grows by more than ten turns or a quarter."""
    most = max(10, length // 4)
    while rounds > 0:
        yield min(most, rounds)
        rounds -= most


async def alone(datastore: Datastore, length: int, rounds: int, pause: float) -> AtLength:
    """Measure one conversation at a time. The calls of a round come in random order."""
    driver, bare, blocking = datastore.driver, datastore.bare, datastore.blocking
    result = AtLength(length)
    directory = Directory(driver, Codec())
    for number, count in enumerate(_rounds_of(length, rounds)):
        conversation = Conversation(driver, directory, f"{length} turns, {number}")
        await conversation.grow(length)
        memory = conversation.memory
        for _ in range(count):
            entry = await conversation.show(bare, 0)
            calls: list[tuple[Calls, Callable[..., Awaitable[object]], tuple[object, ...]]] = [
                (result.add.ours, memory.add_turn, (turn(conversation.added + 1),)),
                (result.add.bare, bare.write, (0, entry)),
                (result.read.ours, memory.get_llm_context, ()),
                (result.read.bare, bare.read, (0,)),
            ]
            if blocking is not None:
                await conversation.show(blocking, 0)
                write, read = result.blocking
                calls += [(write, blocking.write, (0, entry)), (read, blocking.read, (0,))]
            random.shuffle(calls)
            for taken, call, arguments in calls:
                if await settled(memory):
                    # Both clients have just been at work, whichever is measured first.
                    await asyncio.gather(driver.load(conversation.key), bare.read(0))
                if pause:
                    await asyncio.sleep(pause)
                await taken.time(call, *arguments)
            conversation.added += 1
            await settled(memory)
    return result


async def together(datastore: Datastore, *, blocks: int, seconds: float) -> Together:
    """Measure many conversations at once, beside as many bare loops, in blocks that alternate.

    Folding is under way as it falls due, and a block ends for both sides when its time is over.
    """
    driver, bare = datastore.driver, datastore.bare
    directory = Directory(driver, Codec())
    conversations = [Conversation(driver, directory, f"together {place}") for place in range(TOGETHER)]
    for conversation in conversations:
        await conversation.grow(20)
    result = Together(seconds=blocks * seconds)
    until = 0.0

    async def talk(conversation: Conversation) -> None:
        while time.perf_counter() < until:
            await result.add.ours.time(conversation.add)
            await result.read.ours.time(conversation.memory.get_llm_context)

    async def exchange(place: int, entry: bytes) -> None:
        while time.perf_counter() < until:
            await result.add.bare.time(bare.write, place, entry)
            await result.read.bare.time(bare.read, place)

    folds_before = _folds(conversations)
    for _ in range(blocks):
        entries = [await one.show(bare, place) for place, one in enumerate(conversations)]
        until = time.perf_counter() + seconds
        await asyncio.gather(*itertools.starmap(exchange, enumerate(entries)))
        until = time.perf_counter() + seconds
        await asyncio.gather(*map(talk, conversations))
        for conversation in conversations:
            await settled(conversation.memory)
    result.folds = _folds(conversations) - folds_before
    return result


def _folds(conversations: Sequence[Conversation]) -> int:
    return sum(conversation.memory.stats.summaries for conversation in conversations)


async def in_process(length: int, rounds: int) -> tuple[int, Calls, Calls]:
    """Measure the memory that lives in this process alone; returns its adds and its reads."""
    adds, reads = Calls(), Calls()
    for count in _rounds_of(length, rounds):
        memory = DefaultShortTermMemory(config=CONFIG, summarizer=summarize)
        for number in range(length):
            await memory.add_turn(turn(number))
            if number % 50 == 0:
                await settled(memory)
        for number in range(count):
            await settled(memory)
            await adds.time(memory.add_turn, turn(length + number))
            await settled(memory)
            await reads.time(memory.get_llm_context)
    return length, adds, reads
