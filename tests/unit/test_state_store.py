"""Saved states: any JSON under any string, replaced as a whole, saved on a condition."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stm_backends.agents.resolving import resolve_memory_key
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Corrupt, InvalidKey, InvalidState, OutcomeUnknown, Unavailable
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.protocols import SupportsMemoryState
from stm_backends.races import ATTEMPTS
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.compression import Zlib
from stm_backends.records.directory import Directory
from stm_backends.records.state_store import StateStore
from stm_backends.types import ConversationTurn, MemoryIsolation, ShortTermMemoryConfig


def store_on(driver: Driver, *transforms: Any) -> StateStore:
    codec = Codec(transforms)
    return StateStore(driver, codec, Directory(driver, codec))


@pytest.fixture
def store(driver: Driver) -> StateStore:
    return store_on(driver)


def run_on_a_new_store(work: Callable[[StateStore], Awaitable[None]]) -> None:
    """Run one Hypothesis example; the fixtures live longer than one."""

    async def run() -> None:
        driver = MemoryDriver()
        await driver.open()
        await work(store_on(driver))

    asyncio.run(run())


def test_it_is_a_store_that_memories_can_be_saved_in() -> None:
    assert isinstance(store_on(MemoryDriver()), SupportsMemoryState)


async def test_a_steady_save_is_one_round_trip_and_so_is_a_load(store: StateStore, calls: list[str]) -> None:
    await store.save_memory_state("acme:u:s", {})
    calls.clear()
    await store.save_memory_state("acme:u:s", {})
    await store.load_memory_state("acme:u:s")
    assert calls == ["replace", "load"]


# JSON

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**64)
    | st.floats()
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=4)
    ),
    max_leaves=20,
)
states = st.dictionaries(st.text(st.characters(codec=None)), json_values, max_size=5)


def as_json(value: Any) -> Any:
    """Return what a value is once JSON has carried it: tuples are lists."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def canonical(value: Any) -> str:
    """Return a text that is equal for JSON-equal values, NaN included, and for no others."""
    return json.dumps(as_json(value), sort_keys=True)


@given(states)
def test_any_json_object_comes_back_equal(state: dict[str, Any]) -> None:
    async def work(store: StateStore) -> None:
        await store.save_memory_state("k", state)
        loaded = await store.load_memory_state("k")
        assert canonical(loaded) == canonical(state)
        assert repr(loaded) == repr(as_json(state))

    run_on_a_new_store(work)


async def test_difficult_json_values_are_stored_by_every_driver(store: StateStore) -> None:
    state = {
        "nan": math.nan,
        "infinite": [math.inf, -math.inf],
        "minus zero": -0.0,
        "big": 2**200,
        "tuple": (1, (2,)),
        "nul": "a\0b",
        "lone": "\ud83d",
        "adjacent": "\ud83d" + "\ude00",
        "\udfff": "key",
        "": {"": []},
    }
    await store.save_memory_state("k", state)
    assert repr(await store.load_memory_state("k")) == repr(as_json(state))


async def test_a_large_state_is_loaded_as_it_was_saved(store: StateStore) -> None:
    state = {"result": "0123456789" * 500_000}
    await store.save_memory_state("k", state)
    assert await store.load_memory_state("k") == state


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"b": {1: 2}}}, "state.a.b"),
        ({"a": [0, {None: 2}]}, "state.a[1]"),
        ({"a": [1, {2, 3}]}, "state.a[1]"),
        ({"a": object()}, "state.a"),
        ({1: 2}, "state"),
        ([], "dict"),
        (None, "dict"),
        ("text", "dict"),
        ({"a": 10**5000}, "state.a"),
    ],
)
async def test_what_is_not_json_is_refused_with_its_path_and_nothing_is_written(
    store: StateStore, calls: list[str], state: Any, path: str
) -> None:
    with pytest.raises(InvalidState, match=path.replace("[", r"\[")):
        await store.save_memory_state("acme:u:s", state)
    with pytest.raises(InvalidState):
        await store.save_if("acme:u:s", state, expect=None)
    assert calls == []


