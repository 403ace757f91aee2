"""States go back and forth between PenguiFlow's memory and ours, and mean the same on both sides."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import penguiflow.planner.memory as pf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stm_backends.types as ours
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.records.codec import TURN_FIELDS
from stm_backends.testing.memory_contract import until
from tests.support import clock
from tests.support.stores import PlainStore

KEY = "acme:u1:chat"

TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DIGESTS = st.builds(
    pf.TrajectoryDigest,
    st.lists(TEXT, max_size=3),
    TEXT,
    st.none() | TEXT,
    st.lists(TEXT, max_size=2),
)
TURNS = st.builds(
    pf.ConversationTurn,
    TEXT,
    TEXT,
    st.none() | DIGESTS,
    st.dictionaries(TEXT, JSON, max_size=3),
    st.lists(TEXT, max_size=2),
    st.floats(0, 2e9),
)


# PenguiFlow stores `artifacts_shown` and does not show them.
PLAIN_TURNS = TURNS.map(lambda turn: dataclasses.replace(turn, artifacts_shown={}))

# The default estimates are equal for ASCII only: ours knows scripts.
ASCII = st.text(st.characters(max_codepoint=127), max_size=20)
ASCII_TURNS = st.builds(
    pf.ConversationTurn,
    ASCII,
    ASCII,
    st.none() | st.builds(pf.TrajectoryDigest, st.lists(ASCII, max_size=3), ASCII, st.none() | ASCII),
)


def estimator_for(turns: list[Any]) -> Callable[[str], int] | None:
    """Return `None`, for the default, if it is the same estimate in both libraries."""
    is_ascii = json.dumps([dataclasses.asdict(turn) for turn in turns], ensure_ascii=False).isascii()
    return None if is_ascii else pf.default_token_estimator


def pf_config(strategy: Any = "rolling_summary", zone: int = 2, **given: Any) -> Any:
    budget = {
        name: given.pop(name)
        for name in ("summary_max_tokens", "total_max_tokens", "overflow_policy")
        if name in given
    }
    budget = {"total_max_tokens": 0, **budget}
    return pf.ShortTermMemoryConfig(
        strategy=strategy, budget=pf.MemoryBudget(full_zone_turns=zone, **budget), **given
    )


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Summarize the same way wherever it is called from."""
    await asyncio.sleep(0)
    return {"summary": json.dumps([request["previous_summary"], len(request["turns"])])}


