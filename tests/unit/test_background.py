"""One background for each conversation: many objects, several pods, and a model that fails for a while.

Time is virtual wherever it matters, so seconds below cost none.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import KEEP, Key, Record, new_version
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import OutcomeUnknown, TooLarge, Unavailable
from stm_backends.memory.schedule import Timers
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.folds import Writes
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records import keys
from stm_backends.records.body import Body, Lease, Overdue
from stm_backends.records.codec import Codec
from stm_backends.records.large.pointers import POINTER
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey
from tests.support import clock, leases
from tests.support.default_memory import added

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)


class Model:
    """A summarizer that is down until some time, and takes its time."""

    def __init__(self, *, down: float, fails_in: float = 0.3, works_in: float = 1.0) -> None:
        self.back = clock.now() + down
        self.fails_in = fails_in
        self.works_in = works_in
        self.calls: list[float] = []
        self.first: float | None = None

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append(clock.now())
        if clock.now() < self.back:
            await asyncio.sleep(self.fails_in)
            raise RuntimeError("the model is down")
        await asyncio.sleep(self.works_in)
        self.first = self.first or clock.now()
        users = " ".join(item["user"] for item in request["turns"])
        return {"summary": f"{request['previous_summary']} {users}".strip()}


@asynccontextmanager
async def opened(count: int, **limits: int) -> AsyncIterator[list[Backend]]:
    """Open several backends on one store, as processes do, in virtual time."""
    store = MemoryStore()
    pods = [Backend(MemoryDriver(store, clock=clock.now, **limits), close_timeout_s=0) for _ in range(count)]
    for pod in pods:
        # Their clocks are virtual too.
        pod._backgrounds = Backgrounds(pod.driver, Codec(), clock=clock.now)  # noqa: SLF001 -- no setting
        await pod.open()
    try:
        yield pods
    finally:
        for pod in pods:
            await pod.close()


async def nothing(_: Key | str) -> None:
    """A hook for an operation that nothing happens before."""


class LateLoads(MemoryDriver):
    """Holds back the answer to a load, once it is asked to, until it is told to give it."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.hold: asyncio.Event | None = None
        self.held = asyncio.Event()

    async def load(self, key: Key) -> Record | None:
        found, hold, self.hold = await super().load(key), self.hold, None
        if hold is not None:
            self.held.set()
            await hold.wait()
        return found


async def test_a_flush_goes_on_when_the_memory_recovers_during_its_load() -> None:
    driver, works, answers = LateLoads(MemoryStore()), False, asyncio.Semaphore(0)
    summarize = LedgerSummarizer()

    async def summarizer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not works:
            raise RuntimeError("the model is down")
        await answers.acquire()
        return await summarize(request)

    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=0.1, fold_max_turns=2)
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, settings, summarizer=summarizer)
        await added(memory, *range(6))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the memory is degraded")
        works = True
        await until(lambda: memory.health is MemoryHealth.RECOVERING, "an attempt is under way")
        answer = driver.hold = asyncio.Event()
        flushing = asyncio.create_task(memory.flush(timeout=10))
        await driver.held.wait()
        answers.release()
        await until(lambda: memory.stats.summaries > 0, "the first summary is stored")
        answer.set()
        done, _ = await asyncio.wait({flushing}, timeout=0.1)
        assert not done, "turns are pending, and the memory is healthy"
        for _ in range(4):
            answers.release()
        await flushing
        assert len(await memory.turns()) == 1


# A flush of a memory that is degraded

IN_AN_HOUR: dict[str, Any] = {"zone": 1, "retry_attempts": 0, "degraded_retry_interval_s": 3600.0}


async def left_degraded(backend: Backend, model: Model, **settings: Any) -> None:
    """Leave a degraded conversation of three turns, as a process does that ends."""
    memory = backend.memory(KEY, config(**IN_AN_HOUR | settings), summarizer=model)
    await added(memory, *range(3))
    await until(lambda: memory.health is MemoryHealth.DEGRADED)
    await memory.close()


@clock.virtually
async def test_a_flush_of_a_degraded_memory_makes_the_attempt_that_is_due() -> None:
    async with opened(2) as (dead, alive):
        await left_degraded(dead, Model(down=1e9))
        await asyncio.sleep(3601)
        memory = alive.memory(KEY, config(**IN_AN_HOUR), summarizer=Model(down=0))
        await memory.flush()
        assert (await memory.get_llm_context())["conversation_memory"]["summary"] == "u0 u1"


@clock.virtually
async def test_a_flush_of_a_degraded_memory_waits_for_no_later_attempt() -> None:
    async with opened(2) as (dead, alive):
        await left_degraded(dead, Model(down=1e9))
        memory = alive.memory(KEY, config(**IN_AN_HOUR), summarizer=(model := Model(down=0)))
        began = clock.now()
        await memory.flush(timeout=1e6)
        assert (clock.now() - began, model.calls) == (0.0, [])


