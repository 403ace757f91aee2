"""Pydantic AI's conversation store: what the official one does, random calls on both, races, crashes, UIs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent, Conversation, UserError
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
    InMemoryConversationStore,
)
from pydantic_ai.messages import (
    BinaryImage,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.ui.vercel_ai import VercelAIAdapter
from pydantic_ai.ui.vercel_ai.request_types import RegenerateMessage, SubmitMessage, TextUIPart, UIMessage

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryKey,
    MessageNotFound,
    Sealing,
    StaticKeys,
    TooLarge,
    Unavailable,
    open_backend,
)
from stm_backends.drivers import Key, Record, plugins
from stm_backends.history import items
from stm_backends.integrations.pydantic_ai import StmConversationStore
from stm_backends.memory.touches import Touches
from stm_backends.records import keys
from tests.support.conversation_walk import Walk
from tests.support.interrupted import Interrupted

KEY = MemoryKey("acme", "u1", "chat")

Stores = Callable[[], ConversationStore]


@pytest.fixture(params=["memory", "sqlite", "Pydantic AI's own"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    """Makes stores of one user. What ours are expected to do, the official one has to do as well."""
    if request.param == "Pydantic AI's own":
        own = InMemoryConversationStore()
        yield lambda: own
        return
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        yield lambda: StmConversationStore(backend, "acme", "u1")


def ours(backend: Backend, user: str = "u1", **options: Any) -> StmConversationStore:
    return StmConversationStore(backend, "acme", user, **options)


def asks(text: str) -> ModelMessage:
    return ModelRequest(parts=[UserPromptPart(text)])


def says(text: str) -> ModelMessage:
    return ModelResponse(parts=[TextPart(text)])


def turn(text: str) -> list[ModelMessage]:
    return [asks(f"{text}?"), says(f"{text}!")]


def words(messages: list[ModelMessage]) -> list[Any]:
    return [getattr(message.parts[-1], "content", None) for message in messages]


async def said(store: ConversationStore, name: str = "chat", **options: Any) -> list[Any]:
    """Return what is stored of a conversation."""
    entries = await store.load_entries(name, **options)
    assert entries is not None
    assert [one.parent_id for one in entries[1:]] == [one.id for one in entries[:-1]]
    return words([one.message for one in entries])


async def saved(store: ConversationStore, *texts: str, name: str = "chat", **options: Any) -> Conversation:
    """Save a conversation turn by turn."""
    conversation = await store.load(name) or Conversation(conversation_id=name)
    for text in texts:
        conversation.messages += turn(text)
        await store.save(conversation, **options)
    return conversation


class Scripted:
    """A model that says what a test tells it to, and remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.asked: list[list[ModelMessage]] = []

    @property
    def agent(self) -> Agent:
        return Agent(FunctionModel(self._answer, stream_function=self._stream))

    async def _answer(self, messages: list[ModelMessage], _: Any) -> ModelResponse:
        self.asked.append(messages)
        return ModelResponse(parts=[TextPart(self._answers.pop(0))])

    async def _stream(self, messages: list[ModelMessage], _: Any) -> AsyncIterator[str]:
        self.asked.append(messages)
        yield self._answers.pop(0)


# What Pydantic AI expects of a store


async def test_a_run_knows_what_an_earlier_one_was_about(stores: Stores) -> None:
    model = Scripted("I will remember.", "Teal.")
    for query in ("My favourite colour is teal.", "What is it?"):
        store = stores()
        conversation = await store.load("chat") or Conversation(conversation_id="chat")
        entries = await store.save(await model.agent.run(query, conversation=conversation))
        assert len(entries) == 2
    assert words(model.asked[1]) == ["My favourite colour is teal.", "I will remember.", "What is it?"]
    loaded = await stores().load("chat")
    assert loaded is not None
    assert (len(loaded.messages), loaded.usage.requests) == (4, 2)


async def test_what_a_conversation_does_not_have_is_not_there(stores: Stores) -> None:
    store = stores()
    assert await store.load("chat") is None
    assert await store.load_entries("chat") is None
    assert await store.list_conversations() == []
    await store.delete("chat")
    for read in (store.read_entry("unknown"), store.read_history("unknown")):
        with pytest.raises(LookupError):
            await read
    assert await store.read_history(None) == []
    assert await store.read_history("unknown", limit=0) == []


