"""`history`, `ls --recent` and `compact`: what people see of whole conversations and of their files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stm_backends import Backend, ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.cli.app import app
from stm_backends.records import keys

KEY = MemoryKey("acme", "u1", "trip")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


async def say(
    backend: Backend, key: MemoryKey, count: int, config: ShortTermMemoryConfig | None = None
) -> None:
    memory = backend.memory(key, config)
    for number in range(count):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
    await memory.flush()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A file with a conversation of 70 turns, most of which have left the record."""
    url = f"sqlite:///{tmp_path}/memory.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            await say(backend, KEY, 70)

    asyncio.run(fill())
    return url


def test_history_shows_the_newest_turns_and_how_to_go_on(url: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "-n", "3")
    assert re.findall(r"Wish (\d+)", done.stdout) == ["67", "68", "69"]
    assert done.stderr == "Earlier turns: stm-backends history acme:u1:trip --before 67\n"


def test_history_gives_every_turn_once_page_by_page(url: str) -> None:
    seen, before = list[int](), list[str]()
    while True:
        done = cli("history", "acme:u1:trip", "--url", url, "-n", "30", "--json", *before)
        assert done.exit_code == 0, done.stderr
        page = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["user_message"] for one in page] == [f"Wish {one['number']}" for one in page]
        seen = [one["number"] for one in page] + seen
        if not done.stderr:
            break
        before = done.stderr.split()[-2:]
    assert seen == list(range(70))
    assert (page[0]["retained"], page[0]["summarized"]) == (False, True)


def test_history_of_a_conversation_that_is_not_there_fails(url: str) -> None:
    done = cli("history", "acme:u1:trap", "--url", url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: there is no conversation under this key")


def test_history_says_that_the_oldest_turns_were_removed(url: str) -> None:
    async def shorten() -> None:
        async with open_backend(url) as backend:
            await backend.sessions.purge("acme", "u1", transcripts_older_than=1.0)

    asyncio.run(shorten())
    done = cli("history", "acme:u1:trip", "--url", url, "-n", "70", "--json")
    first = json.loads(done.stdout.splitlines()[0])["number"]
    assert first > 0
    assert done.stderr == f"The turns before number {first} are no longer stored.\n"


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """A file with a log of 200 items, most of which have left its record."""
    url = f"sqlite:///{tmp_path}/logs.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            log = backend.item_log(KEY, "openai-agents")
            for number in range(199):
                await log.add([{"role": "user", "content": f"Wish {number}"}])
            await log.add([{"type": "function_call", "name": "book", "arguments": "{}"}])

    asyncio.run(fill())
    return url


def test_history_and_show_give_the_items_of_a_framework(kept: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", kept, "-n", "3")
    assert re.findall(r"(\d+) +user +Wish (\d+)", done.stdout) == [("197", "197"), ("198", "198")]
    assert '"book"' in done.stdout
    assert (
        done.stderr == "Earlier items: stm-backends history acme:u1:trip --log openai-agents --before 197\n"
    )
    lines = cli(*done.stderr.split()[3:], "-n", "100", "--json", "--url", kept)
    found = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [one["item"]["content"] for one in found] == [f"Wish {number}" for number in range(97, 197)]
    assert (found[0]["number"], found[0]["retained"], found[-1]["retained"]) == (97, False, True)
    done = cli("show", "acme:u1:trip", "--url", kept)
    assert "200, the newest 20 below" in done.stdout
    assert "Wish 180" in done.stdout
    document = json.loads(cli("show", "acme:u1:trip", "--url", kept, "--json").stdout)
    assert (document["log"], document["newest"], len(document["items"])) == ("openai-agents", 199, 20)
    done = cli("show", "acme:u1:trip", "--url", kept, "--html")
    assert (done.exit_code, "--json" in done.stderr) == (2, True)


def test_the_turns_come_first_and_of_several_logs_one_is_named(kept: str) -> None:
    async def more(kind: str) -> None:
        async with open_backend(kept) as backend:
            if kind == "langchain":
                await backend.item_log(KEY, "langchain").add([{"type": "human", "data": {"content": "Hi"}}])
            else:
                await say(backend, KEY, 1)

    asyncio.run(more("langchain"))
    for command in ("history", "show"):
        done = cli(command, "acme:u1:trip", "--url", kept)
        assert (done.exit_code, "--log openai-agents, --log langchain" in done.stderr) == (2, True)
        assert "Hi" in cli(command, "acme:u1:trip", "--url", kept, "--log", "langchain").stdout
        done = cli(command, "acme:u1:trip", "--url", kept, "--log", "langgraph")
        assert (done.exit_code, "--log is one of" in done.stderr) == (2, True)
    asyncio.run(more("memory"))
    assert "Noted." in cli("history", "acme:u1:trip", "--url", kept).stdout
    assert "Noted." in cli("show", "acme:u1:trip", "--url", kept).stdout
    done = cli("history", "acme:u1:else", "--url", kept, "--log", "langchain")
    assert done.stderr.startswith("Error: there is no log of langchain under this key")


def test_the_latest_conversations_come_first_with_their_titles(url: str) -> None:
    async def more() -> None:
        async with open_backend(url) as backend:
            later = ShortTermMemoryConfig("truncation")
            await backend.memory(MemoryKey("acme", "u1", "later"), later).add_turn(
                ConversationTurn("Hi", "Hello")
            )

    asyncio.run(more())
    done = cli("ls", "acme:u1", "--recent", "2", "--url", url)
    assert [line.split("  ")[-2:] for line in done.stdout.splitlines()] == [
        ["acme:u1:later", "Hi"],
        ["acme:u1:trip", "Wish 0"],
    ]

    async def name() -> None:
        async with open_backend(url) as backend:
            await backend.conversations.update(MemoryKey("acme", "u1", "later"), title="One\nTwo")

    asyncio.run(name())
    assert cli("ls", "acme:u1", "--recent", "1", "--url", url).stdout.endswith("  One\\nTwo\n")
    (one,) = cli("ls", "acme", "--recent", "1", "--json", "--url", url).stdout.splitlines()
    assert (json.loads(one)["session"], json.loads(one)["turns"]) == ("later", 1)


def test_the_latest_are_read_from_the_catalogue_alone(url: str) -> None:
    done = cli("ls", "--recent", "5", "--url", url)
    assert [line.split("  ")[-2:] for line in done.stdout.splitlines()] == [["acme:u1:trip", "Wish 0"]]
    for more in ("--long", "--degraded"):
        assert "give --recent alone" in cli("ls", "acme", "--recent", "5", more, "--url", url).stderr

    async def forget() -> None:
        async with open_backend(url) as backend:
            await backend.driver.delete(keys.card_key(MemoryKey("acme", "u1", "trip")))

    asyncio.run(forget())
    done = cli("ls", "acme:u1", "--recent", "5", "--url", url)
    assert done.stdout == ""
    assert done.stderr.startswith("The catalogue has no conversation (`conversations.rebuild` adds")


def test_compacting_a_file_keeps_what_is_in_it(url: str) -> None:
    before = cli("history", "acme:u1:trip", "--url", url, "--json").stdout
    done = cli("compact", "--url", url)
    assert re.fullmatch(r"sqlite: [\d,]+ bytes before, [\d,]+ bytes after\n", done.stdout)
    assert cli("history", "acme:u1:trip", "--url", url, "--json").stdout == before
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
        assert file.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_a_datastore_that_needs_no_compacting_is_left_alone() -> None:
    done = cli("compact", "--url", "memory://")
    assert (done.exit_code, done.stdout) == (0, "The backend 'memory' needs no compacting.\n")
