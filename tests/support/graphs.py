"""A graph around another, for tests in which calls fail or other processes act in between."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stm_backends.telemetry.observer import Observer


class GraphAround:
    """The methods of another graph; a subclass replaces some."""

    add_vertex: Any
    update_vertex: Any
    add_edge: Any
    query_vertex: Any
    query_children: Any
    query_parents: Any
    get_full_trace: Any
    clear: Any

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        for name in dir(inner):
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, getattr(inner, name))


class Counting(Observer):
    """Adds up the events of the tiers."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()

    def memories(self, event: str, tier: str, count: int) -> None:
        self.counts[event, tier] += count
