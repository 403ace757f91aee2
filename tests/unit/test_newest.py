"""Loads of the newest entries through the drivers around a driver, and drivers that cannot do that."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends import ConversationTurn, ExtractiveSummarizer, Limits, MemoryHealth, MemoryKey
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import WrapperDriver, with_last
from stm_backends.errors import LimitReached
from stm_backends.history import items
from stm_backends.records import keys
from stm_backends.records.large.driver import LargeEntries
from stm_backends.testing.workbench.drivers import names_in
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.types import ShortTermMemoryConfig

ADA = MemoryKey("acme", "ada", "one")
LOG = keys.log_key(ADA, "langchain")


class Older(MemoryDriver):
    """A driver from before loads could ask for the newest entries."""

    async def load(self, key: Key) -> Record | None:  # type: ignore[override]
        return await super().load(key)


class Counting(MemoryDriver):
    """Notes how many entries each load returns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read: list[int] = []

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        record = await super().load(key, last=last)
        if record is not None:
            self.read.append(len(record.tail))
        return record


async def filled(driver: Driver, count: int = 5, size: int = 1) -> Key:
    await driver.open()
    for number in range(count):
        await driver.append(LOG, b"%d" % number * size, initial_version="v", ttl=None)
    return LOG


def test_a_driver_is_asked_once_whether_it_takes_the_parameter() -> None:
    assert isinstance(with_last(MemoryDriver()), MemoryDriver)
    older = Older()
    assert with_last(older) is not older
    assert with_last(with_last(older)) is not older
    assert SpyDriver(older).inner is not older
    assert with_last(SpyDriver(older)).inner.inner is older


@pytest.mark.parametrize(
    "kind", [with_last, SpyDriver, LargeEntries, lambda older: SpyDriver(SpyDriver(older))]
)
async def test_a_driver_without_the_parameter_is_loaded_whole_and_cut(kind: Any) -> None:
    driver = kind(Older())
    key = await filled(driver)
    assert await driver.load(key, last=2) == Record("v", None, (b"3", b"4"), skipped=3)
    assert await driver.load(key, last=0) == Record("v", None, (), skipped=5)
    assert await driver.load(key, last=9) == await driver.load(key)
    assert await driver.load(Key("other", "other"), last=1) is None
    with pytest.raises(ValueError, match="last"):
        await driver.load(key, last=-1)


async def test_a_backend_on_a_driver_without_the_parameter_works() -> None:
    async with Backend(Older(), limits=Limits(user_conversations=10)) as backend:
        log = backend.item_log(ADA, "langchain")
        for number in range(100):
            await log.add([{"n": number}])
        assert await log.items(2) == [{"n": 98}, {"n": 99}]


async def test_a_wrapper_of_a_user_without_the_parameter_works() -> None:
    class Shouting(WrapperDriver):
        async def load(self, key: Key) -> Record | None:  # type: ignore[override]
            record = await super().load(key)
            return record and Record(record.version, record.body, tuple(e.upper() for e in record.tail))

    driver = LargeEntries(Shouting(MemoryDriver()))
    await driver.open()
    for entry in (b"a", b"b"):
        await driver.append(LOG, entry, initial_version="v", ttl=None)
    assert await driver.load(LOG, last=1) == Record("v", None, (b"B",), skipped=1)


async def test_a_length_counts_what_was_skipped() -> None:
    driver = MemoryDriver()
    key = await filled(driver)
    for last in (None, 0, 2, 9):
        record = await driver.load(key, last=last)
        assert record is not None
        assert record.length == 5


async def test_limits_hold_after_a_load_of_the_newest_entries() -> None:
    async with Backend(MemoryDriver(), limits=Limits(conversation_bytes=1_000)) as backend:
        log = backend.item_log(ADA, "langchain")
        await log.add([{"text": "x" * 800}])
        for _ in range(3):
            assert len(await log.items(1)) == 1
            await backend.driver.load(LOG, last=0)
            with pytest.raises(LimitReached):
                await log.add([{"text": "x" * 800}])


async def test_a_load_of_the_newest_reads_no_parts_of_older_values() -> None:
    store = MemoryStore()
    inner = Counting(store, max_entry_bytes=64_000, max_record_bytes=100_000)
    await filled(LargeEntries(inner), size=100_000)
    driver = LargeEntries(inner)
    inner.read.clear()
    assert await driver.load(LOG, last=1) == Record("v", None, (b"4" * 100_000,), skipped=4)
    parts = len(await names_in(inner, keys.parts_of(LOG).scope))
    assert inner.read == [1, *[0] * (parts // 5)]


async def test_a_fold_after_a_load_of_the_newest_removes_all_its_parts() -> None:
    inner = MemoryDriver(max_entry_bytes=64_000, max_record_bytes=100_000)
    driver = LargeEntries(inner, clock=lambda: clock[0], steady=lambda: clock[0])
    clock = [1_000_000.0]
    await filled(driver, size=100_000)
    assert await driver.load(LOG) is not None
    assert await driver.load(LOG, last=1) is not None
    clock[0] += 100_000.0
    assert await driver.replace(LOG, b"", version="v2", expect="v", drop=5, ttl=None)
    assert await names_in(inner, keys.parts_of(LOG).scope) == []


async def test_a_listing_of_degraded_conversations_reads_no_turn_of_others() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as backend:
        memory = backend.memory(
            ADA, ShortTermMemoryConfig(strategy="rolling_summary"), summarizer=ExtractiveSummarizer()
        )
        for number in range(3):
            await memory.add_turn(ConversationTurn(f"question {number}", "answer"))
    inner = Counting(store)
    async with Backend(inner) as backend:
        found = backend.stats.conversations("acme", "ada", health=MemoryHealth.DEGRADED)
        assert [one async for one in found] == []
        assert inner.read == [0]
        found = backend.stats.conversations("acme", "ada", health=MemoryHealth.HEALTHY)
        assert [one.turns async for one in found] == [3]


async def test_the_newest_items_of_a_log_come_with_the_moment_they_show() -> None:
    driver = Counting()
    async with Backend(driver) as backend:
        log = backend.item_log(ADA, "google-adk")
        empty = await log.newest(0)
        assert (empty.items, empty.tip, empty.exists) == ((), "", False)
        tip: str | None = ""
        for number in range(300):
            tip = await log.add_after(tip or "", [{"n": number}])
        driver.read.clear()
        nothing = await log.newest(0)
        assert (nothing.items, nothing.tip, nothing.exists) == ((), tip, True)
        assert driver.read == [0]
        few = await log.newest(3)
        assert ([item["n"] for item in few.items], few.tip) == ([297, 298, 299], tip)
        assert sum(driver.read) <= 3 + items.MARGIN
        whole = await log.newest(1_000)
        assert ([item["n"] for item in whole.items], whole.tip) == ([*range(300)], tip)
        assert (await log.read()).tip == tip
        # What is refused moves the moment, and adds nothing.
        assert await log.add_after("", [{"n": -1}]) is None
        after = await log.newest(1)
        assert (after.items, after.exists) == (({"n": 299},), True)
        assert after.tip == (await log.read()).tip != tip
