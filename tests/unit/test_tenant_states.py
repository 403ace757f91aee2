"""States of a tenant as a whole, bytes in states, deletion on a version and listing by prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends import (
    Backend,
    Corrupt,
    InvalidKey,
    InvalidState,
    KeyMismatch,
    LimitReached,
    Limits,
    MemoryKey,
    OutcomeUnknown,
    Sealing,
    SealMismatch,
    StaticKeys,
    open_backend,
    sync,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records import binary, keys, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.state_store import StateStore, TenantStates
from stm_backends.records.steps import run_now
from stm_backends.sealing.cipher import key_id_of
from tests.unit.conftest import Lose

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BEFORE = Sealing(StaticKeys({"k1": OLD}, primary="k1"))
ROTATED = Sealing(StaticKeys({"k1": OLD, "k2": NEW}, primary="k2"))
AFTER = Sealing(StaticKeys({"k2": NEW}, primary="k2"))
LARGE = {"text": "x" * 60_000}


def small(store: MemoryStore) -> MemoryDriver:
    return MemoryDriver(store, max_entry_bytes=12_000, max_record_bytes=50_000)


def on(store: MemoryStore, **options: Any) -> Backend:
    return Backend(small(store), **options)


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with on(MemoryStore()) as opened:
        yield opened


async def every(names: AsyncIterator[str]) -> list[str]:
    return [name async for name in names]


async def stored(driver: Driver, tenant: str) -> list[Key]:
    """Return the keys of what is stored for a tenant as a whole."""
    scope = keys.shared_scope(tenant)
    return [
        Key(one, name)
        for one in (scope, keys.parts_of(Key(scope, "")).scope)
        async for name in operations.names(driver, one)
    ]


# States of a tenant


async def test_a_tenant_has_states_of_its_own_under_any_key(backend: Backend) -> None:
    ours, theirs = backend.tenant_state("acme"), backend.tenant_state("acme:u")
    await ours.save_memory_state("acme:u:s", {"a": 1})
    assert await ours.load_memory_state("acme:u:s") == {"a": 1}
    assert await theirs.load_memory_state("acme:u:s") is None
    assert await backend.state_store.load_memory_state("acme:u:s") is None
    assert await every(backend.state_store.states_of("acme", "u")) == []
    _, version = await ours.load_versioned("acme:u:s")
    assert await ours.save_if("acme:u:s", {"a": 2}, expect=version)
    assert not await ours.save_if("acme:u:s", {"a": 3}, expect=version)
    assert await ours.load_memory_state("acme:u:s") == {"a": 2}
    assert await ours.delete_memory_state("acme:u:s")
    assert await every(ours.names()) == []


async def test_states_are_listed_by_prefix_in_order(backend: Backend) -> None:
    states = backend.tenant_state("acme")
    for key in ("b", "a:1", "a", "a:", "a%", "", "é", "a:10"):
        await states.save_memory_state(key, {})
    assert await every(states.names()) == ["", "a", "a%", "a:", "a:1", "a:10", "b", "é"]
    assert await every(states.names("a:")) == ["a:", "a:1", "a:10"]
    assert await every(states.names("a:1")) == ["a:1", "a:10"]
    assert await every(states.names("z")) == []


@pytest.mark.parametrize("tenant", ["", " ", None, 7])
def test_a_tenant_is_a_text_that_is_not_blank(tenant: Any) -> None:
    with pytest.raises(InvalidKey):
        Backend(MemoryDriver()).tenant_state(tenant)


async def test_the_key_of_a_state_is_a_text(backend: Backend) -> None:
    key: Any = 1
    with pytest.raises(InvalidKey, match="a string"):
        await backend.tenant_state("acme").load_memory_state(key)


async def test_limits_hold_for_the_states_of_a_tenant() -> None:
    async with on(MemoryStore(), limits=Limits(state_bytes=100, user_conversations=1)) as backend:
        states = backend.tenant_state("acme")
        for key in ("a", "b:c", "acme:u:s"):
            await states.save_memory_state(key, {})
        with pytest.raises(LimitReached):
            await states.save_memory_state("d", {"text": "x" * 200})


async def test_erasing_a_tenant_erases_its_states_and_erasing_a_user_does_not(backend: Backend) -> None:
    states = backend.tenant_state("acme")
    await states.save_memory_state("app", LARGE)
    await backend.state_store.save_memory_state("acme:u:s", {})
    await backend.sessions.erase_user("acme", "u")
    assert await states.load_memory_state("app") == LARGE
    receipt = await backend.sessions.erase_with_receipt("acme")
    assert receipt.erased["states"] == 1
    assert receipt.complete
    assert await stored(backend.driver, "acme") == []
    assert not await backend.sessions.has("acme")
    assert (await backend.sessions.erase_with_receipt("acme")).existed is False


async def test_what_is_saved_while_a_tenant_is_erased_is_in_the_receipt(backend: Backend) -> None:
    states = backend.tenant_state("acme")
    await states.save_memory_state("app", {})
    forget = Directory.forget_seal

    async def meanwhile(self: Directory, tenant: str) -> None:
        await states.save_memory_state("late", {})
        await forget(self, tenant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Directory, "forget_seal", meanwhile)
        receipt = await backend.sessions.erase_with_receipt("acme")
    assert receipt.found == {"states": 1}
    assert not receipt.complete


async def test_a_tenant_with_states_alone_is_listed_and_counted(backend: Backend) -> None:
    await backend.tenant_state("acme").save_memory_state("app", {"a": 1})
    await backend.state_store.save_memory_state("other", {})
    assert await every(backend.sessions.tenants()) == ["acme"]
    assert await backend.sessions.has("acme")
    for by_name in (False, True):
        totals = await backend.stats.of_tenant("acme", by_name=by_name)
        assert (totals.states, totals.users, totals.bytes > 0) == (1, 0, not by_name)


async def test_a_copy_has_the_states_of_its_tenants(backend: Backend) -> None:
    await backend.tenant_state("acme").save_memory_state("app", LARGE)
    await backend.tenant_state("other").save_memory_state("app", {})
    await backend.state_store.save_memory_state("acme:u:s", {"a": 1})
    async with on(MemoryStore()) as target:
        of_user = Copy(backend.driver, target.driver, [Owner("acme", "u")])
        assert await of_user.count() == {Owner("acme", "u"): 1}
        copy = Copy(backend.driver, target.driver, [Owner("acme")])
        assert await copy.count() == {Owner("acme"): 2}
        await copy.copy()
        await copy.verify()
        assert copy.ok
        assert copy.tally["verified"] == 2
        assert await target.tenant_state("acme").load_memory_state("app") == LARGE
        assert await target.sessions.erase_tenant("acme") == 2
        assert not await target.sessions.has("other")


async def test_a_purge_removes_the_parts_that_states_have_left(backend: Backend) -> None:
    states = backend.tenant_state("acme")
    await states.save_memory_state("app", LARGE)
    before = await stored(backend.driver, "acme")
    assert len(before) > 2
    await backend.sessions.purge("acme")
    assert await stored(backend.driver, "acme") == before
    await backend.driver.inner.delete(keys.shared_blob("acme", "app"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stm_backends.admin.purging.ORPHANED_S", -10.0)
        await backend.sessions.purge("acme")
    assert await stored(backend.driver, "acme") == []


async def test_a_time_to_live_of_a_tenant_is_that_of_its_states_too(backend: Backend) -> None:
    states = backend.tenant_state("acme")
    await states.save_memory_state("app", {})
    expiring = await backend.sessions.expire("acme", ttl=0.05)
    assert expiring.states == 1
    await asyncio.sleep(0.1)
    assert await states.load_memory_state("app") is None


async def test_states_of_a_sealed_tenant_are_sealed_and_resealed() -> None:
    store = MemoryStore()
    async with on(store, sealing=BEFORE) as backend:
        await backend.tenant_state("acme").save_memory_state("app", LARGE)
    assert await key_ids(store) == {"k1"}
    async with on(store, sealing=ROTATED) as backend:
        report = await backend.sessions.reseal("acme")
        assert report.ok
        assert report.records >= 1
        again = await backend.sessions.reseal("acme")
        assert again.records == 0
    assert await key_ids(store) == {"k2"}
    async with on(store, sealing=AFTER) as backend:
        assert await backend.tenant_state("acme").load_memory_state("app") == LARGE
    async with on(store) as backend:
        with pytest.raises(SealMismatch):
            await backend.tenant_state("acme").load_memory_state("app")
        receipt = await backend.sessions.erase_with_receipt("acme")
        assert receipt.erased["states"] == 1
        assert receipt.keys_left


async def key_ids(store: MemoryStore) -> set[str | None]:
    """Return the ids of the keys that what a tenant has as a whole needs."""
    found = set[str | None]()
    raw = small(store)
    await raw.open()
    for place in await stored(raw, "acme"):
        record = await raw.load(place)
        assert record is not None
        found.add(key_id_of(record.body or b""))
    return found


async def test_other_keys_overwrite_no_state_of_a_tenant() -> None:
    store = MemoryStore()
    async with on(store, sealing=BEFORE) as backend:
        await backend.tenant_state("acme").save_memory_state("app", {"a": 1})
    async with on(store, sealing=AFTER) as backend:
        with pytest.raises(KeyMismatch):
            await backend.tenant_state("acme").save_memory_state("app", {"a": 2})
        with pytest.raises(KeyMismatch):
            await backend.sessions.erase_tenant("acme")
    async with on(store, sealing=BEFORE) as backend:
        assert await backend.tenant_state("acme").load_memory_state("app") == {"a": 1}


def test_without_an_event_loop_the_same() -> None:
    with sync.open_backend("memory://") as backend:
        states = backend.tenant_state("acme")
        states.save_memory_state("a", {"n": b"1"})
        states.save_memory_state("ab", {})
        assert [*states.names("a")] == ["a", "ab"]
        state, version = states.load_versioned("a")
        assert state == {"n": b"1"}
        assert version is not None
        assert states.delete_if("a", expect=version)
        assert states.load_memory_state("a") is None
        key = MemoryKey("acme", "u", "s").composite()
        backend.state_store.save_memory_state(key, {})
        assert [*backend.state_store.states_of("acme", "u")] == [key]


# Deletion on a version, and listing of a user's states


async def test_a_state_is_deleted_only_if_it_is_as_it_was_loaded(backend: Backend) -> None:
    store = backend.state_store
    await store.save_memory_state("acme:u:s", {"a": 1})
    _, version = await store.load_versioned("acme:u:s")
    assert version is not None
    await store.save_memory_state("acme:u:s", {"a": 2})
    assert not await store.delete_if("acme:u:s", expect=version)
    assert await store.load_memory_state("acme:u:s") == {"a": 2}
    _, version = await store.load_versioned("acme:u:s")
    assert await store.delete_if("acme:u:s", expect=version or "")
    assert not await store.delete_if("acme:u:s", expect=version or "")
    assert await store.load_memory_state("acme:u:s") is None


@pytest.mark.parametrize("done", [True, False])
async def test_a_deletion_whose_answer_was_lost_is_settled(driver: Driver, lose: Lose, done: bool) -> None:
    store = StateStore(driver, Codec(), Directory(driver, Codec()))
    await store.save_memory_state("k", {"a": 1})
    _, version = await store.load_versioned("k")
    lose("delete", done=done)
    assert await store.delete_if("k", expect=version or "")
    assert await store.load_memory_state("k") is None


async def test_a_deletion_after_which_another_state_is_there_is_of_unknown_outcome(
    driver: Driver, lose: Lose
) -> None:
    store = StateStore(driver, Codec(), Directory(driver, Codec()))
    await store.save_memory_state("k", {"a": 1})
    _, version = await store.load_versioned("k")
    lose("delete", done=True, then=lambda: store.save_memory_state("k", {"a": 2}))
    with pytest.raises(OutcomeUnknown):
        await store.delete_if("k", expect=version or "")
    assert await store.load_memory_state("k") == {"a": 2}


async def test_the_states_of_a_user_are_listed_by_prefix(backend: Backend) -> None:
    store = backend.state_store
    mine = [MemoryKey("acme", "u", name).composite() for name in ("a", "a:1", "b")]
    for key in (*mine, "kv:v1:acme:u:x", "acme:u2:a", "other"):
        await store.save_memory_state(key, {})
    assert await every(store.states_of("acme", "u")) == [*mine, "kv:v1:acme:u:x"]
    assert await every(store.states_of("acme", "u", mine[0])) == mine[:2]
    assert await every(store.states_of("acme", "u", "kv:v1:")) == ["kv:v1:acme:u:x"]
    with pytest.raises(InvalidKey):
        store.states_of("acme", "")


# Bytes in states

values = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.sampled_from(["%b", "%%b", "%c"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.one_of(st.sampled_from(["%b", "%%b", "%%%b", "%", "%bb", "b"]), st.text()), inner, max_size=3
        )
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.one_of(st.sampled_from(["%b", "%%b"]), st.text()), values, max_size=4))
def test_bytes_and_what_looks_like_them_come_back_as_they_were(state: dict[str, Any]) -> None:
    escaped = run_now(binary.escaped(state))
    assert not binary.has_bytes(escaped)
    assert run_now(binary.restored(escaped)) == state


async def test_a_state_with_bytes_is_saved_and_loaded(backend: Backend) -> None:
    state = {
        "image": b"\x00\xff",
        "many": [{"part": bytes([n % 256])} for n in range(300)],
        "nested": {"%b": {"%b": b""}, "views": (bytearray(b"a"), memoryview(b"b-c")[::2])},
        "%b": "a text",
    }
    await backend.state_store.save_memory_state("acme:u:s", state)
    loaded = await backend.state_store.load_memory_state("acme:u:s")
    assert loaded == {**state, "nested": {"%b": {"%b": b""}, "views": [b"a", b"bc"]}}
    await backend.state_store.save_planner_state("token", {"payload": b"1"})
    assert await backend.state_store.load_planner_state("token") == {"payload": b"1"}


async def test_a_state_without_bytes_is_stored_as_before(driver: Driver) -> None:
    store = StateStore(driver, Codec(), Directory(driver, Codec()))
    await store.save_memory_state("k", {"a": {"%b": "QQ=="}})
    record = await driver.load(keys.blob_key("k"))
    assert record is not None
    assert record.body == b'stm/1 state\n{"a":{"%b":"QQ=="}}'
    assert await store.load_memory_state("k") == {"a": {"%b": "QQ=="}}
    await store.save_memory_state("k", {"a": b"A"})
    record = await driver.load(keys.blob_key("k"))
    assert record is not None
    assert record.body == b'stm/2 binary-state\n{"a":{"%b":"QQ=="}}'


async def test_what_is_not_json_beside_bytes_is_named(backend: Backend) -> None:
    cyclic: list[Any] = []
    cyclic += [cyclic, cyclic]
    for state, said in (
        ({"a": b"1", "b": {1, 2}}, r"binary-state\.b is set"),
        ({"b": {1, 2}}, r"state\.b is set"),
        ({"a": [{"b": {1: b""}}]}, "has a key that is not a string"),
        ({"a": {1, 2}, "b": cyclic}, "nested too deeply|is set"),
        ({"a": b"", "b": cyclic}, "nested too deeply"),
    ):
        with pytest.raises(InvalidState, match=said):
            await backend.state_store.save_memory_state("k", state)
    assert await backend.state_store.load_memory_state("k") is None


@pytest.mark.parametrize("content", [{"a": {"%b": 1}}, {"a": {"%b": "é"}}, {"a": [{"%b": "x"}]}])
async def test_bytes_that_are_none_are_corrupt(driver: Driver, content: dict[str, Any]) -> None:
    store = StateStore(driver, Codec(), Directory(driver, Codec()))
    await store.save_memory_state("k", {})
    record = await driver.load(keys.blob_key("k"))
    assert record is not None
    body = Codec().seal("binary-state", content)
    await driver.replace(keys.blob_key("k"), body, version="w", expect=record.version, ttl=None)
    with pytest.raises(Corrupt, match=driver.name):
        await store.load_memory_state("k")


async def test_the_states_of_a_tenant_are_found_through_a_url() -> None:
    async with open_backend("memory://") as backend:
        states = backend.tenant_state("acme")
        assert isinstance(states, TenantStates)
        await states.save_memory_state("k", {"a": b"1"}, ttl=60.0)
        assert await states.load_memory_state("k") == {"a": b"1"}
