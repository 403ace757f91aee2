"""Conversations of messages on real datastores: two processes' worth of backends, large results, folds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stm_backends import open_backend
from stm_backends.messages import Message
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from tests.support.places import EACH, Place

IDS = ("acme", "u1", "chat")
TURNS = 30
SETTINGS = config(zone=3, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)


def exchange(number: int) -> list[Message]:
    """Return a question, and an answer after a call whose result is sometimes large."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    found = "".join(f"{number}-{place} " for place in range(25_000 if number % 10 == 4 else 10))
    return [
        {"role": "user", "content": f"u{number}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": found},
        {"role": "assistant", "content": f"a{number}", "x_unknown": [number]},
    ]


@pytest.mark.parametrize("datastore", EACH)
async def test_two_backends_hold_one_conversation(datastore: str, place_on: Callable[[str], Place]) -> None:
    place = place_on(datastore)
    said = [message for number in range(TURNS) for message in exchange(number)]
    async with open_backend(place.url, create=True) as one, open_backend(place.url) as two:
        chats = [
            backend.conversation(*IDS, SETTINGS, summarizer=LedgerSummarizer()) for backend in (one, two)
        ]
        for number in range(TURNS):
            question, *answer = exchange(number)
            chat, other = chats[number % 2], chats[1 - number % 2]
            await chat.add(question, id=f"q{number}")
            assert (await other.history(limit=1)).open
            await other.add(*answer, id=f"a{number}")
            await chat.add(*answer, id=f"a{number}")
        for chat in chats:
            await chat.flush()
        for chat in chats:
            assert [one.message async for one in chat.each_message()] == said
            summary, *recent = await chat.messages(max_tokens=10**9)
            assert recent == said[-12:]
            told = summary["content"].partition("<session_summary>")[2]
            assert covered(told) == [f"u{number}" for number in range(TURNS - 3)]
            page = await chat.history(before=50, limit=8)
            assert [one.message for one in page.messages] == said[42:50]
