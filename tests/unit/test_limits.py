"""What a backend refuses beyond its limits, and what that costs."""

from __future__ import annotations

import asyncio
import pickle
import sys
from asyncio import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    ConfigurationError,
    DefaultShortTermMemory,
    LimitReached,
    Limits,
    MemoryKey,
    MemoryRouter,
    StorageError,
    sync,
)
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import OutcomeUnknown
from stm_backends.memory.touches import Touches
from stm_backends.records import keys, limited
from stm_backends.records.limited import LimitedDriver
from stm_backends.records.limits import Guard, characters_of
from stm_backends.telemetry.observer import Observer, Subject
from stm_backends.testing.memory_contract import config, turn, until
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import ConversationTurn, TrajectoryDigest
from tests.mutants.limits import LIMITS

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)
LAST_TURNS = config("truncation", zone=100)


class Seen(Observer):
    """Remembers the refusals."""

    def __init__(self) -> None:
        self.refused: list[tuple[Subject, str]] = []

    def limit_reached(self, subject: Subject, limit: str) -> None:
        self.refused.append((subject, limit))


class Processes:
    """Backends on one datastore, each as in a process of its own, with a common clock."""

    def __init__(self, kind: type[LimitedDriver] = LimitedDriver) -> None:
        self.kind = kind
        self.store = MemoryStore()
        self.now = 1_000.0
        self.observer = Seen()
        self.started: list[Backend] = []

    async def start(self, **limits: int) -> tuple[Backend, SpyDriver]:
        """Start a process with these limits."""
        driver = SpyDriver(MemoryDriver(self.store, clock=lambda: self.now))
        backend = Backend(driver, limits=Limits(**limits), observer=self.observer)
        assert isinstance(backend.driver, LimitedDriver)
        # Every object of the backend is made on the driver, which a broken one takes the place of.
        backend.driver.__class__ = self.kind
        backend.driver.__init__(backend.driver.inner, Guard(Limits(**limits)), steady=lambda: self.now)
        await backend.open()
        self.started.append(backend)
        return backend, driver

    async def stored(self, key: Key = RECORD) -> Record:
        """Return a record as it is."""
        driver = MemoryDriver(self.store, clock=lambda: self.now)
        await driver.open()
        record = await driver.load(key)
        assert record is not None
        return record

    async def close(self) -> None:
        for backend in self.started:
            await backend.close()


