"""Data keys per owner: created once, bound to their owner, rotated, erased, and never used after that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Key, Record, new_version
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Corrupt, OutcomeUnknown, Unavailable
from stm_backends.records.codec import Codec
from stm_backends.records.keys import data_keys_key
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import Owner, Sealing
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing import FakeClock

ADA, BOB, ACME = Owner("acme", "ada"), Owner("acme", "bob"), Owner("acme", "")


class World:
    """One store of keys and the processes that use it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()

    async def process(self, **options: Any) -> EnvelopeKeys:
        driver = MemoryDriver(self.store)
        await driver.open()
        wrapping = LocalWrapping({"w1": bytes(32)}, primary="w1")
        return EnvelopeKeys(driver, options.pop("wrapping", wrapping), clock=self.clock, **options)


async def test_processes_that_start_together_agree_on_the_first_key() -> None:
    world = World()
    processes = [await world.process() for _ in range(8)]
    keys = await asyncio.gather(*(one.primary(ADA) for one in processes))
    assert len(set(keys)) == 1
    assert len(keys[0].secret) == 32


async def test_each_owner_has_keys_of_its_own() -> None:
    keys = await World().process()
    secrets = {(await keys.primary(owner)).secret for owner in (ADA, BOB, ACME, Owner("", ""))}
    assert len(secrets) == 4


async def test_keys_per_tenant_are_shared_by_its_users() -> None:
    keys = await World().process(per="tenant")
    assert await keys.primary(ADA) == await keys.primary(BOB) == await keys.primary(ACME)
    await keys.erase(ADA)
    assert await keys.primary(ADA) == await keys.primary(BOB)


async def test_a_rotated_key_is_found_by_processes_that_know_older_ones() -> None:
    world = World()
    one, two = await world.process(), await world.process()
    first = await one.primary(ADA)
    assert await two.primary(ADA) == first
    added = await two.rotate(ADA)
    second = await two.primary(ADA)
    assert second.id == added != first.id
    assert await one.primary(ADA) == first  # for as long as keys are remembered
    assert await one.key(ADA, added) == second
    assert await two.key(ADA, first.id) == first


async def test_rotations_at_the_same_time_keep_all_keys() -> None:
    world = World()
    processes = [await world.process() for _ in range(4)]
    await processes[0].primary(ADA)
    added = await asyncio.gather(*(one.rotate(ADA) for one in processes))
    reader = await world.process()
    assert len({(await reader.key(ADA, key_id)).secret for key_id in added}) == 4


W1, W2 = bytes(32), bytes(range(32))


async def test_rewrapped_keys_need_the_new_wrapping_key_only() -> None:
    world = World()
    before = await world.process(wrapping=LocalWrapping({"w1": W1}, primary="w1"))
    ids = [(await before.primary(ADA)).id, await before.rotate(ADA)]
    keys = {key_id: await before.key(ADA, key_id) for key_id in ids}
    both = await world.process(wrapping=LocalWrapping({"w1": W1, "w2": W2}, primary="w2"))
    assert await both.rewrap(ADA) == 2
    assert await both.rewrap(ADA) == 0
    assert await both.rewrap(BOB) == 0
    after = await world.process(wrapping=LocalWrapping({"w2": W2}, primary="w2"))
    assert {key_id: await after.key(ADA, key_id) for key_id in ids} == keys
    assert (await after.primary(ADA)).id == ids[1]
    with pytest.raises(Corrupt):
        await (await world.process(wrapping=LocalWrapping({"w1": W1}, primary="w1"))).primary(ADA)


async def test_a_key_added_while_keys_are_rewrapped_is_kept() -> None:
    world = World()
    before = await world.process(wrapping=LocalWrapping({"w1": W1}, primary="w1"))
    first = await before.primary(ADA)
    added: list[str] = []

    class Slow(LocalWrapping):
        async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
            if not added:
                added.append(await before.rotate(ADA))
            return await super().wrap(secret, owner, key_id)

    assert await (await world.process(wrapping=Slow({"w1": W1, "w2": W2}, primary="w2"))).rewrap(ADA) == 2
    after = await world.process(wrapping=LocalWrapping({"w2": W2}, primary="w2"))
    assert (await after.primary(ADA)).id == added[0]
    assert await after.key(ADA, first.id) == first


