"""The graph under long-term memory: its protocols, and an in-process implementation.

A vertex is `{"id", "label", "properties", "run_id", "created_at"}`. `run_id` is the property with that name,
or `None`; `created_at` is ISO 8601 in UTC. A neighbour also has `"edge_label"` and `"edge_properties"`. An
edge of a trace is `{"source_id", "target_id", "label", "properties"}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, TypeVar, cast, runtime_checkable

from stm_backends.errors import StmError
from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.handed_in import ignore
from stm_backends.plain_json import decode_json, encode_json, require_json
from stm_backends.tiers.relevance import EntryHead

Properties: TypeAlias = dict[str, Any]
Vertex: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Properties | None], Mapping[str, Any] | None]
"""A function that gets a copy of the properties, or `None` if the vertex does not exist, and returns those to
store, or `None` to remove it. It may be called several times for one change: it must have no side effects."""

PAGE: Final = 256
"""Maximum number of vertices in a page of `list_vertices`."""


class VertexNotFound(StmError, LookupError):
    """No vertex has this id; nothing was written."""


class VertexExists(StmError, ValueError):
    """A vertex with this id already exists; nothing was written."""


def same_properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether properties are equal as JSON: `1`, `1.0` and `True` differ."""
    return one == other and encode_json(one) == encode_json(other)


@runtime_checkable
class GraphBackend(Protocol):
    """Stores vertices and directed edges between them. Any object with these methods will do."""

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a vertex.

        The label and the properties replace those of a vertex with the same id. Its edges and its creation
        time are kept.
        """
        ...

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        """Merge properties into those of a vertex; the others are kept.

        This library's graphs raise `VertexNotFound` if the vertex does not exist.
        """
        ...

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a directed edge.

        A source, a target and a label identify an edge: adding it again replaces its properties. The vertices
        may be added later; the edge is not returned until both exist.
        """
        ...

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        """Return a vertex, or `None`."""
        ...

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the targets of this vertex's outgoing edges, once for each edge."""
        ...

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the sources of this vertex's incoming edges, once for each edge."""
        ...

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        """Return `{"vertices", "edges"}`: the vertices with this `run_id`, and the edges between them."""
        ...

    async def clear(self) -> None:
        """Remove all vertices and edges."""
        ...