@pytest.fixture(autouse=True)
def nothing_goes_to_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reads and writes, which no limit concerns, would be counted here."""
    monkeypatch.setattr(Touches, "note", lambda *_, **__: None)


@pytest.fixture
async def processes() -> Any:
    made = Processes()
    yield made
    await made.close()


async def add(backend: Backend, *numbers: int, key: MemoryKey = KEY, settings: Any = LAST_TURNS) -> None:
    memory = backend.memory(key, settings)
    for number in numbers:
        await memory.add_turn(turn(number))


def session(name: object) -> MemoryKey:
    return MemoryKey("acme", "u1", str(name))


# The promises that a mutant breaks


async def a_refused_turn_is_not_written(processes: Processes) -> None:
    backend, driver = await processes.start(conversation_turns=3)
    await add(backend, 0, 1, 2)
    await settled(backend)
    before, done = await processes.stored(), len(driver.calls)
    with pytest.raises(LimitReached) as refused:
        await add(backend, 3)
    assert (refused.value.limit, refused.value.most, refused.value.given) == ("conversation_turns", 3, 4)
    assert await processes.stored() == before
    assert driver.calls[done:] == [("load", "memory")]


async def one_process_never_exceeds_a_limit(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_turns=3)
    for number in range(6):
        await refused_or_done(add(backend, number))
    assert len((await processes.stored()).tail) == 3


async def concurrent_turns_count_each_other(processes: Processes) -> None:
    backend, driver = await processes.start(conversation_turns=3)
    await add(backend, 0)
    release = asyncio.Event()

    async def wait(key: object) -> None:
        del key
        await release.wait()

    driver.before["append"] = [wait] * 5
    adding = [asyncio.ensure_future(refused_or_done(add(backend, n))) for n in range(1, 6)]
    await until(lambda: sum(one.done() for one in adding) == 3)
    release.set()
    assert sum(await asyncio.gather(*adding)) == 2
    assert len((await processes.stored()).tail) == 3


async def an_expired_conversation_does_not_count(processes: Processes) -> None:
    backend, _ = await processes.start(user_conversations=2)
    expiring = config("truncation", session_ttl_s=60.0)
    for _ in range(4):
        for name in ("a", "b"):
            await add(backend, 0, key=session(f"{name} {processes.now}"), settings=expiring)
        assert not await refused_or_done(add(backend, 0, key=session("c"), settings=expiring))
        processes.now += 61.0


async def what_others_removed_is_not_counted(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_turns=3)
    other, _ = await processes.start(conversation_turns=3)
    await add(backend, 0, 1, 2)
    record = await processes.stored()
    await other.driver.replace(RECORD, _body(), version="v2", expect=record.version, drop=2, ttl=None)
    await add(backend, 3, 4)
    assert len((await processes.stored()).tail) == 3


async def a_conversation_created_again_is_counted(processes: Processes) -> None:
    backend, _ = await processes.start(user_conversations=2)
    expiring = config("truncation", session_ttl_s=60.0)
    for start in range(0, 6, 2):
        for number in (start, start + 1):
            await add(backend, 0, key=session(number), settings=expiring)
        processes.now += 61.0
    done = [await refused_or_done(add(backend, 1, key=session(n), settings=expiring)) for n in range(6)]
    assert done == [True, True, False, False, False, False]


async def no_further_round_trip_is_taken(processes: Processes) -> None:
    backend, driver = await processes.start(
        turn_characters=100, conversation_turns=50, conversation_bytes=10_000, user_conversations=5
    )
    await add(backend, 0)
    await settled(backend)
    driver.calls.clear()
    await add(backend, *range(1, 10))
    assert driver.calls == [("append", "memory")] * 9


CHECKS: dict[str, Callable[[Processes], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        a_refused_turn_is_not_written,
        one_process_never_exceeds_a_limit,
        concurrent_turns_count_each_other,
        an_expired_conversation_does_not_count,
        what_others_removed_is_not_counted,
        a_conversation_created_again_is_counted,
        no_further_round_trip_is_taken,
    )
}


def _body() -> bytes:
    return b'stm/1 body\n{"summary":"short"}'


async def refused_or_done(work: Awaitable[None]) -> bool:
    """Return whether it was done; a refusal is not an error here."""
    try:
        await work
    except LimitReached:
        return False
    return True


async def settled(backend: Backend) -> None:
    """Wait for the background, which lists the user again after a creation."""
    memory = backend.memory(KEY, LAST_TURNS)
    await until(lambda: not memory.busy)


@pytest.mark.parametrize("name", CHECKS)
async def test_a_promise_about_limits_is_kept(name: str, processes: Processes) -> None:
    await CHECKS[name](processes)


@pytest.mark.parametrize("kind", LIMITS, ids=lambda kind: kind.__name__)
async def test_a_mutant_of_the_limits_is_rejected(kind: type[LimitedDriver]) -> None:
    processes = Processes(kind)
    with pytest.raises((AssertionError, pytest.fail.Exception, LimitReached, TimeoutError)):
        async with asyncio.timeout(20):
            await CHECKS[LIMITS[kind]](processes)
    await processes.close()


# What an error says


async def test_a_refusal_says_which_limit_and_never_whose(processes: Processes) -> None:
    backend, _ = await processes.start(turn_characters=1_000)
    secret = MemoryKey("tenant-canary", "user-canary", "session-canary")
    with pytest.raises(LimitReached) as refused:
        await backend.memory(secret, LAST_TURNS).add_turn(ConversationTurn("text-canary" * 99, "fine"))
    error = refused.value
    assert str(error) == "memory.add_turn: turn_characters is 1,000, and this would be 1,093"
    assert isinstance(error, StorageError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    assert (str(again), again.limit, again.most, again.given) == (str(error), "turn_characters", 1_000, 1_093)
    assert "canary" not in repr(error)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_a_limit_is_a_count_or_none(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="conversation_turns must be an integer of at least 1"):
        Limits(conversation_turns=value)
    with pytest.raises(ConfigurationError, match="limits is a Limits, not dict"):
        Backend(MemoryDriver(MemoryStore()), limits={"conversation_turns": value})  # pyright: ignore[reportArgumentType] -- the mistake in question


def test_limits_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Limits().conversation_turns = 9  # pyright: ignore[reportAttributeAccessIssue] -- the mistake in question


async def test_every_refusal_is_observed_once(processes: Processes) -> None:
    backend, _ = await processes.start(
        turn_characters=50, conversation_turns=1, conversation_bytes=400, user_conversations=1, state_bytes=60
    )
    await add(backend, 0)
    log, store, whose = backend.item_log(KEY, "langchain"), backend.state_store, Subject("acme", "u1", "chat")
    await log.add([{"n": 1}])
    await store.save_memory_state(session("state").composite(), {})
    refusals: list[tuple[Awaitable[Any], Subject, str]] = [
        (add(backend, 1), whose, "conversation_turns"),
        (backend.memory(KEY, LAST_TURNS).add_turn(ConversationTurn("x" * 51, "")), whose, "turn_characters"),
        (log.add([{"n": "x" * 60}]), whose, "turn_characters"),
        (log.add([{"n": "x" * 20}] * 20), whose, "conversation_bytes"),
        (add(backend, 1, key=session("other")), Subject("acme", "u1", "other"), "user_conversations"),
        (
            backend.item_log(session("other"), "langchain").add([{}]),
            Subject("acme", "u1", "other"),
            "user_conversations",
        ),
        (store.save_memory_state(KEY.composite(), {}), Subject("acme", "u1"), "user_conversations"),
        (store.save_if(KEY.composite(), {}, expect=None), Subject("acme", "u1"), "user_conversations"),
        (store.save_memory_state("any", {"x": "x" * 60}), Subject(), "state_bytes"),
        (store.save_planner_state("token", {"x": "x" * 60}), Subject(), "state_bytes"),
    ]
    for work, subject, limit in refusals:
        processes.observer.refused.clear()
        with pytest.raises(LimitReached) as refused:
            await work
        assert refused.value.limit == limit
        assert processes.observer.refused == [(subject, limit)]


# Turns


async def test_all_that_a_turn_holds_counts_as_its_characters(processes: Processes) -> None:
    digest = TrajectoryDigest(["tool"], "observed")
    full = ConversationTurn("ä\n", "b", digest, {"k": [1]}, ["ref"])
    plain = ConversationTurn("ä\n", "b")
    assert characters_of(plain) == 3
    extras = '{"tools_invoked":["tool"],"observations_summary":"observed","reasoning_summary":null,'
    extras += '"artifacts_refs":[]}{"k":[1]}["ref"]'
    assert characters_of(full) == 3 + len(extras)
    backend, driver = await processes.start(turn_characters=3)
    memory = backend.memory(KEY, LAST_TURNS)
    await memory.add_turn(plain)
    driver.calls.clear()
    for turn_ in (full, ConversationTurn("aaa", "b")):
        with pytest.raises(LimitReached):
            await memory.add_turn(turn_)
    assert driver.calls == []


async def test_a_router_refuses_a_turn_when_it_is_added(processes: Processes) -> None:
    backend, _ = await processes.start(turn_characters=20)
    router: MemoryRouter = backend.router(LAST_TURNS)
    await router.hydrate(None, KEY)
    await router.hydrate(None, session("nested"))
    with pytest.raises(LimitReached):
        await router.add_turn(ConversationTurn("x" * 21, ""))
    assert len(processes.observer.refused) == 1


async def test_a_first_turn_that_is_too_large_lists_nobody(processes: Processes) -> None:
    backend, driver = await processes.start(conversation_bytes=50)
    for work in (add(backend, 0), backend.item_log(KEY, "langchain").add([{"n": "x" * 50}])):
        with pytest.raises(LimitReached):
            await work
    assert driver.calls == []


async def test_a_turn_added_twice_is_not_refused(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_turns=1)
    memory = backend.memory(KEY, LAST_TURNS)
    await memory.add_turn(turn(0), turn_id="t")
    await memory.add_turn(turn(0), turn_id="t")
    elsewhere, _ = await processes.start(conversation_turns=1)
    await elsewhere.memory(KEY, LAST_TURNS).get_llm_context()
    await elsewhere.memory(KEY, LAST_TURNS).add_turn(turn(0), turn_id="t")
    assert len((await processes.stored()).tail) == 1


async def test_a_retry_of_a_turn_that_was_stored_is_not_refused(processes: Processes) -> None:
    backend, driver = await processes.start(conversation_turns=2)
    await add(backend, 0)

    async def lose(key: object) -> None:
        del key
        raise OutcomeUnknown("the answer was lost")

    driver.after["append"] = [lose]
    await add(backend, 1)
    assert len(await backend.memory(KEY, LAST_TURNS).turns()) == 2


async def test_summaries_make_room_and_are_never_refused(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_turns=4, conversation_bytes=2_000)
    memory = backend.memory(KEY, config(zone=2), summarizer=LedgerSummarizer())
    for number in range(20):
        await memory.add_turn(turn(number))
        await memory.flush()
    assert memory.stats.folded == 18
    assert processes.observer.refused == []


# Bytes


async def test_bytes_count_the_summary_and_what_others_added(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_bytes=1_000)
    other, _ = await processes.start()
    await add(other, *range(4))
    record = await processes.stored()
    body = b'stm/1 body\n{"summary":"%s"}' % (b"x" * 500)
    await other.driver.replace(RECORD, body, version="v2", expect=record.version, ttl=None)
    done = [await refused_or_done(add(backend, number)) for number in range(10)]
    size = sum(map(len, (await processes.stored()).tail)) + len(body)
    entry = len(record.tail[0])
    assert 1_000 - entry < size <= 1_000
    assert sorted(done, reverse=True) == done


async def test_every_log_of_a_conversation_has_the_bytes_of_one(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_bytes=600)
    log = backend.item_log(KEY, "openai-agents")
    added = 0
    while await refused_or_done(log.add([{"n": "x" * 50}])):
        added += 1
    assert 3 <= added <= 10
    # A full log can be read and emptied.
    assert len(await log.items()) == added
    for _ in range(added):
        assert await log.pop() == {"n": "x" * 50}
    assert await log.items() == []
    await log.clear()
    await log.add([{"n": "x" * 50}])
    await backend.item_log(KEY, "langchain").add([{"n": "x" * 50}])


# Conversations of a user


async def test_a_creation_takes_one_scan_and_anything_else_none(processes: Processes) -> None:
    backend, driver = await processes.start(user_conversations=3)
    memory = backend.memory(KEY, LAST_TURNS)
    await memory.get_llm_context()
    await memory.add_turn(turn(0))
    await memory.get_llm_context()
    await memory.add_turn(turn(1))
    assert (driver.count("scan"), driver.count("load"), driver.count("append")) == (1, 2, 2)


async def test_a_user_can_create_no_more_than_the_limit(processes: Processes) -> None:
    backend, _ = await processes.start(user_conversations=3)
    done = await asyncio.gather(*(refused_or_done(add(backend, 0, key=session(n))) for n in range(10)))
    assert sum(done) == 3
    assert len([key async for key in backend.sessions.list("acme", "u1")]) == 3
    # Another user has room, and so has an existing conversation.
    await add(backend, 0, key=MemoryKey("acme", "u2", "chat"))
    await add(backend, 1, key=session([*done].index(True)))
    # What is erased makes room.
    await backend.sessions.erase(session([*done].index(True)))
    await add(backend, 0, key=session("another"))


async def test_a_lowered_limit_keeps_what_exists(processes: Processes) -> None:
    backend, _ = await processes.start(user_conversations=9)
    for number in range(9):
        await add(backend, 0, key=session(number))
    lower, _ = await processes.start(user_conversations=2)
    await add(lower, 1, key=session(8))
    assert not await refused_or_done(add(lower, 0, key=session(9)))


async def test_two_processes_exceed_a_users_limit_by_one_at_most(processes: Processes) -> None:
    first, driver = await processes.start(user_conversations=3)
    second, _ = await processes.start(user_conversations=3)
    await add(first, 0, key=session(0))
    await add(first, 0, key=session(1))

    async def meanwhile(key: object) -> None:
        del key
        await add(second, 0, key=session("second"))

    driver.before["append"] = [meanwhile]
    await add(first, 0, key=session("first"))
    for backend in (first, second):
        assert not await refused_or_done(add(backend, 0, key=session("more")))
    assert len([key async for key in first.sessions.list("acme", "u1")]) == 4


# Several processes


async def test_another_process_exceeds_the_turns_by_what_it_has_in_flight(processes: Processes) -> None:
    first, _ = await processes.start(conversation_turns=10)
    second, _ = await processes.start(conversation_turns=10)
    await second.memory(KEY, LAST_TURNS).get_llm_context()
    await add(first, *range(10))
    # The first answer says how long the conversation is.
    await add(second, 0)
    assert not await refused_or_done(add(second, 1))
    assert not await refused_or_done(add(first, 1))
    assert len((await processes.stored()).tail) == 11


WORKER = """
import asyncio, sys
from stm_backends import LimitReached, Limits, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends import ConversationTurn, MemoryBudget

