"""What is measured: turns of our memory beside those of a bare client, in blocks that alternate.

A turn is `add_turn` and `get_llm_context`, or one bare write and one bare read. *Folding off* is the strategy
`truncation` with its defaults, in dialogues of `DIALOGUE` turns. *Folding on* summarizes five turns at a
time, in conversations that do not end, with a summarizer that answers at once; *kept* is that with a
transcript.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from benchmarks.datastores import TOGETHER, Bare, Datastore
from benchmarks.machine import Meter
from benchmarks.steps import Steps
from stm_backends import (
    DistributedShortTermMemory,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, new_version
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import StorageError
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import memory_key
from stm_backends.types import ConversationTurn, StoredTurn

OFF = ShortTermMemoryConfig(strategy="truncation")
ON = ShortTermMemoryConfig(
    strategy="rolling_summary",
    budget=MemoryBudget(full_zone_turns=5, summary_max_tokens=500),
    fold_batch_turns=5,
)
T = TypeVar("T")

CONFIGS: Mapping[str, ShortTermMemoryConfig] = {
    "off": OFF,
    "on": ON,
    "kept": replace(ON, transcript=True),
    "on, one at a time": replace(ON, fold_batch_turns=1),
    "kept, one at a time": replace(ON, fold_batch_turns=1, transcript=True),
}
SIDES = ("bare", "off", "on")

DIALOGUE = 10
"""Turns of a dialogue without folding, about as many as task-oriented dialogues have."""

SUMMARY = "The user wants a table for two and the guide found one with seats outdoors. " * 25

EXTRA_ROUNDS = 2
"""How many more rounds of a cell are made while the machine is busy."""

_ADDED_AT_ONCE = 10


async def summarize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer at once: the time of a model is not measured."""
    return {"summary": SUMMARY}


def turn(number: int) -> ConversationTurn:
    """Return a turn of about the size of a real one: 455 bytes of text."""
    return ConversationTurn(
        f"Turn {number}: I want to book a table for two at half past eleven in San Jose, please.",
        "Your reservation is made. " + "They have good vegetarian options and outdoor seating. " * 6,
        ts=float(number),
    )


@dataclass
class Block:
    """One side for about a second. Times are seconds; `p99` is that of one call, in milliseconds.

    `server` is the processor time of servers that were started here. `errors` are calls that failed; they
    count for no turn.
    """

    turns: float
    wall: float
    client: float
    server: float
    p99: float
    busy: bool = False
    errors: int = 0

    @property
    def rate(self) -> float:
        """Turns a second."""
        return self.turns / self.wall


@dataclass
class Cell:
    """Blocks of every side, for a number of conversations in each of some processes."""

    conversations: int
    processes: int = 1
    blocks: dict[str, list[Block]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def rates(self, side: str) -> list[float]:
        """Return the turns a second of each block."""
        return [block.rate for block in self.blocks[side]]

    def ratios(self, side: str, to: str = "bare") -> list[float]:
        """Return the share of the turns a second of another side, for each round."""
        return [ours / other for ours, other in zip(self.rates(side), self.rates(to), strict=True)]

    def cost(self, side: str, of: str) -> float:
        """Return the median processor time of a turn in microseconds; `of` is `client` or `server`."""
        return statistics.median(1e6 * getattr(block, of) / block.turns for block in self.blocks[side])

    @property
    def noisy(self) -> bool:
        """Whether other programs were at work during a block that counts."""
        return any(block.busy for blocks in self.blocks.values() for block in blocks)

    @property
    def errors(self) -> int:
        """How many calls failed."""
        return sum(block.errors for blocks in self.blocks.values() for block in blocks)


@dataclass
class Alone:
    """Latencies of single turns in one conversation, in microseconds, as medians of blocks."""

    mode: str
    length: int
    ours: list[float] = field(default_factory=list[float])
    bare: list[float] = field(default_factory=list[float])
    busy: list[bool] = field(default_factory=list[bool])

    @property
    def ratios(self) -> list[float]:
        """The ratio to the bare turn, for each block."""
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]

    @property
    def noisy(self) -> bool:
        """Whether other programs were at work during a block that counts."""
        return any(self.busy)


