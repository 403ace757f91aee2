"""Resealing one record: all its values get the primary key, and no concurrent write is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Corrupt, OutcomeUnknown, TooLarge, Unavailable
from stm_backends.races import CONTENDED
from stm_backends.records.keys import data_keys_key
from stm_backends.sealing.cipher import MAGIC, key_id_of
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.driver import Resealed, SealedDriver
from stm_backends.sealing.keys import DataKey, Owner, Sealing, StaticKeys
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing import FakeClock
from tests.support import clock
from tests.support.sealed import sealed

KEY = Key("acme:ada:memory", "trip")
OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BEFORE = StaticKeys({"k1": OLD}, primary="k1")
ROTATED = StaticKeys({"k1": OLD, "k2": NEW}, primary="k2")
AFTER = StaticKeys({"k2": NEW}, primary="k2")


class Interrupted(MemoryDriver):
    """A driver that does something else just before the next conditional write, and counts its writes."""

    def __init__(self, store: MemoryStore, **options: Any) -> None:
        super().__init__(store, **options)
        self.between: list[Callable[[], Awaitable[object]]] = []
        self.lost_answers = 0
        self.writes = 0

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        self.writes += 1
        if self.between:
            await self.between.pop(0)()
        done = await super().replace(key, body, **options)
        if self.lost_answers:
            self.lost_answers -= 1
            raise OutcomeUnknown("the answer was lost")
        return done


class World:
    """One datastore, and the processes that use it, each with its own keys."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.raw = Interrupted(MemoryStore(), clock=self.clock, **options)

    def process(self, keys: Any, *, accept_clear: bool = False) -> SealedDriver:
        return sealed(self.raw, Sealing(keys, accept_clear=accept_clear))

    async def key_ids(self) -> set[str | None]:
        """Return the ids of the keys that the stored values need."""
        record = await self.raw.load(KEY)
        assert record is not None
        body = (record.body or b"").replace(b"stm/2 absent ", MAGIC, 1)
        return {key_id_of(value) for value in ([body] if body else []) + [*record.tail]}


async def new_world() -> World:
    made = World()
    await made.raw.open()
    return made


@pytest.fixture
async def world() -> World:
    return await new_world()


async def fill(driver: SealedDriver, *entries: bytes, body: bytes | None = b"summary") -> Record:
    if body is not None:
        await driver.replace(KEY, body, version="v1", expect=ABSENT, ttl=60)
    for entry in entries:
        await driver.append(KEY, entry, initial_version="v0", ttl=60)
    record = await driver.load(KEY)
    assert record is not None
    return record


@pytest.mark.parametrize("body", [b"summary", b"", None])
async def test_resealing_changes_the_key_of_all_values_and_no_value(world: World, body: bytes | None) -> None:
    before = await fill(world.process(BEFORE), b"one", b"", b"three", body=body)
    rotated = world.process(ROTATED)
    await rotated.append(KEY, b"four", initial_version="v0", ttl=60)
    assert await rotated.reseal(KEY) == Resealed(values=3 + (body is not None))
    assert await world.key_ids() == {"k2"}
    after = await world.process(AFTER).load(KEY)
    assert after is not None
    assert (after.body, after.tail) == (before.body, (*before.tail, b"four"))
    assert after.version != before.version


@pytest.mark.parametrize("body", [b"summary", None])
async def test_a_record_with_the_primary_key_is_not_written_again(world: World, body: bytes | None) -> None:
    await fill(world.process(BEFORE), b"one", body=body)
    driver = world.process(ROTATED)
    await driver.reseal(KEY)
    writes = world.raw.writes
    assert await driver.reseal(KEY) == Resealed()
    assert world.raw.writes == writes
    assert await driver.reseal(Key(KEY.scope, "nothing")) == Resealed(exists=False)


async def test_an_absent_body_is_bound_to_its_place_and_version(world: World) -> None:
    await fill(world.process(BEFORE), b"one", body=None)
    driver = world.process(ROTATED)
    await driver.reseal(KEY)
    record = await world.raw.load(KEY)
    assert record is not None
    assert record.body is not None
    empty = record.body.replace(b"absent", b"sealed", 1)
    for body, version, key in (
        (empty, record.version, KEY),
        (record.body, "another", KEY),
        (record.body, record.version, Key("acme:bob:memory", "trip")),
        (record.body[:-1], record.version, KEY),
    ):
        await world.raw.delete(key)
        await world.raw.replace(key, body, version=version, expect=ANY, ttl=None)
        with pytest.raises(Corrupt):
            await driver.load(key)


