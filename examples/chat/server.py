# pip install ".[redis]" "fastapi>=0.135" uvicorn && uvicorn --app-dir examples/chat server:app --workers 2
"""A chat product: streamed answers, edits, history, a sidebar with search, stop, and "delete my data".

docs/how-to/fastapi-service.md explains it. Everything that a worker knows is in the datastore, so any worker
answers any request, and one that is killed loses nothing that was stored.
"""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Cookie, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

import stm_backends as stm
from stm_backends.messages import SHAPES, Message

URL = os.environ.get("STM_BACKENDS_URL", "sqlite:///chat.db")
CHECKPOINT_S = 1.0  # how much of an answer is lost at most if its worker is killed
PAGE = 50


# The model


async def model(messages: Sequence[Message]) -> AsyncIterator[str]:
    """Answer word by word, as a script says; yours asks a provider, with the same messages."""
    question = str(messages[-1]["content"])
    words: Any = f"You said “{question}”. Messages that I was shown: {len(messages)}.".split()
    if question.startswith("think"):
        await asyncio.sleep(3600)
    if question.startswith("count"):
        words = itertools.count(1)  # until you stop it
    for word in words:
        await asyncio.sleep(0.05)
        yield f"{word} "


# The service


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with stm.open_backend(URL) as app.state.backend:  # one for the whole process
        app.state.answers = set[asyncio.Task[None]]()
        yield
        # What was said is stored before the backend is closed, which waits for summaries in flight.
        await asyncio.gather(*app.state.answers, return_exceptions=True)


app = FastAPI(lifespan=lifespan)


async def owner(account: Annotated[str, Cookie()] = "") -> tuple[str, str]:
    """Return the tenant and the user of a request. A stub: yours checks a session.

    They come from the login alone, never from a path or a body, so nobody reaches another user's data.
    """
    accounts = {"ann": ("acme", "ann"), "bob": ("acme", "bob"), "eve": ("umbrella", "eve")}
    if account not in accounts:
        raise HTTPException(401)
    return accounts[account]


Owner = Annotated[tuple[str, str], Depends(owner)]


async def conversation(chat: str, owner: Owner) -> stm.Conversation:
    return app.state.backend.conversation(*owner, chat)  # reads and writes nothing


Chat = Annotated[stm.Conversation, Depends(conversation)]


# A question, and its answer


class Question(BaseModel):
    id: str  # made by the browser, so that a question that is sent twice is stored once
    text: str


@app.post("/api/chats/{chat}/questions", status_code=204)
async def ask(chat: Chat, question: Question) -> None:
    """Store a question. It is there from now on, whatever becomes of its answer."""
    await chat.add({"role": "user", "content": question.text}, id=question.id)


async def write(chat: stm.Conversation, name: str, send: Any) -> None:
    """Answer the newest question, and store what is said: every second, and at the end."""
    page = await chat.history(limit=PAGE)
    if not page.open:
        return  # it is answered
    asked = page.messages[-1]
    messages = await chat.messages(max_tokens=8_000)
    said, stored = "", time.monotonic()
    # What is stored under one id takes the place of its checkpoints. After an edit it is another answer, and
    # so it is in a copy, which has the ids of what it was copied from.
    answer_id = f"{asked.id}-{name}-{page.revision}"

    async def store(**cut: bool) -> None:
        # Without its question, which has been erased, an answer would begin a new conversation.
        now = await chat.history(at=asked.number, limit=1)
        if now.revision == page.revision and any(one.id == asked.id for one in now.messages):
            await chat.add({"role": "assistant", "content": said.strip()}, id=answer_id, **cut)

    try:
        async for word in model(messages):
            said += word
            send(ServerSentEvent(event="word", data=word))
            if time.monotonic() - stored > CHECKPOINT_S:
                await store(cut=True)
                stored = time.monotonic()
        await store()
    except asyncio.CancelledError:
        if said:
            await store(cut=True)
        raise


async def answering(chat: Chat, request: Request) -> AsyncIterator[asyncio.Queue[ServerSentEvent | None]]:
    """Let the model answer while the request lasts: the browser stops it by closing the connection."""
    events = asyncio.Queue[ServerSentEvent | None]()
    events.put_nowait(ServerSentEvent(event="begin", data={"worker": os.getpid()}))
    answer = asyncio.create_task(write(chat, request.path_params["chat"], events.put_nowait))
    app.state.answers.add(answer)
    answer.add_done_callback(app.state.answers.discard)
    answer.add_done_callback(lambda _: events.put_nowait(None))
    try:
        yield events
    finally:
        answer.cancel()
        await asyncio.wait([answer])


@app.post("/api/chats/{chat}/answer", response_class=EventSourceResponse)
async def answer(
    events: Annotated[asyncio.Queue[ServerSentEvent | None], Depends(answering)],
) -> AsyncIterator[ServerSentEvent]:
    """Stream the answer to the newest question, if it has none."""
    while (event := await events.get()) is not None:
        yield event


