"""LangGraph: its checkpointers on SQLite and PostgreSQL, and ours, with its default durability."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.peers import losses
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, alternating, lost_in, report, turn_of
from benchmarks.peers.langgraph_savers import Thread, graph_of, postgres_saver, sqlite_saver
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place, stored_bytes
from stm_backends import open_backend
from stm_backends.integrations.langgraph import StmSaver

_OWN: dict[str, Callable[[Place], AbstractAsyncContextManager[Any]]] = {
    "sqlite": sqlite_saver,
    "postgres": postgres_saver,
}
_DURABILITY = "async"

Threads = Callable[[str], Thread]


async def measure(place: Place, plan: Plan) -> None:
    """Count bytes, time checkpoints, and lose turns in runs of one thread at once."""
    places = (place, place.beside)
    async with own(place) as theirs, ours(place.beside) as mine:
        with reporting("bytes"):
            sides = [await _stored(*each, plan.thread) for each in zip((theirs, mine), places, strict=True)]
            report(f"stored, after {plan.thread:,} messages", "bytes", *sides)
        for length in (plan.short, plan.thread):
            with reporting(f"checkpoints after {length:,} messages"):
                await _time(length, plan, theirs, mine)
    with reporting(f"{losses.PROCESSES} processes"):
        what = f"turns lost or doubled, of those that {losses.PROCESSES} processes stored in one thread"
        report(what, "count", await _lost(place, "own", plan), await _lost(place.beside, "ours", plan))
        what = "the same, where each run waits for its turn"
        report(what, "count", Side(), await _lost(place.beside, "ours_in_turn", plan))


@asynccontextmanager
async def own(place: Place) -> AsyncIterator[Threads]:
    """LangGraph's own checkpointer."""
    async with _OWN[place.datastore](place) as saver:
        graph = graph_of(saver)
        yield lambda name: Thread(graph, name, _DURABILITY)


@asynccontextmanager
async def ours(place: Place) -> AsyncIterator[Threads]:
    """`StmSaver`."""
    async with open_backend(place.backend_url, create=True) as backend:
        graph = graph_of(StmSaver(backend))
        yield lambda name: Thread(graph, name, _DURABILITY)


class _InTurn(Thread):
    """A thread whose runs wait for each other."""

    def __init__(self, graph: Any, name: str, saver: StmSaver) -> None:
        super().__init__(graph, name, _DURABILITY)
        self._turn = partial(saver.turn, name)

    async def exchange(self, user: str, assistant: str, thinking_s: float) -> None:
        async with self._turn():
            await super().exchange(user, assistant, thinking_s)


@asynccontextmanager
async def ours_in_turn(place: Place) -> AsyncIterator[Threads]:
    """`StmSaver`, whose runs take turns. Its threads are others than those of `ours`."""
    async with open_backend(place.backend_url, create=True) as backend:
        saver = StmSaver(backend)
        graph = graph_of(saver)
        yield lambda name: _InTurn(graph, f"{name}, in turn", saver)


async def _grow(thread: Thread, messages: int) -> None:
    for number in range(messages // 2):
        await thread.store(*turn_of(number))


async def _stored(threads: Threads, place: Place, messages: int) -> Side:
    """Return how many bytes a thread takes whose turns are runs of a graph, one after the other."""
    before = await asyncio.to_thread(stored_bytes, place)
    await _grow(threads(str(messages)), messages)
    return Side(await asyncio.to_thread(stored_bytes, place) - before)


async def _time(length: int, plan: Plan, theirs: Threads, mine: Threads) -> None:
    """Time runs, and divide by the checkpoints that they store."""
    both = (theirs(str(length)), mine(str(length)))
    if length != plan.thread:
        for thread in both:
            await _grow(thread, length)
    before = [await thread.step() for thread in both]
    runs = await alternating(plan.rounds, *(partial(thread.store, *turn_of(length)) for thread in both))
    stored = [await thread.step() - step for thread, step in zip(both, before, strict=True)]
    # One run more than those that are timed.
    sides = [Side(ms * (plan.rounds + 1) / count) for ms, count in zip(runs, stored, strict=True)]
    report(f"store a checkpoint, after {length:,} messages", "ms", *sides)


async def _lost(place: Place, opened: str, plan: Plan) -> Side:
    peer = replace(PEERS["langgraph-sqlite"], open=f"{__name__}:{opened}")
    return lost_in(await losses.with_processes(peer, place, plan.writes // 2))
