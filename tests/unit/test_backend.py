"""Opening a backend, what it hands out, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import stm_backends
from stm_backends.agents import conversation
from stm_backends.backend import PING_KEY, Backend, open_backend
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import ConfigurationError, InvalidKey, StmError, Unavailable, UnknownBackend
from stm_backends.memory.shared.maintenance import Maintenance
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.protocols import ShortTermMemory, SupportsMemoryState
from stm_backends.records import keys
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.tiers import MemoryManager
from stm_backends.types import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig
from tests.support import leases
from tests.support.catalogue import touched

KEY = MemoryKey("acme", "u", "s")
ROLLING = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1))


def turn(text: str) -> ConversationTurn:
    return ConversationTurn(text, "fine")


async def fill(memory: Any, count: int = 2) -> None:
    for number in range(count):
        await memory.add_turn(turn(f"u{number}"))


async def settled(memory: Any) -> None:
    """Wait for what a memory does after it has answered."""
    async with asyncio.timeout(5):
        while memory.busy:  # noqa: ASYNC110 -- no event says so
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(driver, close_timeout_s=0.2) as backend:
        yield backend


# Opening


async def test_a_backend_opened_by_name_or_url_keeps_what_it_is_given(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend("sqlite", url=url, create=True) as backend:
        assert backend.name == "sqlite"
        await fill(backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation")))
    async with open_backend(url) as backend:
        memory = backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation"))
        assert [item.user_message for item in await memory.turns()] == ["u0", "u1"]


def test_a_typo_is_found_before_anything_is_opened() -> None:
    with pytest.raises(UnknownBackend):
        open_backend("sqllite")
    with pytest.raises(UnknownBackend):
        open_backend("sqllite:///x.db")
    with pytest.raises(ConfigurationError, match="deadline_s"):
        open_backend("memory", deadlines=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"create": "yes"},
        {"create": 1},
        {"max_summaries": 0},
        {"max_summaries": "8"},
        {"max_summaries": 2.5},
        {"summaries": "here"},
        {"summaries": None},
        {"close_timeout_s": -1},
        {"close_timeout_s": float("nan")},
        {"close_timeout_s": float("inf")},
        {"close_timeout_s": None},
        {"transforms": "gzip"},
        {"deadline_s": "5"},
        {"clock": 5},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        open_backend("memory", **settings)


async def test_opening_and_closing_twice_is_harmless(tmp_path: Path) -> None:
    for url in ("memory://", f"sqlite:///{tmp_path}/stm.db"):
        backend = open_backend(url)
        await backend.close()
        await backend.open()
        await backend.open()
        assert await backend.ping() > 0
        await backend.close()
        await backend.close()
        with pytest.raises(StmError):
            await backend.ping()


async def test_a_backend_can_be_opened_again() -> None:
    backend = open_backend("memory")
    for _ in range(2):
        async with backend:
            await backend.ping()


@pytest.mark.parametrize("error", [Unavailable("down"), asyncio.CancelledError()])
async def test_an_opening_that_fails_closes_what_it_opened_and_shows_why(error: BaseException) -> None:
    class Half(MemoryDriver):
        closed = False

        async def open(self) -> None:
            await super().open()
            raise error

        async def close(self) -> None:
            await super().close()
            self.closed = True
            raise OSError("closing fails, too")

    driver = Half()
    with pytest.raises(type(error)):
        async with Backend(driver):
            raise AssertionError
    assert driver.closed


async def test_an_error_in_the_body_is_shown_and_the_driver_closed() -> None:
    driver = MemoryDriver()
    with pytest.raises(KeyError):
        async with Backend(driver):
            raise KeyError
    with pytest.raises(Unavailable):
        await driver.load(PING_KEY)


# What it hands out


async def test_it_says_what_it_is(backend: Backend) -> None:
    assert backend.name == backend.driver.name
    assert backend.traits is backend.driver.traits
    assert isinstance(backend.state_store, SupportsMemoryState)
    assert isinstance(backend.memory(KEY), ShortTermMemory)
    assert isinstance(backend.router(), ShortTermMemory)


async def test_a_ping_is_one_load_of_a_missing_record(backend: Backend, calls: list[str]) -> None:
    start = time.perf_counter()
    seconds = await backend.ping()
    assert 0 < seconds <= time.perf_counter() - start
    assert calls == ["load"]
    assert await backend.driver.load(PING_KEY) is None
    assert PING_KEY.scope != keys.OTHER_BLOBS


async def test_handing_out_a_memory_asks_the_datastore_nothing(backend: Backend, calls: list[str]) -> None:
    backend.memory(KEY, ROLLING, summarizer=LedgerSummarizer())
    backend.router(ROLLING, summarizer=LedgerSummarizer())
    assert calls == []


@pytest.mark.parametrize("key", ["acme:u:s", None, ("acme", "u", "s")])
async def test_an_invalid_key_raises_where_it_is_given(backend: Backend, key: Any) -> None:
    router: Any = backend.router(ROLLING, summarizer=LedgerSummarizer())

    async def bind() -> None:
        with router.bound(key):
            pass

    async def talk() -> None:
        manager = MemoryManager(backend=backend, owner=("acme", "u"))
        async with conversation(backend, key, ShortTermMemoryConfig("truncation"), tiers=manager):
            pass

    calls: list[Callable[[], Any]] = [
        lambda: backend.memory(key),
        lambda: backend.short_term_conversation(key, ShortTermMemoryConfig("truncation")),
        lambda: backend.item_log(key, "langchain"),
        lambda: DistributedShortTermMemory(backend.driver, key),
    ]
    for call in calls:
        with pytest.raises(InvalidKey, match="must be a MemoryKey"):
            call()
    for work in (bind, *([] if key is None else [talk])):
        with pytest.raises(InvalidKey, match="must be a MemoryKey"):
            await work()


async def test_a_log_of_an_unknown_framework_is_refused_where_it_is_asked_for(backend: Backend) -> None:
    kind: Any = "crewai"
    with pytest.raises(ConfigurationError, match="one of: openai-agents, langchain"):
        backend.item_log(KEY, kind)


async def test_what_is_no_backend_is_refused_by_the_conversation_around_an_agent() -> None:
    backend: Any = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match=r"backend must come from open_backend\(\.\.\.\), not str"):
        async with conversation(backend, KEY, None):
            pass


@pytest.mark.parametrize(
    ("summarizer", "says"),
    [
        (None, "needs a summarizer"),
        ("gpt-4", "not str"),
        (LedgerSummarizer, "give an instance: LedgerSummarizer"),
        (7, "not int"),
    ],
)
async def test_what_summarizes_nothing_is_refused_where_it_is_given(
    backend: Backend, summarizer: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        backend.memory(KEY, ROLLING, summarizer=summarizer)
    with pytest.raises(ConfigurationError, match=says):
        backend.router(ROLLING, summarizer=summarizer)


async def test_an_invalid_configuration_raises_where_it_is_given(backend: Backend) -> None:
    for config in ({"strategy": "truncation"}, MemoryBudget(), "truncation"):
        with pytest.raises(ConfigurationError, match="ShortTermMemoryConfig"):
            backend.memory(KEY, config)
        with pytest.raises(ConfigurationError, match="ShortTermMemoryConfig"):
            backend.router(config)


async def test_a_user_is_listed_once_for_all_memories_of_a_process(
    backend: Backend, calls: list[str]
) -> None:
    config = ShortTermMemoryConfig(strategy="truncation")
    memory = backend.memory(KEY, config)
    await memory.add_turn(turn("one"))
    await backend.state_store.save_memory_state(KEY.composite(), {})
    # A write that may have created the record lists the user again.
    await settled(memory)
    # It writes to the catalogue at once, and not again within the minute.
    await touched(backend, KEY)
    calls.clear()
    await backend.memory(KEY, config).add_turn(turn("two"))
    await backend.state_store.save_memory_state(KEY.composite(), {})
    assert [call for call in calls if call != "load"] == ["append", "replace"]


def test_without_an_event_loop_of_asyncio_opening_says_what_to_do() -> None:
    opening = open_backend("memory://").open()  # as trio runs it
    with pytest.raises(ConfigurationError, match=r"needs an event loop of asyncio.*trio"):
        opening.send(None)


async def test_a_router_and_a_memory_share_the_conversation(backend: Backend) -> None:
    config = ShortTermMemoryConfig(strategy="truncation")
    router = backend.router(config)
    with router.bound(KEY):
        await router.add_turn(turn("one"))
    assert [item.user_message for item in await backend.memory(KEY, config).turns()] == ["one"]


async def test_an_unreferenced_memory_is_freed(backend: Backend) -> None:
    for number in range(50):
        memory = backend.memory(MemoryKey("acme", "u", str(number)), ROLLING, summarizer=LedgerSummarizer())
        await memory.add_turn(turn("one"))
        await settled(memory)
    del memory
    gc.collect()
    assert len(backend._backgrounds) == 0  # noqa: SLF001 -- that a process stays small has no other face


async def test_transforms_reach_everything_that_is_stored(driver: Driver) -> None:
    class Rot:
        name = "rot"

        def encode(self, data: bytes) -> bytes:
            return bytes(byte ^ 0x55 for byte in data)

        def decode(self, data: bytes, limit: int) -> bytes:
            return self.encode(data)

    async with Backend(driver, transforms=[Rot()]) as backend:
        memory = backend.memory(KEY, ROLLING, summarizer=LedgerSummarizer())
        await fill(memory, 3)
        await memory.flush()
        await backend.state_store.save_memory_state(KEY.composite(), {"user": "u0"})
        conversation = await driver.load(keys.memory_key(KEY))
        state = await driver.load(keys.blob_key(KEY.composite()))
        assert conversation is not None
        assert state is not None
        for data in (conversation.body, *conversation.tail, state.body):
            assert data is not None
            assert data.split(b"\n")[0].endswith(b" rot")
            assert b"user" not in data
        assert covered((await backend.sessions.export(KEY))["body"]["summary"]) == ["u0", "u1"]


async def test_summaries_in_flight_are_bounded_across_memories_and_routers(
    driver: Driver, held: LedgerSummarizer
) -> None:
    async with Backend(driver, max_summaries=2, close_timeout_s=0) as backend:
        router = backend.router(ROLLING, summarizer=held)
        memories = [
            backend.memory(MemoryKey("acme", "u", f"s{number}"), ROLLING, summarizer=held)
            for number in range(4)
        ]
        for memory in memories:
            await fill(memory)
        for number in range(4):
            with router.bound(MemoryKey("acme", "u", f"r{number}")):
                await fill(router)
        async with asyncio.timeout(5):
            while held.running < 2:  # noqa: ASYNC110 -- no event says "two of four"
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert held.running == 2
        held.release()
        await asyncio.gather(*(memory.flush() for memory in memories))
    assert held.most_running == 2


# Closing


async def summarizing(backend: Backend, through: str, held: LedgerSummarizer) -> object:
    """Return the memory or the router of a conversation whose summary has just begun."""
    memory: Any = (
        backend.router(ROLLING, summarizer=held)
        if through == "router"
        else backend.memory(KEY, ROLLING, summarizer=held)
    )
    with memory.bound(KEY) if through == "router" else contextlib.nullcontext():
        await fill(memory)
    await asyncio.wait_for(held.called.wait(), 5)
    return memory


async def lease_is_free(driver: Driver) -> bool:
    await driver.open()
    try:
        return (await leases.stored_body(driver, keys.memory_key(KEY))).lease is None
    finally:
        await driver.close()


def shared_driver(tmp_path: Path, kind: str) -> tuple[Driver, Driver]:
    """Return two drivers on one datastore."""
    if kind == "memory":
        store = MemoryStore()
        return MemoryDriver(store), MemoryDriver(store)
    url = f"sqlite:///{tmp_path}/shared.db"
    return open_backend(url).driver, open_backend(url).driver


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("through", ["memory", "router", "a memory that is freed"])
async def test_closing_waits_for_a_summary_that_ends_in_time(
    tmp_path: Path, held: LedgerSummarizer, kind: str, through: str
) -> None:
    ours, theirs = shared_driver(tmp_path, kind)
    async with Backend(ours, close_timeout_s=5) as backend:
        memory = await summarizing(backend, through, held)
        if through == "a memory that is freed":
            del memory
            gc.collect()
        asyncio.get_running_loop().call_later(0.1, held.release)
    assert await lease_is_free(theirs)
    async with Backend(theirs) as backend:
        assert covered((await backend.sessions.export(KEY))["body"]["summary"]) == ["u0"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_closing_gives_up_on_a_summary_that_hangs_and_gives_its_lease_back(
    tmp_path: Path, held: LedgerSummarizer, kind: str
) -> None:
    ours, theirs = shared_driver(tmp_path, kind)
    backend = Backend(ours, close_timeout_s=0.2)
    await backend.open()
    _memory = await summarizing(backend, "memory", held)
    start = time.monotonic()
    await backend.close()
    assert time.monotonic() - start < 3
    assert held.running == 0
    assert await lease_is_free(theirs)
    async with Backend(theirs) as again:
        assert len((await again.sessions.export(KEY))["turns"]) == 2


async def test_a_background_that_does_not_close_delays_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = MemoryDriver(deadline_s=0.1)
    backend = Backend(driver, close_timeout_s=0.1)
    await backend.open()
    held = [backend.memory(MemoryKey("acme", "u", name)) for name in ("hangs", "raises")]
    cancelled = asyncio.Event()

    async def close(maintenance: Maintenance, *, timeout: float) -> None:
        if maintenance.shared.remembers("raises"):
            raise OSError("words of a conversation")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    held[1] = backend.memory(MemoryKey("acme", "u", "raises"), ShortTermMemoryConfig(strategy="truncation"))
    await held[1].add_turn(turn("one"), turn_id="raises")
    monkeypatch.setattr(Maintenance, "close", close)
    with caplog.at_level(logging.WARNING, "stm_backends"):
        async with asyncio.timeout(3):
            await backend.close()
            await cancelled.wait()
    assert "OSError" in caplog.text
    assert "words" not in caplog.text
    with pytest.raises(Unavailable):
        await driver.load(PING_KEY)


@pytest.mark.parametrize("through", ["memory", "router"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_cancelled_closing_ends_the_background_and_gives_leases_back(
    tmp_path: Path, held: LedgerSummarizer, kind: str, through: str
) -> None:
    ours, theirs = shared_driver(tmp_path, kind)
    backend = Backend(ours, close_timeout_s=60)
    await backend.open()
    _memory = await summarizing(backend, through, held)
    assert not await lease_is_free(theirs)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.close(), 0.2)
    assert held.running == 0
    with pytest.raises(Unavailable, match="the backend is not open"):
        await ours.load(PING_KEY)
    assert await lease_is_free(theirs)


async def test_a_concurrent_close_waits_and_its_cancellation_ends_only_the_wait(
    held: LedgerSummarizer,
) -> None:
    driver = MemoryDriver()
    backend = Backend(driver, close_timeout_s=5)
    await backend.open()
    _memory = await summarizing(backend, "memory", held)
    first, second = asyncio.ensure_future(backend.close()), asyncio.ensure_future(backend.close())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.close(), 0.05)
    assert not first.done()
    assert not second.done()
    held.release()
    await second
    with pytest.raises(Unavailable):
        await driver.load(PING_KEY)
    await first
    await backend.open()
    await backend.ping()
    await backend.close()


def test_a_backend_works_in_one_event_loop_after_another() -> None:
    calls = 0

    async def summarize(request: Any) -> dict[str, str]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return {"summary": "so far"}

    backend = open_backend("memory", max_summaries=1)

    failures: list[Any] = []

    async def work(round_: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with backend:
            memories = [
                backend.memory(MemoryKey("acme", f"u{round_}", str(number)), ROLLING, summarizer=summarize)
                for number in range(3)
            ]
            for memory in memories:
                await fill(memory)
            await asyncio.gather(*(memory.flush() for memory in memories))
        del memory, memories
        gc.collect()

    for round_ in range(2):
        asyncio.run(work(round_))
    assert calls >= 6
    assert failures == []


# The public names


def test_the_package_has_a_version_and_no_name_that_it_does_not_list() -> None:
    assert stm_backends.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no_such_name"):
        stm_backends.no_such_name  # noqa: B018 -- reading it is the test


def test_an_invalid_observer_raises() -> None:
    with pytest.raises(ConfigurationError, match="observer is an Observer, not str"):
        open_backend("memory", observer="me")  # type: ignore[arg-type]
