"""The chat product in `examples/chat`: its service here, and its page in a browser in `test_chat_page`."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends import Conversation, open_backend

fastapi = pytest.importorskip("fastapi.testclient")
CHAT = Path(__file__).parents[2] / "examples" / "chat"
ANSWER = "You said “{}”. Messages that I was shown: {}."


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of the service, with a datastore of its own."""
    monkeypatch.setenv("STM_BACKENDS_URL", f"sqlite:///{tmp_path}/chat.db")
    spec = importlib.util.spec_from_file_location("chat_server", CHAT / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with fastapi.TestClient(server.app, cookies={"account": "ann"}) as client:
        yield client


def ask(client: Any, text: str, question: str = "q", chat: str = "trip") -> int:
    return client.post(f"/api/chats/{chat}/questions", json={"id": question, "text": text}).status_code


def texts(client: Any, chat: str = "trip") -> list[str]:
    return [one["text"] for one in client.get(f"/api/chats/{chat}").json()["messages"]]


def test_a_question_that_is_sent_twice_is_stored_and_answered_once(client: Any) -> None:
    for _ in range(2):
        assert ask(client, "A table") == 204
    assert client.get("/api/chats/trip").json()["open"]
    assert "event: word" in client.post("/api/chats/trip/answer").text
    assert "event: word" not in client.post("/api/chats/trip/answer").text
    assert texts(client) == ["A table", ANSWER.format("A table", 1)]
    assert not client.get("/api/chats/trip").json()["open"]


def test_nobody_reaches_another_users_conversations(client: Any) -> None:
    ask(client, "A table")
    for account, status in (("bob", 200), ("eve", 200), ("nobody", 401), ("", 401)):
        client.cookies.set("account", account)
        assert client.get("/api/chats/trip").status_code == status
        assert client.get("/api/chats/trip").json().get("messages", []) == []
        assert client.delete("/api/me").status_code == status
    client.cookies.set("account", "ann")
    assert texts(client) == ["A table"]


def test_search_finds_what_was_said_and_the_page_around_it(server: Any, client: Any) -> None:
    server.PAGE = 10
    for number in range(12):
        ask(client, f"wish {number}", f"q{number}", "long")
    while not client.get("/api/chats").json()["chats"]:
        time.sleep(0.01)  # a conversation is listed in the background
    (found,) = client.get("/api/search?words=WISH+2").json()["chats"]
    assert (found["id"], found["title"]) == ("long", "wish 0")
    assert found["matches"] == [{"where": "message", "snippet": "wish 2", "number": 2}]
    around = client.get("/api/chats/long?at=2").json()
    assert {"number": 2, "role": "user", "text": "wish 2", "cut": False} in around["messages"]
    rest = client.get(f"/api/chats/long?after={around['after']}").json()
    assert [one["number"] for one in around["messages"] + rest["messages"]] == [*range(12)]
    assert (around["before"], rest["after"]) == (None, None)
    client.cookies.set("account", "bob")
    assert client.get("/api/search?words=wish").json() == {"chats": [], "after": None}


def test_errors_of_the_library_have_a_status(client: Any) -> None:
    assert ask(client, "A table", chat="%20") == 400
    assert client.patch("/api/chats/none", json={"title": "T"}).status_code == 404
    assert client.get("/readyz").status_code == 200


def answer(client: Any, chat: str = "trip") -> str:
    return client.post(f"/api/chats/{chat}/answer").text


def test_an_answer_is_written_anew_and_the_earlier_one_stays_readable(client: Any) -> None:
    ask(client, "A table")
    answer(client)
    for revision in range(3):
        place = {"to": 0, "revision": revision}
        assert client.post("/api/chats/trip/rewind", json=place).status_code == 204
        assert texts(client) == ["A table"]
        assert "event: word" in answer(client)
        assert texts(client) == ["A table", ANSWER.format("A table", 1)]
        # One whose window is older is told, and changes nothing.
        assert client.post("/api/chats/trip/rewind", json=place).status_code == 409
    page = client.get("/api/chats/trip").json()
    assert (page["revision"], len(page["messages"])) == (3, 2)
    assert page["branches"] == [{"revision": revision, "first": 1, "newest": 1} for revision in range(3)]
    assert texts(client, "trip?revision=1") == ["A table", ANSWER.format("A table", 1)]
    assert client.post("/api/chats/trip/rewind", json={"to": 9, "revision": 3}).status_code == 404


def test_an_edited_question_takes_the_place_of_what_was_said(client: Any) -> None:
    for number, text in enumerate(("A table", "At noon")):
        ask(client, text, f"q{number}")
        answer(client)
    client.post("/api/chats/trip/rewind", json={"to": 1, "revision": 0})
    ask(client, "At one", "q3")
    answer(client)
    both = ["A table", ANSWER.format("A table", 1)]
    assert texts(client) == [*both, "At one", ANSWER.format("At one", 3)]
    assert texts(client, "trip?revision=0") == [*both, "At noon", ANSWER.format("At noon", 3)]


def test_a_copy_goes_on_by_itself(client: Any) -> None:
    ask(client, "A table")
    answer(client)
    for revision in range(2):
        client.post("/api/chats/trip/rewind", json={"to": 0, "revision": revision})
        answer(client)
    assert client.post("/api/chats/trip/copies", json={"id": "copy", "to": 1}).status_code == 204
    assert client.post("/api/chats/trip/copies", json={"id": "copy", "to": 1}).status_code == 409
    # Its answers have ids of their own, also where revisions and questions are those of the original.
    for revision in range(2):
        client.post("/api/chats/copy/rewind", json={"to": 0, "revision": revision})
        answer(client, "copy")
        assert texts(client, "copy") == texts(client)
    ask(client, "At noon", "q2", "copy")
    assert [len(texts(client, chat)) for chat in ("trip", "copy")] == [2, 3]


async def said(chat: Conversation, server: Any, words: int) -> str:
    """Stop an answer after so many words; returns what is stored of it, and is cut off."""
    events = asyncio.Queue[Any]()
    answer = asyncio.create_task(server.write(chat, "trip", events.put_nowait))
    for _ in range(words):
        await events.get()
    answer.cancel()
    await asyncio.wait([answer])
    last = (await chat.history()).messages[-1]
    assert last.cut
    return str(last.message["content"])


@pytest.mark.parametrize("checkpoint_s", [0.0, 60.0])
async def test_a_stopped_answer_is_kept_until_there_is_another(server: Any, checkpoint_s: float) -> None:
    server.CHECKPOINT_S = checkpoint_s
    async with open_backend("memory://") as backend:
        chat = backend.conversation("acme", "ann", "trip")
        await chat.add({"role": "user", "content": "count"}, id="q")
        assert await said(chat, server, 3) == "1 2 3"
        await chat.rewind(0)
        assert await said(chat, server, 2) == "1 2"
        assert [one.number for one in (await chat.history()).messages] == [0, 1]


async def test_an_answer_whose_question_is_erased_begins_no_conversation(server: Any) -> None:
    server.CHECKPOINT_S = 0.0
    async with open_backend("memory://") as backend:
        chat = backend.conversation("acme", "ann", "trip")
        await chat.add({"role": "user", "content": "count"}, id="q")
        words = asyncio.Queue[Any]()
        answer = asyncio.create_task(server.write(chat, "trip", words.put_nowait))
        await words.get()
        await backend.sessions.erase_with_receipt("acme", "ann")
        for _ in range(3):
            await words.get()
        answer.cancel()
        await asyncio.wait([answer])
        assert (await chat.history()).messages == ()


@pytest.mark.parametrize("to", [0, -1])
async def test_an_answer_to_what_an_edit_has_taken_away_is_not_stored(server: Any, to: int) -> None:
    server.CHECKPOINT_S = 0.0
    stored, edited = asyncio.Event(), asyncio.Event()

    async def model(_: object) -> AsyncIterator[str]:
        yield "one "
        stored.set()
        await edited.wait()
        yield "two "

    server.model = model
    async with open_backend("memory://") as backend:
        chat = backend.conversation("acme", "ann", "trip")
        await chat.add({"role": "user", "content": "A table"}, id="q")
        answer = asyncio.create_task(server.write(chat, "trip", lambda _: None))
        await stored.wait()
        assert [one.cut for one in (await chat.history()).messages] == [False, True]
        await chat.rewind(to)
        edited.set()
        await answer
        assert [one.number for one in (await chat.history()).messages] == [*range(to + 1)]