# Edits


class Place(BaseModel):
    to: int
    revision: int  # of the page that the person has seen


@app.post("/api/chats/{chat}/rewind", status_code=204)
async def rewind(chat: Chat, place: Place) -> None:
    """Continue after a message: what follows it becomes an earlier version. 409 if another edit came first.

    Then the browser asks for an answer, or sends another question.
    """
    await chat.rewind(place.to, revision=place.revision)


class Copy(BaseModel):
    id: str
    to: int


@app.post("/api/chats/{chat}/copies", status_code=204)
async def fork(chat: Chat, copy: Copy) -> None:
    """Copy what was said up to a message into a new conversation."""
    await chat.fork(copy.id, to=copy.to)


# What was said, and what there is


def told(message: Message) -> str:
    """Return what people read of a message: its text, else which tools it calls, or what one returned."""
    shape = SHAPES["openai"]
    calls = ", ".join(f"calls {call.name}" for call in shape.calls(message))
    return shape.text(message) or calls or "\n".join(result.text for result in shape.results(message))


@app.get("/api/chats/{chat}")
async def history(
    chat: Chat,
    before: int | None = None,
    after: int | None = None,
    at: int | None = None,
    revision: int | None = None,
) -> dict[str, Any]:
    """Return a page of a conversation: the newest messages, or those before, after or around a number.

    With a revision, as they were before the edit that ended it.
    """
    page = await chat.history(before=before, after=after, at=at, limit=PAGE, revision=revision)
    numbers = [*(one.number for one in page.messages), *page.missing]
    first, last = min(numbers, default=0), max(numbers, default=page.newest)
    return {
        "messages": [
            {
                "number": one.number,
                "role": SHAPES["openai"].role(one.message),
                "text": told(one.message),
                "cut": one.cut,
            }
            for one in page.messages
        ],
        "before": first if first > page.oldest else None,
        "after": last if last < page.newest else None,
        "open": page.open,
        "revision": page.revision,
        "branches": page.branches,
        "quiet_s": time.time() - page.messages[-1].at if page.messages else 0.0,
    }


@app.get("/api/chats")
async def sidebar(owner: Owner, after: str | None = None) -> dict[str, Any]:
    """Return a page of the user's conversations, the latest first."""
    page = await app.state.backend.conversations.list(*owner, after=after, limit=PAGE)
    chats = [{"id": card.key.session_id, "title": card.title} for card in page.cards]
    return {"chats": chats, "after": page.after}


@app.get("/api/search")
async def search(owner: Owner, words: str, after: str | None = None) -> dict[str, Any]:
    """Return conversations of the user that have all words, with some messages that do.

    `after` is for the next call, which may find more even if this one has found nothing.
    """
    results = await app.state.backend.conversations.search(*owner, words, after=after, limit=PAGE)
    chats = [
        {
            "id": one.card.key.session_id,
            "title": one.card.title,
            "matches": [match for match in one.matches if match.where == "message"],
        }
        for one in results.found
    ]
    return {"chats": chats, "after": results.after}


class Title(BaseModel):
    title: str


@app.patch("/api/chats/{chat}", status_code=204)
async def rename(chat: str, owner: Owner, change: Title) -> None:
    await app.state.backend.conversations.update(stm.MemoryKey(*owner, chat), title=change.title)


@app.delete("/api/chats/{chat}")
async def delete(chat: str, owner: Owner) -> dict[str, Any]:
    """Erase one conversation, and return the receipt."""
    return (await app.state.backend.sessions.erase_with_receipt(*owner, chat)).as_json()


@app.delete("/api/me")
async def delete_me(owner: Owner) -> dict[str, Any]:
    """Erase everything of this user, and return the receipt."""
    return (await app.state.backend.sessions.erase_with_receipt(*owner)).as_json()


# Operations


STATUS = {
    stm.InvalidKey: 400,
    stm.InvalidState: 400,
    stm.SessionNotFound: 404,
    stm.MessageNotFound: 404,
    stm.SessionExists: 409,
    stm.EditConflict: 409,
    stm.TooLarge: 413,
    stm.MemoryBudgetExceeded: 422,
    stm.LimitReached: 429,
    stm.Unavailable: 503,
    stm.OutcomeUnknown: 504,
    stm.Denied: 500,
    stm.Corrupt: 500,
    stm.StmError: 500,
}


@app.exception_handler(stm.StmError)
async def failed(_: Any, error: stm.StmError) -> JSONResponse:
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    headers = {"Retry-After": "1"} if status in (503, 504) else {}
    return JSONResponse({"error": type(error).__name__}, status, headers)


@app.get("/livez")
async def live() -> dict[str, bool]:
    return {"ok": True}


@app.get("/readyz")
async def ready() -> dict[str, float]:
    return {"datastore_s": await app.state.backend.ping()}


@app.get("/")
async def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))
