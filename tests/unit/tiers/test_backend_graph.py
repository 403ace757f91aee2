"""The graph in a datastore survives kills, lost answers, races, sealing, copying and erasure."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stm_backends import Sealing, StaticKeys, open_backend
from stm_backends.admin.copying import Copy, Owner
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, KEEP, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Corrupt, InvalidKey, OutcomeUnknown, Unavailable
from stm_backends.records import keys, operations
from stm_backends.records.ledger import FOLD_AT
from stm_backends.records.words import words_of
from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.graph import SearchableGraph

OWNER = ("acme", "u1")
SCOPE = keys.scope(*OWNER, "graph")


class Failing(WrapperDriver):
    """Dies at the `at`-th operation, or loses the answers of writes. Counts operations."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(MemoryDriver(store))
        self.at: int | None = None
        self.lost: set[int] = set()
        self.done = 0
        self.counted: Counter[str] = Counter()

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        self.done += 1
        self.counted[operation] += 1
        if self.at is not None and self.done >= self.at:
            raise Unavailable("killed", backend="test", operation=operation)
        answer = await send()
        if self.done in self.lost and operation in ("append", "replace", "delete"):
            raise OutcomeUnknown("the answer was lost", backend="test", operation=operation)
        return answer


def counted(properties: dict[str, Any] | None) -> dict[str, Any]:
    found = properties or {}
    return {**found, "n": found.get("n", 0) + 1}


def removed(properties: dict[str, Any] | None) -> None:
    del properties


async def listed(graph: BackendGraph) -> dict[str, dict[str, Any]]:
    pages = [page async for page in graph.list_vertices("memory")]
    return {vertex["id"]: vertex for page in pages for vertex in page}


async def require_sound(graph: BackendGraph) -> None:
    """Every stored vertex is found by its words, and both ends of an edge agree."""
    vertices = await listed(graph)
    words: set[str] = set()
    for vertex in vertices.values():
        for word in words_of(vertex["properties"].get("content")):
            words.add(word)
            assert vertex in await graph.search_vertices("memory", word)
        for child in await graph.query_children(vertex["id"]):
            parents = await graph.query_parents(child["id"])
            assert (vertex["id"], child["edge_label"]) in [(one["id"], one["edge_label"]) for one in parents]
    for word in words:
        for found in await graph.search_vertices("memory", word):
            assert found == vertices[found["id"]]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_the_graph_has_the_protocol_of_searchable_graphs(store: MemoryStore) -> None:
    assert isinstance(BackendGraph(Backend(MemoryDriver(store)), OWNER), SearchableGraph)
    with pytest.raises(InvalidKey):
        BackendGraph(Backend(MemoryDriver(store)), ("acme", " "))


async def story(graph: BackendGraph) -> None:
    """Do a bit of everything."""
    await graph.add_vertex("a", "memory", {"content": "red green", "run_id": "r"})
    await graph.add_vertex("b", "memory", {"content": "green blue", "run_id": "r"})
    await graph.add_edge("a", "b", "next", {"weight": 1})
    await graph.update_vertex("a", {"content": "red yellow"})
    await graph.change_vertex("b", "memory", removed)
    await graph.add_vertex("b", "memory", {"content": "black"})
    await graph.add_edge("b", "a", "back", {})


async def test_a_process_killed_at_any_operation_leaves_a_sound_graph(store: MemoryStore) -> None:
    whole = Failing(MemoryStore())
    async with Backend(whole) as backend:
        await story(BackendGraph(backend, OWNER))
    for at in range(1, whole.done + 1):
        store = MemoryStore()
        dying = Failing(store)
        dying.at = at
        # The last operations only tidy up, and a failure of theirs is logged.
        with suppress(Unavailable):
            async with Backend(dying) as backend:
                await story(BackendGraph(backend, OWNER))
        assert dying.done >= at
        async with Backend(MemoryDriver(store)) as backend:
            graph = BackendGraph(backend, OWNER)
            await require_sound(graph)
            await story(graph)
            await require_sound(graph)
            assert await graph.query_children("a") == []
            assert [one["id"] for one in await graph.query_children("b")] == ["a"]
            assert (await graph.get_full_trace("r"))["edges"] == []
            if await listed(graph):
                assert [user async for user in backend.sessions.users("acme")] == ["u1"]