async def test_every_kind_of_part_comes_back_as_it_was(stores: Stores) -> None:
    messages: list[ModelMessage] = [
        ModelRequest(
            parts=[UserPromptPart(["é \0", BinaryImage(b"\xff\0", media_type="image/png")])],
            instructions="Be brief.",
            metadata={"ui": [1, None]},
        ),
        ModelResponse(
            parts=[
                ThinkingPart("hm", signature="s"),
                ToolCallPart("stock", {"item": "tea"}, tool_call_id="c"),
                ToolCallPart("stock", '{"item": "té"}', tool_call_id="d"),
            ],
            model_name="m",
            provider_details={"finish": "calls"},
        ),
        ModelRequest(parts=[ToolReturnPart("stock", {"rows": [3]}, "c"), ToolReturnPart("stock", "3", "d")]),
        says("Three."),
    ]
    waits = DeferredToolRequests(
        approvals=[ToolCallPart("book", {"at": 12}, tool_call_id="e")], metadata={"e": {"why": "é"}}
    )
    conversation = Conversation(conversation_id="chat", messages=messages, deferred_tool_requests=waits)
    await stores().save(conversation, scope="web")
    loaded = await stores().load("chat", scope="web")
    assert loaded == conversation
    (record,) = await stores().list_conversations()
    assert (record.scope, record.deferred_tool_requests, record.format_version) == ("web", waits, 1)


async def test_a_limit_reads_the_end_and_a_save_still_goes_on_from_all(stores: Stores) -> None:
    store = stores()
    await saved(store, *"abcdefghij")
    for limit in (0, 1, 5, 20, 30):
        expected = [f"{text}{end}" for text in "abcdefghij" for end in "?!"][20 - min(limit, 20) :]
        assert await said(store, limit=limit) == expected
    window = await store.load("chat", limit=3)
    assert window is not None
    window.messages += turn("k")
    await store.save(window)
    assert (await said(store))[-4:] == ["j?", "j!", "k?", "k!"]
    with pytest.raises(UserError, match="negative"):
        await store.load("chat", limit=-1)


async def test_of_two_who_loaded_the_same_the_second_conflicts_and_stores_nothing(stores: Stores) -> None:
    store = stores()
    await saved(store, "a")
    one, two = await store.load("chat"), await store.load("chat")
    assert one is not None
    assert two is not None
    for conversation, text in ((one, "b"), (two, "c")):
        conversation.messages += turn(text)
    await store.save(one)
    with pytest.raises(ConversationConflict):
        await store.save(two)
    with pytest.raises(ConversationConflict):
        await store.save(Conversation(conversation_id="chat", messages=turn("d")))
    with pytest.raises(ConversationConflict):
        await store.delete_record("chat", expected_revision=str(two.revision))
    assert await said(store) == ["a?", "a!", "b?", "b!"]
    await store.save(one)
    assert await said(store) == ["a?", "a!", "b?", "b!"]


async def test_a_rewritten_history_is_a_branch_that_one_can_return_to(stores: Stores) -> None:
    store = stores()
    conversation = await saved(store, "a", "b")
    conversation.messages[2:] = turn("c")
    await store.save(conversation)
    assert await said(store) == ["a?", "a!", "c?", "c!"]
    (record,) = await store.list_conversations()
    (left,) = record.branches
    back = await store.branch("chat", from_entry=left, expected_revision=conversation.revision)
    assert words(back.messages) == ["a?", "a!", "b?", "b!"]
    back.messages += turn("d")
    await store.save(back)
    assert await said(store) == ["a?", "a!", "b?", "b!", "d?", "d!"]
    earlier = await store.branch("chat", at=1, expected_revision=back.revision)
    assert words(earlier.messages) == await said(store) == ["a?"]
    (record,) = await store.list_conversations()
    assert len(record.branches) == 2


async def test_a_fork_goes_its_own_way_and_outlives_its_source(stores: Stores) -> None:
    store = stores()
    await saved(store, "a", "b", scope="x")
    entries = await store.load_entries("chat")
    assert entries is not None
    whole = await store.fork("chat", new_conversation_id="whole")
    part = await store.fork("chat", from_entry=entries[1].id, new_conversation_id="part", scope="y")
    empty = await store.fork("chat", at=0, new_conversation_id="empty")
    with pytest.raises(ConversationConflict):
        await store.fork("chat", new_conversation_id="part")
    assert [len(one.messages) for one in (whole, part, empty)] == [4, 2, 0]
    await saved(store, "c")
    part.messages += turn("d")
    await store.save(part)
    # A fork of a fork, of what that has from its source.
    await store.fork("part", at=1, new_conversation_id="again")
    await store.delete("chat")
    assert await store.load("chat") is None
    assert await said(store, "whole") == ["a?", "a!", "b?", "b!"]
    assert await said(store, "part") == ["a?", "a!", "d?", "d!"]
    assert await said(store, "empty") == []
    assert await said(store, "again") == ["a?"]
    forks = {one.conversation_id: one for one in await store.list_conversations()}
    assert (forks["part"].forked_from, forks["part"].forked_at) == ("chat", entries[1].id)
    assert [forks[name].scope for name in ("whole", "part")] == ["x", "y"]
    assert await stores().read_entry(entries[1].id) == entries[1]
    assert await stores().read_history(entries[3].id, limit=2) == entries[2:]
    await store.delete("whole")
    with pytest.raises(LookupError):
        await stores().read_entry(entries[3].id)