# Keys


@given(st.lists(st.text(st.characters(codec=None), max_size=60), unique=True, max_size=8))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_two_keys_share_a_state(texts: list[str]) -> None:
    async def work(store: StateStore) -> None:
        for number, text in enumerate(texts):
            await store.save_memory_state(text, {"number": number})
        for number, text in enumerate(texts):
            assert await store.load_memory_state(text) == {"number": number}

    run_on_a_new_store(work)


DIFFICULT_KEYS = [
    "",
    " ",
    "%",
    "a",
    "a:b:c",
    "a:b:c:d",
    "a:b%3Ac:d",
    "a:b:c%3Ad",
    "kv:v1:a:b:c",
    "kv:v1:a:b:",
    "kv:v1::b:c",
    "kv:v1:",
    "%6Bv:v1:c",
    "nul\0",
    "\ud800",
    "\U0001f600",
    "\ud83d" + "\ude00",
    "*",
    "a*",
    "' OR 1=1 --",
    "x" * 900,
    "日" * 300,
]


async def test_a_key_that_is_too_long_is_refused(store: StateStore) -> None:
    with pytest.raises(InvalidKey):
        await store.save_memory_state("x" * 1001, {})
    with pytest.raises(InvalidKey):
        await store.load_memory_state("x" * 1001)
    with pytest.raises(InvalidKey, match="is a string, not int"):
        await store.load_memory_state(5)  # type: ignore[arg-type]


async def test_a_state_does_not_touch_the_conversation_of_the_same_key(
    driver: Driver, store: StateStore
) -> None:
    where = keys.Key("acme:u:memory", "s")
    await driver.append(where, b"turn", initial_version="v", ttl=None)
    await store.save_memory_state("acme:u:s", {"a": 1})
    await store.delete_memory_state("acme:u:s")
    record = await driver.load(where)
    assert record is not None
    assert record.tail == (b"turn",)


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("acme:u:s", ("acme", "u")),
        ("kv:v1:acme:u:any:thing", ("acme", "u")),
        ("some string", None),
        ("acme:u", None),
    ],
)
async def test_the_owner_of_a_key_is_listed(
    driver: Driver, store: StateStore, key: str, owner: tuple[str, str] | None
) -> None:
    await store.save_memory_state(key, {})
    listed = [("acme", user) async for user in Directory(driver, Codec()).users("acme")]
    assert listed == ([owner] if owner else [])


async def test_a_state_created_just_after_an_erasure_is_listed(driver: Driver, store: StateStore) -> None:
    await store.save_memory_state("acme:u:s", {})
    elsewhere = Directory(driver, Codec())
    await elsewhere.forget("acme", "u")
    assert await store.save_if("acme:u:t", {}, expect=None)
    assert [user async for user in elsewhere.users("acme")] == ["u"]


async def test_no_save_leaves_a_state_whose_owner_is_not_listed(driver: Driver, store: StateStore) -> None:
    elsewhere = Backend(driver).sessions
    await store.save_memory_state("acme:u:s", {"n": 1})
    await elsewhere.erase_tenant("acme")
    await store.save_memory_state("acme:u:s", {"n": 2})
    assert [user async for user in elsewhere.users("acme")] == ["u"]
    assert await elsewhere.erase_tenant("acme") == 1
    assert await store.load_memory_state("acme:u:s") is None


async def test_a_save_onto_what_was_loaded_is_one_round_trip(driver: Driver, calls: list[str]) -> None:
    await store_on(driver).save_memory_state("acme:u:s", {})
    other = store_on(driver)
    await other.save_memory_state("acme:u:t", {})
    await other.load_memory_state("acme:u:s")
    calls.clear()
    await other.save_memory_state("acme:u:s", {})
    assert calls == ["replace"]


