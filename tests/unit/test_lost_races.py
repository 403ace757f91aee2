"""A former master still answers loads and the new one does the writes: every race is lost, at little cost.

Each load shows the version that the former master has, and no `replace` finds it. Time is virtual.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, Driver, Key, new_version
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation
from stm_backends.errors import LimitReached, OutcomeUnknown, TooLarge, Unavailable
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.races import RACES, pause_after
from stm_backends.records import keys
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.keys import Owner
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey, StoredTurn
from tests.support import clock, leases
from tests.support.default_memory import added
from tests.support.replicated import FailingOver, StillAnswersLoads

T = TypeVar("T")

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)

MOST = 250
"""More requests than a minute takes."""

FAR_TOO_MANY = 2_000
"""After so many requests, all fail: a loop without a pause would take no virtual time, and never end."""


class Patient(SpyDriver):
    """Counts requests, and ends a loop without a pause."""

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if len(self.calls) > FAR_TOO_MANY:
            raise Unavailable("far too many requests")
        return await super().call(operation, key, send)


@dataclass
class Pod:
    """A memory on two servers, and what it sends them."""

    memory: DistributedShortTermMemory
    backgrounds: Backgrounds
    spy: Patient

    async def requests_in(self, seconds: float) -> int:
        """Let time pass; returns how many requests the conversation took meanwhile."""
        before = len(self.spy.calls)
        await asyncio.sleep(seconds)
        return len(self.spy.calls) - before

    async def has_a_free_slot(self) -> bool:
        """Say whether another conversation may call the summarizer at once."""

        async def take() -> bool:
            return self.backgrounds._schedule.calls.take("other")  # noqa: SLF001

        return await asyncio.create_task(take())


def pod(driver: Driver, settings: object, summarizer: Any = None) -> Pod:
    spy = Patient(driver)
    backgrounds = Backgrounds(spy, Codec(), max_summaries=1, clock=clock.now)
    summarizer = summarizer or LedgerSummarizer()
    memory = DistributedShortTermMemory(
        spy, KEY, settings, summarizer=summarizer, backgrounds=backgrounds, clock=clock.now
    )
    return Pod(memory, backgrounds, spy)


def entry(number: int) -> bytes:
    return Codec().seal_turn(StoredTurn(f"id{number}", turn(number)))


async def two_masters(tail: Sequence[int] = range(41), **limits: int) -> FailingOver:
    """Return two servers with the same entries, to both of which writes go."""
    driver = FailingOver(*(MemoryDriver(MemoryStore(), clock=clock.now, **limits) for _ in range(2)))
    for one in driver.writes_to:
        await one.open()
    for number in tail:
        await driver.append(RECORD, entry(number), initial_version="v", ttl=None)
    assert await driver.replace(RECORD, Codec().seal_body(Body()), version="w", expect="v", ttl=None)
    return driver


async def fail_over(driver: FailingOver) -> None:
    """Have the new master alone do the writes, after one that another process has sent it."""
    driver.writes_to = [driver.new]
    await leases.rewrite(driver.new, RECORD)


@pytest.mark.parametrize(
    ("settings", "tail"),
    [
        pytest.param(config(zone=20), range(41), id="a lease"),
        pytest.param(config("truncation", zone=20), range(41), id="a trim"),
        pytest.param(config("truncation", zone=20), [0] * 18, id="a compaction"),
    ],
)
@clock.virtually
async def test_a_step_that_keeps_losing_races_takes_few_requests(settings: Any, tail: Sequence[int]) -> None:
    driver = await two_masters(tail)
    await fail_over(driver)
    one = pod(driver, settings)
    await one.memory.get_llm_context()
    assert 20 < await one.requests_in(60) < MOST
    assert await one.has_a_free_slot()
    # It goes on once the former master is gone.
    driver.inner = driver.new
    await asyncio.sleep(1.1)
    assert not one.memory.busy
    record = await driver.new.load(RECORD)
    assert record is not None
    assert len(record.tail) < len(tail)
    await one.memory.close()


@pytest.mark.parametrize("works", [True, False])
@clock.virtually
async def test_an_attempt_that_keeps_losing_races_is_given_up(*, works: bool) -> None:
    driver = await two_masters()
    calls = 0

    async def summarizer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        await fail_over(driver)
        if not works:
            raise RuntimeError("the model is down")
        return {"summary": " ".join(item["user"] for item in request["turns"])}

    one = pod(driver, config(zone=20, retry_backoff_base_s=60.0), summarizer)
    await one.memory.get_llm_context()
    assert await one.requests_in(60) < MOST
    assert await one.has_a_free_slot()
    assert calls == 1
    await one.memory.close()


@clock.virtually
async def test_a_lease_that_cannot_be_released_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    driver = StillAnswersLoads(MemoryDriver())
    await driver.open()
    for server in (driver.inner, driver.new):
        for number in range(2):
            await server.append(RECORD, entry(number), initial_version="v", ttl=None)
    one = pod(driver, config(zone=1))
    with caplog.at_level(logging.WARNING):
        await one.memory.get_llm_context()
        assert await one.requests_in(20) < MOST
    assert "could not release a lease, it will expire: each race was lost" in caplog.text
    assert await one.has_a_free_slot()
    await one.memory.close()


@clock.virtually
async def test_closing_waits_for_no_lease_that_cannot_be_released() -> None:
    driver = StillAnswersLoads(MemoryDriver())
    await driver.open()
    for server in (driver.inner, driver.new):
        for number in range(2):
            await server.append(RECORD, entry(number), initial_version="v", ttl=None)
    one = pod(driver, config(zone=1))
    await one.memory.get_llm_context()
    await asyncio.sleep(0.1)
    began = clock.now()
    await one.memory.close()
    assert clock.now() - began < 0.1
    assert await one.has_a_free_slot()
    assert await one.requests_in(60) == 0


@clock.virtually
async def test_a_flush_ends_in_time_though_every_race_is_lost() -> None:
    driver = await two_masters()
    await fail_over(driver)
    one = pod(driver, config(zone=20))
    began, before = clock.now(), len(one.spy.calls)
    await one.memory.flush(timeout=30)
    assert clock.now() - began == pytest.approx(30, abs=0.01)
    assert len(one.spy.calls) - before < MOST
    await one.memory.close()


@pytest.mark.parametrize("makes_room", [True, False])
@clock.virtually
async def test_a_turn_for_a_full_record_is_answered_though_races_are_lost(*, makes_room: bool) -> None:
    size = sum(len(entry(number)) for number in range(41))
    driver = await two_masters(max_record_bytes=size + 200)
    await fail_over(driver)
    one = pod(driver, config("truncation", zone=20))
    began = clock.now()
    adding = asyncio.create_task(one.memory.add_turn(turn(99, "x" * 300)))
    await asyncio.sleep(10)
    assert not adding.done()
    if makes_room:
        body = Codec().seal_body(Body())
        assert await driver.new.replace(RECORD, body, version=new_version(), expect=ANY, ttl=None)
        await adding
        assert clock.now() - began < 12
    else:
        with pytest.raises(TooLarge):
            await adding
        assert clock.now() - began < 600
    await one.memory.close()


@clock.virtually
async def test_a_repeat_that_only_the_former_master_has_is_not_acknowledged() -> None:
    """Nor dropped by it: the new master is full, and has other entries under the same version."""
    size = sum(len(entry(number)) for number in (*range(41), 99)) + len(Codec().seal_body(Body()))
    driver = await two_masters(max_record_bytes=size + 20)
    driver.writes_to = [driver.new]
    for server, number in (driver.old, 99), (driver.new, 98):
        await server.append(RECORD, entry(number), initial_version="v", ttl=None)
    one = pod(driver, config("truncation", zone=50))
    with pytest.raises(TooLarge):
        await one.memory.add_turn(turn(99), turn_id="id99")
    record = await driver.new.load(RECORD)
    assert record is not None
    assert record.tail == tuple(map(entry, (*range(41), 98)))
    await one.memory.close()


@clock.virtually
async def test_a_repeat_beyond_a_limit_is_of_unknown_outcome_if_each_race_to_confirm_it_is_lost() -> None:
    """A load shows it, so it may not be called refused; the new master may lack it, so it is not stored."""
    driver = await two_masters()
    await fail_over(driver)
    one = pod(driver, config("truncation", zone=50))

    async def refuse(_: Key | str) -> None:
        raise LimitReached("conversation_turns", most=41, given=42)

    one.spy.before["append"] = [refuse]
    with pytest.raises(OutcomeUnknown, match=r"memory\.add_turn: a load shows the turn"):
        await one.memory.add_turn(turn(3), turn_id="id3")
    assert one.spy.count("replace") == RACES
    await one.memory.close()


def test_no_pause_after_lost_races_is_longer_than_a_second_however_many_they_were() -> None:
    assert [pause_after(races) for races in (0, 1, 2)] == [0, 0, 0]
    assert all(0.5 <= pause_after(races) <= 1.0 for races in (10, 1_024, 10**6))


@clock.virtually
async def test_a_race_that_is_lost_twice_costs_no_pause() -> None:
    driver = await two_masters()
    one = pod(driver, config("truncation", zone=20))

    async def other_writes(_: Key | str) -> None:
        await leases.rewrite(driver, RECORD)

    one.spy.before["replace"] = [other_writes, other_writes]
    await one.memory.get_llm_context()
    await asyncio.sleep(0.01)
    assert not one.memory.busy
    assert len((await shown(one.memory))["recent"]) == 20
    await one.memory.close()


@clock.virtually
async def test_an_import_into_a_conversation_that_keeps_changing_raises() -> None:
    async with Backend(MemoryDriver(clock=clock.now), close_timeout_s=0) as source:
        memory = source.memory(KEY, config(zone=1), summarizer=LedgerSummarizer())
        await added(memory, *range(3))
        await memory.flush()
        document = await source.sessions.export(KEY)
    driver = await two_masters()
    await fail_over(driver)
    async with Backend(spy := Patient(driver), close_timeout_s=0) as backend:
        with pytest.raises(Unavailable, match="changed each time"):
            await backend.sessions.import_(document, on_conflict="merge")
    assert len(spy.calls) < MOST


@clock.virtually
async def test_a_fold_of_a_log_that_keeps_changing_gives_up() -> None:
    driver = FailingOver(*(MemoryDriver(MemoryStore(), clock=clock.now) for _ in range(2)))
    async with Backend(spy := Patient(driver), close_timeout_s=0) as backend:
        await driver.new.open()
        log = ItemLog(backend.driver, KEY, "langchain")
        await log.add([{"text": "hello"}])
        where = keys.log_key(KEY, "langchain")
        assert await driver.new.replace(where, b"", version="other", expect=ANY, ttl=None)
        driver.writes_to = [driver.new]
        assert not await log.fold()
        assert len(spy.calls) < MOST


@pytest.mark.parametrize("how", ["rotate", "rewrap"])
@clock.virtually
async def test_data_keys_that_keep_changing_raise_and_stay(how: str) -> None:
    driver = FailingOver(*(MemoryDriver(MemoryStore(), clock=clock.now) for _ in range(2)))
    for one in driver.writes_to:
        await one.open()
    owner, spy = Owner("acme", "ada"), Patient(driver)
    wrapping = LocalWrapping({"a": bytes(32), "b": bytes(range(32))}, primary="b")
    await EnvelopeKeys(spy, LocalWrapping({"a": bytes(32)}, primary="a")).primary(owner)
    where = keys.data_keys_key(*owner)
    before = await driver.load(where)
    assert before is not None
    assert await driver.new.replace(where, before.body or b"", version="other", expect=ANY, ttl=None)
    driver.writes_to = [driver.new]
    with pytest.raises(Unavailable, match="changed at each attempt"):
        await getattr(EnvelopeKeys(spy, wrapping), how)(owner)
    assert await driver.load(where) == before
    assert len(spy.calls) < MOST