@clock.virtually
async def test_a_flush_makes_one_attempt_while_the_model_is_down() -> None:
    async with opened(1) as (backend,):
        model = Model(down=1e9)
        await left_degraded(backend, model, degraded_retry_interval_s=0.0)
        await asyncio.sleep(1)

        async def slow(_: Key | str) -> None:
            # Whenever the memory is loaded, another attempt is due.
            await asyncio.sleep(1)

        spy = SpyDriver(backend.driver)
        spy.after["load"] = [slow] * 100
        memory = DistributedShortTermMemory(
            spy, KEY, config(**IN_AN_HOUR | {"degraded_retry_interval_s": 0.0}), summarizer=model
        )
        made = len(model.calls)
        began = clock.now()
        await memory.flush(timeout=1e6)
        assert clock.now() - began < 5
        assert len(model.calls) == made + 1
        await memory.close()


@clock.virtually
async def test_a_flush_waits_for_the_attempt_of_another_pod_and_makes_none() -> None:
    async with opened(2) as (here, there):
        await left_degraded(here, Model(down=1e9))
        await asyncio.sleep(3601)
        ours = here.memory(KEY, config(**IN_AN_HOUR), summarizer=Model(down=0, works_in=20.0))
        memory = there.memory(KEY, config(**IN_AN_HOUR), summarizer=(idle := Model(down=0)))
        await ours.get_llm_context()
        await asyncio.sleep(1)
        assert ours.health is MemoryHealth.RECOVERING
        await memory.flush()
        assert (await memory.get_llm_context())["conversation_memory"]["summary"] == "u0 u1"
        assert idle.calls == []


@clock.virtually
async def test_a_flush_ends_with_the_attempt_of_another_pod_that_fails() -> None:
    async with opened(2) as (here, there):
        await left_degraded(here, Model(down=1e9))
        await asyncio.sleep(3601)
        ours = here.memory(KEY, config(**IN_AN_HOUR), summarizer=Model(down=1e9, fails_in=20.0))
        memory = there.memory(KEY, config(**IN_AN_HOUR), summarizer=(idle := Model(down=0)))
        await ours.get_llm_context()
        await asyncio.sleep(1)
        began = clock.now()
        await memory.flush(timeout=1e6)
        assert 19 <= clock.now() - began < 30
        assert (memory.health, idle.calls) == (MemoryHealth.DEGRADED, [])


@clock.virtually
async def test_a_flush_makes_the_attempt_that_a_dead_pod_had_begun() -> None:
    async with opened(2) as (dead, alive):
        await left_degraded(dead, Model(down=1e9))
        await asyncio.sleep(3601)
        await leases.take(dead.driver, RECORD, at=clock.now(), ttl=60.0)
        memory = alive.memory(KEY, config(**IN_AN_HOUR), summarizer=Model(down=0))
        began = clock.now()
        await memory.flush(timeout=1e6)
        assert (await memory.get_llm_context())["conversation_memory"]["summary"] == "u0 u1"
        assert clock.now() - began < 70


# A model that fails for a while


@pytest.mark.parametrize("pods", [1, 2])
@clock.virtually
async def test_a_busy_conversation_recovers_and_loses_nothing_afterwards(pods: int) -> None:
    model = Model(down=4)
    settings = config(
        zone=2,
        retry_attempts=0,
        degraded_retry_interval_s=0.5,
        recovery_backlog_limit=5,
        total_max_tokens=0,
        summary_max_tokens=10_000,
    )
    async with opened(pods) as backends:
        memories = [backend.memory(KEY, settings, summarizer=model) for backend in backends]
        dropped: int | None = None
        for number in range(90):
            await memories[number % pods].add_turn(turn(number))
            await asyncio.sleep(0.2)
            if dropped is None and model.first is not None:
                dropped = sum(memory.stats.dropped for memory in memories)
        assert model.first is not None
        assert model.first - model.back < 5
        assert sum(memory.stats.dropped for memory in memories) == dropped
        assert sum(memory.stats.lost_races for memory in memories) == 0
        for memory in memories:
            await memory.flush()
        exported = await backends[0].sessions.export(KEY)
        assert exported["body"]["folded"] + exported["body"]["dropped"] == 88
        assert exported["body"]["dropped"] == dropped


@pytest.mark.parametrize(("pods", "objects"), [(1, 1), (1, 3), (2, 2)])
@clock.virtually
async def test_a_failing_model_is_called_once_an_interval_by_all_pods(pods: int, objects: int) -> None:
    model = Model(down=1e9)
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=2.0, recovery_backlog_limit=2)
    async with opened(pods) as backends:
        memories = [
            backend.memory(KEY, settings, summarizer=model) for backend in backends for _ in range(objects)
        ]
        for number in range(120):
            await memories[number % len(memories)].add_turn(turn(number))
            await asyncio.sleep(0.05)
        assert len(model.calls) == 3
        assert await shown(memories[0]) == {"summary": [], "pending": [], "recent": ["u119"]}


