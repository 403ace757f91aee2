"""A graph with the eight methods of `GraphBackend`, used as a `SharedGraph`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final
from weakref import WeakValueDictionary

from stm_backends.errors import ConfigurationError
from stm_backends.memory.tasks import LoopLock
from stm_backends.tiers.graph import PAGE, Change, GraphBackend, lacking, same_properties

_ROOT: Final = "stm_backends:all"
_CONTAINS: Final = "CONTAINS"
_REMOVED: Final = "removed"

_locks: WeakValueDictionary[int, LoopLock] = WeakValueDictionary()
"""The lock of each graph in use, by the `id` of the graph."""


class PlainGraph:
    """Lists and changes vertices of any `GraphBackend`.

    An internal vertex has an edge to every vertex stored through this class, so that they can be listed.
    Changes are atomic only within this process, but also across several memories on one graph. A removed
    vertex keeps its id and loses its properties, because `GraphBackend` cannot remove one.
    """

    def __init__(self, graph: GraphBackend) -> None:
        if missing := lacking(graph, GraphBackend):
            raise ConfigurationError(
                f"{type(graph).__name__} is not a graph_backend; it lacks: {', '.join(missing)}"
                " (pass a Backend as backend=..., with owner=...)"
            )
        self._graph = graph
        self._lock = _locks.setdefault(id(graph), LoopLock())
        self._listed: set[str] = set()
        self.add_vertex = graph.add_vertex
        self.update_vertex = graph.update_vertex
        self.add_edge = graph.add_edge
        self.query_vertex = graph.query_vertex
        self.query_children = graph.query_children
        self.query_parents = graph.query_parents
        self.get_full_trace = graph.get_full_trace
        self.clear = graph.clear

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        async with self._lock.here():
            vertex = await self._graph.query_vertex(vertex_id)
            stored: dict[str, Any] = {} if vertex is None else vertex["properties"]
            known = None if vertex is None or stored.get(_REMOVED) else {**stored}
            if known is not None:
                known.pop(_REMOVED, None)
            changed = change(None if known is None else {**known})
            if changed is None:
                if known is not None:
                    await self._graph.update_vertex(vertex_id, {**dict.fromkeys(stored), _REMOVED: True})
                return None
            if known is None or not same_properties(changed, known):
                properties = {**dict.fromkeys(stored), **changed, _REMOVED: False}
                if vertex is None:
                    await self._graph.add_vertex(vertex_id, label, properties)
                else:
                    await self._graph.update_vertex(vertex_id, properties)
            if vertex_id not in self._listed:
                await self._list(vertex_id)
            return {**changed}

    async def _list(self, vertex_id: str) -> None:
        if await self._graph.query_vertex(_ROOT) is None:
            await self._graph.add_vertex(_ROOT, "index", {"run_id": None})
        await self._graph.add_edge(_ROOT, vertex_id, _CONTAINS, {})
        self._listed.add(vertex_id)

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        children = await self._graph.query_children(_ROOT)
        # A graph may keep two copies of an edge that was added twice.
        found = {
            vertex["id"]: vertex
            for vertex in children
            if vertex["label"] == label and not vertex["properties"].get(_REMOVED)
        }
        self._listed.update(found)
        vertices = [*found.values()]
        for start in range(0, len(vertices), PAGE):
            yield vertices[start : start + PAGE]
