"""Conversations of messages at the command line: each message is shown as what it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stm_backends import ConversationTurn, MemoryKey, open_backend
from stm_backends.cli.app import app

KEY = MemoryKey("acme", "u1", "trip")
CALL = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"seats": 2}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/menu.png"}}
MESSAGES: tuple[Mapping[str, Any], ...] = (
    {"role": "system", "content": "You book tables."},
    {"role": "user", "content": [{"type": "text", "text": "Is it <b>open</b>?"}, IMAGE]},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "booked"},
    {"my": "own", "shape": True},
    {"role": "assistant", "content": "Until six."},
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a conversation of one message of each kind; the last one was cut off."""
    url = f"sqlite:///{tmp_path}/memory.db"
    monkeypatch.setenv("STM_BACKENDS_URL", url)

    async def fill() -> None:
        async with open_backend(url) as backend:
            *first, own, last = MESSAGES
            chat = backend.conversation("acme", "u1", "trip")
            await chat.add(*first)
            document = await backend.sessions.export(KEY)
            document["turns"].append({"turn_id": "own.0", "item": own})
            await backend.sessions.import_(document, on_conflict="replace")
            await chat.add(last, id="last", cut=True, usage={"output_tokens": 3})

    asyncio.run(fill())
    return url


def words(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def test_history_shows_who_says_each_message_and_nobody_else(url: str) -> None:
    shown = words(cli("history", "acme:u1:trip").stdout)
    assert [line[0] for line in shown if line[0] != "[image:"] == [
        *(
            "0",
            "system",
            "1",
            "user",
            "2",
            "assistant",
            "tools",
            "3",
            "tools",
            "4",
            "message",
            "5",
            "assistant",
        )
    ]
    assert ["[image:", "https://example.com/menu.png]"] in shown
    assert ["tools", 'book({"seats":', "2})"] in shown
    assert ["tools", "->", "booked"] in shown
    assert ["message", '{"my":', '"own",', '"shape":', "true}"] in shown
    assert next(line for line in shown if line[0] == "5")[-2:] == ["cut", "off"]


def test_history_as_json_has_messages_as_they_were_added(url: str) -> None:
    shown = [json.loads(line) for line in cli("history", "acme:u1:trip", "--json").stdout.splitlines()]
    assert [one["item"] for one in shown] == [*MESSAGES]
    assert shown[-1]["turn_id"].startswith("last")
    assert shown[-1]["usage"] == {"output_tokens": 3}
    assert (shown[-1]["number"], shown[-1]["retained"], shown[-1]["summarized"]) == (5, True, False)


def test_history_counts_messages_as_messages(url: str) -> None:
    done = cli("history", "acme:u1:trip", "-n", "2")
    assert done.stderr == "Earlier messages: stm-backends history acme:u1:trip -n 2 --before 4\n"
    assert "There are no messages at number 77." in cli("history", "acme:u1:trip", "--at", "77").stderr


def test_show_counts_messages_as_messages_in_every_format(url: str) -> None:
    told = cli("show", "acme:u1:trip").stdout
    assert "messages       6 in full, 0 in the summary" in told
    assert ["│", "tools", "->", "booked", "│"] in words(told)
    assert "- **messages**: 6 in full" in cli("show", "acme:u1:trip", "--md").stdout
    assert "<dt>messages</dt><dd>6 in full" in cli("show", "acme:u1:trip", "--html").stdout


def test_markdown_titles_each_message_and_shows_what_it_says(url: str) -> None:
    shown = cli("show", "acme:u1:trip", "--md").stdout
    assert "### Message 5, " in shown
    assert "Tools:\n\n```text\n-> booked\n```" in shown
    assert shown.count("User:") == 1


def test_the_page_has_a_card_for_what_each_message_says(url: str) -> None:
    shown = cli("show", "acme:u1:trip", "--html").stdout
    assert shown.count('<div class="card user"><div class="who">user</div>') == 1
    assert shown.count('<div class="card assistant"><div class="who">assistant</div>') == 2
    assert shown.count('<div class="card tools"><div class="who">tools</div>') == 2
    assert '<div class="card tools"><div class="who">system</div>' in shown
    assert "Is it &lt;b&gt;open&lt;/b&gt;?" in shown
    assert "cut off</p>" in shown


def test_a_turn_in_a_conversation_of_messages_is_shown_whole(url: str) -> None:
    async def add() -> None:
        async with open_backend(url) as backend:
            await backend.memory(KEY).add_turn(ConversationTurn("Thanks", "Bye", ts=1.7e9))

    asyncio.run(add())
    shown = words(cli("history", "acme:u1:trip", "-n", "1").stdout)
    assert shown[1:] == [["user", "Thanks"], ["assistant", "Bye"]]
    assert "turns and messages" in cli("show", "acme:u1:trip").stdout
    last = json.loads(cli("history", "acme:u1:trip", "-n", "1", "--json").stdout)
    assert (last["number"], last["user_message"]) == (6, "Thanks")
