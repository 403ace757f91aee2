"""Work on conversations that waits for a place: its tasks, what it retains, and who comes next."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Unavailable
from stm_backends.memory.queues import FairQueue
from stm_backends.memory.schedule import MAX_SUMMARIES, STEPS
from stm_backends.memory.shared import backgrounds, recent
from stm_backends.testing.memory_contract import config, until
from stm_backends.types import MemoryKey, StoredTurn
from tests.mutants.closing import BeginsWhileOthersClose
from tests.support import clock
from tests.support.default_memory import added


class Visit:
    """Work that takes a place until it is told to go."""

    def __init__(self, order: list[str], tenant: str, go: asyncio.Event) -> None:
        self.tenant = tenant
        self.dropped = False
        self._order = order
        self._go = go

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._stay())
        return self.task

    async def _stay(self) -> None:
        self._order.append(self.tenant)
        await self._go.wait()

    def cancel_plan(self) -> None:
        self.dropped = True


def enter(queue: FairQueue, order: list[str], tenants: str, go: asyncio.Event) -> list[Visit]:
    """Let work of each of these tenants enter a queue."""
    visits = [Visit(order, tenant, go) for tenant in tenants]
    for visit in visits:
        queue.enter(visit)
    return visits


async def test_a_tenant_whose_calls_hang_leaves_a_quarter_of_the_places() -> None:
    queue, order, hang, go = FairQueue(8), list[str](), asyncio.Event(), asyncio.Event()
    enter(queue, order, "b" * 20, hang)
    await asyncio.sleep(0.01)
    assert order == ["b"] * 6
    enter(queue, order, "ggo", go)
    await asyncio.sleep(0.01)
    assert order[6:] == ["g", "o"]
    go.set()
    await asyncio.sleep(0.01)
    assert order[6:] == ["g", "o", "g"]
    hang.set()
    await until(lambda: order.count("b") == 20, "all were served")
    assert len(queue) == 0


async def test_tenants_are_served_round_robin_and_what_left_is_skipped() -> None:
    queue, order, go = FairQueue(1), list[str](), asyncio.Event()
    visits = enter(queue, order, "aaabbc", go)
    queue.enter(visits[1])
    assert len(queue) == 5
    queue.withdraw(visits[3])
    queue.withdraw(visits[3])
    assert visits[3] not in queue
    go.set()
    await until(lambda: not len(queue), "all were served")
    await visits[2].task
    assert order == ["a", "a", "b", "c", "a"]


async def test_a_place_of_a_task_that_was_cancelled_before_it_began_is_free() -> None:
    queue, order, go = FairQueue(1), list[str](), asyncio.Event()
    first, _ = enter(queue, order, "ab", go)
    first.task.cancel()
    await until(lambda: order == ["b"], "the next one has the place")


async def test_a_place_is_taken_without_waiting_only_if_none_waits_for_it() -> None:
    queue, order, go = FairQueue(2), list[str](), asyncio.Event()

    async def takes(tenant: str) -> bool:
        return queue.take(tenant)

    enter(queue, order, "a", go)
    assert await asyncio.create_task(takes("b"))
    await asyncio.sleep(0)
    visits = enter(queue, order, "aa", go)
    assert not await asyncio.create_task(takes("b"))
    queue.withdraw(visits[1])
    go.set()
    await until(lambda: queue.take("b"), "the places are free again")


async def test_beyond_the_limit_the_largest_tenant_gives_up_its_newest_work() -> None:
    queue, go = FairQueue(1, most=3), asyncio.Event()
    visits = enter(queue, [], "xaaab", go)
    assert [visit.dropped for visit in visits] == [False, False, False, True, False]


def test_a_loop_that_ends_is_given_no_other_task() -> None:
    queue, order = FairQueue(1), list[str]()

    async def main() -> None:
        enter(queue, order, "ab", asyncio.Event())
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert order == ["a"]


def test_places_of_an_event_loop_that_was_closed_are_free_again() -> None:
    queue, order = FairQueue(1), list[str]()
    loop = asyncio.new_event_loop()

    async def leave() -> list[Visit]:
        visits = enter(queue, order, "aa", asyncio.Event())
        await asyncio.sleep(0.01)
        return visits

    left = loop.run_until_complete(leave())
    loop.close()

    async def main() -> None:
        enter(queue, order, "b", asyncio.Event())
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert order == ["a", "b"]
    # It cannot be cancelled on a loop that is closed, and need not be reported as lost.
    left[0].task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001 -- no setting


# Conversations that wait

MOST_TASKS = 1 + STEPS + 2 * MAX_SUMMARIES
"""The test's own; a call of the summarizer has a task beside that of its step."""


class Model:
    """A summarizer that is slow, or fails, until it is let go."""

    def __init__(self, *, fails: bool = False) -> None:
        self.go = asyncio.Event()
        self.fails = fails
        self.calls = 0

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("the model is down")
        await self.go.wait()
        return {"summary": request["turns"][-1]["user"]}


def conversation(number: int) -> MemoryKey:
    return MemoryKey(f"tenant {number % 20}", "u", str(number))


async def test_conversations_that_wait_for_a_slow_model_have_no_task() -> None:
    async with Backend(MemoryDriver(), close_timeout_s=0) as backend:
        model = Model()
        for number in range(500):
            await added(backend.memory(conversation(number), config(zone=1), summarizer=model), *range(3))
            assert len(asyncio.all_tasks()) <= MOST_TASKS
        await until(lambda: model.calls == MAX_SUMMARIES, "the places are taken")
        await until(lambda: len(asyncio.all_tasks()) == 1 + 2 * MAX_SUMMARIES, "all others wait")
        model.go.set()
        await until(lambda: not len(backend._backgrounds), "all are summarized")  # noqa: SLF001
        for number in range(500):
            view = await backend.memory(
                conversation(number), config(zone=1), summarizer=model
            ).get_llm_context()
            assert view["conversation_memory"]["summary"] == "u1"


