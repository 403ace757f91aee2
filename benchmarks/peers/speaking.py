"""Messages: a question is stored, the model is shown what was said, and its answer is stored; beside ours.

The answer is the call of a tool, its result, and a text: an exchange has four messages.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from benchmarks.peers import losses, ours, showing
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.conversation import Conversation, Message, exchange_of
from benchmarks.peers.figures import HISTORY, AtLength, Shown
from benchmarks.peers.measure import SEEDED_AT_ONCE, reporting, say, version_of
from benchmarks.peers.places import Place, stored_bytes
from benchmarks.peers.wire import Wire

EXCHANGE = 4
"""Messages of an exchange."""

LONG = 100
"""A conversation of fewer messages is measured once, because an exchange changes what is measured."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. `rounds` are timed exchanges at each length, none without times.

    `counted` are those of which bytes are counted, and `pages` the timed pages of history.
    """

    lengths: tuple[int, ...] = (12, 1_000)
    rounds: int = 40
    counted: int = 10
    pages: int = 20
    grow_s: float = 40.0


FULL = Plan()
QUICK = Plan(lengths=(12, 100), rounds=3, counted=2, pages=2)

Dialogues = Sequence[tuple[str, str, Mapping[str, Any]]]


def dialogues(path: str) -> Dialogues:
    """Return the turns of a file in which one tool was called: question, answer and tool."""
    with open(path, encoding="utf-8") as lines:  # noqa: PTH123
        turns = [turn for each in map(json.loads, lines) for turn in each["turns"]]
    return [(turn["user"], turn["assistant"], *turn["tools"]) for turn in turns if len(turn["tools"]) == 1]


def exchanges(said: Dialogues) -> Iterator[list[Message]]:
    """Yield exchanges of the dialogues without end. No two questions are the same."""
    for number in count(1):
        question, answer, tool = said[number % len(said)]
        yield exchange_of(f"{number}: {question}", answer, tool)


class Speaking:
    """A conversation that is made as long as needed, and then continued."""

    def __init__(self, conversation: Conversation, said: Dialogues) -> None:
        self.conversation = conversation
        self.messages = 0
        self._next = exchanges(said)

    async def grow(self, messages: int, seconds: float) -> None:
        """Add exchanges until there are so many messages."""
        until = time.monotonic() + seconds
        while self.messages < messages:
            times = min(SEEDED_AT_ONCE, (messages - self.messages) // EXCHANGE)
            await self.conversation.seed_messages([next(self._next) for _ in range(times)])
            self.messages += times * EXCHANGE
            if self.messages < messages and time.monotonic() > until:
                raise TimeoutError(f"only {self.messages:,} messages were added in {seconds:.0f} s")
        await self.conversation.settle()

    async def exchange(self, through: Conversation | None = None) -> tuple[float, Sequence[object]]:
        """Continue by one exchange, also through another handle; return its ms, and what was shown."""
        messages, conversation = next(self._next), through or self.conversation
        start = time.perf_counter()
        shown = await conversation.speak(messages)
        taken = (time.perf_counter() - start) * 1e3
        await conversation.settle()
        self.messages += EXCHANGE
        return taken, shown


Opening = Callable[[str], Conversation]


async def measure(peer: Peer, place: Place, plan: Plan, said: Dialogues, writes: int) -> None:
    """Measure and report everything of one library."""
    say("versions", {package: version_of(package) for package in peer.packages})
    wire = Wire(place.port)
    wire.start()
    try:
        through = replace(place, port=wire.port) if place.port else place
        async with (
            ours.messages(place.beside) as beside,
            peer.opened()(place) as theirs,
            peer.opened()(through) as counted,
        ):
            for length in plan.lengths:
                with reporting(f"{length:,} messages"):
                    one = _At(length, plan, said, theirs, beside)
                    await one.count(counted, wire, place)
                    await one.time()
                    say("length", asdict(one.at))
            with reporting("a page of history"):
                say("shown", asdict(await _history(plan, theirs, beside)))
    finally:
        wire.stop()
    with reporting(f"{losses.PROCESSES} processes"):
        lost = await losses.with_processes(peer, place, writes // losses.PROCESSES, speaking=True)
        say("processes", asdict(lost))


class _At:
    """What is measured in conversations of one length."""

    def __init__(self, length: int, plan: Plan, said: Dialogues, theirs: Opening, beside: Opening) -> None:
        self.at = AtLength(length)
        self._plan, self._said, self._opened = plan, said, (theirs, beside)
        self._grown: dict[str, tuple[Speaking, Speaking]] = {}

    async def _pair(self, which: str) -> tuple[str, tuple[Speaking, Speaking]]:
        """Return a conversation of this length and its name: one for each purpose, or a long one for all."""
        name = _name(self.at.length, which)
        if name not in self._grown:
            theirs, beside = (Speaking(opened(name), self._said) for opened in self._opened)
            for one in (theirs, beside):
                await one.grow(self.at.length, self._plan.grow_s)
            self._grown[name] = theirs, beside
        return name, self._grown[name]

    async def count(self, counted: Opening, wire: Wire, place: Place) -> None:
        """Count exchanges by way of the proxy."""
        at, times = self.at, self._plan.counted
        handles: dict[str, Conversation] = {}
        pairs = [await self._pair(f"counted {n}") for n in range(times)]
        for name, _ in pairs:
            handles[name] = handles.get(name) or counted(name)
            # It opens connections.
            await handles[name].read()
        stored = await asyncio.to_thread(stored_bytes, place)
        before = wire.counted
        for name, (theirs, _) in pairs:
            _, shown = await theirs.exchange(handles[name])
            at.shown = at.shown or len(shown)
        passed = wire.counted - before
        if place.port:
            at.sent, at.received = passed.sent / times, passed.received / times
            at.round_trips = passed.round_trips / times
        at.stored = (await asyncio.to_thread(stored_bytes, place) - stored) / times

    async def time(self) -> None:
        """Time exchanges of both conversations, one after the other, in random order."""
        at, rounds = self.at, self._plan.rounds
        if not rounds:
            return
        times: tuple[list[float], list[float]] = [], []
        pairs = [(await self._pair(f"timed {n}"))[1] for n in range(rounds)]
        for pair in pairs:
            for side in random.sample((0, 1), 2):
                times[side].append((await pair[side].exchange())[0])
        at.ms, at.ours_ms = map(statistics.median, times)
        at.p95_ms = statistics.quantiles(times[0], n=20)[-1]


def _name(length: int, which: str) -> str:
    return f"{length} messages" if length >= LONG else f"{length} messages {which}"


async def _history(plan: Plan, theirs: Opening, beside: Opening) -> Shown:
    """Time a page from the middle of the longest conversation, read by handles that have stored nothing."""
    name, rounds = _name(plan.lengths[-1], ""), plan.pages
    asked = showing.Plan(turns=plan.lengths[-1], rounds=rounds)
    return await showing.timed(HISTORY, asked, theirs(name), beside(name))