async def test_keys_erased_while_they_are_rewrapped_stay_erased() -> None:
    world = World()
    before = await world.process(wrapping=LocalWrapping({"w1": W1}, primary="w1"))
    await before.primary(ADA)

    class Slow(LocalWrapping):
        async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
            await before.erase(ADA)
            return await super().wrap(secret, owner, key_id)

    keys = await world.process(wrapping=Slow({"w1": W1, "w2": W2}, primary="w2"))
    assert await keys.rewrap(ADA) == 0
    driver = MemoryDriver(world.store)
    await driver.open()
    assert await driver.load(data_keys_key(*ADA)) is None


async def test_damaged_stored_keys_are_corrupt() -> None:
    world = World()
    keys = await world.process()
    driver = MemoryDriver(world.store)
    await driver.open()
    damaged: tuple[dict[str, Any], ...] = (
        {"primary": "a", "keys": {"a": "é"}},
        {"primary": "a", "keys": []},
        {"keys": {}},
    )
    for content in damaged:
        body = Codec().seal("keys", content)
        await driver.replace(data_keys_key(*ADA), body, version=new_version(), expect=ANY, ttl=None)
        with pytest.raises(Corrupt, match="data keys"):
            await keys.primary(ADA)


async def test_erased_keys_are_gone_everywhere_after_their_lifetime() -> None:
    world = World()
    one, two = await world.process(lifetime_s=60), await world.process(lifetime_s=60)
    key = await one.primary(ADA)
    await two.key(ADA, key.id)
    await one.erase(ADA)
    with pytest.raises(Corrupt, match="erased"):
        await one.key(ADA, key.id)
    await world.clock.pass_time(61)
    with pytest.raises(Corrupt, match="erased"):
        await two.key(ADA, key.id)
    assert (await two.primary(ADA)).secret != key.secret