async def test_a_write_whose_answer_is_lost_is_applied_once(store: MemoryStore) -> None:
    whole = Failing(MemoryStore())

    async def work(graph: BackendGraph) -> None:
        await graph.add_vertex("a", "memory", {"content": "red"})
        for _ in range(3):
            await graph.change_vertex("a", "memory", counted)
        await graph.add_edge("a", "a", "self", {})
        await graph.update_vertex("a", {"content": "blue"})

    async with Backend(whole) as backend:
        await work(BackendGraph(backend, OWNER))
    for at in range(1, whole.done + 1):
        driver = Failing(MemoryStore())
        driver.lost = {at}
        async with Backend(driver) as backend:
            graph = BackendGraph(backend, OWNER)
            await work(graph)
            vertex = await graph.query_vertex("a")
            assert vertex is not None
            assert vertex["properties"] == {"content": "blue", "n": 3}
            assert len(await graph.query_children("a")) == 1
            await require_sound(graph)


async def test_a_write_whose_outcome_stays_unknown_says_so_and_is_found(store: MemoryStore) -> None:
    driver = Failing(store)
    async with Backend(driver) as backend:
        graph = BackendGraph(backend, OWNER)
        await graph.add_vertex("a", "memory", {"content": "red"})
        driver.lost = set(range(driver.done, driver.done + 1_000))
        with pytest.raises(OutcomeUnknown):
            await graph.change_vertex("a", "memory", counted)
        driver.lost = set()
        assert (await listed(graph))["a"]["properties"] == {"content": "red", "n": 1}
        await require_sound(graph)


