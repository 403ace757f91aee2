"""Several memories of one conversation, each with its own idea of it: nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing.memory_contract import config, turn
from stm_backends.testing.workbench.summarizers import covered, summary_of
from tests.support import clock
from tests.support.stores import ConditionalStore, PlainStore

KEY = "acme:u1:chat"

OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["add", "add", "add", "persist", "persist", "hydrate", "flush", "pause"]),
        st.integers(0, 4),
    ),
    max_size=40,
)


class Pod:
    """A memory whose summarizer takes its time and sometimes fails."""

    def __init__(self, name: str, chance: random.Random, **settings: Any) -> None:
        self.name = name
        self.added: list[str] = []
        self._chance = chance
        self._failures = settings.pop("failures", 0.0)
        self.memory = DefaultShortTermMemory(
            config=config(**{"retry_backoff_base_s": 2.0, "degraded_retry_interval_s": 30.0, **settings}),
            summarizer=self._summarize,
            time_source=clock.now,
        )

    async def _summarize(self, request: Any) -> dict[str, str]:
        await asyncio.sleep(self._chance.choice([0, 0.5, 2]))
        if self._chance.random() < self._failures:
            raise RuntimeError("told to fail")
        users = [item["user"] for item in request["turns"]]
        return {"summary": summary_of(covered(request["previous_summary"]) + users)}

    async def add(self) -> None:
        name = f"{self.name}{len(self.added)}"
        self.added.append(f"u{name}")
        await self.memory.add_turn(turn(name))


def ledger(state: dict[str, Any]) -> list[str]:
    """Return everything a state knows of: what its summary covers, and the turns it holds."""
    held = [item["user_message"] for part in ("backlog", "pending", "turns") for item in state[part]]
    return covered(state["summary"]) + held


async def act(pod: Pod, store: PlainStore, operation: str, when: float) -> None:
    await asyncio.sleep(when)
    match operation:
        case "add":
            await pod.add()
        case "persist":
            await pod.memory.persist(store, KEY)
        case "hydrate":
            await pod.memory.hydrate(store, KEY)
        case "flush":
            await pod.memory.flush(timeout=3)
        case _:
            await asyncio.sleep(1)


async def play(store: PlainStore, pods: list[Pod], operations: list[tuple[int, str, int]]) -> list[str]:
    """Carry out the operations, all at once or after one another, then let every pod have its say."""
    when = 0.0
    async with asyncio.TaskGroup() as tasks:
        for index, operation, gap in operations:
            when += 0.3 * gap
            tasks.create_task(act(pods[index % len(pods)], store, operation, when))
    for _ in range(2):
        for pod in pods:
            await pod.memory.persist(store, KEY)
    for pod in pods:
        await pod.memory.hydrate(store, KEY)
        await pod.memory.flush()
        await pod.memory.persist(store, KEY)
    for pod in pods:
        await pod.memory.close(timeout=0)
    return ledger(store.state(KEY))


@pytest.mark.parametrize("make_store", [ConditionalStore, PlainStore])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=OPERATIONS, seed=st.integers(0, 2**32), pods=st.integers(1, 3), zone=st.integers(0, 3))
def test_concurrent_pods_lose_and_double_no_turn(
    make_store: Any, operations: list[tuple[int, str, int]], seed: int, pods: int, zone: int
) -> None:
    chance = random.Random(seed)
    store = make_store(lambda: chance.choice([0, 0, 0.1, 0.4]))

    async def main() -> tuple[list[str], list[str]]:
        settings = {"zone": zone, "failures": 0.2, "recovery_backlog_limit": 1000}
        party = [Pod(f"{name}-", chance, **settings) for name in "abc"[:pods]]
        known = await play(store, party, operations)
        return known, [message for pod in party for message in pod.added]

    known, added = clock.run(main())
    assert Counter(known) == Counter(added)
