"""A user's graph is exported, imported, copied, counted, sealed again and erased with the user."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stm_backends import Sealing, StaticKeys
from stm_backends.admin.copying import Copy, Owner
from stm_backends.backend import Backend
from stm_backends.cli import graphs
from stm_backends.drivers.contract import ANY, KEEP
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, Unavailable
from stm_backends.records import keys, operations, postings
from stm_backends.records.codec import Codec
from stm_backends.testing import FakeClock
from stm_backends.tiers import BackendGraph, MemoryManager, MemoryTier, VertexExists

OWNER = ("acme", "u1")
LONG = MemoryTier.LONG_TERM


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with Backend(MemoryDriver()) as backend:
        yield backend


@pytest.fixture
async def target() -> AsyncIterator[Backend]:
    async with Backend(MemoryDriver()) as backend:
        yield backend


async def filled(backend: Backend) -> BackendGraph:
    graph = BackendGraph(backend, OWNER)
    for name, text in (("a", "red green"), ("b", "green blue"), ("c", "blue")):
        await graph.add_vertex(name, "note", {"key": name, "content": text, "run_id": "r"})
    await graph.add_edge("a", "b", "next", {"weight": 1})
    await graph.add_edge("b", "a", "back", {})
    await graph.add_edge("a", "missing", "next", {})
    await graph.add_edge("a", "c", "ended", {})
    await graph.change_vertex("c", "note", lambda _: None)
    await graph.add_vertex("c", "other", {})
    return graph


async def exported(graph: BackendGraph) -> list[dict[str, Any]]:
    return [document async for document in graph.export()]


async def test_an_exported_vertex_has_the_documented_form(backend: Backend) -> None:
    graph = await filled(backend)
    vertex = await graph.query_vertex("a")
    assert vertex is not None
    documents = {one["key"]["vertex_id"]: one for one in await exported(graph)}
    assert documents.keys() == {"a", "b", "c"}
    assert documents["a"] == {
        "format": "stm-vertex",
        "version": 1,
        "key": {"tenant_id": "acme", "user_id": "u1", "vertex_id": "a"},
        "label": "note",
        "properties": {"key": "a", "content": "red green", "run_id": "r"},
        "created_at": vertex["created_at"],
        "edges": [
            {"target_id": "b", "label": "next", "properties": {"weight": 1}},
            {"target_id": "missing", "label": "next", "properties": {}},
        ],
    }


async def test_an_import_carries_vertices_edges_and_words(backend: Backend, target: Backend) -> None:
    graph, other = await filled(backend), BackendGraph(target, OWNER)
    for document in json.loads(json.dumps(await exported(graph))):
        assert await other.import_(document)
    assert await exported(other) == await exported(graph)
    assert await other.get_full_trace("r") == await graph.get_full_trace("r")
    assert [one["id"] for one in await other.search_vertices("note", "green blue")] == ["b"]
    await other.add_vertex("missing", "note", {})
    assert {one["id"] for one in await other.query_children("a")} == {"b", "missing"}


async def records(backend: Backend) -> dict[str, Any]:
    scope = keys.scope(*OWNER, "graph")
    return {
        name: await backend.driver.load(keys.Key(scope, name))
        async for name in operations.names(backend.driver, scope)
    }


@pytest.mark.parametrize("on_conflict", ["merge", "replace"])
async def test_importing_again_writes_nothing(backend: Backend, target: Backend, on_conflict: Any) -> None:
    documents = await exported(await filled(backend))
    other = BackendGraph(target, OWNER)
    for document in documents:
        await other.import_(document, on_conflict=on_conflict)
    before = await records(target)
    for document in documents:
        assert not await other.import_(document, on_conflict=on_conflict)
    assert await records(target) == before


async def import_all(backend: Backend, documents: list[dict[str, Any]]) -> None:
    for document in documents:
        await BackendGraph(backend, OWNER).import_(document)


async def test_an_interrupted_import_is_completed_by_a_merge(backend: Backend) -> None:
    documents = await exported(await filled(backend))

    class Dying(MemoryDriver):
        left = 0

        async def append(self, key: Any, entry: bytes, **options: Any) -> int:
            self.left -= 1
            if self.left < 0:
                raise Unavailable("killed", backend="test")
            return await super().append(key, entry, **options)

    for left in range(12):
        store = MemoryStore()
        dying = Dying(store)
        dying.left = left
        async with Backend(dying) as one:
            with pytest.raises(Unavailable):
                await import_all(one, documents)
        async with Backend(MemoryDriver(store)) as one:
            other = BackendGraph(one, OWNER)
            for document in documents:
                await other.import_(document, on_conflict="merge")
            assert await exported(other) == documents
            assert [found["id"] for found in await other.search_vertices("note", "red")] == ["a"]


async def test_an_import_refuses_merges_or_replaces_what_exists(backend: Backend) -> None:
    graph = await filled(backend)
    [document] = [one for one in await exported(graph) if one["key"]["vertex_id"] == "a"]
    older = copy.deepcopy(document)
    older["properties"] = {"content": "older"}
    older["edges"] = [
        {"target_id": "b", "label": "next", "properties": {"weight": 2}},
        {"target_id": "c", "label": "like", "properties": {}},
    ]
    with pytest.raises(VertexExists):
        await graph.import_(older)
    with pytest.raises(ConfigurationError):
        await graph.import_(older, on_conflict="overwrite")  # pyright: ignore[reportArgumentType] -- a mistake
    assert document in await exported(graph)
    assert await graph.import_(older, on_conflict="merge")
    children = {
        (one["id"], one["edge_label"]): one["edge_properties"] for one in await graph.query_children("a")
    }
    assert children == {("b", "next"): {"weight": 1}, ("c", "like"): {}}
    assert [one["id"] for one in await graph.search_vertices("note", "red")] == ["a"]
    assert await graph.import_(older, on_conflict="replace")
    assert await graph.search_vertices("note", "red") == []
    [vertex] = await graph.search_vertices("note", "older")
    assert (vertex["properties"], vertex["created_at"]) == ({"content": "older"}, document["created_at"])
    [edge] = [one for one in await graph.query_children("a") if one["edge_label"] == "next"]
    assert edge["edge_properties"] == {"weight": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"tags": None},
        {"importance": 2},
        {"created_at": "yesterday"},
        {"merged_at": 1},
        {"superseded_by": 1},
        {"merge": "m"},
        {"merge": {"id": 1}},
        {"merges": "m"},
        {"vector": {"text": "t", "of": ["x"]}},
        {"vector": [1]},
    ],
)
async def test_a_memory_that_could_not_be_recalled_is_refused(backend: Backend, fields: Any) -> None:
    memory = MemoryManager(backend=backend, owner=OWNER)
    await memory.remember("k", "content", LONG)
    graph = BackendGraph(backend, OWNER)
    [document] = await exported(graph)
    await graph.clear()
    for properties in ({**document["properties"], **fields}, {"key": "k", "content": "c"}, {}):
        with pytest.raises(InvalidState):
            await graph.import_({**document, "properties": properties})
    assert await memory.long_term.listed() == []
    assert await graph.import_(document)
    assert [one.key for one in await memory.long_term.listed()] == ["k"]


async def test_a_memory_under_the_id_of_another_is_refused(backend: Backend) -> None:
    memory = MemoryManager(backend=backend, owner=OWNER)
    await memory.remember("k", "content", LONG)
    graph = BackendGraph(backend, OWNER)
    [document] = await exported(graph)
    await graph.clear()
    # It would be listed as `k`, and forgetting `k` would not remove it.
    with pytest.raises(InvalidState, match="vertex_id"):
        await graph.import_({**document, "key": {**document["key"], "vertex_id": "memory:other"}})
    assert await memory.long_term.listed() == []


@pytest.mark.parametrize("document", [{}, [], {"format": "stm-session"}])
async def test_what_is_no_exported_vertex_is_refused(backend: Backend, document: Any) -> None:
    with pytest.raises(InvalidState):
        await BackendGraph(backend, OWNER).import_(document)


async def test_an_exported_line_is_ascii_and_keeps_every_character(backend: Backend) -> None:
    text = "\ud800 \u65e5\u672c\u8a9e \U0001f600"
    await BackendGraph(backend, OWNER).add_vertex("a", "note", {"content": text})
    out, written = io.StringIO(), list[None]()
    errors: list[Corrupt] = []
    await graphs.write(backend, OWNER, out, failed=errors.append, on_written=lambda: written.append(None))
    assert errors == []
    assert out.getvalue().isascii()
    assert (len(written), json.loads(out.getvalue())["properties"]) == (1, {"content": text})


async def test_a_vertex_that_cannot_be_read_is_left_out_and_named(backend: Backend) -> None:
    graph = await filled(backend)
    where = keys.vertex_key(*OWNER, "b")
    await backend.driver.replace(where, b"stm/9 vertex", version="v", expect=ANY, ttl=None)
    with pytest.raises(Corrupt):
        await exported(graph)
    errors: list[Corrupt] = []
    found = [document async for document in graph.export(failed=errors.append)]
    assert {one["key"]["vertex_id"] for one in found} == {"a", "c"}
    assert [edge["target_id"] for one in found for edge in one["edges"]] == ["missing"]
    assert len(errors) == 1


async def test_memories_of_a_manager_move_with_an_export(backend: Backend, target: Backend) -> None:
    memory = MemoryManager(backend=backend, owner=OWNER)
    await memory.remember("k", "Quantum uses qubits", LONG, 0.9, ["x"], "researcher", "run")
    await memory.recall("qubits")
    for document in await exported(BackendGraph(backend, OWNER)):
        await BackendGraph(target, OWNER).import_(document)
    moved = MemoryManager(backend=target, owner=OWNER)
    assert await moved.long_term.listed() == await memory.long_term.listed()
    assert [one.key for one in await moved.long_term.recall_by_agent("researcher")] == ["k"]


async def test_statistics_count_the_records_of_a_graph_by_themselves(backend: Backend) -> None:
    graph = BackendGraph(backend, OWNER)
    await graph.add_vertex("a", "note", {"content": "red"})
    totals = await backend.stats.of_user(*OWNER)
    assert (totals.users, totals.graph_records, totals.logs, totals.states) == (1, 2, 0, 0)
    assert totals.bytes > 0
    await graph.clear()
    assert (await backend.stats.of_user(*OWNER)).users == 0


async def test_no_command_gives_a_graph_a_time_to_live() -> None:
    clock = FakeClock()
    sides = [Backend(MemoryDriver(clock=clock)) for _ in range(2)]
    async with sides[0] as source, sides[1] as target:
        graph = await filled(source)
        expiring = await source.sessions.expire("acme", ttl=60)
        assert expiring.looked_at == 0
        copy_ = Copy(source.driver, target.driver, [Owner("acme")], ttl=60)
        await copy_.copy()
        await clock.pass_time(120)
        for one in (graph, BackendGraph(target, OWNER)):
            assert len(await exported(one)) == 3
            assert [found["id"] for found in await one.search_vertices("note", "red")] == ["a"]
        assert [user async for user in target.sessions.users("acme")] == ["u1"]


async def test_a_graph_is_sealed_again_with_the_primary_key() -> None:
    old, new = bytes(range(32)), bytes(range(32, 64))
    store = MemoryStore()
    async with Backend(
        MemoryDriver(store), sealing=Sealing(StaticKeys({"k1": old}, primary="k1"))
    ) as backend:
        documents = await exported(await filled(backend))
    both = Sealing(StaticKeys({"k1": old, "k2": new}, primary="k2"))
    async with Backend(MemoryDriver(store), sealing=both) as backend:
        assert (await backend.sessions.reseal("acme")).ok
    async with Backend(
        MemoryDriver(store), sealing=Sealing(StaticKeys({"k2": new}, primary="k2"))
    ) as backend:
        graph = BackendGraph(backend, OWNER)
        assert await exported(graph) == documents
        assert [found["id"] for found in await graph.search_vertices("note", "red")] == ["a"]


async def test_reindexing_repairs_what_was_erased_from_the_index(backend: Backend) -> None:
    graph = await filled(backend)
    assert await graph.reindex() == 0
    before = await records(backend)
    assert await graph.reindex() == 0
    assert await records(backend) == before
    for name in [one for one in before if one.startswith("index:")]:
        await backend.driver.delete(keys.Key(keys.scope(*OWNER, "graph"), name))
    assert await graph.search_vertices("note", "green") == []
    assert await graph.reindex() == 2
    assert {one["id"] for one in await graph.search_vertices("note", "green")} == {"a", "b"}
    assert len((await graph.get_full_trace("r"))["vertices"]) == 2
    assert await graph.reindex() == 0


async def words_in_index(backend: Backend) -> set[str]:
    found = await records(backend)
    buckets = [postings.read(found[name], Codec()) for name in found if name.startswith("index:")]
    return {term for bucket in buckets for term in bucket.terms}


async def test_reindexing_removes_old_words_of_no_vertex(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = await filled(backend)
    for name in ("a", "b"):
        record = await backend.driver.load(keys.vertex_key(*OWNER, name))
        assert record is not None
        await backend.driver.delete(keys.vertex_key(*OWNER, name), expect=record.version)
    assert await graph.reindex() == 0
    # A process that is adding a vertex has its words in the index already.
    assert await words_in_index(backend) == {"a", "b", "red", "green", "blue", "run_id=r"}
    monkeypatch.setattr("stm_backends.tiers.backend_graph.ORPHANED_S", -1.0)
    assert await graph.reindex() == 0
    assert await words_in_index(backend) == set()


async def test_reindexing_leaves_no_word_of_what_was_removed(backend: Backend) -> None:
    graph = await filled(backend)
    await graph.update_vertex("a", {"content": "yellow"})
    await graph.change_vertex("b", "note", lambda _: None)
    await graph.reindex()
    found = await records(backend)
    stored = b"".join((found[name].body or b"") + b"".join(found[name].tail) for name in found)
    assert b"yellow" in stored
    for word in (b"red", b"green", b"blue"):
        assert word not in stored


async def test_a_vertex_changed_while_it_is_reindexed_keeps_the_change(backend: Backend) -> None:
    graph = await filled(backend)
    record = await backend.driver.load(keys.vertex_key(*OWNER, "a"))
    assert record is not None
    assert record.body is not None
    body = record.body.replace(b'"index":1', b'"index":0')
    await backend.driver.replace(
        keys.vertex_key(*OWNER, "a"), body, version="v", expect=record.version, ttl=KEEP
    )
    load, changed = backend.driver.load, False

    async def change_first(key: keys.Key) -> Any:
        nonlocal changed
        found = await load(key)
        if key == keys.vertex_key(*OWNER, "a") and not changed:
            changed = True
            await graph.update_vertex("a", {"content": "yellow"})
        return found

    backend.driver.load = change_first  # pyright: ignore[reportAttributeAccessIssue] -- an interleaving
    await graph.reindex()
    assert [one["id"] for one in await graph.search_vertices("note", "yellow")] == ["a"]
    assert await graph.search_vertices("note", "red") == []
