"""Workers and the processes that leave summaries to them, in virtual time, with kills at each operation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest

from stm_backends import (
    ConfigurationError,
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    StorageError,
    Unavailable,
)
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.memory.shared.maintenance import NOTED_AGAIN_S
from stm_backends.records import keys
from stm_backends.telemetry.observer import Observer, WorkEvent
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.work.policy import LEASE_S
from tests.support import clock
from tests.support.workers import CONFIG, KEY, DyingDriver, Moment, World

COVERED = ["u0", "u1", "u2", "u3", "u4", "u5"]
"""What a summary covers of eight turns, of which two are shown in full."""


def key_of(tenant: str, session: str = "chat") -> MemoryKey:
    return MemoryKey(tenant, "u", session)


class Heard(Observer):
    """Remembers what is reported of the queue."""

    def __init__(self) -> None:
        self.events: list[WorkEvent] = []
        self.lags: list[float] = []

    def work(self, event: WorkEvent, count: int) -> None:
        self.events += [event] * count

    def work_waits(self, count: int, lag: float) -> None:
        self.lags.append(lag)


class Denying(WrapperDriver):
    """Fails each operation on the queue of work while it is `down`."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.down = True

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        scope = key if isinstance(key, str) else key.scope
        if self.down and scope == keys.WORK:
            raise Unavailable("the queue is away")
        return await send()


# What a process leaves


@clock.virtually
async def test_a_process_leaves_summaries_to_a_worker_and_calls_no_model() -> None:
    world = World()
    await world.add(KEY, range(8))
    assert world.summarize.requests == []
    assert await world.noted() == 2
    assert await world.stored() == 8
    await world.work(5)
    assert await world.covers() == COVERED
    assert len(world.summarize.requests) == 1
    assert await world.noted() == 0
    assert [look.notes for look in await world.looks()] == [()]


@clock.virtually
async def test_a_note_is_one_append_for_each_batch_of_turns() -> None:
    world = World()
    for number in range(20):
        spy = SpyDriver(world.driver())
        await world.add(KEY, [number], driver=spy)
        # The turns beyond the two that are shown in full are 3, 6, ...
        assert spy.count("append", "work") == (number >= 4 and (number - 4) % 3 == 0), number
        assert spy.count("replace", "memory") == 0
    await world.work(5)
    assert (await world.body()).folded == 18


@clock.virtually
async def test_a_note_that_cannot_be_stored_fails_no_turn_and_is_owed() -> None:
    world, heard = World(), Heard()
    driver = Denying(world.driver())
    async with world.opened(driver, summaries="worker", observer=heard) as backend:
        memory = backend.memory(KEY, CONFIG)
        for number in range(5):
            await memory.add_turn(ConversationTurn(f"u{number}", "fine"))
        assert heard.events == ["lost"]
        driver.down = False
        await memory.add_turn(ConversationTurn("u5", "fine"))
        assert heard.events == ["lost", "noted"]
    assert await world.noted() == 1


@clock.virtually
async def test_a_read_notes_what_has_been_due_for_long() -> None:
    world = World()
    driver = Denying(world.driver())
    await world.add(KEY, range(5), driver=driver)
    assert await world.noted() == 0

    async def read() -> None:
        async with world.opened(summaries="worker") as backend:
            await backend.memory(KEY, CONFIG).get_llm_context()

    await read()
    assert await world.noted() == 0
    await asyncio.sleep(NOTED_AGAIN_S + 1)
    await read()
    assert await world.noted() == 1


@clock.virtually
async def test_a_flush_notes_that_all_is_to_be_summarized() -> None:
    world = World()
    async with world.opened(summaries="worker") as backend:
        memory = backend.memory(KEY, CONFIG)
        await memory.flush()
        assert await world.noted() == 0
        for number in range(3):
            await memory.add_turn(ConversationTurn(f"u{number}", "fine"))
        began = clock.now()
        await memory.flush()
        assert clock.now() == began
    await world.work(5)
    assert await world.covers() == ["u0"]


@clock.virtually
async def test_trims_are_left_to_a_worker_too() -> None:
    world, config = World(), ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=2))
    await world.add(KEY, range(5), config=config)
    assert await world.stored() == 5
    await world.work(5)
    assert await world.stored() == 2