@clock.virtually
async def test_a_failure_that_loses_its_race_is_stored_on_the_new_version() -> None:
    driver = SpyDriver(MemoryDriver(clock=clock.now))
    async with Backend(driver, close_timeout_s=0) as backend:

        async def lease_is_taken(_: Key | str) -> None:
            pass

        async def other_writes(_: Key | str) -> None:
            await leases.rewrite(driver.inner, RECORD)

        model = Model(down=1e9)
        memory = backend.memory(KEY, config(zone=1, retry_backoff_base_s=30.0), summarizer=model)
        driver.before["replace"] = [lease_is_taken, other_writes, other_writes]
        await added(memory, *range(2))
        await asyncio.sleep(5)
        assert (await leases.stored_body(driver.inner, RECORD)).attempts == 1
        assert (len(model.calls), memory.stats.lost_races) == (1, 2)


@clock.virtually
async def test_no_call_follows_one_whose_failure_could_not_be_stored() -> None:
    driver = SpyDriver(MemoryDriver(clock=clock.now))
    async with Backend(driver, close_timeout_s=0) as backend:

        async def down(_: Key | str) -> None:
            raise Unavailable("no answer")

        model = Model(down=1e9)
        memory = backend.memory(KEY, config(zone=1, retry_backoff_base_s=1000.0), summarizer=model)
        driver.before["replace"] = [down] * 3
        await added(memory, *range(2))
        for number in range(20):
            await memory.add_turn(turn(number))
            await asyncio.sleep(1)
        assert driver.before["replace"] == []
        assert (await leases.stored_body(driver.inner, RECORD)).attempts == 1
        assert len(model.calls) == 1


