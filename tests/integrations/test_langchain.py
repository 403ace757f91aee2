"""LangChain's message history: every kind of message, LangChain's own runner, hostile stores, outages."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.chat_history import BaseChatMessageHistory, InMemoryChatMessageHistory
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.load.load import Reviver
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables.history import RunnableWithMessageHistory

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryKey,
    TooLarge,
    Unavailable,
    logs,
    open_backend,
    sync,
)
from stm_backends.integrations.langchain import StmChatMessageHistory

KEY = MemoryKey("acme", "u1", "chat")

EVERY_KIND: list[BaseMessage] = [
    SystemMessage("Be brief."),
    HumanMessage(
        [{"type": "text", "text": "é \0"}, {"type": "image_url", "image_url": {"url": "x"}}], id="h"
    ),
    AIMessage(
        "",
        tool_calls=[{"name": "stock", "args": {"item": "tea"}, "id": "c1", "type": "tool_call"}],
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        response_metadata={"finish_reason": "tool_calls"},
    ),
    ToolMessage("3", tool_call_id="c1", artifact={"rows": [1, None]}, status="error"),
    FunctionMessage("3", name="stock"),
    ChatMessage("hm", role="critic"),
    AIMessageChunk("part"),
    RemoveMessage(id="h"),
    AIMessage("Three.", additional_kwargs={"reasoning": "counted"}, name="clerk"),
]


@pytest.fixture
def history(backend: Backend) -> StmChatMessageHistory:
    return StmChatMessageHistory(backend, KEY)


async def texts(history: StmChatMessageHistory) -> list[object]:
    return [message.content for message in await history.aget_messages()]


async def test_every_kind_of_message_comes_back_as_it_was(history: StmChatMessageHistory) -> None:
    await history.aadd_messages(EVERY_KIND[:1])
    await history.aadd_messages(EVERY_KIND[1:])
    assert await history.aget_messages() == EVERY_KIND


@pytest.mark.filterwarnings("ignore:The class `InMemoryChatMessageHistory` was deprecated")
async def test_it_holds_what_langchains_own_holds(history: StmChatMessageHistory) -> None:
    own = InMemoryChatMessageHistory()
    for each in (history, own):
        assert isinstance(each, BaseChatMessageHistory)
        assert await each.aget_messages() == []
        await each.aadd_messages([])
        await each.aadd_messages([HumanMessage("a"), AIMessage("b")])
        await each.aadd_messages([HumanMessage("c")])
    assert await history.aget_messages() == await own.aget_messages()
    for each in (history, own):
        await each.aclear()
        assert await each.aget_messages() == []
        await each.aadd_messages([HumanMessage("d")])
    assert await history.aget_messages() == await own.aget_messages()


# LangChain tells its users to keep a conversation elsewhere; whoever has not moved yet uses this.
@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
async def test_a_chain_with_history_knows_on_another_machine_what_was_said(
    pods: tuple[Backend, Backend],
) -> None:
    for backend, said in zip(pods, ("It is teal.", "What is it?"), strict=True):
        chain = RunnableWithMessageHistory(
            FakeMessagesListChatModel(responses=[AIMessage("Noted.")]),
            lambda session_id, backend=backend: StmChatMessageHistory(
                backend, MemoryKey("acme", "u1", session_id)
            ),
        )
        await chain.ainvoke([HumanMessage(said)], config={"configurable": {"session_id": "chat"}})
    assert await texts(StmChatMessageHistory(pods[0], KEY)) == [
        "It is teal.",
        "Noted.",
        "What is it?",
        "Noted.",
    ]


async def test_machines_that_add_at_once_lose_nothing(pods: tuple[Backend, Backend]) -> None:
    async def many(backend: Backend, name: str) -> None:
        for number in range(20):
            pair = [HumanMessage(f"{name}{number}"), AIMessage(f"{name}{number}!")]
            await StmChatMessageHistory(backend, KEY).aadd_messages(pair)

    await asyncio.gather(*(many(backend, name) for backend, name in zip(pods, "ab", strict=True)))
    found = await texts(StmChatMessageHistory(pods[0], KEY))
    for name in "ab":
        own = [text for text in found if str(text).startswith(name)]
        assert own == [f"{name}{number}{end}" for number in range(20) for end in ("", "!")]
    # What was added together stands together.
    assert all(f"{text}!" == after for text, after in zip(found[::2], found[1::2], strict=True))


# What is stored becomes no class but LangChain's messages


class Own(HumanMessage):
    """A message of a kind that LangChain does not know."""

    type: Any = "own"


async def test_a_message_that_could_not_be_read_again_is_not_stored(history: StmChatMessageHistory) -> None:
    with pytest.raises(InvalidState, match="could not load again"):
        await history.aadd_messages([HumanMessage("a"), Own("secret")])
    assert await history.aget_messages() == []


async def test_what_is_not_json_is_converted_beside_a_message(history: StmChatMessageHistory) -> None:
    class Colour(Enum):
        RED = "red"

    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    artifact = {
        "bytes": b"\x00\xff",
        "at": at,
        "price": Decimal("1.50"),
        "tags": {"a"},
        "error": ValueError("too late"),
        "more": (timedelta(seconds=90), Colour.RED, Path("a/b"), UUID(int=1), at.date(), frozenset({1})),
        3: {None: "left out", True: "kept"},
    }
    tool = ToolMessage("3", tool_call_id="c", artifact=artifact)
    await history.aadd_messages([HumanMessage("a", additional_kwargs={"at": at}), tool])
    human, found = await history.aget_messages()
    assert human.additional_kwargs == {"at": at.isoformat()}
    assert isinstance(found, ToolMessage)
    assert found.artifact == {
        "bytes": "AP8=",
        "at": "2026-01-02T03:04:05+00:00",
        "price": "1.50",
        "tags": ["a"],
        "error": "ValueError: too late",
        "more": [90.0, "red", "a/b", str(UUID(int=1)), "2026-01-02", [1]],
        "3": {"True": "kept"},
    }


async def test_what_has_no_form_in_json_is_left_out_with_a_warning(
    history: StmChatMessageHistory, caplog: pytest.LogCaptureFixture
) -> None:
    class Opaque:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Failing(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    cyclic: dict[str, Any] = {"secret": 1}
    cyclic["self"] = cyclic
    for artifact, left in (
        (Opaque(), None),
        ({"a": 1, "b": [Opaque(), 2], "c": Failing()}, {"a": 1, "b": [2]}),
        ({"n": 10**20_000}, {}),
        (cyclic, {"secret": 1, "self": {"secret": 1}}),
    ):
        logs.configure(every_s=0)
        caplog.clear()
        await history.aadd_messages([ToolMessage("3", tool_call_id="c", artifact=artifact)])
        found = (await history.aget_messages())[-1]
        assert isinstance(found, ToolMessage)
        assert (found.content, found.artifact) == ("3", left)
        assert "left out of a message" in caplog.text
        assert "secret" not in caplog.text
    logs.configure()


async def test_what_a_model_reads_is_refused_by_its_path_unless_it_is_json(
    history: StmChatMessageHistory,
) -> None:
    for message in (
        HumanMessage([{"type": "text", "text": object()}]),
        AIMessage("", tool_calls=[{"name": "f", "args": {"a": {1, 2}}, "id": "c", "type": "tool_call"}]),
    ):
        with pytest.raises(InvalidState, match=r"items\[0\]\.data\.(content|tool_calls)"):
            await history.aadd_messages([message])
    assert await history.aget_messages() == []


# Errors that LangChain's runner hides


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
@pytest.mark.parametrize("kind", ["function", "coroutine", "raises"])
async def test_a_save_that_the_runner_hides_is_told(backend: Backend, kind: str) -> None:
    told = list[Exception]()

    def tell(error: Exception) -> None:
        told.append(error)
        if kind == "raises":
            raise RuntimeError("nor does this one")

    async def tell_later(error: Exception) -> None:
        await asyncio.sleep(0)
        tell(error)

    def history(session_id: str) -> StmChatMessageHistory:
        key = MemoryKey("acme", "u1", session_id)
        return StmChatMessageHistory(backend, key, on_error=tell_later if kind == "coroutine" else tell)

    async def append(*_: Any, **__: Any) -> int:
        raise Unavailable("away", backend=backend.name, operation="append")

    chain = RunnableWithMessageHistory(FakeMessagesListChatModel(responses=[AIMessage("Noted.")]), history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.driver.inner, "append", append)
        answer = await chain.ainvoke([HumanMessage("a")], config={"configurable": {"session_id": "chat"}})
    assert answer.content == "Noted."
    assert [type(error) for error in told] == [Unavailable]
    assert await StmChatMessageHistory(backend, KEY).aget_messages() == []


async def test_an_error_is_told_and_raised(backend: Backend) -> None:
    told = list[Exception]()
    history = StmChatMessageHistory(backend, KEY, on_error=told.append)
    with pytest.raises(InvalidState) as raised:
        await history.aadd_messages([HumanMessage([{"type": "text", "text": object()}])])
    assert told == [raised.value]
    on_error: Any = "print"
    with pytest.raises(ConfigurationError, match="on_error must be a function"):
        StmChatMessageHistory(backend, KEY, on_error=on_error)


async def test_what_looks_like_a_serialized_class_stays_the_data_that_it_is(
    history: StmChatMessageHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("a class was made of what is stored")

    # What makes classes of names, wherever LangChain does that.
    monkeypatch.setattr(Reviver, "__call__", made)
    bomb = {"lc": 1, "type": "constructor", "id": ["subprocess", "Popen"], "kwargs": {"args": ["true"]}}
    message = HumanMessage([bomb], additional_kwargs={"a": bomb}, response_metadata=bomb)
    await history.aadd_messages([message])
    (found,) = await history.aget_messages()
    assert type(found) is HumanMessage
    assert found == message


@pytest.mark.parametrize(
    "item",
    [
        {"type": "subprocess.Popen", "data": {"args": "true"}},
        {"type": "constructor", "lc": 1, "id": ["langchain_core", "messages", "HumanMessage"], "kwargs": {}},
        {"type": "human"},
        {"type": "human", "data": None},
        {"type": "human", "data": {"content": {"secret": 1}}},
        {"data": {"content": "secret"}},
        {"type": ["human"], "data": {}},
        {"role": "user", "content": "secret"},
    ],
)
async def test_what_is_no_message_is_corrupt_and_nothing_is_made_of_it(
    backend: Backend, history: StmChatMessageHistory, item: dict[str, Any]
) -> None:
    await backend.item_log(KEY, "langchain").add([item])
    with pytest.raises(Corrupt, match=rf"{backend.name}\.aget_messages") as raised:
        await history.aget_messages()
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


# Keys, limits, outages


@pytest.mark.parametrize("key", [None, "acme:u1:chat", MemoryKey("acme", " ", "chat")])
async def test_without_a_key_there_is_no_history(backend: Backend, key: Any) -> None:
    with pytest.raises(InvalidKey):
        StmChatMessageHistory(backend, key)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages must be a list, not NoneType"),
        ("Hello", "messages must be a list, not str"),
        (["Hello"], "messages[0] is str, not a message of LangChain"),
        ([HumanMessage("a"), ("human", "b")], "messages[1] is tuple, not a message of LangChain"),
    ],
)
async def test_what_is_no_message_is_refused(backend: Backend, messages: Any, said: str) -> None:
    history = StmChatMessageHistory(backend, KEY)
    with pytest.raises(InvalidState, match=re.escape(said)):
        await history.aadd_messages(messages)
    assert await history.aget_messages() == []


async def test_a_negative_limit_and_what_is_no_backend_are_refused(backend: Backend) -> None:
    given: Any = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match=r"backend must come from open_backend\(\.\.\.\), not str"):
        StmChatMessageHistory(given, KEY)
    for limit in (-1, 2.5):
        with pytest.raises(ConfigurationError, match="limit must be an integer of at least 0"):
            StmChatMessageHistory(backend, KEY, limit=limit)  # pyright: ignore[reportArgumentType]
    await StmChatMessageHistory(backend, KEY).aadd_messages([HumanMessage("a")])
    assert await StmChatMessageHistory(backend, KEY, limit=0).aget_messages() == []


async def test_tenants_never_meet_and_erasing_one_leaves_the_other(backend: Backend) -> None:
    mine, others = KEY, MemoryKey("globex", "u1", "chat")
    await StmChatMessageHistory(backend, mine).aadd_messages([HumanMessage("mine")])
    await StmChatMessageHistory(backend, others).aadd_messages([HumanMessage("theirs")])
    await backend.sessions.erase_tenant("acme")
    assert await texts(StmChatMessageHistory(backend, mine)) == []
    assert await texts(StmChatMessageHistory(backend, others)) == ["theirs"]


async def test_messages_that_are_too_large_are_refused_all_together(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        history = StmChatMessageHistory(backend, KEY)
        with pytest.raises(TooLarge):
            await history.aadd_messages([HumanMessage("small"), AIMessage("x" * 5_000)])
        assert await history.aget_messages() == []


async def test_an_outage_is_never_an_empty_history(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        history = StmChatMessageHistory(backend, KEY)
    for work in (history.aget_messages(), history.aadd_messages([HumanMessage("a")]), history.aclear()):
        with pytest.raises(Unavailable):
            await work


async def test_a_conversation_that_nobody_adds_to_is_forgotten_after_its_time(backend: Backend) -> None:
    history = StmChatMessageHistory(backend, KEY, ttl_s=0.2)
    await history.aadd_messages([HumanMessage("a")])
    await asyncio.sleep(0.4)
    assert await history.aget_messages() == []


# Without an event loop


def test_methods_that_wait_name_those_that_do_not() -> None:
    history = StmChatMessageHistory(open_backend("memory://"), KEY)
    with pytest.raises(ConfigurationError, match="await aget_messages"):
        _ = history.messages
    with pytest.raises(ConfigurationError, match="await aadd_messages"):
        history.add_user_message("a")
    with pytest.raises(ConfigurationError, match="await aclear"):
        history.clear()


def test_with_a_backend_of_the_facade_they_wait(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        history = StmChatMessageHistory(backend.asynchronous, KEY, run=backend.run)
        history.add_user_message("Hello")
        history.add_messages([AIMessage("Hi")])
        assert [message.content for message in history.messages] == ["Hello", "Hi"]
        assert "Human: Hello" in str(history)
        history.clear()
        assert history.messages == []
    with pytest.raises(Unavailable):
        _ = history.messages


def test_synchronous_calls_on_the_event_loop_thread_raise() -> None:
    with sync.open_backend("memory://") as backend:
        history = StmChatMessageHistory(backend.asynchronous, KEY, run=backend.run)

        async def wrong() -> object:
            return history.messages

        with pytest.raises(ConfigurationError, match="own thread"):
            backend.run(wrong())


def test_using_it_gives_no_warning() -> None:
    program = """
import asyncio
from langchain_core.messages import HumanMessage
from stm_backends import MemoryKey, open_backend
from stm_backends.integrations.langchain import StmChatMessageHistory

async def main():
    async with open_backend("memory://") as backend:
        history = StmChatMessageHistory(backend, MemoryKey("acme", "u1", "chat"))
        await history.aadd_messages([HumanMessage("Hello")])
        print(len(await history.aget_messages()))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
