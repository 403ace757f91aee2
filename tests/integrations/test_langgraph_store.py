"""`StmStore`: what LangGraph's graphs remember across threads."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
from langgraph.config import get_store
from langgraph.graph import END, START, StateGraph
from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

from stm_backends import Backend, ConfigurationError, InvalidKey, InvalidState, sync
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.integrations.langgraph import StmStore
from tests.support.delayed import Delayed

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 30))]


async def keys_of(store: Any, prefix: tuple[str, ...], **options: Any) -> list[str]:
    return [item.key for item in await store.asearch(prefix, **options)]


# Items


async def test_an_item_is_put_read_put_again_and_deleted(pods: tuple[Backend, Backend]) -> None:
    one, other = (StmStore(backend) for backend in pods)
    await one.aput(("users", "ada"), "food", {"likes": ["tea", {"at": 4}]})
    first = await other.aget(("users", "ada"), "food")
    assert first is not None
    assert (first.value, first.key, first.namespace) == (
        {"likes": ["tea", {"at": 4}]},
        "food",
        ("users", "ada"),
    )
    await other.aput(("users", "ada"), "food", {"likes": []})
    again = await one.aget(("users", "ada"), "food")
    assert again is not None
    assert again.value == {"likes": []}
    assert again.created_at == first.created_at
    assert again.updated_at > first.updated_at
    await one.adelete(("users", "ada"), "food")
    assert await other.aget(("users", "ada"), "food") is None
    assert await other.aget(("users",), "ada") is None


@pytest.mark.parametrize("label", ["a/b", "a:b", "~0", "~", "é \ud800", "%2F", "*", " ", "session", "task"])
async def test_any_text_names_a_namespace_and_an_item(backend: Backend, label: str) -> None:
    store = StmStore(backend)
    await store.aput((label, "x"), label, {"n": 1})
    await store.aput((label,), f"x/{label}", {"n": 2})
    found = {(item.namespace, item.key) for item in await store.asearch((label,))}
    assert found == {((label, "x"), label), ((label,), f"x/{label}")}
    assert await store.alist_namespaces() == [(label,), (label, "x")]
    assert await keys_of(store, (label, "x")) == [label]
    assert await keys_of(store, (label[:-1] or "other",)) == []


async def test_what_is_no_json_and_no_namespace_is_refused(backend: Backend) -> None:
    store = StmStore(backend)
    with pytest.raises(InvalidState):
        await store.aput(("a",), "k", {"x": {1, 2}})
    with pytest.raises(InvalidNamespaceError):
        await store.abatch([PutOp(("a.b",), "k", {})])
    await store.aput(("a",), "k", {"x": 1})
    with pytest.raises(ConfigurationError, match=r"one of \$eq"):
        await store.asearch(("a",), filter={"x": {"$like": 1}})


async def test_items_expire_and_live_longer_when_they_are_read(backend: Backend) -> None:
    store = StmStore(backend, ttl={"default_ttl": 0.02, "refresh_on_read": True})
    await store.aput(("a",), "fleeting", {"n": 1}, ttl=0.01)
    await store.aput(("a",), "kept", {"n": 2}, ttl=None)
    await store.aput(("a",), "read", {"n": 3})
    for _ in range(5):
        await asyncio.sleep(0.4)
        assert await store.aget(("a",), "read") is not None
    assert {*await keys_of(store, ("a",))} == {"kept", "read"}
    await asyncio.sleep(1.3)
    assert await keys_of(store, ("a",)) == ["kept"]
    assert await store.aget(("a",), "read") is None


async def test_concurrent_puts_keep_when_an_item_was_created(pods: tuple[Backend, Backend]) -> None:
    stores = [StmStore(backend) for backend in pods]
    await stores[0].aput(("a",), "k", {"n": -1})
    first = await stores[0].aget(("a",), "k")
    await asyncio.gather(*(stores[n % 2].aput(("a",), "k", {"n": n}) for n in range(10)))
    last = await stores[1].aget(("a",), "k")
    assert first is not None
    assert last is not None
    assert last.created_at == first.created_at
    assert last.value["n"] in range(10)


# Searching


async def test_search_shows_the_last_that_were_put_page_by_page(backend: Backend) -> None:
    store = StmStore(backend)
    for number in range(5):
        await store.aput(("docs", str(number % 2)), str(number), {"n": number})
    assert await keys_of(store, ("docs",), limit=3) == ["4", "3", "2"]
    assert await keys_of(store, ("docs",), limit=3, offset=3) == ["1", "0"]
    assert await keys_of(store, ("docs", "1")) == ["3", "1"]
    assert await keys_of(store, ("doc",)) == []


async def embedded(texts: list[str]) -> list[list[float]]:
    """Vectors of how often each letter is in a text."""
    return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


async def test_search_by_meaning_ranks_as_langgraphs_own_store_does(backend: Backend) -> None:
    index: Any = {"dims": 26, "embed": embedded, "fields": ["text", "tags[*]"]}
    ours, theirs = StmStore(backend, index=index), InMemoryStore(index=index)
    rng = random.Random(1)
    for number in range(30):
        words = ["".join(rng.choices("abcdefghij", k=8)) for _ in range(4)]
        options: dict[str, Any] = {} if number % 5 else {"index": rng.choice((False, ["other"]))}
        value = {"text": words[0], "tags": words[1:3], "other": words[3], "n": number}
        for store in (ours, theirs):
            await store.aput(("docs",), str(number), value, **options)
    for query in ("abc", "jjj", "fish"):
        for options in ({}, {"limit": 3, "offset": 2}, {"filter": {"n": {"$gte": 10}}}):
            found = await ours.asearch(("docs",), query=query, **options)
            expected = await theirs.asearch(("docs",), query=query, **options)
            scored = [one for one in found if one.score is not None]
            assert len(found) == len(expected)
            assert [one.score for one in scored] == pytest.approx(
                [one.score for one in expected if one.score is not None]
            )
            assert all(math.isfinite(one.score or 0) for one in found)


async def test_an_embedder_with_too_few_vectors_stores_nothing(backend: Backend) -> None:
    async def lazy(texts: list[str]) -> list[list[float]]:
        return [[1.0]] * (len(texts) - 1)

    store = StmStore(backend, index={"dims": 1, "embed": lazy})
    with pytest.raises(ConfigurationError, match="0 vectors for 1 texts"):
        await store.aput(("a",), "k", {"text": "x"})
    assert await store.aget(("a",), "k") is None


@pytest.mark.parametrize("seed", SEEDS)
async def test_any_batches_are_answered_as_by_langgraphs_own_store(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = StmStore(backend), InMemoryStore()
    labels, known = ("a", "b", "a/b"), 4

    def namespace(least: int = 1) -> tuple[str, ...]:
        return tuple(rng.choices(labels, k=rng.randrange(least, 4)))

    def operation() -> Any:
        kind = rng.randrange(6)
        if kind < 3:
            value = rng.choice((None, {"n": rng.randrange(5), "deep": {"x": rng.randrange(3)}, "l": [1, 2]}))
            return PutOp(namespace(), str(rng.randrange(known)), value)
        if kind == 3:
            return GetOp(namespace(), str(rng.randrange(known)))
        if kind == 4:
            wanted = rng.choice(
                (
                    None,
                    {"n": 1},
                    {"n": {"$gt": 2}},
                    {"n": {"$ne": 3, "$lte": 4}},
                    {"deep": {"x": 1}},
                    {"l": [1, 2]},
                )
            )
            return SearchOp(namespace(0), filter=wanted, limit=1000)
        conditions = tuple(
            MatchCondition(
                rng.choice(("prefix", "suffix")), (*rng.choices((*labels, "*"), k=rng.randrange(1, 3)),)
            )
            for _ in range(rng.randrange(3))
        )
        return ListNamespacesOp(conditions or None, max_depth=rng.choice((None, 1, 2)), limit=1000)

    def shown(result: Any, living: set[tuple[str, ...]]) -> Any:
        if isinstance(result, list):
            found = [shown(one, living) for one in result]
            return sorted(found, key=str)
        if isinstance(result, tuple):
            return result
        return result and (result.namespace, result.key, result.value)

    for _ in range(25):
        batch = [operation() for _ in range(rng.randrange(1, 6))]
        found, expected = await ours.abatch(batch), await theirs.abatch(batch)
        for op, one, other in zip(batch, found, expected, strict=True):
            if isinstance(op, ListNamespacesOp):
                # Theirs lists namespaces that were only asked for, or are empty again.
                assert {*map(tuple, one)} <= {*map(tuple, other)}
            else:
                assert shown(one, set()) == shown(other, set())
        everything = await theirs.asearch((), limit=1000)
        assert await ours.alist_namespaces(limit=1000) == sorted({item.namespace for item in everything})


# Owners


def of_a_user(namespace: tuple[str, ...]) -> tuple[str, str | None] | None:
    """("acme", "ada", ...) belongs to the user, and ("acme", "shared") to the tenant as a whole."""
    if len(namespace) < 2:
        return None
    return namespace[0], None if namespace[1] == "shared" else namespace[1]


async def test_items_belong_to_whom_a_function_names(backend: Backend) -> None:
    store = StmStore(backend, owner_of=of_a_user, tenants=["acme"])
    for place in (("acme", "ada"), ("acme", "bob", "notes"), ("acme", "shared"), ("other", "eve")):
        await store.aput(place, "k", {"of": "/".join(place)})
    assert {*await store.alist_namespaces()} == {
        ("acme", "ada"),
        ("acme", "bob", "notes"),
        ("acme", "shared"),
    }
    assert {item.value["of"] for item in await store.asearch(("acme",))} == {
        "acme/ada",
        "acme/bob/notes",
        "acme/shared",
    }
    assert (await backend.sessions.erase_with_receipt("acme", "ada")).complete
    assert await store.aget(("acme", "ada"), "k") is None
    assert {*await store.alist_namespaces()} == {("acme", "bob", "notes"), ("acme", "shared")}
    assert (await backend.sessions.erase_with_receipt("acme")).complete
    assert await store.alist_namespaces() == []
    assert await store.aget(("other", "eve"), "k") is not None


async def test_a_namespace_of_nobody_is_refused(backend: Backend) -> None:
    store = StmStore(backend, owner_of=of_a_user)
    with pytest.raises(InvalidKey, match="owner_of"):
        await store.aput(("acme",), "k", {})
    with pytest.raises(ConfigurationError, match="tenants="):
        await store.asearch(("acme",))

    async def by_mistake(namespace: tuple[str, ...]) -> Any:
        return of_a_user(namespace)

    broken: Any
    for broken, message in (
        (lambda namespace: namespace[5], "IndexError"),
        (by_mistake, "returned a coroutine, not a tenant and a user"),
        (lambda namespace: "ab", "returned str, not a tenant and a user"),
    ):
        with pytest.raises(InvalidKey, match=f"owner_of.*{message}"):
            await StmStore(backend, owner_of=broken).aget(("acme",), "k")


# In a graph, and without an event loop


async def test_a_node_of_a_graph_remembers_across_threads(backend: Backend) -> None:
    async def count(state: dict[str, Any]) -> dict[str, Any]:
        store = get_store()
        found = await store.aget(("counts",), "n")
        number = (found.value["n"] if found else 0) + state.get("add", 1)
        await store.aput(("counts",), "n", {"n": number})
        return {"add": number}

    builder: Any = StateGraph(dict)
    builder.add_node("count", count)
    builder.add_edge(START, "count")
    builder.add_edge("count", END)
    for _ in range(3):
        await builder.compile(store=StmStore(backend)).ainvoke({"add": 2})
    found = await StmStore(backend).aget(("counts",), "n")
    assert found is not None
    assert found.value == {"n": 6}


def test_blocking_methods_run_on_the_loop_of_the_backend() -> None:
    with sync.open_backend("memory://") as backend:
        store = StmStore(backend.asynchronous, run=backend.run)
        store.put(("a",), "k", {"n": 1})
        assert [item.value for item in store.search(("a",))] == [{"n": 1}]
        assert store.list_namespaces() == [("a",)]
        store.delete(("a",), "k")
        assert store.get(("a",), "k") is None


async def test_blocking_methods_without_a_loop_say_what_to_do(backend: Backend) -> None:
    with pytest.raises(ConfigurationError, match="batch blocks"):
        StmStore(backend).get(("a",), "k")


async def test_a_cancelled_put_is_done_when_the_cancellation_is_raised() -> None:
    driver = Delayed(MemoryDriver(MemoryStore()))
    async with Backend(driver) as backend:
        store = StmStore(backend)
        driver.goes_on.clear()
        task = asyncio.create_task(store.aput(("notes",), "n", {"a": 1}))
        await driver.reached.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        driver.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await store.aget(("notes",), "n")
        assert found is not None
        assert found.value == {"a": 1}
