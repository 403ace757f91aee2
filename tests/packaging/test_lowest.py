"""Every extra works with the lowest versions that it admits, each in an environment of its own.

Run by `nox -s lowest`, which brings uv and the servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stm_backends import open_backend
from tests.support.places import Place

pytest.importorskip("uv", reason="`nox -s lowest` brings what these tests install with")

ROOT = Path(__file__).parents[2]

SUITE = """
import functools, os
import pytest
from stm_backends.testing import Datastore, DriverContract

opted_out = {{}}
{opens}

class TestAtTheLowestVersions(DriverContract):
    quick = True
    opted_out = opted_out

    @pytest.fixture
    def datastore(self):
        opening = functools.partial(open_there, os.environ["PLACE"])
        return Datastore(open=opening, tick=1.0, histories=3)
"""

ON_URL = "from stm_backends.testing import open_at as open_there"

ON_BOTO3 = """
import boto3
from stm_backends_dynamo import DynamoDriver, DynamoSettings

async def open_there(url):
    settings = DynamoSettings.from_url(url)
    client = boto3.client("dynamodb", region_name=settings.region, endpoint_url=settings.endpoint_url)
    driver = DynamoDriver(DynamoSettings(table=settings.table), client=client)
    await driver.open()
    return driver
"""

ON_MOTOR = """
from motor.motor_asyncio import AsyncIOMotorClient
from stm_backends_mongo import MongoDriver, MongoSettings

opted_out = {
    "test_a_driver_whose_event_loop_has_ended_can_be_opened_again":
        "a client that was handed in keeps the event loop that it was made in",
}

class OnMotor(MongoDriver):
    async def close(self):
        await super().close()
        self._given.close()

async def open_there(url):
    settings = MongoSettings.from_url(url)
    driver = OnMotor(MongoSettings(database=settings.database), client=AsyncIOMotorClient(settings.url))
    await driver.open()
    return driver
"""

ON_DATASTORE: Mapping[str, tuple[str, str]] = {
    "redis": ("redis", ON_URL),
    "postgres": ("postgres", ON_URL),
    "mongo": ("mongo", ON_URL),
    "mongo-motor": ("mongo", ON_MOTOR),
    "dynamo": ("dynamo", ON_URL),
    "dynamo-boto3": ("dynamo", ON_BOTO3),
}
"""The datastore of each such extra, and how a driver is opened there."""

SEALED = """
from stm_backends import Sealing, StaticKeys
options = {"sealing": Sealing(StaticKeys({"k1": bytes(32)}, primary="k1"))}
"""

OBSERVED = """
from stm_backends.telemetry.opentelemetry import Telemetry
options = {"observer": Telemetry()}
"""

SUMMARIZED = """
import json
from stm_backends.integrations.openai import OpenAISummarizer
from tests.integrations.endpoint import Endpoint, completion

async def use(backend):
    summary = "<session_summary>\\nA table.\\n</session_summary>"
    with Endpoint(completion(json.dumps({"summary": summary}))) as endpoint:
        ask = OpenAISummarizer("m", base_url=endpoint.url, api_key="none")
        turns = [{"user": "A table, please.", "assistant": "Booked."}]
        assert (await ask({"previous_summary": "", "turns": turns}))["summary"] == summary
"""

IN_A_SESSION = """
from stm_backends.integrations.openai_agents import StmSession

async def use(backend):
    session = StmSession(backend, KEY)
    await session.add_items([{"role": "user", "content": "Hello"}])
    assert len(await session.get_items()) == 1
"""

IN_A_HISTORY = """
from langchain_core.messages import HumanMessage
from stm_backends.integrations.langchain import StmChatMessageHistory

async def use(backend):
    history = StmChatMessageHistory(backend, KEY)
    await history.aadd_messages([HumanMessage("Hello")])
    assert [message.content for message in await history.aget_messages()] == ["Hello"]
"""

AS_A_TRANSCRIPT = """
from stm_backends.integrations.claude_agent_sdk import StmSessionStore

async def use(backend):
    store = StmSessionStore(backend)
    key = {"project_key": "p", "session_id": "3f2b9c1e-5d0a-4c57-9a51-0c8f6d1e2a77"}
    entries = [{"type": "user", "uuid": "e1", "message": {"role": "user", "content": "Hello"}}]
    await store.append(key, entries)
    assert await store.load(key) == entries
"""

IN_A_CONVERSATION = """
from pydantic_ai import Agent, Conversation
from pydantic_ai.models.test import TestModel
from stm_backends.integrations.pydantic_ai import StmConversationStore

async def use(backend):
    store = StmConversationStore(backend, "acme", "u1")
    await store.save(await Agent(TestModel()).run("Hello", conversation=Conversation(conversation_id="chat")))
    assert len((await store.load("chat")).messages) == 2
"""

OF_AN_APP = """
from stm_backends.integrations.google_adk import StmSessionService

async def use(backend):
    sessions, whose = StmSessionService(backend), {"app_name": "shop", "user_id": "u1"}
    created = await sessions.create_session(**whose, state={"user:visits": 1})
    assert (await sessions.get_session(**whose, session_id=created.id)).state == {"user:visits": 1}
