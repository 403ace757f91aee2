"""Conversations that PenguiFlow's memory has saved are imported, or taken over as a whole, and once."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from stm_backends.admin import adopting
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    InvalidKey,
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    SessionExists,
    StorageError,
    Unavailable,
)
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records.limits import Limits
from stm_backends.telemetry.observer import Observer, Subject
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.former import FormerServer, fail_over
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey, ShortTermMemoryConfig
from tests.support import clock
from tests.support.default_memory import penguiflow_state
from tests.support.stores import PlainStore

T = TypeVar("T")

KEY = MemoryKey("acme", "u1", "chat")
NAME = KEY.composite()
LONG = ShortTermMemoryConfig(strategy="truncation")
QUOTED = "pin 4711"


def state(*numbers: int | str, pending: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return a state as PenguiFlow's memory saves it, of which some turns are not summarized yet."""
    waiting = penguiflow_state(*pending)["turns"]
    part = "backlog" if fields.get("health") == "degraded" else "pending"
    return penguiflow_state(*numbers, **{part: waiting, **fields})


def saved(**states: dict[str, Any]) -> PlainStore:
    """Return a store that PenguiFlow has saved states in, by default one under the key of these tests."""
    store = PlainStore()
    store.texts = {name: json.dumps(one) for name, one in states.items()}
    return store


def holding(one: dict[str, Any], key: MemoryKey = KEY) -> PlainStore:
    return saved(**{key.composite(): one})


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as opened:
        yield opened


def spy_of(backend: Backend) -> SpyDriver:
    found: Any = backend.driver
    while not isinstance(found, SpyDriver):
        found = found.inner
    return found


def memory_of(backend: Backend, key: MemoryKey = KEY) -> DistributedShortTermMemory:
    return backend.memory(key, config(zone=2, total_max_tokens=0), summarizer=LedgerSummarizer())


async def users(backend: Backend, key: MemoryKey = KEY) -> list[str]:
    return [one.user_message for one in await backend.memory(key, LONG).turns()]


# Imports


async def test_a_saved_state_is_imported_with_its_summary_and_all_turns(backend: Backend) -> None:
    document = state(3, 4, pending=(1, 2), summary="S", revision="r1", unknown={"x": 1})
    assert await backend.sessions.import_(document, key=KEY) == KEY
    view = await backend.memory(KEY, config(zone=2), summarizer=LedgerSummarizer()).get_llm_context()
    context = view["conversation_memory"]
    assert context["summary"] == "S"
    assert [one["user"] for one in context["pending_turns"]] == ["u1", "u2"]
    assert [one["user"] for one in context["recent_turns"]] == ["u3", "u4"]
    assert await listed(backend) == ["chat"]


async def listed(backend: Backend) -> list[str]:
    return [card.key.session_id for card in (await backend.conversations.list("acme", "u1")).cards]


@pytest.mark.parametrize("named", [NAME, {"tenant_id": "acme", "user_id": "u1", "session_id": "chat"}])
async def test_a_state_may_name_its_conversation_itself(backend: Backend, named: object) -> None:
    document = {**state(1), "key": named}
    assert await backend.sessions.import_(document) == KEY
    assert await users(backend) == ["u1"]
    assert await backend.sessions.importing(on_conflict="merge").add(document) == KEY
    assert await users(backend) == ["u1"]


async def test_a_degraded_state_is_imported_with_its_backlog(backend: Backend) -> None:
    await backend.sessions.import_(state(3, pending=(1, 2), health="degraded"), key=NAME)
    assert await users(backend) == ["u1", "u2", "u3"]
    document = await backend.sessions.export(KEY)
    assert document["body"]["health"] == "degraded"


async def test_importing_a_state_again_adds_what_is_missing(backend: Backend) -> None:
    await backend.sessions.import_(state(1, 1, 2), key=KEY)
    with pytest.raises(SessionExists):
        await backend.sessions.import_(state(1, 1, 2), key=KEY)
    await backend.sessions.import_(state(1, 1, 2, 3), key=KEY, on_conflict="merge")
    assert await users(backend) == ["u1", "u1", "u2", "u3"]
    await backend.sessions.import_(state(9), key=KEY, on_conflict="replace")
    assert await users(backend) == ["u9"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"health": "fine"},
        {"turns": 5},
        {"turns": [QUOTED]},
        {"turns": [{"ts": QUOTED}]},
        {"stm": QUOTED},
        {"unknown": {1, 2}},
    ],
)
async def test_what_is_no_state_is_refused_and_not_quoted(backend: Backend, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidState) as refused:
        await backend.sessions.import_({**state(1), **wrong}, key=KEY)
    assert QUOTED not in str(refused.value)
    assert not await backend.sessions.has("acme")


