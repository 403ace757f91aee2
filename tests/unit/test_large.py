"""Large values: after kills, lost answers and repeats, an entry is complete or absent. Garbage is found."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, races
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Corrupt, OutcomeUnknown, TooLarge, Unavailable
from stm_backends.records import keys, ledger
from stm_backends.records.large import pointers
from stm_backends.records.large.driver import ORPHANED_S, LargeEntries
from stm_backends.records.large.parts import Parts
from stm_backends.records.large.pointers import Pointer
from stm_backends.testing import FakeClock
from stm_backends.testing.workbench.drivers import names_in

KEY = keys.memory_key(MemoryKey("acme", "u", "s"))
PARTS = keys.parts_of(KEY).scope
LARGE, OTHER, THIRD = (bytes([n]) * 150_000 for n in b"abc")
"""Each takes three parts."""


class Killed(BaseException):
    """What a process meets that is killed."""


class World:
    """A datastore whose entries have at most 64 kB, its clock, and the processes that use it."""

    def __init__(self, kind: type[LargeEntries] = LargeEntries) -> None:
        self.kind = kind
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.calls: list[str] = []
        self.before: Callable[[str, Any], Awaitable[None]] | None = None
        self.after: Callable[[str, Any], Awaitable[None]] | None = None

    async def raw(self) -> MemoryDriver:
        """Return the driver within, past all that is done here."""
        driver = MemoryDriver(
            self.store, clock=self.clock, max_entry_bytes=64_000, max_record_bytes=1_000_000
        )
        await driver.open()
        return driver

    async def process(self) -> LargeEntries:
        return self.kind(Stepped(self, await self.raw()), clock=self.clock, steady=self.clock)

    async def parts(self) -> list[str]:
        return await names_in(await self.raw(), PARTS)


class Stepped:
    """Tells the world of each operation, before and after."""

    def __init__(self, world: World, inner: Driver) -> None:
        self._world = world
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("load", "append", "replace", "delete", "scan"):
            return found

        async def stepped(*args: Any, **options: Any) -> Any:
            world = self._world
            world.calls.append(name)
            if world.before:
                await world.before(name, args[0])
            answer = await found(*args, **options)
            if world.after:
                await world.after(name, args[0])
            return answer

        return stepped


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def driver(world: World) -> LargeEntries:
    return await world.process()


def is_record(where: Any) -> bool:
    return isinstance(where, Key) and where.scope == KEY.scope


async def two_large(world: World) -> LargeEntries:
    driver = await world.process()
    for entry in (LARGE, b"small", OTHER):
        await driver.append(KEY, entry, initial_version="v", ttl=None)
    world.clock.now += 60
    await driver.load(KEY)
    return driver


# What may be wrong with it: each of these is found out by a test below.


class UnwrittenParts(Parts):
    async def store(self, key: Key, value: bytes, operation: str, ttl: float | None) -> Pointer:
        chunks = [value[start : start + self._size] for start in range(0, len(value), self._size)]
        pointer = Pointer(pointers.new_id(self._clock()), len(value), "", len(chunks), ttl)
        return pointer.sealed_by(map(pointers.digest, chunks))


class PointerBeforeParts(LargeEntries):
    """Stores the pointer first; the parts follow when it is looked whether they are there."""

    def __init__(self, inner: Driver, **options: Any) -> None:
        super().__init__(inner, **options)
        self._parts = UnwrittenParts(inner, **options)


class RemovesBeforeTheFold(LargeEntries):
    """Removes the parts of what is to go, and then lets it go."""

    async def replace(self, key: Key, *args: Any, drop: int = 0, **options: Any) -> bool:
        seen = self._seen.get(key)
        for one in seen.order[:drop] if seen else ():
            await self._parts.remove(key, one or "none")
        return await super().replace(key, *args, drop=drop, **options)


class HalvesAreServed(LargeEntries):
    """Takes what it finds for all there is."""

    def __init__(self, inner: Driver, **options: Any) -> None:
        super().__init__(inner, **options)
        parts = self._parts

        async def read(key: Key, pointer: Pointer) -> bytes:
            found = b""
            async for name in parts.names(key, pointer.id):
                record = await inner.load(Key(keys.parts_of(key).scope, name))
                found += pointers.open_part(record and record.body)[0]
            return found

        parts.read = read


class RemovesWhatStillStands(LargeEntries):
    """Does not read the record again before it removes the parts of what was dropped."""

    async def _look(self, key: Key) -> Any:
        found = await super()._look(key)
        return {} if self._sweeping else found

    _sweeping = False

    async def _sweep(self, key: Key, ids: Any) -> None:
        self._sweeping = True
        try:
            await super()._sweep(key, ids)
        finally:
            self._sweeping = False


class NeverRenews(LargeEntries):
    """Gives parts a time to live once and for all."""

    async def _extend_life(self, key: Key, ttl: float | None) -> None:
        del key, ttl


class SettlesNothing(LargeEntries):
    """Does not look whether the parts are still there once the pointer is."""

    async def _settle(self, key: Key, pointer: Pointer, value: bytes) -> None:
        del key, pointer, value


class LosesTrackOfUnknownOutcomes(LargeEntries):
    """Stores the parts once more each time that a value is sent again."""

    async def _send(self, *args: Any, **options: Any) -> Any:
        self._unsettled.clear()
        return await super()._send(*args, **options)


# Kills


async def killed_at_each_step(
    kind: type[LargeEntries],
    prepare: Callable[[World], Awaitable[LargeEntries]],
    act: Callable[[LargeEntries], Awaitable[object]],
) -> None:
    """Kill a process before and after each operation that `act` takes; another must read all or nothing."""
    world = World()
    driver = await prepare(world)
    before = await driver.load(KEY)
    await act(driver)
    after = await driver.load(KEY)
    for step in itertools.count(1):
        for moment in ("before", "after"):
            world = World(kind)
            driver = await prepare(world)
            count = 0

            async def kill(name: str, where: Any, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step:
                    raise Killed

            setattr(world, moment, kill)
            try:
                await act(driver)
            except Killed:
                pass
            else:
                assert count < step
                return
            world.before = world.after = None
            other = await world.process()
            assert await other.load(KEY) in (before, after), f"killed {moment} step {step}"
            assert await ledger.erase(other, KEY) or before is None
            assert await world.parts() == [], "an erasure finds what a kill has left"


async def nothing(world: World) -> LargeEntries:
    return await world.process()


def appended(driver: LargeEntries) -> Awaitable[object]:
    return driver.append(KEY, LARGE, initial_version="v", ttl=None)


def folded(driver: LargeEntries) -> Awaitable[object]:
    return driver.replace(KEY, b"body", version="w", expect="v", drop=2, ttl=KEEP)


def saved(driver: LargeEntries) -> Awaitable[object]:
    return driver.replace(KEY, THIRD, version="w", expect=ANY, ttl=None)


def rewritten(driver: LargeEntries) -> Awaitable[object]:
    return driver.replace(KEY, b"body", version="w", expect="v", rewrite=(THIRD, OTHER, b"tiny"), ttl=KEEP)


async def test_a_kill_at_any_step_of_an_append_leaves_all_of_it_or_nothing() -> None:
    await killed_at_each_step(LargeEntries, nothing, appended)
    await killed_at_each_step(LargeEntries, two_large, appended)


async def test_a_kill_at_any_step_leaves_a_fold_or_save_complete_or_undone() -> None:
    await killed_at_each_step(LargeEntries, two_large, folded)
    await killed_at_each_step(LargeEntries, two_large, saved)


async def test_a_kill_at_any_step_leaves_a_rewrite_complete_or_undone() -> None:
    await killed_at_each_step(LargeEntries, two_large, rewritten)


async def test_a_kill_tells_that_the_pointer_was_stored_before_the_parts() -> None:
    with pytest.raises((AssertionError, Corrupt)):
        await killed_at_each_step(PointerBeforeParts, nothing, appended)


async def test_a_kill_tells_that_parts_were_removed_before_the_fold() -> None:
    with pytest.raises((AssertionError, Corrupt)):
        await killed_at_each_step(RemovesBeforeTheFold, two_large, folded)


# Reading


async def lacking_a_part(kind: type[LargeEntries]) -> None:
    world = World(kind)
    driver = await world.process()
    await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    first, *_ = await world.parts()
    await (await world.raw()).delete(Key(PARTS, first))
    with pytest.raises(Corrupt, match=r"memory\.load: parts of a large value are missing"):
        await (await world.process()).load(KEY)


async def test_half_an_entry_is_corrupt_and_never_a_smaller_one() -> None:
    await lacking_a_part(LargeEntries)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        await lacking_a_part(HalvesAreServed)


async def test_a_part_with_other_bytes_is_corrupt(world: World) -> None:
    await (await world.process()).append(KEY, LARGE, initial_version="v", ttl=None)
    raw, (first, *_) = await world.raw(), await world.parts()
    where = Key(PARTS, first)
    found = await raw.load(where)
    assert found is not None
    assert found.body is not None
    for damaged in (found.body[:-1], found.body[:-1] + b"x", b"junk"):
        await raw.replace(where, damaged, version="w", expect=ANY, ttl=None)
        with pytest.raises(Corrupt):
            await (await world.process()).load(KEY)


async def test_a_pointer_that_cannot_be_read_is_corrupt_and_can_be_erased(world: World) -> None:
    await (await world.raw()).append(KEY, pointers.MARK + b"{}", initial_version="v", ttl=None)
    driver = await world.process()
    with pytest.raises(Corrupt):
        await driver.load(KEY)
    assert await driver.delete(KEY)


async def test_what_is_dropped_while_it_is_read_is_read_again(world: World) -> None:
    one, other = await two_large(world), await world.process()

    async def fold(name: str, where: Any) -> None:
        if name == "load" and is_record(where):
            world.after = None
            assert await folded(one)

    world.after = fold
    assert await other.load(KEY) == Record("w", b"body", (OTHER,))


async def test_an_entry_that_looks_like_a_pointer_is_an_entry(world: World) -> None:
    driver, odd = await world.process(), pointers.MARK + b"{}"
    await driver.append(KEY, odd, initial_version="v", ttl=None)
    await driver.replace(KEY, odd, version="w", expect="v", ttl=None)
    assert await (await world.process()).load(KEY) == Record("w", odd, (odd,))


async def test_a_record_without_large_entries_takes_no_round_trip_more(
    world: World, driver: LargeEntries
) -> None:
    await driver.load(KEY)
    for _ in range(3):
        await driver.append(KEY, b"small", initial_version="v", ttl=3600.0)
    await driver.load(KEY)
    await driver.replace(KEY, b"body", version="w", expect="v", drop=2, ttl=KEEP)
    await driver.delete(KEY)
    assert world.calls == ["load", "append", "append", "append", "load", "replace", "delete"]


# Lost answers, doubles, races


async def resent(kind: type[LargeEntries]) -> None:
    world = World(kind)
    driver = await world.process()
    lost = 0

    async def lose(name: str, where: Any) -> None:
        nonlocal lost
        if name == "append" and lost < 2:
            lost += 1
            raise OutcomeUnknown("lost")

    world.after = lose
    await races.retried(lambda: driver.append(KEY, LARGE, initial_version="v", ttl=None))
    assert (await driver.load(KEY)) == Record("v", None, (LARGE,) * 3)
    assert len(await world.parts()) == 3


async def test_a_value_that_is_retried_is_stored_beside_the_record_once() -> None:
    await resent(LargeEntries)
    with pytest.raises(AssertionError):
        await resent(LosesTrackOfUnknownOutcomes)


async def test_an_unknown_outcome_keeps_no_reference_to_the_value(
    world: World, driver: LargeEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.records.large.parts.CACHED", 0)

    async def lose(name: str, _: Any) -> None:
        if name == "append":
            raise OutcomeUnknown("lost")

    world.after = lose
    value = bytes(150_000)
    before = sys.getrefcount(value)
    with pytest.raises(OutcomeUnknown):
        await driver.append(KEY, value, initial_version="v", ttl=None)
    gc.collect()
    assert sys.getrefcount(value) == before


async def test_a_value_that_is_retried_after_a_fold_has_its_parts(world: World) -> None:
    driver, other = await world.process(), await world.process()

    async def unanswered(name: str, _: Any) -> None:
        if name == "append":
            raise OutcomeUnknown("no answer")

    world.after = unanswered
    with pytest.raises(OutcomeUnknown):
        await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    world.after = None
    world.clock.now += 25
    await other.load(KEY)
    assert await other.replace(KEY, b"folded", version="w", expect="v", drop=1, ttl=KEEP)

    async def kill(name: str, _: Any) -> None:
        if name == "append":
            raise Killed

    world.after = kill
    with pytest.raises(Killed):
        await driver.append(KEY, LARGE, initial_version="x", ttl=None)
    world.after = None
    assert await (await world.process()).load(KEY) == Record("w", b"folded", (LARGE,))


async def one_of_two_dropped(kind: type[LargeEntries]) -> None:
    """Drop an entry with a later repeat: the same pointer, appended twice."""
    world = World(kind)
    driver, raw = await world.process(), await world.raw()
    await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    found = await raw.load(KEY)
    assert found is not None
    await raw.append(KEY, b"small", initial_version="v", ttl=None)
    await driver.load(KEY)
    await raw.append(KEY, found.tail[0], initial_version="v", ttl=None)
    world.clock.now += 60
    assert await driver.replace(KEY, b"body", version="w", expect="v", drop=1, ttl=KEEP)
    assert await (await world.process()).load(KEY) == Record("w", b"body", (b"small", LARGE))


async def test_a_repeat_in_the_record_keeps_the_parts() -> None:
    await one_of_two_dropped(LargeEntries)
    with pytest.raises(Corrupt):
        await one_of_two_dropped(RemovesWhatStillStands)


async def test_a_lost_race_and_a_refused_entry_leave_no_parts(world: World, driver: LargeEntries) -> None:
    await driver.append(KEY, b"x" * 60_000, initial_version="v", ttl=None)
    assert not await driver.replace(KEY, LARGE, version="w", expect="other", ttl=None)
    assert not await driver.replace(KEY, LARGE, version="w", expect=ABSENT, ttl=None)
    for _ in range(15):
        await driver.append(KEY, b"x" * 62_500, initial_version="v", ttl=None)
    await driver.append(KEY, b"x" * 2_400, initial_version="v", ttl=None)
    with pytest.raises(TooLarge) as refused:
        await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    assert refused.value.what == "record"
    assert await world.parts() == []


async def test_parts_that_cannot_be_stored_raise_unavailable(world: World, driver: LargeEntries) -> None:

    async def lose(name: str, where: Any) -> None:
        if name == "replace":
            raise OutcomeUnknown("lost")

    world.after = lose
    with pytest.raises(Unavailable, match=r"memory\.append: the parts of a large value were not stored"):
        await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    world.after = None
    assert await driver.load(KEY) is None
    assert await world.parts() == []


async def test_an_append_that_takes_too_long_for_its_parts_stores_no_pointer(
    world: World, driver: LargeEntries
) -> None:

    async def be_slow(name: str, where: Any) -> None:
        world.clock.now += 30

    world.after = be_slow
    with pytest.raises(Unavailable):
        await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    assert await driver.load(KEY) is None
    assert await world.parts() == []


async def erased_meanwhile(kind: type[LargeEntries]) -> None:
    """Erase the conversation when the parts are stored, and the pointer is not."""
    world = World(kind)
    driver, other = await world.process(), await World.process(world)

    async def erase(name: str, where: Any) -> None:
        if name == "append" and is_record(where):
            world.before = None
            await ledger.erase(other, KEY)
            assert await world.parts() == []

    world.before = erase
    await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    assert await (await world.process()).load(KEY) == Record("v", None, (LARGE,))


async def test_an_entry_that_outlives_the_erasure_of_its_parts_gets_them_again() -> None:
    await erased_meanwhile(LargeEntries)
    with pytest.raises(Corrupt):
        await erased_meanwhile(SettlesNothing)


async def test_an_erasure_removes_an_entry_whose_parts_it_has_just_removed(world: World) -> None:
    driver, other = await world.process(), await world.process()
    adding: asyncio.Task[int] | None = None
    written, go_on, stands = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold(name: str, where: Any) -> None:
        if name == "append" and is_record(where):
            written.set()
            await go_on.wait()
        if name == "scan" and adding is not None and asyncio.current_task() is adding:
            await asyncio.Event().wait()  # it is killed before it looks

    world.before = hold
    adding = asyncio.ensure_future(driver.append(KEY, LARGE, initial_version="v", ttl=None))
    await written.wait()

    async def let_it_on(name: str, where: Any) -> None:
        if name == "scan":
            world.after = tell
            go_on.set()
            await stands.wait()

    async def tell(name: str, where: Any) -> None:
        if name == "append":
            stands.set()

    world.after = let_it_on
    await ledger.erase(other, KEY)
    adding.cancel()
    world.before = world.after = None
    assert await other.load(KEY) is None
    assert await world.parts() == []


async def test_cancelling_an_append_at_any_step_leaves_all_or_nothing() -> None:
    for step in range(1, 6):  # three parts, the pointer, and a look at the parts
        world = World()
        driver = await two_large(world)
        world.calls.clear()

        async def stop(name: str, where: Any, world: World = world, step: int = step) -> None:
            if len(world.calls) == step:
                world.before = None
                raise asyncio.CancelledError

        world.before = stop
        with pytest.raises(asyncio.CancelledError):
            await driver.append(KEY, THIRD, initial_version="v", ttl=None)
        found = await driver.load(KEY)
        assert found is not None
        assert found.tail in ((LARGE, b"small", OTHER), (LARGE, b"small", OTHER, THIRD))
        await driver.append(KEY, THIRD, initial_version="v", ttl=None)
        found = await (await world.process()).load(KEY)
        assert found is not None
        assert found.tail[-1] == THIRD


# Garbage


async def test_a_fold_removes_the_parts_of_what_it_covers_and_no_others(world: World) -> None:
    driver = await two_large(world)
    assert len(await world.parts()) == 6
    assert await folded(driver)
    assert len(await world.parts()) == 3
    world.clock.now += 60
    assert await driver.delete(KEY)
    assert await world.parts() == []


async def test_what_is_replaced_loses_its_parts(world: World) -> None:
    driver = await two_large(world)
    assert await saved(driver)
    assert len(await world.parts()) == 3
    world.clock.now += 60
    await driver.replace(KEY, b"small", version="x", expect="w", ttl=None)
    assert await world.parts() == []


async def test_rewritten_values_replace_the_parts_of_the_old_ones(world: World) -> None:
    driver, other = await two_large(world), await world.process()
    assert await rewritten(driver)
    assert await other.load(KEY) == Record("w", b"body", (THIRD, OTHER, b"tiny"))
    assert len(await world.parts()) == 6
    world.clock.now += 60
    assert await driver.replace(KEY, b"", version="x", expect="w", rewrite=(b"a", b"b"), ttl=KEEP)
    assert await other.load(KEY) == Record("x", b"", (b"a", b"b", b"tiny"))
    assert await world.parts() == []


async def test_a_refused_rewrite_leaves_no_parts_and_the_old_ones(world: World) -> None:
    driver = await two_large(world)
    before = await world.parts()
    assert not await driver.replace(KEY, b"", version="w", expect="x", rewrite=(THIRD, b"", LARGE), ttl=None)
    with pytest.raises(ValueError, match="expect=<version>"):
        await driver.replace(KEY, b"", version="w", expect=ANY, rewrite=(THIRD,), ttl=None)
    with pytest.raises(TooLarge):
        await driver.replace(
            KEY, b"", version="w", expect="v", rewrite=(THIRD, bytes(driver.traits.max_entry + 1)), ttl=None
        )
    assert await world.parts() == before
    assert await driver.load(KEY) == Record("v", None, (LARGE, b"small", OTHER))


async def test_a_retried_rewrite_stores_its_values_once(world: World) -> None:
    driver, lost = await two_large(world), 0

    async def lose(name: str, where: Any) -> None:
        nonlocal lost
        if name == "replace" and is_record(where) and lost < 2:
            lost += 1
            raise OutcomeUnknown("lost")

    world.after = lose
    assert await races.retried(
        lambda: driver.replace(KEY, THIRD, version="w", expect="v", rewrite=(THIRD, b"s", THIRD), ttl=KEEP)
    )
    world.after = None
    assert await (await world.process()).load(KEY) == Record("w", THIRD, (THIRD, b"s", THIRD))
    world.clock.now += 60
    await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    assert len(await world.parts()) == 12


async def test_parts_that_have_just_been_dropped_are_removed_a_little_later(
    world: World, driver: LargeEntries
) -> None:
    await driver.append(KEY, LARGE, initial_version="v", ttl=None)
    await driver.load(KEY)
    await driver.replace(KEY, b"", version="w", expect="v", drop=1, ttl=KEEP)
    assert len(await world.parts()) == 3
    world.clock.now += 60
    await driver.replace(KEY, b"", version="x", expect="w", ttl=KEEP)
    assert await world.parts() == []


async def test_parts_without_a_pointer_are_removed_only_once_none_can_follow(world: World) -> None:
    killed, driver = await world.process(), await world.process()

    async def kill(name: str, where: Any) -> None:
        if name == "append":
            raise Killed

    world.before = kill
    with pytest.raises(Killed):
        await killed.append(KEY, LARGE, initial_version="v", ttl=None)
    world.before = None
    world.clock.now += ORPHANED_S - 10
    await driver.append(KEY, OTHER, initial_version="v", ttl=None)
    assert len(await world.parts()) == 6
    world.clock.now += 20
    await driver.append(KEY, THIRD, initial_version="v", ttl=None)
    assert len(await world.parts()) == 6
    assert await (await world.process()).load(KEY) == Record("v", None, (OTHER, THIRD))


async def test_an_error_in_removing_parts_does_not_fail_the_write(world: World) -> None:
    driver = await two_large(world)

    async def fail(name: str, where: Any) -> None:
        if not is_record(where):
            raise Unavailable("down")

    world.before = fail
    assert await folded(driver)
    assert await (await world.raw()).load(KEY) is not None


async def test_erasing_a_user_removes_parts_that_nothing_points_to(world: World) -> None:
    async with Backend(await world.raw()) as backend:
        config = ShortTermMemoryConfig(strategy="truncation")
        memory = backend.memory(MemoryKey("acme", "u", "s"), config)
        await memory.add_turn(ConversationTurn(user_message="x" * 200_000, assistant_response=""))
        await (await world.raw()).delete(KEY)
        await memory.add_turn(ConversationTurn(user_message="y" * 200_000, assistant_response=""))
        assert len(await world.parts()) == 8
        assert await backend.sessions.erase_user("acme", "u") == 1
        assert await world.parts() == []


# Time to live


async def lives_on(kind: type[LargeEntries]) -> None:
    """Add small entries for ever so long, from one process and another, after one large entry."""
    world = World(kind)
    one, other = await world.process(), await world.process()
    await one.append(KEY, LARGE, initial_version="v", ttl=100.0)
    for number in range(40):
        world.clock.now += 99
        await (one, other)[number % 2].append(KEY, b"small", initial_version="w", ttl=100.0)
    found = await (await world.process()).load(KEY)
    assert found == Record("v", None, (LARGE, *[b"small"] * 40))


async def test_parts_outlive_their_record_regardless_of_the_writer() -> None:
    await lives_on(LargeEntries)
    with pytest.raises(Corrupt):
        await lives_on(NeverRenews)


async def test_one_process_that_is_killed_right_after_each_append_does_no_harm(world: World) -> None:
    one, other = await world.process(), await world.process()
    await one.append(KEY, LARGE, initial_version="v", ttl=100.0)
    for _ in range(20):
        world.clock.now += 99
        await (await world.raw()).append(KEY, b"killed", initial_version="w", ttl=100.0)
        world.clock.now += 99
        await other.append(KEY, b"small", initial_version="w", ttl=100.0)
    found = await (await world.process()).load(KEY)
    assert found is not None
    assert found.tail[0] == LARGE


async def test_a_record_that_becomes_permanent_or_ends_takes_its_parts_along(
    world: World, driver: LargeEntries
) -> None:
    await driver.append(KEY, LARGE, initial_version="v", ttl=100.0)
    await driver.append(KEY, b"small", initial_version="v", ttl=None)
    world.clock.now += 1_000_000
    assert await (await world.process()).load(KEY) == Record("v", None, (LARGE, b"small"))
    other = await world.process()
    await other.append(KEY, b"more", initial_version="v", ttl=100.0)
    world.clock.now += 1_000
    assert await other.load(KEY) is None
    assert await world.parts() == []


async def test_a_body_that_keeps_no_time_to_live_has_parts_without_one(
    world: World, driver: LargeEntries
) -> None:
    await driver.append(KEY, b"small", initial_version="v", ttl=100.0)
    await driver.append(KEY, b"small", initial_version="v", ttl=None)
    await driver.replace(KEY, LARGE, version="w", expect="v", ttl=KEEP)
    world.clock.now += 1_000_000
    assert await driver.load(KEY) == Record("w", LARGE, (b"small", b"small"))


async def test_parts_end_some_time_after_their_record(world: World, driver: LargeEntries) -> None:
    await driver.append(KEY, LARGE, initial_version="v", ttl=100.0)
    await driver.replace(KEY, OTHER, version="w", expect="v", ttl=KEEP)
    world.clock.now += 361
    assert await driver.load(KEY) is None
    assert await world.parts() == []


async def test_parts_are_not_written_again_each_time(world: World, driver: LargeEntries) -> None:
    await driver.append(KEY, LARGE, initial_version="v", ttl=4_000.0)
    world.calls.clear()
    for _ in range(9):
        world.clock.now += 100
        await driver.append(KEY, b"small", initial_version="v", ttl=4_000.0)
    assert world.calls == ["append"] * 9
    world.clock.now += 200
    await driver.append(KEY, b"small", initial_version="v", ttl=4_000.0)
    assert world.calls.count("replace") == 3


# Limits


async def test_a_value_above_the_limit_is_refused_before_any_write(
    world: World, driver: LargeEntries
) -> None:
    assert driver.traits.max_entry == 64 * 1024 * 1024
    with pytest.raises(TooLarge) as refused:
        await driver.append(KEY, bytes(driver.traits.max_entry + 1), initial_version="v", ttl=None)
    assert refused.value.what == "entry"
    assert world.calls == []


async def test_a_driver_with_tiny_entries_is_used_as_it_is() -> None:
    inner = MemoryDriver(max_entry_bytes=100, max_record_bytes=1_000)
    await inner.open()
    driver = LargeEntries(inner)
    assert driver.traits == inner.traits
    with pytest.raises(TooLarge):
        await driver.append(KEY, b"x" * 101, initial_version="v", ttl=None)


async def test_the_traits_say_how_much_room_each_value_takes(world: World, driver: LargeEntries) -> None:
    inner, traits = await world.raw(), driver.traits
    inline = 1_000_000 // 16
    for size in (0, 1, inline, inline + 1, 150_000):
        key = KEY._replace(name=f"{size}")
        await driver.append(key, bytes(size), initial_version="v", ttl=None)
        (stored,) = (await inner.load(key) or Record("", None, ())).tail
        assert traits.room(size) == len(stored)
    assert traits.max_record == inner.traits.max_record


async def test_every_pointer_has_the_same_size() -> None:
    for ttl, size in ((None, 1), (1e11 / 3, 64 * 1024 * 1024), (0.1 + 0.2, 10)):
        pointer = Pointer(pointers.new_id(1e10), size, "f" * 64, 100_000, ttl)
        sealed = pointer.seal()
        assert len(sealed) == pointers.POINTER
        assert pointers.open_pointer(sealed) == pointer
        life = pointers.Life(ttl, 1e10 + 0.123456789)
        assert pointers.open_part(pointers.seal_part(b"chunk", life)) == (b"chunk", life)


async def test_a_turn_of_4_mib_and_ten_of_300_kb_fit_where_an_entry_has_64_kb(world: World) -> None:
    async with Backend(await world.raw()) as backend:
        memory = backend.memory(MemoryKey("acme", "u", "s"), ShortTermMemoryConfig(strategy="truncation"))
        sizes = (4 * 1024 * 1024, *[300_000] * 9)
        turns = [ConversationTurn(user_message="x" * size, assistant_response="y", ts=1.0) for size in sizes]
        for turn in turns:
            await memory.add_turn(turn)
        assert await memory.turns() == turns


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_a_part_that_changes_while_it_is_renewed_is_renewed_after_all(world: World, part: int) -> None:
    driver, raw = await world.process(), await world.raw()
    await driver.append(KEY, LARGE, initial_version="v", ttl=60.0)
    where = Key(PARTS, (await world.parts())[part])

    async def change(operation: str, key: Any) -> None:
        if (operation, key) == ("replace", where):
            world.before = None
            found = await raw.load(where)
            assert found is not None
            assert found.body is not None
            # As resealing does: the same content under another version, with the same time to live.
            assert await raw.replace(where, found.body, version="x", expect=found.version, ttl=KEEP)

    world.before = change
    await driver.append(KEY, b"small", initial_version="v", ttl=None)
    assert world.before is None
    await world.clock.pass_time(10_000.0)
    record = await (await world.process()).load(KEY)
    assert record is not None
    assert record.tail == (LARGE, b"small")
