"""A service that switches from PenguiFlow's own memory to the router keeps its conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import penguiflow.planner.memory as pf
import pytest
from penguiflow.state import InMemoryStateStore

from stm_backends import MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend
from tests.penguiflow.planning import KEY, OTHER, Pod, pod
from tests.support.places import on_each_datastore

LONG = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=20))


def own() -> pf.ShortTermMemoryConfig:
    """A memory of PenguiFlow's own."""
    return pf.ShortTermMemoryConfig(strategy="truncation")


async def queries(one: Pod, key: MemoryKey = KEY) -> list[str]:
    """Return what the user asked, as the datastore has it."""
    return [turn.user_message for turn in await one.backend.memory(key, LONG).turns()]


@on_each_datastore
async def test_a_planner_with_the_router_goes_on_where_its_own_memory_ended(datastore: str) -> None:
    async with pod(datastore, memory=own()) as before:
        for query in ("q0", "note: milk"):
            await before.run(query)
        await before.run("theirs", OTHER)
    async with (
        pod(datastore, config=LONG, adopt_from="state_store") as one,
        pod(datastore, config=LONG, adopt_from="state_store") as two,
    ):
        prompts = await asyncio.gather(one.run("a"), two.run("b"))
        for prompt in prompts:
            assert prompt.known[:2] == ["q0", "note: milk"]
        tools = prompts[0].memory["recent_turns"][1]["trajectory_digest"]["tools_invoked"]
        assert tools == ["note"]
        assert (await one.run("more", OTHER)).known == ["theirs"]
        assert (await two.run("new", MemoryKey("acme", "u", "new"))).known == []
        stored = await queries(two)
        assert stored[:2] == ["q0", "note: milk"]
        assert sorted(stored[2:]) == ["a", "b"]


class Failing(InMemoryStateStore):
    """A store that fails until it is mended."""

    answer: Any = None

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return await super().load_memory_state(key) if self.answer is None else self.answer


@pytest.mark.parametrize("answer", [ConnectionError("down"), {}, {"version": 2, "health": "healthy"}])
async def test_while_the_old_store_fails_nothing_is_stored_and_then_all_is_there(
    datastore: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = Failing()
    theirs = pf.DefaultShortTermMemory(config=own())
    await theirs.add_turn(pf.ConversationTurn("q0", "a"))
    await theirs.persist(store, KEY.composite())
    store.answer = answer
    async with pod(datastore, config=LONG, adopt_from=store) as one:
        assert (await one.run("lost")).memory is None
        assert "memory_hydrate_failed" in caplog.text
        assert await queries(one) == []
        store.answer = None
        assert (await one.run("q1")).known == ["q0"]
        assert await queries(one) == ["q0", "q1"]


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    said = [request["previous_summary"], *(turn["user"] for turn in request["turns"])]
    return {"summary": " ".join(filter(None, said))}


async def fail(request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RuntimeError("no")


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("strategy", ["truncation", "rolling_summary"])
@pytest.mark.parametrize("summarizer", [summarize, fail])
async def test_what_the_model_is_shown_stays_the_same(strategy: Any, summarizer: Any, adopted: bool) -> None:
    config = pf.ShortTermMemoryConfig(
        strategy=strategy,
        budget=pf.MemoryBudget(full_zone_turns=2, total_max_tokens=0),
        retry_attempts=0,
        degraded_retry_interval_s=1e6,
    )
    theirs, store = pf.DefaultShortTermMemory(config=config, summarizer=summarizer), InMemoryStateStore()
    for number in range(5):
        await theirs.add_turn(
            pf.ConversationTurn(f"q{number}", "a", pf.TrajectoryDigest(["t"], f"o{number}"), ts=float(number))
        )
        await theirs.flush()
    await theirs.persist(store, KEY.composite())
    async with open_backend("memory", close_timeout_s=0) as backend:
        if adopted:
            assert await backend.sessions.adopt(KEY, store)
        else:
            state = await store.load_memory_state(KEY.composite())
            assert state is not None
            await backend.sessions.import_(state, key=KEY)
        memory = backend.memory(KEY, config, summarizer=fail)
        assert await memory.get_llm_context() == await theirs.get_llm_context()
        assert memory.health.value == theirs.health.value
