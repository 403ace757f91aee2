"""The three tiers against a plain model: any calls in any order, compared after each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stm_backends import MemoryKey, open_backend
from stm_backends.tiers import (
    BackendGraph,
    InProcessGraph,
    MemoryManager,
    MemoryTier,
    SharedGraph,
    SharedShortTermMemory,
    shared_session,
)

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
    promoted: bool = False
    """Whether its content was promoted."""
    changed: bool = True
    """Whether it was changed since it was promoted."""

    def access(self, now: datetime) -> None:
        self.accesses, self.accessed, self.changed = self.accesses + 1, now, True

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


def is_due(one: Expected) -> bool:
    return one.changed and (one.importance >= 0.5 or one.accesses >= 3)


class Tiers(RuleBasedStateMachine):
    shared = False

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.backend = open_backend("memory://")
        self.run(self.backend.open())
        self.graph = self.new_graph()
        # Folds so often that any operation may be the first after one.
        self.often = patch.object(shared_session, "FOLD_AT", 3)
        self.often.start()
        self.memory = self.manager()
        self.expected: dict[MemoryTier, dict[str, Expected]] = {tier: {} for tier in MemoryTier}
        self.aside: dict[str, Expected] = {}

    def new_graph(self) -> SharedGraph:
        return InProcessGraph()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.often.stop()
            self.run(self.backend.close())
            self.loop.close()

    def manager(self) -> MemoryManager:
        session = None
        if self.shared:
            session = SharedShortTermMemory(
                self.backend, MemoryKey("acme", "u1", "chat"), clock=lambda: self.now
            )
        memory = MemoryManager(self.graph, short_term=session, clock=lambda: self.now)
        # The refresh after every tenth call has a test of its own.
        memory.short_term.refresh_interval = 10**9
        return memory

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    @rule(key=KEYS, content=CONTENTS, importance=IMPORTANCES, tier=TIERS)
    def remember(self, key: str, content: Any, importance: float, tier: MemoryTier) -> None:
        self.run(self.memory.remember(key, content, tier=tier, importance=importance))
        weight = 0.0 if tier is MemoryTier.FLEETING else importance
        known = self.expected[tier].get(key) or Expected(content, weight, self.now, self.now)
        self.expected[tier][key] = Expected(
            content, max(weight, known.importance), self.now, self.now, known.accesses
        )
        if tier is MemoryTier.SHORT_TERM:
            self.aside.pop(key, None)

    @rule(query=st.sampled_from(["", "words", "ONE", "a", "five"]), tiers=st.sets(TIERS))
    def recall(self, query: str, tiers: set[MemoryTier]) -> None:
        found = self.run(self.memory.recall(query, tiers=tiers))
        expected: set[tuple[MemoryTier, str]] = set()
        for tier in tiers:
            for key, one in self.expected[tier].items():
                if found_by(query, tier, key, one.content):
                    one.access(self.now)
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
        if tier in (None, MemoryTier.SHORT_TERM):
            self.aside.pop(key, None)

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
        for key, one in (*self.aside.items(), *self.expected[MemoryTier.SHORT_TERM].items()):
            if is_due(one) and (key in long or not one.promoted):
                known = long.get(key)
                stays = known is not None and (one.promoted or known.created > one.created)
                content = known if known is not None and stays else one
                known = known or one
                long[key] = Expected(
                    content.content,
                    max(known.importance, one.importance),
                    content.created,
                    max(known.accessed, one.accessed),
                    max(known.accesses, one.accesses),
                )
            if is_due(one):
                one.promoted, one.changed = True, False
        self.aside.clear()

    @rule(tier=st.sampled_from([MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM]))
    def auto_forget(self, tier: MemoryTier) -> None:
        weak = [key for key, one in self.expected[tier].items() if one.score(self.now) < 0.15]
        assert self.run(self.memory.gc.auto_forget(tier)) == len(weak)
        for key in weak:
            one = self.expected[tier].pop(key)
            if tier is MemoryTier.SHORT_TERM and is_due(one):
                self.aside[key] = one

    @rule()
    def next_process(self) -> None:
        self.memory = self.manager()
        self.expected[MemoryTier.FLEETING].clear()
        if not self.shared:
            self.expected[MemoryTier.SHORT_TERM].clear()
            self.aside.clear()

    @rule(tokens=st.integers(1, 12))
    def context_window(self, tokens: int) -> None:
        window = self.run(self.memory.get_context_window(tokens))
        assert sum(len(one.key) + len(str(one.content)) for one in window) <= tokens * 4
        assert len({one.key for one in window}) == len(window)
        for one in window:
            self.expected[one.tier][one.key].access(self.now)

    @invariant()
    def each_tier_is_what_the_model_says(self) -> None:
        if not hasattr(self, "memory"):
            return
        found = {
            MemoryTier.FLEETING: self.memory.fleeting.entries,
            MemoryTier.SHORT_TERM: self.run(self.memory.short_term.listed()),
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


class SharedTiers(Tiers):
    """The same with the session in a conversation, which the next process continues."""

    shared = True


TestTiers = Tiers.TestCase
TestSharedTiers = SharedTiers.TestCase


class TiersOnABackend(Tiers):
    """The same with the long-term memory on a backend."""

    def new_graph(self) -> SharedGraph:
        return BackendGraph(self.backend, ("acme", "u1"))


TestTiersOnABackend = TiersOnABackend.TestCase
TestTiers.settings = TestSharedTiers.settings = TestTiersOnABackend.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
