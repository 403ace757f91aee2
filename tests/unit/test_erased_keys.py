"""Writes of a process that still has a data key which another process has erased: none becomes unreadable."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import KeyErased, KeyMismatch, OutcomeUnknown
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import DataKey, Owner, Sealing, StaticKeys
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing.workbench.spy import SpyDriver
from tests.support.sealed import sealed

ADA = Owner("acme", "ada")
CHAT = Key("acme:ada:memory", "chat")


class World:
    """One datastore, one store of keys, and the processes that use both."""

    def __init__(self) -> None:
        self.data, self.store = MemoryStore(), MemoryStore()
        self.spy = SpyDriver(MemoryDriver(self.store))

    async def process(self, inner: Any = None) -> tuple[SealedDriver, EnvelopeKeys]:
        keys = EnvelopeKeys(self.spy, LocalWrapping({"w1": bytes(32)}, primary="w1"), owns_store=True)
        driver = sealed(inner or MemoryDriver(self.data), Sealing(keys))
        await driver.open()
        return driver, keys

    async def read(self) -> tuple[bytes | None, tuple[bytes, ...]]:
        """Return the record as a process reads it that knows nothing."""
        driver, _ = await self.process()
        record = await driver.load(CHAT)
        assert record is not None
        return record.body, record.tail


async def add(driver: SealedDriver, entry: bytes, key: Key = CHAT) -> int:
    return await driver.append(key, entry, initial_version="v", ttl=None)


async def erase(driver: SealedDriver, keys: EnvelopeKeys) -> None:
    await driver.delete(CHAT)
    await keys.erase(ADA)


async def test_an_append_that_creates_a_record_after_an_erasure_is_readable() -> None:
    world = World()
    (stale, _), (eraser, keys) = await world.process(), await world.process()
    await add(stale, b"old")
    await erase(eraser, keys)
    assert await add(stale, b"new") == 1
    assert await world.read() == (None, (b"new",))
    assert await add(eraser, b"more") == 2
    assert await world.read() == (None, (b"new", b"more"))


async def test_an_append_to_a_record_made_after_an_erasure_is_readable() -> None:
    world = World()
    (stale, stale_keys), (eraser, keys) = await world.process(), await world.process()
    await add(stale, b"old", Key("acme:ada:memory", "another"))
    await erase(eraser, keys)
    assert await add(eraser, b"one") == 1
    assert await add(stale, b"two") == 2
    assert await add(eraser, b"three") == 3
    assert await world.read() == (None, (b"one", b"two", b"three"))
    assert await stale_keys.primary(ADA) == await keys.primary(ADA)


async def test_an_append_after_more_turns_than_before_the_erasure_is_readable() -> None:
    world = World()
    (stale, _), (eraser, keys) = await world.process(), await world.process()
    await add(stale, b"old")
    await erase(eraser, keys)
    await add(eraser, b"one")
    await add(eraser, b"two")
    assert await add(stale, b"three") == 3
    assert await world.read() == (None, (b"one", b"two", b"three"))


@pytest.mark.parametrize("expect", [ANY, ABSENT])
async def test_a_body_stored_after_an_erasure_is_readable(expect: Any) -> None:
    world = World()
    (stale, _), (eraser, keys) = await world.process(), await world.process()
    await add(stale, b"old")
    await erase(eraser, keys)
    assert await stale.replace(CHAT, b"state", version="v2", expect=expect, ttl=None)
    await add(eraser, b"one")
    assert await world.read() == (b"state", (b"one",))


@pytest.mark.parametrize("operation", ["append", "replace"])
async def test_a_write_whose_answer_was_lost_after_an_erasure_is_readable(operation: str) -> None:
    class Losing(MemoryDriver):
        lose = False

        async def append(self, key: Key, entry: bytes, **options: Any) -> int:
            return self.answer("append", await super().append(key, entry, **options))

        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            return self.answer("replace", await super().replace(key, body, **options))

        def answer(self, operation: str, answer: Any) -> Any:
            if self.lose:
                self.lose = False
                raise OutcomeUnknown("lost", operation=operation)
            return answer

    world = World()
    inner = Losing(world.data)
    (stale, _), (eraser, keys) = await world.process(inner), await world.process()
    await add(stale, b"old")
    await erase(eraser, keys)
    inner.lose = True
    if operation == "append":
        with pytest.raises(OutcomeUnknown):
            await add(stale, b"new")
        assert await add(stale, b"new") == 2
        assert await world.read() == (None, (b"new", b"new"))
        return
    with pytest.raises(OutcomeUnknown):
        await stale.replace(CHAT, b"state", version="v2", expect=ANY, ttl=None)
    assert await stale.replace(CHAT, b"state", version="v2", expect=ANY, ttl=None)
    assert await world.read() == (b"state", ())


async def test_values_in_doubt_of_one_record_take_bounded_memory() -> None:
    class Silent(MemoryDriver):
        async def append(self, key: Key, entry: bytes, **options: Any) -> int:
            raise OutcomeUnknown("lost", operation="append")

    driver, _ = await World().process(Silent(MemoryStore()))
    size, kept = 100_000, list[int]()
    tracemalloc.start()
    try:
        for _ in range(2):
            for number in range(40):
                with pytest.raises(OutcomeUnknown):
                    await add(driver, number.to_bytes(2) * (size // 2))
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[1] - kept[0] < 10 * size


async def test_an_append_whose_key_cannot_be_confirmed_is_in_doubt() -> None:
    world = World()
    (stale, stale_keys), (eraser, keys) = await world.process(), await world.process()
    await add(stale, b"old")
    await erase(eraser, keys)
    load = world.spy.load

    async def down(key: Key) -> Any:
        raise OutcomeUnknown("down")

    world.spy.load = down  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown, match="data key that was erased"):
        await add(stale, b"new")
    # What this process remembers still serves conversations that it knows.
    assert (await stale_keys.primary(ADA)).id
    world.spy.load = load  # type: ignore[method-assign]
    assert await add(stale, b"new") == 2
    assert await world.read() == (None, (b"new", b"new"))


async def test_turns_in_steady_state_do_not_read_the_keys_again() -> None:
    world = World()
    driver, _ = await world.process()
    await add(driver, b"0")
    await add(driver, b"1")
    reads = world.spy.count("load", "keys")
    for number in range(2, 20):
        await driver.load(CHAT)
        assert await add(driver, b"x") == number + 1
    assert world.spy.count("load", "keys") == reads


async def test_keys_of_the_process_are_never_read_again() -> None:
    spy = SpyDriver(MemoryDriver())
    driver = sealed(spy, Sealing(StaticKeys({"k1": bytes(32)}, primary="k1")))
    await driver.open()
    assert await add(driver, b"one") == 1
    assert spy.calls == [("append", "memory")]


# The store of the keys


class Counting(LocalWrapping):
    """A key service that counts its calls."""

    def __init__(self) -> None:
        super().__init__({"w1": bytes(32)}, primary="w1")
        self.calls: list[str] = []

    async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
        self.calls.append("wrap")
        await asyncio.sleep(0)
        return await super().wrap(secret, owner, key_id)

    async def unwrap(self, wrapped: bytes, owner: Owner, key_id: str) -> bytes:
        self.calls.append("unwrap")
        await asyncio.sleep(0)
        return await super().unwrap(wrapped, owner, key_id)


async def test_concurrent_calls_for_an_owner_ask_the_key_service_once() -> None:
    store, service = MemoryStore(), Counting()
    driver = MemoryDriver(store)
    await driver.open()
    keys = EnvelopeKeys(driver, service)
    found = await asyncio.gather(*(keys.primary(ADA) for _ in range(50)))
    assert (len(set(found)), service.calls) == (1, ["wrap"])
    other = EnvelopeKeys(driver, service)
    read: list[DataKey] = await asyncio.gather(*(other.key(ADA, found[0].id) for _ in range(50)))
    assert (set(read), service.calls) == (set(found), ["wrap", "unwrap"])


async def test_a_cancelled_call_leaves_the_key_service_to_the_others() -> None:
    driver, service = MemoryDriver(), Counting()
    await driver.open()
    keys = EnvelopeKeys(driver, service)
    first, second = (asyncio.create_task(keys.primary(ADA)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).id == (await keys.primary(ADA)).id


async def test_an_erased_key_and_a_key_that_was_never_there_differ() -> None:
    driver = MemoryDriver()
    await driver.open()
    keys = EnvelopeKeys(driver, LocalWrapping({"w1": bytes(32)}, primary="w1"))
    ids = [(await keys.primary(ADA)).id, await keys.rotate(ADA)]
    await keys.erase(ADA)
    for key_id in ids:
        with pytest.raises(KeyErased):
            await keys.key(ADA, key_id)
    with pytest.raises(KeyMismatch, match="another store"):
        await keys.key(ADA, "never")


async def test_the_note_of_an_erased_key_names_no_owner() -> None:
    driver = MemoryDriver(store := MemoryStore())
    await driver.open()
    keys = EnvelopeKeys(driver, LocalWrapping({"w1": bytes(32)}, primary="w1"))
    await keys.primary(ADA)
    await keys.erase(ADA)
    assert b"ada" not in repr([*store.scopes.items()]).encode()
    left = [name for scope in store.scopes.values() for name in scope.records]
    assert all("ada" not in name for name in left)
