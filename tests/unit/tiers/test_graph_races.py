"""A graph in a datastore while other processes write, search, erase and die at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.records import keys, operations, postings
from stm_backends.tiers import BackendGraph, LongTermMemory, MemoryEntry, MemoryTier, VertexNotFound

OWNER = ("acme", "u1")
SCOPE = keys.scope(*OWNER, "graph")


class Meddled(WrapperDriver):
    """Calls `after` once, as soon as an operation for which `when` holds was done; its answer may be lost."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(MemoryDriver(store))
        self.when: Callable[[Operation, Any], bool] | None = None
        self.after: Callable[[], Awaitable[object]] | None = None
        self.lost = False
        self._turn = asyncio.Lock()

    def meddle(
        self,
        when: Callable[[Operation, Any], bool],
        after: Callable[[], Awaitable[object]],
        *,
        lost: bool = False,
    ) -> None:
        self.when, self.after, self.lost = when, after, lost

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        # One at a time, so that concurrent operations are before or after what happens in between.
        async with self._turn:
            answer = await send()
            if self.when is not None and self.when(operation, key):
                self.when, after = None, self.after
                assert after is not None
                await after()
                if self.lost:
                    raise OutcomeUnknown("the answer was lost", backend="test", operation=operation)
            return answer


class Two:
    """Two processes with the graph of one user; something may happen between two operations of the first."""

    def __init__(self, store: MemoryStore, first: Backend, second: Backend, driver: Meddled) -> None:
        self.store = store
        self.driver = driver
        self.first, self.second = first, second
        self.mine, self.theirs = BackendGraph(first, OWNER), BackendGraph(second, OWNER)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    store = MemoryStore()
    driver = Meddled(store)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Backend(driver))
        second = await stack.enter_async_context(Backend(MemoryDriver(store)))
        yield Two(store, first, second, driver)


def of_vertex(wanted: Operation) -> Callable[[Operation, Any], bool]:
    """Return the condition for an operation on a vertex of the graph."""
    return lambda operation, key: operation == wanted and is_vertex(key)


def of_index(wanted: Operation) -> Callable[[Operation, Any], bool]:
    """Return the condition for an operation on the index of the graph."""
    return lambda operation, key: (
        operation == wanted and isinstance(key, Key) and key.name.startswith("index:")
    )


def is_vertex(key: Any) -> bool:
    return isinstance(key, Key) and key.name.startswith(keys.VERTICES)


def counted(properties: dict[str, Any] | None) -> dict[str, Any]:
    found = properties or {}
    return {**found, "n": found.get("n", 0) + 1}


async def properties_of(graph: BackendGraph, vertex_id: str) -> Any:
    vertex = await graph.query_vertex(vertex_id)
    return None if vertex is None else vertex["properties"]


async def stored_bytes(store: MemoryStore) -> bytes:
    """Return everything that is stored of the graph."""
    driver, found = MemoryDriver(store), list[bytes]()
    await driver.open()
    async for name in operations.names(driver, SCOPE):
        record = await driver.load(Key(SCOPE, name))
        assert record is not None
        found += [record.body or b"", *record.tail]
    return b"\n".join(found)


# Searches


async def test_a_search_finds_a_vertex_that_is_changed_during_the_search(two: Two) -> None:
    words = ["red", "green", "blue", "black", "white"]
    await two.mine.add_vertex("a", "memory", {"content": " ".join(words)})
    for number in range(len(postings.by_bucket(words))):
        left = number

        def loaded(operation: Operation, key: Any) -> bool:
            nonlocal left
            left -= of_index("load")(operation, key)
            return left < 0

        two.driver.meddle(
            loaded, lambda n=number: two.theirs.update_vertex("a", {"content": f"{' '.join(words)} v{n}"})
        )
        found = await two.mine.search_vertices("memory", " ".join(words))
        assert two.driver.when is None
        assert [one["id"] for one in found] == ["a"], f"changed after {number} other loads"


# Unknown outcomes