@clock.virtually
async def test_a_flush_does_not_start_a_background_again_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def fold(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise LookupError

    monkeypatch.setattr(Writes, "fold", fold)
    async with opened(1) as (backend,):
        memory = backend.memory(KEY, config(zone=1), summarizer=Model(down=0))
        await added(memory, *range(3))
        await memory.flush()
        assert asked < 5


@clock.virtually
async def test_a_degraded_memory_with_nothing_pending_recovers_without_a_call() -> None:
    async with opened(1) as (backend,):
        model = Model(down=0, works_in=0.0)
        memory = backend.memory(KEY, config(zone=1, degraded_retry_interval_s=1e6), summarizer=model)
        await memory.add_turn(turn(0))
        record = await backend.driver.load(RECORD)
        assert record is not None
        body = Codec().seal_body(Body("so far", MemoryHealth.DEGRADED, 4, clock.now() + 1e6))
        await backend.driver.replace(RECORD, body, version="v", expect=record.version, ttl=KEEP)
        await memory.get_llm_context()
        assert memory.health is MemoryHealth.DEGRADED
        await asyncio.sleep(1)
        view = await memory.get_llm_context()
        assert view["conversation_memory"]["summary"] == "so far"
        assert (memory.health, model.calls) == (MemoryHealth.HEALTHY, [])


# Bounds


@clock.virtually
async def test_pending_turns_beyond_one_call_follow_in_later_calls() -> None:
    sizes: list[int] = []

    async def small(request: Mapping[str, Any]) -> Mapping[str, Any]:
        sizes.append(len(request["turns"]))
        if len(request["turns"]) > 20:
            raise RuntimeError("more than this model takes")
        return {"summary": "so far"}

    async with opened(1) as (backend,):
        writer = backend.memory(KEY, config("truncation", zone=1000))
        await added(writer, *range(200))
        memory = backend.memory(KEY, config(zone=5, retry_backoff_base_s=2.0), summarizer=small)
        await memory.flush()
        body = (await backend.sessions.export(KEY))["body"]
        assert (body["folded"], body["dropped"], body["health"]) == (195, 0, "healthy")
        assert max(sizes) == 50


@pytest.mark.parametrize("pods", [1, 2])
@clock.virtually
async def test_a_full_record_takes_every_turn_while_the_model_is_down(pods: int) -> None:
    model = Model(down=1e9)
    settings = config(zone=3, retry_attempts=0, degraded_retry_interval_s=1e6, recovery_backlog_limit=1000)
    async with opened(pods, max_record_bytes=12_000) as backends:
        memories = [backend.memory(KEY, settings, summarizer=model) for backend in backends]
        for number in range(40):
            await memories[number % pods].add_turn(turn(number, "x" * 1_000))
        left = await memories[0].turns()
        body = (await backends[0].sessions.export(KEY))["body"]
        assert body["dropped"] == 40 - len(left) == sum(memory.stats.dropped for memory in memories)
        assert [item.user_message for item in left] == [f"u{n}" for n in range(40 - len(left), 40)]
        assert len(left) > 6
        assert len(model.calls) == 1


@clock.virtually
async def test_a_large_turn_drops_no_more_than_its_pointer_takes() -> None:
    async with opened(1, max_record_bytes=12_000) as (backend,):
        memory = backend.memory(KEY, config(**FULL), summarizer=Model(down=1e9))
        room, number = 12_000, 0
        while room >= POINTER:
            await memory.add_turn(turn(number))
            await asyncio.sleep(1)
            record = await backend.driver.load(RECORD)
            assert record is not None
            room, number = 12_000 - len(record.body or b"") - sum(map(len, record.tail)), number + 1
        await memory.add_turn(turn(number, "x" * 9_000))
        assert 0 < memory.stats.dropped < 12


async def waiting_for_room(backend: Backend, memory: DistributedShortTermMemory) -> asyncio.Task[None]:
    """Fill a record while the lease is held elsewhere; returns the first `add_turn` that finds it full."""
    number = 0
    while not memory.stats.dropped:
        await memory.add_turn(turn(number, "x" * 700))
        number += 1
    await asyncio.sleep(1)
    await leases.take(backend.driver, RECORD)
    while True:
        adding = asyncio.create_task(memory.add_turn(turn(number, "x" * 700)))
        await asyncio.sleep(0.01)
        if not adding.done():
            return adding
        number += 1


FULL: dict[str, Any] = {
    "zone": 3,
    "retry_attempts": 0,
    "degraded_retry_interval_s": 1e6,
    "recovery_backlog_limit": 1000,
}


@clock.virtually
async def test_nothing_is_dropped_for_a_turn_that_was_given_up() -> None:
    async with opened(1, max_record_bytes=12_000) as (backend,):
        memory = backend.memory(KEY, config(**FULL), summarizer=Model(down=1e9))
        adding = await waiting_for_room(backend, memory)
        before = memory.stats.dropped, len(await memory.turns())
        adding.cancel()
        await leases.release(backend.driver, RECORD)
        await asyncio.sleep(60)
        assert (memory.stats.dropped, len(await memory.turns())) == before


@clock.virtually
async def test_nothing_is_dropped_if_another_process_has_made_room() -> None:
    async with opened(2, max_record_bytes=12_000) as (backend, other):
        memory = backend.memory(KEY, config(**FULL), summarizer=Model(down=1e9))
        adding = await waiting_for_room(backend, memory)
        dropped = memory.stats.dropped
        await leases.release(backend.driver, RECORD)
        second = other.memory(KEY, config(**FULL), summarizer=Model(down=1e9))
        await second.add_turn(turn(900, "x" * 700))
        await adding
        await asyncio.sleep(60)
        assert second.stats.dropped > 0
        assert memory.stats.dropped == dropped


@clock.virtually
async def test_a_full_record_refuses_a_turn_while_its_background_is_closing() -> None:
    called = asyncio.Event()

    async def slow(_: object) -> None:
        await called.wait()

    async with opened(1, max_record_bytes=12_000) as (backend,):
        settings = config(**FULL, on_turn_added=slow)
        memory = backend.memory(KEY, settings, summarizer=Model(down=1e9))
        adding = await waiting_for_room(backend, memory)
        adding.cancel()
        closing = asyncio.create_task(memory.close(timeout=100))
        await asyncio.sleep(0)
        with pytest.raises(TooLarge):
            await memory.add_turn(turn(901, "x" * 700))
        called.set()
        await closing


# One for each conversation


@clock.virtually
async def test_many_memory_objects_leave_one_timer_and_no_task() -> None:
    async with opened(1) as (backend,):
        settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=1e6)
        model = Model(down=1e9)
        for number in range(250):
            memory = backend.memory(KEY, settings, summarizer=model)
            await memory.get_llm_context()
            await memory.add_turn(turn(number))
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1
        assert (len(model.calls), len(backend._backgrounds)) == (1, 1)  # noqa: SLF001


@clock.virtually
async def test_waiting_conversations_have_no_task_and_resume_in_time() -> None:
    async with opened(1) as (backend,):
        settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=100.0)
        model = Model(down=50.0, works_in=0.0)
        for number in range(300):
            memory = backend.memory(MemoryKey("acme", "u", str(number)), settings, summarizer=model)
            await memory.add_turn(turn(0))
            await memory.add_turn(turn(1))
        del memory
        await asyncio.sleep(20)
        gc.collect()
        assert len(asyncio.all_tasks()) == 1
        assert len(backend._backgrounds) == 300  # noqa: SLF001 -- as below: every one is remembered
        await asyncio.sleep(200)
        gc.collect()
        assert len(model.calls) == 600
        assert len(backend._backgrounds) == 0  # noqa: SLF001


