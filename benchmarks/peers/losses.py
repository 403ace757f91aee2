"""How many turns are lost or doubled where several tasks or processes add to one conversation."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from benchmarks.peers.catalogue import Peer
from benchmarks.peers.conversation import Conversation, Opened, call_id, exchange_of
from benchmarks.peers.figures import Counted
from benchmarks.peers.places import Place

TASKS = 8
PROCESSES = 4
THINKING_S = 0.002
"""What stands in for the model's call, between reading and storing."""

_READY_S = 60.0


async def add(
    conversation: Conversation, who: str, turns: int, *, speaking: bool = False
) -> tuple[list[str], dict[str, int]]:
    """Add turns; return the questions that were acknowledged, and the classes of the errors.

    `speaking` adds messages with the call of a tool. A question is acknowledged when its answer is.
    """
    acknowledged: list[str] = []
    errors = Counter[str]()
    for number in range(turns):
        question = f"{who}, {number}: please move the table for two to noon."
        try:
            if speaking:
                await conversation.speak(exchange_of(question, _answer(question)), THINKING_S)
            else:
                await conversation.exchange(question, "Done: Sino, 12:00.", THINKING_S)
            acknowledged.append(question)
        except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
            errors[type(error).__name__] += 1
    return acknowledged, dict(errors)


def count(acknowledged: Iterable[str], found: Iterable[str], errors: Iterable[dict[str, int]]) -> Counted:
    """Compare what was acknowledged with what was read back."""
    often = Counter(found)
    all_acknowledged = list(acknowledged)
    raised = Counter[str]()
    for each in errors:
        raised.update(each)
    return Counted(
        acknowledged=len(all_acknowledged),
        lost=sum(question not in often for question in all_acknowledged),
        doubled=sum(times - 1 for times in often.values()),
        errors=dict(raised),
    )


def _answer(question: str) -> str:
    return f"Done: {question}"


def spoken(said: Iterable[str]) -> list[str]:
    """Return the questions that are stored with all of their answers, as often as any message of these is."""
    often = Counter(said)
    found: list[str] = []
    for text in often:
        # The call of a tool and its result have its id.
        times = (often[text], often[_answer(text)], often[call_id(text)] / 2)
        found += [text] * math.ceil(max(times)) if min(times) >= 1 else []
    return found


async def with_tasks(opened: Opened, place: Place, turns: int) -> Counted:
    """Add turns to one conversation in several tasks, each with a handle of its own."""
    async with opened(place) as conversations:
        await conversations("of tasks").exchange("first", "ok", 0)
        each = [conversations("of tasks") for _ in range(TASKS)]
        said = await asyncio.gather(*(add(one, f"task {number}", turns) for number, one in enumerate(each)))
        return _counted(await conversations("of tasks").questions(), said)


async def with_processes(peer: Peer, place: Place, turns: int, *, speaking: bool = False) -> Counted:
    """Add turns, or messages, to one conversation in several processes."""
    opened = peer.opened(keeping_all=True)
    async with opened(place) as conversations:
        # Nobody has to create a table while others write.
        first = conversations("of processes")
        await (first.speak(exchange_of("first", "ok")) if speaking else first.exchange("first", "ok", 0))
    work = partial(_write, peer, place, turns, speaking)
    said = await asyncio.to_thread(in_processes, work, peer.module)
    async with opened(place) as conversations:
        conversation = conversations("of processes")
        found = spoken(await conversation.said()) if speaking else await conversation.questions()
        return _counted(found, said)


def _counted(stored: Iterable[str], said: Iterable[tuple[list[str], dict[str, int]]]) -> Counted:
    every = list(said)
    found = [question for question in stored if question != "first"]
    acknowledged = (question for questions, _ in every for question in questions)
    return count(acknowledged, found, (errors for _, errors in every))


Ready = Callable[[], Awaitable[object]]
"""What a process awaits before it begins: that all others have come as far."""


def in_processes(work: Callable[[int, Ready], Coroutine[Any, Any, object]], module: str) -> list[Any]:
    """Return what several processes did, each with a number of its own, in no order; a text is no result.

    `work` has to be a function of a module, or a `partial` of one. `module` is imported before they begin.
    """
    # They are forked from a process that has imported the library and has no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.peers.losses", module])
    barrier = context.Barrier(PROCESSES)
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(work, number, barrier, results)) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    said = [results.get() for _ in processes]
    for process in processes:
        process.join()
    if failed := [one for one in said if isinstance(one, str)]:
        raise RuntimeError(failed[0])
    return said


def _process(
    work: Callable[[int, Ready], Coroutine[Any, Any, object]], number: int, barrier: Any, results: Any
) -> None:
    try:
        results.put(asyncio.run(work(number, lambda: asyncio.to_thread(barrier.wait, _READY_S))))
    except BaseException as error:  # noqa: BLE001 -- the others wait for an answer
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")


async def _write(
    peer: Peer, place: Place, turns: int, speaking: bool, number: int, ready: Ready
) -> tuple[list[str], dict[str, int]]:
    async with peer.opened(keeping_all=True)(place) as conversations:
        conversation = conversations("of processes")
        await conversation.read()
        await ready()
        return await add(conversation, f"process {number}", turns, speaking=speaking)