async def test_a_change_with_a_lost_answer_is_not_applied_twice(two: Two) -> None:
    await two.mine.add_vertex("a", "memory", {"n": 0})
    two.driver.meddle(
        of_vertex("replace"), lambda: two.theirs.change_vertex("a", "memory", counted), lost=True
    )
    with pytest.raises(OutcomeUnknown):
        await two.mine.change_vertex("a", "memory", counted)
    assert await properties_of(two.theirs, "a") == {"n": 2}


async def test_a_vertex_added_with_a_lost_answer_does_not_undo_an_update(two: Two) -> None:
    two.driver.meddle(
        of_vertex("replace"), lambda: two.theirs.update_vertex("a", {"content": "newer"}), lost=True
    )
    with pytest.raises(OutcomeUnknown):
        await two.mine.add_vertex("a", "memory", {"content": "older"})
    assert await properties_of(two.theirs, "a") == {"content": "newer"}
    assert [one["id"] for one in await two.theirs.search_vertices("memory", "newer")] == ["a"]


async def test_a_removal_with_a_lost_answer_spares_a_vertex_added_since(two: Two) -> None:
    await two.mine.add_vertex("a", "memory", {"content": "older"})
    two.driver.meddle(
        of_vertex("delete"), lambda: two.theirs.add_vertex("a", "memory", {"content": "newer"}), lost=True
    )
    with pytest.raises(OutcomeUnknown):
        await two.mine.change_vertex("a", "memory", lambda _: None)
    assert await properties_of(two.theirs, "a") == {"content": "newer"}


async def test_a_removal_with_a_lost_answer_is_reported_and_leaves_no_words(two: Two) -> None:
    memory = LongTermMemory(two.mine)
    await memory.remember(MemoryEntry("k", "secret", MemoryTier.LONG_TERM))
    [entry] = await memory.listed()

    async def nothing() -> None: ...

    two.driver.meddle(of_vertex("delete"), nothing, lost=True)
    assert await memory.discard(entry)
    assert memory.size == 0
    assert await two.theirs._index.ids(frozenset(["secret"])) == []  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- what a search loads


# Erasures


async def test_an_update_of_an_erased_user_leaves_no_word(two: Two) -> None:
    await two.mine.add_vertex("a", "memory", {"content": "secret"})
    two.driver.meddle(of_vertex("load"), lambda: two.second.sessions.erase_user(*OWNER))
    with pytest.raises(VertexNotFound):
        await two.mine.update_vertex("a", {"content": "secret and more"})
    assert b"secret" not in await stored_bytes(two.store)
    assert await two.theirs.query_vertex("a") is None


@pytest.mark.parametrize("left", [None, {"content": "public"}])
async def test_a_removal_during_an_erasure_brings_no_word_back(two: Two, left: Any) -> None:
    await two.mine.add_vertex("a", "memory", {"content": "secret"})

    async def erase() -> None:
        await two.second.sessions.erase_user(*OWNER)

    two.driver.meddle(lambda operation, key: is_vertex(key) and operation != "load", erase)
    await two.mine.change_vertex("a", "memory", lambda _: left)
    assert b"secret" not in await stored_bytes(two.store)


async def test_an_erasure_at_any_operation_of_a_change_leaves_no_old_word(two: Two) -> None:
    at, raced = 0, True
    while raced:
        await two.mine.clear()
        await two.mine.add_vertex("a", "memory", {"content": "secret"})
        left = at = at + 1

        def due(operation: Operation, key: Any) -> bool:
            nonlocal left
            del operation, key
            left -= 1
            return not left

        two.driver.meddle(due, lambda: two.second.sessions.erase_user(*OWNER))
        with suppress(VertexNotFound):
            await two.mine.update_vertex("a", {"content": "public"})
        raced = two.driver.when is None
        two.driver.when = None
        if raced:
            assert b"secret" not in await stored_bytes(two.store), f"erased after operation {at}"
    assert at > 4


# Ends of processes