@clock.virtually
async def test_beyond_the_limit_the_least_recently_used_timers_are_dropped() -> None:
    waiting, rested, woken = Timers(most=3), list[int](), list[int]()

    class Maintenance:
        def __init__(self, number: int) -> None:
            self.number = number

        def cancel_plan(self) -> None:
            waiting.end(self)  # type: ignore[arg-type]
            rested.append(self.number)

        def wake(self) -> None:
            waiting.end(self)  # type: ignore[arg-type]
            woken.append(self.number)

    each = [Maintenance(number) for number in range(5)]
    for number in (0, 1, 2, 0, 3, 4):
        waiting.wait(each[number], clock.now() + 10 + number)  # type: ignore[arg-type]
    assert (rested, len(waiting)) == ([1, 2], 3)
    await asyncio.sleep(60)
    assert (woken, len(waiting)) == ([0, 3, 4], 0)


@clock.virtually
async def test_the_background_works_with_what_the_newest_memory_object_brings() -> None:
    async with opened(1) as (backend,):
        first, second = Model(down=0, works_in=0.0), Model(down=0, works_in=0.0)
        old = backend.memory(KEY, config(zone=1), summarizer=first)
        new = backend.memory(KEY, config(zone=1), summarizer=second)
        # One that keeps nothing changes nothing.
        backend.memory(KEY, config("none"))
        await added(old, *range(3))
        await old.flush()
        assert (len(first.calls), len(second.calls) > 0) == (0, True)
        assert new.stats.summaries == old.stats.summaries == len(second.calls)


@clock.virtually
async def test_closing_one_memory_object_leaves_the_background_to_the_others() -> None:
    async with opened(1) as (backend,):
        model = Model(down=0, works_in=5.0)
        one, other = (backend.memory(KEY, config(zone=1), summarizer=model) for _ in range(2))
        await added(one, *range(2))
        await asyncio.sleep(1)
        await one.close()
        await asyncio.sleep(10)
        assert other.stats.summaries == 1
        await other.add_turn(turn(2))
        await asyncio.sleep(1)
        await other.close()
        assert not other.busy
        assert (await leases.stored_body(backend.driver, RECORD)).lease is None


# Repeats of a turn


async def test_a_repeat_that_is_known_is_read_and_not_written() -> None:
    driver = SpyDriver(MemoryDriver())
    async with Backend(driver) as backend:
        memory = backend.memory(KEY, config(zone=2), summarizer=LedgerSummarizer())
        for _ in range(100):
            await memory.add_turn(turn("one"), turn_id="one")
        await until(lambda: not memory.busy)
        assert (driver.count("append"), driver.count("replace")) == (1, 0)
        record = await driver.load(RECORD)
        assert record is not None
        assert len(record.tail) == 1
        # A turn that another process erased in between is a new turn.
        await driver.delete(RECORD)
        await memory.add_turn(turn("one"), turn_id="one")
        assert (await shown(memory))["recent"] == ["uone"]


async def repeat(store: MemoryStore, count: int, name: str = "one", **limits: int) -> None:
    """Add a turn so many times, each by a process that has never loaded the conversation."""
    for _ in range(count):
        async with Backend(MemoryDriver(store, **limits)) as backend:
            memory = backend.memory(KEY, config(zone=3), summarizer=LedgerSummarizer())
            await memory.add_turn(turn(name, "x" * 500), turn_id=name)


async def test_repeats_at_the_head_are_compacted_away() -> None:
    store = MemoryStore()
    await repeat(store, 30)
    driver = MemoryDriver(store)
    async with Backend(driver) as backend:
        memory = backend.memory(KEY, config(zone=3), summarizer=LedgerSummarizer())
        await memory.flush()
        record = await driver.load(RECORD)
        assert record is not None
        assert len(record.tail) <= 16
        assert (await shown(memory))["recent"] == ["uone"]


async def test_repeats_never_fill_a_record_for_good() -> None:
    store = MemoryStore()
    await repeat(store, 2, "zero", max_record_bytes=10_000)
    await repeat(store, 40, max_record_bytes=10_000)
    await repeat(store, 2, "two", max_record_bytes=10_000)
    async with Backend(MemoryDriver(store)) as backend:
        memory = backend.memory(KEY, config(zone=3), summarizer=LedgerSummarizer())
        view = await shown(memory)
        assert view["summary"] + view["pending"] + view["recent"] == ["uzero", "uone", "utwo"]


async def test_a_repeat_behind_many_turns_never_becomes_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver()
    now = 1e6
    async with Backend(driver) as backend:
        backend._backgrounds = Backgrounds(driver, Codec(), clock=lambda: now)  # noqa: SLF001
        settings = config(zone=300, summary_max_tokens=100_000, total_max_tokens=0)
        memory = backend.memory(KEY, settings, summarizer=(summarizer := LedgerSummarizer()))
        sealed = Codec().seal_turn(memory.checked(turn("again"), "again"))
        await memory.add_turn(turn("again"), turn_id="again")
        await added(memory, *range(299))
        await driver.append(RECORD, sealed, initial_version=new_version(), ttl=None)
        for number in range(299, 598):
            # Long after the ten deadlines for which every id is remembered.
            now += 60
            await memory.add_turn(turn(number))
            await until(lambda: not memory.busy)
        said = [item["user"] for request in summarizer.requests for item in request["turns"]]
        standing = [item.user_message for item in await memory.turns()]
        assert said + standing == ["uagain", *(f"u{number}" for number in range(598))]