async def test_a_fork_of_an_entry_that_is_nowhere_conflicts(stores: Stores) -> None:
    record = ConversationRecord(conversation_id="fork", head_id="unknown")
    with pytest.raises(ConversationConflict):
        await stores().write_record(record, expected_revision=None)
    assert await stores().list_conversations() == []


async def test_a_list_has_the_conversation_first_that_was_saved_last(stores: Stores) -> None:
    store = stores()
    for name, scope in (("a", "x"), ("b", "y"), ("c", "x")):
        await saved(store, "hello", name=name, scope=scope)
    await saved(store, "again", name="a")
    assert [one.conversation_id for one in await store.list_conversations()] == ["a", "c", "b"]
    assert [one.conversation_id for one in await store.list_conversations(scope="x")] == ["a", "c"]
    assert [one.conversation_id for one in await store.list_conversations(limit=2)] == ["a", "c"]
    assert [one.conversation_id for one in await store.list_conversations(scope="y", limit=2)] == ["b"]
    assert await store.list_conversations(scope="z") == []
    assert await store.list_conversations(limit=0) == []


async def test_a_scope_keeps_a_conversation_to_those_who_name_it(stores: Stores) -> None:
    store = stores()
    conversation = await saved(store, "a", scope="x")
    assert await store.load("chat", scope="y") is None
    await store.delete("chat", scope="y")
    conversation.messages += turn("b")
    with pytest.raises(ConversationConflict):
        await store.save(conversation, scope="y")
    assert await said(store, scope="x") == ["a?", "a!"]


async def test_what_was_deleted_and_began_again_takes_no_save_of_the_former(stores: Stores) -> None:
    store = stores()
    former = await saved(store, "a")
    await store.delete("chat")
    former.messages += turn("b")
    with pytest.raises(ConversationConflict):
        await store.save(former)
    await saved(store, "c")
    with pytest.raises(ConversationConflict):
        await store.save(former)
    assert await said(store) == ["c?", "c!"]


async def test_what_was_handed_out_is_the_callers_to_change(stores: Stores) -> None:
    store = stores()
    conversation = await saved(store, "a")
    conversation.messages[0].parts[0].content = "changed"  # type: ignore[union-attr]
    for _ in range(2):
        loaded = await store.load("chat")
        assert loaded is not None
        assert words(loaded.messages) == ["a?", "a!"]
        loaded.messages[0].parts[0].content = "changed"  # type: ignore[union-attr]
        record = await store.read_record("chat")
        assert record is not None
        assert record.branches == []
        record.branches.append("changed")


