"""The command that copies threads over from LangGraph's own checkpointers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command

import stm_backends
from stm_backends import Backend, ConfigurationError, open_backend
from stm_backends.integrations.langgraph import StmSaver, copy_threads
from stm_backends.integrations.langgraph.__main__ import main
from tests.integrations.test_langgraph import graph_with, of_a_user, on, said

ROOT = Path(stm_backends.__file__).parent.parent

THREADS = ("acme/ada/1", "acme/bob/1")


async def filled(graph: Any, thread: str) -> None:
    """Say something in a thread, make a branch, and ask."""
    for number in range(3):
        await graph.ainvoke(said(str(number)), on(thread))
    history = [one async for one in graph.aget_state_history(on(thread))]
    await graph.ainvoke(said("branch"), history[7].config)
    await graph.ainvoke(said("ask me"), on(thread))


async def states(graph: Any, thread: str) -> list[Any]:
    return [
        (one.config, one.values, one.next, one.metadata) async for one in graph.aget_state_history(on(thread))
    ]


@pytest.fixture
async def theirs(tmp_path: Path) -> AsyncIterator[tuple[str, AsyncSqliteSaver]]:
    """A file that LangGraph's own checkpointer has filled, as a URL, and that checkpointer."""
    file = tmp_path / "theirs.db"
    async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
        for thread in THREADS:
            await filled(graph_with(saver), thread)
        yield f"sqlite:///{file}", saver


async def command(*arguments: str) -> str:
    """Run the command in a process of its own; returns what it prints."""
    program = [sys.executable, "-m", "stm_backends.integrations.langgraph", *arguments]
    ran = await asyncio.to_thread(
        subprocess.run, program, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def test_threads_of_the_official_sqlite_saver_are_copied_by_a_command(
    theirs: tuple[str, AsyncSqliteSaver], tmp_path: Path
) -> None:
    source, saver = theirs
    target, whose = f"sqlite:///{tmp_path}/ours.db", "tests.integrations.test_langgraph:of_a_user"
    count = len([one async for one in saver.alist(None)])
    assert count > 30
    some = len([one async for one in saver.alist(on(THREADS[0]))])
    arguments = (source, target, "--key-of", whose)
    assert await command(*arguments, "--thread", THREADS[0]) == f"{some} checkpoints were copied\n"
    assert await command(*arguments) == f"{count - some} checkpoints were copied\n"
    assert await command(*arguments) == "0 checkpoints were copied\n"
    async with open_backend(target) as backend:
        ours, old = graph_with(StmSaver(backend, key_of=of_a_user)), graph_with(saver)
        for thread in THREADS:
            assert await states(ours, thread) == await states(old, thread)
            for graph in (ours, old):
                await graph.ainvoke(Command(resume="yes"), on(thread))
                await graph.ainvoke({"messages": [HumanMessage("later", id="later")]}, on(thread))
            values = (await ours.aget_state(on(thread))).values
            assert values == (await old.aget_state(on(thread))).values
            assert [one.content for one in values["messages"]][-3:] == ["you said yes", "later", "re: later"]
        assert [user async for user in backend.sessions.users("acme")] == ["ada", "bob"]


async def test_what_came_since_is_copied_by_the_next_call(
    theirs: tuple[str, AsyncSqliteSaver], backend: Backend
) -> None:
    _, saver = theirs
    target = StmSaver(backend)
    await copy_threads(saver, target)
    await graph_with(saver).ainvoke(Command(resume="yes"), on(THREADS[0]))
    assert 0 < await copy_threads(saver, target) < 10
    for thread in THREADS:
        assert await states(graph_with(target), thread) == await states(graph_with(saver), thread)


async def test_a_source_that_cannot_list_its_threads_is_asked_for_some(backend: Backend) -> None:
    class OneByOne(InMemorySaver):
        async def alist(self, config: Any, **options: Any) -> AsyncIterator[Any]:
            if config is None:
                raise ValueError("thread_id is missing")
            async for one in super().alist(config, **options):
                yield one

    theirs, target = OneByOne(), StmSaver(backend)
    await graph_with(theirs).ainvoke(said("first"), on("chat"))
    with pytest.raises(ConfigurationError, match="name the threads to copy"):
        await copy_threads(theirs, target)
    assert await copy_threads(theirs, target, ["chat"]) == len([*theirs.list(on("chat"))])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("sqlite:///nowhere.db", "not an SQLite file"),
        ("mysql://host/db", "must begin with sqlite:///"),
        ("checkpoints.db", "must begin with sqlite:///"),
        ("redis://127.0.0.1:1/0", "pip install langgraph-checkpoint-redis"),
        ("dynamodb://table?region=eu-west-1", "pip install langgraph-checkpoint-aws"),
        ("mongodb+srv://host/db", "pip install langgraph-checkpoint-mongodb"),
    ],
)
def test_what_cannot_be_a_source_is_said_and_nothing_is_made(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (
        "langgraph.checkpoint.redis.aio",
        "langgraph_checkpoint_aws",
        "langgraph.checkpoint.mongodb",
    ):
        monkeypatch.setitem(sys.modules, module, None)
    assert main([source, "sqlite:///ours.db"]) == 1
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
