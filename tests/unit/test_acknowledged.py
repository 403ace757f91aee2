"""What is acknowledged is as durable as any write, also a repeat that finds its work done already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stm_backends.admin.copying import Copy
from stm_backends.admin.copying import Owner as CopiedOwner
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import LimitReached, OutcomeUnknown
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records import keys
from stm_backends.records.limits import Limits
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.keys import Owner
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey
from tests.support import clock
from tests.support.default_memory import added
from tests.support.replicated import ReplicatedDriver

KEY = MemoryKey("acme", "ada", "chat")


async def unknown(work: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(OutcomeUnknown):
        await work()


@pytest.mark.parametrize("policy", ["truncate_oldest", "error"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_repeated_turn_is_unknown_until_the_replica_has_it(
    policy: str, reads: bool, elsewhere: bool
) -> None:
    store = MemoryStore()
    driver, beside = (ReplicatedDriver(MemoryDriver(store)) for _ in range(2))
    async with Backend(driver, close_timeout_s=0) as here, Backend(beside, close_timeout_s=0) as there:
        settings = config("truncation", overflow_policy=policy)
        memory, other = (backend.memory(KEY, settings) for backend in (here, there))
        await memory.add_turn(turn(0))
        await until(lambda: not memory.busy)
        driver.lags = beside.lags = True
        await unknown(lambda: memory.add_turn(turn(1), turn_id="one"))
        again = other if elsewhere else memory
        for _ in range(2):
            if reads:
                assert (await shown(again))["recent"] == ["u0", "u1"]
            await unknown(lambda: again.add_turn(turn(1), turn_id="one"))
        driver.lags = beside.lags = False
        await again.add_turn(turn(1), turn_id="one")
        assert (await shown(memory))["recent"] == ["u0", "u1"]
        assert keys.memory_key(KEY).scope not in (beside if elsewhere else driver).behind


FULL: dict[str, Any] = {
    "zone": 1,
    "retry_attempts": 0,
    "degraded_retry_interval_s": 1e6,
    "recovery_backlog_limit": 99,
}


async def down(_: object) -> None:
    raise RuntimeError("the model is down")


async def fill(memory: DistributedShortTermMemory) -> int:
    """Fill a record until a turn costs another; returns how many were added."""
    count = 0
    while not memory.stats.dropped:
        await memory.add_turn(turn(count, "x" * 700), turn_id=f"id{count}")
        count += 1
    return count


@clock.virtually
async def test_a_repeat_in_a_full_record_costs_no_turn_and_is_confirmed() -> None:
    driver = ReplicatedDriver(MemoryDriver(clock=clock.now, max_record_bytes=12_000))
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config(**FULL), summarizer=down)
        await fill(memory)
        driver.lags = {keys.memory_key(KEY).scope}
        # Each stores further copies, until there is no room for one.
        for _ in range(20):
            await unknown(lambda: memory.add_turn(turn("last"), turn_id="last"))
        before = len(await memory.turns()), memory.stats.dropped
        driver.lags = False
        await memory.add_turn(turn("last"), turn_id="last")
        assert keys.memory_key(KEY).scope not in driver.behind
        assert (len(await memory.turns()), memory.stats.dropped) == before


@pytest.mark.parametrize("confirms", [True, False])
@clock.virtually
async def test_a_repeat_by_another_process_costs_no_turn_of_a_full_record(*, confirms: bool) -> None:
    driver = MemoryDriver(clock=clock.now, max_record_bytes=12_000)
    async with Backend(ReplicatedDriver(driver) if confirms else driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config(**FULL), summarizer=down)
        last = await fill(memory) - 1
        left = await memory.turns()
        for _ in range(5):
            # A process that has never seen the conversation.
            other = DistributedShortTermMemory(backend.driver, KEY, config(**FULL), summarizer=down)
            await other.add_turn(turn(last, "x" * 700), turn_id=f"id{last}")
            await other.close()
        assert await memory.turns() == left


@pytest.mark.parametrize("confirms", [True, False])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("number", [0, 4])
async def test_a_limit_refuses_no_repeat(*, confirms: bool, reads: bool, number: int) -> None:
    """Whether the turn is in the record or has been folded."""
    limits, store = Limits(conversation_turns=3), MemoryStore()
    here, there = (
        Backend(ReplicatedDriver(one) if confirms else one, close_timeout_s=0, limits=limits)
        for one in (MemoryDriver(store), MemoryDriver(store))
    )
    async with here, there:
        settings = config(zone=1, fold_batch_turns=3)
        memory, other = (one.memory(KEY, settings, summarizer=LedgerSummarizer()) for one in (here, there))
        for each in range(3):
            await memory.add_turn(turn(each), turn_id=f"id{each}")
        await memory.flush()
        for each in (3, 4):
            await memory.add_turn(turn(each), turn_id=f"id{each}")
        if reads:
            await other.get_llm_context()
        await other.add_turn(turn(number), turn_id=f"id{number}")
        with pytest.raises(LimitReached):
            await other.add_turn(turn(5), turn_id="id5")
        assert await shown(memory) == {"summary": ["u0", "u1"], "pending": ["u2", "u3"], "recent": ["u4"]}


async def test_a_user_counts_as_listed_once_the_replica_has_the_entry() -> None:
    store = MemoryStore()
    driver, beside = (ReplicatedDriver(MemoryDriver(store)) for _ in range(2))
    driver.lags = True
    scope = keys.directory_scope("acme")
    async with Backend(driver, close_timeout_s=0) as here, Backend(beside, close_timeout_s=0) as there:
        await unknown(lambda: here.memory(KEY, config("truncation")).add_turn(turn(0)))
        assert (await driver.scan(scope, limit=9)).names
        beside.behind, beside.lags = {scope}, True
        await unknown(lambda: there.memory(KEY, config("truncation")).add_turn(turn(1)))
        beside.lags = False
        await there.memory(KEY, config("truncation")).add_turn(turn(1))
    assert not beside.behind


async def test_a_turn_that_was_acknowledged_is_not_written_again() -> None:
    driver = ReplicatedDriver()
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config("truncation"))
        await memory.add_turn(turn(1), turn_id="one")
        await until(lambda: not memory.busy)
        await memory.get_llm_context()
        driver.lags = True
        await memory.add_turn(turn(1), turn_id="one")
        record = await driver.load(keys.memory_key(KEY))
        assert record is not None
        assert len(record.tail) == 1


async def test_a_repeat_of_a_turn_that_was_folded_is_not_estimated_again() -> None:
    driver = ReplicatedDriver()
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config(zone=1), summarizer=LedgerSummarizer())
        driver.lags = {keys.memory_key(KEY).scope}
        await unknown(lambda: memory.add_turn(turn(0, "x" * 400), turn_id="zero"))
        driver.lags = False
        await added(memory, 1, 2)
        await memory.flush()
        await memory.get_llm_context()
        before = memory.estimate_tokens()
        await memory.add_turn(turn(0, "x" * 400), turn_id="zero")
        assert memory.estimate_tokens() == before
        assert (await shown(memory))["recent"] == ["u2"]


@pytest.mark.parametrize("what", [("acme",), ("acme", "ada"), ("acme", "ada", "chat")])
async def test_a_repeated_erasure_is_unknown_until_the_replica_has_it(what: tuple[str, ...]) -> None:
    driver = ReplicatedDriver()
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config("truncation"))
        await memory.add_turn(turn(0))
        await backend.state_store.save_memory_state(f"kv:v1:{KEY.composite()}:notes", {})
        await memory.close(timeout=5)
        driver.lags = True
        # Each attempt erases one thing more, and gets no confirmation from the replica.
        for _ in range(20):
            await unknown(lambda: backend.sessions.erase_with_receipt(*what))
        driver.lags = False
        receipt = await backend.sessions.erase_with_receipt(*what)
        assert receipt.found == {}
        assert driver.behind == set()


async def test_a_copy_fails_until_the_replica_has_it() -> None:
    source, target = MemoryDriver(), ReplicatedDriver()
    await source.open()
    await target.open()
    where = keys.memory_key(KEY)
    for entry in (b"a", b"b"):
        await source.append(where, entry, initial_version="v", ttl=None)
    await source.replace(where, b"body", version="w", expect="v", ttl=None)

    async def copied() -> bool:
        copy = Copy(source, target, [CopiedOwner("acme", "ada")])
        try:
            await copy.copy()
        except OutcomeUnknown:
            return False
        return not copy.tally.get("failed")

    target.lags = {where.scope}
    for _ in range(4):
        assert not await copied()
    assert (await target.load(where)) == (await source.load(where))
    target.lags = False
    assert await copied()
    # What the last pass did is confirmed, although it wrote nothing.
    assert where.scope not in target.behind


async def test_a_repeated_import_is_unknown_until_the_replica_has_it() -> None:
    driver = ReplicatedDriver()
    async with Backend(driver, close_timeout_s=0) as backend:
        memory = backend.memory(KEY, config("truncation"))
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.close(timeout=5)
        document = await backend.sessions.export(KEY)
        await backend.sessions.erase_with_receipt("acme", "ada", "chat")
        driver.lags = True
        # Each attempt stores one thing more, and gets no confirmation from the replica.
        for _ in range(10):
            await unknown(lambda: backend.sessions.import_(document, on_conflict="merge"))
        driver.lags = False
        await backend.sessions.import_(document, on_conflict="merge")
        assert keys.memory_key(KEY).scope not in driver.behind


@pytest.mark.parametrize("user", ["", "ada"])
async def test_a_repeated_erasure_of_data_keys_is_confirmed_too(user: str) -> None:
    driver = ReplicatedDriver()
    await driver.open()
    wrapped = EnvelopeKeys(driver, LocalWrapping({"w": bytes(32)}, primary="w"))
    await wrapped.primary(Owner("acme", "ada"))
    driver.lags = True
    for _ in range(3):
        await unknown(lambda: wrapped.erase(Owner("acme", user)))
    driver.lags = False
    await wrapped.erase(Owner("acme", user))
    assert driver.behind == set()
    assert await wrapped.erase(Owner("acme", user)) == 0