@dataclass
class Call:
    """One call at a time: its latency and the processor time of this process, medians in microseconds."""

    wall: float
    client: float


@dataclass
class Cost:
    """The processor time of a turn at `TOGETHER` conversations in microseconds, by whose code it is.

    `operations` are how many of each operation of the driver a turn takes.
    """

    memory: float
    driver: float
    library: float
    total: float
    busy: bool
    operations: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def own(self) -> float:
        """Our own code."""
        return self.memory + self.driver


class Counting(WrapperDriver):
    """Counts requests, by the operation and the kind of record."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.requests = Counter[tuple[Operation, str]]()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        self.requests[operation, (key if isinstance(key, str) else key.scope).rpartition(":")[2]] += 1
        return await send()

    def count(self, operation: Operation | None = None, kind: str | None = None) -> int:
        """Return how many requests there were, of one operation or of one kind of record."""
        return sum(
            times
            for (what, where), times in self.requests.items()
            if operation in (None, what) and kind in (None, where)
        )


class Participant(Protocol):
    """One of those that take turns at once."""

    def call(self) -> Awaitable[object]:
        """Make the next call: a write, then a read, and so on."""
        ...


class BareLoop:
    """A bare client's writes and reads."""

    def __init__(self, bare: Bare, place: int, entry: bytes) -> None:
        self._calls = itertools.cycle((lambda: bare.write(place, entry), lambda: bare.read(place)))

    def call(self) -> Awaitable[object]:
        return next(self._calls)()


class Talk:
    """A conversation with our memory; with a `length`, a new one begins after so many turns.

    By its clock a turn comes every ten seconds. The ids of recent turns are remembered by time, which at
    the machine's own pace would be all of them.
    """

    def __init__(
        self,
        driver: Driver,
        directory: Directory,
        name: str,
        mode: str,
        length: int = 0,
        *,
        says: Callable[[int], ConversationTurn] = turn,
    ) -> None:
        self._driver = driver
        self._says = says
        self._directory = directory
        self._name = name
        self._mode = mode
        self._length = length
        self._codec = Codec()
        self._backgrounds = Backgrounds(driver, self._codec, clock=lambda: 1e9 + 10 * self.added)
        self._is_added = False
        self.added = 0
        self.folds = 0
        self.memory = self._begin()

    def _begin(self) -> DistributedShortTermMemory:
        number = self.added // self._length if self._length else 0
        key = MemoryKey("acme", "u1", f"{self._name} {number}")
        self.key = memory_key(key)
        return DistributedShortTermMemory(
            self._driver,
            key,
            CONFIGS[self._mode],
            summarizer=None if self._mode == "off" else summarize,
            codec=self._codec,
            directory=self._directory,
            backgrounds=self._backgrounds,
        )

    async def call(self) -> None:
        self._is_added = not self._is_added
        await (self.add() if self._is_added else self.read())

    async def add(self) -> None:
        """Add a turn."""
        if self._length and self.added and self.added % self._length == 0:
            self.memory = self._begin()
        self.added += 1
        await self.memory.add_turn(self._says(self.added))

    async def read(self) -> None:
        """Read the context."""
        await self.memory.get_llm_context()

    async def grow(self, length: int, *, at_once: int = _ADDED_AT_ONCE) -> None:
        """Add turns until there are so many."""
        while self.added < length:
            await asyncio.gather(*(self.add() for _ in range(min(at_once, length - self.added))))
            await self.settled()

    async def settled(self) -> None:
        """Wait until the background has ended."""
        while self.memory.busy:  # noqa: ASYNC110 -- it does not say when it ends
            await asyncio.sleep(0.0005)


