"""What a product shows, and not a model: a page of the history, the newest items, a sidebar; beside ours.

Where no call of a library returns only that, the whole conversation is read.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers import ours
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.conversation import NEWEST, SHOWN, Conversation, Opened
from benchmarks.peers.figures import HISTORY, ITEMS, SIDEBAR, Shown
from benchmarks.peers.measure import Growing, reporting, say
from benchmarks.peers.places import Place

_STORED_AT_ONCE = 8


@dataclass(frozen=True)
class Plan:
    """One conversation has so many turns, and one user so many conversations."""

    turns: int = 2_000
    conversations: int = 1_000
    rounds: int = 20
    grow_s: float = 120.0


FULL = Plan()
QUICK = Plan(turns=200, conversations=60, rounds=3)

Texts = Sequence[tuple[str, str]]

_ASKED: Mapping[str, tuple[int, Callable[[Conversation, Plan], Awaitable[Sequence[object]]]]] = {
    HISTORY: (SHOWN, lambda one, plan: one.history(plan.turns // 2)),
    ITEMS: (NEWEST, lambda one, _: one.newest()),
    SIDEBAR: (SHOWN, lambda one, _: one.sidebar()),
}
"""How many there should be, and what is asked."""


async def measure(peer: Peer, place: Place, plan: Plan, texts: Texts) -> None:
    """Measure and report what a library shows of a long conversation, and of many.

    Other handles than those that are measured have stored it.
    """
    both: tuple[tuple[Opened, Place], ...] = ((peer.opened(), place), (ours.shown, place.beside))
    for whats, store in (((HISTORY, ITEMS), _store_one), ((SIDEBAR,), _store_many)):
        with reporting(", ".join(whats)):
            if (peer.keeps_all and not peer.is_ours) or not await _can(peer, place, whats):
                for what in whats:
                    say("shown", asdict(Shown(what)))
                continue
            for opened, where in both:
                async with opened(where) as conversations:
                    await store(conversations, plan, texts)
            async with both[0][0](place) as theirs, ours.shown(place.beside) as beside:
                for what in whats:
                    say("shown", asdict(await timed(what, plan, theirs("long"), beside("long"))))


async def _can(peer: Peer, place: Place, whats: Sequence[str]) -> bool:
    """Say whether a library lists conversations, if that is asked. It needs no turn to tell."""
    if SIDEBAR not in whats:
        return True
    async with peer.opened()(place) as conversations:
        return type(conversations("long")).sidebar is not Conversation.sidebar


async def _store_one(conversations: Callable[[str], Conversation], plan: Plan, texts: Texts) -> None:
    long = Growing(conversations("long"), texts)
    await long.grow(plan.turns, plan.grow_s)


async def _store_many(conversations: Callable[[str], Conversation], plan: Plan, texts: Texts) -> None:
    numbers = range(plan.conversations)
    for first in numbers[::_STORED_AT_ONCE]:
        some = numbers[first : first + _STORED_AT_ONCE]
        await asyncio.gather(*(conversations(f"one of {n}").store(*texts[n % len(texts)]) for n in some))


async def timed(what: str, plan: Plan, theirs: Conversation, beside: Conversation) -> Shown:
    """Ask both, one after the other, in random order. Without rounds, there are no times."""
    count, asked = _ASKED[what]
    result = Shown(what)
    try:
        found = await asked(theirs, plan)
        if len(found) != count:
            raise LookupError(f"{what}: {len(found)} were returned, and not {count}")
    except NotImplementedError:
        result.whole = True
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "theirs": theirs.whole if result.whole else lambda: asked(theirs, plan),
        "ours": lambda: asked(beside, plan),
    }
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(plan.rounds):
        for side in random.sample([*calls], 2):
            start = time.perf_counter()
            await calls[side]()
            times[side].append(1e3 * (time.perf_counter() - start))
    if plan.rounds:
        result.ms, result.ours_ms = (statistics.median(times[side]) for side in calls)
    return result
