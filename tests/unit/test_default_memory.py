"""The memory of one process, beyond the contract that it shares with the distributed one."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends import protocols
from stm_backends.errors import ConfigurationError, MemoryBudgetExceeded
from stm_backends.memory import policy
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    ShortTermMemoryConfig,
    TrajectoryDigest,
    default_token_estimator,
)
from tests.support import clock
from tests.support.default_memory import added


def memory(strategy: Any = "truncation", **settings: Any) -> DefaultShortTermMemory:
    return DefaultShortTermMemory(config=config(strategy, **settings), summarizer=LedgerSummarizer())


def test_it_is_every_kind_of_memory_there_is() -> None:
    one = memory()
    for protocol in (
        protocols.ShortTermMemory,
        protocols.ShortTermMemoryPersistence,
        protocols.ShortTermMemorySerializable,
        protocols.ShortTermMemoryArtifacts,
    ):
        assert isinstance(one, protocol)
    assert one.get_artifact("ref") is None


def test_a_rolling_summary_needs_a_summarizer() -> None:
    with pytest.raises(ConfigurationError, match="summarizer"):
        DefaultShortTermMemory(config=config("rolling_summary"))
    with pytest.raises(ValueError, match="summarizer"):
        DefaultShortTermMemory(config=config("rolling_summary"), summarizer=None)


async def test_a_configuration_that_is_changed_later_changes_nothing() -> None:
    settings = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=1))
    one = DefaultShortTermMemory(config=settings)
    settings.budget.full_zone_turns = 5
    settings.strategy = "none"
    await added(one, *range(3))
    assert (await shown(one))["recent"] == ["u2"]


async def test_truncation_keeps_no_more_than_the_zone() -> None:
    one = memory(zone=3)
    for number in range(10):
        await one.add_turn(turn(number))
        assert len(await one.turns()) == min(number + 1, 3)


async def test_a_turn_that_was_trimmed_or_folded_is_not_added_again() -> None:
    trimmed, folded = memory(zone=1), memory("rolling_summary", zone=1)
    for one in (trimmed, folded):
        for name in ("a", "b", "a", "b"):
            await one.add_turn(turn(name), turn_id=name)
            await one.flush()
        assert [item.user_message for item in await one.turns()] == ["ub"]


async def test_a_turn_without_an_id_is_another_one_each_time() -> None:
    one = memory(zone=5)
    again = turn(1)
    for _ in range(3):
        await one.add_turn(again)
    ids = [item["turn_id"] for item in one.to_dict()["turns"]]
    assert len({*ids}) == 3


async def test_adding_the_same_id_again_calls_no_callback() -> None:
    seen: list[object] = []

    async def note(added: ConversationTurn) -> None:
        seen.append(added)

    one = memory(on_turn_added=note)
    for _ in range(2):
        await one.add_turn(turn(1), turn_id="a")
    await asyncio.sleep(0.01)
    assert len(seen) == 1


async def test_what_is_handed_out_is_the_callers_to_change() -> None:
    one = memory()
    await one.add_turn(ConversationTurn("u", "a", TrajectoryDigest(["t"], "o"), {"x": [1]}))
    view, (kept,) = await one.get_llm_context(), await one.turns()
    view["conversation_memory"]["recent_turns"][0]["trajectory_digest"]["tools_invoked"].append("x")
    kept.artifacts_shown["x"].append(2)
    kept.user_message = "changed"
    assert (await one.turns())[0] == ConversationTurn("u", "a", TrajectoryDigest(["t"], "o"), {"x": [1]})


async def test_the_error_policy_sees_what_the_turn_would_make_pending() -> None:
    one = memory(
        "rolling_summary",
        zone=2,
        total_max_tokens=60,
        summary_max_tokens=10,
        overflow_policy="error",
        fold_batch_turns=100,
    )
    refused = 0
    for number in range(20):
        try:
            await one.add_turn(turn(number, "x" * 20))
        except MemoryBudgetExceeded:
            refused += 1
    stored = 20 - refused
    assert 2 < stored < 10
    assert len(await one.turns()) == stored
    assert one.estimate_tokens() <= 60


async def test_a_refused_turn_may_be_added_again_later() -> None:
    one = memory(zone=1, total_max_tokens=40, summary_max_tokens=1, overflow_policy="error")
    with pytest.raises(MemoryBudgetExceeded):
        await one.add_turn(turn(1, "x" * 500), turn_id="a")
    await one.add_turn(turn(1), turn_id="a")
    assert (await shown(one))["recent"] == ["u1"]


async def test_a_read_beyond_the_budget_is_trimmed_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    one = memory(zone=5, total_max_tokens=30, summary_max_tokens=1, overflow_policy="error")
    large = memory(zone=5)
    for number in range(4):
        await large.add_turn(turn(number, "secret" * 5))
    one.from_dict(large.to_dict())
    with caplog.at_level(logging.WARNING, logger="stm_backends"):
        assert len((await shown(one))["recent"]) < 4
    assert "total_max_tokens" in caplog.text
    assert "secret" not in caplog.text


async def test_truncation_leaves_out_of_its_state_what_the_budget_leaves_out() -> None:
    one = memory(zone=4, total_max_tokens=60, summary_max_tokens=1)
    for number in range(4):
        await one.add_turn(turn(number, "x" * 60))
    in_view = (await shown(one))["recent"]
    assert 0 < len(in_view) < 4
    assert [item["user_message"] for item in one.to_dict()["turns"]] == in_view


async def test_a_five_megabyte_turn_is_kept_whole() -> None:
    one = memory(total_max_tokens=0)
    large = "x" * 5_000_000
    await one.add_turn(ConversationTurn("u", "a", TrajectoryDigest(["t"], large), {"result": large}))
    (kept,) = await one.turns()
    assert kept.artifacts_shown["result"] == large


async def test_a_callback_that_uses_the_memory_does_no_harm() -> None:
    found: list[int] = []

    async def note(added: ConversationTurn) -> None:
        if len(await one.turns()) < 3:
            await one.add_turn(turn("again"))
        found.append(one.estimate_tokens())

    one = memory(zone=9, on_turn_added=note)
    await one.add_turn(turn(1))
    await until(lambda: len(found) == 3)
    assert len(await one.turns()) == 3


async def calls_made(work: Coroutine[Any, Any, object]) -> int:
    """Return how many functions are called in the course of some work that does not wait."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        await work
    finally:
        sys.setprofile(before)
    return made


