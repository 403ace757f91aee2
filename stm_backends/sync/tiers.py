"""The three tiers of memory, for programs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

from stm_backends import tiers
from stm_backends.errors import ConfigurationError
from stm_backends.sync.backend import Backend
from stm_backends.sync.memory import Run, called
from stm_backends.sync.summarizers import in_threads
from stm_backends.tiers import MemoryEntry, MemoryTier


class MemoryManager:
    """The asynchronous `MemoryManager` with blocking methods, on a backend and its loop.

    Its methods, and those of its tiers and of `gc`, guarantee and raise the same as the asynchronous ones.
    `llm_provider` may be a plain function or have a plain `generate(messages=...)`; each call runs in a
    separate thread. `settings` are those of the asynchronous `MemoryManager`.
    """

    def __init__(
        self, backend: Backend, owner: tuple[str, str], llm_provider: Any = None, **settings: Any
    ) -> None:
        if not isinstance(backend, Backend):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(
                f"backend must come from stm_backends.sync.open_backend(...), not {type(backend).__name__}"
            )
        self._run: Run = backend.run
        provider = None if llm_provider is None else _in_threads(llm_provider)
        self._manager = tiers.MemoryManager(
            None, provider, backend=backend.asynchronous, owner=owner, **settings
        )
        self.fleeting = FleetingMemory(self._manager.fleeting, self._run)
        self.short_term = ShortTermMemory(self._manager.short_term, self._run)
        self.long_term = LongTermMemory(self._manager.long_term, self._run)
        self.gc = MemoryGarbageCollector(self._manager.gc, self._run)

    @property
    def asynchronous(self) -> tiers.MemoryManager:
        """The asynchronous manager, which belongs to the loop's thread; use it through `backend.run`."""
        return self._manager

    def remember(
        self,
        key: str,
        value: Any,
        tier: MemoryTier = MemoryTier.SHORT_TERM,
        importance: float = 0.5,
        tags: Sequence[str] | None = None,
        source_agent: str = "",
        source_run_id: str = "",
    ) -> MemoryEntry:
        """Store a value in a tier and return its entry; it replaces one with the same key in that tier."""
        return self._run(
            self._manager.remember(key, value, tier, importance, tags, source_agent, source_run_id)
        )

    def recall(self, query: str, tiers: Iterable[MemoryTier] | None = None) -> list[MemoryEntry]:
        """Return the entries of the tiers that match the query, the most relevant first."""
        return self._run(self._manager.recall(query, tiers))

    def forget(self, key: str, tier: MemoryTier | None = None) -> None:
        """Remove an entry from a tier, or from all tiers if none is given."""
        self._run(self._manager.forget(key, tier))

    def get_context_window(self, max_tokens: int = 4000) -> list[MemoryEntry]:
        """Return the most relevant entries of short-term and long-term memory that fit into the budget."""
        return self._run(self._manager.get_context_window(max_tokens))

    def run_gc(self) -> None:
        """Maintain short-term memory, then long-term memory as `gc.on_idle` does."""
        self._run(self._manager.run_gc())


class _Tier:
    """The entries of a tier that this process knows of."""

    _memory: Any
    _run: Run

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of the entries that this process knows of."""
        return self._run(called(lambda: self._memory.entries))

    @property
    def size(self) -> int:
        """The number of entries that this process knows of; other processes may have changed it."""
        return self._run(called(lambda: self._memory.size))

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: object) -> bool:
        return self._run(called(lambda: key in self._memory))


class FleetingMemory(_Tier):
    """The asynchronous `FleetingMemory` with blocking methods."""

    def __init__(self, memory: tiers.FleetingMemory, run: Run) -> None:
        self._memory: tiers.FleetingMemory = memory
        self._run = run

    def remember(self, key: str, value: Any) -> None:
        """Store a value, by reference; it replaces one with the same key."""
        self._run(self._memory.remember(key, value))

    def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key or value contains the query, the most relevant first."""
        return self._run(self._memory.recall(query))

    def forget(self, key: str) -> None:
        """Remove an entry, if there is one."""
        self._run(self._memory.forget(key))

    def clear(self) -> None:
        """Remove all entries."""
        self._run(self._memory.clear())