async def run_block(participants: Sequence[Participant], seconds: float, meter: Meter) -> Block:
    """Let participants make calls for so long; the block ends when their last calls do."""
    times: list[float] = []
    errors: list[Exception] = []

    async def loop(participant: Participant, until: float) -> None:
        while (start := time.perf_counter()) < until:
            try:
                await participant.call()
                times.append(time.perf_counter() - start)
            except StorageError as error:
                errors.append(error)

    with meter.reading() as usage:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(loop(participant, until) for participant in participants))
    return Block(
        turns=max(len(times), 1) / 2,
        wall=usage.wall,
        client=usage.client,
        server=usage.family,
        p99=1e3 * (statistics.quantiles(times, n=100)[-1] if len(times) > 1 else usage.wall),
        busy=usage.busy,
        errors=len(errors),
    )


class Bench:
    """The participants on one datastore: bare loops, dialogues, and conversations with folds."""

    def __init__(self, datastore: Datastore, name: str = "p0") -> None:
        self.datastore = datastore
        self._name = name
        self._meter = Meter(watches=not datastore.address.external)
        # As a user has it: with what a backend wraps around its driver.
        self.driver = Backend(datastore.driver).driver
        self._directory = Directory(self.driver, Codec())
        self._participants: dict[str, list[Participant]] = {side: [] for side in SIDES}

    def talk(self, name: str, mode: str, length: int = 0) -> Talk:
        """Begin a conversation."""
        return Talk(self.driver, self._directory, f"{self._name} {mode} {name}", mode, length)

    async def prepare(self, count: int) -> None:
        """Have at least so many participants of each side."""
        value, entry = sample()
        new: list[Talk] = []
        for place in range(len(self._participants["bare"]), count):
            await self.datastore.bare.keep(place, value)
            self._participants["bare"].append(BareLoop(self.datastore.bare, place, entry))
            self._participants["off"].append(self.talk(f"{place}", "off", DIALOGUE))
            new.append(self.talk(f"{place}", "on"))
        self._participants["on"] += new
        for some in batched(new, TOGETHER):
            # Of different lengths, so that their folds do not come at the same time.
            await asyncio.gather(*(talk.grow(6 + n % 5, at_once=1) for n, talk in enumerate(some)))

    async def block(self, side: str, count: int, seconds: float) -> Block:
        """Measure one side; background work that is still due afterwards is not measured."""
        participants = self._participants[side][:count]
        block = await run_block(participants, seconds, self._meter)
        for participant in participants:
            if isinstance(participant, Talk):
                await participant.settled()
        return block

    async def cost(self, seconds: float) -> Cost:
        """Measure whose code a turn's processor time is spent in, at `TOGETHER` conversations, no folding."""
        await self.prepare(TOGETHER)
        await self.block("off", TOGETHER, seconds / 4)
        steps = Steps()
        with steps.watching(self.datastore.driver, self.datastore.library):
            block = await self.block("off", TOGETHER, seconds)
        spent = {owner: ns / 1e3 / block.turns for owner, ns in steps.spent.items()}
        total = 1e6 * block.client - steps.overhead_ns / 1e3
        operations = {name: count / block.turns for name, count in steps.calls.items()}
        return Cost(**spent, total=total / block.turns, busy=block.busy, operations=operations)

    async def calls(self, rounds: int) -> dict[str, Call]:
        """Measure single calls of the bare client, of the driver and of the memory, in short dialogues."""
        bare, driver, talk = self.datastore.bare, self.datastore.driver, self.talk("calls", "off", DIALOGUE)
        (value, entry), key = sample(), memory_key(MemoryKey("acme", "u2", f"{self._name} calls"))
        await bare.keep(0, value)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "bare write": lambda: bare.write(0, entry),
            "bare read": lambda: bare.read(0),
            "driver append": lambda: driver.append(key, entry, initial_version=new_version(), ttl=None),
            "driver load": lambda: driver.load(key),
            "memory add": talk.add,
            "memory read": talk.read,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for number in range(rounds):
            if number % DIALOGUE == 0:
                await driver.delete(key)
            for who in random.sample(["bare", "driver", "memory"], 3):
                for name in (name for name in calls if name.startswith(who)):
                    await talk.settled()
                    wall, client = time.perf_counter(), time.process_time()
                    await calls[name]()
                    times[name].append((time.perf_counter() - wall, time.process_time() - client))
        return {
            name: Call(*(1e6 * statistics.median(values) for values in zip(*each, strict=True)))
            for name, each in times.items()
        }

    async def alone(
        self,
        mode: str,
        length: int,
        *,
        blocks: int,
        rounds: int,
        at_once: int = _ADDED_AT_ONCE,
        extra: int = EXTRA_ROUNDS,
    ) -> Alone:
        """Measure single turns of a conversation that has so many, each beside a bare one.

        The two come in random order, and the background settles before each. Before, turns are added
        `at_once`.
        """
        talk, bare, result = self.talk(f"{length} turns", mode), self.datastore.bare, Alone(mode, length)
        await talk.grow(length, at_once=at_once)
        value, entry = sample(summarized=mode == "on")
        await bare.keep(0, value)

        async def ours() -> None:
            await talk.add()
            await talk.read()

        async def theirs() -> None:
            await bare.write(0, entry)
            await bare.read(0)

        while len(result.ours) < blocks:
            with self._meter.reading() as usage:
                times: dict[Callable[[], Awaitable[None]], list[float]] = {ours: [], theirs: []}
                for _ in range(rounds):
                    for call in random.sample([ours, theirs], 2):
                        await talk.settled()
                        start = time.perf_counter()
                        await call()
                        times[call].append(1e6 * (time.perf_counter() - start))
            if usage.busy and extra:
                extra -= 1
                continue
            result.ours.append(statistics.median(times[ours]))
            result.bare.append(statistics.median(times[theirs]))
            result.busy.append(usage.busy)
        return result