@clock.virtually
async def test_a_full_record_moves_turns_to_pages_without_a_model() -> None:
    world, config = World(max_record_bytes=20_000), replace(CONFIG, transcript=True)
    async with world.opened(summaries="worker") as backend:
        memory = backend.memory(KEY, config)
        for number in range(30):
            await memory.add_turn(ConversationTurn(f"u{number}", "x" * 1_000))
        assert world.summarize.requests == []
        assert [one.turn.user_message async for one in memory.each_turn()] == [f"u{n}" for n in range(30)]
    await world.work(60)
    assert (await world.body()).dropped == 0
    assert (await world.body()).folded > 28 - CONFIG.fold_batch_turns


@clock.virtually
async def test_the_setting_of_a_memory_goes_before_that_of_the_backend() -> None:
    world = World()
    async with world.opened() as backend:
        memory = backend.memory(KEY, replace(CONFIG, summaries="worker"))
        for number in range(8):
            await memory.add_turn(ConversationTurn(f"u{number}", "fine"))
    assert world.summarize.requests == []
    assert await world.noted() == 2
    async with world.opened(summaries="worker") as backend:
        used = replace(CONFIG, summaries="process")
        other = backend.memory(key_of("bolt"), used, summarizer=world.summarize)
        for number in range(8):
            await other.add_turn(ConversationTurn(f"u{number}", "fine"))
        await other.flush()
    assert len(world.summarize.requests) > 0
    assert await world.noted() == 2


@pytest.mark.parametrize("value", ["here", "", 1, True])
def test_what_is_no_place_for_summaries_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="summaries"):
        ShortTermMemoryConfig(summaries=value)


# What a worker does


@clock.virtually
async def test_a_worker_folds_by_the_settings_of_the_process() -> None:
    world = World()
    config = replace(CONFIG, fold_max_turns=4, budget=MemoryBudget(full_zone_turns=10))
    await world.add(KEY, range(20), config=config)
    await world.work(5)
    assert [len(request["turns"]) for request in world.summarize.requests] == [4, 4]
    assert await world.stored() == 12


@clock.virtually
async def test_a_note_that_arrives_during_the_work_is_not_lost() -> None:
    world = World()
    world.summarize.hold()
    await world.add(KEY, range(5))
    working = asyncio.create_task(world.work(20))
    await world.summarize.called.wait()
    await world.add(KEY, range(5, 11))
    world.summarize.release()
    await working
    assert await world.covers() == [f"u{number}" for number in range(9)]
    assert await world.noted() == 0


@clock.virtually
async def test_a_failed_call_is_made_again_when_the_record_says() -> None:
    world, heard = World(), Heard()
    times = list[float]()

    async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        times.append(clock.now())
        return await world.summarize(request)

    world.summarize.fail = 3
    await world.add(KEY, range(5))
    async with world.opened(observer=heard) as backend:
        worker: Any = backend.worker(summarizer=summarize)
        worker._clock = clock.now  # noqa: SLF001 -- no setting
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(30)
        worker.stop()
        await running
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    # The backoff is 1, 2 and 4 seconds, and a worker looks at least once a second.
    for wait, least in zip(waits, (1.0, 2.0, 4.0), strict=True):
        assert least <= wait <= least + 1.5
    assert await world.covers() == ["u0", "u1", "u2"]
    assert heard.events.count("later") == 3
    assert heard.events.count("done") == 1
    assert max(heard.lags) < 2.0


@clock.virtually
async def test_a_conversation_that_was_erased_is_done_with_one_load() -> None:
    world = World()
    await world.add(KEY, range(5))
    async with world.reading() as driver:
        assert await driver.delete(keys.memory_key(KEY))
    await world.work(5)
    assert await world.noted() == 0
    assert world.summarize.requests == []


@clock.virtually
async def test_a_conversation_that_cannot_be_read_is_given_up_after_some_tries() -> None:
    world = World()
    await world.add(KEY, range(5))
    async with world.reading() as driver:
        where = keys.memory_key(KEY)
        assert await driver.delete(where)
        await driver.append(where, b"damaged", initial_version="v", ttl=None)
    await world.work(5)
    assert await world.noted() == 1
    await world.work(3_000)
    assert await world.noted() == 0


@clock.virtually
async def test_a_tenant_with_many_conversations_holds_up_no_other() -> None:
    world, order = World(), list[str]()

    async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        order.append(request["turns"][0]["user"])
        await asyncio.sleep(1)
        return {"summary": "- gist"}

    for number in range(60):
        await world.add(key_of("big", f"s{number}"), range(5))
    await world.add(key_of("small"), range(100, 105))
    async with world.opened() as backend:
        worker: Any = backend.worker(summarizer=summarize, concurrency=4)
        worker._clock = clock.now  # noqa: SLF001 -- no setting
        await worker.run(until_empty=True)
    assert len(order) == 61
    assert order.index("u100") < 8