class ShortTermMemory(_Tier):
    """The asynchronous `ShortTermMemory` with blocking methods."""

    def __init__(self, memory: tiers.ShortTermMemory, run: Run) -> None:
        self._memory: tiers.ShortTermMemory = memory
        self._run = run

    def remember(self, entry: MemoryEntry) -> None:
        """Store an entry; it replaces one with the same key and becomes the most recent."""
        self._run(self._memory.remember(entry))

    def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key, tags or content contain the query, the most relevant first."""
        return self._run(self._memory.recall(query))

    def get_recent(self, n: int) -> list[MemoryEntry]:
        """Return the `n` most recently stored entries, newest first. This does not count as an access."""
        return self._run(self._memory.get_recent(n))

    def forget(self, key: str) -> None:
        """Remove an entry, if there is one; it will not be promoted."""
        self._run(self._memory.forget(key))

    def clear(self) -> None:
        """Remove all entries, including those set aside for long-term memory."""
        self._run(self._memory.clear())

    def summarize(self, llm_provider: Any = None) -> MemoryEntry | None:
        """Replace all but the 10 most recent entries by one with the key `__summary__`; return that entry."""
        provider = None if llm_provider is None else _in_threads(llm_provider)
        return self._run(self._memory.summarize(provider))

    def listed(self) -> list[MemoryEntry]:
        """Return copies of all entries."""
        return self._run(self._memory.listed())


class LongTermMemory(_Tier):
    """The asynchronous `LongTermMemory` with blocking methods."""

    def __init__(self, memory: tiers.LongTermMemory, run: Run) -> None:
        self._memory: tiers.LongTermMemory = memory
        self._run = run

    def remember(self, entry: MemoryEntry) -> None:
        """Store an entry; it replaces one with the same key."""
        self._run(self._memory.remember(entry))

    def recall(self, query: str, *, limit: int | None = None) -> list[MemoryEntry]:
        """Return the entries that have every word of the query, the most relevant first."""
        return self._run(self._memory.recall(query, limit=limit))

    def recall_by_agent(self, agent_name: str) -> list[MemoryEntry]:
        """Return the entries of an agent, the most relevant first; each counts as an access."""
        return self._run(self._memory.recall_by_agent(agent_name))

    def recall_by_run(self, run_id: str) -> list[MemoryEntry]:
        """Return the entries of a run, the most relevant first; each counts as an access."""
        return self._run(self._memory.recall_by_run(run_id))

    def forget(self, key: str) -> None:
        """Remove an entry, if there is one."""
        self._run(self._memory.forget(key))

    def consolidate(self) -> int:
        """Merge entries with a similarity of at least 0.6; return how many were removed."""
        return self._run(self._memory.consolidate())

    def decay(self) -> int:
        """Remove the entries whose decayed relevance is below the threshold; return how many."""
        return self._run(self._memory.decay())

    def listed(self) -> list[MemoryEntry]:
        """Return all entries. This does not count as an access."""
        return self._run(self._memory.listed())

    def reconcile(self) -> None:
        """Store the held entries. Raises the graph's errors; entries that could not be stored stay held."""
        self._run(self._memory.reconcile())

    @property
    def held(self) -> int:
        """The number of entries that wait for the graph."""
        return self._run(called(lambda: self._memory.held))


class MemoryGarbageCollector:
    """The asynchronous `MemoryGarbageCollector` with blocking methods."""

    def __init__(self, gc: tiers.MemoryGarbageCollector, run: Run) -> None:
        self._gc = gc
        self._run = run

    def auto_forget(self, tier: MemoryTier) -> int:
        """Remove the entries with a relevance below the threshold; return how many."""
        return self._run(self._gc.auto_forget(tier))

    def summarize_context(self, entries: Sequence[MemoryEntry], max_tokens: int = 2000) -> str:
        """Return a summary of entries. Nothing is stored."""
        return self._run(self._gc.summarize_context(entries, max_tokens))

    def prune_by_relevance(self, tier: MemoryTier, keep_ratio: float = 0.7) -> int:
        """Remove the least relevant entries so that this share of them is kept; return how many."""
        return self._run(self._gc.prune_by_relevance(tier, keep_ratio))

    def prune_by_staleness(self, tier: MemoryTier, max_age_days: float = 30) -> int:
        """Remove the entries that were last accessed more than `max_age_days` ago; return how many."""
        return self._run(self._gc.prune_by_staleness(tier, max_age_days))

    def prune_duplicates(self, tier: MemoryTier) -> int:
        """Remove each entry that a more relevant one duplicates; return how many."""
        return self._run(self._gc.prune_duplicates(tier))

    def improve_memory(self, tier: MemoryTier) -> int:
        """Ask the model to correct and sharpen each entry; return how many changed."""
        return self._run(self._gc.improve_memory(tier))

    def on_turn_end(self) -> None:
        """Clear fleeting memory."""
        self._run(self._gc.on_turn_end())

    def on_session_end(self) -> None:
        """Summarize short-term memory, promote its important entries, and clear fleeting memory."""
        self._run(self._gc.on_session_end())

    def on_idle(self) -> None:
        """Maintain long-term memory: forget, prune, deduplicate, consolidate and improve."""
        self._run(self._gc.on_idle())


_given_up: WeakSet[threading.Thread] = WeakSet()
"""Threads of calls to models that were abandoned and may still run."""


def _in_threads(provider: Any) -> Any:
    """Return a provider that makes each call of another one in a new thread, so that none blocks the loop."""
    generate = getattr(provider, "generate", None)
    if generate is not None:

        def ask(messages: list[dict[str, str]]) -> object:
            return generate(messages=messages)

        return in_threads(ask, _given_up)
    return in_threads(provider, _given_up) if callable(provider) else provider