@pytest.mark.parametrize(
    "key", [None, "acme:u1", "acme:u1:a:b", "acme:u:50%", "", 7, MemoryKey("acme", "", "s")]
)
async def test_a_state_of_an_unclear_conversation_is_refused(backend: Backend, key: Any) -> None:
    with pytest.raises(InvalidKey):
        await backend.sessions.import_(state(1), key=key)
    with pytest.raises(InvalidKey):
        await backend.sessions.import_({**state(1), "key": key})
    assert not await backend.sessions.has("acme")


async def test_a_state_that_names_its_conversation_takes_no_other_key(backend: Backend) -> None:
    with pytest.raises(InvalidKey, match="names its conversation itself"):
        await backend.sessions.import_({**state(1), "key": NAME}, key=replace(KEY, user_id="other"))


async def test_an_exported_conversation_keeps_its_own_key(backend: Backend) -> None:
    await backend.sessions.import_(state(1), key=KEY)
    document = await backend.sessions.export(KEY)
    with pytest.raises(ConfigurationError, match="has its own"):
        await backend.sessions.import_(document, key=KEY, on_conflict="merge")


# Adoption


async def test_a_conversation_is_taken_over_as_it_was(backend: Backend) -> None:
    document = state(3, 4, pending=(1, 2), summary="S", revision="r1")
    store = holding(document)
    assert await backend.sessions.adopt(KEY, store)
    assert await users(backend) == ["u1", "u2", "u3", "u4"]
    assert (await backend.sessions.export(KEY))["body"]["summary"] == "S"
    assert store.state(NAME) == document, "the store is only read"
    assert store.saves == 0
    assert await listed(backend) == ["chat"]
    other = Backend(backend.driver)
    await other.memory(KEY, LONG).add_turn(turn(5))
    assert await users(backend) == ["u1", "u2", "u3", "u4", "u5"]


async def test_it_goes_on_as_if_it_had_begun_here(backend: Backend) -> None:
    adopted, imported = KEY, replace(KEY, session_id="imported")
    document = state(4, 5, pending=(1, 2, 3))
    await backend.sessions.adopt(adopted, holding(document))
    await backend.sessions.import_(document, key=imported)
    one, two = [await backend.sessions.export(key) for key in (adopted, imported)]
    assert {**one, "key": None} == {**two, "key": None}
    views: list[Any] = []
    for key in (adopted, imported):
        memory = memory_of(backend, key)
        for number in range(6, 12):
            await memory.add_turn(turn(number))
        await memory.flush()
        views.append(await shown(memory))
    assert views[0] == views[1]
    assert views[0]["summary"] == [f"u{number}" for number in range(1, 10)]


async def test_taking_over_again_and_importing_add_nothing(backend: Backend) -> None:
    document = state(2, 3, pending=(1,))
    assert await backend.sessions.adopt(KEY, holding(document))
    assert not await backend.sessions.adopt(KEY, holding(state(7, 8)))
    await backend.sessions.import_(document, key=KEY, on_conflict="merge")
    assert await users(backend) == ["u1", "u2", "u3"]


async def test_what_is_here_already_stays(backend: Backend) -> None:
    await backend.memory(KEY, LONG).add_turn(turn("here"))
    store = Telling(state(1))
    assert not await backend.sessions.adopt(KEY, store)
    assert await users(backend) == ["uhere"]
    assert store.asked == 0


@pytest.mark.parametrize("nothing", [None, penguiflow_state()])
async def test_of_what_is_not_saved_nothing_is_written(backend: Backend, nothing: Any) -> None:
    assert not await backend.sessions.adopt(KEY, Telling(nothing))
    assert not await backend.sessions.has("acme")


async def test_a_summary_without_turns_is_taken_over_too(backend: Backend) -> None:
    assert await backend.sessions.adopt(KEY, holding(state(summary="S")))
    await backend.memory(KEY, LONG).add_turn(turn(1))
    document = await backend.sessions.export(KEY)
    assert document["body"]["summary"] == "S"
    assert await users(backend) == ["u1"]


