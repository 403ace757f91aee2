"""Every memory refuses a turn that could not be read back, before anything is written."""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import InvalidState
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.types import ConversationTurn, MemoryKey, ShortTermMemoryConfig, TrajectoryDigest

KINDS = ["in one process", "on memory", "on sqlite"]


@pytest.fixture(params=KINDS)
async def memory(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    config = ShortTermMemoryConfig(strategy="truncation")
    if request.param == KINDS[0]:
        yield DefaultShortTermMemory(config=config)
        return
    driver = open_driver("memory" if request.param == KINDS[1] else f"sqlite:///{tmp_path}/stm.db")
    await driver.open()
    memory = DistributedShortTermMemory(driver, MemoryKey("acme", "u", uuid.uuid4().hex), config)
    yield memory
    await memory.close()
    await driver.close()


def turn(**fields: Any) -> Any:
    return ConversationTurn(**{"user_message": "u", "assistant_response": "a", **fields})


def digest(**fields: Any) -> Any:
    given = {"tools_invoked": ["t"], "observations_summary": "o", **fields}
    return turn(trajectory_digest=TrajectoryDigest(**given))


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("turn.user_message", lambda: turn(user_message=7)),
    ("turn.user_message", lambda: turn(user_message=None)),
    ("turn.assistant_response", lambda: turn(assistant_response=b"a")),
    ("dict is not a ConversationTurn", lambda: {"user_message": "u", "assistant_response": "a"}),
    *[
        ("turn.ts", lambda ts=ts: turn(ts=ts))
        for ts in ("now", "12.5", b"1", None, True, 1e30, 10**400, math.inf, -math.inf, [], 1j, object())
    ],
    *[
        ("turn.artifacts_shown", lambda shown=shown: turn(artifacts_shown=shown))
        for shown in (
            None,
            [],
            [("a", 1)],
            "text",
            {1: "a"},
            {"a": {None: 1}},
            {"a": {1, 2}},
            {"a": object()},
            {"a": 10**5000},
        )
    ],
    *[
        ("turn.artifacts_hidden_refs", lambda refs=refs: turn(artifacts_hidden_refs=refs))
        for refs in (None, "ref", {"a": 1}, {"a"}, 7, [1], ["a", None], ("a", b"b"))
    ],
    *[
        (f"turn.trajectory_digest.{name}", lambda name=name, value=value: digest(**{name: value}))
        for name in ("tools_invoked", "artifacts_refs")
        for value in (None, "search", {"a": 1}, 7, [1], [None], [["a"]])
    ],
    ("turn.trajectory_digest.observations_summary", lambda: digest(observations_summary=None)),
    ("turn.trajectory_digest.observations_summary", lambda: digest(observations_summary={"a": 1})),
    ("turn.trajectory_digest.reasoning_summary", lambda: digest(reasoning_summary=["because"])),
    ("is not a TrajectoryDigest", lambda: turn(trajectory_digest={"tools_invoked": []})),
    ("is not a TrajectoryDigest", lambda: turn(trajectory_digest="did things")),
    ("nested too deeply", lambda: turn(artifacts_shown={"a": nested(3_000)})),
    ("nested too deeply", lambda: turn(artifacts_shown={"a": nested(940)})),
    ("nested too deeply", lambda: turn(artifacts_shown={"a": nested(100)})),
]


@pytest.mark.parametrize(("path", "make"), BAD, ids=[f"{path}-{n}" for n, (path, _) in enumerate(BAD)])
async def test_a_malformed_turn_is_refused_and_the_conversation_stays_readable(
    memory: Any, path: str, make: Callable[[], Any]
) -> None:
    await memory.add_turn(turn(user_message="before"))
    with pytest.raises(InvalidState) as caught:
        await memory.add_turn(make())
    assert path in str(caught.value)
    assert isinstance(caught.value, ValueError)
    await memory.add_turn(turn(user_message="after"))
    assert [item.user_message for item in await memory.turns()] == ["before", "after"]
    view = await memory.get_llm_context()
    assert [item["user"] for item in view["conversation_memory"]["recent_turns"]] == ["before", "after"]


