"""Any number of pods, any order of events: what a conversation shows is what was said, once each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support.clock import VirtualLoop

KEY = MemoryKey("acme", "u1", "chat")
PODS = st.integers(0, 2)


class SharedConversation(RuleBasedStateMachine):
    """The model is a list of turns; pods, faults and time may not make it any other list."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.store = MemoryStore()
        self.said: list[str] = []
        self.pods: list[tuple[DistributedShortTermMemory, SpyDriver, LedgerSummarizer]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10_000))

    @initialize(seed=st.integers(0, 2**32), zone=st.integers(0, 3), batch=st.integers(1, 3))
    def start(self, seed: int, zone: int, batch: int) -> None:
        self.chance = random.Random(seed)
        self.settings = config(
            zone=zone,
            fold_batch_turns=batch,
            total_max_tokens=0,
            summary_max_tokens=100_000,
            retry_backoff_base_s=2.0,
            degraded_retry_interval_s=30.0,
            recovery_backlog_limit=10_000,
            summarizer_timeout_s=20.0,
        )
        for _ in range(3):
            self.pods.append(self.pod())

    def pod(self) -> tuple[DistributedShortTermMemory, SpyDriver, LedgerSummarizer]:
        """Start a pod whose operations take their time, each a different one."""
        chance = self.chance

        class Slow(SpyDriver):
            async def _run(self, hooks: Any, operation: Any, key: Key | str) -> None:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
                await super()._run(hooks, operation, key)

        driver = Slow(MemoryDriver(self.store, clock=self.loop.time))
        self.run(driver.open())
        summarizer = LedgerSummarizer()
        memory = DistributedShortTermMemory(
            driver, KEY, self.settings, summarizer=summarizer, clock=self.loop.time
        )
        return memory, driver, summarizer

    def fresh(self) -> str:
        return f"{len(self.said)}"

    async def add(self, pod: int, text: str) -> None:
        """Add a turn as a caller does who means it: an unknown outcome is no reason not to add it again."""
        while True:
            try:
                return await self.pods[pod][0].add_turn(turn(text), turn_id=text)
            except OutcomeUnknown:
                continue

    @rule(pod=PODS)
    def say(self, pod: int) -> None:
        text = self.fresh()
        self.run(self.add(pod, text))
        self.said.append(f"u{text}")

    @rule(pods=st.lists(PODS, min_size=2, max_size=4))
    def say_at_once(self, pods: list[int]) -> None:
        texts = [f"{len(self.said)}-{number}" for number in range(len(pods))]

        async def together() -> None:
            await asyncio.gather(*(self.add(pod, text) for pod, text in zip(pods, texts, strict=True)))

        self.run(together())
        seen = self.run(shown(self.pods[0][0]))
        if self.pods[0][0].health is MemoryHealth.DEGRADED:
            everything = [item.user_message for item in self.run(self.pods[0][0].turns())]
        else:
            everything = seen["summary"] + seen["pending"] + seen["recent"]
        news = [user for user in everything if user.removeprefix("u") in texts]
        assert sorted(news) == sorted(f"u{text}" for text in texts)
        self.said += news

    @precondition(lambda self: self.said)
    @rule(pod=PODS, back=st.integers(1, 200))
    def say_again(self, pod: int, back: int) -> None:
        again = self.said[-min(back, len(self.said))].removeprefix("u")
        self.run(self.add(pod, again))

    @rule(pod=PODS, operation=st.sampled_from(["append", "replace"]), done=st.booleans())
    def an_answer_will_be_lost(self, pod: int, operation: Any, done: bool) -> None:
        async def lost(_: Key | str) -> None:
            raise OutcomeUnknown("lost")

        driver = self.pods[pod][1]
        (driver.after if done else driver.before).setdefault(operation, []).append(lost)

    @rule(pod=PODS, operation=st.sampled_from(["replace"]))
    def the_background_will_meet_an_outage(self, pod: int, operation: Any) -> None:
        async def down(_: Key | str) -> None:
            raise Unavailable("down")

        self.pods[pod][1].before.setdefault(operation, []).append(down)

    @rule(pod=PODS, times=st.integers(1, 6))
    def the_summarizer_will_fail(self, pod: int, times: int) -> None:
        self.pods[pod][2].fail = times

    @rule(pod=PODS)
    def die(self, pod: int) -> None:
        """End a pod as SIGKILL does: nothing is released, nothing is said."""
        memory, driver, _ = self.pods[pod]

        async def dead(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        driver.inner.delete = dead  # pyright: ignore[reportAttributeAccessIssue] -- its lease stays
        memory.abandon()
        self.run(asyncio.sleep(0.001))
        self.pods[pod] = self.pod()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(pod=PODS)
    def flush(self, pod: int) -> None:
        self.run(self.pods[pod][0].flush())
        if self.pods[pod][0].health is MemoryHealth.HEALTHY:
            assert self.run(shown(self.pods[pod][0]))["pending"] == []

    @invariant()
    def everything_said_is_there_once_and_in_order(self) -> None:
        for memory, _, _ in self.pods:
            seen = self.run(shown(memory))
            if memory.health is MemoryHealth.DEGRADED:
                assert (
                    seen["recent"]
                    == self.said[max(0, len(self.said) - self.settings.budget.full_zone_turns) :]
                )
            else:
                assert seen["summary"] + seen["pending"] + seen["recent"] == self.said

    def teardown(self) -> None:
        for memory, driver, _ in self.pods:
            driver.before.clear()
            driver.after.clear()
            self.run(memory.close())
        # Those of pods that died, and what these begin as they end.
        while remaining := asyncio.all_tasks(self.loop):
            for task in remaining:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(remaining))
        self.loop.close()


TestSharedConversation = SharedConversation.TestCase
TestSharedConversation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