async def test_a_state_of_ours_is_taken_over_from_the_state_store(backend: Backend) -> None:
    await backend.state_store.save_memory_state(NAME, state(1, 2))
    assert await backend.sessions.adopt(KEY, backend.state_store)
    assert await users(backend) == ["u1", "u2"]
    await backend.sessions.erase(KEY)
    assert not await backend.sessions.adopt(KEY, backend.state_store), "erased in both"


async def test_what_our_memory_saved_keeps_its_ids_and_its_counts(backend: Backend) -> None:
    local = DefaultShortTermMemory(config=config(zone=1), summarizer=LedgerSummarizer())
    for number in range(4):
        await local.add_turn(turn(number), turn_id=f"id{number}")
    await local.flush()
    store = PlainStore()
    await local.persist(store, NAME)
    assert await backend.sessions.adopt(KEY, store)
    memory = memory_of(backend)
    for number in range(4):
        await memory.add_turn(turn(number), turn_id=f"id{number}")
    view = await shown(memory)
    assert (view["summary"], view["pending"] + view["recent"]) == (["u0", "u1", "u2"], ["u3"])
    assert (await backend.sessions.export(KEY))["body"]["folded"] == 3


@clock.virtually
async def test_it_lives_as_long_as_is_said() -> None:
    async with Backend(MemoryDriver(clock=clock.now), close_timeout_s=0) as backend:
        await backend.sessions.adopt(KEY, holding(state(1)), ttl=60)
        await asyncio.sleep(59)
        assert await users(backend) == ["u1"]
        await asyncio.sleep(2)
        assert await users(backend) == []


async def test_more_turns_than_one_write_stores_are_taken_over(driver: Driver) -> None:
    class Narrow(WrapperDriver):
        @property
        def traits(self) -> Traits:
            return replace(self.inner.traits, max_drop=3)

    async with Backend(Narrow(driver), close_timeout_s=0.2) as backend:
        await backend.sessions.adopt(KEY, holding(state(*range(9))))
        assert await users(backend) == [f"u{number}" for number in range(9)]
        memory = memory_of(backend)
        for number in range(9, 12):
            await memory.add_turn(turn(number))
        await memory.flush()
        view = await shown(memory)
        assert view["summary"] + view["pending"] + view["recent"] == [f"u{number}" for number in range(12)]


async def test_the_limits_of_the_backend_hold(driver: Driver) -> None:
    for limits in (
        Limits(conversation_turns=2),
        Limits(turn_characters=3),
        Limits(conversation_bytes=200),
        Limits(user_conversations=1),
    ):
        async with Backend(driver, limits=limits) as backend:
            if limits.user_conversations:
                await backend.memory(replace(KEY, session_id="first"), LONG).add_turn(turn(1))
            with pytest.raises(LimitReached):
                await backend.sessions.adopt(KEY, holding(state(1, 2, 3)))
            assert await users(backend) == []


class Hearing(Observer):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def imported(self, subject: Subject) -> None:
        self.heard.append(subject)

    def function_failed(self, function: str, error: BaseException) -> None:
        del error
        self.heard.append(function)


async def test_an_observer_hears_of_it_once_and_of_failures() -> None:
    ear = Hearing()
    async with Backend(MemoryDriver(), observer=ear) as backend:
        for _ in range(2):
            await backend.sessions.adopt(KEY, holding(state(1)))
        other = replace(KEY, session_id="other")
        with pytest.raises(Unavailable):
            await backend.sessions.adopt(other, Telling(RuntimeError(QUOTED)))
    assert ear.heard == [Subject("acme", "u1", "chat"), "adopt_from"]


# Stores that fail, hang and lie


class Telling:
    """A store that answers with what it is given, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.asked = 0

    async def load_memory_state(self, key: str) -> Any:
        del key
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return copy.deepcopy(answer)


class Hostile(Mapping[str, Any]):
    """A mapping that raises what it likes."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, name: str) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        raise self.error


class Panic(BaseException):
    """As an extension in Rust raises it."""


