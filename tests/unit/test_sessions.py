"""Conversations listed, moved and erased."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from stm_backends.admin.sessions import Sessions
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, KEEP, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    OutcomeUnknown,
    SessionExists,
    SessionNotFound,
    Unavailable,
)
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys
from stm_backends.records.body import Body, Forgotten
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    StoredTurn,
    TrajectoryDigest,
)

KEY = MemoryKey("acme", "u", "s")
OTHER = MemoryKey("acme", "u", "other")
NO_KEYS: Any = (
    ("acme", "u", None),
    ("acme", None, "s"),
    (None, "u", "s"),
    ("acme", None, None),
    ("acme", "u", ""),
)
CODEC = Codec()

FOLDED = Body(
    summary="they talked",
    health=MemoryHealth.RETRY,
    attempts=2,
    next_attempt_at=1234.5,
    folded=2,
    dropped=1,
    forgotten=Forgotten().adding(["t1", "t2"], now=1000.0, keep_for=60.0),
    extra={"mood": {"of a newer version": [1]}},
)


def turn(number: int) -> ConversationTurn:
    return ConversationTurn(
        f"question {number}",
        f"answer {number} \ud800",
        TrajectoryDigest(["search"], "found it", None, ["a1"]) if number % 2 else None,
        {"card": number},
        ["hidden"],
        float(number),
    )


@pytest.fixture
def backend(driver: Driver) -> Backend:
    return Backend(driver)


@pytest.fixture
def sessions(backend: Backend) -> Sessions:
    return backend.sessions


async def store(backend: Backend, key: MemoryKey, body: Body | None, *numbers: int) -> None:
    """Put a conversation of these turns there, ids `t<number>`."""
    where = keys.memory_key(key)
    if body is not None:
        await backend.driver.replace(where, CODEC.seal_body(body), version="v", expect=ANY, ttl=None)
    for number in numbers:
        entry = CODEC.seal_turn(StoredTurn(f"t{number}", turn(number)))
        await backend.driver.append(where, entry, initial_version="v", ttl=None)


async def snapshot(backend: Backend, key: MemoryKey) -> Snapshot:
    return Snapshot.of(await backend.driver.load(keys.memory_key(key)), CODEC)


async def ids(backend: Backend, key: MemoryKey) -> list[str]:
    return [stored.id for stored in (await snapshot(backend, key)).turns]


async def listed(sessions: Sessions, tenant: str = "acme", user: str = "u") -> list[MemoryKey]:
    return [key async for key in sessions.list(tenant, user)]


async def users(sessions: Sessions, tenant: str = "acme") -> list[str]:
    return [user async for user in sessions.users(tenant)]


def elsewhere(document: dict[str, Any], key: MemoryKey) -> dict[str, Any]:
    parts = {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}
    return {**document, "key": parts}


async def exported(
    backend: Backend, body: Body | None, *numbers: int, key: MemoryKey = KEY, under: MemoryKey = OTHER
) -> dict[str, Any]:
    """Store a conversation, and return its export as that of another key."""
    await store(backend, key, body, *numbers)
    return elsewhere(await backend.sessions.export(key), under)


# Listing


async def test_only_the_users_own_conversations_are_listed(backend: Backend, sessions: Sessions) -> None:
    mine = [MemoryKey("acme", "u", text) for text in ("%", "a", "a:b", "nul\0", "\ud800", "日本")]
    for key in (
        *mine,
        MemoryKey("acme", "u2", "a"),
        MemoryKey("acme:u", "x", "a"),
        MemoryKey("a", "cme", "a"),
    ):
        await store(backend, key, None, 1)
    assert sorted(await listed(sessions), key=repr) == sorted(mine, key=repr)


async def test_saved_states_are_not_listed(backend: Backend, sessions: Sessions) -> None:
    await backend.state_store.save_memory_state(KEY.composite(), {})
    assert await listed(sessions) == []


async def test_a_memory_lists_its_user_and_its_conversation(backend: Backend, sessions: Sessions) -> None:
    await backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation")).add_turn(turn(1))
    assert await listed(sessions) == [KEY]
    assert await users(sessions) == ["u"]


# Export


async def test_an_export_is_json_with_everything_that_is_stored(backend: Backend, sessions: Sessions) -> None:
    await store(backend, KEY, FOLDED, 3, 4)
    document = await sessions.export(KEY)
    assert document == {
        "format": "stm-session",
        "version": 1,
        "key": {"tenant_id": "acme", "user_id": "u", "session_id": "s"},
        "body": {
            "summary": "they talked",
            "health": "retry",
            "attempts": 2,
            "next_attempt_at": 1234.5,
            "folded": 2,
            "dropped": 1,
            "forgotten": {"digests": FOLDED.forgotten.digests, "ages": [[1002.0, 2]]},
            "mood": {"of a newer version": [1]},
        },
        "turns": [
            {
                "turn_id": f"t{number}",
                "user_message": f"question {number}",
                "assistant_response": f"answer {number} \ud800",
                "trajectory_digest": digest,
                "artifacts_shown": {"card": number},
                "artifacts_hidden_refs": ["hidden"],
                "ts": float(number),
            }
            for number, digest in (
                (
                    3,
                    {
                        "tools_invoked": ["search"],
                        "observations_summary": "found it",
                        "reasoning_summary": None,
                        "artifacts_refs": ["a1"],
                    },
                ),
                (4, None),
            )
        ],
    }
    assert json.loads(json.dumps(document)) == document


async def test_an_export_changes_nothing_and_loads_a_record_and_its_card(
    backend: Backend, sessions: Sessions, calls: list[str]
) -> None:
    await store(backend, KEY, FOLDED, 3, 4)
    before = await backend.driver.load(keys.memory_key(KEY))
    calls.clear()
    await sessions.export(KEY)
    assert calls == ["load", "load"]
    assert await backend.driver.load(keys.memory_key(KEY)) == before


async def test_repeats_of_a_turn_are_exported_once(backend: Backend, sessions: Sessions) -> None:
    await store(backend, KEY, FOLDED, 1, 3, 3, 4, 2, 3)
    assert [turn["turn_id"] for turn in (await sessions.export(KEY))["turns"]] == ["t3", "t4"]


async def test_what_is_not_there_cannot_be_exported(sessions: Sessions) -> None:
    with pytest.raises(SessionNotFound) as caught:
        await sessions.export(KEY)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("body", [b"junk", b"stm/2 body\n{}", b'stm/1 body\n{"attempts": "many"}'])
async def test_what_cannot_be_read_is_not_exported_and_can_be_erased(
    backend: Backend, sessions: Sessions, body: bytes
) -> None:
    await backend.driver.replace(keys.memory_key(KEY), body, version="v", expect=ANY, ttl=None)
    with pytest.raises(Corrupt) as caught:
        await sessions.export(KEY)
    assert (caught.value.backend, caught.value.operation) == (backend.name, "export")
    assert await listed(sessions) == [KEY]
    assert await sessions.erase(KEY)
    assert await listed(sessions) == []


async def test_half_a_conversation_is_not_exported(backend: Backend, sessions: Sessions) -> None:
    await store(backend, KEY, FOLDED, 3)
    await backend.driver.append(keys.memory_key(KEY), b"junk", initial_version="v", ttl=None)
    with pytest.raises(Corrupt):
        await sessions.export(KEY)


# Import


@pytest.mark.parametrize("body", [None, FOLDED])
async def test_an_import_restores_what_was_exported(
    backend: Backend, sessions: Sessions, body: Body | None
) -> None:
    await store(backend, KEY, body, 3, 4, 5)
    document = json.loads(json.dumps(await sessions.export(KEY)))
    assert await sessions.erase(KEY)
    assert await sessions.import_(document) == KEY
    assert await sessions.export(KEY) == document
    assert await users(sessions) == ["u"]


async def test_fields_of_a_newer_version_survive_an_export_and_an_import(
    backend: Backend, sessions: Sessions
) -> None:
    entry = CODEC.seal(
        "turn", {"turn_id": "t1", "user_message": "hi", "assistant_response": "", "mood": "good"}
    )
    await backend.driver.append(keys.memory_key(KEY), entry, initial_version="v", ttl=None)
    await sessions.copy(KEY, sessions, under=OTHER)
    record = await backend.driver.load(keys.memory_key(OTHER))
    assert record is not None
    assert CODEC.open("turn", record.tail[0])["mood"] == "good"


async def test_a_number_of_an_older_version_that_only_pythons_json_has_is_brought_along(
    backend: Backend, sessions: Sessions
) -> None:
    content = {"turn_id": "t1", "user_message": "hi", "assistant_response": "", "artifacts_shown": {"a": inf}}
    await backend.driver.append(
        keys.memory_key(KEY), CODEC.seal("turn", content), initial_version="v", ttl=None
    )
    document = json.loads(json.dumps(await sessions.export(KEY)))
    await sessions.import_(elsewhere(document, OTHER))
    for key in (KEY, OTHER):
        memory = backend.memory(key, ShortTermMemoryConfig(strategy="truncation"))
        assert (await memory.turns())[0].artifacts_shown == {"a": inf}


async def test_an_import_onto_a_conversation_is_refused_and_harms_nothing(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, FOLDED, 3)
    await store(backend, OTHER, None, 7)
    before = await backend.driver.load(keys.memory_key(OTHER))
    with pytest.raises(SessionExists):
        await sessions.import_(document)
    assert await backend.driver.load(keys.memory_key(OTHER)) == before


async def test_a_replacing_import_leaves_nothing_of_what_was_there(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, None, 1, 2)
    await store(backend, OTHER, FOLDED, 3, 4)
    await sessions.import_(document, on_conflict="replace")
    assert await sessions.export(OTHER) == document


async def test_a_merge_adds_the_missing_turns_and_keeps_the_summary(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, replace(FOLDED, summary="theirs", forgotten=Forgotten()), 1, 2, 3, 4)
    await store(backend, OTHER, FOLDED, 4, 9)
    await sessions.import_(document, on_conflict="merge")
    found = await snapshot(backend, OTHER)
    assert found.body == FOLDED
    # 1 and 2 are in the summary that is there.
    assert [stored.id for stored in found.turns] == ["t4", "t9", "t3"]
    assert len(found.tail) == 3


async def test_a_merge_gives_a_conversation_that_has_no_summary_the_imported_one(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, FOLDED, 3)
    await store(backend, OTHER, None, 2, 9)
    await sessions.import_(document, on_conflict="merge")
    found = await snapshot(backend, OTHER)
    assert found.body == FOLDED
    # 2 is covered by the summary that came.
    assert [stored.id for stored in found.turns] == ["t9", "t3"]


@pytest.mark.parametrize(
    "body", [Body(folded=1), Body(forgotten=Forgotten().adding(["t8"], now=0.0, keep_for=60.0))]
)
async def test_a_merge_after_a_fold_or_trim_keeps_even_an_empty_summary(
    backend: Backend, sessions: Sessions, body: Body
) -> None:
    document = await exported(backend, FOLDED, 3)
    await store(backend, OTHER, body, 9)
    await sessions.import_(document, on_conflict="merge")
    assert (await snapshot(backend, OTHER)).body == body


async def test_an_imported_summary_does_not_lengthen_a_conversations_life(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await exported(backend, FOLDED)
    await store(backend, OTHER, None, 9)
    ttls: list[object] = []
    call = backend.driver.replace

    async def replacing(key: Key, data: bytes, **options: Any) -> bool:
        done = await call(key, data, **options)
        if done and key == keys.memory_key(OTHER):
            ttls.append(options["ttl"])
        return done

    monkeypatch.setattr(backend.driver, "replace", replacing)
    await sessions.import_(document, on_conflict="merge")
    assert ttls == [KEEP]


async def test_merging_twice_is_merging_once(backend: Backend, sessions: Sessions) -> None:
    document = await exported(backend, FOLDED, 3, 4)
    await store(backend, OTHER, None, 9)
    await sessions.import_(document, on_conflict="merge")
    once = await backend.driver.load(keys.memory_key(OTHER))
    await sessions.import_(document, on_conflict="merge")
    assert await backend.driver.load(keys.memory_key(OTHER)) == once


@pytest.mark.parametrize("there", [None, Body(health=MemoryHealth.RETRY, attempts=1)])
async def test_merging_an_identical_conversation_writes_nothing(
    backend: Backend, sessions: Sessions, there: Body | None
) -> None:
    await store(backend, KEY, there, 1, 2)
    before = await backend.driver.load(keys.memory_key(KEY))
    for _ in range(2):
        await sessions.import_(await sessions.export(KEY), on_conflict="merge")
        assert await backend.driver.load(keys.memory_key(KEY)) == before


def left(numbers: range, *, counted: bool = True) -> Body:
    """The body of a conversation that these turns have left: summarized, or dropped by truncation."""
    forgotten = Forgotten().adding([f"t{number}" for number in numbers], now=0.0, keep_for=0.0)
    return Body(summary="S" if counted else "", folded=len(numbers) if counted else 0, forgotten=forgotten)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("held", [range(3), range(100, 105), range(290, 300), range(299, 303)])
async def test_merging_an_older_export_brings_back_nothing_that_has_left(
    backend: Backend, sessions: Sessions, held: range, counted: bool
) -> None:
    """Of 301 turns that have left, the last 256 are remembered."""
    document = await exported(backend, left(range(held.start), counted=counted), *held, key=OTHER, under=KEY)
    await store(backend, KEY, left(range(301), counted=counted), 301, 302, 303)
    before = await backend.driver.load(keys.memory_key(KEY))
    await sessions.import_(document, on_conflict="merge")
    assert await backend.driver.load(keys.memory_key(KEY)) == before


async def test_merging_an_older_export_restores_no_summarized_turn(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, None, 0, 1, key=OTHER, under=KEY)
    for one in document["turns"]:
        one["ts"] = 0.0
    await store(backend, KEY, left(range(301)), 301)
    await sessions.import_(document, on_conflict="merge")
    assert await ids(backend, KEY) == ["t301"]


@pytest.mark.parametrize("held", [range(300, 306), range(303, 306), range(304, 306)])
async def test_later_turns_are_missing_from_a_conversation_that_forgot_much(
    backend: Backend, sessions: Sessions, held: range
) -> None:
    document = await exported(backend, left(range(held.start)), *held, key=OTHER, under=KEY)
    await store(backend, KEY, left(range(301)), 301, 302, 303)
    await sessions.import_(document, on_conflict="merge")
    assert await ids(backend, KEY) == ["t301", "t302", "t303", "t304", "t305"]


async def test_an_interrupted_import_of_a_long_conversation_is_completed(
    backend: Backend, sessions: Sessions
) -> None:
    document = await exported(backend, left(range(400)), 400, 401)
    await store(backend, OTHER, left(range(400)))
    await sessions.import_(document, on_conflict="merge")
    assert await ids(backend, OTHER) == ["t400", "t401"]


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("body", [None, FOLDED])
@pytest.mark.parametrize("first", ["refuse", "replace", "merge"])
@pytest.mark.parametrize("write", range(7))
@pytest.mark.parametrize("done", [True, False])
async def test_an_import_interrupted_at_any_write_is_completed_by_a_merge(
    backend: Backend,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    body: Body | None,
    first: Any,
    write: int,
    done: bool,
) -> None:
    document = await exported(backend, body, 3, 4, 5, under=MemoryKey("new", "tenant", "s"))
    left = write

    def interrupted(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def calling(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if done and left == -1:
                    await call(*args, **options)
                raise Unavailable("the process dies here")
            return await call(*args, **options)

        return calling

    with monkeypatch.context() as patch:
        patch.setattr(backend.driver, "replace", interrupted(backend.driver.replace))
        patch.setattr(backend.driver, "append", interrupted(backend.driver.append))
        try:
            await sessions.import_(document, on_conflict=first)
        except Unavailable:
            assert left < 0
        else:
            assert left >= 0
    again = Backend(backend.driver).sessions
    await again.import_(document, on_conflict="merge")
    key = MemoryKey("new", "tenant", "s")
    assert await again.export(key) == document
    assert await listed(again, "new", "tenant") == [key]
    assert await users(again, "new") == ["tenant"]


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize("operation", ["append", "replace"])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("on_conflict", ["refuse", "replace", "merge"])
async def test_lost_answers_do_not_double_or_lose_anything(
    backend: Backend, sessions: Sessions, lose: Any, operation: str, done: bool, on_conflict: Any
) -> None:
    document = await exported(backend, FOLDED, 3, 4)
    if on_conflict == "merge":
        await store(backend, OTHER, Body(), 3)
    lose(operation, done=done, times=2)
    await sessions.import_(document, on_conflict=on_conflict)
    assert await sessions.export(OTHER) == document


async def test_a_merge_that_meets_a_fold_starts_from_what_is_there_then(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await exported(backend, FOLDED, 3)
    await store(backend, OTHER, None, 7, 8)
    folded = Body(summary="7", folded=1, forgotten=Forgotten().adding(["t7"], now=0.0, keep_for=60.0))
    call = backend.driver.load

    async def loading(key: Key) -> Any:
        record = await call(key)
        if key != keys.memory_key(OTHER):
            return record
        monkeypatch.undo()
        data = CODEC.seal_body(folded)
        assert record is not None
        assert await backend.driver.replace(
            key, data, version="fold", expect=record.version, drop=1, ttl=KEEP
        )
        return record

    monkeypatch.setattr(backend.driver, "load", loading)
    await sessions.import_(document, on_conflict="merge")
    found = await snapshot(backend, OTHER)
    assert found.body == folded
    assert [stored.id for stored in found.turns] == ["t8", "t3"]


async def test_a_merge_into_a_conversation_erased_in_between_is_an_import(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await exported(backend, FOLDED, 3)
    await store(backend, OTHER, None, 7)
    call = backend.driver.load

    async def loading(key: Key) -> Any:
        monkeypatch.undo()
        await sessions.erase(OTHER)
        return await call(key)

    monkeypatch.setattr(backend.driver, "load", loading)
    await sessions.import_(document, on_conflict="merge")
    assert await sessions.export(OTHER) == document


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
async def test_a_merge_never_overwrites_what_it_cannot_read(backend: Backend, sessions: Sessions) -> None:
    document = await exported(backend, FOLDED, 3)
    where = keys.memory_key(OTHER)
    await backend.driver.replace(where, b"stm/2 body\n{}", version="v", expect=ANY, ttl=None)
    before = await backend.driver.load(where)
    with pytest.raises(Corrupt):
        await sessions.import_(document, on_conflict="merge")
    assert await backend.driver.load(where) == before


async def test_an_imported_conversation_goes_on(backend: Backend, sessions: Sessions) -> None:
    await store(backend, KEY, FOLDED, 3, 4)
    await sessions.copy(KEY, sessions, under=OTHER)
    memory = backend.memory(OTHER, ShortTermMemoryConfig(strategy="truncation"))
    await memory.add_turn(turn(3), turn_id="t3")
    await memory.add_turn(turn(1), turn_id="t1")
    await memory.add_turn(turn(9), turn_id="t9")
    assert await ids(backend, OTHER) == ["t3", "t4", "t9"]


GOOD: dict[str, Any] = {
    "format": "stm-session",
    "version": 1,
    "key": {"tenant_id": "acme", "user_id": "u", "session_id": "s"},
    "body": {},
    "turns": [{"turn_id": "t1", "user_message": "a", "assistant_response": "b"}],
}


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
async def test_a_document_with_the_least_there_can_be_is_taken(backend: Backend, sessions: Sessions) -> None:
    await sessions.import_(GOOD)
    assert await ids(backend, KEY) == ["t1"]
    assert (await snapshot(backend, KEY)).body == Body()


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        None,
        GOOD | {"format": "something else"},
        GOOD | {"version": 3},
        GOOD | {"version": "1"},
        GOOD | {"key": "acme:u:s"},
        GOOD | {"key": {"tenant_id": "acme", "user_id": "u"}},
        GOOD | {"key": {"tenant_id": "acme", "user_id": "u", "session_id": " "}},
        GOOD | {"key": {"tenant_id": 1, "user_id": "u", "session_id": "s"}},
        GOOD | {"body": None},
        GOOD | {"body": {"health": "superb"}},
        GOOD | {"body": {"attempts": []}},
        GOOD | {"body": {"folded": float("inf")}},
        GOOD | {"body": {"forgotten": 3}},
        GOOD | {"body": {"odd": {1: 2}}},
        GOOD | {"turns": None},
        GOOD | {"turns": {}},
        GOOD | {"turns": ["text"]},
        GOOD | {"turns": [{"user_message": "a", "assistant_response": "b"}]},
        GOOD | {"turns": [*GOOD["turns"], {"turn_id": 2}]},
        GOOD | {"turns": [*GOOD["turns"], {"turn_id": "t2", "trajectory_digest": 3}]},
        GOOD | {"turns": [*GOOD["turns"], {"turn_id": "t2", "odd": {1: 2}}]},
    ],
)
async def test_an_invalid_document_raises_before_anything_is_written(
    sessions: Sessions, calls: list[str], document: Any
) -> None:
    with pytest.raises((InvalidState, InvalidKey)):
        await sessions.import_(document)
    assert calls == []


@pytest.mark.parametrize("driver", ["memory"], indirect=True)
async def test_an_unknown_value_of_on_conflict_raises(sessions: Sessions, calls: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="refuse, merge, replace"):
        await sessions.import_(GOOD, on_conflict="overwrite")  # type: ignore[arg-type]
    assert calls == []


# Copy


async def test_a_copy_on_another_backend_is_equal_and_leaves_the_original(
    backend: Backend, sessions: Sessions
) -> None:
    await store(backend, KEY, FOLDED, 3, 4)
    async with Backend(MemoryDriver()) as other:
        assert await sessions.copy(KEY, other.sessions) == KEY
        assert await other.sessions.export(KEY) == await sessions.export(KEY)
        assert await users(other.sessions) == ["u"]
        with pytest.raises(SessionExists):
            await sessions.copy(KEY, other.sessions)


# Erasure


async def everything_of(backend: Backend, key: MemoryKey) -> list[Key]:
    """Store one record of every kind for the owner of `key`, and return where."""
    await backend.memory(key, ShortTermMemoryConfig(strategy="truncation")).add_turn(turn(1))
    await backend.state_store.save_memory_state(key.composite(), {})
    owner = (key.tenant_id, key.user_id)
    places = [keys.memory_key(key), keys.blob_key(key.composite())]
    places += [keys.planner_note_key(*owner, "p"), *(keys.log_key(key, kind) for kind in keys.LOG_KINDS)]
    places += [keys.vertex_key(*owner, "v")]
    for place in places[2:]:
        await backend.driver.replace(place, b"x", version="v", expect=ANY, ttl=60)
    return places


async def standing(backend: Backend, places: list[Key]) -> list[bool]:
    return [await backend.driver.load(place) is not None for place in places]


async def test_erasing_a_conversation_erases_exactly_its_state_and_items(
    backend: Backend, sessions: Sessions
) -> None:
    places = await everything_of(backend, KEY)
    neighbours = await everything_of(backend, OTHER)
    assert await sessions.erase(KEY)
    logs = [False for _ in keys.LOG_KINDS]
    assert await standing(backend, places) == [False, False, True, *logs, True]
    assert all(await standing(backend, neighbours))
    assert not await sessions.erase(KEY)


@pytest.mark.parametrize("key", [KEY.composite(), None, *(MemoryKey(*parts) for parts in NO_KEYS)], ids=repr)
async def test_what_is_no_key_erases_and_reads_nothing(
    backend: Backend, sessions: Sessions, key: Any
) -> None:
    places = await everything_of(backend, KEY)
    for refused in (
        sessions.erase(key),
        sessions.export(key),
        sessions.copy(key, sessions),
        sessions.copy(KEY, sessions, under=key or " "),
        anext(sessions.export_lines(key)),
        anext(sessions.export_log_lines(key, "langchain")),
        backend.conversations.get(key),
        backend.conversations.update(key, title="Trip"),
    ):
        with pytest.raises(InvalidKey):
            await refused
    assert all(await standing(backend, places))


async def test_a_user_that_is_missing_does_not_erase_the_tenant(backend: Backend, sessions: Sessions) -> None:
    places = await everything_of(backend, KEY)
    missing: Any = None
    for refused in (
        sessions.erase_user("acme", missing),
        sessions.erase_user("acme", " "),
        sessions.erase_with_receipt("acme", missing, "s"),
    ):
        with pytest.raises(InvalidKey, match="user_id must be a string that is not blank"):
            await refused
    assert all(await standing(backend, places))


async def test_erasing_a_user_erases_every_kind_and_no_other_users_records(
    backend: Backend, sessions: Sessions
) -> None:
    mine = [*await everything_of(backend, KEY), *await everything_of(backend, OTHER)]
    others = [
        *await everything_of(backend, MemoryKey("acme", "u2", "s")),
        *await everything_of(backend, MemoryKey("acme2", "u", "s")),
        *await everything_of(backend, MemoryKey("acme", "u:memory", "s")),
    ]
    stored = {place.scope.rpartition(":")[2] for place in mine}
    assert len(stored | {"page", "card", "recent", "words", "part"}) == len(keys.KINDS)
    assert await sessions.erase_user("acme", "u") == len(set(mine))
    assert not any(await standing(backend, mine))
    assert all(await standing(backend, others))
    assert await users(sessions) == ["u2", "u:memory"]
    assert await sessions.erase_user("acme", "u") == 0


async def test_erasing_a_tenant_takes_every_user_of_theirs(backend: Backend, sessions: Sessions) -> None:
    mine = [
        place
        for user in ("u1", "u2", "u:3", "%")
        for place in await everything_of(backend, MemoryKey("acme", user, "s"))
    ]
    others = await everything_of(backend, MemoryKey("acme:u1", "u", "s"))
    assert await sessions.erase_tenant("acme") == len(mine)
    assert not any(await standing(backend, mine))
    assert all(await standing(backend, others))
    assert await users(sessions) == []
    assert await sessions.erase_tenant("acme") == 0


async def test_many_conversations_are_erased_over_pages(backend: Backend, sessions: Sessions) -> None:
    for number in range(450):
        await store(backend, MemoryKey("acme", "u", f"s{number}"), None, 1)
    assert await sessions.erase_user("acme", "u") == 450
    assert await listed(sessions) == []


async def test_a_conversation_created_during_an_erasure_stays_listed(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Backend(backend.driver)
    memory = other.memory(OTHER, ShortTermMemoryConfig(strategy="truncation"))
    await memory.add_turn(turn(1))
    delete = backend.driver.delete

    async def deleting(key: Key, **options: Any) -> bool:
        if key == keys.directory_key("acme", "u"):
            monkeypatch.undo()
            await memory.add_turn(turn(2))
        return await delete(key, **options)

    monkeypatch.setattr(backend.driver, "delete", deleting)
    await sessions.erase_user("acme", "u")
    # The card of the first turn, which may be written meanwhile, takes the user from the list for a moment.
    await other.close()
    await backend.open()
    assert await listed(sessions) == [OTHER]
    assert await users(sessions) == ["u"]


async def test_a_conversation_created_after_an_erasure_is_listed(
    backend: Backend, sessions: Sessions
) -> None:
    other = Backend(backend.driver)
    memory = other.memory(OTHER, ShortTermMemoryConfig(strategy="truncation"))
    await memory.add_turn(turn(1))
    await sessions.erase_user("acme", "u")
    await memory.add_turn(turn(2))
    # The card of the first turn, which may be written meanwhile, takes the user from the list for a moment.
    await other.close()
    await backend.open()
    assert await users(sessions) == ["u"]


async def test_an_import_during_an_erasure_of_its_user_keeps_the_user_listed(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = backend.driver.append

    async def appending(*args: Any, **options: Any) -> int:
        monkeypatch.undo()
        await Backend(backend.driver).sessions.erase_user("acme", "u")
        return await append(*args, **options)

    monkeypatch.setattr(backend.driver, "append", appending)
    await sessions.import_(GOOD)
    assert await listed(sessions) == [KEY]
    assert await users(sessions) == ["u"]


async def test_an_import_without_turns_lists_a_user_who_was_erased_elsewhere(
    backend: Backend, sessions: Sessions
) -> None:
    await sessions.import_(GOOD)
    await Backend(backend.driver).sessions.erase_user("acme", "u")
    await sessions.import_(GOOD | {"turns": []})
    assert await listed(sessions) == [KEY]
    assert await users(sessions) == ["u"]


async def test_an_erasure_whose_answer_was_lost_is_of_unknown_outcome(
    backend: Backend, sessions: Sessions, lose: Any
) -> None:
    await store(backend, KEY, None, 1)
    lose("delete", done=True)
    with pytest.raises(OutcomeUnknown):
        await sessions.erase(KEY)


async def saved(backend: Backend, *texts: str) -> None:
    for text in texts:
        await backend.state_store.save_memory_state(text, {"of": text})


async def remaining(backend: Backend, *texts: str) -> list[str]:
    return [text for text in texts if await backend.state_store.load_memory_state(text) is not None]


@pytest.mark.parametrize(
    "key", [MemoryKey("a:b", "c", "d"), MemoryKey("a", "b:c", "d"), MemoryKey("a", "b", "c:d")]
)
async def test_erasing_a_key_with_colons_spares_states_of_other_conversations(
    backend: Backend, sessions: Sessions, key: MemoryKey
) -> None:
    foreign = ("kv:v1:a:b:c:d:notes", "kv:v1:a:b:c:d", "kv:v1:a:b:c:d:")
    await saved(backend, *foreign, key.composite())
    assert await sessions.erase(key)
    assert await remaining(backend, *foreign, key.composite()) == [*foreign]


async def test_erasing_a_conversation_erases_only_its_own_saved_states(
    backend: Backend, sessions: Sessions
) -> None:
    own = ("kv:v1:acme:u:s", "kv:v1:acme:u:s:", "kv:v1:acme:u:s:notes", "kv:v1:acme:u:s::")
    own += ("kv:v1:acme:u:s:task:t:ns:b", KEY.composite())
    foreign = ("kv:v1:acme:u:s2", "kv:v1:acme:u:", "kv:v1:acme:u:s2:", "kv:v1:acme:u2:s:", "acme:u:s2")
    await saved(backend, *own, *foreign)
    assert await sessions.erase(KEY)
    assert await remaining(backend, *own, *foreign) == [*foreign]


@pytest.mark.parametrize(
    "key",
    [
        MemoryKey("acme", "u", "s" * 995),
        MemoryKey("t" * 400, "u" * 400, "s" * 400),
        MemoryKey("acme", "u", "s" * 988),
    ],
)
async def test_a_conversation_whose_ids_are_too_long_for_a_saved_state_is_erased(
    backend: Backend, sessions: Sessions, key: MemoryKey
) -> None:
    await store(backend, key, None, 1)
    assert await sessions.erase(key)
    assert await backend.driver.load(keys.memory_key(key)) is None
    assert not await sessions.erase(key)


@pytest.mark.parametrize(("ttl", "immortal"), [(None, True), (0.05, False)])
async def test_a_merge_that_adds_a_turn_sets_the_given_time_to_live(
    backend: Backend, sessions: Sessions, ttl: float | None, immortal: bool
) -> None:
    document = await exported(backend, None, 1, 2, key=OTHER, under=KEY)
    entry = CODEC.seal_turn(StoredTurn("t1", turn(1)))
    await backend.driver.append(keys.memory_key(KEY), entry, initial_version="v", ttl=1.0)
    await sessions.import_(document, on_conflict="merge", ttl=ttl)
    await asyncio.sleep(1.1)
    assert (await listed(sessions) == [OTHER, KEY]) is immortal


async def test_a_merge_that_adds_nothing_leaves_a_conversations_life_as_it_is(
    backend: Backend, sessions: Sessions
) -> None:
    entry = CODEC.seal_turn(StoredTurn("t1", turn(1)))
    await backend.driver.append(keys.memory_key(KEY), entry, initial_version="v", ttl=1.0)
    await sessions.import_(await sessions.export(KEY), on_conflict="merge")
    await asyncio.sleep(1.1)
    assert await listed(sessions) == []


async def test_a_recovery_is_not_imported_as_one(backend: Backend, sessions: Sessions) -> None:
    document = await exported(backend, FOLDED, 3, key=OTHER, under=KEY)
    document["body"]["health"] = "recovering"
    await sessions.import_(document)
    assert (await snapshot(backend, KEY)).body.health is MemoryHealth.DEGRADED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": {"health": "a secret"}}, "body has a field"),
        ({"body": {"attempts": "a secret"}}, "body has a field"),
        ({"turns": [{"turn_id": "t", "ts": "a secret"}]}, r"turns\[0\] is not a turn"),
    ],
)
async def test_a_refused_document_is_not_quoted(
    sessions: Sessions, change: dict[str, Any], message: str
) -> None:
    parts = {"tenant_id": "acme", "user_id": "u", "session_id": "s"}
    document = {"format": "stm-session", "version": 1, "key": parts, "body": {}, "turns": [], **change}
    with pytest.raises(InvalidState, match=message) as refused:
        await sessions.import_(document)
    assert "secret" not in "".join(traceback.format_exception(refused.value))
    assert "none" not in str(refused.value)


async def test_a_creation_with_a_lost_answer_during_an_import_lists_its_user(
    backend: Backend, sessions: Sessions, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await exported(backend, None, 1, key=OTHER, under=KEY)
    directory = Directory(backend.driver, CODEC)
    # The second send of the append finds two entries: its own and the lost one.
    lose("append", done=True, then=lambda: directory.forget("acme", "u"))
    append = backend.driver.append

    async def erased_before(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(backend.driver, "append", append)
        await Sessions(backend.driver, CODEC, directory).erase_user("acme", "u")
        return await append(*args, **options)

    monkeypatch.setattr(backend.driver, "append", erased_before)
    await sessions.import_(document)
    assert await users(sessions) == ["u"]


async def test_a_creation_with_unknown_outcome_is_found_by_an_erasure(
    backend: Backend, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant is erased during a creation whose answer is lost; then the user continues."""
    memory = backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation"))
    append, lost = backend.driver.append, 0

    async def lose(*args: Any, **options: Any) -> int:
        nonlocal lost
        lost += 1
        if lost == 1:
            # By another process, whose directory knows nothing of what this one remembers.
            await Backend(backend.driver).sessions.erase_tenant(KEY.tenant_id)
        await append(*args, **options)
        raise OutcomeUnknown("lost")

    monkeypatch.setattr(backend.driver, "append", lose)
    with pytest.raises(OutcomeUnknown):
        await memory.add_turn(turn(1))
    monkeypatch.undo()
    await memory.add_turn(turn(2))
    assert await users(sessions) == [KEY.user_id]
    assert await sessions.erase_tenant(KEY.tenant_id) == 1
    assert await backend.driver.load(keys.memory_key(KEY)) is None