async def test_a_turn_of_unknown_outcome_is_called_back_once() -> None:
    driver = SpyDriver(MemoryDriver())
    added: list[str] = []

    async def note(one: ConversationTurn) -> None:
        added.append(one.user_message)

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut")

    async with Backend(driver) as backend:
        memory = backend.memory(KEY, config("truncation", on_turn_added=note))
        for name, reads in (("one", False), ("two", True)):
            driver.after["append"] = [lost] * 3
            with pytest.raises(OutcomeUnknown):
                await memory.add_turn(turn(name), turn_id=name)
            if reads:
                await memory.get_llm_context()
            for _ in range(3):
                await memory.add_turn(turn(name), turn_id=name)
        await until(lambda: not memory.busy)
        assert added == ["uone", "utwo"]
        assert memory.stats.appended == 2
        # The three that were sent for each, the repeat that was acknowledged, and no more.
        assert driver.count("append") == 6


async def test_a_lease_of_another_pod_is_waited_for_and_nothing_is_lost_under_it() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as backend:
        settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=1e6, recovery_backlog_limit=2)
        failing = LedgerSummarizer()
        failing.fail = 1
        memory = backend.memory(KEY, settings, summarizer=failing)
        await added(memory, 0, 1)
        await until(lambda: memory.health is MemoryHealth.DEGRADED and not memory.stats.dropped)
        await leases.take(backend.driver, RECORD)
        await added(memory, *range(2, 8))
        await asyncio.sleep(0.3)
        assert len(await memory.turns()) == 8
        await leases.release(backend.driver, RECORD)
        await until(lambda: memory.stats.dropped == 5)
        assert [item.user_message for item in await memory.turns()] == ["u5", "u6", "u7"]


@clock.virtually
async def test_of_two_pods_that_see_the_same_turns_one_summarizes_them() -> None:
    store, drivers, both = MemoryStore(), list[SpyDriver](), asyncio.Barrier(2)

    async def meet(_: Key | str) -> None:
        await both.wait()

    summarizer = LedgerSummarizer()
    writer = Backend(MemoryDriver(store, clock=clock.now))
    await writer.open()
    await added(writer.memory(KEY, config("truncation", zone=50)), *range(3))
    pods: list[Backend] = []
    for _ in range(2):
        drivers.append(SpyDriver(MemoryDriver(store, clock=clock.now)))
        pods.append(Backend(drivers[-1], close_timeout_s=0))
        await pods[-1].open()
        drivers[-1].before["replace"] = [meet]
    memories = [pod.memory(KEY, config(zone=1), summarizer=summarizer) for pod in pods]
    await asyncio.gather(*(memory.flush() for memory in memories))
    assert len(summarizer.requests) == 1
    assert (await shown(memories[0]))["summary"] == ["u0", "u1"]
    for pod in (writer, *pods):
        await pod.close()


@pytest.mark.parametrize("wrong", [-300.0, 0.0, 300.0, 500.0])
@clock.virtually
async def test_a_lease_of_a_dead_pod_ends_after_its_time_by_any_clock(wrong: float) -> None:
    async with opened(1) as (backend,):
        backend._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
            backend.driver, Codec(), clock=lambda: clock.now() + wrong
        )
        model = Model(down=-1, works_in=0.0)
        writer = backend.memory(KEY, config("truncation", zone=50), summarizer=model)
        await added(writer, *range(3))
        await leases.take(backend.driver, RECORD, at=clock.now(), ttl=75.0)
        start = clock.now()
        memory = backend.memory(KEY, config(zone=1), summarizer=model)
        await memory.get_llm_context()
        await asyncio.sleep(100)
        assert 75 <= model.calls[0] - start < 82


@pytest.mark.parametrize(("reach", "calls"), [("network", 0), ("host", 1)])
@clock.virtually
async def test_a_clock_that_is_hours_ahead_ends_no_lease_on_a_network(
    monkeypatch: pytest.MonkeyPatch, reach: Literal["network", "host"], calls: int
) -> None:
    async with opened(1) as (backend,):
        monkeypatch.setattr(backend.driver, "traits", replace(backend.driver.traits, reach=reach))
        backend._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
            backend.driver, Codec(), clock=lambda: clock.now() + 3 * 3_600
        )
        model = Model(down=-1, works_in=0.0)
        await added(backend.memory(KEY, config("truncation", zone=50), summarizer=model), *range(3))
        await leases.take(backend.driver, RECORD, at=clock.now(), ttl=75.0)
        await backend.memory(KEY, config(zone=1), summarizer=model).get_llm_context()
        await asyncio.sleep(60)
        assert len(model.calls) == calls