async def fail(request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RuntimeError("no")


def pair(config: Any, summarizer: Any = summarize) -> tuple[Any, DefaultShortTermMemory]:
    """Return PenguiFlow's memory and ours, with one configuration: PenguiFlow's."""
    return (
        pf.DefaultShortTermMemory(config=config, summarizer=summarizer),
        DefaultShortTermMemory(config=config, summarizer=summarizer),
    )


def without_ours(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what PenguiFlow sees of a state."""
    known = {"version", "health", "summary", "turns", "pending", "backlog", "config_snapshot"}
    seen = {name: value for name, value in copy.deepcopy(dict(state)).items() if name in known}
    for part in ("turns", "pending", "backlog"):
        for item in seen[part]:
            for name in item.keys() - TURN_FIELDS | {"turn_id"}:
                item.pop(name, None)
    return seen


def sent(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it comes back from a store.

    Not through JSON's ASCII escapes: they make one character of two lone surrogates that form a pair.
    """
    return json.loads(json.dumps(state, ensure_ascii=False))


async def views(memory: Any) -> tuple[Any, int, str]:
    return await memory.get_llm_context(), memory.estimate_tokens(), memory.health.value


# The same turns give the same states and views


@given(
    turns=st.lists(TURNS, max_size=8) | st.lists(PLAIN_TURNS, max_size=8) | st.lists(ASCII_TURNS, max_size=8),
    zone=st.integers(0, 4),
    digests=st.booleans(),
)
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("strategy", ["none", "truncation", "rolling_summary"])
def test_the_same_turns_make_the_same_state_and_view(
    strategy: str, turns: list[Any], zone: int, digests: bool
) -> None:
    async def main() -> None:
        estimator = estimator_for(turns)
        config = pf_config(strategy, zone, include_trajectory_digest=digests, token_estimator=estimator)
        theirs, mine = pair(config)
        for turn in turns:
            for memory in (theirs, mine):
                await memory.add_turn(turn)
                await memory.flush()
            assert without_ours(mine.to_dict()) == theirs.to_dict()
            if not any(turn.artifacts_shown for turn in turns):
                assert await views(mine) == await views(theirs)

    clock.run(main())


@given(
    turns=st.lists(PLAIN_TURNS, max_size=8) | st.lists(ASCII_TURNS, max_size=8),
    zone=st.integers(0, 5),
    total=st.integers(10, 120),
)
@settings(deadline=None, max_examples=80)
def test_truncation_within_a_budget_makes_the_same_state_and_view(
    turns: list[Any], zone: int, total: int
) -> None:
    async def main() -> None:
        limits = {"total_max_tokens": total, "summary_max_tokens": 1}
        theirs, mine = pair(pf_config("truncation", zone, token_estimator=estimator_for(turns), **limits))
        for turn in turns:
            for memory in (theirs, mine):
                await memory.add_turn(turn)
            if not theirs.to_dict()["turns"] and zone:
                # This turn alone is larger than the budget: theirs has nothing left, ours shows it cut.
                assert mine.estimate_tokens() <= total
                return
            assert without_ours(mine.to_dict()) == theirs.to_dict()
            assert await views(mine) == await views(theirs)

    clock.run(main())


def test_the_same_failures_lead_to_the_same_states() -> None:
    async def main() -> None:
        theirs, mine = pair(pf_config(zone=1, recovery_backlog_limit=2, retry_attempts=2), fail)
        for number in range(4):
            for memory in (theirs, mine):
                await memory.add_turn(pf.ConversationTurn(f"u{number}", "a"))
        for memory in (theirs, mine):
            await until(lambda memory=memory: memory.health.value == "retry")
        assert without_ours(mine.to_dict()) == theirs.to_dict()
        assert await views(mine) == await views(theirs)
        # Whoever flushes waits for all retries; PenguiFlow makes no more than the first without.
        for memory in (theirs, mine):
            await memory.flush()
        assert mine.health.value == theirs.health.value == "degraded"
        assert without_ours(mine.to_dict()) == theirs.to_dict()
        assert await views(mine) == await views(theirs)
        await mine.close()

    clock.run(main())


# Loading


PAYLOAD = st.fixed_dictionaries(
    {},
    optional={
        "user_message": JSON,
        "assistant_response": JSON,
        "trajectory_digest": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "tools_invoked": JSON,
                "observations_summary": JSON,
                "reasoning_summary": JSON,
                "artifacts_refs": JSON,
            },
        ),
        "artifacts_shown": JSON,
        "artifacts_hidden_refs": JSON,
        # True is one second for PenguiFlow, and no time for us.
        "ts": JSON.filter(lambda ts: ts is not True) | st.floats(),
    },
)
STATE = st.fixed_dictionaries(
    {
        "version": st.sampled_from([1, 1, 1, 1.0, True, 2, "1", None]),
        "health": st.sampled_from(["healthy", "retry", "degraded", "recovering", "healthy"]) | JSON,
    },
    optional={
        "summary": JSON,
        "turns": st.lists(PAYLOAD, max_size=3) | JSON,
        "pending": st.lists(PAYLOAD, max_size=3) | JSON,
        "backlog": st.lists(PAYLOAD, max_size=3) | JSON,
        "config_snapshot": JSON,
        "unknown": JSON,
    },
)


@given(state=STATE)
@settings(deadline=None, max_examples=200)
def test_whatever_penguiflow_loads_we_load_with_the_same_result(state: dict[str, Any]) -> None:
    config = pf_config(zone=100, recovery_backlog_limit=100)
    theirs, mine = pair(config)
    before = mine.to_dict()
    try:
        theirs.from_dict(copy.deepcopy(state))
    except (ValueError, TypeError, AttributeError, OverflowError):
        with pytest.raises(ValueError, match=r"state|turn|digest|JSON"):
            mine.from_dict(state)
        assert mine.to_dict() == before
        return
    mine.from_dict(state)
    expected, got = theirs.to_dict(), without_ours(mine.to_dict())
    for turn in (*expected["backlog"], *expected["pending"], *expected["turns"]):
        turn["ts"] = ours.seconds_of(turn["ts"])
    unsummarized = expected["backlog"] + expected["pending"]
    degraded = expected["health"] in ("degraded", "recovering")
    # Where PenguiFlow keeps two lists of unsummarized turns, of which it would forget one, there is one here.
    expected |= {"backlog": unsummarized if degraded else [], "pending": [] if degraded else unsummarized}
    expected["health"] = "degraded" if degraded else expected["health"]
    assert json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert mine.health.value == theirs.health.value