FAILING = [
    (RuntimeError(QUOTED), Unavailable),
    (ConnectionError(QUOTED), Unavailable),
    (KeyError(NAME), Unavailable),
    (Panic(QUOTED), Unavailable),
    (asyncio.CancelledError(), Unavailable),
    (Denied("not for you"), Denied),
    ({}, Corrupt),
    ([], Corrupt),
    ("", Corrupt),
    (False, Corrupt),
    (QUOTED, Corrupt),
    (json.dumps(penguiflow_state(1)), Corrupt),
    ({"version": 2, "health": "healthy"}, Corrupt),
    ({**penguiflow_state(1), "health": QUOTED}, Corrupt),
    ({**penguiflow_state(1), "turns": {"a": QUOTED}}, Corrupt),
    ({**penguiflow_state(1), "turns": [QUOTED]}, Corrupt),
    (Hostile(ValueError(QUOTED)), Corrupt),
    ({**penguiflow_state(1), "turns": [Hostile(ValueError(QUOTED))]}, Corrupt),
    (Hostile(RuntimeError(QUOTED)), Corrupt),
]


@pytest.mark.parametrize(("answer", "error"), FAILING)
async def test_a_store_that_fails_or_lies_is_an_error_and_no_empty_history(
    backend: Backend, answer: Any, error: type[StorageError]
) -> None:
    class Once(Telling):
        async def load_memory_state(self, key: str) -> Any:
            # Not copied: some of these cannot be.
            self.asked += 1
            if self.asked > 1:
                return await super().load_memory_state(key)
            if isinstance(answer, BaseException):
                raise answer
            return answer

    store = Once(state(1, 2))
    with pytest.raises(error) as refused:
        await backend.sessions.adopt(KEY, store)
    assert QUOTED not in str(refused.value)
    assert NAME not in str(refused.value)
    assert not await backend.sessions.has("acme")
    assert await backend.sessions.adopt(KEY, store)
    assert await users(backend) == ["u1", "u2"]


async def test_a_store_without_an_event_loop_will_do(backend: Backend) -> None:
    class Plain:
        def load_memory_state(self, key: str) -> Any:
            return state(1) if key == NAME else None

    assert await backend.sessions.adopt(KEY, Plain())
    assert not await backend.sessions.adopt(replace(KEY, session_id="other"), Plain())


@clock.virtually
async def test_a_store_that_hangs_is_given_up() -> None:
    class Hanging:
        async def load_memory_state(self, key: str) -> Any:
            del key
            await asyncio.Event().wait()

    async with Backend(MemoryDriver(clock=clock.now), close_timeout_s=0) as backend:
        before = clock.now()
        with pytest.raises(Unavailable, match="TimeoutError"):
            await backend.sessions.adopt(KEY, Hanging())
        assert clock.now() - before == pytest.approx(adopting.ANSWERS_WITHIN_S)
        router = backend.router(LONG, adopt_from=Hanging())
        with pytest.raises(Unavailable):
            await router.hydrate(None, NAME)
        await router.add_turn(turn(1))
        await router.persist(None, NAME)
        assert await users(backend) == []


@pytest.mark.parametrize("store", [object(), None, 7, PlainStore, {"load_memory_state": 1}])
async def test_what_is_no_store_is_refused_at_once(backend: Backend, store: Any) -> None:
    with pytest.raises(ConfigurationError, match="load_memory_state"):
        backend.sessions.adopting(store)
    if store is not None:
        with pytest.raises(ConfigurationError, match="load_memory_state"):
            backend.router(LONG, adopt_from=store)


# Several at once, and those that die


