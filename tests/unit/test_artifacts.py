"""Artifacts of turns: the model is shown those that are meant for it, and each memory returns them."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, sync
from stm_backends.agents import conversation
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.protocols import ShortTermMemoryArtifacts

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=3))


def turn(number: int, **artifacts: Any) -> ConversationTurn:
    return ConversationTurn(f"u{number}", f"a{number}", artifacts_shown=artifacts)


@pytest.mark.parametrize("kind", ["in this process", "shared", "router"])
async def test_a_memory_shows_and_returns_what_a_turn_stored(kind: str) -> None:
    async with Backend(MemoryDriver()) as backend:
        router = backend.router(CONFIG)
        memories: dict[str, Any] = {
            "in this process": DefaultShortTermMemory(config=CONFIG),
            "shared": backend.memory(KEY, CONFIG),
            "router": router,
        }
        memory = memories[kind]
        assert isinstance(memory, ShortTermMemoryArtifacts)
        with router.bound(KEY):
            await memory.add_turn(turn(1, chart={"points": [1]}, table="old"))
            await memory.add_turn(turn(2, table="new"))
            await memory.add_turn(turn(3))
            context = (await memory.get_llm_context())["conversation_memory"]
            assert [one.get("artifacts_shown") for one in context["recent_turns"]] == [
                {"chart": {"points": [1]}, "table": "old"},
                {"table": "new"},
                None,
            ]
            assert memory.get_artifact("table") == "new"
            assert memory.get_artifact("none") is None
            context["recent_turns"][0]["artifacts_shown"]["chart"]["points"].append(2)
            memory.get_artifact("chart")["points"].append(3)
            assert memory.get_artifact("chart") == {"points": [1]}


async def test_another_process_returns_the_artifact_after_a_load() -> None:
    async with Backend(MemoryDriver()) as backend:
        await backend.memory(KEY, CONFIG).add_turn(turn(1, chart=[1]))
        other = backend.memory(KEY, CONFIG)
        await other.turns()
        assert other.get_artifact("chart") == [1]


def test_a_blocking_memory_returns_an_artifact() -> None:
    with sync.open_backend("memory://") as backend:
        memory = backend.memory(KEY, CONFIG)
        memory.add_turn(turn(1, chart=[1]))
        assert memory.get_artifact("chart") == [1]


async def test_a_router_that_is_not_bound_has_no_artifact() -> None:
    async with Backend(MemoryDriver()) as backend:
        assert backend.router(CONFIG).get_artifact("chart") is None


async def test_an_exchange_records_artifacts() -> None:
    async with Backend(MemoryDriver()) as backend:
        async with conversation(backend, KEY, CONFIG) as exchange:
            exchange.record("q", "a", artifacts_shown={"chart": [1]}, artifacts_hidden_refs=["raw"])
        [stored] = await backend.memory(KEY, CONFIG).turns()
        assert (stored.artifacts_shown, stored.artifacts_hidden_refs) == ({"chart": [1]}, ["raw"])
        async with conversation(backend, KEY, CONFIG) as exchange:
            [shown] = exchange.context["conversation_memory"]["recent_turns"]
            assert shown["artifacts_shown"] == {"chart": [1]}


@pytest.mark.parametrize("total", [40, 80, 120, 400])
async def test_artifacts_count_against_the_budget(total: int) -> None:
    budget = MemoryBudget(summary_max_tokens=0, total_max_tokens=total)
    config = ShortTermMemoryConfig(strategy="truncation", budget=budget)
    memory = DefaultShortTermMemory(config=config)
    for number in range(3):
        await memory.add_turn(turn(number, chart="x" * 300))
    context = (await memory.get_llm_context())["conversation_memory"]
    assert memory.estimate_tokens() <= total
    assert context["recent_turns"][-1]["user"] == "u2"
