"""What can be done with everything that is stored here can be done with what each framework stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from agent_framework import Message
from google.adk.events import Event
from google.genai import types
from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.graph import START, StateGraph, add_messages
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType
from typer.testing import CliRunner

from stm_backends import Backend, LimitReached, Limits, MemoryKey, SealMismatch, open_backend
from stm_backends.admin.copying import Copy, Owner
from stm_backends.cli.app import app as command
from stm_backends.drivers.contract import Key
from stm_backends.integrations.agent_framework import StmHistoryProvider
from stm_backends.integrations.google_adk import StmSessionService
from stm_backends.integrations.langchain import StmChatMessageHistory
from stm_backends.integrations.langgraph import StmSaver
from stm_backends.integrations.openai_agents import StmSession
from stm_backends.integrations.strands import StmSessionRepository
from stm_backends.records import keys
from stm_backends.records.keys import LogKind
from tests.support.sealed import SEALING

KEY = MemoryKey("acme", "u1", "chat")
TEXTS = ["MARKER one", "MARKER two", "MARKER three"]


@dataclass(frozen=True)
class Framework:
    """How a framework adds texts of a user to a conversation, and which of these it shows."""

    kind: LogKind
    add: Callable[[Backend, MemoryKey, Sequence[str]], Awaitable[None]]
    shown: Callable[[Backend, MemoryKey], Awaitable[list[str]]]


# Each of them


async def add_to_session(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    given: Any = [{"role": "user", "content": text} for text in texts]
    await StmSession(backend, key).add_items(given)


async def shown_of_session(backend: Backend, key: MemoryKey) -> list[str]:
    found: list[Any] = [*await StmSession(backend, key).get_items()]
    return [item["content"] for item in found]


async def add_to_langchain(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    await StmChatMessageHistory(backend, key).aadd_messages([HumanMessage(text) for text in texts])


async def shown_of_langchain(backend: Backend, key: MemoryKey) -> list[str]:
    return [str(message.content) for message in await StmChatMessageHistory(backend, key).aget_messages()]


def history_of(backend: Backend, key: MemoryKey) -> StmHistoryProvider:
    return StmHistoryProvider(backend, lambda session: MemoryKey(key.tenant_id, key.user_id, session))


async def add_to_agent_framework(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    messages = [Message("user", [text]) for text in texts]
    await history_of(backend, key).save_messages(key.session_id, messages)


async def shown_of_agent_framework(backend: Backend, key: MemoryKey) -> list[str]:
    return [message.text for message in await history_of(backend, key).get_messages(key.session_id)]


def in_adk(key: MemoryKey) -> dict[str, str]:
    return {"app_name": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}


async def add_to_adk(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    service = StmSessionService(backend)
    session = await service.get_session(**in_adk(key)) or await service.create_session(**in_adk(key))
    for text in texts:
        await service.append_event(session, Event(author="user", content=types.UserContent(text)))
    await service.flush()


async def shown_of_adk(backend: Backend, key: MemoryKey) -> list[str]:
    session = await StmSessionService(backend).get_session(**in_adk(key))
    events = [] if session is None else session.events
    return [part.text or "" for one in events if one.content for part in one.content.parts or ()]


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def answered(state: State) -> State:
    return {"messages": []}


def graph_on(backend: Backend) -> Any:
    builder: Any = StateGraph(State)
    builder.add_node("answer", answered)
    builder.add_edge(START, "answer")
    saver = StmSaver(backend, key_of=lambda thread: MemoryKey(*thread.split("/")), tenants=["acme"])
    return builder.compile(checkpointer=saver)


def in_langgraph(key: MemoryKey) -> Any:
    return {"configurable": {"thread_id": f"{key.tenant_id}/{key.user_id}/{key.session_id}"}}


async def add_to_langgraph(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    for text in texts:
        await graph_on(backend).ainvoke({"messages": [HumanMessage(text)]}, in_langgraph(key))


async def shown_of_langgraph(backend: Backend, key: MemoryKey) -> list[str]:
    state = await graph_on(backend).aget_state(in_langgraph(key))
    return [message.content for message in state.values.get("messages", [])]


def repository_of(backend: Backend, key: MemoryKey) -> StmSessionRepository:
    loop = asyncio.get_running_loop()

    def run(work: Any, /) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    return StmSessionRepository(backend, key.tenant_id, key.user_id, run=run)


async def add_to_strands(backend: Backend, key: MemoryKey, texts: Sequence[str]) -> None:
    sessions, session = repository_of(backend, key), key.session_id

    def work() -> None:
        if sessions.read_session(session) is None:
            sessions.create_session(Session(session, SessionType.AGENT))
        sessions.create_agent(session, SessionAgent("default", {"last": texts[-1]}, {}))
        first = len(sessions.list_messages(session, "default"))
        for number, text in enumerate(texts, first):
            message = SessionMessage.from_message({"role": "user", "content": [{"text": text}]}, number)
            sessions.create_message(session, "default", message)

    await asyncio.to_thread(work)


async def shown_of_strands(backend: Backend, key: MemoryKey) -> list[str]:
    found = await asyncio.to_thread(repository_of(backend, key).list_messages, key.session_id, "default")
    return [content["text"] for one in found for content in one.to_message()["content"] if "text" in content]


FRAMEWORKS = (
    Framework("openai-agents", add_to_session, shown_of_session),
    Framework("langchain", add_to_langchain, shown_of_langchain),
    Framework("agent-framework", add_to_agent_framework, shown_of_agent_framework),
    Framework("google-adk", add_to_adk, shown_of_adk),
    Framework("langgraph", add_to_langgraph, shown_of_langgraph),
    Framework("strands", add_to_strands, shown_of_strands),
)

pytestmark = pytest.mark.parametrize("framework", FRAMEWORKS, ids=[one.kind for one in FRAMEWORKS])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/stm.db"


async def records_of(backend: Backend, key: MemoryKey) -> list[Key]:
    """Return where anything is that was said, but for cards of the catalogue, which tasks write."""
    found: list[Key] = []
    for kind in (*keys.LOG_KINDS, "blob", "page", "part"):
        scope = keys.scope(key.tenant_id, key.user_id, kind)
        found += [Key(scope, name) for name in (await backend.driver.scan(scope, limit=1_000)).names]
    return found


# What can be done with it


@pytest.mark.parametrize("whose", [("acme",), ("acme", "u1"), ("acme", "u1", "chat")], ids=len)
async def test_what_is_erased_is_gone_and_can_begin_anew(
    framework: Framework, url: str, whose: tuple[str, ...]
) -> None:
    other = MemoryKey("globex", "u1", "chat")
    async with open_backend(url) as backend:
        for key in (KEY, other):
            await framework.add(backend, key, TEXTS)
        receipt = await backend.sessions.erase_with_receipt(*whose)
        assert receipt.complete
        assert receipt.erased["logs"] == 1
        assert await records_of(backend, KEY) == []
        assert await framework.shown(backend, KEY) == []
        assert await framework.shown(backend, other) == TEXTS
        await framework.add(backend, KEY, ["anew"])
        assert await framework.shown(backend, KEY) == ["anew"]


async def test_it_is_exported_imported_copied_and_continued(
    framework: Framework, url: str, tmp_path: Path
) -> None:
    others = [f"sqlite:///{tmp_path}/{name}.db" for name in ("imported", "copied")]
    async with (
        open_backend(url) as backend,
        open_backend(others[0]) as imported,
        open_backend(others[1]) as copied,
    ):
        await framework.add(backend, KEY, TEXTS)
        lines = [line async for line in backend.sessions.export_log_lines(KEY, framework.kind)]
        importing = imported.sessions.importing()
        assert KEY in [await importing.add(json.loads(json.dumps(line))) for line in lines]
        copy = Copy(backend.driver, copied.driver, [Owner("acme")])
        await copy.copy()
        await copy.verify()
        assert copy.ok
        for place in (imported, copied):
            assert await framework.shown(place, KEY) == TEXTS
            await framework.add(place, KEY, ["later"])
            assert await framework.shown(place, KEY) == [*TEXTS, "later"]
        assert await framework.shown(backend, KEY) == TEXTS


async def test_the_command_line_lists_shows_and_counts_it(framework: Framework, url: str) -> None:
    async with open_backend(url) as backend:
        await framework.add(backend, KEY, TEXTS)

    def cli(*arguments: str) -> str:
        done = CliRunner().invoke(command, [*arguments, "--url", url])
        assert done.exit_code == 0, done.output
        return done.stdout

    def told() -> None:
        assert cli("ls", "acme:u1").split() == ["acme:u1:chat"]
        assert json.loads(cli("ls", "acme:u1", "--json").splitlines()[0])["logs"] == [framework.kind]
        assert "MARKER one" in cli("ls", "acme:u1", "--recent", "5")
        assert "MARKER three" in cli("show", "acme:u1:chat")
        assert "MARKER three" in cli("history", "acme:u1:chat")
        assert json.loads(cli("stats", "acme", "--json").splitlines()[0])["logs"] == 1

    await asyncio.to_thread(told)


async def test_a_list_of_conversations_shows_how_it_began(framework: Framework, url: str) -> None:
    async with open_backend(url) as backend:
        await framework.add(backend, KEY, TEXTS)
    async with open_backend(url) as backend:
        (card,) = (await backend.conversations.list("acme", "u1")).cards
        assert (card.key, card.title, card.kinds) == (KEY, TEXTS[0], (framework.kind,))


async def test_a_purge_removes_what_is_old_with_all_that_belongs_to_it(
    framework: Framework, url: str
) -> None:
    async with open_backend(url) as backend:
        await framework.add(backend, KEY, TEXTS)
        await asyncio.sleep(0.3)
        purged = await backend.sessions.purge("acme", older_than=0.2)
        assert purged.logs == 1
        assert await framework.shown(backend, KEY) == []
        for where in await records_of(backend, KEY):
            assert not where.scope.endswith(":blob")
            record = await backend.driver.load(where)
            assert record is None or not record.tail
        await framework.add(backend, KEY, ["anew"])
        assert await framework.shown(backend, KEY) == ["anew"]


async def test_a_limit_refuses_what_is_too_much_and_no_more(framework: Framework, url: str) -> None:
    async with open_backend(url, limits=Limits(turn_characters=20_000)) as backend:
        with pytest.raises(LimitReached):
            await framework.add(backend, KEY, ["x" * 50_000])
        assert await framework.shown(backend, KEY) == []
        await framework.add(backend, KEY, TEXTS)
        assert await framework.shown(backend, KEY) == TEXTS


async def test_nothing_of_it_can_be_read_without_the_keys(
    framework: Framework, url: str, tmp_path: Any
) -> None:
    async with open_backend(url, sealing=SEALING) as backend:
        await framework.add(backend, KEY, TEXTS)
        assert (await backend.sessions.reseal("acme")).ok
        assert await framework.shown(backend, KEY) == TEXTS
    assert not [file.name for file in tmp_path.iterdir() if b"MARKER" in file.read_bytes()]
    async with open_backend(url) as backend:
        with pytest.raises(SealMismatch):
            await framework.shown(backend, KEY)


async def test_an_observer_hears_of_it_without_what_was_said(framework: Framework, url: str) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.support.telemetry import Ear  # noqa: PLC0415 -- needs the SDK

    ear, key = Ear(), MemoryKey("MARKER-t", "MARKER-u", "MARKER-s")
    async with open_backend(url, observer=ear.telemetry) as backend:
        await framework.add(backend, key, TEXTS)
        assert await framework.shown(backend, key) == TEXTS
        assert await backend.sessions.erase_tenant("MARKER-t")
    heard = {
        (attributes["db.operation.name"], attributes.get("error.type"))
        for attributes, _ in ear.points()["db.client.operation.duration"]
    }
    assert {("load", None), ("append", None), ("delete", None)} <= heard
    assert "MARKER" not in ear.exported()
