"""PenguiFlow's planner on our state store: its own memory, paused runs, and `ctx.kv`."""

from __future__ import annotations

import asyncio
from typing import Any

import penguiflow.planner.memory as pf
import pytest
from penguiflow.planner import PlannerFinish
from penguiflow.state.protocol import SupportsMemoryState, SupportsPlannerState

from stm_backends import (
    DefaultShortTermMemory,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from tests.penguiflow.planning import KEY, OTHER, Pod, pod, tool_context
from tests.support.places import on_each_datastore


def own() -> pf.ShortTermMemoryConfig:
    """A memory of PenguiFlow's own."""
    return pf.ShortTermMemoryConfig(strategy="truncation")


def test_the_store_has_what_penguiflow_looks_for(datastore: str) -> None:
    store = open_backend(datastore).state_store
    assert isinstance(store, SupportsMemoryState)
    assert isinstance(store, SupportsPlannerState)


@on_each_datastore
async def test_penguiflows_own_memory_is_kept_in_the_store_for_the_next_pod(datastore: str) -> None:
    async with pod(datastore, memory=own()) as one, pod(datastore, memory=own()) as two:
        asked: list[str] = []
        for number, each in enumerate((one, two, one, two)):
            assert (await each.run(f"q{number}")).known == asked
            asked.append(f"q{number}")
        mine = DefaultShortTermMemory(config=ShortTermMemoryConfig(strategy="truncation"))
        await mine.hydrate(one.backend.state_store, KEY.composite())
        assert [turn.user_message for turn in await mine.turns()] == asked


# Paused runs


async def test_a_run_is_resumed_on_another_pod_with_its_tool_context(datastore: str) -> None:
    async with pod(datastore) as one, pod(datastore) as two:
        token = await one.pause("ask: may I?")
        result = await two.planner.resume(token, "yes", memory_key=KEY)
        assert isinstance(result, PlannerFinish)
        assert result.metadata["tool_context"] == tool_context(KEY)
        assert two.model.prompts[0].query == "ask: may I?"
        assert two.model.prompts[0].since[-1] == "Resume input: yes"


@on_each_datastore
async def test_of_pods_that_resume_a_run_at_once_one_does(datastore: str) -> None:
    async def resume(on: Pod, token: str) -> Any:
        try:
            return await on.planner.resume(token, "yes", memory_key=KEY)
        except KeyError:
            return None

    async with pod(datastore) as one, pod(datastore) as two, pod(datastore) as three:
        for _ in range(5):
            token = await one.pause("ask: may I?")
            results = await asyncio.gather(*(resume(each, token) for each in (two, three, two)))
            assert [isinstance(result, PlannerFinish) for result in results].count(True) == 1
            assert await resume(two, token) is None


async def test_a_run_that_nobody_resumed_within_its_time_is_gone(
    datastore: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.records.state_store.PLANNER_STATE_TTL_S", 0.05)
    async with pod(datastore) as one, pod(datastore) as two:
        token = await one.pause("ask: may I?")
        await asyncio.sleep(0.1)
        with pytest.raises(KeyError):
            await two.planner.resume(token, "yes", memory_key=KEY)


async def test_a_paused_run_is_erased_with_its_user(datastore: str) -> None:
    async with pod(datastore) as one, pod(datastore) as two:
        mine, theirs = await one.pause("ask: may I?"), await one.pause("ask: may I?", OTHER)
        await two.backend.sessions.erase_user(KEY.tenant_id, KEY.user_id)
        with pytest.raises(KeyError):
            await two.planner.resume(mine, "yes", memory_key=KEY)
        assert isinstance(await two.planner.resume(theirs, "yes", memory_key=OTHER), PlannerFinish)


async def test_a_run_whose_tool_context_is_not_json_is_resumed_with_another(datastore: str) -> None:
    async with pod(datastore) as one, pod(datastore) as two:
        odd = {**tool_context(KEY), "client": object()}
        paused: Any = await one.planner.run("ask: may I?", memory_key=KEY, tool_context=odd)
        result = await two.planner.resume(
            paused.resume_token, "yes", memory_key=KEY, tool_context=tool_context(KEY)
        )
        assert isinstance(result, PlannerFinish)


async def test_the_pod_that_paused_resumes_from_memory_and_keeps_the_copy(datastore: str) -> None:
    # As docs/penguiflow.md says. Should PenguiFlow ask the store there, too, that sentence can go.
    async with pod(datastore) as one, pod(datastore) as two:
        token = await one.pause("ask: may I?")
        for each in (one, two):
            assert isinstance(await each.planner.resume(token, "yes", memory_key=KEY), PlannerFinish)


# ctx.kv


@on_each_datastore
async def test_what_a_tool_stores_is_on_another_pod_for_that_session_only(datastore: str) -> None:
    async def noted(on: Pod, text: str, key: MemoryKey) -> str:
        """Note something and return what the tool said was there before."""
        await on.run(f"note: {text}", key)
        return on.model.prompts[-1].since[-1]

    async with pod(datastore) as one, pod(datastore) as two:
        assert "None" in await noted(one, "milk", KEY)
        assert "milk" in await noted(two, "bread", KEY)
        assert "None" in await noted(one, "eggs", OTHER)
        assert "bread" in await noted(one, "tea", KEY)
        await two.backend.sessions.erase_user(KEY.tenant_id, KEY.user_id)
        assert "None" in await noted(one, "milk", KEY)
        assert "eggs" in await noted(two, "milk", OTHER)


async def test_a_large_value_that_a_tool_keeps_needs_an_artifact_store(datastore: str) -> None:
    # As docs/penguiflow.md says: PenguiFlow hands our store a reference, and nobody has the value.
    async with pod(datastore) as one:
        await one.run(f"note: {'x' * 9000}")
        await one.run("note: milk")
        assert '"text": "None"' in one.model.prompts[-1].since[-1]


async def test_what_a_tool_keeps_is_neither_a_conversation_nor_a_state_of_one(datastore: str) -> None:
    async with pod(datastore, memory=own()) as one:
        await one.planner.run("note: milk", tool_context=tool_context(KEY))
        assert [key async for key in one.backend.sessions.list("acme", "u")] == []
        state = await one.backend.state_store.load_memory_state(KEY.composite())
        assert state is not None
        assert [turn["user_message"] for turn in state["turns"]] == ["note: milk"]