async def test_a_body_cannot_be_declared_absent(world: World) -> None:
    driver = world.process(BEFORE)
    for text in (b"summary", b""):
        await driver.replace(KEY, text, version="v1", expect=ANY, ttl=None)
        record = await world.raw.load(KEY)
        assert record is not None
        absent = (record.body or b"").replace(b"sealed", b"absent", 1)
        await world.raw.delete(KEY)
        await world.raw.replace(KEY, absent, version="v1", expect=ABSENT, ttl=None)
        with pytest.raises(Corrupt):
            await driver.load(KEY)
        await world.raw.delete(KEY)


async def test_the_first_body_after_an_absent_one_is_stored_as_ever(world: World) -> None:
    await fill(world.process(BEFORE), b"one", b"two", body=None)
    driver = world.process(ROTATED)
    await driver.reseal(KEY)
    record = await driver.load(KEY)
    assert record is not None
    assert await driver.replace(KEY, b"first", version="v2", expect=record.version, drop=1, ttl=60)
    assert await driver.load(KEY) == Record("v2", b"first", (b"two",))


async def test_resealing_keeps_the_time_to_live(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    await world.clock.pass_time(50)
    driver = world.process(ROTATED)
    await driver.reseal(KEY)
    assert await driver.load(KEY) is not None
    await world.clock.pass_time(11)
    assert await driver.load(KEY) is None


async def test_turns_added_while_a_record_is_resealed_are_kept(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    older, driver = world.process(BEFORE), world.process(ROTATED)
    world.raw.between = [lambda: older.append(KEY, b"two", initial_version="v0", ttl=60)]
    assert await driver.reseal(KEY) == Resealed(values=2)
    assert await world.key_ids() == {"k1", "k2"}
    assert await driver.reseal(KEY) == Resealed(values=1)
    after = await world.process(AFTER).load(KEY)
    assert after is not None
    assert after.tail == (b"one", b"two")


async def test_a_fold_during_resealing_wins_and_the_rest_is_resealed(world: World) -> None:
    before = await fill(world.process(BEFORE), b"one", b"two", b"three")
    older, driver = world.process(BEFORE), world.process(ROTATED)
    world.raw.between = [
        lambda: older.replace(KEY, b"folded", version="v2", expect=before.version, drop=2, ttl=60)
    ]
    assert await driver.reseal(KEY) == Resealed(values=2, lost_races=1)
    after = await world.process(AFTER).load(KEY)
    assert after is not None
    assert (after.body, after.tail) == (b"folded", (b"three",))


async def test_a_record_erased_during_resealing_stays_erased(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    driver = world.process(ROTATED)
    world.raw.between = [lambda: world.raw.delete(KEY)]
    assert await driver.reseal(KEY) == Resealed(lost_races=1, exists=False)
    assert await world.raw.load(KEY) is None


async def test_a_record_that_expires_during_resealing_stays_expired(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    driver = world.process(ROTATED)
    world.raw.between = [lambda: world.clock.pass_time(61)]
    assert (await driver.reseal(KEY)).exists is False


async def test_a_record_replaced_by_another_during_resealing_is_kept(world: World) -> None:
    await fill(world.process(BEFORE), b"one", b"two")
    older, driver = world.process(BEFORE), world.process(ROTATED)
    world.raw.between = [lambda: older.replace(KEY, b"new", version="v9", expect=ANY, ttl=60)]
    assert await driver.reseal(KEY) == Resealed(values=1, lost_races=1)
    after = await world.process(AFTER).load(KEY)
    assert after is not None
    assert (after.body, after.tail) == (b"new", ())


async def test_resealing_repeats_a_write_whose_answer_was_lost(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    world.raw.lost_answers = 1
    assert await world.process(ROTATED).reseal(KEY) == Resealed(values=2)
    assert await world.key_ids() == {"k2"}


@clock.virtually
async def test_resealing_gives_up_a_record_that_changes_each_time() -> None:
    world = await new_world()
    await fill(world.process(BEFORE), b"one")
    older, driver = world.process(BEFORE), world.process(ROTATED)

    async def change() -> None:
        await older.replace(KEY, b"busy", version=f"b{world.raw.writes}", expect=ANY, ttl=60)

    async def change_again() -> None:
        world.raw.between = []
        await change()
        world.raw.between = [change_again]

    world.raw.between = [change_again]
    assert await driver.reseal(KEY) == Resealed(left=1, lost_races=CONTENDED)
    assert await world.process(BEFORE).load(KEY) is not None


async def test_entries_beyond_the_reach_of_one_write_are_reported(world: World) -> None:
    await fill(world.process(BEFORE), *(b"%d" % number for number in range(5)))
    driver = world.process(ROTATED)
    world.raw.traits = dataclasses.replace(world.raw.traits, max_drop=3)
    assert await driver.reseal(KEY) == Resealed(values=4, left=2)
    assert await driver.reseal(KEY) == Resealed(left=2)
    record = await driver.load(KEY)
    assert record is not None
    await driver.replace(KEY, b"folded", version="v5", expect=record.version, drop=3, ttl=60)
    assert await driver.reseal(KEY) == Resealed(values=2)
    assert await world.key_ids() == {"k2"}


async def test_clear_text_is_sealed_only_where_it_is_accepted(world: World) -> None:
    await world.raw.replace(KEY, b"clear summary", version="v1", expect=ABSENT, ttl=None)
    await world.raw.append(KEY, b"clear turn", initial_version="v0", ttl=None)
    before = await world.raw.load(KEY)
    with pytest.raises(Corrupt, match="not sealed"):
        await world.process(ROTATED).reseal(KEY)
    assert await world.raw.load(KEY) == before
    assert await world.process(ROTATED, accept_clear=True).reseal(KEY) == Resealed(values=2)
    after = await world.process(AFTER).load(KEY)
    assert after is not None
    assert (after.body, after.tail) == (b"clear summary", (b"clear turn",))


async def test_a_key_that_is_unknown_or_wrong_leaves_the_record_alone(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    before = await world.raw.load(KEY)
    wrong = StaticKeys({"k1": NEW, "k2": OLD}, primary="k2")
    for keys, said in (
        (AFTER, "'k1', which this process does not have"),
        (wrong, "another key of this id"),
    ):
        with pytest.raises(Corrupt, match=said) as found:
            await world.process(keys).reseal(KEY)
        assert found.value.operation == "reseal"
    assert await world.raw.load(KEY) == before


async def test_an_altered_value_is_found_before_anything_is_written(world: World) -> None:
    await fill(world.process(BEFORE), b"one")
    record = await world.raw.load(KEY)
    assert record is not None
    *start, last = record.tail[0]
    await world.raw.append(KEY, bytes([*start, last ^ 1]), initial_version="v0", ttl=None)
    before = await world.raw.load(KEY)
    with pytest.raises(Corrupt, match="altered"):
        await world.process(ROTATED).reseal(KEY)
    assert await world.raw.load(KEY) == before


async def test_an_outage_of_the_keys_is_unavailable_and_nothing_is_written(world: World) -> None:
    class Down(StaticKeys):
        async def primary(self, owner: Owner) -> DataKey:
            raise Unavailable("the key service is down")

    await fill(world.process(BEFORE), b"one")
    before = await world.raw.load(KEY)
    with pytest.raises(Unavailable) as found:
        await world.process(Down({"k1": OLD}, primary="k1")).reseal(KEY)
    assert (found.value.backend, found.value.operation) == ("memory", "reseal")
    assert await world.raw.load(KEY) == before


async def test_resealing_what_an_erased_key_sealed_creates_no_key(world: World) -> None:
    store = MemoryDriver()
    await store.open()
    keys = EnvelopeKeys(store, LocalWrapping({"w1": bytes(32)}, primary="w1"))
    owner = Owner("acme", "ada")
    await fill(world.process(keys), b"one")
    await keys.erase(owner)
    with pytest.raises(Corrupt, match="erased"):
        await world.process(keys).reseal(KEY)
    assert await store.load(data_keys_key(*owner)) is None


async def test_a_record_that_would_be_too_large_is_left_as_it_is() -> None:
    world = World(max_entry_bytes=200, max_record_bytes=400)
    await world.raw.open()
    await world.raw.append(KEY, b"x" * 200, initial_version="v0", ttl=None)
    before = await world.raw.load(KEY)
    with pytest.raises(TooLarge) as found:
        await world.process(ROTATED, accept_clear=True).reseal(KEY)
    assert found.value.operation == "reseal"
    assert await world.raw.load(KEY) == before


async def test_a_full_record_without_room_for_a_longer_key_id_is_left_as_it_is() -> None:
    world = World(max_entry_bytes=1_000, max_record_bytes=1_000)
    await world.raw.open()
    await fill(world.process(BEFORE), b"x" * 880, body=None)
    before = await world.raw.load(KEY)
    longer = StaticKeys({"k1": OLD, "k" * 32: NEW}, primary="k" * 32)
    with pytest.raises(TooLarge):
        await world.process(longer).reseal(KEY)
    assert await world.raw.load(KEY) == before
