"""The memory of one process against a model of it that a reader can check in a minute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.summarizers import covered, summary_of
from stm_backends.types import MemoryHealth
from tests.support import clock
from tests.support.stores import ConditionalStore

KEY = "acme:u1:chat"
LIMIT = 4

_T = TypeVar("_T")


class Conversation(RuleBasedStateMachine):
    """The model: what was said, in order, and how many of the first turns a summary covers or were dropped.

    Time is virtual. The summarizer answers when a rule says so, and what it answers is a rule's choice.
    """

    @initialize(zone=st.integers(0, 3), retries=st.integers(0, 2))
    def start(self, zone: int, retries: int) -> None:
        self.runner = asyncio.Runner(loop_factory=clock.VirtualLoop)
        self.calls: list[tuple[Mapping[str, Any], asyncio.Future[Any]]] = []
        self.settings = config(
            zone=zone,
            retry_attempts=retries,
            recovery_backlog_limit=LIMIT,
            retry_backoff_base_s=2.0,
            degraded_retry_interval_s=30.0,
            summarizer_timeout_s=1e6,
        )
        self.zone, self.retries, self.said, self.number = zone, retries, list[str](), 0
        self.summarized, self.dropped, self.failures = list[str](), 0, 0
        self.store = ConditionalStore()
        self.memory = self.made()
        self.run(asyncio.sleep(0))

    def made(self) -> DefaultShortTermMemory:
        async def summarize(request: Mapping[str, Any]) -> Any:
            answer = asyncio.get_running_loop().create_future()
            self.calls.append((request, answer))
            return await answer

        return DefaultShortTermMemory(
            config=self.settings, summarizer=summarize, time_source=lambda: self.runner.get_loop().time()
        )

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        async def settled() -> _T:
            result = await work
            # Long enough for everything that is ready, too short for any wait to end.
            await asyncio.sleep(0.001)
            return result

        return self.runner.run(settled())

    # The model

    @property
    def standing(self) -> list[str]:
        return self.said[len(self.summarized) + self.dropped :]

    @property
    def pending(self) -> list[str]:
        return self.standing[: max(0, len(self.standing) - self.zone)]

    @property
    def calling(self) -> bool:
        return bool(self.calls) and not self.calls[-1][1].done()

    def drop(self) -> None:
        if self.failures > self.retries:
            self.dropped += max(0, len(self.pending) - LIMIT)

    # What may happen

    @rule(again=st.booleans())
    def add(self, again: bool) -> None:
        if again and self.number:
            self.run(self.memory.add_turn(turn(self.number), turn_id=f"id-{self.number}"))
            return
        self.number += 1
        calling = self.calling
        self.run(self.memory.add_turn(turn(self.number), turn_id=f"id-{self.number}"))
        self.said.append(f"u{self.number}")
        if not calling:
            self.drop()

    @precondition(lambda self: self.calling)
    @rule()
    def answer(self) -> None:
        request, answer = self.calls[-1]
        users = [item["user"] for item in request["turns"]]
        answer.set_result({"summary": summary_of(covered(request["previous_summary"]) + users)})
        self.summarized += users
        self.failures = 0
        self.run(asyncio.sleep(0))

    @precondition(lambda self: self.calling)
    @rule(nonsense=st.sampled_from([None, {}, {"summary": ""}, {"summary": 7}, RuntimeError("no")]))
    def fail(self, nonsense: Any) -> None:
        answer = self.calls[-1][1]
        answer.set_exception(nonsense) if isinstance(nonsense, Exception) else answer.set_result(nonsense)
        self.failures += 1
        self.drop()
        self.run(asyncio.sleep(0))

    @rule(seconds=st.sampled_from([1.0, 3.0, 9.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule()
    def flush_without_patience(self) -> None:
        self.run(self.memory.flush(timeout=0.0))

    @rule()
    def save(self) -> None:
        self.run(self.memory.persist(self.store, KEY))

    @precondition(lambda self: not self.calling)
    @rule(through_store=st.booleans())
    def move_to_another_process(self, through_store: bool) -> None:
        old, self.memory = self.memory, self.made()
        if through_store:
            self.run(old.persist(self.store, KEY))
            self.run(old.close())
            self.run(self.memory.hydrate(self.store, KEY))
        else:
            self.run(old.close())
            self.memory.from_dict(json.loads(json.dumps(old.to_dict())))
            self.run(self.memory.get_llm_context())

    # What always holds

    @invariant()
    def everything_said_is_summarized_pending_recent_or_dropped_in_order(self) -> None:
        if not hasattr(self, "memory"):
            return
        state = self.memory.to_dict()
        held = [item["user_message"] for part in ("backlog", "pending", "turns") for item in state[part]]
        assert covered(state["summary"]) == self.summarized
        assert held == self.standing
        assert state["stm"]["dropped"] == self.dropped
        assert state["stm"]["attempts"] == self.failures

    @invariant()
    def the_model_sees_what_the_health_allows(self) -> None:
        if not hasattr(self, "memory"):
            return
        view = self.run(shown(self.memory))
        degraded = self.failures > self.retries
        expected = (
            MemoryHealth.DEGRADED
            if degraded
            else MemoryHealth.RETRY
            if self.failures
            else MemoryHealth.HEALTHY
        )
        if degraded and self.calling:
            expected = MemoryHealth.RECOVERING
        assert self.memory.health is expected
        recent = self.standing[len(self.pending) :]
        if expected is MemoryHealth.DEGRADED:
            assert view == {"summary": [], "pending": [], "recent": recent}
        else:
            assert view == {"summary": self.summarized, "pending": self.pending, "recent": recent}

    @invariant()
    def what_is_pending_is_being_seen_to(self) -> None:
        if hasattr(self, "memory") and self.pending and not self.failures:
            assert self.calling

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.run(self.memory.close())
            self.runner.close()


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
