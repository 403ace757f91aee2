"""Everything of an owner arrives byte for byte, or is named; nothing that is right is touched."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.admin.copying import UNOWNED, Comparison, Copy, Item, Owner, Problem, compare
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ABSENT, ANY, Driver, Key, Record
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    Unavailable,
)
from stm_backends.records import keys, operations
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.operations import AT_ONCE

ACME = Owner("acme")
TRIP = MemoryKey("acme", "u1", "trip")
CONFIG = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=3))

Troubles = list[tuple[str, Problem]]


@pytest.fixture
async def source(driver: Driver) -> Backend:
    """A backend of either kind that holds every kind of record, of two users of `acme` and of others."""
    backend = Backend(driver)
    for key in (TRIP, MemoryKey("acme", "u2", "a:b"), MemoryKey("globex", "u1", "trip")):
        memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
        for number in range(5):
            await memory.add_turn(ConversationTurn(f"I want number {number}.", f"Booked {number}."))
        await memory.flush()
        await memory.close()
    for state in ("acme:u1:trip", "kv:v1:acme:u1:trip:cart", "kv:v1:acme:u3:other", "nobody's"):
        await backend.state_store.save_memory_state(state, {"state": state})
    # A conversation that was never summarized has no body yet.
    await driver.append(
        keys.memory_key(MemoryKey("acme", "u1", "new")), b"\0\xff", initial_version="initial", ttl=None
    )
    return backend


@pytest.fixture(params=["memory", "sqlite"])
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Driver]:
    driver = open_driver({"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/to.db"}[request.param])
    await driver.open()
    yield driver
    await driver.close()


async def held(driver: Driver, *scopes: str) -> dict[Key, Record]:
    """Return every record of some scopes, as it is stored."""
    found: dict[Key, Record] = {}
    for scope in scopes:
        async for name in operations.names(driver, scope):
            record = await driver.load(Key(scope, name))
            assert record is not None
            found[Key(scope, name)] = record
    return found


def scopes_of(tenant: str, *users: str) -> list[str]:
    return [keys.scope(tenant, user, kind) for user in users for kind in keys.KINDS]


ALL_OF_ACME = scopes_of("acme", "u1", "u2", "u3")


async def copied(source: Driver, target: Driver, *owners: Owner, **options: Any) -> tuple[Copy, Troubles]:
    """Copy and verify; returns what came of it, and which records were in trouble."""
    troubles: Troubles = []

    def trouble(item: Item, trouble: Problem, error: StorageError | None) -> None:
        troubles.append((item.name, trouble))

    copy = Copy(source, target, owners or [ACME], on_problem=trouble, **options)
    await copy.copy()
    await copy.verify()
    return copy, troubles


def spied(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Key]]:
    """Return the writes to a driver, as they are made."""
    writes: list[tuple[str, Key]] = []
    for operation in ("append", "replace", "delete"):
        call = getattr(driver, operation)

        def writing(
            key: Key, *args: Any, operation: str = operation, call: Any = call, **options: Any
        ) -> Any:
            writes.append((operation, key))
            return call(key, *args, **options)

        monkeypatch.setattr(driver, operation, writing)
    return writes


def before(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, operation: str, act: Callable[[int], Any]
) -> None:
    """Have something happen before every call of an operation, told how many there were."""
    call, calls = getattr(driver, operation), 0

    async def acting(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        await act(calls)
        return await call(*args, **options)

    monkeypatch.setattr(driver, operation, acting)


# What arrives


async def test_everything_of_a_tenant_arrives_byte_for_byte(source: Backend, target: Driver) -> None:
    copy, troubles = await copied(source.driver, target)

    there = await held(source.driver, *ALL_OF_ACME)
    assert await held(target, *ALL_OF_ACME) == there
    cards = [key for key in there if key.scope.endswith((":card", ":recent"))]
    assert (len(there), len(cards)) == (10, 4)
    assert copy.ok
    assert troubles == []
    assert copy.tally == {"copied": 6, "verified": 6}
    assert await copy.count() == {ACME: 6}


async def test_nothing_of_others_is_copied(source: Backend, target: Driver) -> None:
    await copied(source.driver, target)

    assert await held(target, *scopes_of("globex", "u1"), keys.OTHER_BLOBS) == {}
    assert await held(target, keys.directory_scope("globex")) == {}


async def test_a_user_is_copied_alone_and_listed(source: Backend, target: Driver) -> None:
    copy, _ = await copied(source.driver, target, Owner("acme", "u2"))

    assert copy.tally == {"copied": 1, "verified": 1}
    assert [user async for user in Backend(target).sessions.users("acme")] == ["u2"]


async def test_a_user_of_a_tenant_that_is_given_too_is_copied_once(source: Backend, target: Driver) -> None:
    copy, _ = await copied(source.driver, target, Owner("acme", "u2"), ACME, ACME)

    assert copy.tally == {"copied": 6, "verified": 6}


async def test_states_without_an_owner_are_copied_on_request(source: Backend, target: Driver) -> None:
    copy, _ = await copied(source.driver, target, UNOWNED)

    assert copy.tally == {"copied": 1, "verified": 1}
    assert await Backend(target).state_store.load_memory_state("nobody's") == {"state": "nobody's"}


async def test_an_owner_with_nothing_is_counted_as_such(source: Backend, target: Driver) -> None:
    assert await Copy(source.driver, target, [Owner("acne"), Owner("acme", "u11")]).count() == {
        Owner("acne"): 0,
        Owner("acme", "u11"): 0,
    }


async def test_a_user_is_listed_before_anything_of_theirs_is_written(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, load = spied(target, monkeypatch), target.load

    async def loading(key: Key) -> Record | None:
        calls.append(("load", key))
        return await load(key)

    monkeypatch.setattr(target, "load", loading)
    await copied(source.driver, target)
    done = list(calls)

    for user in ("u1", "u2", "u3"):
        entry = keys.directory_key("acme", user)
        mine = {entry, *await held(target, *scopes_of("acme", user))}
        first, *rest = [at for at, (operation, key) in enumerate(done) if operation != "load" and key in mine]
        assert done[first] == ("replace", entry)
        # And looked for after a creation, because an erasure of the tenant may have come in between.
        assert ("load", entry) in done[rest[-1] :]


async def test_bytes_that_this_version_cannot_read_arrive_as_they_are(
    source: Backend, target: Driver
) -> None:
    key = keys.memory_key(MemoryKey("acme", "u1", "newer"))
    await source.driver.append(key, b"stm/9 turn\nnot ours", initial_version="later", ttl=None)

    copy, _ = await copied(source.driver, target)

    assert copy.ok
    assert await target.load(key) == Record("later", None, (b"stm/9 turn\nnot ours",))


async def test_copies_have_no_time_to_live_by_default(source: Backend, target: Driver) -> None:
    ttls: list[object] = []
    for operation in ("append", "replace"):
        call = getattr(target, operation)

        def writing(key: Key, *args: Any, call: Any = call, **options: Any) -> Any:
            if key.scope in ALL_OF_ACME and not key.scope.endswith(":recent"):
                ttls.append(options["ttl"])
            return call(key, *args, **options)

        setattr(target, operation, writing)

    await copied(source.driver, target, Owner("acme", "u1"))
    assert set(ttls) == {None}
    ttls.clear()
    await copied(source.driver, target, Owner("acme", "u2"), ttl=600.0)
    assert set(ttls) == {600.0}
    with pytest.raises(ConfigurationError):
        Copy(source.driver, target, [ACME], ttl=0)


# Copying again


async def test_copying_again_writes_nothing(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await copied(source.driver, target)
    writes = spied(target, monkeypatch)

    copy, _ = await copied(source.driver, target, replace=True)

    assert copy.tally == {"unchanged": 6, "verified": 6}
    # Its users are listed already.
    assert not writes


@pytest.mark.parametrize("reached", [1, 2, 4, 7])
async def test_a_copy_that_ends_at_any_write_is_completed_by_the_next(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch, reached: int
) -> None:
    async def fail(calls: int) -> None:
        if calls >= reached:
            raise Unavailable("gone", backend="target", operation="append")

    with monkeypatch.context() as patch:
        before(target, patch, "append", fail)
        with pytest.raises(Unavailable):
            await copied(source.driver, target)

    copy, _ = await copied(source.driver, target)

    assert copy.ok
    assert copy.tally["verified"] == 6
    assert await held(target, *ALL_OF_ACME) == await held(source.driver, *ALL_OF_ACME)


async def test_what_was_begun_is_completed_without_writing_anything_twice(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.memory_key(TRIP)
    record = await source.driver.load(key)
    assert record is not None
    assert record.body is not None
    assert len(record.tail) == 3
    await target.replace(key, record.body, version=record.version, expect=ABSENT, ttl=None)
    await target.append(key, record.tail[0], initial_version="", ttl=None)
    writes = spied(target, monkeypatch)

    copy, _ = await copied(source.driver, target)

    assert copy.tally == {"copied": 5, "completed": 1, "verified": 6}
    assert [operation for operation, one in writes if one == key] == ["append", "append"]
    assert await target.load(key) == record


# What differs


@pytest.mark.parametrize("same_version", [True, False])
async def test_a_different_record_is_left_and_named_or_replaced_on_request(
    source: Backend, target: Driver, same_version: bool
) -> None:
    key = keys.memory_key(TRIP)
    if same_version:
        await copied(source.driver, target, Owner("acme", "u1"))
        await target.append(key, b"added here", initial_version="", ttl=None)
    else:
        await target.replace(key, b"another", version="other", expect=ANY, ttl=None)
        await target.append(key, b"entry", initial_version="", ttl=None)
    other = await target.load(key)

    copy, troubles = await copied(source.driver, target)
    assert not copy.ok
    assert troubles == [("trip", "left")]
    assert (copy.tally["left"], copy.tally["verified"]) == (1, 5)
    assert await target.load(key) == other

    copy, troubles = await copied(source.driver, target, replace=True)
    assert troubles == []
    assert copy.tally == {"unchanged": 5, "replaced": 1, "verified": 6}
    assert await held(target, *ALL_OF_ACME) == await held(source.driver, *ALL_OF_ACME)


def test_only_a_beginning_under_the_same_version_and_body_has_been_begun() -> None:
    source = Record("v", b"body", (b"1", b"2"))
    assert compare(source, None) is Comparison.ABSENT
    assert compare(source, Record("v", b"body", (b"1", b"2"))) is Comparison.EQUAL
    assert compare(source, Record("v", b"body", (b"1",))) is Comparison.BEGUN
    assert compare(source, Record("v", b"body", ())) is Comparison.BEGUN
    for other in (
        Record("w", b"body", (b"1",)),
        Record("v", b"bodx", (b"1",)),
        Record("v", None, (b"1",)),
        Record("v", b"body", (b"2",)),
        Record("v", b"body", (b"1", b"2", b"3")),
    ):
        assert compare(source, other) is Comparison.DIFFERENT


# While the source is in use


async def test_changes_between_copying_and_verifying_are_distinguished(
    source: Backend, target: Driver
) -> None:
    troubles: dict[str, Problem] = {}

    def trouble(item: Item, trouble: Problem, error: StorageError | None) -> None:
        troubles[item.name] = trouble

    copy = Copy(source.driver, target, [ACME], on_problem=trouble)
    await copy.copy()
    record = await source.driver.load(keys.memory_key(TRIP))
    assert record is not None
    await source.driver.replace(
        keys.memory_key(TRIP), b"folded", version="next", expect=record.version, drop=2, ttl=None
    )
    await source.sessions.erase(MemoryKey("acme", "u2", "a:b"))
    await source.state_store.save_memory_state("acme:u9:first", {})
    await copy.verify()

    assert troubles == {"trip": "changed", "acme:u9:first": "behind"}
    assert copy.tally == {"copied": 6, "verified": 4, "changed": 1, "behind": 1, "extra": 1}
    again, _ = await copied(source.driver, target)
    assert again.tally == {"unchanged": 4, "copied": 1, "left": 1, "verified": 5, "extra": 1}
    again, _ = await copied(source.driver, target, replace=True)
    assert again.ok
    assert again.tally == {"unchanged": 5, "replaced": 1, "verified": 6, "extra": 1}


async def test_a_user_who_was_erased_at_the_source_is_found_at_the_target(
    source: Backend, target: Driver
) -> None:
    copy = Copy(source.driver, target, [ACME])
    await copy.copy()
    await source.sessions.erase_user("acme", "u1")
    await copy.verify()

    assert copy.ok
    assert copy.tally == {"copied": 6, "verified": 2, "extra": 4}


# What goes wrong


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("operation", ["append", "replace"])
async def test_a_lost_answer_doubles_nothing(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch, operation: str, done: bool
) -> None:
    call, lost = getattr(target, operation), set[Key]()

    async def losing(key: Key, *args: Any, **options: Any) -> Any:
        if key in lost:
            return await call(key, *args, **options)
        lost.add(key)
        if done:
            await call(key, *args, **options)
        raise OutcomeUnknown("the answer was lost", backend="target", operation=operation)

    monkeypatch.setattr(target, operation, losing)

    copy, _ = await copied(source.driver, target)

    assert len(lost) > 2
    assert copy.tally == {"copied": 6, "verified": 6}
    assert await held(target, *ALL_OF_ACME) == await held(source.driver, *ALL_OF_ACME)


async def test_an_answer_that_is_always_lost_ends_the_copy(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(calls: int) -> None:
        raise OutcomeUnknown("the answer was lost", backend="target", operation="append")

    before(target, monkeypatch, "append", lose)
    with pytest.raises(OutcomeUnknown):
        await copied(source.driver, target)


@pytest.mark.parametrize("end", ["source", "target"])
async def test_an_outage_ends_the_copy_and_is_not_an_empty_datastore(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async def fail(calls: int) -> None:
        if calls > 3:
            raise Unavailable("gone", backend=end, operation="load")

    before(source.driver if end == "source" else target, monkeypatch, "load", fail)
    copy = Copy(source.driver, target, [ACME])
    with pytest.raises(Unavailable):
        await copy.copy()
    with pytest.raises(Unavailable):
        await copy.verify()
    assert copy.tally["extra"] == copy.tally["behind"] == 0


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_record_that_cannot_be_read_is_named_and_the_rest_is_copied(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    bad = source.driver if end == "source" else target
    call = bad.load

    async def load(key: Key) -> Record | None:
        if key == keys.memory_key(TRIP):
            raise Corrupt("a part of the record is missing", backend=end, operation="load")
        return await call(key)

    monkeypatch.setattr(bad, "load", load)

    copy, troubles = await copied(source.driver, target, replace=True)

    assert not copy.ok
    assert troubles == [("trip", "failed")]
    assert copy.tally == {"copied": 5, "failed": 1, "verified": 5}


async def test_many_small_entries_fill_a_target_that_takes_large_ones(
    source: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LargeEntries(open_driver("memory", max_entry_bytes=2_000, max_record_bytes=3_000))
    await target.open()
    key, large = (keys.memory_key(MemoryKey("acme", "u4", name)) for name in ("small", "large"))
    for _ in range(4):
        await source.driver.append(key, b"x" * 900, initial_version="v", ttl=None)
        await source.driver.append(large, b"x" * 9_000, initial_version="v", ttl=None)
    writes = spied(target.inner, monkeypatch)

    copy, troubles = await copied(source.driver, target, Owner("acme", "u4"))

    assert troubles == [("small", "failed")]
    assert copy.tally["copied"] == 1
    assert key not in {written for _, written in writes}


@pytest.mark.parametrize("limit", [{"max_entry_bytes": 300}, {"max_record_bytes": 300}])
async def test_a_record_too_large_for_the_target_is_reported_and_skipped(
    source: Backend, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    target = open_driver("memory", **limit)
    await target.open()
    absent, other = (keys.memory_key(MemoryKey("acme", "u4", name)) for name in ("absent", "other"))
    for key in (absent, other):
        await source.driver.append(key, b"x", initial_version="large", ttl=None)
        await source.driver.append(key, b"y" * 301, initial_version="large", ttl=None)
    await target.append(other, b"small", initial_version="other", ttl=None)
    writes = spied(target, monkeypatch)

    copy, troubles = await copied(source.driver, target, Owner("acme", "u4"), replace=True)

    assert sorted(troubles) == [("absent", "failed"), ("other", "failed")]
    assert copy.tally == {"failed": 2}
    assert {absent, other}.isdisjoint(key for _, key in writes)


async def test_a_target_that_holds_less_than_it_says_keeps_no_part_of_a_record(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = target.append

    async def append(key: Key, entry: bytes, **options: Any) -> int:
        found = await target.load(key)
        if found is not None and len(found.tail) == 2:
            raise TooLarge("record", size=3, limit=2, backend="target", operation="append")
        return await call(key, entry, **options)

    monkeypatch.setattr(target, "append", append)

    copy, troubles = await copied(source.driver, target)

    assert sorted(troubles) == [("a:b", "failed"), ("trip", "failed")]
    assert copy.tally == {"copied": 4, "failed": 2, "verified": 4}
    assert await target.load(keys.memory_key(TRIP)) is None


async def test_a_target_that_is_written_to_is_found_to_differ(
    source: Backend, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, call = keys.memory_key(TRIP), target.append

    async def append(where: Key, entry: bytes, **options: Any) -> int:
        if where == key:
            await call(key, b"from elsewhere", **options)
        return await call(where, entry, **options)

    monkeypatch.setattr(target, "append", append)

    copy, troubles = await copied(source.driver, target)

    assert troubles == [("trip", "left")]
    assert copy.tally["verified"] == 5


# How much it takes


@pytest.mark.full
async def test_a_thousand_conversations_take_no_more_memory_than_a_few(tmp_path: Path) -> None:
    body, entry = b"b" * 20_000, b"e" * 2_000
    async with (
        open_backend(f"sqlite:///{tmp_path}/from.db") as source,
        open_backend(f"sqlite:///{tmp_path}/to.db") as target,
    ):
        await source.state_store.save_memory_state("acme:u1:state", {})
        for number in range(1_000):
            key = keys.memory_key(MemoryKey("acme", "u1", f"s{number}"))
            await source.driver.replace(key, body, version=f"v{number}", expect=ABSENT, ttl=None)
            await source.driver.append(key, entry, initial_version="", ttl=None)
        copy = Copy(source.driver, target.driver, [ACME])
        gc.collect()
        tracemalloc.start()
        try:
            await copy.copy()
            await copy.verify()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert copy.tally == {"copied": 1_001, "verified": 1_001}
    # All of it is 22 MB. Held are the records in work, at both ends, and some names.
    assert most < 2 * AT_ONCE * len(body + entry) + 1_000_000


async def test_records_are_copied_several_at_a_time_and_no_more(
    target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_driver("memory")
    await source.open()
    for number in range(5 * AT_ONCE):
        key = keys.memory_key(MemoryKey("acme", "u1", f"s{number}"))
        await source.append(key, b"entry", initial_version="v", ttl=None)
    call, now, most = source.load, 0, 0

    async def load(key: Key) -> Record | None:
        nonlocal now, most
        now += 1
        most = max(now, most)
        await asyncio.sleep(0.001)
        now -= 1
        return await call(key)

    monkeypatch.setattr(source, "load", load)

    copy, _ = await copied(source, target, Owner("acme", "u1"))

    assert copy.tally["verified"] == 5 * AT_ONCE
    assert most == AT_ONCE


async def test_paused_runs_and_their_notes_stay_at_the_source(source: Backend, target: Driver) -> None:
    run = {"step": 1, "tool_context": {"tenant_id": "acme", "user_id": "u1"}}
    await source.state_store.save_planner_state("token", run)
    copy = Copy(source.driver, target, [ACME, UNOWNED])
    await copy.count()
    await copy.copy()
    await copy.verify()
    assert copy.ok
    assert await held(target, keys.PAUSED_RUNS, keys.scope("acme", "u1", "planner")) == {}
    assert await source.state_store.load_planner_state("token") == run
