"""What one process measures: one library on one datastore, beside ours.

It reports each figure as a line of JSON as soon as it has it, so that a later hang loses no earlier figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.peers import ours
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.conversation import Conversation
from benchmarks.peers.figures import AtLength, explained
from benchmarks.peers.figures import Together as TogetherFigures
from benchmarks.peers.places import TOGETHER, Place, stored_bytes
from benchmarks.peers.wire import Wire

SEEDED_AT_ONCE = 50

WINDOW = 10
"""Bytes and round trips are counted over so many turns, and divided by them."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. `rounds` are timed turns at each length, of at most `grow_s` of adding turns."""

    lengths: tuple[int, ...] = (10, 100, 1_000)
    rounds: int = 40
    grow_s: float = 30.0
    blocks: int = 3
    seconds: float = 0.7


def say(kind: str, value: Any) -> None:
    """Report one figure."""
    print(json.dumps({kind: value}), flush=True)


@contextlib.contextmanager
def reporting(what: str) -> Iterator[None]:
    """Report an exception as the reason why a figure is missing."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- whatever a library raises is what is reported
        say("problem", f"{what}: {explained(error)}")


class Growing:
    """A conversation that is made as long as needed, and then continued turn by turn."""

    def __init__(self, conversation: Conversation, texts: Sequence[tuple[str, str]]) -> None:
        self.conversation = conversation
        self.length = 0
        self._texts = texts

    def text(self) -> tuple[str, str]:
        """Return the next turn. No two questions are the same."""
        self.length += 1
        user, assistant = self._texts[self.length % len(self._texts)]
        return f"{self.length}: {user}", assistant

    async def grow(self, length: int, seconds: float) -> None:
        """Add turns until there are so many. An exception says after how many it was raised."""
        until = time.monotonic() + seconds
        while self.length < length:
            before = self.length
            turns = [self.text() for _ in range(min(SEEDED_AT_ONCE, length - before))]
            try:
                await self.conversation.seed(turns)
            except Exception as error:
                raise RuntimeError(f"after {before:,} turns: {explained(error)}") from error
            if time.monotonic() > until:
                raise TimeoutError(f"only {self.length:,} turns were added in {seconds:.0f} s")
        await self.conversation.settle()

    async def turn(self) -> None:
        """Add a turn, then read what the model is shown."""
        await self.conversation.store(*self.text())
        await self.conversation.read()

    async def timed(self) -> float:
        """Return how many ms a turn took."""
        start = time.perf_counter()
        await self.turn()
        taken = (time.perf_counter() - start) * 1e3
        await self.conversation.settle()
        return taken


def dialogues(path: str) -> list[tuple[str, str]]:
    """Return the turns of a file of conversations in the form of `stm-backends replay`."""
    with open(path, encoding="utf-8") as lines:  # noqa: PTH123
        conversations = map(json.loads, lines)
        return [(turn["user"], turn["assistant"]) for each in conversations for turn in each["turns"]]


async def measure(peer: Peer, place: Place, plan: Plan, texts: Sequence[tuple[str, str]]) -> None:
    """Measure and report everything but what takes several processes."""
    say("versions", {package: version_of(package) for package in peer.packages})
    async with ours.folding(place.beside) as our_conversations, peer.opened()(place) as conversations:
        with reporting("turns"):
            await _lengths(peer, place, plan, texts, conversations, our_conversations)
        with reporting(f"{TOGETHER} conversations at once"):
            theirs = [Growing(conversations(f"together {n}"), texts) for n in range(TOGETHER)]
            beside = [Growing(our_conversations(f"together {n}"), texts) for n in range(TOGETHER)]
            say("together", asdict(await together(plan, theirs, beside)))


def version_of(package: str) -> str:
    """Return the version of a package that is installed, or that it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


async def _lengths(
    peer: Peer,
    place: Place,
    plan: Plan,
    texts: Sequence[tuple[str, str]],
    conversations: Callable[[str], Conversation],
    our_conversations: Callable[[str], Conversation],
) -> None:
    wire = Wire(place.port)
    wire.start()
    try:
        through = replace(place, port=wire.port) if place.port else place
        async with peer.opened()(through) as counted_conversations:
            long = Growing(conversations("long"), texts)
            our_long = Growing(our_conversations("long"), texts)
            for length in plan.lengths:
                at = AtLength(length)
                await long.grow(length, plan.grow_s)
                await _count(at, place, wire, long, counted_conversations("long"))
                # Both handles have to know what the other one has added.
                await long.conversation.read()
                await our_long.grow(length, plan.grow_s)
                await _time(at, plan, long, our_long)
                say("length", asdict(at))
    finally:
        wire.stop()


async def _count(at: AtLength, place: Place, wire: Wire, long: Growing, through: Conversation) -> None:
    """Count a few turns by way of the proxy. The first one opens connections."""
    direct, long.conversation = long.conversation, through
    await through.read()
    await long.turn()
    await through.settle()
    stored = await asyncio.to_thread(stored_bytes, place)
    before = wire.counted
    for _ in range(WINDOW):
        await long.turn()
        await through.settle()
    counted = wire.counted - before
    if place.port:
        at.sent, at.received = counted.sent / WINDOW, counted.received / WINDOW
        at.round_trips = counted.round_trips / WINDOW
    at.stored = (await asyncio.to_thread(stored_bytes, place) - stored) / WINDOW
    long.conversation = direct


async def _time(at: AtLength, plan: Plan, theirs: Growing, beside: Growing) -> None:
    """Time turns of both conversations, one after the other, in random order."""
    times: dict[Growing, list[float]] = {theirs: [], beside: []}
    # Not more turns than change what is measured.
    rounds = min(plan.rounds, max(10, at.length // 4))
    for _ in range(rounds):
        for one in random.sample((theirs, beside), 2):
            times[one].append(await one.timed())
    at.ms, at.ours_ms = (statistics.median(times[one]) for one in (theirs, beside))
    at.p95_ms = statistics.quantiles(times[theirs], n=20)[-1]


async def together(plan: Plan, theirs: Sequence[Growing], beside: Sequence[Growing]) -> TogetherFigures:
    """Return the turns a second of all conversations at once, in blocks that alternate."""
    done = {"theirs": 0, "beside": 0}
    spent = {"theirs": 0.0, "beside": 0.0}

    async def talk(side: str, one: Growing, end: float) -> None:
        while time.monotonic() < end:
            await one.turn()
            done[side] += 1

    for conversations in (theirs, beside):
        await asyncio.gather(*(one.grow(10, plan.grow_s) for one in conversations))
    for _, (side, conversations) in itertools.product(
        range(plan.blocks), (("theirs", theirs), ("beside", beside))
    ):
        start = time.monotonic()
        await asyncio.gather(*(talk(side, one, start + plan.seconds) for one in conversations))
        spent[side] += time.monotonic() - start
        for one in conversations:
            await one.conversation.settle()
    return TogetherFigures(done["theirs"] / spent["theirs"], done["beside"] / spent["beside"])
