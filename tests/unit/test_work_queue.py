"""The queue of work as records: notes are added without conflicts, and none is lost."""

from __future__ import annotations

import pytest

from stm_backends import MemoryKey, TooLarge
from stm_backends.drivers.contract import ANY, Key, new_version
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Corrupt
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.work.notes import SHARDS, Note, shard_of, shards
from stm_backends.work.policy import Held, State
from stm_backends.work.queue import Look, WorkQueue

A = MemoryKey("acme", "u", "a")


def note(session: str = "a", tenant: str = "acme", user: str = "u") -> Note:
    return Note(MemoryKey(tenant, user, session), 1_000.0)


async def opened(**limits: int) -> tuple[WorkQueue, SpyDriver]:
    driver = SpyDriver(MemoryDriver(**limits))
    await driver.open()
    return WorkQueue(driver, Codec()), driver


async def looked(queue: WorkQueue, key: MemoryKey = A) -> Look:
    look = await queue.look(shard_of(key))
    assert look is not None
    return look


async def test_a_note_is_one_append() -> None:
    queue, driver = await opened()
    added = note()
    await queue.add(added)
    assert driver.calls == [("append", "work")]
    look = await looked(queue)
    assert look.notes == (added,)
    assert look.state == State()


async def test_notes_and_what_a_worker_says_never_conflict() -> None:
    queue, _ = await opened()
    first, second = note(), note()
    await queue.add(first)
    look = await looked(queue)
    await queue.add(second)
    state = State(held={"w": Held(frozenset({first.id}), 1.0)})
    assert await queue.say(look, state, drop=0)
    assert (await looked(queue)).notes == (first, second)
    assert (await looked(queue)).state == state


async def test_of_two_workers_that_say_something_at_once_one_reads_again() -> None:
    queue, _ = await opened()
    await queue.add(note())
    look = await looked(queue)
    assert await queue.say(look, State(), drop=1)
    assert not await queue.say(look, State(), drop=1)
    assert (await looked(queue)).notes == ()


async def test_a_look_at_a_shard_that_has_not_changed_reads_its_body_alone() -> None:
    queue, driver = await opened()
    await queue.add(note())
    look = await looked(queue)
    driver.calls.clear()
    assert await queue.look(look.shard, look) is look
    assert driver.calls == [("load", "work")]
    await queue.add(note())
    again = await queue.look(look.shard, look)
    assert again is not None
    assert again.notes[0] is look.notes[0]
    assert len(again.notes) == 2


async def test_a_full_shard_passes_its_notes_on() -> None:
    queue, driver = await opened(max_record_bytes=1_000)
    added = [note() for _ in range(20)]
    for one in added:
        await queue.add(one)
    names = await queue.shards()
    assert {name.partition(".")[0] for name in names} == {shard_of(A)}
    assert len(names) > 1
    found = [one for name in names if (look := await queue.look(name)) for one in look.notes]
    assert {one.id for one in found if one} == {one.id for one in added}
    assert ("replace", "work") not in driver.calls


async def test_a_note_that_fits_nowhere_is_refused() -> None:
    queue, _ = await opened(max_record_bytes=1_000)

    async def fill() -> None:
        for _ in range(2_000):
            await queue.add(note())

    with pytest.raises(TooLarge):
        await fill()
    with pytest.raises(TooLarge):
        await (await opened(max_entry_bytes=20))[0].add(note())


async def test_erasing_leaves_the_notes_of_others_where_they_are() -> None:
    queue, driver = await opened()
    mine, theirs = note("secret"), note("secret", "bolt")
    for one in (mine, theirs, note("secret"), note("secret", "bolt")):
        await queue.add(one)
    assert await queue.forget(lambda one: one.key.tenant_id == "acme") == 2
    for shard in await queue.shards():
        record = await driver.load(keys.work_key(shard))
        assert record is not None
        assert not any(b"acme" in entry for entry in record.tail)
    look = await looked(queue, theirs.key)
    assert [one.key for one in look.notes if one and not one.is_void] == [theirs.key, theirs.key]
    assert await queue.forget(lambda one: one.key.tenant_id == "acme") == 0


async def test_a_note_of_another_version_stays() -> None:
    queue, driver = await opened()
    where = keys.work_key(shard_of(A))
    await driver.append(where, b"stm/9 note\n{}", initial_version=new_version(), ttl=None)
    await queue.add(note())
    look = await looked(queue)
    assert look.notes[0] is None
    assert look.notes[1] is not None


async def test_a_damaged_shard_is_named() -> None:
    queue, driver = await opened()
    where = keys.work_key(shard_of(A))
    await driver.replace(where, b"damaged", version=new_version(), expect=ANY, ttl=None)
    with pytest.raises(Corrupt, match="work"):
        await queue.look(shard_of(A))


def test_the_scope_of_the_queue_belongs_to_no_tenant() -> None:
    assert keys.work_key("0") == Key("::work", "0")
    assert keys.owner_of(keys.WORK) == ("", "")
    assert len(shards()) == SHARDS
