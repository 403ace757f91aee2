"""The three tiers against a plain model: any calls in any order, compared after each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.tiers import BackendGraph, InProcessGraph, MemoryManager, MemoryTier, SharedGraph

T = TypeVar("T")

KEYS = st.sampled_from(["a", "b", "c", "d"])
CONTENTS = st.sampled_from(["one", "two words", "some three words", 4, None, {"five": [5]}])
IMPORTANCES = st.sampled_from([0.0, 0.3, 0.5, 0.9])
TIERS = st.sampled_from(list(MemoryTier))


@dataclass
class Expected:
    content: Any
    importance: float
    created: datetime
    accessed: datetime
    accesses: int = 0

    def score(self, now: datetime) -> float:
        def days(since: datetime) -> float:
            return (now - since).total_seconds() / 86_400

        return (
            0.3 / (1 + days(self.accessed))
            + 0.2 * min(self.accesses / 10, 1)
            + 0.4 * self.importance
            + 0.1 * 0.95 ** days(self.created)
        )


def found_by(query: str, tier: MemoryTier, key: str, content: Any) -> bool:
    """Say whether a query finds an entry: by any part of the text, or in long-term memory by whole words."""
    text = f"{key} {content}".lower()
    if tier is not MemoryTier.LONG_TERM or not query:
        return query.lower() in text
    return query.lower() in re.findall("[a-z0-9]+", text)


class Tiers(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.graph = self.new_graph()
        self.memory = self.manager()
        self.expected: dict[MemoryTier, dict[str, Expected]] = {tier: {} for tier in MemoryTier}

    def new_graph(self) -> SharedGraph:
        return InProcessGraph()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    def manager(self) -> MemoryManager:
        memory = MemoryManager(self.graph, clock=lambda: self.now)
        # The refresh after every tenth call has a test of its own.
        memory.short_term.refresh_interval = 10**9
        return memory

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    @rule(key=KEYS, content=CONTENTS, importance=IMPORTANCES, tier=TIERS)
    def remember(self, key: str, content: Any, importance: float, tier: MemoryTier) -> None:
        self.run(self.memory.remember(key, content, tier=tier, importance=importance))
        weight = 0.0 if tier is MemoryTier.FLEETING else importance
        self.expected[tier][key] = Expected(content, weight, self.now, self.now)

    @rule(query=st.sampled_from(["", "words", "ONE", "a", "five"]), tiers=st.sets(TIERS))
    def recall(self, query: str, tiers: set[MemoryTier]) -> None:
        found = self.run(self.memory.recall(query, tiers=tiers))
        expected: set[tuple[MemoryTier, str]] = set()
        for tier in tiers:
            for key, one in self.expected[tier].items():
                if found_by(query, tier, key, one.content):
                    one.accesses, one.accessed = one.accesses + 1, self.now
                    expected.add((tier, key))
        assert {(one.tier, one.key) for one in found} == expected
        assert len(found) == len(expected)
        scores = [one.relevance_at(self.now) for one in found]
        assert scores == sorted(scores, reverse=True)

    @rule(key=KEYS, tier=st.none() | TIERS)
    def forget(self, key: str, tier: MemoryTier | None) -> None:
        self.run(self.memory.forget(key, tier))
        for one in MemoryTier if tier is None else (tier,):
            self.expected[one].pop(key, None)

    @rule(days=st.sampled_from([0.5, 20, 60]))
    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)

    @rule()
    def end_turn(self) -> None:
        self.run(self.memory.gc.on_turn_end())
        self.expected[MemoryTier.FLEETING].clear()

    @rule()
    def end_session(self) -> None:
        self.run(self.memory.gc.on_session_end())
        self.expected[MemoryTier.FLEETING].clear()
        long = self.expected[MemoryTier.LONG_TERM]
        for key, one in self.expected[MemoryTier.SHORT_TERM].items():
            if one.importance >= 0.5 or one.accesses >= 3:
                known = long.get(key)
                content = known if known is not None and known.created > one.created else one
                known = known or one
                long[key] = Expected(
                    content.content,
                    max(known.importance, one.importance),
                    content.created,
                    max(known.accessed, one.accessed),
                    max(known.accesses, one.accesses),
                )

    @rule(tier=st.sampled_from([MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM]))
    def auto_forget(self, tier: MemoryTier) -> None:
        weak = [key for key, one in self.expected[tier].items() if one.score(self.now) < 0.15]
        assert self.run(self.memory.gc.auto_forget(tier)) == len(weak)
        for key in weak:
            del self.expected[tier][key]

    @rule()
    def next_process(self) -> None:
        self.memory = self.manager()
        self.expected[MemoryTier.FLEETING].clear()
        self.expected[MemoryTier.SHORT_TERM].clear()

    @rule(tokens=st.integers(1, 12))
    def context_window(self, tokens: int) -> None:
        window = self.run(self.memory.get_context_window(tokens))
        assert sum(len(one.key) + len(str(one.content)) for one in window) <= tokens * 4
        assert len({one.key for one in window}) == len(window)
        for one in window:
            expected = self.expected[one.tier][one.key]
            expected.accesses, expected.accessed = expected.accesses + 1, self.now

    @invariant()
    def each_tier_is_what_the_model_says(self) -> None:
        if not hasattr(self, "memory"):
            return
        found = {
            MemoryTier.FLEETING: self.memory.fleeting.entries,
            MemoryTier.SHORT_TERM: self.memory.short_term.entries,
            MemoryTier.LONG_TERM: self.run(self.memory.long_term.listed()),
        }
        for tier, entries in found.items():
            assert {
                one.key: (one.content, one.importance, one.created_at, one.access_count, one.last_accessed)
                for one in entries
            } == {
                key: (one.content, one.importance, one.created, one.accesses, one.accessed)
                for key, one in self.expected[tier].items()
            }


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class TiersOnABackend(Tiers):
    def new_graph(self) -> SharedGraph:
        backend = Backend(MemoryDriver())
        self.run(backend.open())
        return BackendGraph(backend, ("acme", "u1"))


TestTiersOnABackend = TiersOnABackend.TestCase
TestTiersOnABackend.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
