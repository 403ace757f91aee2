"""Broken graphs, and the correct one that they are variations of."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from stm_backends.backend import Backend
from stm_backends.errors import Unavailable
from stm_backends.records.words import words_of
from stm_backends.tiers import wording
from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.graph import Change, InProcessGraph
from stm_backends.tiers.vertices import Stored


class Ground:
    """What the graphs of one test have in common: the datastore."""

    def __init__(self) -> None:
        self.graphs: dict[str, InProcessGraph] = {}
        self.down = False

    def graph(self, name: str) -> InProcessGraph:
        """Return the data of a graph."""
        return self.graphs.setdefault(name, InProcessGraph())

    @asynccontextmanager
    async def outage(self) -> AsyncGenerator[None]:
        """Cut the datastore off for as long as the context lasts."""
        self.down = True
        try:
            yield
        finally:
            self.down = False


class PlainGraph:
    """A correct graph of a few lines."""

    def __init__(self, ground: Ground, name: str) -> None:
        self.ground = ground
        self.name = name

    @property
    def data(self) -> InProcessGraph:
        """The data of this graph. Raises `Unavailable` if the datastore is cut off."""
        if self.ground.down:
            raise Unavailable("the ground is out of reach", backend="ground")
        return self.ground.graph(self.name)

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.data.add_vertex(vertex_id, label, properties)

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        await self.data.update_vertex(vertex_id, properties)

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.data.add_edge(source_id, target_id, label, properties)

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        return await self.data.query_vertex(vertex_id)

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        return await self.data.query_children(vertex_id)

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        return await self.data.query_parents(vertex_id)

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        return await self.data.get_full_trace(run_id)

    async def clear(self) -> None:
        await self.data.clear()

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        return await self.data.change_vertex(vertex_id, label, change)

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in self.data.list_vertices(label):
            yield page


class AddsMerge(PlainGraph):
    """Merges the properties of a vertex that is added again."""

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        known = await self.data.query_vertex(vertex_id) or {"properties": {}}
        await self.data.add_vertex(vertex_id, label, {**known["properties"], **properties})


class AddsRemoveFirst(PlainGraph):
    """Removes a vertex, and its edges, before it is added again."""

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.data.change_vertex(vertex_id, label, lambda properties: None)
        await self.data.add_vertex(vertex_id, label, properties)


class UpdatesReplace(PlainGraph):
    """Stores only the properties of the update."""

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        known = await self.data.query_vertex(vertex_id)
        assert known is not None
        await self.data.add_vertex(vertex_id, known["label"], properties)


class UpdatesMergeObjects(PlainGraph):
    """Merges objects within the properties, too."""

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        known = await self.data.query_vertex(vertex_id)
        assert known is not None
        before: dict[str, Any] = known["properties"]
        merged: dict[str, Any] = {
            name: {**before[name], **value} if isinstance(value, dict) and name in before else value
            for name, value in properties.items()
        }
        await self.data.update_vertex(vertex_id, merged)


class OwnCopyPerInstance(PlainGraph):
    """Keeps its vertices in the object."""

    @property
    def data(self) -> InProcessGraph:
        return self.__dict__.setdefault("_own", InProcessGraph())


class PropertiesAreText(PlainGraph):
    """Stores what JSON does not know as its nearest text."""

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        await self.data.update_vertex(vertex_id, json.loads(json.dumps(properties, default=str)))


class NumbersBecomeFloats(PlainGraph):
    """Reads every number as a float."""

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        return json.loads(json.dumps(await self.data.query_vertex(vertex_id)), parse_int=float)


class HandsOutItsVertices(PlainGraph):
    """Returns the same object to all callers."""

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        found = await self.data.query_vertex(vertex_id)
        return self.__dict__.setdefault("_cache", {}).setdefault(vertex_id, found)


class CaselessIds(PlainGraph):
    """Compares ids without case."""

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.data.add_vertex(vertex_id.lower(), label, properties)

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        found = await self.data.query_vertex(vertex_id.lower())
        return found and {**found, "id": vertex_id}


class EdgesWithoutDirection(PlainGraph):
    """Stores each edge in both directions."""

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.data.add_edge(source_id, target_id, label, properties)
        await self.data.add_edge(target_id, source_id, label, properties)


class FirstEdgeStays(PlainGraph):
    """Ignores an edge that is there already."""

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        known = await self.data.query_children(source_id)
        if (target_id, label) not in [(one["id"], one["edge_label"]) for one in known]:
            await self.data.add_edge(source_id, target_id, label, properties)


class EdgesMakeVertices(PlainGraph):
    """Adds the vertices of an edge that do not exist."""

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        for one in (source_id, target_id):
            if await self.data.query_vertex(one) is None:
                await self.data.add_vertex(one, "", {})
        await self.data.add_edge(source_id, target_id, label, properties)


class ShowsAHundredEdges(PlainGraph):
    """Reads only the first page of edges."""

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        return (await self.data.query_children(vertex_id))[:100]


class TracesLeaveTheRun(PlainGraph):
    """Has the edges that lead out of a run in its trace."""

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        trace = await self.data.get_full_trace(run_id)
        edges = [
            {
                "source_id": vertex["id"],
                "target_id": child["id"],
                "label": child["edge_label"],
                "properties": child["edge_properties"],
            }
            for vertex in trace["vertices"]
            for child in await self.data.query_children(vertex["id"])
        ]
        return {**trace, "edges": edges}


class ClearKeepsEdges(PlainGraph):
    """Removes only the vertices."""

    async def clear(self) -> None:
        self.data._vertices.clear()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- a table apart from the edges'


class OneGraphForAll(PlainGraph):
    """Ignores whose graph it is."""

    def __init__(self, ground: Ground, name: str) -> None:
        super().__init__(ground, name.partition("-")[0])


class ReadsThenWrites(PlainGraph):
    """Reads a vertex in one round trip and writes it in the next."""

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        known = await self.data.query_vertex(vertex_id)
        changed = change(None if known is None else known["properties"])
        await asyncio.sleep(0)
        return await self.data.change_vertex(vertex_id, label, lambda properties: changed)


class UpdatesWriteAllBack(PlainGraph):
    """Writes an update with all properties as they were read."""

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        known = await self.data.query_vertex(vertex_id)
        assert known is not None
        await asyncio.sleep(0)
        await self.data.add_vertex(vertex_id, known["label"], {**known["properties"], **properties})


class ChangesWriteEdgesBack(PlainGraph):
    """Writes a changed vertex with the edges that were read."""

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        edges = copy.copy(self.data._edges)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- they are part of the vertex's value
        await asyncio.sleep(0)
        changed = await self.data.change_vertex(vertex_id, label, change)
        self.data._edges = edges  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- as above
        return changed


class RemovesNothing(PlainGraph):
    """Ignores a change to `None`."""

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        known = await self.data.query_vertex(vertex_id)
        if change(None if known is None else known["properties"]) is None:
            return None
        return await self.data.change_vertex(vertex_id, label, change)


class RemovalLeavesEdges(PlainGraph):
    """Removes a vertex and leaves its edges."""

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        edges = copy.copy(self.data._edges)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- they are in another table
        changed = await self.data.change_vertex(vertex_id, label, change)
        self.data._edges = edges  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- as above
        return changed


class ListsTheFirstPage(PlainGraph):
    """Lists one page."""

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in self.data.list_vertices(label):
            yield page
            return


class ListsEveryLabel(PlainGraph):
    """Lists vertices of all labels."""

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        del label
        for every in ("a", "b"):
            async for page in self.data.list_vertices(every):
                yield page


class OutageIsNoVertex(PlainGraph):
    """Answers an outage with nothing."""

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        try:
            return await super().query_vertex(vertex_id)
        except Unavailable:
            return None


class OutageWritesElsewhere(PlainGraph):
    """Writes into this process during an outage."""

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        await self.ground.graph(self.name).add_vertex(vertex_id, label, properties)


class KeepsOldWords(BackendGraph):
    """Indexes a vertex only when it is new."""

    async def _indexed(
        self, stored: Stored, wanted: Stored, added: dict[str, frozenset[str]], *, again: bool = False
    ) -> Stored:
        new = await super()._indexed(stored, wanted, added, again=again)
        if stored.label is None:
            return new
        await self._index.drop({new.stamp: wording.terms_of(new.properties)})
        return replace(new, stamp=stored.stamp)


class OneStampPerVertex(BackendGraph):
    """Removes the words of a vertex from the index, regardless of which write has added them."""

    async def _indexed(
        self, stored: Stored, wanted: Stored, added: dict[str, frozenset[str]], *, again: bool = False
    ) -> Stored:
        if wanted.id not in added:
            added[wanted.id] = terms = wording.terms_of(wanted.properties)
            await self._index.add(wanted.id, wanted.id, terms)
        return replace(wanted, index=wording.RULE, stamp=wanted.id)


class FindsAnyWord(BackendGraph):
    """Returns vertices with any of the words."""

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        pages = [await super().search_vertices(label, word, limit=limit) for word in text.split()]
        return [*{vertex["id"]: vertex for page in pages for vertex in page}.values()][:limit]


class FindsSuperseded(BackendGraph):
    """Finds vertices that are superseded."""

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        words = words_of(text)
        pages = [page async for page in self.list_vertices(label)]
        found = [vertex for page in pages for vertex in page]
        return [
            vertex
            for vertex in found
            if words
            and words
            <= set().union(*(words_of(vertex["properties"].get(n)) for n in ("key", "content", "tags")))
        ][:limit]


class DropsEdgesItHasNotSeen(BackendGraph):
    """Takes what a load has shown for confirmed, though the driver declares that it may not be."""

    def __init__(self, backend: Backend, owner: tuple[str, str]) -> None:
        driver: Any = backend.driver
        driver.traits = replace(driver.traits, shows_unconfirmed=False)
        super().__init__(backend, owner)
