"""One memory object for all conversations: no conversation ever sees or writes another's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from stm_backends.backend import open_backend
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.router import MemoryRouter
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, MemoryKey

A, B, C = "acme:u1:a", "acme:u1:b", "acme:u1:c"
NOTHING = {"summary": [], "pending": [], "recent": []}


@pytest.fixture
async def driver() -> Driver:
    made = MemoryDriver()
    await made.open()
    return made


@pytest.fixture
async def router(driver: Driver) -> AsyncGenerator[MemoryRouter]:
    settings = config(zone=50)

    def make(key: MemoryKey) -> DistributedShortTermMemory:
        return DistributedShortTermMemory(driver, key, settings, summarizer=LedgerSummarizer())

    made = MemoryRouter(make, settings)
    yield made
    await made.close()


async def say(router: MemoryRouter, key: str, text: str) -> dict[str, Any]:
    """Hold one turn of a conversation as a framework does, and return what the model saw before it."""
    await router.hydrate(None, key)
    view = await shown(router)
    await router.add_turn(turn(text))
    await router.persist(None, key)
    return view


async def stored(router: MemoryRouter, key: str) -> list[str]:
    with router.bound(MemoryKey(*key.split(":"))):
        return [item.user_message for item in await router.turns()]


async def test_alternating_conversations_stay_apart(router: MemoryRouter) -> None:
    assert await say(router, A, "1") == NOTHING
    assert await say(router, B, "2") == NOTHING
    assert (await say(router, A, "3"))["recent"] == ["u1"]
    assert await stored(router, A) == ["u1", "u3"]
    assert await stored(router, B) == ["u2"]


async def test_unbound_it_shows_nothing_stores_nothing_and_logs_a_warning(
    router: MemoryRouter, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    await router.add_turn(turn(1))
    assert await router.get_llm_context() == {}
    assert await router.turns() == []
    assert router.estimate_tokens() == 1
    assert router.health is MemoryHealth.HEALTHY
    await router.flush()
    assert (await driver.scan("acme:u1:memory", limit=10)).names == ()
    assert "add_turn without a bound conversation" in caplog.text


async def test_a_binding_that_no_task_would_see_is_refused(router: MemoryRouter) -> None:
    def enter() -> None:
        with router.bound(MemoryKey("acme", "u1", "a")):
            pytest.fail("nothing would be stored")

    with pytest.raises(ConfigurationError, match="make the dependency `async def`"):
        await asyncio.to_thread(enter)


@pytest.mark.parametrize(("kind", "status", "kept"), [("def", 500, 0), ("async def", 200, 20)])
def test_a_dependency_of_fastapi_binds_for_its_endpoint_or_fails(kind: str, status: int, kept: int) -> None:
    fastapi = pytest.importorskip("fastapi")
    testing = pytest.importorskip("fastapi.testclient")
    backend = open_backend("memory://")
    router = backend.router(config(zone=50), summarizer=LedgerSummarizer())
    key = MemoryKey("acme", "u1", "a")

    def binds() -> Iterator[None]:
        with router.bound(key):
            yield

    async def binds_in_a_task() -> AsyncGenerator[None]:
        with router.bound(key):
            yield

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncGenerator[None]:
        async with backend:
            yield

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.post("/", dependencies=[fastapi.Depends(binds if kind == "def" else binds_in_a_task)])
    async def chat() -> None:
        await router.add_turn(turn("1"))

    @app.get("/")
    async def count() -> int:
        return len(await backend.memory(key, config(zone=50), summarizer=LedgerSummarizer()).turns())

    with testing.TestClient(app, raise_server_exceptions=False) as client:
        assert {client.post("/").status_code for _ in range(20)} == {status}
        assert client.get("/").json() == kept


async def test_after_persist_nothing_is_bound(router: MemoryRouter) -> None:
    await say(router, A, "1")
    await router.add_turn(turn("stray"))
    assert await stored(router, A) == ["u1"]
    assert await router.get_llm_context() == {}


@pytest.mark.parametrize(
    "bad", ["", "a", "a:b", "a:b:c:d", "::", "a:b: ", " :b:c", "a%zz:b:c", "%61cme:u1:a", "acme:u1:a%3a"]
)
async def test_an_invalid_key_raises_and_leaves_nothing_bound(router: MemoryRouter, bad: str) -> None:
    await router.hydrate(None, A)
    await router.add_turn(turn(1))
    with pytest.raises(InvalidKey):
        await router.hydrate(None, bad)
    await router.add_turn(turn("stray"))
    assert await router.get_llm_context() == {}
    assert await stored(router, A) == ["u1"]


@pytest.mark.parametrize("composite", [True, False])
async def test_a_key_and_its_encoded_composite_are_the_same(router: MemoryRouter, composite: bool) -> None:
    key = MemoryKey("ac:me", "50%", "s")
    given = key.composite() if composite else key
    await router.hydrate(None, given)
    await router.add_turn(turn(1))
    await router.persist(None, given)
    with router.bound(key):
        assert (await shown(router))["recent"] == ["u1"]


@pytest.mark.parametrize("bad", [None, 7, object(), MemoryKey, MemoryKey("acme", " ", "a")])
async def test_an_object_that_is_not_a_key_raises_and_hides_the_old_binding(
    router: MemoryRouter, bad: Any
) -> None:
    await router.hydrate(None, A)
    await router.add_turn(turn(1))
    hydrating = router.hydrate(None, bad)
    assert await router.get_llm_context() == {}
    with pytest.raises(InvalidKey):
        await hydrating
    assert await router.get_llm_context() == {}
    with pytest.raises(InvalidKey):
        await router.persist(None, bad)
    await router.persist(None, A)
    assert await stored(router, A) == ["u1"]


async def test_the_transcript_is_that_of_the_bound_conversation(driver: Driver) -> None:
    settings = config(zone=2, transcript=True)

    def make(key: MemoryKey) -> DistributedShortTermMemory:
        return DistributedShortTermMemory(driver, key, settings, summarizer=LedgerSummarizer())

    router = MemoryRouter(make, settings)
    for text in ("one", "two", "three", "four"):
        await say(router, A, text)
        await say(router, B, f"other {text}")
    with router.bound(MemoryKey(*A.split(":"))):
        await router.flush()
        assert [one.turn.user_message for one in (await router.transcript(before=3)).turns] == [
            "uone",
            "utwo",
            "uthree",
        ]
        turns = router.each_turn(after=0)
    # It stays that of this conversation, which was bound when it was asked for.
    with router.bound(MemoryKey(*B.split(":"))):
        assert [one.turn.user_message async for one in turns] == ["utwo", "uthree", "ufour"]
    await router.close()


async def test_unbound_no_transcript_is_shown(router: MemoryRouter, caplog: pytest.LogCaptureFixture) -> None:
    await say(router, A, "secret")
    page = await router.transcript()
    assert (page.turns, page.oldest, page.newest) == ((), 0, -1)
    assert [one async for one in router.each_turn()] == []
    assert "transcript without a bound conversation" in caplog.text


async def test_a_conversation_inside_another_returns_to_it(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await say(router, B, "inner")
    await router.add_turn(turn("outer"))
    await router.persist(None, A)
    assert await stored(router, A) == ["uouter"]
    assert await stored(router, B) == ["uinner"]


async def test_a_conversation_inside_itself_returns_to_itself(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await say(router, A, "inner")
    await router.add_turn(turn("outer"))
    await router.persist(None, A)
    assert await stored(router, A) == ["uinner", "uouter"]


async def test_persist_ends_what_was_left_stacked_on_its_key(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await router.hydrate(None, B)  # it raised or paused, and was never persisted
    await router.persist(None, A)
    assert await router.get_llm_context() == {}


async def test_a_nested_run_that_raises_does_not_take_the_outer_turn(
    router: MemoryRouter,
) -> None:
    async def inner() -> None:
        await router.hydrate(None, B)
        await router.get_llm_context()
        raise RuntimeError("the nested run failed")

    await router.hydrate(None, A)
    with pytest.raises(RuntimeError, match="nested"):
        await inner()
    await router.add_turn(turn("outer"))
    await router.persist(None, A)
    assert await stored(router, A) == ["uouter"]
    assert await stored(router, B) == []


async def test_a_nested_run_that_times_out_does_not_take_the_outer_turn(
    router: MemoryRouter,
) -> None:
    async def inner() -> None:
        await router.hydrate(None, B)
        await router.add_turn(turn("inner"))
        await asyncio.sleep(60)

    await router.hydrate(None, A)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inner(), 0.01)
    await router.add_turn(turn("outer"))
    await router.persist(None, A)
    assert await stored(router, A) == ["uouter"]
    assert await stored(router, B) == []


async def test_the_binding_of_an_ended_nested_run_is_not_shown_to_the_outer_run(router: MemoryRouter) -> None:
    await say(router, B, "secret")
    await router.hydrate(None, A)

    async def inner() -> None:
        await router.hydrate(None, B)
        assert (await shown(router))["recent"] == ["usecret"]

    await inner()  # paused: no persist
    assert await router.get_llm_context() == {}
    assert await router.turns() == []


async def test_hydrating_under_wait_for_never_shows_an_older_binding(
    router: MemoryRouter,
) -> None:
    await router.hydrate(None, A)  # paused: no persist

    async def helper() -> None:
        await router.hydrate(None, B)

    await asyncio.create_task(helper())  # as wait_for does on 3.11
    assert await router.get_llm_context() == {}
    await router.add_turn(turn("b"))
    await router.persist(None, B)
    assert await stored(router, A) == []
    assert await stored(router, B) == ["ub"]


async def test_turns_of_a_nested_run_are_all_stored_when_it_persists(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await router.hydrate(None, B)
    await router.add_turn(turn(1))
    await router.add_turn(turn(2))
    await router.persist(None, B)
    assert await stored(router, B) == ["u1", "u2"]
    await router.add_turn(turn(3))
    assert await stored(router, A) == ["u3"]


async def test_an_invalid_turn_raises_at_once_also_when_nested(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await router.hydrate(None, B)
    with pytest.raises(ValueError, match="user_message"):
        await router.add_turn(object())  # pyright: ignore[reportArgumentType]


async def test_bound_inside_a_run_reads_and_stores_at_once(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    with router.bound(MemoryKey("acme", "u1", "b")):
        await router.add_turn(turn("inner"))
        assert (await shown(router))["recent"] == ["uinner"]
        assert (await shown(router))["recent"] == ["uinner"]
    await router.add_turn(turn("outer"))
    assert await stored(router, A) == ["uouter"]


async def test_persist_of_a_key_that_is_not_bound_changes_nothing(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await router.persist(None, B)
    await router.add_turn(turn(1))
    assert await stored(router, A) == ["u1"]


async def test_concurrent_conversations_in_one_object_stay_apart(router: MemoryRouter) -> None:
    async def converse(name: str) -> None:
        for number in range(10):
            key = f"acme:u1:{name}"
            await router.hydrate(None, key)
            await asyncio.sleep(0)
            view = await shown(router)
            assert view["recent"] == [f"u{name}{before}" for before in range(number)]
            await asyncio.sleep(0)
            await router.add_turn(turn(f"{name}{number}"))
            await asyncio.sleep(0)
            await router.persist(None, key)

    await router.hydrate(None, A)  # an outer binding that every task inherits
    await asyncio.gather(*(converse(f"s{number}") for number in range(20)))
    await router.add_turn(turn("outer"))
    assert await stored(router, A) == ["uouter"]


async def test_a_task_that_outlives_its_conversation_is_unbound(router: MemoryRouter) -> None:
    go = asyncio.Event()

    async def linger() -> dict[str, Any]:
        await go.wait()
        await router.add_turn(turn("late"))
        return dict(await router.get_llm_context())

    await router.hydrate(None, A)
    task = asyncio.create_task(linger())
    await asyncio.sleep(0)
    await router.add_turn(turn(1))
    await router.persist(None, A)
    go.set()
    assert await task == {}
    assert await stored(router, A) == ["u1"]


async def test_hydrate_under_wait_for_binds_the_caller(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    await asyncio.wait_for(router.hydrate(None, B), 5)
    await asyncio.wait_for(router.add_turn(turn(1)), 5)
    await asyncio.wait_for(router.persist(None, B), 5)
    await router.add_turn(turn(2))
    assert await stored(router, B) == ["u1"]
    assert await stored(router, A) == ["u2"]


async def test_a_cancelled_hydrate_leaves_nothing_bound(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    task = asyncio.ensure_future(router.hydrate(None, B))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await router.get_llm_context() == {}
    await router.add_turn(turn("stray"))
    assert await stored(router, A) == []
    assert await stored(router, B) == []


async def test_a_timed_out_hydrate_leaves_nothing_bound(router: MemoryRouter) -> None:
    await router.hydrate(None, A)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(router.hydrate(None, B), 0)
    await router.add_turn(turn("stray"))
    assert await stored(router, A) == []
    assert await stored(router, B) == []


def bindings() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one).__name__ == "_Binding"]


async def test_many_conversations_that_never_persist_do_not_pile_up(router: MemoryRouter) -> None:
    earlier = len(bindings())  # contexts of other tests may hold some
    for number in range(500):
        await router.hydrate(None, f"acme:u1:{number}")
    assert len(bindings()) - earlier <= 2 * 64
    with router.bound(MemoryKey("acme", "u1", "a")):
        await router.add_turn(turn(1))
    assert await stored(router, A) == ["u1"]


async def test_an_error_inside_bound_ends_the_binding(router: MemoryRouter) -> None:
    with pytest.raises(RuntimeError, match="agent"), router.bound(MemoryKey("acme", "u1", "a")):
        raise RuntimeError("the agent failed")
    assert await router.get_llm_context() == {}


async def test_memory_objects_of_idle_conversations_are_freed(driver: Driver) -> None:
    made: weakref.WeakSet[DistributedShortTermMemory] = weakref.WeakSet()

    def make(key: MemoryKey) -> DistributedShortTermMemory:
        memory = DistributedShortTermMemory(driver, key, config("truncation"))
        made.add(memory)
        return memory

    router = MemoryRouter(make, config("truncation"), keep=20)
    for number in range(300):
        await say(router, f"acme:u1:{number}", "1")
    await asyncio.sleep(0.05)
    gc.collect()
    assert len(made) <= 2 * 20 + 1
    assert (await say(router, "acme:u1:0", "2"))["recent"] == ["u1"]


async def test_memory_objects_that_wait_for_a_broken_summarizer_are_freed(driver: Driver) -> None:
    failing = LedgerSummarizer()
    failing.fail = 10**6
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=60.0)
    made: weakref.WeakSet[DistributedShortTermMemory] = weakref.WeakSet()

    def make(key: MemoryKey) -> DistributedShortTermMemory:
        memory = DistributedShortTermMemory(driver, key, settings, summarizer=failing)
        made.add(memory)
        return memory

    router = MemoryRouter(make, settings, keep=10)
    for number in range(100):
        for text in ("1", "2"):
            await say(router, f"acme:u1:{number}", text)
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    gc.collect()
    assert len(made) <= 22
    await router.close()


async def test_logs_name_no_conversation(router: MemoryRouter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await router.add_turn(turn("secret"))
    await router.persist(None, A)
    with pytest.raises(InvalidKey) as caught:
        await router.hydrate(None, "very:secret")
    assert "secret" not in caplog.text + str(caught.value)
