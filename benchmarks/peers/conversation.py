"""What each library is asked to do, whichever it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from benchmarks.peers.places import Place

SHOWN = 50
"""Turns or messages of a page of history, and conversations of a sidebar."""

NEWEST = 20
"""Items that a model or a user is shown of the newest."""

SUMMARY = "The user wants a table for two and the guide found one with seats outdoors. " * 25


async def summarize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer at once: the time that a model takes is not measured."""
    return {"summary": SUMMARY}


Message = dict[str, Any]
"""A message as OpenAI's chat completions have it. Each library is given it in its own form."""

TOOL: Mapping[str, Any] = {"name": "move", "arguments": {"to": "12:00"}, "results": {"moved": True}}
"""A tool as the files of dialogues have them."""


def call_id(question: str) -> str:
    """Return the id of the call with which a question is answered."""
    return f"call_{hashlib.sha256(question.encode()).hexdigest()[:24]}"


def exchange_of(question: str, answer: str, tool: Mapping[str, Any] = TOOL) -> list[Message]:
    """Return a question, the call of a tool, its result, and the answer."""
    which = call_id(question)
    function = {"name": tool["name"], "arguments": json.dumps(tool["arguments"])}
    call = {"id": which, "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": which, "content": json.dumps(tool["results"])},
        {"role": "assistant", "content": answer},
    ]


def text_of(message: Mapping[str, Any]) -> str:
    """Return what tells a message: its text or, of a call and of its result, the id."""
    calls = message.get("tool_calls")
    return message.get("tool_call_id") or (calls[0]["id"] if calls else message["content"])


class Conversation:
    """One conversation as a library keeps it, through one handle, as one task of a service holds it."""

    async def store(self, user: str, assistant: str) -> None:
        """Add one turn; return when the library says that it is stored."""
        raise NotImplementedError

    async def read(self) -> object:
        """Return what the library would show the model."""
        raise NotImplementedError

    async def questions(self) -> list[str]:
        """Return the user's message of every stored turn."""
        raise NotImplementedError

    async def history(self, middle: int) -> Sequence[object]:
        """Return `SHOWN` turns around one. Not implemented where no call returns only some older turns."""
        raise NotImplementedError

    async def whole(self) -> Sequence[object]:
        """Return all that is stored, to show some of it."""
        return await self.questions()

    async def newest(self) -> Sequence[object]:
        """Return the `NEWEST` items. Not implemented where no call returns only some of the newest."""
        raise NotImplementedError

    async def sidebar(self) -> Sequence[object]:
        """Return the `SHOWN` latest conversations of a user. Not implemented where no call lists them."""
        raise NotImplementedError

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        """Add older turns. What is stored is read as if they had been added one at a time."""
        for user, assistant in turns:
            await self.store(user, assistant)

    async def settle(self) -> None:
        """Wait for the library's work in the background."""

    async def exchange(self, user: str, assistant: str, thinking_s: float) -> None:
        """Do what a service does for one message: read, wait for the model, store."""
        await self.read()
        await asyncio.sleep(thinking_s)
        await self.store(user, assistant)

    # The same in messages, of which a library may know more than turns.

    async def add(self, *messages: Message) -> None:
        """Add messages; return when the library says that they are stored."""
        raise NotImplementedError

    async def said(self) -> list[str]:
        """Return `text_of` every stored message."""
        raise NotImplementedError

    async def speak(self, exchange: Sequence[Message], thinking_s: float = 0) -> Sequence[object]:
        """Store a question, read, wait for the model, store the answer. Return what the model is shown."""
        question, *answer = exchange
        await self.add(question)
        shown: Any = await self.read()
        await asyncio.sleep(thinking_s)
        await self.add(*answer)
        return shown

    async def seed_messages(self, exchanges: Sequence[Sequence[Message]]) -> None:
        """Add older messages. What is stored is read as if they had been spoken."""
        for question, *answer in exchanges:
            await self.add(question)
            await self.add(*answer)


Opened = Callable[[Place], AbstractAsyncContextManager[Callable[[str], Conversation]]]
"""Opens a library's client at a place, and returns conversations by their names."""