@pytest.mark.parametrize("moment", ["before the deletion", "answered after it"])
async def test_a_key_read_during_its_erasure_is_not_remembered(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    keys = await world.process()
    key = await keys.primary(ADA)
    store = MemoryDriver(world.store)
    await store.open()
    monkeypatch.setattr(keys, "_store", store)
    load, delete = store.load, store.delete
    loaded, erased = asyncio.Event(), asyncio.Event()

    async def late(where: Key) -> Any:
        record = await load(where)
        loaded.set()
        await erased.wait()
        return record

    async def meanwhile(where: Key, **options: Any) -> bool:
        if moment == "before the deletion":
            await keys.primary(ADA)
        return await delete(where, **options)

    reading = None
    if moment == "answered after it":
        await world.clock.pass_time(301)
        monkeypatch.setattr(store, "load", late)
        reading = asyncio.create_task(keys.primary(ADA))
        await loaded.wait()
        monkeypatch.setattr(store, "load", load)
    monkeypatch.setattr(store, "delete", meanwhile)
    assert await keys.erase(ADA)
    erased.set()
    if reading is not None:
        await reading
    with pytest.raises(Corrupt, match="erased"):
        await keys.key(ADA, key.id)


@pytest.mark.parametrize("lost", [1, 9])
async def test_an_erasure_of_keys_with_a_lost_answer_is_retried(lost: int) -> None:
    class Losing(MemoryDriver):
        answers = 0

        async def delete(self, key: Key, **options: Any) -> bool:
            self.answers += 1
            if self.answers <= lost:
                raise OutcomeUnknown("lost")
            return await super().delete(key, **options)

    driver = Losing()
    await driver.open()
    keys = EnvelopeKeys(driver, LocalWrapping({"w1": bytes(32)}, primary="w1"))
    await keys.primary(ADA)
    if lost > 3:
        with pytest.raises(OutcomeUnknown):
            await keys.erase(ADA)
    else:
        assert await keys.erase(ADA)
        assert await driver.load(data_keys_key(*ADA)) is None


async def test_a_wrapped_key_cannot_be_moved_to_another_owner() -> None:
    world = World()
    keys = await world.process()
    await keys.primary(ADA)
    driver = MemoryDriver(world.store)
    await driver.open()
    record = await driver.load(data_keys_key(*ADA))
    assert record is not None
    assert record.body is not None
    await driver.replace(data_keys_key(*BOB), record.body, version="v", expect=ABSENT, ttl=None)
    with pytest.raises(Corrupt):
        await (await world.process()).primary(BOB)


@pytest.mark.parametrize("error", [Unavailable("down"), OutcomeUnknown("lost")])
async def test_an_outage_of_the_store_is_unavailable(error: Exception) -> None:
    class Down(MemoryDriver):
        async def load(self, key: Key) -> Any:
            raise error

    driver = Down()
    await driver.open()
    keys = EnvelopeKeys(driver, LocalWrapping({"w1": bytes(32)}, primary="w1"))
    with pytest.raises(Unavailable, match="store of the data keys"):
        await keys.primary(ADA)


async def test_erasing_a_tenant_erases_the_keys_of_all_its_users() -> None:
    world = World()
    keys, other = await world.process(), await world.process()
    others = (Owner("acme:", "ada"), Owner("acm", "ada"), Owner("acme2", ""), Owner("", ""))
    ids = {owner: (await keys.primary(owner)).id for owner in (ADA, BOB, ACME, *others)}
    assert await keys.erase(ACME) == 3
    for process in (keys, other):
        for owner in (ADA, BOB, ACME):
            with pytest.raises(Corrupt, match="erased"):
                await process.key(owner, ids[owner])
        for owner in others:
            assert (await process.key(owner, ids[owner])).id == ids[owner]
    assert await keys.erase(ACME) == 0


async def test_a_user_whose_keys_are_erased_cannot_be_read_from_a_restored_backup() -> None:
    world, data = World(), MemoryStore()
    keys = await world.process()
    inner = MemoryDriver(data)
    driver = SealedDriver(inner, Sealing(keys), clear_met=lambda: None)
    await driver.open()
    ada, bob = Key("acme:ada:memory", "chat"), Key("acme:bob:memory", "chat")
    for key in (ada, bob):
        await driver.append(key, b"secret", initial_version="v", ttl=None)
    backup = await inner.load(ada)
    assert backup is not None
    await driver.delete(ada)
    await keys.erase(ADA)
    await inner.append(ada, backup.tail[0], initial_version="v", ttl=None)
    with pytest.raises(Corrupt, match="erased"):
        await driver.load(ada)
    record = await driver.load(bob)
    assert record is not None
    assert record.tail == (b"secret",)


async def test_an_outage_of_the_key_service_is_met_once_by_all_who_wait() -> None:
    class Hanging(LocalWrapping):
        calls, up = 0, False

        async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
            if not self.up:
                self.calls += 1
                await asyncio.sleep(0)
                raise Unavailable("no answer in time")
            return await super().wrap(secret, owner, key_id)

    service = Hanging({"w1": W1}, primary="w1")
    keys = await World().process(wrapping=service, per="tenant")
    users = [keys.primary(Owner("acme", f"user{number}")) for number in range(20)]
    failed = await asyncio.gather(*users, return_exceptions=True)
    assert {type(one) for one in failed} == {Unavailable}
    assert service.calls == 1
    service.up = True
    assert len((await keys.primary(ADA)).secret) == 32


async def test_a_first_key_that_is_made_during_an_erasure_is_not_deleted_without_a_note() -> None:
    world = World()
    other, made = await world.process(), list[str]()

    class Slow(MemoryDriver):
        async def load(self, key: Key) -> Record | None:
            record = await super().load(key)
            if key == data_keys_key(*ADA) and not made:
                made.append((await other.primary(ADA)).id)
            return record

    driver = Slow(world.store)
    await driver.open()
    assert await EnvelopeKeys(driver, LocalWrapping({"w1": W1}, primary="w1")).erase(ADA) == 0
    await other.reread(ADA)
    assert (await other.primary(ADA)).id == made[0]