@pytest.mark.parametrize("strategy", ["truncation", "rolling_summary"])
async def test_a_turn_costs_the_same_after_ten_thousand_others(strategy: str) -> None:
    async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"summary": "S" * 100}

    one = DefaultShortTermMemory(config=config(strategy, zone=5), summarizer=summarize)

    async def add_and_read() -> None:
        await one.add_turn(turn("x"))
        await one.get_llm_context()

    costs: list[int] = []
    for number in range(10_001):
        # With as many ids remembered as there will ever be.
        if number in (1_000, 10_000):
            await one.flush()
            costs.append(await calls_made(add_and_read()))
        await one.add_turn(turn("x"))
        if not number % 50:
            await one.flush()
    assert costs[1] <= costs[0] + 5


async def test_a_burst_of_turns_does_not_rescan_pending_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    next_step = policy.next_step

    def noting(settings: Any, body: Any, pending: Sequence[Any], **given: Any) -> policy.Step:
        looked_at.append(len(pending))
        return next_step(settings, body, pending, **given)

    monkeypatch.setattr(policy, "next_step", noting)
    one = memory("rolling_summary", zone=5)
    await added(one, *range(1_000))
    assert sum(looked_at) <= 1_000
    await one.close(timeout=0)


TURNS = st.builds(
    ConversationTurn,
    st.text(st.characters(codec=None), max_size=30),
    st.text(max_size=30),
    st.none() | st.builds(TrajectoryDigest, st.lists(st.text(max_size=5)), st.text(max_size=9)),
)


@given(
    turns=st.lists(TURNS, max_size=10),
    summary=st.sampled_from(["", "short", 'a "longer" one ' * 5]),
    zone=st.integers(0, 3),
    total=st.integers(5, 150),
    strategy=st.sampled_from(["truncation", "rolling_summary"]),
    health=st.sampled_from(["healthy", "degraded"]),
    digests=st.booleans(),
    data=st.data(),
)
def test_the_error_policy_refuses_exactly_what_would_not_be_shown_whole(
    turns: list[ConversationTurn],
    summary: str,
    zone: int,
    total: int,
    strategy: Any,
    health: str,
    digests: bool,
    data: st.DataObject,
) -> None:
    def custom(text: str) -> int:
        return default_token_estimator(text)

    async def main() -> None:
        budgeted: dict[str, Any] = {
            "zone": zone,
            "total_max_tokens": total,
            "summary_max_tokens": min(total, 12),
            "overflow_policy": "error",
            "fold_batch_turns": 1000,
            "degraded_retry_interval_s": 3600.0,
            "include_trajectory_digest": digests,
        }
        counted, whole = (
            memory(strategy, token_estimator=estimator, **budgeted) for estimator in (None, custom)
        )
        start = {**counted.to_dict(), "summary": summary, "health": health}
        for one in (counted, whole):
            one.from_dict(start)
        for number, item in enumerate(turns):
            results: list[type[Exception] | None] = []
            for one in (counted, whole):
                try:
                    await one.add_turn(item, turn_id=f"{number}")
                except MemoryBudgetExceeded as error:
                    results.append(type(error))
                else:
                    results.append(None)
            assert results[0] is results[1]
            if data.draw(st.booleans()):
                counted.from_dict(counted.to_dict())
                whole.from_dict(whole.to_dict())
        assert counted.to_dict()["turns"] == whole.to_dict()["turns"]
        assert await counted.get_llm_context() == await whole.get_llm_context()
        for one in (counted, whole):
            await one.close(timeout=0)

    clock.run(main())


async def test_the_error_policy_costs_the_same_for_every_turn() -> None:
    one = memory(
        "rolling_summary",
        zone=5,
        total_max_tokens=10**7,
        overflow_policy="error",
        fold_batch_turns=10**9,
    )
    await added(one, *range(10))
    early = await calls_made(one.add_turn(turn("early")))
    await added(one, *range(10, 2_000))
    assert await calls_made(one.add_turn(turn("late"))) <= early * 1.2