@pytest.mark.parametrize("apart", [0.0, 20.0])
@clock.virtually
async def test_a_lease_of_a_dead_pod_ends_though_no_process_lives_as_long(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    store, model, start = MemoryStore(), Model(down=-1, works_in=0.0), clock.now()
    for life in range(40):
        off = apart * (life % 2)
        async with Backend(MemoryDriver(store, clock=clock.now), close_timeout_s=0) as pod:
            monkeypatch.setattr(pod.driver, "traits", replace(pod.driver.traits, reach="network"))
            pod._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
                pod.driver, Codec(), clock=lambda off=off: clock.now() + off
            )
            if not life:
                await added(pod.memory(KEY, config("truncation", zone=50), summarizer=model), *range(3))
                await leases.take(pod.driver, RECORD, at=clock.now(), ttl=75.0)
            await pod.memory(KEY, config(zone=1), summarizer=model).get_llm_context()
            await asyncio.sleep(0.01)
        await asyncio.sleep(10)
    assert 150 - 2 * apart <= model.calls[0] - start <= 150 + 2 * apart + 20
    assert len(model.calls) == 1


@clock.virtually
async def test_a_holder_whose_lease_is_overdue_by_another_clock_stores_its_summary() -> None:
    async with opened(2) as (slow, ahead):
        ahead._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
            ahead.driver, Codec(), clock=lambda: clock.now() + 300
        )
        model, other = Model(down=-1, works_in=5.0), Model(down=-1)
        memory = slow.memory(KEY, config(zone=1), summarizer=model)
        await added(memory, *range(2))
        await asyncio.sleep(0.1)
        seeing = ahead.memory(KEY, config(zone=1), summarizer=other)
        await seeing.get_llm_context()
        await asyncio.sleep(0.1)
        body = await leases.stored_body(ahead.driver, RECORD)
        assert body.lease is not None
        assert body.overdue == (body.lease.at, clock.now() + 300 - 0.1)
        await seeing.close()
        assert (await leases.stored_body(ahead.driver, RECORD)).lease == body.lease, "it is not its own"
        await memory.flush()
        body = await leases.stored_body(slow.driver, RECORD)
        assert (body.summary, body.lease, body.overdue) == ("u0", None, None)
        assert (len(model.calls), len(other.calls)) == (1, 0)


@pytest.mark.parametrize("noted", [False, True])
@clock.virtually
async def test_a_process_that_ends_releases_its_lease_though_it_was_noted_as_overdue(*, noted: bool) -> None:
    async with opened(2) as (slow, ahead):
        ahead._backgrounds = Backgrounds(  # noqa: SLF001 -- no setting
            ahead.driver, Codec(), clock=lambda: clock.now() + 300
        )
        model = Model(down=-1, works_in=5.0)
        memory = slow.memory(KEY, config(zone=1), summarizer=model)
        await added(memory, *range(2))
        await asyncio.sleep(0.1)
        if noted:
            seeing = ahead.memory(KEY, config(zone=1), summarizer=Model(down=-1))
            await seeing.get_llm_context()
            await asyncio.sleep(0.1)
            await seeing.close()
        body = await leases.stored_body(slow.driver, RECORD)
        assert (body.lease is not None, body.overdue is not None) == (True, noted)
        await memory.close()
        body = await leases.stored_body(slow.driver, RECORD)
        assert (body.lease, body.overdue) == (None, None)


@clock.virtually
async def test_a_lease_that_is_noted_as_overdue_at_once_is_not_left_behind() -> None:
    class NotedAtOnce(MemoryDriver):
        """Shows what is not confirmed, so that a fold loads again; another process notes the lease before."""

        noted = False

        async def load(self, key: Key) -> Record | None:
            record = await super().load(key)
            body = Codec().open_body(record.body) if record is not None and key == RECORD else Body()
            if body.lease is None or self.noted:
                return record
            self.noted = True
            await leases.rewrite(self, key, overdue=Overdue(body.lease.at, clock.now() + 300))
            return await super().load(key)

    driver = NotedAtOnce(clock=clock.now)
    driver.traits = replace(driver.traits, shows_unconfirmed=True)
    async with Backend(driver, close_timeout_s=0) as pod:
        pod._backgrounds = Backgrounds(pod.driver, Codec(), clock=clock.now)  # noqa: SLF001 -- no setting
        model, start = Model(down=-1, works_in=0.0), clock.now()
        memory = pod.memory(KEY, config(zone=1), summarizer=model)
        await added(memory, *range(2))
        await memory.flush(timeout=300)
        assert driver.noted
        assert model.calls[0] - start < 5