async def test_a_place_that_becomes_free_while_a_backend_closes_is_not_taken() -> None:
    model = Model()
    async with Backend(MemoryDriver(), max_summaries=1, close_timeout_s=30) as backend:
        working, waiting = (
            backend.memory(conversation(number), config(zone=1), summarizer=model) for number in range(2)
        )
        await added(working, *range(3))
        await until(lambda: model.calls == 1, "the place is taken")
        await added(waiting, *range(3))
        flushing = asyncio.create_task(waiting.flush(timeout=300))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(backend.close())
        await until(flushing.done, "what waits is told")
        model.go.set()
        await closing
        assert model.calls == 1
        await backend.open()
        await waiting.flush()
        assert model.calls == 2, "a backend that was opened again goes on"


def test_a_background_that_begins_while_others_close_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backgrounds, "Maintenance", BeginsWhileOthersClose)
    # In virtual time, because what a mutant leaves is waited for.
    with pytest.raises(AssertionError, match="what waits is told"):
        clock.run(test_a_place_that_becomes_free_while_a_backend_closes_is_not_taken())
    monkeypatch.undo()
    clock.run(test_a_place_that_becomes_free_while_a_backend_closes_is_not_taken())


async def test_closing_drops_what_waits_and_makes_no_further_call() -> None:
    model = Model()
    backend = Backend(MemoryDriver(), close_timeout_s=0.1)
    await backend.open()
    kept = backend.memory(conversation(50), config(zone=1), summarizer=model)
    for number in range(51):
        await added(backend.memory(conversation(number), config(zone=1), summarizer=model), *range(3))
    await until(lambda: model.calls == MAX_SUMMARIES, "the places are taken")
    flushing = asyncio.create_task(kept.flush(timeout=60))
    await asyncio.sleep(0.01)
    await backend.close()
    await asyncio.wait({flushing}, timeout=30)
    gc.collect()
    assert flushing.done()
    assert isinstance(flushing.exception(), Unavailable | None)
    assert (model.calls, len(asyncio.all_tasks())) == (MAX_SUMMARIES, 1)
    assert len(backend._backgrounds) == 1, "that of the memory object"  # noqa: SLF001


async def test_a_conversation_that_waited_is_summarized_in_its_own_context() -> None:
    whose: ContextVar[str] = ContextVar("whose")
    model, seen = Model(), dict[str, str]()

    async def summarizer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        seen[request["turns"][0]["user"]] = whose.get()
        return await model(request)

    async def talk(backend: Backend, number: int) -> None:
        whose.set(f"u{number}")
        memory = backend.memory(conversation(number), config(zone=1), summarizer=summarizer)
        await added(memory, number, "last")

    async with Backend(MemoryDriver(), max_summaries=1, close_timeout_s=0) as backend:
        for number in range(3):
            await asyncio.create_task(talk(backend, number))
        await until(lambda: model.calls == 1, "the place is taken")
        model.go.set()
        await until(lambda: len(seen) == 3, "each is summarized")
    assert seen == {f"u{number}": f"u{number}" for number in range(3)}


@pytest.mark.parametrize("turns_at_once", [40, 1])
async def test_a_conversation_that_waits_retains_no_turn(
    monkeypatch: pytest.MonkeyPatch, turns_at_once: int
) -> None:
    # Beside what is kept of the conversations that were used last.
    monkeypatch.setitem(recent.Recent.__init__.__kwdefaults__, "most", 4)
    async with Backend(MemoryDriver(), close_timeout_s=0) as backend:
        model, settings = Model(), config(zone=1, total_max_tokens=0)
        for begin in range(0, 40, turns_at_once):
            for number in range(100):
                memory = backend.memory(conversation(number), settings, summarizer=model)
                await added(memory, *range(begin, begin + turns_at_once))
        await until(lambda: model.calls == MAX_SUMMARIES, "the places are taken")
        await until(lambda: len(asyncio.all_tasks()) == 1 + 2 * MAX_SUMMARIES, "all others wait")
        assert len(backend._backgrounds) == 100  # noqa: SLF001
        gc.collect()
        retained = sum(isinstance(one, StoredTurn) for one in gc.get_objects())
        assert retained <= 40 * (4 + MAX_SUMMARIES)


class AtOnce(MemoryDriver):
    """Counts the loads that are under way, which take a second."""

    now = most = 0

    async def load(self, key: Key) -> Record | None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(1)
            return await super().load(key)
        finally:
            self.now -= 1


@clock.virtually
async def test_retries_that_are_due_at_once_wait_without_tasks() -> None:
    driver = AtOnce(clock=clock.now)
    async with Backend(driver, close_timeout_s=0) as backend:
        model = Model(fails=True)
        settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=1e4)
        for number in range(300):
            await added(backend.memory(conversation(number), settings, summarizer=model), *range(2))
        await until(lambda: model.calls == 300, "each is degraded", within=1000)
        await until(lambda: len(asyncio.all_tasks()) == 1, "nothing is done until then", within=1000)
        driver.most, model.fails = 0, False
        model.go.set()
        await asyncio.sleep(1e4)
        assert 0 < driver.most <= STEPS + 2 * MAX_SUMMARIES
        gc.collect()
        assert (model.calls, len(backend._backgrounds)) == (600, 0)  # noqa: SLF001