@pytest.mark.parametrize("turn_id", ["", 7, 0, False, b"id", ["id"], {}])
async def test_an_invalid_turn_id_is_refused_and_the_conversation_stays_readable(
    memory: Any, turn_id: Any
) -> None:
    with pytest.raises(InvalidState, match="the id of a turn"):
        await memory.add_turn(turn(), turn_id=turn_id)
    assert await memory.turns() == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [(7, 7.0), (1.5, 1.5), (Decimal("1.5"), 1.5), (1_700_000_000_000, 1.7e9), (2**60, 2**60 / 1e9)],
)
async def test_a_number_of_any_type_is_kept_as_a_time_in_seconds(
    memory: Any, given: Any, kept: float
) -> None:
    await memory.add_turn(turn(ts=given))
    (found,) = await memory.turns()
    assert type(found.ts) is float
    assert found.ts == kept


@pytest.mark.parametrize("ts", [0.0, math.nan, -1.0, Decimal("-1e15")])
async def test_an_unknown_time_is_zero_or_where_turns_are_purged_the_current_one(
    memory: Any, ts: Any
) -> None:
    before = time.time()
    await memory.add_turn(turn(ts=ts))
    (found,) = await memory.turns()
    if isinstance(memory, DefaultShortTermMemory):
        assert found.ts == 0.0
    else:
        assert before <= found.ts <= time.time()


async def test_tuples_of_texts_come_back_as_lists(memory: Any) -> None:
    theirs = SimpleNamespace(
        user_message="u\ud800\0",
        assistant_response="",
        trajectory_digest=SimpleNamespace(tools_invoked=("t",), observations_summary=""),
        artifacts_hidden_refs=("a", "b"),
        ts=5.0,
    )
    await memory.add_turn(theirs)
    assert await memory.turns() == [
        ConversationTurn(
            "u\ud800\0", "", TrajectoryDigest(["t"], ""), artifacts_hidden_refs=["a", "b"], ts=5.0
        )
    ]


async def test_what_is_accepted_from_the_surface_is_read_from_the_depths(memory: Any) -> None:
    deep = {"a": nested(99)}
    await memory.add_turn(turn(artifacts_shown=deep))

    async def nothing() -> tuple[Any, ...]:
        return (None,)

    async def down(levels: int, bottom: Callable[[], Awaitable[Sequence[Any]]]) -> Sequence[Any]:
        return await down(levels - 1, bottom) if levels else await bottom()

    # How deep one can go is found by going: a tracer, as coverage is one, takes its share of every call.
    deepest = sys.getrecursionlimit()
    while True:
        try:
            await down(deepest, nothing)
        except RecursionError:
            deepest -= 10
        else:
            break
    (found,) = await down(deepest * 3 // 5, memory.turns)
    assert found.artifacts_shown == deep


async def test_the_deepest_turn_that_is_accepted_can_be_saved_and_exported() -> None:
    from stm_backends.backend import open_backend  # noqa: PLC0415 -- the other tests do without

    config = ShortTermMemoryConfig(strategy="truncation")
    key = MemoryKey("acme", "u", "s")
    deepest = turn(artifacts_shown={"a": nested(99)}, ts=5.0)
    async with open_backend("memory") as backend:
        ours, theirs = DefaultShortTermMemory(config=config), DefaultShortTermMemory(config=config)
        await ours.add_turn(deepest)
        await ours.persist(backend.state_store, key.composite())
        await theirs.hydrate(backend.state_store, key.composite())
        assert await theirs.turns() == [deepest]
        await backend.memory(key, config).add_turn(deepest)
        exported = await backend.sessions.export(key)
    async with open_backend("memory") as backend:
        await backend.sessions.import_(exported)
        assert await backend.memory(key, config).turns() == [deepest]
