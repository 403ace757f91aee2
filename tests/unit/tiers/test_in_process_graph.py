"""The graph in this process keeps what the protocol of graphs promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stm_backends.errors import InvalidState
from stm_backends.tiers.graph import PAGE, GraphBackend, InProcessGraph, SharedGraph, VertexNotFound


async def graph_of(*edges: tuple[str, str, str], run_id: str = "r1") -> InProcessGraph:
    graph = InProcessGraph()
    for one in {end for edge in edges for end in edge[:2]}:
        await graph.add_vertex(one, "memory", {"run_id": run_id, "name": one})
    for source, target, label in edges:
        await graph.add_edge(source, target, label, {"of": label})
    return graph


def test_the_graph_in_this_process_has_both_protocols() -> None:
    assert isinstance(InProcessGraph(), GraphBackend)
    assert isinstance(InProcessGraph(), SharedGraph)


async def test_a_vertex_comes_back_and_a_missing_one_is_none() -> None:
    graph = await graph_of(("a", "b", "CALLED"))
    vertex = await graph.query_vertex("a")
    assert vertex is not None
    assert {**vertex, "created_at": ""} == {
        "id": "a",
        "label": "memory",
        "properties": {"run_id": "r1", "name": "a"},
        "run_id": "r1",
        "created_at": "",
    }
    assert await graph.query_vertex("c") is None


async def test_adding_a_vertex_again_replaces_it_and_keeps_its_edges() -> None:
    graph = await graph_of(("a", "b", "CALLED"))
    before = await graph.query_vertex("a")
    await graph.add_vertex("a", "other", {"new": 1})
    after = await graph.query_vertex("a")
    assert before is not None
    assert after is not None
    assert (after["label"], after["properties"], after["run_id"]) == ("other", {"new": 1}, None)
    assert after["created_at"] == before["created_at"]
    assert [one["id"] for one in await graph.query_children("a")] == ["b"]


async def test_an_update_merges_properties() -> None:
    graph = await graph_of(("a", "b", "CALLED"))
    await graph.update_vertex("a", {"name": "x", "more": [1]})
    vertex = await graph.query_vertex("a")
    assert vertex is not None
    assert vertex["properties"] == {"run_id": "r1", "name": "x", "more": [1]}
    with pytest.raises(VertexNotFound):
        await graph.update_vertex("c", {})
    assert await graph.query_vertex("c") is None


async def test_neighbours_are_found_in_the_direction_of_the_edges() -> None:
    graph = await graph_of(("a", "b", "CALLED"), ("a", "c", "STEP"), ("c", "a", "BACK"))
    assert [(v["id"], v["edge_label"], v["edge_properties"]) for v in await graph.query_children("a")] == [
        ("b", "CALLED", {"of": "CALLED"}),
        ("c", "STEP", {"of": "STEP"}),
    ]
    assert [v["id"] for v in await graph.query_parents("a")] == ["c"]
    assert await graph.query_children("b") == []


async def test_an_edge_is_there_once_and_waits_for_its_vertices() -> None:
    graph = InProcessGraph()
    await graph.add_vertex("a", "memory", {})
    await graph.add_edge("a", "b", "CALLED", {"n": 1})
    assert await graph.query_children("a") == []
    await graph.add_vertex("b", "memory", {})
    await graph.add_edge("a", "b", "CALLED", {"n": 2})
    assert [v["edge_properties"] for v in await graph.query_children("a")] == [{"n": 2}]


async def test_a_trace_is_one_run_with_the_edges_within_it() -> None:
    graph = await graph_of(("a", "b", "CALLED"))
    await graph.add_vertex("z", "memory", {"run_id": "r2"})
    await graph.add_edge("a", "z", "CALLED", {})
    trace = await graph.get_full_trace("r1")
    assert sorted(v["id"] for v in trace["vertices"]) == ["a", "b"]
    assert trace["edges"] == [
        {"source_id": "a", "target_id": "b", "label": "CALLED", "properties": {"of": "CALLED"}}
    ]
    assert await graph.get_full_trace("r3") == {"vertices": [], "edges": []}


async def test_clear_removes_vertices_and_edges() -> None:
    graph = await graph_of(("a", "b", "CALLED"))
    await graph.clear()
    for one in "ab":
        assert await graph.query_vertex(one) is None
        await graph.add_vertex(one, "memory", {})
    assert await graph.query_children("a") == []


async def test_what_the_caller_changes_is_not_stored() -> None:
    graph = InProcessGraph()
    properties = {"list": [1]}
    await graph.add_vertex("a", "memory", properties)
    properties["list"].append(2)
    vertex = await graph.query_vertex("a")
    assert vertex is not None
    vertex["properties"]["list"].append(3)
    again = await graph.query_vertex("a")
    assert again is not None
    assert again["properties"] == {"list": [1]}


async def test_properties_that_are_not_json_are_refused() -> None:
    graph = InProcessGraph()
    with pytest.raises(InvalidState):
        await graph.add_vertex("a", "memory", {"set": {1}})
    with pytest.raises(InvalidState):
        await graph.add_edge("a", "b", "CALLED", {"set": {1}})
    assert await graph.query_vertex("a") is None


async def test_a_change_creates_replaces_and_removes_a_vertex() -> None:
    graph = await graph_of(("a", "b", "CALLED"))

    def plus(properties: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"n": (properties or {}).get("n", 0) + 1}

    assert await graph.change_vertex("n", "count", plus) == {"n": 1}
    assert await graph.change_vertex("n", "other", plus) == {"n": 2}
    vertex = await graph.query_vertex("n")
    assert vertex is not None
    assert vertex["label"] == "count"
    assert await graph.change_vertex("b", "memory", lambda _: None) is None
    assert await graph.query_vertex("b") is None
    await graph.add_vertex("b", "memory", {})
    assert await graph.query_children("a") == []
    assert await graph.change_vertex("none", "memory", lambda _: None) is None


async def test_all_vertices_of_a_label_are_listed_in_pages() -> None:
    graph = InProcessGraph()
    for number in range(2 * PAGE + 1):
        await graph.add_vertex(f"v{number}", "memory", {})
    await graph.add_vertex("other", "other", {})
    pages = [page async for page in graph.list_vertices("memory")]
    assert [len(page) for page in pages] == [PAGE, PAGE, 1]
    assert {v["id"] for page in pages for v in page} == {f"v{number}" for number in range(2 * PAGE + 1)}