@clock.virtually
async def test_a_worker_for_some_tenants_leaves_the_others() -> None:
    world = World()
    await world.add(key_of("acme"), range(5))
    await world.add(key_of("bolt"), range(5))
    await world.work(5, tenants=["bolt"])
    assert await world.covers(key_of("bolt"))
    assert not await world.covers(key_of("acme"))
    await world.work(5)
    assert await world.covers(key_of("acme"))


@clock.virtually
async def test_two_workers_share_the_work_and_fold_each_conversation_once() -> None:
    world = World()
    for number in range(40):
        await world.add(key_of("acme", f"s{number}"), range(5))
    await asyncio.gather(world.work(30), world.work(30))
    assert len(world.summarize.requests) == 40
    assert await world.noted() == 0


@clock.virtually
async def test_a_full_shard_is_worked_off_without_room_for_a_lease() -> None:
    world = World(max_record_bytes=6_000)
    sessions = [key_of("acme", f"s{number}") for number in range(300)]
    for key in sessions:
        await world.add(key, range(5))
    assert len(await world.looks()) > 8
    noted = await world.noted()
    await world.work(60)
    assert await world.noted() == 0
    assert sum([bool(await world.covers(key)) for key in sessions]) >= noted


# How a worker ends


@clock.virtually
async def test_a_worker_that_is_told_to_stop_lets_running_work_end() -> None:
    world = World()
    world.summarize.hold()
    await world.add(KEY, range(5))
    await world.add(key_of("bolt"), range(5))
    working = asyncio.create_task(world.work(1.0, concurrency=1))
    await world.summarize.called.wait()
    # Later than it is told to stop, and sooner than the call takes too long.
    asyncio.get_running_loop().call_later(1.9, world.summarize.release)
    await working
    assert len(world.summarize.requests) == 1
    assert all(not look.state.held for look in await world.looks())
    assert await world.noted() == 1


@clock.virtually
async def test_a_worker_gives_back_what_does_not_end_in_time() -> None:
    world, config = World(), replace(CONFIG, summarizer_timeout_s=600.0)
    world.summarize.hold()
    await world.add(KEY, range(5), config=config)
    began = clock.now()
    await world.work(5.0, drain_s=3.0)
    assert clock.now() - began < 15
    assert await world.noted() == 1
    assert all(not look.state.held for look in await world.looks())
    world.summarize.release()
    await world.work(20.0)
    assert await world.covers() == ["u0", "u1", "u2"]


@clock.virtually
async def test_a_worker_ends_once_nothing_is_due_if_told_so() -> None:
    world = World()
    await world.add(KEY, range(8))
    async with world.opened() as backend:
        await asyncio.wait_for(world.worker(backend).run(until_empty=True), 60)
        await asyncio.wait_for(world.worker(backend).run(until_empty=True), 60)
    assert await world.covers() == COVERED


@clock.virtually
async def test_an_outage_of_the_datastore_is_waited_for() -> None:
    world = World()
    await world.add(KEY, range(5))
    driver = Denying(world.driver())
    looks = list[float]()
    async with world.opened(driver) as backend:
        worker = world.worker(backend, on_look=lambda: looks.append(clock.now()))
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(60)
        assert not looks
        driver.down = False
        await asyncio.sleep(10)
        assert looks
        worker.stop()
        await running
    assert await world.covers() == ["u0", "u1", "u2"]


# Kills


async def operations_of_a_worker() -> int:
    """Return how many operations a worker takes for the work of the tests below, and its first looks."""
    world = World()
    await world.add(KEY, range(8))
    driver = DyingDriver(world.driver())
    await world.die_working(driver, seconds=0.5)
    assert await world.covers() == COVERED
    return driver.done


@clock.virtually
async def test_a_worker_may_be_killed_at_any_operation() -> None:
    for moment in get_args(Moment):
        for at in range(1, await operations_of_a_worker() + 1):
            world = World()
            await world.add(KEY, range(8))
            await world.die_working(DyingDriver(world.driver(), at, moment))
            assert await world.stored() in (2, 8), at
            await world.work(60)
            assert await world.covers() == COVERED, (at, moment)
            assert (await world.body()).folded == 6, (at, moment)
            assert await world.noted() == 0, (at, moment)
            assert all(not look.state.held and not look.state.done for look in await world.looks())