async def main():
    limits = Limits(conversation_turns=30, user_conversations=5)
    config = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=100))
    async with open_backend(sys.argv[1], limits=limits) as backend:
        memory = backend.memory(MemoryKey("acme", "u1", "chat"), config)
        await memory.get_llm_context()
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(40):
            try:
                await memory.add_turn(ConversationTurn(f"{sys.argv[2]} {number}", "fine"))
            except LimitReached:
                pass
        for number in range(10):
            key = MemoryKey("acme", "u1", f"{sys.argv[2]} {number}")
            try:
                await backend.memory(key, config).add_turn(ConversationTurn("hello", "fine"))
            except LimitReached:
                pass

asyncio.run(main())
"""


async def test_processes_exceed_a_limit_by_one_turn_each_at_most(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    workers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WORKER, url, str(number)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for number in range(2)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
    assert [await worker.wait() for worker in workers] == [0, 0]
    with sync.open_backend(url) as backend:
        stored = backend.memory(KEY, LAST_TURNS).turns()
        sessions = backend.asynchronous.sessions

        async def count() -> int:
            return len([key async for key in sessions.list("acme", "u1")])

        assert 30 <= len(stored) <= 31
        assert 5 <= backend.run(count()) <= 6


# What else writes


async def exported(turns: int, name: str = "chat") -> dict[str, Any]:
    async with Backend(MemoryDriver(MemoryStore())) as backend:
        await add(backend, *range(turns), key=session(name))
        return await backend.sessions.export(session(name))


async def test_an_import_beyond_a_limit_writes_nothing(processes: Processes) -> None:
    document = await exported(4)
    for limits in ({"conversation_turns": 3}, {"conversation_bytes": 300}, {"turn_characters": 5}):
        backend, driver = await processes.start(**limits)
        with pytest.raises(LimitReached) as refused:
            await backend.sessions.import_(document)
        assert refused.value.operation == "import"
        assert driver.calls == []
    backend, _ = await processes.start(conversation_turns=4, user_conversations=1)
    await backend.sessions.import_(document)
    with pytest.raises(LimitReached):
        await backend.sessions.import_(await exported(1, "another"))
    with pytest.raises(LimitReached):
        await backend.sessions.copy(KEY, backend.sessions, under=session("copy"))
    assert [key async for key in backend.sessions.list("acme", "u1")] == [KEY]
    assert {limit for _, limit in processes.observer.refused} == {
        "conversation_turns",
        "conversation_bytes",
        "turn_characters",
        "user_conversations",
    }


async def test_a_merge_ends_at_the_limit(processes: Processes) -> None:
    backend, _ = await processes.start(conversation_turns=5)
    await add(backend, 10, 11, 12)
    with pytest.raises(LimitReached):
        await backend.sessions.import_(await exported(4), on_conflict="merge")
    assert len((await processes.stored()).tail) == 5


async def test_a_local_memory_is_limited_where_it_is_saved(processes: Processes) -> None:
    backend, driver = await processes.start(state_bytes=1_000, user_conversations=1)
    memory = DefaultShortTermMemory(config=LAST_TURNS)
    await memory.persist(backend.state_store, KEY)
    await memory.add_turn(turn(0))
    driver.calls.clear()
    await memory.add_turn(ConversationTurn("x" * 1_000, ""))
    with pytest.raises(LimitReached) as refused:
        await memory.persist(backend.state_store, KEY)
    assert (refused.value.limit, refused.value.operation) == ("state_bytes", "save")
    assert ("replace", "blob") not in driver.calls
    other = DefaultShortTermMemory(config=LAST_TURNS)
    with pytest.raises(LimitReached, match="user_conversations"):
        await other.persist(backend.state_store, session("other"))
    # Values of a user that are not conversations are not counted.
    await backend.state_store.save_memory_state("kv:v1:acme:u1:settings", {})


# What a process knows


async def test_a_process_that_knows_nothing_of_a_conversation_loads_it_once(processes: Processes) -> None:
    first, _ = await processes.start(conversation_turns=9)
    await add(first, 0)
    second, driver = await processes.start(conversation_turns=9)
    await add(second, 1, 2)
    assert (driver.count("load"), driver.count("append")) == (1, 2)


async def test_what_is_known_is_bounded(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "REMEMBERED", 2)
    backend, driver = await processes.start(conversation_turns=9)
    for number in (0, 1, 2, 0):
        await add(backend, 0, key=session(number))
    assert driver.count("load") == 4


async def test_a_load_during_an_append_counts_the_turn_once(processes: Processes) -> None:
    backend, driver = await processes.start(conversation_turns=3)
    memory = backend.memory(KEY, LAST_TURNS)
    await memory.add_turn(turn(0))

    async def load(key: object) -> None:
        del key
        await memory.turns()

    async def append(key: object) -> None:
        del key
        await add(backend, 2)

    # The load sees the turn before the append is answered.
    driver.after["append"] = [load]
    await memory.add_turn(turn(1))
    # The append is answered before the load, which has not seen it.
    driver.after["load"] = [append]
    await memory.turns()
    assert not await refused_or_done(add(backend, 3))
    assert len((await processes.stored()).tail) == 3


async def test_an_erased_conversation_is_counted_when_it_is_created_again(processes: Processes) -> None:
    backend, _ = await processes.start(user_conversations=1)
    await add(backend, 0)
    await backend.sessions.erase(KEY)
    await add(backend, 0, key=session("another"))
    assert not await refused_or_done(add(backend, 1))
    await backend.driver.replace(
        keys.memory_key(session("another")), _body(), version="v", expect=ANY, ttl=None
    )


async def test_turns_of_one_size_added_during_a_fold_all_count() -> None:
    inner = MemoryDriver()
    driver = LimitedDriver(inner, Guard(Limits(conversation_turns=2)))
    await driver.open()

    async def append(entry: bytes) -> bool:
        try:
            await driver.append(RECORD, entry, initial_version="v", ttl=None)
        except LimitReached:
            return False
        return True

    assert await append(b"a")
    assert await append(b"b")

    class Late(WrapperDriver):
        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            done = await self.inner.replace(key, body, **options)
            # Refused only if the turns that the fold has dropped still count; the load then shows the truth.
            assert await append(b"c")
            return done

    driver.inner = Late(inner)
    assert await driver.replace(RECORD, b"body", version="w", expect="v", drop=2, ttl=None)
    assert sum(await asyncio.gather(append(b"d"), append(b"e"))) == 1


async def test_a_turn_with_an_unknown_outcome_counts_for_calls_in_progress() -> None:
    inner = MemoryDriver()
    await inner.open()
    asked, go = asyncio.Event(), asyncio.Event()

    class Late(WrapperDriver):
        async def load(self, key: Key) -> Record | None:
            record = await self.inner.load(key)
            if record is not None:
                asked.set()
                await go.wait()
            return record

        async def append(self, key: Key, entry: bytes, **options: Any) -> int:
            length = await self.inner.append(key, entry, **options)
            if entry == b"lost":
                raise OutcomeUnknown("the connection was lost")
            return length

    driver = LimitedDriver(Late(inner), Guard(Limits(conversation_turns=2)))
    await driver.append(RECORD, b"first", initial_version="v", ttl=None)
    # Its answer is older than the turn below.
    loading = asyncio.create_task(driver.load(RECORD))
    await asked.wait()
    with pytest.raises(OutcomeUnknown):
        await driver.append(RECORD, b"lost", initial_version="v", ttl=None)
    go.set()
    await loading
    with pytest.raises(LimitReached):
        await driver.append(RECORD, b"third", initial_version="v", ttl=None)


async def test_the_limits_of_a_record_are_those_of_the_datastore() -> None:
    for limits in (None, Limits(conversation_turns=5)):
        driver = MemoryDriver(max_entry_bytes=5_000, max_record_bytes=50_000)
        backend = Backend(driver, limits=limits)
        assert backend.record_traits == driver.traits
        assert backend.traits.max_entry > backend.record_traits.max_entry