@clock.virtually
async def test_a_full_record_is_sent_one_note_and_waits_for_the_lease() -> None:
    async with opened(1, max_record_bytes=8_000) as (backend,):
        model = Model(down=-1, works_in=0.0)
        writer = backend.memory(KEY, config("truncation", zone=50), summarizer=model)
        await added(writer, *range(2))
        await leases.take(backend.driver, RECORD, at=clock.now() - 80, ttl=75.0)
        fills = ""
        while "x" not in fills:
            record = await backend.driver.load(RECORD)
            assert record is not None
            entry = len(record.tail[-1])
            room = 8_000 - len(record.body or b"") - sum(map(len, record.tail))
            fills = "x" * (room - entry - 20) if room < 3 * entry else ""
            await writer.add_turn(turn(50, fills))
        start = clock.now()
        spy = SpyDriver(backend.driver)
        memory = DistributedShortTermMemory(spy, KEY, config(zone=1), summarizer=model, clock=clock.now)
        await memory.get_llm_context()
        await asyncio.sleep(60)
        body = await leases.stored_body(backend.driver, RECORD)
        assert body.lease is not None
        assert body.overdue is None
        assert spy.count("replace") == 1
        assert spy.count("load") > 10
        await asyncio.sleep(20)
        assert 75 <= model.calls[0] - start < 82
        await memory.close()


@clock.virtually
async def test_a_lease_ends_that_older_processes_keep_in_every_body() -> None:
    async with opened(1) as (backend,):
        model = Model(down=-1, works_in=0.0)
        await added(backend.memory(KEY, config("truncation", zone=50), summarizer=model), *range(3))
        await leases.take(backend.driver, RECORD, at=clock.now(), ttl=75.0)
        memory = backend.memory(KEY, config(zone=1), summarizer=model)
        start = clock.now()
        for _ in range(10):
            await memory.get_llm_context()
            await asyncio.sleep(10)
            await leases.rewrite(backend.driver, RECORD)
        assert 75 <= model.calls[0] - start < 82


@clock.virtually
async def test_a_summary_that_comes_late_leaves_the_lease_of_another_pod() -> None:
    async with opened(1) as (backend,):
        model = Model(down=-1, works_in=1.0)
        memory = backend.memory(KEY, config(zone=1), summarizer=model)
        await added(memory, *range(2))
        await asyncio.sleep(0.1)
        await leases.take(backend.driver, RECORD)
        await added(memory, 2)
        await asyncio.sleep(30)
        body = await leases.stored_body(backend.driver, RECORD)
        assert (body.summary, body.lease) == ("u0", Lease(1e12, 1e6))
        assert len(model.calls) == 1, "the other one calls it now"
        await leases.release(backend.driver, RECORD)
        await memory.flush()
        assert (await leases.stored_body(backend.driver, RECORD)).folded == 2


@clock.virtually
async def test_a_failure_takes_over_no_lease_of_another_pod() -> None:
    driver = SpyDriver(MemoryDriver(clock=clock.now))
    async with Backend(driver, close_timeout_s=0) as backend:

        async def down(_: Key | str) -> None:
            raise Unavailable("no answer")

        async def other_takes_it(_: Key | str) -> None:
            await leases.take(driver.inner, RECORD)

        memory = backend.memory(KEY, config(zone=1, retry_backoff_base_s=1e6), summarizer=Model(down=1e9))
        # The failure is stored neither at once nor when the lease is released, but at the next attempt.
        driver.before["replace"] = [nothing, down, nothing, other_takes_it]
        await added(memory, *range(2))
        await asyncio.sleep(30)
        body = await leases.stored_body(driver.inner, RECORD)
        assert (body.attempts, body.lease) == (1, Lease(1e12, 1e6))


@clock.virtually
async def test_a_lease_of_a_pod_that_died_long_ago_is_taken_at_once() -> None:
    async with opened(1) as (backend,):
        model = Model(down=-1, works_in=0.0)
        await added(backend.memory(KEY, config("truncation", zone=50), summarizer=model), *range(3))
        await leases.take(backend.driver, RECORD, at=clock.now() - 3_600, ttl=75.0)
        await backend.memory(KEY, config(zone=1), summarizer=model).get_llm_context()
        await asyncio.sleep(0.01)
        assert len(model.calls) == 1
        assert (await leases.stored_body(backend.driver, RECORD)).lease is None


@clock.virtually
async def test_a_full_record_without_room_for_a_lease_is_folded() -> None:
    async with opened(1, max_record_bytes=4_000) as (backend,):
        settings = config(zone=1, fold_batch_turns=100)
        memory = backend.memory(KEY, settings, summarizer=LedgerSummarizer())
        await memory.add_turn(turn(0))
        record = await backend.driver.load(RECORD)
        assert record is not None
        room = 4_000 - 2 * len(record.tail[0])
        await memory.add_turn(turn(1, "x" * (room + len("fine"))))
        await memory.add_turn(turn(2, "y" * 200))
        await memory.flush()
        assert memory.stats.dropped == 0
        assert await shown(memory) == {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