# Random calls


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.full) for n in range(4, 60))]
)
async def test_random_calls_are_answered_as_by_the_official_store(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Walk(ours(backend), seed, monkeypatch)
    for number in range(200):
        await walk.step()
        if number % 20 == 19:
            await walk.compare()
    assert {"Conversation", "ConversationConflict", "UserError", "list"} <= {*walk.answers}


# Ours: many machines


async def test_of_machines_that_save_at_once_one_wins_and_the_others_leave_nothing(
    pods: tuple[Backend, Backend],
) -> None:
    machines = [ours(backend) for backend in (*pods, *pods)]
    races = 25

    async def tried(store: StmConversationStore, text: str) -> bool:
        conversation = await store.load("chat") or Conversation(conversation_id="chat")
        conversation.messages += turn(text)
        await asyncio.sleep(0)
        try:
            await store.save(conversation)
        except ConversationConflict:
            return False
        return True

    for number in range(races):
        won = await asyncio.gather(
            *(tried(store, f"{number}.{which}") for which, store in enumerate(machines))
        )
        assert sum(won) >= 1
        assert await machines[0].load("chat") == await machines[1].load("chat")
    there = await said(machines[0])
    assert [text[:-1] for text in there[::2]] == [text[:-1] for text in there[1::2]]
    log = pods[0].item_log(KEY, "pydantic-ai")
    assert (await log.read()).count == len(there)
    while await log.fold():
        pass
    record = await pods[0].driver.load(keys.log_key(KEY, "pydantic-ai"))
    assert record is not None
    assert record.tail == ()
    assert await said(ours(pods[1])) == there


async def test_turns_of_two_machines_that_try_again_are_all_there_once(pods: tuple[Backend, Backend]) -> None:
    async def many(backend: Backend, who: str) -> None:
        store = ours(backend)
        for number in range(10):
            while True:
                conversation = await store.load("chat", limit=2) or Conversation(conversation_id="chat")
                conversation.messages += turn(f"{who}{number}")
                try:
                    await store.save(conversation)
                except ConversationConflict:
                    continue
                break

    await asyncio.gather(*(many(backend, who) for backend, who in zip(pods, "ab", strict=True)))
    there = await said(ours(pods[0]))
    for who in "ab":
        own = [text for text in there if text.startswith(who)]
        assert own == [f"{who}{number}{end}" for number in range(10) for end in "?!"]
    assert len(there) == 40


@pytest.fixture
def _no_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done in the background, where something may come in between at any time."""
    monkeypatch.setattr(Touches, "note", lambda *_, **__: None)


async def interrupted(
    url: str,
    during: Callable[[], Awaitable[object]],
    work: Callable[[StmConversationStore], Awaitable[object]],
) -> AsyncIterator[tuple[bool, bool]]:
    """Do the work over and over, and something else before its first, second, ... and last operation.

    Yields whether the other thing was done, and whether the work was.
    """
    came, at = True, 0
    while came:
        at, came = at + 1, False
        driver = Interrupted(plugins.open_driver(url))

        async def intrude() -> None:
            nonlocal came
            came = True
            await during()

        async with Backend(driver) as backend:
            store = ours(backend)
            await saved(store, "a", "b")
            driver.arm(at, intrude)
            try:
                await work(store)
                done = True
            except (ConversationConflict, UserError):
                done = False
            driver.at = 0
        yield came, done


@pytest.mark.usefixtures("_no_touches")
async def test_whatever_is_saved_during_a_save_one_of_them_conflicts_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    url, outcomes = f"sqlite:///{tmp_path}/stm.db", list[bool]()

    async def save(store: StmConversationStore, text: str) -> None:
        conversation = await store.load("chat")
        assert conversation is not None
        conversation.messages += turn(text)
        await store.save(conversation)

    async with open_backend(url) as other:
        async for came, done in interrupted(
            url, lambda: save(ours(other), "first"), lambda store: save(store, "mine")
        ):
            outcomes.append(done)
            expected = ["a", "b"] + ["first"] * came + ["mine"] * done
            there = await said(ours(other))
            # One that comes once the save is stored, before it is read again, comes second.
            assert sorted(there) == sorted(f"{text}{end}" for text in expected for end in "?!")
            await other.sessions.erase_user("acme", "u1")
    # Before the first load, and after everything.
    assert outcomes[0]
    assert outcomes[-1]
    assert False in outcomes


@pytest.mark.usefixtures("_no_touches")
async def test_no_fork_outlives_an_erasure_that_came_while_it_was_made(tmp_path: Path) -> None:
    url, outcomes = f"sqlite:///{tmp_path}/stm.db", list[bool]()
    async with open_backend(url) as other:
        async for came, done in interrupted(
            url,
            lambda: other.sessions.erase_user("acme", "u1"),
            lambda store: store.fork("chat", at=3, new_conversation_id="fork"),
        ):
            outcomes.append(done)
            there = await ours(other).load("fork")
            assert (there is not None) == (done and not came)
            await other.sessions.erase_user("acme", "u1")
    assert outcomes[:2] == [False, False]
    assert outcomes[-1]


@pytest.mark.usefixtures("_no_touches")
async def test_no_fork_outlives_an_erasure_because_its_maker_was_cancelled(tmp_path: Path) -> None:
    url, at, came = f"sqlite:///{tmp_path}/stm.db", 0, True
    async with open_backend(url) as other:
        while came:
            at, came = at + 1, False
            driver = Interrupted(plugins.open_driver(url))
            async with Backend(driver) as backend:
                store = ours(backend)
                await saved(store, "a", "b")

                async def erase_and_cancel() -> None:
                    nonlocal came
                    came = True
                    await other.sessions.erase_user("acme", "u1")
                    task.cancel()  # noqa: B023 -- the one of this round

                driver.arm(at, erase_and_cancel)
                task = asyncio.create_task(store.fork("chat", at=3, new_conversation_id="fork"))
                await asyncio.wait([task])
                assert task.cancelled() == came
            assert (await ours(other).load("fork") is None) == came
            await other.sessions.erase_user("acme", "u1")
    assert at > 4


async def test_a_save_that_is_cancelled_is_stored_or_will_not_be(pods: tuple[Backend, Backend]) -> None:
    store = ours(pods[0])
    await saved(store, "a")
    for number in range(12):
        conversation = await store.load("chat")
        assert conversation is not None
        conversation.messages += turn(str(number))
        task = asyncio.create_task(store.save(conversation))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        there = await said(ours(pods[1]))
        await asyncio.sleep(0.01)
        assert await said(ours(pods[1])) == there


async def test_no_other_user_or_tenant_reaches_a_conversation(backend: Backend) -> None:
    await saved(ours(backend), "a")
    entries = await ours(backend).load_entries("chat")
    assert entries is not None
    for store in (ours(backend, "u2"), StmConversationStore(backend, "globex", "u1")):
        assert await store.load("chat") is None
        assert await store.list_conversations() == []
        with pytest.raises(MessageNotFound):
            await store.read_entry(entries[0].id)
        with pytest.raises(ConversationConflict):
            await store.write_record(
                ConversationRecord(conversation_id="fork", head_id=entries[0].id), expected_revision=None
            )
        await store.delete("chat")
    assert await said(ours(backend)) == ["a?", "a!"]


async def test_a_long_conversation_is_read_whole_and_its_end_is_read_alone(tmp_path: Path) -> None:
    driver = Interrupted(plugins.open_driver(f"sqlite:///{tmp_path}/stm.db"))
    async with Backend(driver) as backend:
        store = ours(backend)
        await saved(store, *map(str, range(300)))
        everything = [f"{number}{end}" for number in range(300) for end in "?!"]
        assert await said(store) == everything
        driver.arm(0)
        assert await said(ours(backend), limit=10) == everything[-10:]
        assert driver.done == 2
        driver.arm(0)
        window = await store.load("chat", limit=2)
        assert window is not None
        window.messages += turn("300")
        await store.save(window)
        assert driver.done <= 6
        left = await store.branch("chat", at=100, expected_revision=window.revision)
        left.messages += turn("other")
        await store.save(left)
        assert await said(store) == [*everything[:100], "other?", "other!"]
        (record,) = await store.list_conversations()
        old = await store.read_history(record.branches[0])
        assert words([one.message for one in old]) == [*everything, "300?", "300!"]
        assert await said(store, limit=4) == [*everything[98:100], "other?", "other!"]


# Ours: what users of this library expect


async def test_a_conversation_a_user_and_a_tenant_are_erased_with_all_forks_of_theirs(
    backend: Backend,
) -> None:
    store = ours(backend)
    await saved(store, "a")
    await store.fork("chat", new_conversation_id="fork")
    await saved(ours(backend, "u2"), "a")
    assert await backend.sessions.erase(KEY)
    assert await store.load("chat") is None
    assert await said(store, "fork") == ["a?", "a!"]
    receipt = await backend.sessions.erase_with_receipt("acme", "u1")
    assert receipt.complete
    assert await ours(backend).list_conversations() == []
    assert not await backend.sessions.has("acme", "u1")
    await backend.sessions.erase_tenant("acme")
    assert await ours(backend, "u2").load("chat") is None


@pytest.mark.usefixtures("_no_touches")
async def test_of_a_conversation_its_end_alone_is_read(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved(ours(backend), *map(str, range(100)))
    load, read = backend.driver.load, list[int]()

    async def counting(key: Key, **options: Any) -> Record | None:
        record = await load(key, **options)
        read.append(0 if record is None else len(record.tail))
        return record

    monkeypatch.setattr(backend.driver, "load", counting)
    store = ours(backend)
    assert await said(store, limit=4) == ["98?", "98!", "99?", "99!"]
    assert await store.load("chat", limit=2) is not None
    assert max(read) <= 2 + 2 * items.MARGIN


@pytest.mark.parametrize("how", ["erased", "purged"])
async def test_what_was_erased_takes_no_save_of_the_former(backend: Backend, how: str) -> None:
    store = ours(backend)
    conversation = await saved(store, "a")
    # The store has read the record, and does not read it again.
    assert await store.load("chat") == conversation
    if how == "erased":
        await backend.sessions.erase_user("acme", "u1")
    else:
        await asyncio.sleep(0.2)
        assert (await backend.sessions.purge("acme", older_than=0.1)).logs == 1
    entry = ConversationEntry(parent_id=None, message=asks("b?"))
    record = ConversationRecord(conversation_id="chat", head_id=entry.id)
    with pytest.raises(ConversationConflict):
        await store.write_record(record, new_entries=[entry], expected_revision=conversation.revision)
    left = await backend.driver.load(keys.log_key(KEY, "pydantic-ai"))
    assert left is not None
    assert left.tail == ()
    assert b"b?" not in (left.body or b"")
    assert await ours(backend).list_conversations() == []
    await saved(store, "c")
    assert await said(store) == ["c?", "c!"]


async def test_an_export_is_imported_elsewhere_and_under_another_id(backend: Backend, tmp_path: Path) -> None:
    store = ours(backend)
    await saved(store, *map(str, range(80)), scope="x")
    await store.fork("chat", at=3, new_conversation_id="fork")
    async with open_backend(f"sqlite:///{tmp_path}/other.db") as other:
        importing = other.sessions.importing()
        for name in ("chat", "fork"):
            key = MemoryKey("acme", "u1", name)
            async for line in backend.sessions.export_log_lines(key, "pydantic-ai"):
                line["key"]["session_id"] = f"{name}2"
                await importing.add(json.loads(json.dumps(line)))
        there = ours(other)
        assert await said(there, "chat2") == await said(store)
        assert await said(there, "fork2") == ["0?", "0!", "1?"]
        (fork, chat) = await there.list_conversations()
        assert (fork.conversation_id, chat.conversation_id) == ("fork2", "chat2")
        await saved(there, "more", name="chat2")
        assert (await said(there, "chat2"))[-4:] == ["79?", "79!", "more?", "more!"]


async def test_the_list_of_all_conversations_shows_its_beginning_and_its_last_message(
    backend: Backend,
) -> None:
    conversation = await saved(ours(backend), "Book a table", "For two")
    conversation.messages.append(
        ModelRequest(parts=[ToolReturnPart("book", "secret", "c"), UserPromptPart(["At noon"])])
    )
    await ours(backend).save(conversation)
    await backend.conversations.rebuild("acme", "u1")
    card = await backend.conversations.get(KEY)
    assert (card.title, card.preview, card.turns) == ("Book a table?", "At noon", 5)
    assert card.kinds == ("pydantic-ai",)
    assert [one async for one in backend.sessions.logs("acme", "u1")] == [("pydantic-ai", KEY)]
    assert [one async for one in backend.sessions.logs("acme", "u1", "pydantic-ai")] == [("pydantic-ai", KEY)]
    assert [one async for one in backend.sessions.logs("acme", "u1", "langchain")] == []
    others = [one async for one in backend.stats.others("acme", "u1")]
    assert "pydantic-ai" in {getattr(one, "kind", None) for one in others}


def test_the_command_line_shows_copies_and_erases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = pytest.importorskip("stm_backends.cli.app").app
    cli = pytest.importorskip("typer.testing").CliRunner()
    monkeypatch.setenv("COLUMNS", "120")
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "other")]

    async def stored(url: str, *texts: str) -> list[Any]:
        async with open_backend(url) as backend:
            await saved(ours(backend), *texts)
            return await said(ours(backend))

    def run(*arguments: str) -> str:
        done = cli.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    there = asyncio.run(stored(urls[0], "Book a table", "For two"))
    shown = run("history", "acme:u1:chat", "--url", urls[0])
    assert re.findall(r"(\d) +(\w+) +(.+)", shown)[:2] == [
        ("0", "request", "Book a table?"),
        ("1", "response", "Book a table!"),
    ]
    run("copy", *urls, "--tenant", "acme")
    assert asyncio.run(stored(urls[1])) == there
    run("erase", "acme:u1", "--yes", "--url", urls[1])
    assert asyncio.run(stored(urls[1], "new")) == ["new?", "new!"]


async def test_it_expires_after_its_last_save_and_not_before(backend: Backend) -> None:
    brief, kept = ours(backend, ttl_s=0.3), ours(backend)
    await saved(brief, "a")
    await saved(kept, "a", name="kept")
    await asyncio.sleep(0.5)
    assert await brief.load("chat") is None
    assert [one.conversation_id for one in await brief.list_conversations()] == ["kept"]
    await saved(brief, "b")
    assert await said(brief) == ["b?", "b!"]


def bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_what_is_stored_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "stm.db"
    sealing = Sealing(StaticKeys({"k1": bytes(32)}, primary="k1"))
    async with open_backend(f"sqlite:///{path}", sealing=sealing) as backend:
        await saved(ours(backend), "MARKER", scope="MARKER")
        await ours(backend).fork("chat", new_conversation_id="fork")
        assert await said(ours(backend), "fork") == ["MARKER?", "MARKER!"]
    assert b"MARKER" not in bytes_in(tmp_path)


async def test_an_outage_is_never_a_missing_conversation(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite:///{tmp_path}/stm.db")
    async with backend:
        store = ours(backend)
        conversation = await saved(store, "a")
    record = ConversationRecord(conversation_id="chat", head_id=None)
    for work in (
        store.load("chat"),
        store.save(conversation),
        store.list_conversations(),
        store.delete("chat"),
        store.read_entry("a"),
        store.write_record(record, expected_revision="other"),
    ):
        with pytest.raises(Unavailable):
            await work


async def test_without_a_tenant_a_user_or_an_id_there_is_no_conversation(backend: Backend) -> None:
    for owner in (("", "u1"), ("acme", " "), (None, "u1")):
        given: Any = owner
        with pytest.raises(InvalidKey):
            StmConversationStore(backend, *given)
    for name in ("", " ", "x" * 2000):
        with pytest.raises(InvalidKey):
            await ours(backend).load(name)
    given = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match="not str"):
        StmConversationStore(given, "acme", "u1")
    with pytest.raises(ConfigurationError, match="ttl_s"):
        ours(backend, ttl_s=-1)


class Odd:
    """A value that no one can write as JSON."""


async def test_what_could_not_be_read_again_is_not_stored_and_not_quoted(backend: Backend) -> None:
    store = ours(backend)
    conversation = await saved(store, "a")
    odd: Any = [Odd(), {"deep": Odd()}, [Odd()]]
    for content in odd:
        conversation.messages[2:] = [ModelRequest(parts=[ToolReturnPart("MARKER", content, "c")])]
        with pytest.raises(InvalidState) as refused:
            await store.save(conversation)
        assert "MARKER" not in str(refused.value)
    conversation.messages[2:] = [ModelResponse(parts=[TextPart(5)])]  # type: ignore[arg-type]
    with pytest.raises(InvalidState):
        await store.save(conversation)
    assert await said(store) == ["a?", "a!"]
    conversation.messages[2:] = turn("b")
    await store.save(conversation)
    assert await said(store) == ["a?", "a!", "b?", "b!"]


async def test_a_save_that_is_too_large_is_refused_as_a_whole(tmp_path: Path) -> None:
    async with open_backend("memory://", max_entry_bytes=64 * 1024, max_record_bytes=256 * 1024) as backend:
        store = ours(backend)
        conversation = await saved(store, "a")
        conversation.messages += [asks("small"), says("x" * (70 * 1024 * 1024))]
        with pytest.raises(TooLarge):
            await store.save(conversation)
        assert await said(store) == ["a?", "a!"]
    del tmp_path


@pytest.mark.parametrize(
    "item",
    [
        {"record": {"format_version": 2}},
        {"record": None},
        {"record": "x"},
    ],
)
async def test_a_record_that_cannot_be_read_is_an_error_and_is_not_written_over(
    backend: Backend, item: dict[str, Any]
) -> None:
    conversation = await saved(ours(backend), "a")
    await backend.item_log(KEY, "pydantic-ai").add([item])
    for work in (
        ours(backend).load("chat"),
        ours(backend).save(conversation),
        ours(backend).delete("chat"),
        ours(backend).list_conversations(),
    ):
        with pytest.raises(Corrupt, match=backend.name):
            await work
    assert (await backend.item_log(KEY, "pydantic-ai").read()).count == 3


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "e", "parent": None, "message": {"kind": "MARKER"}},
        {"id": "e", "parent": None, "message": None},
        {"id": 5, "parent": None, "message": {}},
        {"id": "e", "message": {}},
    ],
)
async def test_a_message_that_cannot_be_read_is_an_error_that_does_not_quote_it(
    backend: Backend, entry: dict[str, Any]
) -> None:
    await saved(ours(backend), "a")
    (item,) = await backend.item_log(KEY, "pydantic-ai").items(1)
    record = {**item["record"], "head_id": "e"}
    await backend.item_log(KEY, "pydantic-ai").add([{**entry, "record": record}])
    with pytest.raises(Corrupt) as refused:
        await ours(backend).load("chat")
    assert "MARKER" not in str(refused.value)


async def test_entries_that_lead_in_a_circle_end(backend: Backend) -> None:
    store = ours(backend)
    entries = [
        ConversationEntry(id="a", parent_id="b", message=asks("a?")),
        ConversationEntry(id="b", parent_id="a", message=says("a!")),
    ]
    record = ConversationRecord(conversation_id="chat", head_id="b")
    await store.write_record(record, new_entries=entries, expected_revision=None)
    assert [one.id for one in await store.read_history("b")] == ["a", "b"]


async def test_an_import_that_was_cut_short_shows_what_was_saved_before(backend: Backend) -> None:
    await saved(ours(backend), "a")
    message = {"id": "e", "parent": None, "message": {"kind": "request", "parts": []}}
    await backend.item_log(KEY, "pydantic-ai").add([message] * 20)
    assert await said(ours(backend)) == ["a?", "a!"]
    await saved(ours(backend), "b")
    assert await said(ours(backend)) == ["a?", "a!", "b?", "b!"]


# The adapters for user interfaces


def vercel(agent: Agent, store: ConversationStore, text: str, message_id: str, **options: Any) -> Any:
    kind: Any = RegenerateMessage if options.pop("again", False) else SubmitMessage
    message = UIMessage(id=message_id, role="user", parts=[TextUIPart(text=text)])
    trigger = {"trigger": "regenerate-message"} if kind is RegenerateMessage else {}
    given = kind(id="chat", messages=[message], **trigger)
    return VercelAIAdapter(agent=agent, run_input=given, conversation_store=store, **options)


def ag_ui(agent: Agent, store: ConversationStore, text: str, message_id: str, **options: Any) -> Any:
    core = pytest.importorskip("ag_ui.core")
    from pydantic_ai.ui.ag_ui import AGUIAdapter  # noqa: PLC0415 -- needs the protocol

    given = core.RunAgentInput(
        threadId="chat",
        runId=f"run-{message_id}",
        state=None,
        messages=[core.UserMessage(id=message_id, content=text)],
        tools=[],
        context=[],
        forwardedProps=None,
    )
    return AGUIAdapter(agent=agent, run_input=given, conversation_store=store, **options)


ADAPTERS = pytest.mark.parametrize("adapter", [vercel, ag_ui])


async def events_of(adapter: Any) -> str:
    return "".join([one async for one in adapter.encode_stream(adapter.run_stream())])


@ADAPTERS
async def test_an_adapter_continues_a_conversation_of_which_it_is_sent_the_new_message_alone(
    stores: Stores, adapter: Any
) -> None:
    model = Scripted("Noted.", "Teal.")
    first = await events_of(adapter(model.agent, stores(), "It is teal.", "m1"))
    second = await events_of(adapter(model.agent, stores(), "What is it?", "m2"))
    assert words(model.asked[1]) == ["It is teal.", "Noted.", "What is it?"]
    entries = await stores().load_entries("chat")
    assert entries is not None
    assert [one.id in first for one in entries] == [True, True, False, False]
    assert [one.id in second for one in entries] == [False, False, True, True]


@ADAPTERS
async def test_an_adapter_reaches_no_conversation_of_another_scope(stores: Stores, adapter: Any) -> None:
    model = Scripted("Noted.", "Never said.")
    await events_of(adapter(model.agent, stores(), "It is teal.", "m1", conversation_scope="u1"))
    heard = await events_of(adapter(model.agent, stores(), "What is it?", "m2", conversation_scope="u2"))
    assert "not found" in heard
    assert len(model.asked) == 1


@ADAPTERS
async def test_an_adapter_tells_of_a_save_by_another_in_between(stores: Stores, adapter: Any) -> None:
    model = Scripted("Noted.", "Too late.")
    await events_of(adapter(model.agent, stores(), "It is teal.", "m1"))
    stream = adapter(model.agent, stores(), "What is it?", "m2").run_stream()
    first = await anext(stream)
    while len(model.asked) < 2:
        first = await anext(stream)
    await saved(stores(), "other")
    rest = [first, *[one async for one in stream]]
    assert "changed" in str(rest)
    assert await said(stores()) == ["It is teal.", "Noted.", "other?", "other!"]


async def test_an_answer_that_is_asked_for_again_leaves_the_former_as_a_branch(stores: Stores) -> None:
    model = Scripted("Noted.", "Noted again.")
    await events_of(vercel(model.agent, stores(), "It is teal.", "m1"))
    await events_of(vercel(model.agent, stores(), "It is teal.", "m1", again=True))
    assert await said(stores()) == ["It is teal.", "Noted again."]
    (record,) = await stores().list_conversations()
    left = await stores().read_history(record.branches[0])
    assert words([one.message for one in left]) == ["It is teal.", "Noted."]