async def test_a_change_that_lost_its_race_is_done_again_on_what_is_there(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as one, Backend(MemoryDriver(store)) as two:
        mine, theirs = BackendGraph(one, OWNER), BackendGraph(two, OWNER)
        await mine.add_vertex("a", "memory", {"content": "red", "n": 1})
        seen: list[int] = []

        def merge(properties: dict[str, Any] | None) -> dict[str, Any]:
            assert properties is not None
            seen.append(properties["n"])
            return {"content": "red and blue", "n": properties["n"] + 10}

        load, raced = one.driver.load, False

        async def load_then_lose(key: Key) -> Any:
            nonlocal raced
            record = await load(key)
            if key.name.startswith(keys.VERTICES) and not raced:
                raced = True
                await theirs.change_vertex("a", "memory", counted)
            return record

        one.driver.load = load_then_lose  # pyright: ignore[reportAttributeAccessIssue] -- an interleaving
        await mine.change_vertex("a", "memory", merge)
        assert seen == [1, 2]
        assert (await listed(theirs))["a"]["properties"] == {"content": "red and blue", "n": 12}
        await require_sound(theirs)


async def test_a_value_that_changes_only_its_type_is_stored_and_found(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph = BackendGraph(backend, OWNER)
        await graph.add_vertex("a", "memory", {"content": True})
        await graph.update_vertex("a", {"content": 1})
        assert (await listed(graph))["a"]["properties"]["content"] is not True
        assert [one["id"] for one in await graph.search_vertices("memory", "1")] == ["a"]


def bucket_sizes(store: MemoryStore) -> Any:
    async def sizes() -> list[int]:
        driver = MemoryDriver(store)
        await driver.open()
        found: list[int] = []
        async for name in operations.names_of(driver, SCOPE, "index:"):
            record = await driver.load(Key(SCOPE, name))
            assert record is not None
            found.append(len(record.body or b"") + sum(map(len, record.tail)))
        return found

    return sizes()


async def test_the_index_does_not_grow_with_updates(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph = BackendGraph(backend, OWNER)
        for number in range(5 * FOLD_AT):
            await graph.add_vertex("a", "memory", {"content": f"always {number % 2}"})
        await require_sound(graph)
    # An entry takes some 70 bytes, and a tail that was folded has fewer than `FOLD_AT`.
    assert max(await bucket_sizes(store)) < 100 * (FOLD_AT + 4)


async def test_a_search_loads_one_record_per_word_and_what_it_returns(store: MemoryStore) -> None:
    driver = Failing(store)
    async with Backend(driver) as backend:
        graph = BackendGraph(backend, OWNER)
        for number in range(300):
            await graph.add_vertex(f"v{number}", "memory", {"content": f"common w{number}"})
        driver.counted.clear()
        assert [one["id"] for one in await graph.search_vertices("memory", "w7")] == ["v7"]
        assert driver.counted == {"load": 2}
        driver.counted.clear()
        assert [one["id"] for one in await graph.search_vertices("memory", "common w7")] == ["v7"]
        assert driver.counted["load"] <= 3
        driver.counted.clear()
        assert len(await graph.search_vertices("memory", "common", limit=10)) == 10
        assert driver.counted == {"load": 1 + 10}
        driver.counted.clear()
        await graph.change_vertex("v7", "memory", counted)
        assert driver.counted == {"load": 1, "replace": 1}


async def test_a_vertex_larger_than_a_record_and_many_edges_are_stored(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store, max_entry_bytes=12_000, max_record_bytes=50_000)) as backend:
        graph = BackendGraph(backend, OWNER)
        text = "word " * 20_000
        await graph.add_vertex("a", "memory", {"content": text})
        for number in range(3 * FOLD_AT):
            await graph.add_edge("a", "a", f"label {number}" * 20, {})
        assert len(await graph.query_children("a")) == 3 * FOLD_AT
        assert [one["id"] for one in await graph.search_vertices("memory", "WORD")] == ["a"]
        await backend.sessions.erase_user(*OWNER)
        assert not [name async for name in operations.names(backend.driver, keys.scope(*OWNER, "part"))]


async def test_erasing_a_user_erases_the_graph_and_the_entry(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph, other = BackendGraph(backend, OWNER), BackendGraph(backend, ("acme", "u2"))
        for one in (graph, other):
            await story(one)
        receipt = await backend.sessions.erase_with_receipt(*OWNER)
        assert receipt.erased["graph_records"] > 2
        assert not receipt.found
        assert await listed(graph) == {}
        assert await graph.search_vertices("memory", "red") == []
        assert len(await listed(other)) == 2
        assert [user async for user in backend.sessions.users("acme")] == ["u2"]
        await other.clear()
        assert [user async for user in backend.sessions.users("acme")] == []


async def test_a_copy_carries_the_graph_and_its_index(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as source, Backend(MemoryDriver(MemoryStore())) as target:
        graph, copied = BackendGraph(source, OWNER), BackendGraph(target, OWNER)
        await story(graph)
        copy = Copy(source.driver, target.driver, [Owner("acme")])
        await copy.copy()
        await copy.verify()
        assert copy.ok
        assert await listed(copied) == await listed(graph)
        await require_sound(copied)
        assert len(await copied.query_children("b")) == 1


async def test_no_word_of_a_sealed_graph_is_in_the_datastore(store: MemoryStore) -> None:
    sealing = Sealing(StaticKeys({"k1": bytes(range(32))}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=sealing) as backend:
        graph = BackendGraph(backend, OWNER)
        await graph.add_vertex("zanzibar", "memory", {"content": "Zanzibar", "source_agent": "zanzibar"})
        await graph.add_edge("zanzibar", "zanzibar", "zanzibar", {"zanzibar": 1})
        assert await graph.find_vertices("memory", "source_agent", "zanzibar")
        await require_sound(graph)
    raw = MemoryDriver(store)
    await raw.open()
    seen = 0
    async for name in operations.names(raw, SCOPE):
        record = await raw.load(Key(SCOPE, name))
        assert record is not None
        text = b"".join((name.encode(), record.body or b"", *record.tail)).lower()
        assert b"zanzibar" not in text
        seen += 1
    assert seen > 1


async def test_purging_leaves_the_graph_and_removes_no_part_of_it(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph = BackendGraph(backend, OWNER)
        await graph.add_vertex("a", "memory", {"content": "red" * 2_000_000})
        before = await listed(graph)
        await backend.sessions.purge("acme", older_than=1.0)
        assert await listed(graph) == before
        assert [user async for user in backend.sessions.users("acme")] == ["u1"]


@pytest.mark.parametrize(
    "body",
    [
        b"stm/2 vertex\n{}",
        b'stm/1 vertex\n{"label":"memory","properties":[]}',
        b'stm/1 vertex\n{"label":"memory","index":1e999}',
        b'stm/1 vertex\n{"label":"memory","out":[["a"]]}',
        b"stm/1 state\n{}",
    ],
)
async def test_a_vertex_that_cannot_be_read_is_corrupt_and_stays(store: MemoryStore, body: bytes) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph, where = BackendGraph(backend, OWNER), keys.vertex_key(*OWNER, "a")
        await backend.driver.replace(where, body, version="v", expect=ANY, ttl=None)
        for call in (
            lambda: graph.query_vertex("a"),
            lambda: graph.add_vertex("a", "memory", {}),
            lambda: listed(graph),
        ):
            with pytest.raises(Corrupt):
                await call()
        record = await backend.driver.load(where)
        assert record is not None
        assert record.body == body


@pytest.mark.parametrize(
    "entry",
    [b'{"to":"a"}', b'{"to":"a","label":"x","properties":1}', b'{"label":"x"}', b'{"from":1,"label":"x"}'],
)
async def test_an_edge_of_an_unknown_kind_is_corrupt(store: MemoryStore, entry: bytes) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph, where = BackendGraph(backend, OWNER), keys.vertex_key(*OWNER, "a")
        await backend.driver.append(where, b"stm/1 edge\n" + entry, initial_version="v", ttl=None)
        with pytest.raises(Corrupt):
            await graph.query_children("a")


async def test_fields_of_a_newer_version_survive_a_change(store: MemoryStore) -> None:
    async with Backend(MemoryDriver(store)) as backend:
        graph, where = BackendGraph(backend, OWNER), keys.vertex_key(*OWNER, "a")
        await graph.add_vertex("a", "memory", {"content": "red"})
        record = await backend.driver.load(where)
        assert record is not None
        assert record.body is not None
        newer = record.body[:-1] + b',"newer":[1]}'
        await backend.driver.replace(where, newer, version="n", expect=record.version, ttl=KEEP)
        await graph.change_vertex("a", "memory", counted)
        record = await backend.driver.load(where)
        assert record is not None
        assert record.body is not None
        assert b'"newer":[1]' in record.body


PROGRAM = """
import asyncio, sys
from stm_backends import open_backend
from stm_backends.tiers.backend_graph import BackendGraph

def counted(properties):
    return {**properties, "access_count": properties["access_count"] + 1}

async def main():
    async with open_backend(sys.argv[1]) as backend:
        graph = BackendGraph(backend, ("acme", "u1"))
        for _ in range(30):
            await graph.change_vertex("a", "memory", counted)

asyncio.run(main())
"""


async def test_access_counts_of_three_processes_add_up(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        graph = BackendGraph(backend, OWNER)
        await graph.add_vertex("a", "memory", {"access_count": 0})
        command = (sys.executable, "-c", PROGRAM, url)
        pods = [await asyncio.create_subprocess_exec(*command) for _ in range(3)]
        assert await asyncio.gather(*(pod.wait() for pod in pods)) == [0, 0, 0]
        assert (await listed(graph))["a"]["properties"] == {"access_count": 90}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("api_key Location", {"api", "key", "location"}),
        ({"a": ["B", 3, None, True]}, {"a", "b", "3"}),
        ("\u6771\u4eac is", {"\u6771", "\u4eac", "\u6771\u4eac", "is"}),
        ("Stra\u00dfe caf\u00e9!", {"stra\u00dfe", "caf\u00e9"}),
        ("x" * 100, {"x" * 64}),
        ("", set[str]()),
        ("--", set[str]()),
    ],
)
def test_words_are_letters_and_digits_in_lower_case(value: object, words: set[str]) -> None:
    assert words_of(value) == words
