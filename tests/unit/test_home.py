"""The home of a driver: one process and one event loop. Forks are pretended; the suite makes real ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from stm_backends import ConfigurationError, MemoryKey, OutcomeUnknown, ShortTermMemoryConfig
from stm_backends.backend import Backend
from stm_backends.drivers import home as homes
from stm_backends.drivers.contract import Key, Record, Traits
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.home import Home
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.types import ConversationTurn, MemoryBudget

KEY = Key("acme:u:memory", "c")
TRAITS = Traits(reach="process", clock="process", durability="none", max_entry=9, max_record=9, max_drop=9)


class Owner:
    """What has a home, and counts how often it starts over."""

    def __init__(self, client: object = None, *, asynchronous: bool = True) -> None:
        self.starts = 0
        self.home = Home(self.start_over, client=client, asynchronous=asynchronous)

    def start_over(self) -> None:
        self.starts += 1

    async def enter(self) -> None:
        self.home.enter()

    async def use(self) -> None:
        self.home.require()

    async def may_close(self) -> bool:
        return self.home.may_close()


class Client:
    """A client that was handed in."""


@dataclass(frozen=True)
class EqualClient:
    """Clients of the same servers, which are equal, as those of PyMongo are."""

    servers: str = "one"


@pytest.fixture
def loops() -> Iterator[list[asyncio.AbstractEventLoop]]:
    """Two event loops that exist at the same time."""
    both = [asyncio.new_event_loop(), asyncio.new_event_loop()]
    yield both
    for loop in both:
        loop.close()


# One event loop at a time


def test_the_home_may_be_entered_twice_and_used(loops: Any) -> None:
    here, owner = loops[0], Owner()
    for work in (owner.enter, owner.enter, owner.use):
        here.run_until_complete(work())
    assert here.run_until_complete(owner.may_close())
    assert owner.starts == 0


def test_the_first_use_makes_the_home(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.use())
    with pytest.raises(ConfigurationError, match="belongs to another event loop"):
        loops[1].run_until_complete(owner.use())


@pytest.mark.parametrize("work", [Owner.enter, Owner.use, Owner.may_close])
def test_another_event_loop_is_refused_while_the_first_exists(loops: Any, work: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    with pytest.raises(ConfigurationError, match="Open a separate backend in each event loop"):
        loops[1].run_until_complete(work(owner))
    loops[0].run_until_complete(owner.use())


def test_a_home_that_was_left_is_free_for_another_event_loop(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    owner.home.leave()
    loops[1].run_until_complete(owner.enter())
    loops[1].run_until_complete(owner.use())
    assert owner.starts == 1


def test_a_home_that_was_left_and_entered_again_goes_on(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    owner.home.leave()
    assert loops[0].run_until_complete(owner.may_close())
    loops[0].run_until_complete(owner.enter())
    loops[0].run_until_complete(owner.use())
    assert owner.starts == 0


def test_an_event_loop_that_has_ended_frees_the_home_for_the_next(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    loops[0].close()
    with pytest.raises(ConfigurationError, match=r"has ended; nothing was sent\. Open it again"):
        loops[1].run_until_complete(owner.use())
    assert owner.starts == 0
    loops[1].run_until_complete(owner.enter())
    loops[1].run_until_complete(owner.use())
    assert owner.starts == 1


def test_closing_after_the_event_loop_has_ended_starts_over(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    loops[0].close()
    assert loops[1].run_until_complete(owner.may_close())
    assert owner.starts == 1
    loops[1].run_until_complete(owner.use())
    assert owner.starts == 1


def test_what_was_never_opened_may_be_closed(loops: Any) -> None:
    owner = Owner()
    assert loops[0].run_until_complete(owner.may_close())
    assert owner.starts == 0


def test_of_two_threads_that_enter_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, both, refused = Owner(), threading.Barrier(2), list[Exception]()
    give_up = Home._give_up  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 -- where both may pass

    def give_up_together(home: Home) -> None:
        give_up(home)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)

    async def enter_and_stay() -> None:
        try:
            owner.home.enter()
        except ConfigurationError as error:
            refused.append(error)
        await asyncio.to_thread(have_tried.wait, 30)

    monkeypatch.setattr(Home, "_give_up", give_up_together)
    have_tried = threading.Barrier(2)
    threads = [threading.Thread(target=asyncio.run, args=(enter_and_stay(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1


def test_a_client_counts_as_asynchronous_unless_its_driver_says_otherwise(loops: Any) -> None:
    async def enter() -> None:
        Home(client=client).enter()

    client = Client()
    loops[0].run_until_complete(enter())
    with pytest.raises(ConfigurationError, match="the client that was handed in"):
        loops[1].run_until_complete(enter())


# Forks


async def test_a_forked_process_may_use_and_open_nothing_of_its_parent() -> None:
    owner = Owner()
    owner.home.enter()
    owner.home.inherit()
    for work in (owner.use, owner.enter):
        with pytest.raises(ConfigurationError, match="Open a separate backend in each process"):
            await work()
    assert not owner.home.may_close()
    owner.home.leave()
    with pytest.raises(ConfigurationError):
        owner.home.enter()
    assert owner.starts == 0


async def test_what_was_not_open_before_a_fork_can_be_opened_after_it() -> None:
    owner = Owner()
    owner.home.enter()
    owner.home.leave()
    assert owner.home.inherit() is None
    owner.home.enter()
    owner.home.require()


def test_what_was_closed_in_the_next_event_loop_can_be_opened_after_a_fork(loops: Any) -> None:
    owner = Owner()
    loops[0].run_until_complete(owner.enter())
    loops[0].close()
    assert loops[1].run_until_complete(owner.may_close())
    assert owner.home.inherit() is None
    loops[1].run_until_complete(owner.enter())


def test_a_coroutine_that_goes_on_in_a_forked_process_is_refused() -> None:
    # After a fork, Python says that no event loop is running.
    with pytest.raises(ConfigurationError, match="belongs to another process"):
        Owner().home.require()


async def test_a_forked_process_never_collects_what_its_parent_has_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[object]()
    monkeypatch.setattr(homes, "_KEPT", kept)
    monkeypatch.setattr(homes, "_HOMES", weakref.WeakSet())
    is_open, is_closed = Owner(), Owner()
    for owner in (is_open, is_closed):
        owner.home.enter()
    is_closed.home.leave()
    alive, gone = weakref.ref(is_open), weakref.ref(is_closed)
    homes._inherit()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 -- as after a fork
    del is_open, is_closed, owner
    gc.collect()
    assert alive() is not None
    assert gone() is None


async def test_what_opened_after_a_concurrent_opening_failed_is_guarded() -> None:
    class RefusingOnce(MemoryDriver):
        opened = 0

        async def open(self) -> None:
            self.opened += 1
            number = self.opened
            await super().open()
            await asyncio.sleep(0.01 * number)
            if number == 1:
                raise OSError("refused")
            await super().open()

    backend = Backend(RefusingOnce())
    failed, succeeded = await asyncio.gather(backend.open(), backend.open(), return_exceptions=True)
    assert isinstance(failed, OSError)
    assert succeeded is None
    backend._home.inherit()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 -- as after a fork
    with pytest.raises(ConfigurationError, match="belongs to another process"):
        await backend.open()


class Opening:
    """An object that opens and closes as slowly as the test wants, and says what it did."""

    def __init__(self) -> None:
        self.home = Home()
        self.may_go_on = asyncio.Event()
        self.done: list[str] = []

    async def open(self) -> None:
        await self.home.open(self._begin, self._end)

    async def close(self) -> None:
        await self.home.close(self._end)

    async def _begin(self) -> None:
        await self.may_go_on.wait()
        self.done.append("opened")

    async def _end(self) -> None:
        await self.may_go_on.wait()
        self.done.append("closed")


async def test_an_opening_that_is_cancelled_while_it_waits_for_another_changes_nothing() -> None:
    it = Opening()
    first, second = asyncio.ensure_future(it.open()), asyncio.ensure_future(it.open())
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    it.may_go_on.set()
    await first
    assert it.done == ["opened"]
    it.home.inherit()  # as after a fork
    with pytest.raises(ConfigurationError, match="belongs to another process"):
        it.home.require()


async def test_an_opening_that_is_cancelled_closes_what_it_has_opened_before_another_begins() -> None:
    it = Opening()
    first, second = asyncio.ensure_future(it.open()), asyncio.ensure_future(it.open())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    it.may_go_on.set()
    await second
    assert first.cancelled()
    assert it.done == ["closed", "opened"]
    assert it.home.is_open


async def test_opening_while_it_closes_waits_and_stays_guarded() -> None:
    it = Opening()
    it.may_go_on.set()
    await it.open()
    it.may_go_on.clear()
    closing = asyncio.ensure_future(it.close())
    await asyncio.sleep(0)
    opening = asyncio.ensure_future(it.open())
    await asyncio.sleep(0)
    it.may_go_on.set()
    await asyncio.gather(closing, opening)
    assert it.done == ["opened", "closed", "opened"]
    it.home.inherit()  # as after a fork
    with pytest.raises(ConfigurationError, match="belongs to another process"):
        it.home.require()


async def test_a_forked_process_does_not_wait_for_the_lock_of_a_store() -> None:
    store = MemoryStore()
    driver, done = MemoryDriver(store), list[Exception]()
    await driver.open()

    def load() -> None:
        try:
            asyncio.run(driver.load(KEY))
        except ConfigurationError as error:
            done.append(error)

    with store.lock:  # as a thread of the parent holds it at the fork
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, 5)
        assert done
    await driver.close()


# Clients that were handed in


def test_a_client_has_one_home_in_all_drivers_that_use_it(loops: Any) -> None:
    client = Client()
    first, second = Owner(client), Owner(client)
    loops[0].run_until_complete(first.enter())
    first.home.leave()
    with pytest.raises(ConfigurationError, match="the client that was handed in belongs to another event"):
        loops[1].run_until_complete(second.use())
    loops[0].run_until_complete(second.use())


def test_a_client_of_an_event_loop_that_has_ended_is_refused(loops: Any) -> None:
    owner = Owner(Client())
    loops[0].run_until_complete(owner.enter())
    loops[0].close()
    with pytest.raises(ConfigurationError, match="hand in a client that was created in this one"):
        loops[1].run_until_complete(owner.enter())


def test_equal_clients_have_homes_of_their_own(loops: Any) -> None:
    one, other = Owner(EqualClient()), Owner(EqualClient())
    loops[0].run_until_complete(one.enter())
    loops[1].run_until_complete(other.enter())


def test_a_client_without_an_event_loop_serves_all_of_its_process(loops: Any) -> None:
    client = Client()
    first, second = (Owner(client, asynchronous=False) for _ in range(2))
    loops[0].run_until_complete(first.enter())
    loops[1].run_until_complete(second.enter())


async def test_a_new_driver_on_a_client_of_the_parent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_KEPT", [])
    client = Client()
    first = Owner(client, asynchronous=False)
    first.home.enter()
    homes._inherit()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 -- as after a fork
    with pytest.raises(ConfigurationError, match="the client that was handed in belongs to another process"):
        Owner(client, asynchronous=False).home.enter()


def test_the_home_of_a_client_goes_with_it() -> None:
    known: dict[int, object] = homes._OF_CLIENTS  # pyright: ignore[reportPrivateUsage, reportAssignmentType]  # noqa: SLF001
    client = Client()
    owner = Owner(client)
    place = id(client)
    assert place in known
    del client, owner
    gc.collect()
    assert place not in known


def test_a_client_that_cannot_be_referenced_weakly_can_be_handed_in(loops: Any) -> None:
    owner = Owner(object())
    loops[0].run_until_complete(owner.enter())
    with pytest.raises(ConfigurationError, match="belongs to another event loop"):
        loops[1].run_until_complete(owner.enter())


# At the edge


def test_an_edge_calls_nothing_in_another_event_loop(loops: Any) -> None:
    edge, calls = Edge(backend="mine", traits=TRAITS, meaning=lambda _: None), list[int]()

    async def work() -> None:
        calls.append(1)

    loops[0].run_until_complete(edge.run("load", work))
    with pytest.raises(ConfigurationError, match="belongs to another event loop"):
        loops[1].run_until_complete(edge.run("load", work))
    assert len(calls) == 1


@pytest.mark.parametrize(("operation", "kind"), [("load", ConfigurationError), ("append", OutcomeUnknown)])
async def test_a_client_that_another_event_loop_has_used_is_told_as_that(operation: str, kind: Any) -> None:
    edge = Edge(backend="mine", traits=TRAITS, meaning=lambda _: None)

    async def work() -> None:
        try:
            raise RuntimeError("Event loop is closed")
        except RuntimeError as error:
            raise KeyError("of the client") from error

    with pytest.raises(kind, match="hand in a client that was created in this one"):
        await edge.run(operation, work)


# Backends


def test_a_backend_is_not_closed_by_another_event_loop(loops: Any) -> None:
    backend = Backend(MemoryDriver())
    loops[0].run_until_complete(backend.open())
    for work in (backend.open, backend.close, backend.ping):
        with pytest.raises(ConfigurationError, match="belongs to another event loop"):
            loops[1].run_until_complete(work())
    loops[0].run_until_complete(backend.ping())
    loops[0].run_until_complete(backend.close())
    loops[1].run_until_complete(backend.open())
    loops[1].run_until_complete(backend.ping())
    loops[1].run_until_complete(backend.close())


def test_a_backend_whose_opening_failed_is_free_for_another_event_loop(loops: Any) -> None:
    class Refusing(MemoryDriver):
        refuses = True

        async def open(self) -> None:
            if self.refuses:
                raise OSError("refused")
            await super().open()

    backend = Backend(driver := Refusing())
    with pytest.raises(OSError, match="refused"):
        loops[0].run_until_complete(backend.open())
    driver.refuses = False
    loops[1].run_until_complete(backend.open())
    loops[1].run_until_complete(backend.close())


def test_the_background_begins_again_in_the_next_event_loop() -> None:
    config = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1))
    backend, calls = Backend(MemoryDriver(MemoryStore())), list[str]()
    is_called = asyncio.Event()

    async def hang(_: Any) -> dict[str, str]:
        calls.append("hangs")
        is_called.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def summarize(_: Any) -> dict[str, str]:
        calls.append("answers")
        return {"summary": "so far"}

    async def leave_open() -> None:
        await backend.open()
        memory = backend.memory(MemoryKey("acme", "u", "s"), config, summarizer=hang)
        for number in range(3):
            await memory.add_turn(ConversationTurn(f"u{number}", "a"))
        await is_called.wait()

    async def go_on() -> object:
        async with backend:
            memory = backend.memory(MemoryKey("acme", "u", "s"), config, summarizer=summarize)
            await memory.flush()
            return await memory.get_llm_context()

    asyncio.run(leave_open())
    assert "so far" in str(asyncio.run(go_on()))
    assert calls[0] == "hangs"
    assert "answers" in calls


async def summary(_: Any) -> dict[str, str]:
    return {"summary": "so far"}


def test_a_flush_that_an_ended_event_loop_left_changes_no_later_one(loops: Any) -> None:
    class Hanging(MemoryDriver):
        hangs = False

        async def load(self, key: Key) -> Record | None:
            if self.hangs:
                await asyncio.Event().wait()
            return await super().load(key)

    config = ShortTermMemoryConfig(
        strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1), fold_batch_turns=10
    )
    backend = Backend(driver := Hanging(MemoryStore()))
    memory = backend.memory(MemoryKey("acme", "u", "s"), config, summarizer=summary)

    async def leave() -> None:
        await backend.open()
        for number in range(2):
            await memory.add_turn(ConversationTurn(f"u{number}", "a"))
        driver.hangs = True
        flushing = asyncio.create_task(memory.flush())
        await asyncio.sleep(0.01)
        # It cannot be cancelled on a loop that is closed, and need not be reported as lost.
        flushing._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001 -- no setting

    async def go_on() -> object:
        driver.hangs = False
        async with backend:
            gc.collect()
            await memory.flush()
            return await memory.get_llm_context()

    loops[0].run_until_complete(leave())
    loops[0].close()
    assert "so far" in str(loops[1].run_until_complete(go_on()))
