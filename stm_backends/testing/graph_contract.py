"""The contract of a graph, on which long-term memory relies."""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import pytest

from stm_backends.errors import StmError
from stm_backends.testing.store_contract import STATES
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.history import History, Recorded
from stm_backends.tiers.graph import SharedGraph, provides

IDS: Final = (
    *("a", "A", "a ", "a:b", "a/b", "a*", "a.b", "$a", "{a}", "a\nb", "a'; --", "vertex:a", "index:00"),
    *("\u00e9", "e\u0301", "\u65e5\u672c", "\U0001f600", "x" * 2_000, "x" * 2_001),
)
"""Ids of vertices that collide or do harm in careless graphs."""

METHODS: Final = (
    *("add_vertex", "update_vertex", "change_vertex", "query_vertex", "search_vertices"),
    *("add_edge", "query_children", "query_parents", "get_full_trace", "clear"),
)


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Gives a suite access to the graphs of one implementation.

    `open(name)` returns the graph with that name; if there can be several instances, a new one on the same
    data each time. Two names are two graphs; an implementation with a single graph may ignore the name and
    set `several=False`. The suite clears graphs. `close` ends an instance.

    The rest is optional; a check that needs a missing part is reported as not asked:

    - `outage()` is a context in which the datastore cannot be reached.
    - `fail_over(name, vertex_id, lost)` makes a server lose the newest `lost` edges from a vertex. That
      server still answers the next graph opened under this name, until that graph changes the vertex, which
      reaches the server that took over.
    """

    open: Callable[[str], Awaitable[Any]]
    close: Callable[[Any], Awaitable[None]] | None = None
    several: bool = True
    outage: Callable[[], AbstractAsyncContextManager[object]] | None = None
    fail_over: Callable[[str, str, int], Awaitable[None]] | None = None


class GraphBench:
    """The workbench of one check; leaving it clears the graphs of the check and closes its instances."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.history = History()
        self._word = uuid.uuid4().hex
        self._opened: dict[str, list[Any]] = {}

    async def graph(self, name: str = "one") -> Any:
        """Return a new instance of a graph that only this check uses."""
        graph = await self.graphs.open(self._full(name))
        opened = self._opened.setdefault(name, [])
        opened.append(graph)
        return Recorded(graph, self.history, f"{name}{len(opened)}", METHODS)

    async def fail_over(self, vertex_id: str, lost: int, name: str = "one") -> None:
        """Lose the newest edges from a vertex with their server, which still answers the next graph."""
        if self.graphs.fail_over is None:
            not_asked("needs `Graphs.fail_over`")
        self.history.say(f"the server fails over, and loses {lost} edges")
        await self.graphs.fail_over(self._full(name), vertex_id, lost)

    def _full(self, name: str) -> str:
        return f"{self._word}-{name}"

    async def shared(self) -> tuple[Any, Any]:
        """Return two instances of a graph with atomic changes, or skip the check."""
        one, other = await self.graph(), await self.graph()
        if not provides(one.inner, SharedGraph):
            not_asked("this graph has no atomic changes and no listing (`change_vertex`, `list_vertices`)")
        return one, other

    def id(self, rest: str = "a") -> str:
        """Return an id of a vertex or run that only this check uses."""
        return f"{self._word}:{rest}"

    async def __aenter__(self) -> GraphBench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for instances in self._opened.values():
                await instances[0].clear()
        finally:
            if self.graphs.close is not None:
                for instances in self._opened.values():
                    for graph in instances:
                        await self.graphs.close(graph)


async def ids_of(neighbours: Awaitable[list[dict[str, Any]]]) -> list[tuple[str, str]]:
    """Return the id and the edge label of each neighbour, sorted."""
    return sorted((one["id"], one["edge_label"]) for one in await neighbours)


async def listed(graph: Any, label: str) -> list[str]:
    """Return the ids of a whole listing, sorted."""
    return sorted([vertex["id"] async for page in graph.list_vertices(label) for vertex in page])