@clock.virtually
async def test_what_a_killed_worker_held_is_taken_over_after_its_lease() -> None:
    world = World()
    world.summarize.hold()
    await world.add(KEY, range(5))
    driver = DyingDriver(world.driver())
    await world.die_working(driver, seconds=1.0)
    world.summarize.release()
    world.summarize.requests.clear()
    began = clock.now()
    working = asyncio.create_task(world.work(60))
    while not world.summarize.requests:  # noqa: ASYNC110 -- it tells nobody
        await asyncio.sleep(0.1)
    # Of the worker, and then of the conversation: a call of two seconds, and a deadline of five.
    assert clock.now() - began < LEASE_S + 2 * (2 + 5) + 5
    await working
    assert await world.covers() == ["u0", "u1", "u2"]


@clock.virtually
async def test_a_process_may_be_killed_at_any_operation() -> None:
    counted = DyingDriver(World().driver())
    await World().add(KEY, range(8), driver=counted)
    for moment in get_args(Moment):
        for at in range(1, counted.done + 1):
            world = World()
            with contextlib.suppress(StorageError):
                await world.add(KEY, range(8), driver=DyingDriver(world.driver(), at, moment))
            stored = await world.stored()
            await world.work(5)
            # What has left no note, a later read finds.
            await asyncio.sleep(NOTED_AGAIN_S + 1)
            async with world.opened(summaries="worker") as backend:
                await backend.memory(KEY, CONFIG).get_llm_context()
            await world.work(30)
            left = await world.stored()
            assert left < 2 + CONFIG.fold_batch_turns, (at, moment)
            assert await world.covers() == [f"u{number}" for number in range(stored - left)], (at, moment)


@clock.virtually
async def test_workers_that_are_killed_again_and_again_leave_no_conversation_waiting() -> None:
    world, ended = World(), asyncio.Event()
    heard = Heard()
    sessions = [key_of(f"t{number % 7}", f"s{number}") for number in range(120)]

    async def short_lived() -> None:
        for key in sessions:
            await world.add(key, range(5))
            await asyncio.sleep(0.25)

    async def mortal() -> None:
        while not ended.is_set():
            await world.die_working(DyingDriver(world.driver()), seconds=10.0)

    async def steady() -> None:
        async with world.opened(observer=heard) as backend:
            worker = world.worker(backend)
            running = asyncio.create_task(worker.run())
            await ended.wait()
            worker.stop()
            await running

    working = [asyncio.create_task(mortal()), asyncio.create_task(steady())]
    await short_lived()
    await asyncio.sleep(60)
    ended.set()
    await asyncio.gather(*working)
    for key in sessions:
        assert await world.covers(key) == ["u0", "u1", "u2"], key
    assert await world.noted() == 0
    assert max(heard.lags) < 30


# What is told of it


@clock.virtually
async def test_the_figures_say_how_many_wait_and_for_how_long() -> None:
    world = World()
    async with world.opened() as backend:
        assert await backend.stats.work() is None
    await world.add(KEY, range(8))
    async with world.opened() as backend:
        internals: Any = backend.stats
        internals._clock = clock.now  # noqa: SLF001 -- no setting
        await asyncio.sleep(90)
        found = await backend.stats.work()
        assert found is not None
        assert found.waiting == 1
        assert 90 <= found.lag < 91
    await world.work(5)
    async with world.opened() as backend:
        found = await backend.stats.work()
        assert found is not None
        assert (found.waiting, found.lag) == (0, 0.0)


@pytest.mark.parametrize("what", ["conversation", "user", "tenant"])
@clock.virtually
async def test_an_erasure_leaves_no_note_of_what_it_erased(what: str) -> None:
    world = World()
    await world.add(KEY, range(8))
    await world.add(key_of("bolt"), range(8))
    async with world.opened() as backend:
        match what:
            case "conversation":
                await backend.sessions.erase(KEY)
            case "user":
                await backend.sessions.erase_user(KEY.tenant_id, KEY.user_id)
            case _:
                await backend.sessions.erase_tenant(KEY.tenant_id)
    named = [note.key for look in await world.looks() for note in look.notes if note and not note.is_void]
    assert {*named} == {key_of("bolt")}
    assert (await world.body()).health is MemoryHealth.HEALTHY