"""

IN_A_THREAD = """
from langgraph.graph import START, MessagesState, StateGraph
from stm_backends.integrations.langgraph import StmSaver, StmStore

async def use(backend):
    builder = StateGraph(MessagesState).add_node("answer", lambda state: {"messages": [("ai", "Hi")]})
    builder.add_edge(START, "answer")
    graph = builder.compile(checkpointer=StmSaver(backend), store=StmStore(backend))
    for count in (2, 4):
        state = await graph.ainvoke({"messages": ["Hello"]}, {"configurable": {"thread_id": "chat"}})
        assert len(state["messages"]) == count
"""

IN_A_PROVIDER = """
from agent_framework import Message
from stm_backends.integrations.agent_framework import StmHistoryProvider

async def use(backend):
    history = StmHistoryProvider(backend, lambda session_id: KEY)
    await history.save_messages("chat", [Message("user", ["Hello"])])
    assert [message.text for message in await history.get_messages("chat")] == ["Hello"]
"""

IN_A_STORAGE = """
from stm_backends.integrations.strands import StmStorage

async def use(backend):
    loop = asyncio.get_running_loop()
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(30)
    storage = StmStorage(backend, "acme", "u1", run=run)
    await storage.write("notes/tea.md", b"Tea")
    assert await storage.read("notes/tea.md") == b"Tea"
"""

IN_A_CHAT_STORE = """
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from stm_backends.integrations.llama_index import StmChatStore

async def use(backend):
    memory = ChatMemoryBuffer.from_defaults(chat_store=StmChatStore(backend, "acme", "u1"))
    await memory.aput(ChatMessage("Hello"))
    assert [message.content for message in await memory.aget()] == ["Hello"]
"""

AT_THE_COMMAND_LINE = """
import subprocess, sys

async def use(backend):
    for command in (["drivers"], ["ping", "--url", "memory://"], ["--version"]):
        subprocess.run([sys.executable, "-m", "stm_backends", *command], check=True)
"""

ON_A_PAGE = """
import json
from stm_backends.inspect.app import inspector

async def use(backend):
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    page = inspector(backend, token="secret", hosts=frozenset({"127.0.0.1:1"}))
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
             "scheme": "http", "path": "/secret/api/tenants", "query_string": b"",
             "headers": [(b"host", b"127.0.0.1:1")]}
    await page(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    assert json.loads(sent[1]["body"])["tenants"] == []
"""

ALONE: Mapping[str, str] = {
    "encryption": SEALED,
    "otel": OBSERVED,
    "openai": SUMMARIZED,
    "openai-agents": IN_A_SESSION,
    "langchain": IN_A_HISTORY,
    "claude-agent-sdk": AS_A_TRANSCRIPT,
    "pydantic-ai": IN_A_CONVERSATION,
    "google-adk": OF_AN_APP,
    "langgraph": IN_A_THREAD,
    "agent-framework": IN_A_PROVIDER,
    "strands": IN_A_STORAGE,
    "llama-index": IN_A_CHAT_STORE,
    "cli": AT_THE_COMMAND_LINE,
    "inspect": ON_A_PAGE,
}
"""What is done with each extra that needs no server."""

PROGRAM = """
import asyncio
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend

KEY, options = MemoryKey("acme", "u1", "chat"), {{}}

async def use(backend):
    memory = backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation"))
    await memory.add_turn(ConversationTurn("Hello", "Hi"))
    assert [turn.user_message for turn in await memory.turns()] == ["Hello"]
{extra}
async def main():
    async with open_backend("memory://", **options) as backend:
        await use(backend)

asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """What makes an environment with extras at their lowest versions; returns its Python."""

    def make(*extras: str) -> Path:
        run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "lowest")
        python = tmp_path / "lowest" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        lowest = ("--quiet", "--resolution", "lowest-direct", "--python", python)
        run(sys.executable, "-m", "uv", "pip", "install", *lowest, f"{ROOT}[{','.join(extras)}]")
        return python

    return make


def run(*command: str | Path, **environment: str) -> None:
    """Run a command, with no more of Python's own variables than these."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PY")}
    done = subprocess.run(
        [str(part) for part in command],
        env={**others, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_every_extra_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    tried = {*ON_DATASTORE, *ALONE, "conformance"}  # which the suite needs
    assert tried == project["optional-dependencies"].keys() - {"all"}


@pytest.mark.full
@pytest.mark.parametrize("extra", ON_DATASTORE)
async def test_the_suite_passes_at_the_lowest_versions(
    extra: str, place_on: Callable[[str], Place], environment: Callable[..., Path], tmp_path: Path
) -> None:
    datastore, opens = ON_DATASTORE[extra]
    url = place_on(datastore).url
    async with open_backend(url, create=True):
        pass
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE.format(opens=opens))
    plugin = ("-p", "stm_backends.testing")
    run(environment(extra, "conformance"), "-m", "pytest", "-q", *plugin, suite, PLACE=url)


@pytest.mark.full
@pytest.mark.parametrize("extra", ALONE)
def test_an_extra_works_at_its_lowest_versions(
    extra: str, environment: Callable[..., Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(extra=ALONE[extra]))
    run(environment(extra), program, PYTHONPATH=str(ROOT))
