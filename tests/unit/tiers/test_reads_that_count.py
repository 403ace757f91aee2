"""Reads succeed although their accesses cannot be counted, and a context window reads what it shows."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, StorageError, Unavailable
from stm_backends.records import keys
from stm_backends.tiers import BackendGraph, MemoryEntry, MemoryManager, MemoryTier, SharedShortTermMemory
from stm_backends.types import MemoryKey
from tests.support.graphs import Counting, GraphAround

OWNER = ("acme", "u1")
LONG = MemoryTier.LONG_TERM
HEADS = keys.heads_key(*OWNER)


class Troubled(WrapperDriver):
    """Counts operations, and raises an error instead of those named."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(MemoryDriver(store))
        self.counted = Counter[str]()
        self.failing: tuple[str, ...] = ()
        self.error: type[StorageError] = Unavailable

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        self.counted[operation] += 1
        if operation in self.failing:
            raise self.error("no", backend="test", operation=operation)
        return await send()


@pytest.fixture
async def driver() -> Troubled:
    return Troubled(MemoryStore())


@pytest.fixture
def observer() -> Counting:
    return Counting()


@pytest.fixture
async def backend(driver: Troubled, observer: Counting) -> AsyncIterator[Backend]:
    async with Backend(driver, observer=observer) as backend:
        yield backend


async def test_accesses_are_counted_by_a_clock_without_a_zone() -> None:
    manager = MemoryManager(clock=lambda: datetime.now(UTC).replace(tzinfo=None))
    await manager.long_term.remember(MemoryEntry(key="k", content="c", tier=LONG))
    counts = [(await manager.long_term.recall("c"))[0].access_count for _ in range(3)]
    assert counts == [1, 2, 3]


def managed(backend: Backend, **settings: Any) -> MemoryManager:
    return MemoryManager(backend=backend, owner=OWNER, **settings)


async def shown(memory: MemoryManager, tokens: int = 4000) -> dict[str, int]:
    return {one.key: one.access_count for one in await memory.get_context_window(tokens)}


@pytest.mark.parametrize("error", [OutcomeUnknown, Unavailable, Denied])
async def test_a_read_that_cannot_count_its_accesses_succeeds(
    backend: Backend, driver: Troubled, observer: Counting, error: type[StorageError]
) -> None:
    session = SharedShortTermMemory(backend, MemoryKey(*OWNER, "chat"))
    memory = managed(backend, short_term=session)
    await memory.remember("long", "the fact", tier=LONG)
    await memory.remember("short", "the fact")
    driver.failing, driver.error = ("append", "replace"), error
    assert {one.key for one in await memory.recall("fact")} == {"long", "short"}
    assert await shown(memory) == {"long": 0, "short": 0}
    assert observer.counts == {("uncounted", "long_term"): 2, ("uncounted", "short_term"): 2}
    driver.failing = ()
    assert await shown(memory) == {"long": 1, "short": 1}


