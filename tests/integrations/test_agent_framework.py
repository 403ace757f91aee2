"""Microsoft Agent Framework: agents and workflows that go on elsewhere, replays, races, outages."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatResponse,
    CheckpointStorage,
    Content,
    Executor,
    FunctionInvocationLayer,
    HistoryProvider,
    InMemoryCheckpointStorage,
    InMemoryHistoryProvider,
    Message,
    WorkflowBuilder,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowContext,
    handler,
    tool,
)

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryKey,
    TooLarge,
    Unavailable,
    open_backend,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.integrations.agent_framework import StmCheckpointStorage, StmHistoryProvider
from tests.support.sealed import SEALING

KEY = MemoryKey("acme", "u1", "chat")


def of_u1(session_id: str) -> MemoryKey:
    return MemoryKey("acme", "u1", session_id)


class Watched(WrapperDriver):
    """Counts operations and kinds of records. Runs `meanwhile` once before the next append or replace."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.done: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        meanwhile, writes = self.meanwhile, operation in ("append", "replace")
        if meanwhile is not None and writes:
            self.meanwhile = None
            await meanwhile()
        self.done[operation] += 1
        self.kinds[str(getattr(key, "scope", key)).rpartition(":")[2]] += 1
        return await send()


class Scripted(FunctionInvocationLayer[Any], BaseChatClient[Any]):
    """Gives its answers in order, and remembers what it was asked. One that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self._answers = list(answers)
        self.asked: list[list[str]] = []

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        assert not stream

        async def answer() -> ChatResponse:
            self.asked.append([message.text for message in messages])
            given = self._answers.pop(0)
            if isinstance(given, Exception):
                raise given
            return ChatResponse(
                messages=[given if isinstance(given, Message) else Message("assistant", [given])]
            )

        return answer()


def numbered(*numbers: int, ids: bool = False) -> list[Message]:
    return [
        Message("assistant" if number % 2 else "user", [str(number)], message_id=str(number) if ids else None)
        for number in numbers
    ]


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages]


@pytest.fixture
def history(backend: Backend) -> StmHistoryProvider:
    return StmHistoryProvider(backend, of_u1)


# Agents


async def test_an_agent_knows_on_another_machine_what_was_said(pods: tuple[Backend, Backend]) -> None:
    client = Scripted("Noted.", "Teal.")
    for backend, said in zip(pods, ("It is teal.", "What is it?"), strict=True):
        agent = Agent(client, context_providers=[StmHistoryProvider(backend, of_u1)])
        await agent.run(said, session=AgentSession(session_id="chat"))
    assert client.asked[1] == ["It is teal.", "Noted.", "What is it?"]
    found = await StmHistoryProvider(pods[0], of_u1).get_messages("chat")
    assert texts(found) == ["It is teal.", "Noted.", "What is it?", "Teal."]


async def test_calls_of_tools_are_part_of_the_history(history: StmHistoryProvider) -> None:
    @tool(approval_mode="never_require")
    def stock(item: str) -> str:
        """Say how many there are."""
        return f"3 {item}"

    call = Content.from_function_call("c1", "stock", arguments={"item": "teas"})
    client = Scripted(Message("assistant", [call]), "Three.", "Still three.")
    agent = Agent(client, context_providers=[history], tools=[stock])
    session = AgentSession(session_id="chat")
    await agent.run("How many?", session=session)
    await agent.run("And now?", session=session)
    found = await history.get_messages("chat")
    assert [message.role for message in found] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert found[2].contents[0].result == "3 teas"
    assert len(client.asked[2]) == 5


async def test_an_exchange_takes_four_round_trips_at_most() -> None:
    driver = Watched(plugins.open_driver("memory://"))
    async with Backend(driver) as backend:
        agent = Agent(Scripted(*"abcd"), context_providers=[StmHistoryProvider(backend, of_u1)])
        session = AgentSession(session_id="chat")
        # The first one also lists the user.
        await agent.run("first", session=session)
        for _ in range(3):
            driver.kinds.clear()
            await agent.run("next", session=session)
            # In the background, the catalogue loads a card and the log.
            assert driver.kinds["agent-framework"] - driver.kinds["card"] <= 4


async def test_a_run_that_fails_stores_nothing_of_it(history: StmHistoryProvider) -> None:
    agent = Agent(Scripted(RuntimeError("down")), context_providers=[history])
    with pytest.raises(Exception, match="down"):
        await agent.run("Hello", session=AgentSession(session_id="chat"))
    assert await history.get_messages("chat") == []


async def test_a_provider_for_audits_is_not_asked_for_messages(backend: Backend) -> None:
    audit = StmHistoryProvider(backend, of_u1, source_id="audit", load_messages=False, store_inputs=False)
    client = Scripted("one", "two")
    agent = Agent(client, context_providers=[InMemoryHistoryProvider(), audit])
    session = AgentSession(session_id="chat")
    for said in ("a", "b"):
        await agent.run(said, session=session)
    assert client.asked[1] == ["a", "one", "b"]
    assert texts(await audit.get_messages("chat")) == ["one", "two"]


# Messages


async def test_every_kind_of_content_comes_back_as_it_was(history: StmHistoryProvider) -> None:
    call = Content.from_function_call("c1", "stock", arguments={"item": "tea"})
    messages = [
        Message("system", ["Be brief."]),
        Message(
            "user",
            [
                "é \0",
                Content.from_uri("https://example.com/a.png", media_type="image/png"),
                Content.from_data(b"\0\xff", "image/png"),
            ],
            author_name="Ann",
            additional_properties={"tags": [1, None]},
        ),
        Message("assistant", [Content.from_text_reasoning(text="Hm."), call], message_id="m1"),
        Message("tool", [Content.from_function_result("c1", result="3")]),
        Message("assistant", []),
    ]
    await history.save_messages("chat", messages)
    found = await history.get_messages("chat")
    assert [message.to_dict() for message in found] == [message.to_dict() for message in messages]
    assert found[1].contents[2].uri == messages[1].contents[2].uri


async def test_saving_nothing_changes_nothing(backend: Backend, history: StmHistoryProvider) -> None:
    await history.save_messages("chat", [])
    assert await history.get_messages("chat") == []
    assert not await backend.sessions.has("acme")


async def test_with_a_limit_the_newest_are_read_without_results_of_no_call(backend: Backend) -> None:
    call = Content.from_function_call("c1", "stock", arguments={})
    messages = [
        *numbered(0),
        Message("assistant", [call]),
        Message("tool", [Content.from_function_result("c1", result="3")]),
        *numbered(3, 4),
    ]
    await StmHistoryProvider(backend, of_u1).save_messages("chat", messages)
    for limit, expected in ((0, 0), (2, 2), (3, 2), (4, 4), (9, 5)):
        found = await StmHistoryProvider(backend, of_u1, limit=limit).get_messages("chat")
        assert len(found) == expected
    assert len(await StmHistoryProvider(backend, of_u1).get_messages("chat")) == 5


async def test_cleared_sessions_are_empty_and_can_be_used_again(history: StmHistoryProvider) -> None:
    await history.save_messages("chat", numbered(0))
    await history.save_messages("other", numbered(1))
    await history.clear("chat")
    assert await history.get_messages("chat") == []
    assert texts(await history.get_messages("other")) == ["1"]
    await history.save_messages("chat", numbered(2))
    assert texts(await history.get_messages("chat")) == ["2"]


# Replays


@pytest.mark.parametrize("ids", [False, True])
async def test_four_replays_of_20_messages_stay_20(history: StmHistoryProvider, ids: bool) -> None:
    messages = numbered(*range(20), ids=ids)
    for _ in range(4):
        await history.save_messages("chat", messages)
    assert texts(await history.get_messages("chat")) == [str(number) for number in range(20)]


async def test_a_beginning_is_known_again_after_another_machine_has_cleared_the_history(
    pods: tuple[Backend, Backend],
) -> None:
    mine, theirs = (StmHistoryProvider(pod, of_u1) for pod in pods)
    await mine.save_messages("chat", [Message("user", ["a"]), Message("assistant", ["b"])])
    assert texts(await mine.get_messages("chat")) == ["a", "b"]
    await theirs.clear("chat")
    said = [Message("user", ["c"]), Message("assistant", ["d"]), Message("user", ["e"])]
    await theirs.save_messages("chat", said)
    await mine.save_messages("chat", said[:2])
    assert texts(await mine.get_messages("chat")) == ["c", "d", "e"]


async def test_a_client_that_sends_all_of_it_each_time_stores_each_once(history: StmHistoryProvider) -> None:
    for end in range(2, 41, 2):
        await history.save_messages("chat", numbered(*range(end)))
    assert texts(await history.get_messages("chat")) == [str(number) for number in range(40)]


async def test_replays_at_once_on_two_machines_store_each_once(pods: tuple[Backend, Backend]) -> None:
    messages = numbered(*range(20))
    histories = [StmHistoryProvider(backend, of_u1) for backend in pods * 2]
    await asyncio.gather(*(one.save_messages("chat", messages) for one in histories))
    assert texts(await histories[0].get_messages("chat")) == [str(number) for number in range(20)]


async def test_runs_on_two_machines_at_once_lose_nothing(pods: tuple[Backend, Backend]) -> None:
    async def many(backend: Backend, name: str) -> None:
        for number in range(10):
            agent = Agent(
                Scripted(f"{name}{number}!"), context_providers=[StmHistoryProvider(backend, of_u1)]
            )
            await agent.run(f"{name}{number}", session=AgentSession(session_id="chat"))

    await asyncio.gather(*(many(backend, name) for backend, name in zip(pods, "ab", strict=True)))
    found = texts(await StmHistoryProvider(pods[0], of_u1).get_messages("chat"))
    assert len(found) == 40
    for name in "ab":
        own = [text for text in found if text.startswith(name)]
        assert own == [f"{name}{number}{end}" for number in range(10) for end in ("", "!")]
    # What was added together stands together.
    assert all(f"{text}!" == after for text, after in zip(found[::2], found[1::2], strict=True))


async def test_a_message_of_another_that_came_between_is_kept() -> None:
    driver = Watched(plugins.open_driver("memory://"))
    async with Backend(driver) as backend:
        history = StmHistoryProvider(backend, of_u1)
        await history.save_messages("chat", numbered(0, 1))

        async def meanwhile() -> None:
            await history.save_messages("chat", numbered(2, 3))

        driver.meanwhile = meanwhile
        await history.save_messages("chat", numbered(2, 3, 4))
        assert texts(await history.get_messages("chat")) == ["0", "1", "2", "3", "4"]


async def test_what_is_a_repeat_is_decided_as_by_the_frameworks_own(backend: Backend) -> None:
    chosen = random.Random(29)
    for case in range(60):
        ours, own = StmHistoryProvider(backend, of_u1), InMemoryHistoryProvider()
        known: list[Message] = []
        for _ in range(6):
            # Few texts, so that beginnings, ends and whole histories repeat.
            said = [chosen.randrange(3) for _ in range(chosen.randrange(1, 6))]
            if chosen.random() < 0.5:
                texts_ = [int(message.text) for message in known]
                said = texts_[chosen.randrange(len(known) + 1) :] + said
            messages = numbered(*said, ids=chosen.random() < 0.3)
            state: dict[str, Any] = {"messages": known}
            await own.save_messages(f"chat{case}", messages, state=state)
            added = len(state["messages"]) - len(known)
            beginning = [(one.text, one.message_id) for one in known[: len(messages)]]
            # But for this, which the framework stores twice.
            if not (added == len(messages) >= 2 and beginning == [(m.text, m.message_id) for m in messages]):
                known = state["messages"]
            await ours.save_messages(f"chat{case}", messages)
            assert texts(await ours.get_messages(f"chat{case}")) == texts(known)


@pytest.mark.parametrize("ids", [False, True])
async def test_four_that_replay_a_growing_conversation_at_once_store_it_once(
    pods: tuple[Backend, Backend], ids: bool
) -> None:
    async def replay(history: StmHistoryProvider) -> None:
        for end in range(2, 21, 2):
            await history.save_messages("chat", numbered(*range(end), ids=ids))

    histories = [StmHistoryProvider(backend, of_u1) for backend in pods * 2]
    await asyncio.gather(*map(replay, histories))
    await replay(StmHistoryProvider(pods[0], of_u1, load_messages=False))
    assert texts(await histories[0].get_messages("chat")) == [str(number) for number in range(20)]


async def test_the_same_exchange_again_is_kept_if_its_ids_differ(history: StmHistoryProvider) -> None:
    for number in range(3):
        await history.save_messages(
            "chat", [Message("user", ["Hi"]), Message("assistant", ["Yes?"], message_id=f"{number}")]
        )
    assert len(await history.get_messages("chat")) == 6
    # A person who says the same again, without an id, has said it twice.
    for _ in range(2):
        await history.save_messages("other", [Message("user", ["Hi"])])
    assert len(await history.get_messages("other")) == 2


async def test_a_long_history_is_not_read_to_add_to_it() -> None:
    driver = Watched(plugins.open_driver("memory://"))
    async with Backend(driver) as backend:
        history = StmHistoryProvider(backend, of_u1)
        for number in range(400):
            await history.save_messages("chat", numbered(number))
        driver.done.clear()
        await history.save_messages("chat", numbered(399, 400))
        assert driver.done.total() <= 3
        assert len(await history.get_messages("chat")) == 401


# What everything stored here can do


async def test_a_history_is_listed_exported_imported_and_erased_with_its_user(backend: Backend) -> None:
    history = StmHistoryProvider(backend, of_u1)
    await history.save_messages("chat", [Message("user", ["A red bike"]), Message("assistant", ["Noted."])])
    assert [user async for user in backend.sessions.users("acme")] == ["u1"]
    assert [one async for one in backend.sessions.logs("acme", "u1")] == [("agent-framework", KEY)]
    lines = [line async for line in backend.sessions.export_log_lines(KEY, "agent-framework")]
    assert await backend.sessions.erase_tenant("acme") == 1
    assert await history.get_messages("chat") == []
    importing = backend.sessions.importing()
    assert KEY in [await importing.add(line) for line in lines]
    assert texts(await history.get_messages("chat")) == ["A red bike", "Noted."]
    receipt = await backend.sessions.erase_with_receipt("acme", "u1")
    assert receipt.complete
    assert receipt.erased["logs"] == 1


async def test_a_list_of_conversations_shows_how_one_began(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        await StmHistoryProvider(backend, of_u1).save_messages("chat", [Message("user", ["A red bike"])])
    async with open_backend(url) as backend:
        (found,) = (await backend.conversations.list("acme", "u1")).cards
        assert (found.key, found.kinds) == (KEY, ("agent-framework",))
        assert "A red bike" in (found.title, found.preview)


@dataclass
class Seen:
    """A state of an application."""

    counter: int
    names: list[str] = field(default_factory=list[str])


SEEN = [f"{Seen.__module__}:Seen"]


async def test_what_is_stored_is_copied_and_sealed_as_everything_is(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    async with open_backend(urls[0], sealing=SEALING) as backend:
        await StmHistoryProvider(backend, of_u1).save_messages("chat", [Message("user", ["MARKER"])])
        storage = StmCheckpointStorage(backend, "acme", "u1", allowed_checkpoint_types=SEEN)
        saved = await storage.save(checkpoint("flow", state={"MARKER": Seen(1, ["MARKER"])}))
    # As it is stored, without the keys.
    async with open_backend(urls[0]) as one, open_backend(urls[1]) as two:
        copy = Copy(one.driver, two.driver, [Owner("acme")])
        await copy.copy()
        await copy.verify()
        assert copy.ok
    async with open_backend(urls[1], sealing=SEALING) as backend:
        assert texts(await StmHistoryProvider(backend, of_u1).get_messages("chat")) == ["MARKER"]
        storage = StmCheckpointStorage(backend, "acme", "u1", allowed_checkpoint_types=SEEN)
        assert (await storage.load(saved)).state == {"MARKER": Seen(1, ["MARKER"])}
    stored = await asyncio.to_thread(lambda: [file.read_bytes() for file in tmp_path.iterdir()])
    assert not any(b"MARKER" in file for file in stored)


async def test_a_history_that_nobody_adds_to_is_forgotten_after_its_time(backend: Backend) -> None:
    brief = StmHistoryProvider(backend, of_u1, ttl_s=0.2)
    await brief.save_messages("chat", numbered(0))
    await asyncio.sleep(0.4)
    assert await brief.get_messages("chat") == []


# What is refused, and outages


async def test_a_session_without_an_id_or_a_key_has_no_history(backend: Backend) -> None:
    history = StmHistoryProvider(backend, of_u1)
    for session_id in (None, ""):
        with pytest.raises(InvalidKey, match="no id"):
            await history.get_messages(session_id)
        with pytest.raises(InvalidKey, match="no id"):
            await history.save_messages(session_id, numbered(0))
    for key in (None, "acme:u1:chat", MemoryKey("acme", " ", "chat")):
        given: Any = lambda _, key=key: key  # noqa: E731 -- of any type
        with pytest.raises(InvalidKey):
            await StmHistoryProvider(backend, given).save_messages("chat", numbered(0))

    def failing(session_id: str) -> MemoryKey:
        raise KeyError(f"SECRET {session_id}")

    with pytest.raises(InvalidKey, match=r"`key` failed \(KeyError\)") as refused:
        await StmHistoryProvider(backend, failing).get_messages("chat")
    assert "SECRET" not in str(refused.value)


async def test_tenants_and_users_never_meet(backend: Backend) -> None:
    owners = [("acme", "u1"), ("acme", "u2"), ("globex", "u1"), ("acme:u1", "s"), ("acme", "u1:s")]
    for number, owner in enumerate(owners):
        history = StmHistoryProvider(backend, lambda session, owner=owner: MemoryKey(*owner, session))
        await history.save_messages("chat", numbered(number))
        await StmCheckpointStorage(backend, *owner).save(checkpoint("flow", state={"number": number}))
    for number, owner in enumerate(owners):
        history = StmHistoryProvider(backend, lambda session, owner=owner: MemoryKey(*owner, session))
        assert texts(await history.get_messages("chat")) == [str(number)]
        (found,) = await StmCheckpointStorage(backend, *owner).list_checkpoints(workflow_name="flow")
        assert found.state == {"number": number}


class OwnMessage(Message):
    """A message of a class that the framework does not know."""


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages must be a list, not NoneType"),
        ("Hello", "messages must be a list, not str"),
        (["Hello"], "messages[0] is str, not a Message"),
        ([*numbered(0), ("user", "b")], "messages[1] is tuple, not a Message"),
        (
            [OwnMessage("user", ["a"])],
            "a message is of a class that the Agent Framework could not read again",
        ),
    ],
)
async def test_what_is_no_message_is_refused(history: StmHistoryProvider, messages: Any, said: str) -> None:
    with pytest.raises(InvalidState, match=re.escape(said)):
        await history.save_messages("chat", messages)
    assert await history.get_messages("chat") == []


async def test_what_json_does_not_have_is_refused_by_its_path(history: StmHistoryProvider) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for value, said in (
        (deep, r"messages\[1\]\.additional_properties\.odd\[0\]"),
        (circle, r"messages\[1\] refers to itself"),
    ):
        message = Message("user", ["a"], additional_properties={"odd": value})
        with pytest.raises(InvalidState, match=said):
            await history.save_messages("chat", [*numbered(0), message])
    assert await history.get_messages("chat") == []


async def test_what_the_framework_makes_of_other_values_is_stored(history: StmHistoryProvider) -> None:
    odd = {"at": START, "set": {1}, "bytes": b"x", "object": object()}
    await history.save_messages("chat", [Message("user", ["a"], additional_properties={"odd": odd})])
    (found,) = await history.get_messages("chat")
    assert found.text == "a"


async def test_wrong_settings_are_refused(backend: Backend) -> None:
    given: Any = "sqlite:///memory.db"
    for make in (lambda: StmHistoryProvider(given, of_u1), lambda: StmCheckpointStorage(given, "acme", "u1")):
        with pytest.raises(
            ConfigurationError, match=r"backend must come from open_backend\(\.\.\.\), not str"
        ):
            make()
    with pytest.raises(ConfigurationError, match="limit must be an integer of at least 0"):
        StmHistoryProvider(backend, of_u1, limit=-1)
    for make in (
        lambda: StmHistoryProvider(backend, of_u1, ttl_s=0),
        lambda: StmCheckpointStorage(backend, "acme", "u1", ttl_s=-1),
    ):
        with pytest.raises(ConfigurationError, match="ttl_s must be a positive number of seconds"):
            make()
    with pytest.raises(InvalidKey):
        StmCheckpointStorage(backend, "acme", " ")
    types: Any = "app:State"
    with pytest.raises(InvalidState, match="allowed_checkpoint_types must be a list, not str"):
        StmCheckpointStorage(backend, "acme", "u1", allowed_checkpoint_types=types)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "contents": [{"secret": 1}]},
        {"type": "subprocess.Popen", "args": "secret"},
        {"contents": ["secret"]},
        {"role": "user", "contents": ["secret"], "secret": 1},
        {"role": "user", "contents": [{"type": "data", "data": 1, "media_type": "secret"}]},
    ],
)
async def test_what_is_no_message_is_corrupt(backend: Backend, item: dict[str, Any]) -> None:
    await backend.item_log(KEY, "agent-framework").add([item])
    with pytest.raises(Corrupt, match=rf"{backend.name}\.get_messages") as raised:
        await StmHistoryProvider(backend, of_u1).get_messages("chat")
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


async def test_messages_that_are_too_large_are_refused_all_together(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        history = StmHistoryProvider(backend, of_u1)
        with pytest.raises(TooLarge):
            await history.save_messages("chat", [*numbered(0), Message("user", ["x" * 5_000])])
        assert await history.get_messages("chat") == []


async def test_an_outage_is_never_an_empty_history(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        history = StmHistoryProvider(backend, of_u1)
        storage = StmCheckpointStorage(backend, "acme", "u1")
        saved = await storage.save(checkpoint("flow"))
    client = Scripted("never said")
    agent = Agent(client, context_providers=[history])
    for work in (
        agent.run("Hello", session=AgentSession(session_id="chat")),
        history.get_messages("chat"),
        history.save_messages("chat", numbered(0)),
        history.clear("chat"),
        storage.save(checkpoint("flow")),
        storage.load(saved),
        storage.delete(saved),
        storage.list_checkpoints(workflow_name="flow"),
        storage.list_checkpoint_ids(workflow_name="flow"),
        storage.get_latest(workflow_name="flow"),
    ):
        with pytest.raises(Unavailable):
            await work
    assert client.asked == []


async def test_a_cancelled_save_is_done_when_the_cancellation_is_raised(tmp_path: Path) -> None:
    driver = Watched(plugins.open_driver(f"sqlite:///{tmp_path}/stm.db"))
    async with Backend(driver) as backend:
        history, storage = StmHistoryProvider(backend, of_u1), StmCheckpointStorage(backend, "acme", "u1")
        kept = checkpoint("flow")
        for work in (history.save_messages("chat", numbered(0, 1)), storage.save(kept)):
            task = asyncio.ensure_future(work)

            async def cancel(task: asyncio.Task[object] = task) -> None:
                task.cancel()

            driver.meanwhile = cancel
            with pytest.raises(asyncio.CancelledError):
                await task
        assert texts(await history.get_messages("chat")) == ["0", "1"]
        assert (await storage.load(kept.checkpoint_id)).checkpoint_id == kept.checkpoint_id


def test_it_is_a_provider_of_histories_and_a_storage_of_checkpoints() -> None:
    backend = open_backend("memory://")
    history = StmHistoryProvider(backend, of_u1, source_id="mine", store_context_from={"rag"})
    assert isinstance(history, HistoryProvider)
    assert (history.source_id, history.load_messages, history.store_context_from) == ("mine", True, {"rag"})
    storage: CheckpointStorage = StmCheckpointStorage(backend, "acme", "u1")
    assert {name for name in vars(CheckpointStorage) if not name.startswith("_")} <= set(dir(storage))


# Checkpoints

START = datetime(2030, 1, 1, tzinfo=UTC)


def checkpoint(workflow: str, number: int = 0, **more: Any) -> WorkflowCheckpoint:
    at = (START + timedelta(seconds=number)).isoformat()
    return WorkflowCheckpoint(workflow, "hash", **{"timestamp": at, **more})


class First(Executor):
    @handler
    async def begin(self, message: str, context: WorkflowContext[str]) -> None:
        context.set_state("seen", Seen(1, [message]))
        await context.send_message(f"{message} begun")


class Second(Executor):
    died = True

    @handler
    async def end(self, message: str, context: WorkflowContext[Any, str]) -> None:
        if Second.died:
            raise RuntimeError("the process dies here")
        await context.yield_output(f"{message}, {context.get_state('seen').names} seen")


async def test_another_machine_goes_on_with_a_workflow(
    pods: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def workflow(backend: Backend) -> Any:
        storage = StmCheckpointStorage(backend, "acme", "u1", allowed_checkpoint_types=SEEN)
        first, second = First("first"), Second("second")
        builder = WorkflowBuilder(name="order", start_executor=first, checkpoint_storage=storage)
        return builder.add_edge(first, second).build(), storage

    begun, storage = workflow(pods[0])
    with pytest.raises(RuntimeError, match="dies here"):
        await begun.run("tea")
    monkeypatch.setattr(Second, "died", False)
    resumed, storage = workflow(pods[1])
    latest = await storage.get_latest(workflow_name="order")
    assert latest is not None
    result = await resumed.run(checkpoint_id=latest.checkpoint_id)
    assert result.get_outputs() == ["tea begun, ['tea'] seen"]


async def test_checkpoints_are_kept_as_by_the_frameworks_own_storage(backend: Backend) -> None:
    chosen = random.Random(29)
    for round_ in range(10):
        ours, own = StmCheckpointStorage(backend, "acme", f"u{round_}"), InMemoryCheckpointStorage()
        ids: list[str] = []
        for number in range(40):
            step = chosen.random()
            if step < 0.5 or not ids:
                made = checkpoint(
                    chosen.choice("ab"), number, state={"n": number, "at": START, "set": {1, (2, 3)}}
                )
                ids.append(made.checkpoint_id)
                assert await ours.save(made) == await own.save(made)
            elif step < 0.8:
                # Also those that are gone.
                gone = chosen.choice(ids)
                assert await ours.delete(gone) == await own.delete(gone)
            for workflow in ("a", "b", "c"):
                listed = await own.list_checkpoints(workflow_name=workflow)
                assert await ours.list_checkpoints(workflow_name=workflow) == listed
                assert await ours.get_latest(workflow_name=workflow) == await own.get_latest(
                    workflow_name=workflow
                )
                assert await ours.list_checkpoint_ids(workflow_name=workflow) == [
                    one.checkpoint_id for one in listed
                ]
        for one in ids:
            try:
                expected: Any = await own.load(one)
            except WorkflowCheckpointException:
                with pytest.raises(WorkflowCheckpointException, match="No checkpoint found"):
                    await ours.load(one)
            else:
                assert await ours.load(one) == expected


async def test_ids_and_names_of_workflows_may_be_anything(backend: Backend) -> None:
    storage = StmCheckpointStorage(backend, "acme:%", "u/1")
    hostile = ["", "a", "a/b", "a/", "%2F", "%252F", ":", "a:b", "é \0", "\ud800", "../..", "a/1/b", "*", "?"]
    for one in hostile:
        for other in hostile:
            await storage.save(
                checkpoint(other, checkpoint_id=f"{one} in {other}", state={"of": [one, other]})
            )
    for name in hostile:
        listed = await storage.list_checkpoint_ids(workflow_name=name)
        assert sorted(listed) == sorted(f"{one} in {name}" for one in hostile)
        assert (await storage.load(f"{name} in {name}")).state == {"of": [name, name]}
        assert await storage.delete(f"{name} in {name}")
        assert not await storage.delete(f"{name} in {name}")
    with pytest.raises(InvalidKey):
        await storage.save(checkpoint("x" * 2_000))


async def test_a_checkpoint_that_is_saved_again_is_replaced(backend: Backend) -> None:
    storage = StmCheckpointStorage(backend, "acme", "u1")
    for number, workflow in enumerate(("a", "a", "b")):
        await storage.save(checkpoint(workflow, number, checkpoint_id="c", state={"number": number}))
        assert (await storage.load("c")).state == {"number": number}
        assert await storage.list_checkpoint_ids(workflow_name=workflow) == ["c"]
    assert await storage.list_checkpoints(workflow_name="a") == []
    assert await storage.delete("c")
    with pytest.raises(WorkflowCheckpointException):
        await storage.load("c")


async def test_types_that_are_not_allowed_are_neither_saved_nor_made(backend: Backend) -> None:
    allowing = StmCheckpointStorage(backend, "acme", "u1", allowed_checkpoint_types=SEEN)
    strict = StmCheckpointStorage(backend, "acme", "u1")
    saved = await allowing.save(checkpoint("flow", state={"seen": Seen(1)}))
    assert (await allowing.load(saved)).state["seen"] == Seen(1)
    with pytest.raises(WorkflowCheckpointException):
        await strict.load(saved)
    with pytest.raises(WorkflowCheckpointException):
        await strict.get_latest(workflow_name="flow")
    with pytest.raises(WorkflowCheckpointException):
        await strict.save(checkpoint("flow", 1, state={"seen": Seen(2)}))
    with pytest.raises(WorkflowCheckpointException, match="cannot be stored and read again"):
        await allowing.save(checkpoint("flow", 1, state={"seen": lambda: None}))
    with pytest.raises(WorkflowCheckpointException, match="cannot be stored and read again"):
        await allowing.save(checkpoint("flow", timestamp="yesterday"))
    assert await allowing.list_checkpoint_ids(workflow_name="flow") == [saved]


async def test_the_latest_is_found_by_its_time_and_without_loading_others() -> None:
    driver = Watched(plugins.open_driver("memory://"))
    async with Backend(driver) as backend:
        storage = StmCheckpointStorage(backend, "acme", "u1")
        for number in (5, 40, 7):
            await storage.save(checkpoint("flow", number, state={"number": number}))
        await storage.save(checkpoint("flow", timestamp="2030-01-01T00:00:41", state={"number": 41}))
        await storage.save(checkpoint("flow", timestamp="2030-01-01T02:00:10+02:00", state={"number": 10}))
        driver.done.clear()
        latest = await storage.get_latest(workflow_name="flow")
        assert latest is not None
        assert latest.state == {"number": 41}
        # The listing, with a look at what its prefix names, and the checkpoint.
        assert driver.done == {"scan": 1, "load": 2}
        listed = await storage.list_checkpoints(workflow_name="flow")
        assert [one.state["number"] for one in listed] == [5, 7, 10, 40, 41]


async def test_checkpoints_are_erased_with_their_user_and_expire(backend: Backend) -> None:
    kept = StmCheckpointStorage(backend, "acme", "u1")
    brief = StmCheckpointStorage(backend, "acme", "u2", ttl_s=0.2)
    saved = await kept.save(checkpoint("flow"))
    passing = await brief.save(checkpoint("flow"))
    assert sorted([user async for user in backend.sessions.users("acme")]) == ["u1", "u2"]
    await asyncio.sleep(0.4)
    assert await brief.list_checkpoint_ids(workflow_name="flow") == []
    with pytest.raises(WorkflowCheckpointException):
        await brief.load(passing)
    receipt = await backend.sessions.erase_with_receipt("acme", "u1")
    assert receipt.complete
    assert receipt.erased["states"] == 1
    with pytest.raises(WorkflowCheckpointException):
        await kept.load(saved)
