"""What both sides are measured with, whichever the framework: calls that alternate, and what is reported."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from benchmarks.peers.figures import Counted, Pair, Side
from benchmarks.peers.measure import dialogues, say

Call: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Plan:
    """How much is measured. `rounds` are the timed calls of each side.

    `short`, `long` and `longest` are lengths in messages, entries or events, `thread` one in messages of a
    graph, and a list has so many `sessions` of so many `events`. Each of four processes makes `writes`, and
    half as many runs of a graph. `races` are those of four who save at once, and `cancelled` are calls.
    """

    rounds: int = 20
    short: int = 20
    long: int = 500
    longest: int = 4_000
    thread: int = 500
    sessions: int = 50
    events: int = 20
    writes: int = 40
    races: int = 25
    cancelled: int = 64


FULL = Plan()
QUICK = Plan(
    rounds=3, short=4, long=24, longest=100, thread=12, sessions=4, events=2, writes=4, races=2, cancelled=6
)


_DIALOGUES = Path(__file__).parents[3] / "examples" / "conversations.jsonl"


@functools.cache
def turn_of(number: int) -> tuple[str, str]:
    """Return a question and its answer, always the same ones of a number; no two are the same.

    The words come from the dialogues, at random: what is said again and again would be compressed too well.
    """
    chosen = random.Random(number)
    question, answer = (" ".join(chosen.sample(_words(), 9)) for _ in range(2))
    return f"{number}: {question}", f"{number}: {answer}"


@functools.cache
def _words() -> list[str]:
    turns = dialogues(str(_DIALOGUES))
    return sorted({word for turn in turns for text in turn for word in text.split()})


def report(what: str, unit: str, theirs: Side, ours: Side) -> None:
    """Report what was measured of both."""
    say("pair", asdict(Pair(what, unit, theirs, ours)))


async def alternating(rounds: int, theirs: Call, ours: Call) -> tuple[float, float]:
    """Return the medians of both in ms. They are called one after the other, in random order.

    Both are called once before that, which opens connections.
    """
    calls, times = (theirs, ours), (list[float](), list[float]())
    for call in calls:
        await call()
    for _ in range(rounds):
        for side in random.sample((0, 1), 2):
            start = time.perf_counter()
            await calls[side]()
            times[side].append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


async def time_both(what: str, plan: Plan, theirs: Call, ours: Call) -> None:
    """Time the same call of both, and report it."""
    report(what, "ms", *map(Side, await alternating(plan.rounds, theirs, ours)))


def lost_in(counted: Counted) -> Side:
    """Return how many were lost or doubled, of those that were acknowledged."""
    return Side(counted.lost + counted.doubled, counted.acknowledged, right=0, errors=counted.errors)