async def test_after_the_first_failures_no_more_accesses_are_counted(
    backend: Backend, driver: Troubled, observer: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    memory = managed(backend)
    for number in range(40):
        await memory.remember(f"k{number}", "the fact", tier=LONG)
    driver.failing = ("replace",)
    driver.counted.clear()
    assert len(await memory.recall("fact")) == 40
    assert driver.counted["replace"] < 20
    assert observer.counts == {("uncounted", "long_term"): 40}
    assert "that were not counted (Unavailable): 40" in caplog.text


async def test_a_read_in_an_outage_is_still_an_error(backend: Backend, driver: Troubled) -> None:
    memory = managed(backend)
    await memory.remember("k", "the fact", tier=LONG)
    driver.failing = ("load", "scan")
    with pytest.raises(Unavailable):
        await memory.recall("fact")
    with pytest.raises(Unavailable):
        await memory.get_context_window()


async def test_a_window_loads_only_what_it_shows(backend: Backend, driver: Troubled) -> None:
    memory = managed(backend)
    for number in range(300):
        await memory.remember(f"k{number:03}", "x" * 16, tier=LONG, importance=number / 300)
    for one in (memory, managed(backend)):
        driver.counted.clear()
        assert [*await shown(one, 25)] == ["k299", "k298", "k297", "k296", "k295"]
        assert driver.counted["load"] == 1 + 5
        assert driver.counted["replace"] == 5
        assert driver.counted["append"] <= 5


async def test_a_window_has_what_a_version_without_heads_has_stored(
    backend: Backend, driver: Troubled
) -> None:
    memory = managed(backend)
    for number in range(3):
        await memory.remember(f"k{number}", f"the fact {number}", tier=LONG)
    graph = BackendGraph(backend, OWNER)
    await graph.add_vertex("other", "person", {"name": "Alice"})
    await driver.delete(HEADS)
    assert {*await shown(memory)} == {"k0", "k1", "k2"}
    await memory.get_context_window()
    driver.counted.clear()
    assert {*await shown(managed(backend))} == {"k0", "k1", "k2"}
    assert driver.counted["load"] == 1 + 3


async def test_a_window_has_nothing_that_another_process_removed(backend: Backend) -> None:
    memory, other = managed(backend), managed(backend)
    for key in "ab":
        await memory.remember(key, "the fact", tier=LONG)
    assert {*await shown(memory)} == {"a", "b"}
    await other.forget("a", LONG)
    await other.long_term.remember(MemoryEntry("b", "the fact", LONG, superseded_by="c"))
    assert await shown(memory) == {}
    assert memory.long_term.size == 0
    await other.remember("a", "again", tier=LONG)
    assert await shown(memory) == {"a": 1}


async def test_a_window_keeps_its_budget_although_a_head_is_old(backend: Backend, driver: Troubled) -> None:
    memory, other = managed(backend), managed(backend)
    await memory.remember("k", "short", tier=LONG)
    assert await shown(memory, 10) == {"k": 1}
    kept = await driver.load(HEADS)
    assert kept is not None
    await other.remember("k", "x" * 1000, tier=LONG)
    # As if a version without heads had written it.
    await driver.delete(HEADS)
    for entry in kept.tail:
        await driver.append(HEADS, entry, initial_version=kept.version, ttl=None)
    assert await shown(memory, 10) == {}
    assert await shown(memory, 1000) == {"k": 2}


async def test_heads_that_cannot_be_stored_fail_no_write(
    backend: Backend, driver: Troubled, caplog: pytest.LogCaptureFixture
) -> None:
    memory = managed(backend)
    await memory.remember("k", "the fact", tier=LONG)
    call = driver.call

    async def without_heads(operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if key == HEADS and operation == "append":
            raise Unavailable("no", backend="test", operation=operation)
        return await call(operation, key, send)

    driver.call = without_heads  # pyright: ignore[reportAttributeAccessIssue] -- for this instance
    await memory.remember("other", "the fact", tier=LONG)
    assert {*await shown(memory)} == {"k", "other"}
    assert "could not store the ranks of memories" in caplog.text


async def test_an_entry_that_is_superseded_no_more_is_in_the_window_again(backend: Backend) -> None:
    memory, graph = managed(backend), BackendGraph(backend, OWNER)
    await memory.remember("k", "the fact", tier=LONG)
    assert len(await graph.list_heads()) == 1
    # As a merge does that cannot be finished.
    for by in ("other", None):
        await graph.update_vertex("memory:k", {"superseded_by": by})
    assert await shown(memory) == {"k": 1}


async def test_a_head_is_stored_although_the_caller_that_stores_it_is_cancelled(
    backend: Backend, driver: Troubled
) -> None:
    graph, call, sent = BackendGraph(backend, OWNER), driver.call, asyncio.Event()
    entries = [MemoryEntry(key, "the fact", LONG, importance=0.5) for key in "abc"]
    await asyncio.gather(*(graph.add_vertex(f"memory:{one.key}", "memory", one.to_dict()) for one in entries))
    await graph.list_heads()
    let_go = asyncio.Event()

    async def slow_heads(operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if key == HEADS and operation == "append":
            sent.set()
            await let_go.wait()
        return await call(operation, key, send)

    driver.call = slow_heads  # pyright: ignore[reportAttributeAccessIssue] -- for this instance
    changes = [
        asyncio.create_task(graph.update_vertex(f"memory:{one.key}", {"importance": 0.9})) for one in entries
    ]
    await sent.wait()
    await asyncio.sleep(0.01)
    first, second, third = changes
    sent.clear()
    let_go.set()
    await first
    let_go.clear()
    await sent.wait()
    second.cancel()
    await asyncio.wait({second})
    let_go.set()
    await third
    heads = await BackendGraph(backend, OWNER).list_heads()
    assert heads["memory:c"].importance == 0.9


async def test_a_vertex_with_other_properties_spoils_no_head_of_another(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    memory, graph = managed(backend), BackendGraph(backend, OWNER)
    await memory.remember("k", "the fact", tier=LONG)
    entry = MemoryEntry("odd", "the fact", LONG).to_dict()
    for number, odd in enumerate([{"importance": "high"}, {"access_count": "few"}, {"importance": math.nan}]):
        await graph.add_vertex(f"memory:odd{number}", "memory", {**entry, **odd})
    for _ in range(2):
        assert [*await graph.list_heads()] == ["memory:k"]
    assert "could not read the ranks of memories" not in caplog.text


async def test_a_window_does_without_heads_whose_record_is_damaged(
    backend: Backend, driver: Troubled, caplog: pytest.LogCaptureFixture
) -> None:
    memory, call = managed(backend), driver.call
    await memory.remember("k", "the fact", tier=LONG)

    async def without_parts(operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if key == HEADS and operation == "load":
            raise Corrupt("a part is missing", backend="test", operation=operation)
        return await call(operation, key, send)

    driver.call = without_parts  # pyright: ignore[reportAttributeAccessIssue] -- for this instance
    assert await shown(memory) == {"k": 1}
    assert "could not read the ranks of memories" in caplog.text


async def test_no_head_of_a_user_who_was_erased_meanwhile_stays(backend: Backend, driver: Troubled) -> None:
    memory, call = managed(backend), driver.call
    await memory.remember("k", "the fact", tier=LONG)

    async def after_an_erasure(operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if key == HEADS and operation == "append":
            driver.call = call  # pyright: ignore[reportAttributeAccessIssue] -- for this instance
            await backend.sessions.erase_user(*OWNER)
        return await call(operation, key, send)

    driver.call = after_an_erasure  # pyright: ignore[reportAttributeAccessIssue] -- for this instance
    await memory.recall("fact")
    assert await driver.load(HEADS) is None
    assert not await backend.directory.has(*OWNER)


async def test_many_heads_are_folded_and_read_by_another_process(backend: Backend, driver: Troubled) -> None:
    memory = managed(backend)
    for number in range(150):
        await memory.remember(f"k{number:03}", "the fact", tier=LONG, importance=number / 150)
        if number % 40 == 0:
            await memory.get_context_window(100)
    record = await driver.load(HEADS)
    assert record is not None
    assert record.body is not None
    assert len(record.tail) < 64
    for one in (memory, managed(backend)):
        assert [*await shown(one, 12)][:2] == ["k149", "k148"]


async def test_maintenance_reads_each_entry_once(backend: Backend, driver: Troubled) -> None:
    memory = managed(backend)
    for number in range(100):
        await memory.remember(f"k{number}", f"fact number {number}", tier=LONG)
    driver.counted.clear()
    await memory.gc.on_idle()
    assert driver.counted["load"] == 100


async def test_maintenance_leaves_alone_what_changed_after_it_was_read(clock: Any) -> None:
    async with Backend(MemoryDriver()) as backend:
        memory, other = managed(backend, clock=clock), managed(backend, clock=clock)
        for key, importance in [("stale", 0.0), ("used", 0.0), ("kept", 0.9), ("same", 0.9)]:
            await memory.remember(key, "one two three" if importance else key, LONG, importance=importance)
        clock.pass_days(60)

        class Racing(GraphAround):
            """Another process uses an entry just after it was read."""

            async def list_vertices(self, label: str) -> Any:
                async for page in self.inner.list_vertices(label):
                    yield page
                await other.long_term.recall("used")

        racing = MemoryManager(Racing(BackendGraph(backend, OWNER)), clock=clock)
        racing.gc.relevance_threshold = 0.3
        await racing.gc.auto_forget(LONG)
        with racing.long_term.reading_once():
            assert await racing.gc.prune_duplicates(LONG) == 1
            assert await racing.long_term.consolidate() == 0
        assert {one.key for one in await other.long_term.listed()} & {"stale", "used"} == {"used"}
        assert len(await other.long_term.recall("two")) == 1


def test_the_heads_have_a_key_of_their_own() -> None:
    assert Key(keys.scope(*OWNER, "graph"), "heads") == HEADS