async def test_of_many_that_take_over_at_once_one_does() -> None:
    store = MemoryStore()
    backends = [Backend(MemoryDriver(store), close_timeout_s=0) for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for one in backends:
            await stack.enter_async_context(one)
        old = PlainStore(delay=lambda: 0.001)
        old.texts[NAME] = json.dumps(state(3, 4, pending=(1, 2)))
        done = await asyncio.gather(*(one.sessions.adopt(KEY, old) for one in backends for _ in range(3)))
        assert done.count(True) == 1
        for one in backends:
            await one.memory(KEY, LONG).add_turn(turn("more"))
        assert await users(backends[0]) == ["u1", "u2", "u3", "u4", *["umore"] * 4]


async def test_whoever_comes_between_sees_all_or_nothing(backend: Backend) -> None:
    seen: list[list[str]] = []

    async def looks(_: Key | str) -> None:
        seen.append(await users(Backend(spy_of(backend).inner)))

    spy = spy_of(backend)
    spy.before = {"append": [looks] * 9, "replace": [looks] * 9, "load": [looks] * 9}
    await backend.sessions.adopt(KEY, holding(state(1, 2, 3)))
    assert await users(backend) == ["u1", "u2", "u3"]
    assert len(seen) >= 5
    assert all(one in ([], ["u1", "u2", "u3"]) for one in seen)


@pytest.mark.parametrize("operation", ["append", "replace"])
async def test_a_turn_that_arrives_meanwhile_is_kept(backend: Backend, operation: Operation) -> None:
    async def adds(_: Key | str) -> None:
        # By a process that does not know of the other store.
        await Backend(spy_of(backend).inner).memory(KEY, LONG).add_turn(turn("new"))

    spy_of(backend).before[operation] = [adds]
    adopted = await backend.sessions.adopt(KEY, holding(state(1, 2)))
    assert adopted == (operation == "replace")
    assert await users(backend) == (["u1", "u2", "unew"] if adopted else ["unew"])


async def test_what_is_erased_meanwhile_is_taken_over_whole_or_not(backend: Backend) -> None:
    async def erases(_: Key | str) -> None:
        await Backend(spy_of(backend).inner).sessions.erase(KEY)

    spy_of(backend).before["replace"] = [erases]
    assert await backend.sessions.adopt(KEY, holding(state(1, 2)))
    assert await users(backend) == ["u1", "u2"]


async def test_a_lost_answer_changes_nothing(driver: Driver, lose: Any) -> None:
    async with Backend(driver) as backend:
        # So that the next writes are those of the conversations.
        await backend.directory.note("acme", "u1")
        for operation in ("append", "replace"):
            for done in (True, False):
                key = replace(KEY, session_id=f"{operation} {done}")
                lose(operation, done=done)
                await backend.sessions.adopt(key, holding(state(1, 2), key))
                assert await users(backend, key) == ["u1", "u2"]


class _Killed(WrapperDriver):
    """Is killed at the n-th request, before or after it was done."""

    def __init__(self, inner: Driver, at: int, *, done: bool) -> None:
        super().__init__(inner)
        self._left, self._done, self.is_dead = at, done, False

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        del operation, key
        self._left -= 1
        if self._left <= 0 and not (self._done and self._left == 0):
            self.is_dead = True
            raise Unavailable("the process is dead")
        answer = await send()
        if self._left == 0:
            self.is_dead = True
            raise OutcomeUnknown("the process is dead")
        return answer


@pytest.mark.parametrize("unconfirmed", [False, True])
@pytest.mark.parametrize("done", [False, True])
async def test_after_a_process_that_died_the_next_one_takes_over(done: bool, unconfirmed: bool) -> None:
    class Facts(WrapperDriver):
        @property
        def traits(self) -> Traits:
            return replace(self.inner.traits, shows_unconfirmed=unconfirmed, deadline=0.01)

    outcomes = set[bool]()
    for when in range(1, 40):
        driver = Facts(MemoryDriver())
        await driver.open()
        dying = _Killed(driver, when, done=done)
        with contextlib.suppress(StorageError):
            await Backend(dying).sessions.adopt(KEY, holding(state(1, 2, 3, summary="S")))
        if not dying.is_dead:
            assert outcomes == {False, True}
            return
        backend = Backend(driver)
        before = await users(backend)
        outcomes.add(bool(before))
        assert before in ([], ["u1", "u2", "u3"])
        router = backend.router(LONG, adopt_from=holding(state(1, 2, 3, summary="S")))
        await router.hydrate(None, NAME)
        await router.add_turn(turn(4))
        await router.persist(None, NAME)
        assert await users(Backend(driver)) == ["u1", "u2", "u3", "u4"]
        assert (await backend.sessions.export(KEY))["body"]["summary"] == "S"
    raise AssertionError("the adoption made no end")


async def test_entries_that_a_former_server_shows_are_not_relied_on() -> None:
    inner = MemoryDriver()
    await inner.open()
    backend = Backend(inner)
    spy = SpyDriver(inner)

    async def dies(_: Key | str) -> None:
        raise Unavailable("killed")

    spy.before["replace"] = [dies]
    with contextlib.suppress(Unavailable):
        await Backend(spy).sessions.adopt(KEY, holding(state(1, 2)))
    # The server that takes over has one of the two entries, and then a turn under the same version.
    where = backend.memory(KEY, LONG).shared.key
    record = await fail_over(inner, where, 1)
    await backend.memory(KEY, LONG).add_turn(turn("acknowledged"))
    former = Backend(FormerServer(inner, where, record))
    with contextlib.suppress(StorageError):
        await former.sessions.adopt(KEY, holding(state(1, 2)))
    assert "uacknowledged" in await users(backend)


# The router


async def say(router: Any, text: str, key: MemoryKey | str = NAME) -> list[str]:
    """Hold one turn as a framework does, and return what the model saw before it."""
    await router.hydrate(None, key)
    context = await router.get_llm_context()
    await router.add_turn(turn(text))
    await router.persist(None, key)
    return [one["user"] for one in context["conversation_memory"]["recent_turns"]]


async def test_a_router_takes_over_at_the_first_hydrate(backend: Backend) -> None:
    store = Telling(state(1, 2))
    router = backend.router(LONG, adopt_from=store)
    assert await say(router, "a") == ["u1", "u2"]
    assert await say(router, "b") == ["u1", "u2", "ua"]
    assert store.asked == 1
    other = Backend(backend.driver).router(LONG, adopt_from=store)
    assert await say(other, "c") == ["u1", "u2", "ua", "ub"]
    assert store.asked == 1


async def test_a_router_asks_no_more_once_a_conversation_is_here(backend: Backend) -> None:
    store = Telling(None)
    router = backend.router(LONG, adopt_from=store)
    assert await say(router, "a") == []
    store.answers = [state(1, 2)]
    assert await say(router, "b") == ["ua"]
    assert store.asked == 1


async def test_after_a_failure_nothing_is_bound_and_the_next_hydrate_tries_again(backend: Backend) -> None:
    store = Telling(RuntimeError(QUOTED), {}, state(1))
    router = backend.router(LONG, adopt_from=store)
    for error in (Unavailable, Corrupt):
        with pytest.raises(error):
            await router.hydrate(None, NAME)
        # PenguiFlow's planner goes on after an error.
        assert await router.get_llm_context() == {}
        await router.add_turn(turn("lost"))
        await router.persist(None, NAME)
    assert not await backend.sessions.has("acme")
    assert await say(router, "a") == ["u1"]


async def test_within_bound_the_first_method_takes_over(backend: Backend) -> None:
    for number, use in enumerate(
        (
            lambda router: router.add_turn(turn(3)),
            lambda router: router.get_llm_context(),
            lambda router: router.turns(),
            lambda router: router.transcript(),
            lambda router: anext(router.each_turn()),
        )
    ):
        key = replace(KEY, session_id=f"s{number}")
        router: Any = backend.router(LONG, adopt_from=holding(state(1, 2), key))
        with router.bound(key):
            await use(router)
            assert [one.user_message for one in await router.turns()][:2] == ["u1", "u2"]


async def test_a_cancelled_hydrate_binds_nothing(backend: Backend) -> None:
    class Slow(Telling):
        async def load_memory_state(self, key: str) -> Any:
            await asyncio.sleep(0.2 if not self.asked else 0)
            return await super().load_memory_state(key)

    store = Slow(state(1))
    router = backend.router(LONG, adopt_from=store)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(router.hydrate(None, NAME), 0.05)
    assert await router.get_llm_context() == {}
    store.asked = 1
    assert await say(router, "a") == ["u1"]


async def test_a_router_without_memory_asks_nobody(backend: Backend) -> None:
    store = Telling(state(1))
    router = backend.router(ShortTermMemoryConfig(strategy="none"), adopt_from=store)
    await router.hydrate(None, NAME)
    assert await router.get_llm_context() == {}
    assert store.asked == 0


async def test_conversations_through_one_router_get_their_own(backend: Backend) -> None:
    keys = [MemoryKey("acme", f"u{number % 3}", f"s{number}") for number in range(9)]
    old = PlainStore(delay=lambda: 0.001)
    old.texts = {key.composite(): json.dumps(state(key.session_id)) for key in keys}
    router = backend.router(LONG, adopt_from=old)

    async def talks(key: MemoryKey) -> None:
        assert await say(router, "a", key) == [f"u{key.session_id}"]
        assert await say(router, "b", key) == [f"u{key.session_id}", "ua"]

    await asyncio.gather(*map(talks, keys))


# A configuration is no memory


async def test_a_configuration_in_the_place_of_a_memory_is_an_error_once_it_is_used() -> None:
    context: Any = await LONG.get_llm_context()
    for use in (bool, dict, list, len, lambda one: one["conversation_memory"]):
        with pytest.raises(ConfigurationError, match=r"backend\.router\(config, summarizer=\.\.\.\)"):
            use(context)
