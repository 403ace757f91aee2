"""Strands Agents: agents that keep a session on another loop, two writers, hostile keys, outages."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool
from strands.models import Model
from strands.multiagent import GraphBuilder
from strands.session import RepositorySessionManager, SnapshotSessionManager
from strands.storage import InMemoryStorage, Storage
from strands.types.exceptions import SessionException
from strands.types.exceptions import StorageError as StrandsStorageError
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from stm_backends import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryKey,
    TooLarge,
    Unavailable,
    open_backend,
    sync,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.integrations.strands import StmSessionRepository, StmStorage
from tests.support.sealed import SEALING

KEY = MemoryKey("acme", "u1", "chat")


class Held(WrapperDriver):
    """Holds the next write until it is let go; counts operations."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.hold = False
        self.reached = threading.Event()
        self.go = threading.Event()
        self.done = 0

    async def call(self, operation: Operation, key: Any, send: Callable[[], Any]) -> Any:
        self.done += 1
        if self.hold and operation in ("append", "replace"):
            self.hold = False
            self.reached.set()
            await asyncio.to_thread(self.go.wait, 30)
        return await send()


class Scripted(Model):
    """Gives its answers in order, and remembers what it was asked."""

    def __init__(self, *answers: str | dict[str, Any]) -> None:
        self._answers = list(answers)
        self.asked: list[list[str]] = []

    def update_config(self, **model_config: Any) -> None: ...

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.asked.append(texts(messages))
        answer = self._answers.pop(0)
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(answer, str):
            yield {"contentBlockDelta": {"delta": {"text": answer}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn"}}
            return
        yield {"contentBlockStart": {"start": {"toolUse": {"name": answer["name"], "toolUseId": "c1"}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": answer["input"]}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


def texts(messages: Sequence[Any]) -> list[str]:
    return [content["text"] for message in messages for content in message["content"] if "text" in content]


URLS = {"memory": "memory://", "sqlite": "sqlite:///{}/stm.db"}


@pytest.fixture(params=URLS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sync.Backend]:
    with sync.open_backend(URLS[request.param].format(tmp_path)) as backend:
        yield backend


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[sync.Backend, sync.Backend]]:
    url = f"sqlite:///{tmp_path}/shared.db"
    with sync.open_backend(url) as one, sync.open_backend(url) as other:
        yield one, other


def storage_of(backend: sync.Backend, tenant: str = "acme", user: str = "u1", **options: Any) -> StmStorage:
    return StmStorage(backend.asynchronous, tenant, user, run=backend.run, **options)


def sessions_of(backend: sync.Backend, tenant: str = "acme", user: str = "u1") -> StmSessionRepository:
    return StmSessionRepository(backend.asynchronous, tenant, user, run=backend.run)


def in_snapshots(backend: sync.Backend, session: str = "chat") -> Any:
    return SnapshotSessionManager(session, storage=storage_of(backend))


def in_messages(backend: sync.Backend, session: str = "chat") -> Any:
    return RepositorySessionManager(session, sessions_of(backend))


def agent(model: Model, manager: Any, **options: Any) -> Agent:
    return Agent(model=model, session_manager=manager, callback_handler=None, agent_id="a1", **options)


EITHER = pytest.mark.parametrize("manager", [in_snapshots, in_messages])


# Agents


@EITHER
def test_an_agent_knows_on_another_machine_what_was_said(
    pods: tuple[sync.Backend, sync.Backend], manager: Any
) -> None:
    model = Scripted("Noted.", "Teal.")
    for backend, said in zip(pods, ("It is teal.", "What is it?"), strict=True):
        kept = manager(backend)
        one = agent(model, kept)
        one(said)
        one.state.set("said", said)
        kept.sync_agent(one)
    assert model.asked[1] == ["It is teal.", "Noted.", "What is it?"]
    restored = agent(Scripted(), manager(pods[0]))
    assert texts(restored.messages) == ["It is teal.", "Noted.", "What is it?", "Teal."]
    assert restored.state.get("said") == "What is it?"


@EITHER
async def test_an_agent_may_be_made_and_run_on_an_event_loop(backend: sync.Backend, manager: Any) -> None:
    model = Scripted("one", "two", "three", "four")
    # Its making blocks this loop, and reads what is stored.
    for said in ("a", "b"):
        await agent(model, manager(backend)).invoke_async(said)
    assert model.asked[1] == ["a", "one", "b"]
    # Other agents of the same loop meanwhile.
    agents = [agent(model, manager(backend, f"chat{number}")) for number in range(2)]
    await asyncio.gather(*(one.invoke_async("c") for one in agents))
    for number in range(2):
        assert len(agent(model, manager(backend, f"chat{number}")).messages) == 2


@EITHER
def test_calls_of_tools_are_part_of_the_session(backend: sync.Backend, manager: Any) -> None:
    @tool
    def stock(item: str) -> str:
        """Say how many there are."""
        return f"3 {item}"

    model = Scripted({"name": "stock", "input": '{"item": "teas"}'}, "Three.", "Still three.")
    agent(model, manager(backend), tools=[stock])("How many?")
    restored = agent(model, manager(backend), tools=[stock])
    kinds = [next(iter(message["content"][0])) for message in restored.messages]
    assert kinds == ["text", "toolUse", "toolResult", "text"]
    restored("And now?")
    assert model.asked[-1][-1] == "And now?"


@EITHER
def test_what_a_guardrail_redacts_is_not_stored_any_more(tmp_path: Path, manager: Any) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        kept = manager(backend)
        one = agent(Scripted("SECRET? Noted."), kept)
        one("Hello")
        one.messages[-1]["content"] = [{"text": "[redacted]"}]
        kept.redact_latest_message(one.messages[-1], one)
        assert texts(agent(Scripted(), manager(backend)).messages)[-1] == "[redacted]"
        log = backend.asynchronous.item_log(MemoryKey("acme", "u1", "chat/a1"), "strands")

        async def stored() -> str:
            storage = storage_of(backend)
            return str([await storage.read(key) for key in await storage.list()])

        assert "SECRET" not in f"{asyncio.run(stored())} {backend.run(log.items())}"


@EITHER
def test_bytes_of_images_come_back(backend: sync.Backend, manager: Any) -> None:
    image = {"image": {"format": "png", "source": {"bytes": b"\0\xff"}}}
    agent(Scripted("Nice."), manager(backend))([{"text": "Look."}, image])  # pyright: ignore[reportArgumentType]
    restored: Any = agent(Scripted(), manager(backend)).messages
    assert restored[0]["content"][1] == image


@EITHER
def test_a_graph_goes_on_where_it_was(backend: sync.Backend, manager: Any) -> None:
    def graph(model: Model) -> Any:
        builder = GraphBuilder()
        builder.add_node(Agent(model=model, callback_handler=None, agent_id="n1"), "n1")
        builder.set_graph_id("g1").set_max_node_executions(10)
        builder.set_session_manager(manager(backend))
        return builder.build()

    graph(Scripted("done"))("go")
    again = graph(Scripted("done again"))
    again("go")
    assert again.state.execution_count in (1, 2)
    assert manager is in_snapshots or sessions_of(backend).read_multi_agent("chat", "g1") is not None


async def test_a_backend_of_another_loop_without_run_is_not_waited_for_in_vain() -> None:
    async with open_backend("memory://") as backend:
        loop = asyncio.get_running_loop()

        def run(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(30)

        # On the loop of the program, as long as that is not blocked.
        storage = StmStorage(backend, "acme", "u1", run=run)
        await storage.write("a", b"1")
        assert await storage.read("a") == b"1"


# Two who speak in one session


def test_two_processes_that_speak_in_a_session_lose_no_message(
    pods: tuple[sync.Backend, sync.Backend],
) -> None:
    agents = [
        agent(Scripted(*(f"{name}{n}!" for n in range(5))), in_messages(pod))
        for name, pod in zip("ab", pods, strict=True)
    ]

    def speak(number: int) -> None:
        for turn in range(5):
            agents[number](f"{'ab'[number]}{turn}")

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(speak, number) for number in range(2)]:
            done.result(60)
    found = texts(agent(Scripted(), in_messages(pods[0])).messages)
    assert len(found) == 20
    for name in "ab":
        own = [text for text in found if text.startswith(name)]
        assert own == [f"{name}{turn}{end}" for turn in range(5) for end in ("", "!")]


def test_a_message_is_replaced_although_another_was_added_meanwhile(
    pods: tuple[sync.Backend, sync.Backend],
) -> None:
    one, other = map(sessions_of, pods)
    messages = [message(number, str(number)) for number in range(3)]
    for each in messages:
        one.create_message("chat", "a1", each)
    with ThreadPoolExecutor() as threads:
        changed = [
            threads.submit(
                one.update_message, "chat", "a1", message(1, "changed", at=messages[1].created_at)
            ),
            *(
                threads.submit(other.create_message, "chat", "a1", message(3 + n, f"new{n}"))
                for n in range(5)
            ),
        ]
        for done in changed:
            done.result(60)
    found = texts([each.to_message() for each in one.list_messages("chat", "a1")])
    assert found[:3] == ["0", "changed", "2"]
    assert sorted(found[3:]) == [f"new{n}" for n in range(5)]


# Messages


def message(number: int, text: str, *, at: str = "") -> SessionMessage:
    given = SessionMessage.from_message({"role": "user", "content": [{"text": text}]}, number)
    given.created_at = at or f"2030-01-01T00:00:00.{number:06}+00:00"
    return given


def test_a_message_is_one_round_trip_however_long_the_session_is() -> None:
    driver = Held(plugins.open_driver("memory://"))
    with sync.Backend(Backend(driver)) as backend:
        sessions = sessions_of(backend)
        for number in range(65):
            sessions.create_message("chat", "a1", message(number, "x"))
        driver.done = 0
        sessions.create_message("chat", "a1", message(65, "x"))
        assert driver.done == 1


def test_messages_are_listed_in_pages_found_and_added_once(backend: sync.Backend) -> None:
    sessions = sessions_of(backend)
    messages = [message(number, str(number)) for number in range(200)]
    for each in (*messages, messages[3], messages[199]):
        sessions.create_message("chat", "a1", each)
    assert sessions.list_messages("chat", "a1") == messages
    assert sessions.list_messages("chat", "a1", limit=3, offset=10) == messages[10:13]
    assert sessions.list_messages("chat", "a1", offset=198) == messages[198:]
    assert sessions.read_message("chat", "a1", 7) == messages[7]
    assert sessions.read_message("chat", "a1", 200) is None
    assert sessions.list_messages("chat", "other") == []


def test_a_repository_keeps_sessions_agents_and_says_what_is_not_there(backend: sync.Backend) -> None:
    sessions = sessions_of(backend)
    assert sessions.read_session("chat") is None
    session = Session(session_id="chat", session_type=SessionType.AGENT)
    assert sessions.create_session(session) == session
    assert sessions.read_session("chat") == session
    with pytest.raises(SessionException, match="already exists"):
        sessions.create_session(session)
    state = SessionAgent("a1", {"n": 1}, {"removed": 2}, {"bytes": b"\0"}, created_at="then")
    assert sessions.read_agent("chat", "a1") is None
    with pytest.raises(SessionException, match="no agent"):
        sessions.update_agent("chat", state)
    sessions.create_agent("chat", state)
    assert sessions.read_agent("chat", "a1") == state
    sessions.update_agent("chat", SessionAgent("a1", {"n": 2}, {}, created_at="now"))
    found = sessions.read_agent("chat", "a1")
    assert found is not None
    assert (found.state, found.created_at) == ({"n": 2}, "then")
    with pytest.raises(SessionException, match="no message"):
        sessions.update_message("chat", "a1", message(0, "x"))


def test_a_session_is_deleted_with_all_its_agents_and_no_other(backend: sync.Backend) -> None:
    sessions = sessions_of(backend)
    for session_id in ("chat", "chat2"):
        manager = RepositorySessionManager(session_id, sessions)
        for agent_id in ("default", "a:b %"):
            one = Agent(
                model=Scripted("Yes."), session_manager=manager, agent_id=agent_id, callback_handler=None
            )
            one("Hello")
    sessions.delete_session("chat")
    assert sessions.read_session("chat") is None
    for agent_id in ("default", "a:b %"):
        assert sessions.read_agent("chat", agent_id) is None
        assert sessions.list_messages("chat", agent_id) == []
        assert len(sessions.list_messages("chat2", agent_id)) == 2
    with pytest.raises(SessionException, match="no session"):
        sessions.delete_session("chat")


@pytest.mark.parametrize("bad", ["", " ", "a/b", None, 5])
def test_ids_that_could_be_anothers_are_refused(backend: sync.Backend, bad: Any) -> None:
    sessions = sessions_of(backend)
    with pytest.raises(InvalidKey):
        sessions.read_session(bad)
    with pytest.raises(InvalidKey):
        sessions.create_message(bad, "a1", message(0, "x"))
    with pytest.raises(InvalidKey):
        sessions.create_message("chat", bad, message(0, "x"))


def test_what_is_no_message_is_corrupt(backend: sync.Backend) -> None:
    log = backend.asynchronous.item_log(MemoryKey("acme", "u1", "chat/a1"), "strands")
    backend.run(log.add([{"role": "user", "content": "secret"}]))
    with pytest.raises(Corrupt, match="not one that Strands knows") as raised:
        sessions_of(backend).list_messages("chat", "a1")
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_not_json_is_refused_by_its_path(backend: sync.Backend) -> None:
    bad: Any = message(0, "x")
    bad.message["content"] = [{"text": object()}]
    with pytest.raises(InvalidState, match=r"message\.content\[0\]\.text is object"):
        sessions_of(backend).create_message("chat", "a1", bad)


# The storage


async def test_it_is_a_storage_of_bytes(backend: sync.Backend) -> None:
    storage = storage_of(backend)
    assert isinstance(storage, Storage)
    assert await storage.read("a") is None
    await storage.delete("a")
    for data in (b"", b"\0\xff" * 1_000, "é".encode(), bytearray(b"x"), memoryview(b"y")):
        await storage.write("a", data)  # pyright: ignore[reportArgumentType]
        assert await storage.read("a") == bytes(data)
    await storage.delete("a")
    assert await storage.read("a") is None
    for data in ("text", None, 5):
        given: Any = data
        with pytest.raises(InvalidState, match="data must be bytes"):
            await storage.write("a", given)


async def test_it_keeps_what_the_own_storage_of_strands_keeps(backend: sync.Backend) -> None:
    chosen = random.Random(29)
    parts = ["a", "b", "ab", "a:b", "%", "%3A", "é", "*", "a b", ".", "..."]
    ours: Any = storage_of(backend)
    own: Any = InMemoryStorage()
    views = [(ours, own), (ours.namespace("a"), own.namespace("a"))]
    views.append((views[1][0].namespace("//b/"), views[1][1].namespace("//b/")))
    for _ in range(150):
        key = "/".join(chosen.choices([*parts, ""], k=chosen.randrange(1, 4)))
        one, other = chosen.choice(views)
        step = chosen.random()
        for each in (one, other):
            try:
                await (each.write(key, key.encode()) if step < 0.7 else each.delete(key))
            except StrandsStorageError:
                assert not key.strip("/")
        one, other = chosen.choice(views)
        query = chosen.choice(["", "a", "a/", "/a//", "a:", "%", key])
        assert await one.list(query) == await other.list(query)
        if key.strip("/"):
            assert await one.read(key) == await other.read(key)


async def test_a_search_finds_what_has_the_words_and_nothing_of_others(backend: sync.Backend) -> None:
    storage = storage_of(backend)
    await storage.namespace("memory").write("bike.md", b"The customer wants a red bike")
    await storage.namespace("memory").write("tea.md", b"Tea at noon")
    await storage_of(backend, user="u2").write("bike.md", b"A blue bike")
    (found,) = await storage.namespace("memory").search("which bike?")
    assert (found.key, found.data) == ("bike.md", b"The customer wants a red bike")


@pytest.mark.parametrize("key", ["", "/", "..", "a/../b", "a\\b"])
async def test_keys_that_are_no_paths_are_refused(backend: sync.Backend, key: str) -> None:
    storage = storage_of(backend)
    for work in (storage.write(key, b"1"), storage.read(key), storage.delete(key)):
        with pytest.raises(StrandsStorageError):
            await work
    with pytest.raises(StrandsStorageError):
        await storage.write("x" * 2_000, b"1")


async def test_tenants_and_users_never_meet(backend: sync.Backend) -> None:
    owners = [("acme", "u1"), ("acme", "u2"), ("globex", "u1"), ("acme:u1", "s"), ("acme", "u1:s")]
    for number, owner in enumerate(owners):
        await storage_of(backend, *owner).write("a", bytes([number]))
        sessions_of(backend, *owner).create_message("chat", "a1", message(number, "x"))
    for number, owner in enumerate(owners):
        assert await storage_of(backend, *owner).read("a") == bytes([number])
        assert await storage_of(backend, *owner).list() == ["a"]
        (found,) = sessions_of(backend, *owner).list_messages("chat", "a1")
        assert found.message_id == number


async def test_a_cancelled_write_is_done_when_the_cancellation_is_raised() -> None:
    driver = Held(plugins.open_driver("memory://"))
    backend = await asyncio.to_thread(lambda: sync.Backend(Backend(driver)).__enter__())
    try:
        storage = storage_of(backend)
        await storage.write("a", b"old")
        driver.hold = True
        task = asyncio.ensure_future(storage.write("a", b"new"))
        await asyncio.to_thread(driver.reached.wait, 30)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
        driver.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await storage.read("a") == b"new"
    finally:
        await asyncio.to_thread(backend.close)


# What everything stored here can do


def test_a_session_is_listed_exported_imported_and_erased_with_its_user(backend: sync.Backend) -> None:
    model = Scripted("Noted.")
    one = Agent(model=model, session_manager=in_messages(backend), callback_handler=None)
    one("A red bike")
    backend.run(storage_of(backend).write("notes.md", b"1"))
    inner = backend.asynchronous.sessions

    async def work() -> None:
        assert [user async for user in inner.users("acme")] == ["u1"]
        assert [each async for each in inner.logs("acme", "u1")] == [("strands", KEY)]
        lines = [line async for line in inner.export_log_lines(KEY, "strands")]
        await backend.asynchronous.item_log(KEY, "strands").clear()
        importing = inner.importing()
        assert KEY in [await importing.add(line) for line in lines]

    backend.run(work())
    assert texts(Agent(session_manager=in_messages(backend), model=model).messages) == [
        "A red bike",
        "Noted.",
    ]
    receipt = backend.run(inner.erase_with_receipt("acme", "u1"))
    assert receipt.complete
    # The session, its agent, and the note.
    assert (receipt.erased["logs"], receipt.erased["states"]) == (1, 3)
    assert sessions_of(backend).read_session("chat") is None
    assert Agent(session_manager=in_messages(backend), model=model).messages == []


def test_a_session_is_erased_as_a_conversation(backend: sync.Backend) -> None:
    Agent(model=Scripted("Noted."), session_manager=in_messages(backend), callback_handler=None)("A red bike")
    assert backend.run(backend.asynchronous.sessions.erase(KEY))
    assert sessions_of(backend).read_session("chat") is None
    assert sessions_of(backend).read_agent("chat", "default") is None
    assert sessions_of(backend).list_messages("chat", "default") == []


def test_a_list_of_conversations_shows_how_one_began(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    with sync.open_backend(url) as backend:
        Agent(model=Scripted("Noted."), session_manager=in_messages(backend), callback_handler=None)(
            "A red bike"
        )
    with sync.open_backend(url) as backend:
        (found,) = backend.conversations.list("acme", "u1").cards
        assert (found.key, found.kinds, found.preview) == (KEY, ("strands",), "Noted.")


def test_what_is_stored_is_copied_and_sealed_as_everything_is(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    with sync.open_backend(urls[0], sealing=SEALING) as backend:
        agent(Scripted("MARKER"), in_snapshots(backend))("MARKER")
        agent(Scripted("MARKER"), in_messages(backend))("MARKER")

    async def copied() -> bool:
        # As it is stored, without the keys.
        async with open_backend(urls[0]) as one, open_backend(urls[1]) as two:
            copy = Copy(one.driver, two.driver, [Owner("acme")])
            await copy.copy()
            await copy.verify()
            return copy.ok

    assert asyncio.run(copied())
    with sync.open_backend(urls[1], sealing=SEALING) as backend:
        for manager in (in_snapshots, in_messages):
            assert texts(agent(Scripted(), manager(backend)).messages) == ["MARKER", "MARKER"]
    for file in tmp_path.iterdir():
        assert b"MARKER" not in file.read_bytes()


async def test_what_has_a_time_to_live_is_forgotten_after_it(backend: sync.Backend) -> None:
    brief = storage_of(backend, ttl_s=0.2)
    await brief.write("a", b"1")
    await storage_of(backend).write("b", b"1")
    await asyncio.sleep(0.4)
    assert await brief.read("a") is None
    assert await brief.list() == ["b"]


# Outages and wrong settings


def test_an_outage_is_never_an_empty_session(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        agent(Scripted("Noted."), in_snapshots(backend))("Hello")
        agent(Scripted("Noted."), in_messages(backend))("Hello")
    with pytest.raises(Unavailable):
        in_messages(backend)
    with pytest.raises(StrandsStorageError) as raised:
        agent(Scripted(), in_snapshots(backend))
    assert isinstance(raised.value.__cause__, Unavailable)
    storage = storage_of(backend)
    for work in (storage.write("a", b"1"), storage.read("a"), storage.delete("a"), storage.list()):
        with pytest.raises(StrandsStorageError) as raised:
            asyncio.run(work)
        assert isinstance(raised.value.__cause__, Unavailable)


def test_a_value_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        sessions = sessions_of(backend)
        with pytest.raises(TooLarge):
            sessions.create_message("chat", "a1", message(0, "x" * 5_000))
        assert sessions.list_messages("chat", "a1") == []


def test_a_state_that_holds_no_bytes_is_corrupt(backend: sync.Backend) -> None:
    backend.state_store.save_memory_state("acme:u1:strands/a", {"secret": 1})
    with pytest.raises(StrandsStorageError, match="does not contain bytes") as raised:
        asyncio.run(storage_of(backend).read("a"))
    assert isinstance(raised.value.__cause__, Corrupt)
    assert "secret" not in str(raised.value)


def test_wrong_settings_are_refused(backend: sync.Backend) -> None:
    given: Any = backend
    for make in (StmStorage, StmSessionRepository):
        with pytest.raises(ConfigurationError, match="give its `asynchronous`"):
            make(given, "acme", "u1", run=backend.run)
        with pytest.raises(InvalidKey):
            make(backend.asynchronous, "acme", " ", run=backend.run)
    with pytest.raises(ConfigurationError, match="ttl_s must be a positive number"):
        storage_of(backend, ttl_s=0)


def test_calls_on_the_thread_of_the_loop_raise(backend: sync.Backend) -> None:
    async def wrong() -> object:
        return sessions_of(backend).read_session("chat")

    with pytest.raises(ConfigurationError, match="own thread"):
        backend.run(wrong())