@runtime_checkable
class SharedGraph(GraphBackend, Protocol):
    """A graph with atomic changes, which many processes can use at once without losing any."""

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        """Replace the properties of a vertex by `change(properties)`, atomically, and return the stored ones.

        If another process changes the vertex at the same time, `change` is called again with the new stored
        properties. A result equal to the given properties writes nothing. `None` removes the vertex and its
        edges; later edges of a new vertex with that id are new edges. A vertex that does not exist is created
        with `label`, unless the result is `None`; an existing one keeps its label.
        """
        ...

    def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the vertices with a label, in pages of at most `PAGE`, in any order.

        A vertex that exists from the first page to the last is yielded exactly once.
        """
        ...


@runtime_checkable
class SearchableGraph(SharedGraph, Protocol):
    """A graph with an index, so that a search does not read all vertices."""

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """Return at most `limit` vertices that have every word of the text, last written first.

        The words come from the properties `key`, `content` and `tags`, compared whole and regardless of case.
        A text without a word finds nothing. A vertex with a property `superseded_by` is not found.
        """
        ...

    async def find_vertices(self, label: str, name: str, value: str) -> list[dict[str, Any]]:
        """Return the vertices with this value of `run_id`, `source_agent` or `source_run_id`."""
        ...


@runtime_checkable
class RankedGraph(SharedGraph, Protocol):
    """A graph that stores the ranks of its memories, so that a context window does not read all contents."""

    async def list_heads(self) -> dict[str, EntryHead]:
        """Return the heads of the vertices with the label `memory`, by id, without the superseded ones.

        A head may be older than its vertex, for example if an older version of this library changed it.
        """
        ...


_G = TypeVar("_G", bound=GraphBackend)


def lacking(graph: object, protocol: type[object]) -> list[str]:
    """Return the methods of a protocol that an object lacks.

    `isinstance` misses methods that a proxy or a lazy client provides through `__getattr__`.
    """
    kinds = [kind for kind in protocol.__mro__ if issubclass(kind, GraphBackend)]
    names = dict.fromkeys(name for kind in reversed(kinds) for name in vars(kind) if not name.startswith("_"))
    return [name for name in names if not callable(getattr(graph, name, None))]


def provides(graph: object, protocol: type[_G]) -> TypeGuard[_G]:
    """Return whether an object has all methods of a protocol."""
    return not lacking(graph, protocol)


class InProcessGraph:
    """A graph in the memory of this process, lost when it ends. Implements `SharedGraph`.

    Properties are copied on the way in and out, so later changes by the caller do not affect the stored ones.
    Values that JSON cannot represent raise `InvalidState`. `clock` returns the creation time.
    """

    def __init__(self, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = guarded_utc_clock(clock, ignore)
        self._vertices: dict[str, tuple[str, bytes, str]] = {}  # label, JSON of the properties, created_at
        self._edges: dict[tuple[str, str, str], bytes] = {}

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        self._put(vertex_id, label, properties)

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        vertex = self._vertex(vertex_id)
        if vertex is None:
            raise VertexNotFound("no vertex has this id")
        self._put(vertex_id, vertex["label"], {**vertex["properties"], **properties})

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        self._edges[source_id, target_id, label] = _encoded(properties)

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        return self._vertex(vertex_id)

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        return self._neighbours(vertex_id, here=0, there=1)

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        return self._neighbours(vertex_id, here=1, there=0)

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        vertices = [v for v in map(self._vertex, self._vertices) if v is not None and v["run_id"] == run_id]
        known = {vertex["id"] for vertex in vertices}
        edges = [
            {"source_id": source, "target_id": target, "label": label, "properties": _decoded(properties)}
            for (source, target, label), properties in self._edges.items()
            if source in known and target in known
        ]
        return {"vertices": vertices, "edges": edges}

    async def clear(self) -> None:
        self._vertices.clear()
        self._edges.clear()

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        vertex = self._vertex(vertex_id)
        changed = change(None if vertex is None else vertex["properties"])
        if changed is None:
            if self._vertices.pop(vertex_id, None) is None:
                return None
            self._edges = {edge: of for edge, of in self._edges.items() if vertex_id not in edge[:2]}
            return None
        self._put(vertex_id, label if vertex is None else vertex["label"], changed)
        return _decoded(self._vertices[vertex_id][1])

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        ids = [one for one, (its_label, *_) in self._vertices.items() if its_label == label]
        for start in range(0, len(ids), PAGE):
            page = [self._vertex(one) for one in ids[start : start + PAGE]]
            yield [vertex for vertex in page if vertex is not None]

    def _put(self, vertex_id: str, label: str, properties: Mapping[str, Any]) -> None:
        text = _encoded(properties)
        known = self._vertices.get(vertex_id)
        self._vertices[vertex_id] = (label, text, self._clock().isoformat() if known is None else known[2])

    def _vertex(self, vertex_id: str) -> dict[str, Any] | None:
        known = self._vertices.get(vertex_id)
        return None if known is None else vertex_of(vertex_id, known[0], _decoded(known[1]), known[2])

    def _neighbours(self, vertex_id: str, *, here: int, there: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if vertex_id in self._vertices:
            for edge, properties in self._edges.items():
                other = self._vertex(edge[there]) if edge[here] == vertex_id else None
                if other is not None:
                    found.append({**other, "edge_label": edge[2], "edge_properties": _decoded(properties)})
        return found


def vertex_of(vertex_id: str, label: str, properties: dict[str, Any], created_at: str) -> dict[str, Any]:
    """Return a vertex in the form that graphs return."""
    run_id = properties.get("run_id")
    return {
        "id": vertex_id,
        "label": label,
        "properties": properties,
        "run_id": run_id,
        "created_at": created_at,
    }


def _encoded(properties: Mapping[str, Any]) -> bytes:
    require_json(properties, "properties")
    return encode_json(properties)


def _decoded(properties: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", decode_json(properties))