async def test_the_last_save_wins_over_one_that_this_store_has_not_seen(driver: Driver) -> None:
    mine, theirs = store_on(driver), store_on(driver)
    for number, one in enumerate((mine, theirs, mine, theirs)):
        await one.save_memory_state("acme:u:s", {"n": number})
        assert await mine.load_memory_state("other") is None
    assert await mine.load_memory_state("acme:u:s") == {"n": 3}


async def test_a_store_remembers_a_bounded_number_of_versions(
    driver: Driver, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.records.state_store.REMEMBERED_VERSIONS", 2)
    store = store_on(driver)
    for name in "abc":
        await store.save_memory_state(f"acme:u:{name}", {"of": name})
    calls.clear()
    await store.save_memory_state("acme:u:c", {})
    assert calls == ["replace"]
    await store.save_memory_state("acme:u:a", {"of": "a again"})
    assert calls == ["replace", "replace", "load"]
    assert await store.load_memory_state("acme:u:a") == {"of": "a again"}


# Time


@pytest.fixture
def ttls(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The scope and the time to live of each replace."""
    noted: list[tuple[str, Any]] = []
    replace = driver.replace

    async def replacing(key: keys.Key, body: bytes, **options: Any) -> bool:
        noted.append((key.scope, options["ttl"]))
        return await replace(key, body, **options)

    monkeypatch.setattr(driver, "replace", replacing)
    return noted


async def test_a_state_has_no_time_to_live_by_default(store: StateStore, ttls: list[tuple[str, Any]]) -> None:
    await store.save_memory_state("k", {})
    await store.save_memory_state("k", {}, ttl=30)
    _, version = await store.load_versioned("k")
    await store.save_if("k", {}, expect=version)
    _, version = await store.load_versioned("k")
    await store.save_if("k", {}, expect=version, ttl=5)
    assert [ttl for scope, ttl in ttls if scope == keys.OTHER_BLOBS] == [None, 30, None, 5]


async def test_a_state_that_has_expired_is_not_there(store: StateStore) -> None:
    await store.save_memory_state("k", {"a": 1}, ttl=0.05)
    await asyncio.sleep(0.1)
    assert await store.load_memory_state("k") is None
    assert await store.save_if("k", {"a": 2}, expect=None)


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("ttl", [0, -1, math.nan])
async def test_an_invalid_time_to_live_raises(store: StateStore, ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        await store.save_memory_state("k", {}, ttl=ttl)


# Saving on a condition


async def test_every_save_changes_the_version(store: StateStore) -> None:
    await store.save_memory_state("k", {})
    _, first = await store.load_versioned("k")
    await store.save_memory_state("k", {})
    _, second = await store.load_versioned("k")
    assert first != second
    assert not await store.save_if("k", {}, expect=first)


async def test_save_if_onto_what_was_deleted_is_a_lost_race(store: StateStore) -> None:
    await store.save_memory_state("k", {})
    _, version = await store.load_versioned("k")
    assert await store.delete_memory_state("k")
    assert not await store.delete_memory_state("k")
    assert not await store.save_if("k", {}, expect=version)
    assert await store.load_memory_state("k") is None


# Lost answers


@pytest.mark.parametrize("done", [True, False])
async def test_a_save_whose_answer_was_lost_is_retried(
    store: StateStore, lose: Any, calls: list[str], done: bool
) -> None:
    lose("replace", done=done)
    await store.save_memory_state("k", {"a": 1})
    assert await store.load_memory_state("k") == {"a": 1}


async def test_a_save_whose_every_answer_is_lost_is_of_unknown_outcome(store: StateStore, lose: Any) -> None:
    lose("replace", done=True, times=ATTEMPTS)
    with pytest.raises(OutcomeUnknown):
        await store.save_memory_state("k", {"a": 1})


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("there", [True, False])
async def test_a_conditional_save_whose_answer_was_lost_is_settled(
    store: StateStore, lose: Any, done: bool, there: bool
) -> None:
    if there:
        await store.save_memory_state("k", {"n": 0})
    _, version = await store.load_versioned("k")
    lose("replace", done=done)
    assert await store.save_if("k", {"n": 1}, expect=version)
    assert await store.load_memory_state("k") == {"n": 1}


@pytest.mark.parametrize("done", [True, False])
async def test_a_third_version_found_when_settling_is_a_lost_race(
    store: StateStore, lose: Any, done: bool
) -> None:
    await store.save_memory_state("k", {"n": 0})
    _, version = await store.load_versioned("k")
    lose("replace", done=done, then=lambda: store.save_memory_state("k", {"n": "theirs"}))
    assert not await store.save_if("k", {"n": "ours"}, expect=version)
    assert await store.load_memory_state("k") == {"n": "theirs"}


async def test_a_creation_that_another_store_replaced_lists_its_user(
    store: StateStore, driver: Driver, lose: Any
) -> None:
    theirs, elsewhere = store_on(driver), Backend(driver).sessions
    for one in (store, theirs):
        await one.save_memory_state("acme:u:s", {})
    await elsewhere.erase_tenant("acme")

    async def replaced() -> None:
        _, version = await theirs.load_versioned("acme:u:t")
        assert await theirs.save_if("acme:u:t", {"n": "theirs"}, expect=version)

    lose("replace", done=True, then=replaced)
    assert not await store.save_if("acme:u:t", {"n": "ours"}, expect=None)
    assert [user async for user in elsewhere.users("acme")] == ["u"]


async def test_a_lost_answer_is_settled_by_the_write_and_not_by_a_load(
    store: StateStore, driver: Driver, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(_: keys.Key) -> Any:
        raise Unavailable("down", backend=driver.name, operation="load")

    lose("replace", done=True)
    # A load may show what is not confirmed.
    with monkeypatch.context() as patch:
        patch.setattr(driver, "load", down)
        assert await store.save_if("k", {"n": 1}, expect=None)
    assert await store.load_memory_state("k") == {"n": 1}


async def test_an_outcome_stays_unknown_when_the_second_attempt_is_refused(
    store: StateStore, lose: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> bool:
        raise Unavailable("down", backend=driver.name, operation="replace")

    async def later() -> None:
        monkeypatch.setattr(driver, "replace", refused)

    lose("replace", done=False, then=later)
    # `Unavailable` would say that the first attempt was not done, too.
    with pytest.raises(OutcomeUnknown):
        await store.save_if("k", {}, expect=None)


# Paused runs

RUN = {"trajectory": {"query": "q", "steps": []}, "reason": "approval_required", "tool_context": None}
OWNED = RUN | {"tool_context": {"tenant_id": "acme", "user_id": " u ", "session_id": "s"}}


async def test_a_paused_run_is_handed_out_in_another_process_and_only_once(driver: Driver) -> None:
    await store_on(driver).save_planner_state("token", RUN)
    elsewhere = store_on(driver)
    assert await elsewhere.load_planner_state("token") == RUN
    assert await elsewhere.load_planner_state("token") is None
    assert await elsewhere.load_planner_state("never saved") is None


async def test_one_of_many_concurrent_callers_gets_the_run(driver: Driver) -> None:
    await store_on(driver).save_planner_state("token", RUN)
    loading = [store_on(driver).load_planner_state("token") for _ in range(10)]
    assert sorted(map(str, await asyncio.gather(*loading))) == sorted([str(RUN), *["None"] * 9])


async def test_a_run_whose_loading_is_overtaken_after_its_load_is_not_handed_out(
    driver: Driver, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.save_planner_state("token", RUN)
    delete, elsewhere = driver.delete, store_on(driver)

    async def overtaken(*args: Any, **options: Any) -> bool:
        monkeypatch.undo()
        assert await elsewhere.load_planner_state("token") == RUN
        return await delete(*args, **options)

    monkeypatch.setattr(driver, "delete", overtaken)
    assert await store.load_planner_state("token") is None


async def test_a_run_paused_again_under_its_token_is_returned_again(store: StateStore) -> None:
    for reason in ("await_input", "approval_required"):
        await store.save_planner_state("token", RUN | {"reason": reason})
        assert await store.load_planner_state("token") == RUN | {"reason": reason}


async def test_a_run_and_the_note_of_whose_it_is_wait_for_an_hour(
    store: StateStore, ttls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.save_planner_state("token", OWNED)
    assert [ttl for scope, ttl in ttls if scope.endswith("planner")] == [3600, 3600]
    monkeypatch.setattr("stm_backends.records.state_store.PLANNER_STATE_TTL_S", 0.05)
    await store.save_planner_state("token", RUN)
    await asyncio.sleep(0.1)
    assert await store.load_planner_state("token") is None


async def test_a_token_and_a_key_of_the_same_text_are_different(store: StateStore) -> None:
    for key in DIFFICULT_KEYS:
        await store.save_memory_state(key, {"a": key})
        await store.save_planner_state(key, RUN | {"of": key})
    for key in DIFFICULT_KEYS:
        assert await store.load_planner_state(key) == RUN | {"of": key}
        assert await store.load_memory_state(key) == {"a": key}
    assert await store.delete_memory_state("a")
    assert [await store.load_memory_state(key) is None for key in DIFFICULT_KEYS].count(True) == 1


async def test_a_run_is_erased_with_the_user_that_its_tool_context_names(
    driver: Driver, store: StateStore
) -> None:
    await store.save_planner_state("mine", OWNED)
    await store.save_planner_state("nobody's", RUN)
    sessions = Backend(driver).sessions
    assert [user async for user in sessions.users("acme")] == ["u"]
    assert await sessions.erase_tenant("acme") == 1
    assert await store.load_planner_state("mine") is None
    assert await store.load_planner_state("nobody's") == RUN


@pytest.mark.parametrize(
    ("context", "isolation"),
    [
        ({"tenant_id": "acme", "user_id": "u"}, None),
        ({"tenant_id": 7, "user_id": 0}, None),
        ({"tenant_id": True, "user_id": 1.5}, None),
        ({"user_id": "u"}, None),
        ({"tenant_id": "acme"}, None),
        ({}, None),
        ({"org": {"id": "acme"}, "who": "u"}, MemoryIsolation("org.id", "who")),
        ({"org": {"id": "a:b"}, "who": "%"}, MemoryIsolation("org.id", "who")),
    ],
)
async def test_a_run_is_found_by_every_owner_that_the_resolver_finds(
    driver: Driver, context: dict[str, Any], isolation: MemoryIsolation | None
) -> None:
    backend = Backend(driver, isolation=isolation)
    key = resolve_memory_key(context | {"session_id": "s"}, isolation)
    assert key is not None
    await backend.state_store.save_planner_state("token", RUN | {"tool_context": context})
    receipt = await backend.sessions.erase_with_receipt(key.tenant_id, key.user_id)
    assert receipt.erased["paused_runs"] == 1
    assert await backend.state_store.load_planner_state("token") is None


async def test_a_run_is_found_by_the_ids_that_penguiflow_strips(driver: Driver) -> None:
    backend = Backend(driver)
    context = {"tenant_id": " acme ", "user_id": "u\n"}
    await backend.state_store.save_planner_state("token", RUN | {"tool_context": context})
    assert await backend.sessions.erase_user("acme", "u") == 1


async def test_an_owner_that_is_too_long_is_refused_before_a_run_is_saved(
    driver: Driver, store: StateStore
) -> None:
    context = {"tenant_id": "t" * 2_000, "user_id": "u"}
    with pytest.raises(InvalidKey):
        await store.save_planner_state("token", RUN | {"tool_context": context})
    assert await store.load_planner_state("token") is None


@pytest.mark.parametrize(
    "context", [None, {}, {"tenant_id": "acme"}, {"tenant_id": "acme", "user_id": " "}, 7]
)
async def test_a_run_that_names_no_user_is_kept_too(store: StateStore, context: Any) -> None:
    await store.save_planner_state("token", RUN | {"tool_context": context})
    assert await store.load_planner_state("token") == RUN | {"tool_context": context}


async def test_a_run_that_is_not_json_is_refused_and_not_kept(store: StateStore) -> None:
    with pytest.raises(InvalidState, match=r"state\.payload"):
        await store.save_planner_state("token", RUN | {"payload": object()})
    assert await store.load_planner_state("token") is None


async def test_a_paused_run_is_claimed_again_when_the_answer_was_lost(store: StateStore, lose: Any) -> None:
    await store.save_planner_state("token", RUN)
    lose("delete", done=False)
    assert await store.load_planner_state("token") == RUN
    assert await store.load_planner_state("token") is None


async def test_a_run_that_another_may_have_claimed_is_not_returned(store: StateStore, lose: Any) -> None:
    await store.save_planner_state("token", RUN)
    lose("delete", done=True)
    with pytest.raises(OutcomeUnknown):
        await store.load_planner_state("token")
    assert await store.load_planner_state("token") is None


# What cannot be read


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("body", [b"", b"junk", b"stm/2 state\n{}", b"stm/1 turn\n{}", b"stm/1 state\n[1]"])
async def test_what_cannot_be_read_is_an_error_with_its_place_and_stays(
    driver: Driver, store: StateStore, body: bytes
) -> None:
    await driver.replace(keys.blob_key("k"), body, version="v", expect=ANY, ttl=None)
    with pytest.raises(Corrupt) as caught:
        await store.load_memory_state("k")
    assert (caught.value.backend, caught.value.operation) == (driver.name, "load_memory_state")
    record = await driver.load(keys.blob_key("k"))
    assert record is not None
    assert record.body == body


async def test_entries_where_a_state_should_be_are_not_a_state(driver: Driver, store: StateStore) -> None:
    await driver.append(keys.blob_key("k"), b"entry", initial_version="v", ttl=None)
    with pytest.raises(Corrupt):
        await store.load_memory_state("k")


async def test_a_transform_is_applied_to_what_is_stored(driver: Driver, store: StateStore) -> None:
    await store_on(driver, Zlib()).save_memory_state("k", {"text": "x" * 10_000})
    record = await driver.load(keys.blob_key("k"))
    assert record is not None
    assert len(record.body or b"") < 200
    assert await store_on(driver, Zlib()).load_memory_state("k") == {"text": "x" * 10_000}
    with pytest.raises(Corrupt, match="zlib"):
        await store.load_memory_state("k")


async def test_a_newer_state_fails_to_load_and_a_plain_save_replaces_it(
    driver: Driver, store: StateStore
) -> None:
    future = b'stm/2 state\n{"version": 2}'
    where = keys.blob_key("acme:u:s")
    await driver.replace(where, future, version="v", expect=ANY, ttl=None)
    memory = DefaultShortTermMemory(config=ShortTermMemoryConfig(strategy="truncation"))
    await memory.add_turn(ConversationTurn("u1", "a"))
    for use in (memory.hydrate, memory.persist):
        with pytest.raises(Corrupt):
            await use(store, "acme:u:s")
        record = await driver.load(where)
        assert record is not None
        assert (record.body, record.version) == (future, "v")
    assert [turn.user_message for turn in await memory.turns()] == ["u1"]
    await store.save_memory_state("acme:u:s", {"version": 1})
    assert await store.load_memory_state("acme:u:s") == {"version": 1}


async def test_a_paused_run_is_returned_to_its_own_tenant_only(driver: Driver) -> None:
    store = store_on(driver)
    owned = {**RUN, "tool_context": {"tenant_id": "acme", "user_id": "u"}}
    await store.save_planner_state("token", owned)
    assert await store.load_planner_state("token", tenant="other") is None
    assert await store.load_planner_state("token", tenant="acme") == owned
    # A run that names no tenant is nobody's who names one.
    await store.save_planner_state("token", RUN)
    assert await store.load_planner_state("token", tenant="acme") is None
    assert await store.load_planner_state("token") == RUN
