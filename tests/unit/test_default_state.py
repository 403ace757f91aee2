"""The whole conversation as one JSON object: what it holds, what is taken for one, and what is not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, summary_of
from stm_backends.types import ConversationTurn, MemoryHealth, TrajectoryDigest
from tests.support.default_memory import KEY, added, memory, never, penguiflow_state, users
from tests.support.stores import ConditionalStore


async def test_a_state_is_json_and_comes_back_as_it_was() -> None:
    first = never()
    odd = ConversationTurn(
        "a\ud800\0",
        "b",
        TrajectoryDigest(["t"], "o", None, ["r"]),
        {"big": 2**80, "deep": [{"x": (1, None)}], "inf": float("inf")},
        ["h"],
        2.5,
    )
    await first.add_turn(odd)
    await added(first, 1, 2)
    second = never()
    second.from_dict(json.loads(json.dumps(first.to_dict())))
    assert second.to_dict() == first.to_dict()
    odd.artifacts_shown["deep"] = [{"x": [1, None]}]
    assert (await second.turns())[0] == odd


async def test_a_state_is_the_callers_to_keep() -> None:
    one = never()
    await one.add_turn(ConversationTurn("u", "a", artifacts_shown={"deep": [1]}))
    state = one.to_dict()
    state["turns"][0]["artifacts_shown"]["deep"].append(2)
    state["stm"]["forgotten"]["ages"].append("x")
    assert one.to_dict()["turns"][0]["artifacts_shown"] == {"deep": [1]}
    two = never()
    state = one.to_dict()
    two.from_dict(state)
    state["turns"][0]["artifacts_shown"]["deep"].append(2)
    assert two.to_dict() == one.to_dict()


async def test_artifacts_that_the_caller_changes_later_do_not_change_the_turn() -> None:
    one = never()
    artifacts: dict[str, Any] = {"deep": [1]}
    await one.add_turn(ConversationTurn("u", "a", artifacts_shown=artifacts))
    artifacts["deep"].append(object())
    assert one.to_dict()["turns"][0]["artifacts_shown"] == {"deep": [1]}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"health": "fine"},
        {"health": ["healthy"]},
        {"health": None},
        {"turns": 7},
        {"turns": {"a": 1}},
        {"pending": "text"},
        {"backlog": [None]},
        {"turns": [{"user_message": "x", "trajectory_digest": "y"}]},
        {"turns": [{"ts": "noon"}]},
        {"turns": [{"ts": 10**400}]},
        {"turns": [{"artifacts_shown": 3}]},
        {"turns": [{"artifacts_shown": {"x": object()}}]},
        {"turns": [{"artifacts_hidden_refs": 3}]},
        {"turns": [{"trajectory_digest": {"tools_invoked": 3}}]},
        {"stm": "text"},
        {"stm": {"attempts": "many"}},
        {"stm": {"attempts": float("inf")}},
        {"stm": {"forgotten": ["x"]}},
        {"stm": {"forgotten": {"digests": ",a,b,", "ages": [[1.0, 1]]}}},
        {"stm": {"gone": None}},
    ],
)
async def test_an_invalid_state_is_a_value_error_that_changes_nothing(change: dict[str, Any]) -> None:
    one = await added(never(), 1, 2, 3)
    before = one.to_dict()
    with pytest.raises(ValueError, match=r"state|turn|digest"):
        one.from_dict({**penguiflow_state(7, 8), **change})
    assert one.to_dict() == before


@pytest.mark.parametrize("nothing", [None, [], "text", 7])
async def test_a_state_that_is_not_a_mapping_is_a_value_error(nothing: Any) -> None:
    with pytest.raises(ValueError, match="mapping"):
        never().from_dict(nothing)


async def test_what_is_said_in_a_state_is_not_said_in_an_error() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- what it does not say is the point
        never().from_dict({**penguiflow_state(), "turns": [{"ts": "secret"}]})
    assert "secret" not in str(caught.value)


def test_a_state_loaded_without_a_loop_is_summarized_in_the_next_one() -> None:
    one = memory()
    one.from_dict({**penguiflow_state(2, 3), "pending": penguiflow_state(1)["turns"]})
    assert users(one.to_dict()) == ["u1", "u2", "u3"]

    async def later() -> dict[str, Any]:
        await one.get_llm_context()
        await one.flush()
        return await shown(one)

    assert asyncio.run(later()) == {"summary": ["u1"], "pending": [], "recent": ["u2", "u3"]}


async def test_turns_without_an_id_get_the_same_one_from_everybody() -> None:
    state = penguiflow_state(1, 1, 2, 1)
    one, two = never(config(zone=5)), never(config(zone=9))
    one.from_dict(state)
    two.from_dict({**state, "turns": state["turns"][2:], "pending": state["turns"][:2]})
    ids = [item["turn_id"] for item in one.to_dict()["turns"]]
    assert len({*ids}) == 4
    two_state = two.to_dict()
    assert ids == [item["turn_id"] for item in two_state["pending"] + two_state["turns"]]


async def test_a_state_that_holds_a_turn_twice_is_read_once() -> None:
    one = never()
    await one.add_turn(turn(1), turn_id="a")
    state = one.to_dict()
    state["pending"] = state["turns"]
    two = never()
    two.from_dict(state)
    assert users(two.to_dict()) == ["u1"]


async def test_a_loaded_state_is_fitted_to_this_configuration() -> None:
    rolling = never(config(zone=2, fold_batch_turns=1000))
    rolling.from_dict(penguiflow_state(1, 2, 3, 4))
    assert await shown(rolling) == {"summary": [], "pending": ["u1", "u2"], "recent": ["u3", "u4"]}
    truncating = never(config("truncation", zone=2))
    truncating.from_dict({**penguiflow_state(2, 3, 4), "pending": penguiflow_state(1)["turns"]})
    assert users(truncating.to_dict()) == ["u3", "u4"]
    summarizing = never(config(zone=2, summary_max_tokens=4, fold_batch_turns=1000))
    summarizing.from_dict(penguiflow_state(1, summary="word " * 50))
    view = (await summarizing.get_llm_context())["conversation_memory"]
    assert len(view["summary"]) // 4 + 1 <= 4
    assert summarizing.to_dict()["summary"] == "word " * 50


async def test_a_loaded_backlog_is_bounded_after_its_attempt_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: object) -> object:
        raise RuntimeError("u1")

    settings = config(zone=1, recovery_backlog_limit=2, degraded_retry_interval_s=60.0, retry_attempts=0)
    one = memory(fail, settings)
    with caplog.at_level(logging.WARNING, logger="stm_backends"):
        one.from_dict(
            {**penguiflow_state(5), "health": "degraded", "backlog": penguiflow_state(1, 2, 3, 4)["turns"]}
        )
        # The attempt that is due may still save them.
        assert len(one.to_dict()["backlog"]) == 4
        await until(lambda: len(one.to_dict()["backlog"]) < 4)
    state = one.to_dict()
    assert [item["user_message"] for item in state["backlog"]] == ["u3", "u4"]
    assert (state["pending"], state["stm"]["dropped"]) == ([], 2)
    assert "2 turns beyond recovery_backlog_limit" in caplog.text
    assert "u1" not in caplog.text
    await one.close()


async def test_what_was_pending_stays_pending_in_a_larger_zone() -> None:
    small, large = never(config(zone=1, fold_batch_turns=9)), never(config(zone=3, fold_batch_turns=9))
    await added(small, 1, 2, 3)
    large.from_dict(small.to_dict())
    assert await shown(large) == {"summary": [], "pending": ["u1", "u2"], "recent": ["u3"]}


async def test_recovering_is_shown_until_an_attempt_and_never_written(held: LedgerSummarizer) -> None:
    changes: list[str] = []

    async def note(old: MemoryHealth, new: MemoryHealth) -> None:
        changes.append(f"{old.value}>{new.value}")

    one = memory(held, config(zone=1, degraded_retry_interval_s=60.0, on_health_changed=note))
    state = {**penguiflow_state(2), "health": "recovering", "backlog": penguiflow_state(1)["turns"]}
    held.fail = 1
    one.from_dict(state)
    assert one.health is MemoryHealth.RECOVERING
    assert one.to_dict()["health"] == "degraded"
    await held.called.wait()
    assert (await shown(one))["pending"] == ["u1"]
    held.release()
    await until(lambda: one.health is MemoryHealth.DEGRADED)
    assert (await shown(one))["pending"] == []
    await until(lambda: changes == ["recovering>degraded"])
    await one.close()


async def test_retry_counters_survive_a_state() -> None:
    failing = LedgerSummarizer()
    failing.fail = 100
    settings = config(zone=1, retry_backoff_base_s=60.0)
    one = memory(failing, settings)
    await added(one, 1, 2)
    await until(lambda: one.health is MemoryHealth.RETRY)
    two = memory(LedgerSummarizer(), settings)
    two.from_dict(one.to_dict())
    assert (two.health, two.to_dict()["stm"]["attempts"]) == (MemoryHealth.RETRY, 1)
    assert two.to_dict()["stm"]["next_attempt_at"] == one.to_dict()["stm"]["next_attempt_at"]
    await asyncio.gather(one.close(), two.close())


async def test_a_degraded_penguiflow_state_stays_degraded_after_a_failure() -> None:
    failing = LedgerSummarizer()
    failing.fail = 100
    one = memory(failing, config(zone=1, degraded_retry_interval_s=60.0))
    one.from_dict({**penguiflow_state(2), "health": "degraded", "backlog": penguiflow_state(1)["turns"]})
    await until(lambda: len(failing.requests) == 1 and one.health is MemoryHealth.DEGRADED)
    await one.close()


async def test_what_a_newer_version_added_to_a_state_survives() -> None:
    one = await added(never(), 1)
    state = one.to_dict()
    state["stm"]["from_the_future"] = {"x": [1]}
    two = never()
    two.from_dict(state)
    await added(two, 2)
    assert two.to_dict()["stm"]["from_the_future"] == {"x": [1]}
    kept = ConditionalStore()
    kept.texts[KEY] = json.dumps(state)
    three = await added(never(), 3)
    await three.persist(kept, KEY)
    assert kept.state(KEY)["stm"]["from_the_future"] == {"x": [1]}


async def test_a_summarizer_call_of_before_never_touches_a_loaded_state(held: LedgerSummarizer) -> None:
    one = await added(memory(held), 1, 2, 3)
    await held.called.wait()
    one.from_dict(penguiflow_state(8, 9, summary=summary_of(["u7"])))
    held.release()
    await asyncio.sleep(0.02)
    assert await shown(one) == {"summary": ["u7"], "pending": [], "recent": ["u8", "u9"]}
    assert one.health is MemoryHealth.HEALTHY


async def test_a_failure_of_before_never_touches_a_loaded_state() -> None:
    class Stubborn:
        """A summarizer that fails although it is cancelled."""

        def __init__(self) -> None:
            self.called = asyncio.Event()

        async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
            self.called.set()
            try:
                await asyncio.sleep(60)
            finally:
                raise RuntimeError("no")

    stubborn = Stubborn()
    one = await added(memory(stubborn), 1, 2, 3)
    await stubborn.called.wait()
    one.from_dict(penguiflow_state(8))
    await asyncio.sleep(0.02)
    assert (one.health, users(one.to_dict())) == (MemoryHealth.HEALTHY, ["u8"])
    await one.close()