async def test_a_clear_that_dies_anywhere_leaves_what_a_search_finds(two: Two) -> None:
    at, died, stored = 0, True, [""]
    while died:
        for name in ("a", "b", "c"):
            await two.theirs.add_vertex(name, "memory", {"content": f"word {name}"})
        left = at = at + 1

        def due(operation: Operation, key: Any) -> bool:
            nonlocal left
            left -= 1
            return not left

        async def die() -> None:
            raise Unavailable("killed")

        two.driver.meddle(due, die)
        with suppress(StorageError):
            await two.mine.clear()
        died = two.driver.when is None
        two.driver.when = None
        pages = [page async for page in two.theirs.list_vertices("memory")]
        stored = sorted(vertex["id"] for page in pages for vertex in page)
        found = sorted(one["id"] for one in await two.theirs.search_vertices("memory", "word"))
        assert found == stored, f"died after operation {at}"
    assert stored == []
    assert at > 6


async def test_a_call_cancelled_anywhere_leaves_a_sound_graph(two: Two) -> None:
    async def work(graph: BackendGraph) -> None:
        await graph.add_vertex("a", "memory", {"content": "red green"})
        await graph.update_vertex("a", {"content": "red blue"})
        await graph.add_edge("a", "a", "self", {})
        await graph.change_vertex("a", "memory", lambda _: None)
        await graph.add_vertex("a", "memory", {"content": "red black"})

    at, cancelled = 0, True
    while cancelled:
        await two.theirs.clear()
        left = at = at + 1
        task = asyncio.create_task(work(two.mine))

        def due(operation: Operation, key: Any) -> bool:
            nonlocal left
            left -= 1
            return not left

        async def cancel(task: asyncio.Task[None] = task) -> None:
            task.cancel()
            await asyncio.sleep(0)

        two.driver.meddle(due, cancel)
        with suppress(asyncio.CancelledError):
            await task
        cancelled = two.driver.when is None
        two.driver.when = None
        found = await two.theirs.search_vertices("memory", "red")
        stored = await two.theirs.query_vertex("a")
        assert found == ([] if stored is None else [stored]), f"cancelled at operation {at}"
        await work(two.theirs)
        [vertex] = await two.mine.search_vertices("memory", "red")
        assert vertex["properties"] == {"content": "red black"}
    assert at > 20


# Many at once


async def test_many_calls_of_one_process_change_one_vertex(two: Two) -> None:
    class Slow(WrapperDriver):
        async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
            del operation, key
            await asyncio.sleep(0.001)
            return await send()

    async with Backend(Slow(MemoryDriver(two.store))) as backend:
        graph = BackendGraph(backend, OWNER)
        await asyncio.gather(*(graph.change_vertex("a", "memory", counted) for _ in range(300)))
        assert await properties_of(graph, "a") == {"n": 300}


# Whose graph


@pytest.mark.parametrize("owner", ["acme:u1", "ab", ("acme",), ("acme", "u1", "chat"), ("acme", None)])
async def test_an_owner_that_is_no_pair_of_ids_is_refused(two: Two, owner: Any) -> None:
    with pytest.raises(ValueError, match=r"owner|user_id"):
        BackendGraph(two.first, owner)


OWNERS = [
    ("a", "b:c"),
    ("a:b", "c"),
    ("a", "b%3Ac"),
    ("A", "b:c"),
    ("a", "b:c "),
    ("\u00e9", "u"),
    ("e\u0301", "u"),
]


async def test_no_two_owners_share_a_graph_or_its_erasure(two: Two) -> None:
    for number, owner in enumerate(OWNERS):
        await BackendGraph(two.first, owner).add_vertex("a", "memory", {"content": f"word n{number}"})
    for number, owner in enumerate(OWNERS):
        graph = BackendGraph(two.second, owner)
        [found] = await graph.search_vertices("memory", "word")
        assert found["properties"]["content"] == f"word n{number}"
        receipt = await two.second.sessions.erase_with_receipt(*owner)
        assert receipt.complete
        assert await graph.search_vertices("memory", "word") == []