@given(
    turns=st.lists(TURNS, max_size=8) | st.lists(PLAIN_TURNS, max_size=8) | st.lists(ASCII_TURNS, max_size=8),
    zone=st.integers(0, 4),
)
@settings(deadline=None, max_examples=60)
@example(turns=[pf.ConversationTurn("\ud800\udc00", "\ud800")], zone=1)
@pytest.mark.parametrize("strategy", ["none", "truncation", "rolling_summary"])
def test_a_state_survives_the_way_there_and_back(strategy: str, turns: list[Any], zone: int) -> None:
    async def main() -> None:
        config = pf_config(strategy, zone, token_estimator=estimator_for(turns))
        (theirs, mine), (their_reader, my_reader) = pair(config), pair(config)
        for turn in turns:
            for memory in (theirs, mine):
                await memory.add_turn(turn)
        for reader in (their_reader, my_reader):
            for writer in (theirs, mine):
                reader.from_dict(sent(writer.to_dict()))
                assert without_ours(reader.to_dict()) == theirs.to_dict()
                if not any(turn.artifacts_shown for turn in turns):
                    assert reader.estimate_tokens() == writer.estimate_tokens()
            if not any(turn.artifacts_shown for turn in turns):
                assert await reader.get_llm_context() == await theirs.get_llm_context()
        for memory in (theirs, mine, their_reader, my_reader):
            await memory.flush()

    clock.run(main())


async def test_a_conversation_wanders_between_penguiflow_and_us() -> None:
    store = PlainStore()
    config = pf_config(zone=2)
    theirs, mine = pair(config)
    for number in range(10):
        memory = (theirs, mine)[number % 2]
        await memory.hydrate(store, KEY)
        await memory.add_turn(pf.ConversationTurn(f"u{number}", "a"))
        await memory.flush()
        await memory.persist(store, KEY)
    for memory in (theirs, mine):
        await memory.hydrate(store, KEY)
    assert await views(mine) == await views(theirs)
    state = store.state(KEY)
    assert [item["user_message"] for item in state["turns"]] == ["u8", "u9"]
    assert state["summary"].count("[") == 8


async def test_a_penguiflow_process_that_knows_nothing_of_ids_doubles_nothing() -> None:
    store = PlainStore()
    theirs, mine = pair(pf_config("truncation", zone=10))
    for number in range(3):
        await mine.add_turn(pf.ConversationTurn("again", f"{number}"))
    await mine.persist(store, KEY)
    await theirs.hydrate(store, KEY)
    await theirs.add_turn(pf.ConversationTurn("again", "theirs"))
    await theirs.persist(store, KEY)
    await mine.add_turn(pf.ConversationTurn("again", "mine"))
    await mine.persist(store, KEY)
    assert [item["assistant_response"] for item in store.state(KEY)["turns"]] == [
        "0",
        "1",
        "2",
        "theirs",
        "mine",
    ]


# The names


@pytest.mark.parametrize(
    "name",
    [
        "ConversationTurn",
        "MemoryBudget",
        "MemoryHealth",
        "MemoryIsolation",
        "MemoryKey",
        "ShortTermMemoryConfig",
        "TrajectoryDigest",
    ],
)
def test_our_types_have_penguiflows_fields_and_defaults_first(name: str) -> None:
    theirs, mine = getattr(pf, name), getattr(ours, name)
    if name == "MemoryHealth":
        assert {item.name: item.value for item in mine} == {item.name: item.value for item in theirs}
        return
    fields = [(f.name, f.default) for f in dataclasses.fields(theirs)]
    assert [(f.name, f.default) for f in dataclasses.fields(mine)][: len(fields)] == fields


def test_our_memory_has_every_public_method_of_penguiflows() -> None:
    public = {name for name in vars(pf.DefaultShortTermMemory) if not name.startswith("_")}
    assert public <= {*dir(DefaultShortTermMemory)}


async def test_callbacks_get_the_very_turn_of_the_caller() -> None:
    seen: list[object] = []

    async def note(turn: object) -> None:
        seen.append(turn)

    callback: Callable[[Any], Awaitable[None]] = note
    _, mine = pair(pf_config("truncation", on_turn_added=callback))
    turn = pf.ConversationTurn("u", "a")
    await mine.add_turn(turn)
    await until(lambda: bool(seen))
    assert seen[0] is turn


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "\ud800", "\ud800\udc00", "\0"])
async def test_odd_values_come_back_from_penguiflow_as_they_were(value: Any) -> None:
    theirs, mine = pair(pf_config("truncation"))
    await mine.add_turn(pf.ConversationTurn("u", "a", artifacts_shown={"value": value}))
    theirs.from_dict(sent(mine.to_dict()))
    mine.from_dict(sent(theirs.to_dict()))
    (back,) = await mine.turns()
    assert repr(back.artifacts_shown["value"]) == repr(value)