Measure = Callable[[str], Awaitable[Block]]
"""Measures one block of a side."""


async def fill(cell: Cell, rounds: int, measure: Measure, *, extra: int = EXTRA_ROUNDS) -> Cell:
    """Measure rounds of all sides in random order; repeat `extra` rounds in which the machine was busy."""
    for _ in range(rounds):
        while True:
            taken = {side: await measure(side) for side in random.sample([*cell.blocks], len(cell.blocks))}
            if not (extra and any(block.busy for block in taken.values())):
                break
            extra -= 1
            note("  other programs are running; the round is repeated")
        for side, block in taken.items():
            cell.blocks[side].append(block)
    return cell


async def tight_loop(conversations: int, seconds: float) -> float:
    """Return the processor time of a turn on the in-memory driver in microseconds: our own code."""
    backend = Backend(MemoryDriver())
    async with backend:
        directory = Directory(backend.driver, Codec())
        talks = [
            Talk(backend.driver, directory, f"{number}", "off", DIALOGUE) for number in range(conversations)
        ]
        await run_block(talks, seconds / 4, Meter(watches=False))
        blocks = [await run_block(talks, seconds, Meter(watches=False)) for _ in range(3)]
        return min(1e6 * block.client / block.turns for block in blocks)


def sample(*, summarized: bool = False) -> tuple[bytes, bytes]:
    """Return the bytes of a conversation in the middle of a dialogue, and those of a turn."""
    entries = [
        Codec().seal_turn(StoredTurn("0123456789abcdef01234567", turn(number)))
        for number in range(DIALOGUE // 2)
    ]
    return b"".join([SUMMARY.encode() if summarized else b"", *entries]), entries[-1]


def batched(some: Iterable[T], size: int) -> Iterable[list[T]]:
    """Yield slices of so many."""
    iterator = iter(some)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def note(text: str) -> None:
    """Show progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
