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
from tests.support.recorded import recorded, texts_of

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
    state = recorded(cli("show", "acme:u1:trip", "--html").stdout)
    assert (state["what"], len(state["units"])) == ("messages", 6)


def test_markdown_titles_each_message_and_shows_what_it_says(url: str) -> None:
    shown = cli("show", "acme:u1:trip", "--md").stdout
    assert "### Message 5, " in shown
    assert "Tools:\n\n```text\n-> booked\n```" in shown
    assert shown.count("User:") == 1


def test_the_page_has_what_each_message_says(url: str) -> None:
    page = cli("show", "acme:u1:trip", "--html").stdout
    units = recorded(page)["units"]
    said = [who for unit in units for who, _ in unit["lines"]]
    assert (said.count("user"), said.count("assistant"), said.count("tools")) == (1, 2, 2)
    assert "system" in said
    assert "Is it <b>open</b>?\n[image: https://example.com/menu.png]" in texts_of(page)
    assert "<b>" not in page
    assert [unit["number"] for unit in units if unit["cut"]] == [5]


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


def test_search_prints_conversations_and_the_numbers_of_messages(url: str) -> None:
    done = cli("search", "acme:u1", "UNTIL", "six")
    assert (done.exit_code, done.stdout) == (0, "acme:u1:trip  Is it <b>open</b>?\n         5  Until six.\n")
    assert cli("search", "acme", "until").stdout == done.stdout
    found = json.loads(cli("search", "acme:u1", "until", "--json").stdout)
    assert (found["key"], found["title"]) == ("acme:u1:trip", "Is it <b>open</b>?")
    assert found["matches"] == [{"where": "message", "number": 5, "snippet": "Until six."}]


def test_search_says_what_it_does_not_find(url: str) -> None:
    nothing = cli("search", "acme:u1", "Lisbon")
    assert (nothing.exit_code, nothing.stderr) == (
        0,
        "No conversation of acme:u1 has all of these words.\n",
    )
    nobody = cli("search", "acme:nobody", "six")
    assert (nobody.exit_code, nobody.stderr) == (1, "Error: nothing is stored for acme:nobody\n")
    signs = cli("search", "acme:u1", "?!")
    assert (signs.exit_code, "give a word" in signs.stderr) == (2, True)


def test_usage_sums_answers_of_conversations_users_and_tenants(url: str) -> None:
    async def add() -> None:
        async with open_backend(url) as backend:
            for user, usage in (("u1", {"output_tokens": 4_000, "cost": 0.00002}), ("u2", {"cost": 0.1})):
                chat = backend.conversation("acme", user, "second")
                await chat.add(
                    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}, usage=usage
                )

    asyncio.run(add())
    assert words(cli("usage", "acme:u1:trip").stdout) == [["acme:u1:trip"], ["output_tokens", "3"]]
    told = words(cli("usage", "acme").stdout)
    assert told == [
        *(["acme:u1"], ["output_tokens", "4,003"], ["cost", "0.00002"]),
        *(["acme:u2"], ["cost", "0.1"]),
        *(["all", "users"], ["output_tokens", "4,003"], ["cost", "0.10002"]),
    ]
    rows = [json.loads(line) for line in cli("usage", "acme", "--json", "--days", "1").stdout.splitlines()]
    assert [(one["key"], one["total"]) for one in rows] == [
        ("acme:u1", {"output_tokens": 4_003, "cost": 0.00002}),
        ("acme:u2", {"cost": 0.1}),
    ]
    daily = words(cli("usage", "acme:u2", "--daily").stdout)
    assert daily == [["acme:u2"], ["cost", "0.1"], [*rows[1]["days"]], ["cost", "0.1"]]


def test_usage_says_where_there_is_none_and_begins_nothing(url: str) -> None:
    async def add() -> None:
        async with open_backend(url) as backend:
            await backend.memory(MemoryKey("acme", "u3", "plain")).add_turn(ConversationTurn("Hi", "Hi"))

    asyncio.run(add())
    before = cli("export", "acme:u1:trip").stdout
    cli("usage", "acme:u1:trip")
    assert cli("export", "acme:u1:trip").stdout == before
    none = cli("usage", "acme:u3", "--days", "2")
    said = "No answer of acme:u3 has any usage on the last 2 days: see add(..., usage=...).\n"
    assert (none.exit_code, none.stderr) == (0, said)
    for missing, said in (("acme:u1:no", "no conversation under this key"), ("acme:no", "nothing is stored")):
        done = cli("usage", missing)
        assert (done.exit_code, said in done.stderr) == (1, True)


def test_a_key_of_another_kind_is_answered_with_the_command_for_it(url: str, tmp_path: Path) -> None:
    assert "of this user with: stm-backends ls acme:u1\n" in cli("show", "acme:u1").stderr
    assert "which `show` and `history` take" in cli("ls", "acme:u1:trip").stderr
    file = tmp_path / "rows.jsonl"
    file.write_text('{"role": "user", "content": "Hi", "chat": "a"}\n')
    assert "the guide `from-your-own-table`" in cli("import", str(file)).stderr


def test_the_help_has_every_command_once(url: str) -> None:
    shown = cli("--help").stdout
    assert [shown.count(f"│ {name} ") for name in ("ls", "show", "search", "usage", "import", "replay")] == [
        1
    ] * 6
    assert shown.index("Inspect stored data") < shown.index("Try and verify")