class GraphContract(Contract):
    """Checks of everything in a graph that long-term memory relies on.

    A subclass supplies the fixture `graphs`. Checks of atomic changes, listings and searches apply only to
    graphs that have them.
    """

    @pytest.fixture
    def graphs(self) -> Graphs:
        """The graphs under test; a subclass must override this."""
        raise NotImplementedError("override the fixture `graphs`")

    @pytest.fixture
    def bench(self, graphs: Graphs) -> GraphBench:
        """The workbench of one check, which enters and leaves it."""
        return GraphBench(graphs)

    # Vertices

    @check("graph.vertices")
    async def test_a_vertex_is_returned_by_every_instance_and_a_missing_one_is_none(
        self, bench: GraphBench
    ) -> None:
        """Writes are kept in the object, or a missing vertex raises."""
        one, other, where = await bench.graph(), await bench.graph(), bench.id()
        must_be(await other.query_vertex(where), None, "it was never added")
        await one.add_vertex(where, "memory", {"key": "k", "n": 1})
        found = await other.query_vertex(where)
        assert found is not None, "another instance has added it"
        must_be((found["id"], found["label"]), (where, "memory"), "these were added")
        must_be(found["properties"], {"key": "k", "n": 1}, "these are its properties")

    @check("graph.vertices")
    async def test_adding_a_vertex_again_replaces_its_properties_and_keeps_its_edges(
        self, bench: GraphBench
    ) -> None:
        """Adding merges, refuses an id that is in use, or removes the vertex first."""
        graph, here, there = await bench.graph(), bench.id("a"), bench.id("b")
        await graph.add_vertex(here, "memory", {"a": 1, "b": 2})
        await graph.add_vertex(there, "memory", {})
        await graph.add_edge(here, there, "next", {})
        await graph.add_vertex(here, "other", {"b": 3})
        found = await graph.query_vertex(here)
        must_be((found["label"], found["properties"]), ("other", {"b": 3}), "it was added last")
        must_be(await ids_of(graph.query_children(here)), [(there, "next")], "its edges stay")

    @check("graph.vertices")
    async def test_an_update_merges_properties_and_keeps_the_others(self, bench: GraphBench) -> None:
        """The properties are one value, which the update replaces, or nested objects are also merged."""
        graph, where = await bench.graph(), bench.id()
        await graph.add_vertex(where, "memory", {"a": 1, "b": {"c": 2}, "d": [1, 2]})
        await graph.update_vertex(where, {"b": {"e": 3}, "d": [], "f": None})
        found = await graph.query_vertex(where)
        expected: dict[str, Any] = {"a": 1, "b": {"e": 3}, "d": [], "f": None}
        must_be(found["properties"], expected, "an update replaces the properties that it names")
        must_be(found["label"], "memory", "an update does not change the label")
        await graph.update_vertex(where, {"a": True})
        found = await graph.query_vertex(where)
        must_be(found["properties"]["a"] is True, True, "1 and true are different values")

    @check("graph.json")
    @pytest.mark.parametrize("what", STATES)
    async def test_properties_come_back_equal_in_every_type_and_character(
        self, bench: GraphBench, what: str
    ) -> None:
        """Numbers pass through floats, text through an encoding, or properties become columns."""
        graph, where = await bench.graph(), bench.id()
        await graph.add_vertex(where, "memory", copy.deepcopy(STATES[what]))
        found = await graph.query_vertex(where)
        # Compared as text, because 1 == 1.0 == True, and NaN does not even equal itself.
        must_be(_text(found["properties"]), _text(STATES[what]), "this is what was stored")

    @check("graph.json")
    async def test_properties_that_are_not_json_are_refused_whole(self, bench: GraphBench) -> None:
        """A value that JSON does not know becomes its nearest text (`default=str`), or left out."""
        graph, where = await bench.graph(), bench.id()
        await graph.add_vertex(where, "memory", {"before": 1})
        for properties in ({"x": object()}, {"x": {1: "one"}}, {"x": b"bytes"}):
            with must_raise((TypeError, ValueError, StmError), "the properties are not JSON"):
                await graph.update_vertex(where, properties)
        found = await graph.query_vertex(where)
        must_be(found["properties"], {"before": 1}, "a refused update stores nothing")

    @check("graph.copies")
    async def test_changing_an_object_afterwards_does_not_change_the_graph(self, bench: GraphBench) -> None:
        """The caller's own object is stored or returned."""
        graph, here, there = await bench.graph(), bench.id("a"), bench.id("b")
        mine: dict[str, Any] = {"list": [1]}
        await graph.add_vertex(here, "memory", mine)
        await graph.add_vertex(there, "memory", {})
        await graph.add_edge(here, there, "next", mine)
        mine["list"].append(2)
        (await graph.query_vertex(here))["properties"]["list"].append(3)
        (await graph.query_children(here))[0]["edge_properties"]["list"].append(4)
        must_be((await graph.query_vertex(here))["properties"], {"list": [1]}, "only copies were changed")
        (child,) = await graph.query_children(here)
        must_be(child["edge_properties"], {"list": [1]}, "only copies were changed")

    @check("graph.ids")
    async def test_ids_are_any_text_and_never_collide(self, bench: GraphBench) -> None:
        """Ids are trimmed, cut, case-folded, or used as a path or pattern."""
        graph = await bench.graph()
        for number, rest in enumerate(IDS):
            await graph.add_vertex(bench.id(rest), "memory", {"n": number})
        for number, rest in enumerate(IDS):
            found = await graph.query_vertex(bench.id(rest))
            must_be(
                (found["id"], found["properties"]), (bench.id(rest), {"n": number}), "no other has its id"
            )

    # Edges

    @check("graph.edges")
    async def test_an_edge_leads_from_its_source_to_its_target(self, bench: GraphBench) -> None:
        """Edges are stored without a direction, or with the wrong one."""
        one, other, (a, b) = await bench.graph(), await bench.graph(), (bench.id("a"), bench.id("b"))
        for where in (a, b):
            await one.add_vertex(where, "memory", {"of": where})
        await one.add_edge(a, b, "next", {"weight": 1})
        (child,) = await other.query_children(a)
        must_be((child["id"], child["properties"]), (b, {"of": b}), "the edge leads there")
        must_be((child["edge_label"], child["edge_properties"]), ("next", {"weight": 1}), "it is that edge")
        must_be(await ids_of(other.query_parents(b)), [(a, "next")], "the edge comes from there")
        must_be(await other.query_children(b), [], "no edge leads away from it")
        must_be(await other.query_parents(a), [], "no edge leads to it")

    @check("graph.edges")
    async def test_adding_an_edge_again_replaces_its_properties(self, bench: GraphBench) -> None:
        """Each call stores another edge, or the first one stays."""
        graph, a, b = await bench.graph(), bench.id("a"), bench.id("b")
        for where in (a, b):
            await graph.add_vertex(where, "memory", {})
        await graph.add_edge(a, b, "next", {"weight": 1, "old": True})
        await graph.add_edge(a, b, "next", {"weight": 2})
        await graph.add_edge(a, b, "like", {})
        await graph.add_edge(a, a, "self", {})
        children = await graph.query_children(a)
        found = {(one["id"], one["edge_label"]): one["edge_properties"] for one in children}
        must_be(found, {(b, "next"): {"weight": 2}, (b, "like"): {}, (a, "self"): {}}, "these are its edges")
        must_be(len(children), 3, "an edge added again is still one edge")
        must_be(await ids_of(graph.query_parents(b)), [(a, "like"), (a, "next")], "the edges lead back")

    @check("graph.edges")
    async def test_an_edge_may_come_before_its_vertices_and_is_shown_once_they_exist(
        self, bench: GraphBench
    ) -> None:
        """An edge to a missing vertex is dropped, raises, or shows a vertex that does not exist."""
        graph, a, b = await bench.graph(), bench.id("a"), bench.id("b")
        await graph.add_edge(a, b, "next", {})
        must_be(await graph.query_vertex(b), None, "an edge does not create a vertex")
        await graph.add_vertex(a, "memory", {})
        must_be(await graph.query_children(a), [], "the target does not exist")
        await graph.add_vertex(b, "memory", {})
        must_be(await ids_of(graph.query_children(a)), [(b, "next")], "both vertices exist")

    @check("graph.edges")
    async def test_a_vertex_with_many_edges_shows_each_of_them_once(self, bench: GraphBench) -> None:
        """Edges are folded, paged or limited, and some are lost."""
        graph, hub, count = await bench.graph(), bench.id("hub"), 150
        await graph.add_vertex(hub, "run", {"n": 0})
        for number in range(count):
            await graph.add_vertex(bench.id(f"{number:03}"), "memory", {})
            await graph.add_edge(hub, bench.id(f"{number:03}"), "has", {"n": number})
            if number == count // 2:
                await graph.update_vertex(hub, {"n": 1})
        expected = [(bench.id(f"{number:03}"), "has") for number in range(count)]
        must_be(await ids_of(graph.query_children(hub)), expected, "each was added")

    @check("graph.trace")
    async def test_a_trace_has_the_vertices_of_a_run_and_the_edges_between_them(
        self, bench: GraphBench
    ) -> None:
        """Edges leading out of the run are included, or vertices that have left it."""
        graph, run, other = await bench.graph(), bench.id("run"), bench.id("run2")
        runs = {"a": run, "b": run, "c": other, "d": run, "e": None}
        for name, its_run in runs.items():
            await graph.add_vertex(bench.id(name), "memory", {"run_id": its_run})
        for source, target in ("ab", "bc", "ca", "ad", "be"):
            await graph.add_edge(bench.id(source), bench.id(target), "next", {"of": source})
        await graph.update_vertex(bench.id("d"), {"run_id": other})
        trace = await graph.get_full_trace(run)
        found = sorted(vertex["id"] for vertex in trace["vertices"])
        must_be(found, [bench.id("a"), bench.id("b")], "these are in the run now")
        edge = {
            "source_id": bench.id("a"),
            "target_id": bench.id("b"),
            "label": "next",
            "properties": {"of": "a"},
        }
        must_be(trace["edges"], [edge], "both of its ends are in the run")
        must_be(
            await graph.get_full_trace(bench.id("none")),
            {"vertices": [], "edges": []},
            "the run does not exist",
        )

    @check("graph.clear")
    async def test_clear_removes_every_vertex_and_every_edge(self, bench: GraphBench) -> None:
        """Edges are kept, and come back with the next vertices."""
        one, other, (a, b) = await bench.graph(), await bench.graph(), (bench.id("a"), bench.id("b"))
        for graph in (one, other):
            must_be(await graph.query_children(a), [], "without vertices, no edge is shown")
            for where in (a, b):
                await graph.add_vertex(where, "memory", {"run_id": where})
            must_be(await graph.query_children(a), [], "no edge was added to these vertices")
            await graph.add_edge(a, b, "next", {})
            await graph.clear()
            must_be(await other.query_vertex(a), None, "the graph was cleared")
            trace = await other.get_full_trace(a)
            must_be(trace, {"vertices": [], "edges": []}, "the graph was cleared")
        await one.clear()

    @check("graph.isolation")
    async def test_a_graph_shows_and_clears_nothing_of_another(self, bench: GraphBench) -> None:
        """All owners share one graph, or clearing one clears all."""
        if not bench.graphs.several:
            not_asked("there is a single graph (`Graphs.several`)")
        one, other, where = await bench.graph("one"), await bench.graph("other"), bench.id()
        await one.add_vertex(where, "memory", {"of": "one", "run_id": where})
        must_be(await other.query_vertex(where), None, "it is a vertex of another graph")
        must_be((await other.get_full_trace(where))["vertices"], [], "it is a vertex of another graph")
        await other.clear()
        assert await one.query_vertex(where) is not None, "only the other graph was cleared"

    # Atomic changes

    @check("graph.races")
    async def test_concurrent_changes_of_a_vertex_all_take_effect(self, bench: GraphBench) -> None:
        """The vertex is read in one round trip and written in the next, without a condition."""
        one, other = await bench.shared()
        where, graphs = bench.id(), (one, other)
        await asyncio.gather(
            *(graphs[n % 2].change_vertex(where, "memory", _counting(f"by{n % 3}")) for n in range(24))
        )
        found = await one.query_vertex(where)
        assert found is not None, "the changes have created it"
        must_be(found["properties"], {"by0": 8, "by1": 8, "by2": 8}, "each change adds one")

    @check("graph.races")
    async def test_concurrent_updates_of_other_properties_all_stay(self, bench: GraphBench) -> None:
        """An update writes back all properties as it read them."""
        one, other = await bench.shared()
        where = bench.id()
        await one.add_vertex(where, "memory", {})
        await asyncio.gather(*((one, other)[n % 2].update_vertex(where, {f"p{n}": n}) for n in range(12)))
        found = await other.query_vertex(where)
        must_be(found["properties"], {f"p{n}": n for n in range(12)}, "each update sets another property")

    @check("graph.races")
    async def test_an_edge_added_during_changes_of_its_vertices_stays(self, bench: GraphBench) -> None:
        """Edges are part of the vertex's value, and a change writes back the ones it has read."""
        one, other = await bench.shared()
        a, b = bench.id("a"), bench.id("b")
        for where in (a, b):
            await one.add_vertex(where, "memory", {})
        await asyncio.gather(
            *(one.change_vertex((a, b)[n % 2], "memory", _counting("n")) for n in range(12)),
            *(other.add_edge(a, b, f"e{n:02}", {}) for n in range(12)),
        )
        expected = [(b, f"e{n:02}") for n in range(12)]
        must_be(await ids_of(one.query_children(a)), expected, "each edge was added")
        must_be((await one.query_vertex(a))["properties"], {"n": 6}, "each change adds one")

    @check("graph.changes")
    async def test_a_change_returns_what_is_stored_and_none_removes_the_vertex(
        self, bench: GraphBench
    ) -> None:
        """The change of a vertex that does not exist is ignored, or `None` stores nothing."""
        graph, _ = await bench.shared()
        where = bench.id()
        seen: list[object] = []

        def note(properties: dict[str, Any] | None) -> dict[str, Any]:
            seen.append(copy.deepcopy(properties))
            return {**(properties or {}), "n": len(seen)}

        must_be(await graph.change_vertex(where, "memory", note), {"n": 1}, "that is stored now")
        must_be(await graph.change_vertex(where, "other", note), {"n": 2}, "that is stored now")
        must_be(seen, [None, {"n": 1}], "a change receives the stored properties")
        must_be((await graph.query_vertex(where))["label"], "memory", "an existing vertex keeps its label")
        must_be(await graph.change_vertex(where, "memory", _removed), None, "it was removed")
        must_be(await graph.query_vertex(where), None, "it was removed")
        await graph.add_edge(bench.id("b"), where, "next", {})
        must_be(await graph.change_vertex(where, "memory", _removed), None, "it does not exist")
        for one in (where, bench.id("b")):
            await graph.add_vertex(one, "memory", {})
        must_be(await ids_of(graph.query_parents(where)), [(bench.id("b"), "next")], "the edge has waited")

    @check("graph.changes")
    async def test_removing_a_vertex_removes_its_edges_for_good(self, bench: GraphBench) -> None:
        """Edges stay at their other end, and come back with a new vertex that has the same id."""
        graph, other = await bench.shared()
        a, b, c = (bench.id(name) for name in "abc")
        for where in (a, b, c):
            await graph.add_vertex(where, "memory", {})
        await graph.add_edge(a, b, "next", {})
        await graph.add_edge(b, c, "next", {})
        await graph.change_vertex(b, "memory", _removed)
        must_be(await other.query_children(a), [], "its target was removed")
        await other.add_vertex(b, "memory", {})
        must_be(await graph.query_children(a), [], "the edge was removed with its target")
        must_be(await graph.query_parents(c), [], "the edge was removed with its source")
        must_be(await graph.query_children(b), [], "the new vertex has no edges")
        await graph.add_edge(a, b, "next", {})
        must_be(await ids_of(other.query_parents(b)), [(a, "next")], "this edge was added to the new vertex")

    @check("graph.listing")
    async def test_a_listing_has_each_vertex_of_a_label_once_over_many_pages(self, bench: GraphBench) -> None:
        """A page skips or repeats a vertex at its end, or the label is ignored."""
        graph, other = await bench.shared()
        ids = [bench.id(f"{number:03}") for number in range(600)]
        for start in range(0, len(ids), 50):
            await asyncio.gather(
                *(
                    graph.add_vertex(one, "ab"[n % 2], {"n": n})
                    for n, one in enumerate(ids[start : start + 50])
                )
            )
        must_be(await listed(other, "a"), ids[::2], "these have the label")
        must_be(await listed(other, "c"), [], "none has the label")
        removed: list[str] = []
        seen: list[str] = []
        async for page in other.list_vertices("a"):
            assert page or not seen or len(seen) < len(ids), "a listing ends"
            seen += [vertex["id"] for vertex in page]
            if not removed and seen:
                removed.append(seen[0])
                await graph.change_vertex(seen[0], "a", _removed)
        must_be(sorted(seen), ids[::2], "removing listed vertices hides none of those that follow")

    # Searching

    @check("graph.search")
    async def test_a_search_finds_by_words_what_is_stored_now(self, bench: GraphBench) -> None:
        """The index is written after the vertex, or keeps the words of an earlier content."""
        graph, other = await bench.shared()
        if not hasattr(graph.inner, "search_vertices"):
            not_asked("this graph does not search (`search_vertices`)")

        async def found(text: str) -> list[str]:
            return [vertex["id"] for vertex in await other.search_vertices("memory", text)]

        a, b, c = (bench.id(name) for name in "abc")
        await graph.add_vertex(a, "memory", {"key": "finding_1", "content": "Quantum uses qubits"})
        await graph.add_vertex(b, "memory", {"key": "k", "content": {"x": ["about QUBITS"]}, "tags": ["Red"]})
        await graph.add_vertex(c, "else", {"key": "finding_1"})
        must_be(await found("finding"), [a], "it is a word of its key")
        must_be(sorted(await found("qubits")), [a, b], "it is a word of both")
        must_be(await found("red qubits"), [b], "only it has both words")
        must_be(await found("red bits"), [], "no vertex has both words")
        must_be(await found("qubit"), [], "a part of a word is not a word")
        must_be(await found(" -- "), [], "it contains no word")
        must_be(len(await graph.search_vertices("memory", "qubits", limit=1)), 1, "this is the limit")
        await graph.update_vertex(a, {"content": "Bits"})
        must_be(await found("qubits"), [b], "the word was replaced")
        must_be(await found("bits"), [a], "the word was stored")
        await graph.update_vertex(a, {"superseded_by": b})
        must_be(await found("bits"), [], "a superseded vertex is not found")
        await graph.change_vertex(b, "memory", _removed)
        must_be(await found("qubits"), [], "the vertex was removed")
        await graph.add_vertex(b, "memory", {"content": "qubits again"})
        must_be(await found("qubits"), [b], "the vertex was added again")

    @check("graph.search")
    async def test_concurrent_writes_leave_no_vertex_without_its_words(self, bench: GraphBench) -> None:
        """The words of a vertex that lost its race are removed, although the winner has them, too."""
        graph, other = await bench.shared()
        if not hasattr(graph.inner, "search_vertices"):
            not_asked("this graph does not search (`search_vertices`)")
        where = bench.id()
        changes = [_writing("word0 common"), _writing("word1 common"), _removed, _writing("word2 common")]
        for round_ in range(8):
            changes = [*changes[1:], changes[0]]
            await asyncio.gather(
                *(
                    (graph, other)[number % 2].change_vertex(where, "memory", change)
                    for number, change in enumerate(changes)
                )
            )
            stored = await graph.query_vertex(where)
            found = await other.search_vertices("memory", "common")
            must_be(found, [] if stored is None else [stored], f"it is stored like this after round {round_}")

    # Outages

    @check("graph.failover")
    async def test_no_edge_is_dropped_for_those_that_a_former_server_shows(self, bench: GraphBench) -> None:
        """The edges that a load has shown are moved, on a server that has others under the same version."""
        one, other, where = await bench.graph(), await bench.graph(), bench.id()
        for vertex_id in (where, bench.id("lost"), bench.id("kept")):
            await one.add_vertex(vertex_id, "memory", {"n": 1})
        await one.add_edge(where, bench.id("lost"), "knows", {})
        await bench.fail_over(where, 1)
        await other.add_edge(where, bench.id("kept"), "knows", {})
        behind = await bench.graph()
        await behind.add_vertex(where, "memory", {"n": 2})
        expected = [(bench.id("kept"), "knows")]
        must_be(await ids_of(other.query_children(where)), expected, "the new server has this edge")

    @check("graph.outage")
    async def test_an_outage_raises_and_is_never_an_empty_answer(self, bench: GraphBench) -> None:
        """Client errors are caught, and a copy in memory answers."""
        if bench.graphs.outage is None:
            not_asked("needs `Graphs.outage`")
        graph, where = await bench.graph(), bench.id()
        await graph.add_vertex(where, "memory", {"n": 1, "run_id": where})
        async with bench.graphs.outage():
            for call in (
                lambda: graph.query_vertex(where),
                lambda: graph.query_children(where),
                lambda: graph.query_parents(where),
                lambda: graph.get_full_trace(where),
                lambda: graph.update_vertex(where, {"n": 2}),
                lambda: graph.add_vertex(bench.id("b"), "memory", {}),
                lambda: graph.add_edge(where, where, "self", {}),
            ):
                with must_raise(Exception, "the datastore cannot be reached"):
                    await call()
        found = await graph.query_vertex(where)
        must_be(found["properties"], {"n": 1, "run_id": where}, "no write was done")
        must_be(await graph.query_vertex(bench.id("b")), None, "no write was done")


def _counting(name: str) -> Callable[[dict[str, Any] | None], dict[str, Any]]:
    def count(properties: dict[str, Any] | None) -> dict[str, Any]:
        found = properties or {}
        return {**found, name: found.get(name, 0) + 1}

    return count


def _removed(properties: dict[str, Any] | None) -> None:
    """Remove the vertex."""
    del properties


def _writing(content: str) -> Callable[[dict[str, Any] | None], dict[str, Any]]:
    def write(properties: dict[str, Any] | None) -> dict[str, Any]:
        del properties
        return {"content": content}

    return write


def _text(properties: object) -> str:
    return json.dumps(properties, sort_keys=True)
