"""The program that checks other people's conversations: it takes hard ones, and finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.held_out import Check, HeldOut, problem_of_window
from stm_backends.messages import Message

PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
CALLS = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")
]
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PIXEL]},
    {"role": "assistant", "content": None, "tool_calls": CALLS, "refusal": None},
    {"role": "system", "content": "The user has switched to the app."},
    {"role": "tool", "tool_call_id": "b", "content": "row " * 50_000},
    {"role": "tool", "tool_call_id": "a", "content": ""},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": ""},
    {"role": "user", "content": "And now?", "x_unknown": [1, None, {"deep": "é"}]},
]


async def test_a_hard_conversation_comes_back_and_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"id": "hard", "shape": "openai", "messages": CHAT}), "utf-8")
    report = await Check([file], f"sqlite:///{tmp_path}/held-out.db").run()
    assert report.problems == []
    counts = report.counts["chat.jsonl", "openai"]
    assert counts == {"conversations": 1, "messages": len(CHAT), "accepted": 1}


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        (CHAT[:2], "the newest question is not there"),
        ([CHAT[2], CHAT[-1]], "a call without its result"),
        ([CHAT[4], CHAT[-1]], "a result without a call"),
        ([{"role": "user"}, CHAT[-1]], "content"),
        ([CHAT[-1], CHAT[-1]], "what fits is not there as it was"),
        ([{"role": "user", "content": "word " * 100_000}], "tokens"),
    ],
)
def test_what_is_wrong_with_a_window_is_found(shown: list[Message], problem: str) -> None:
    said = HeldOut("one", "openai", [CHAT[0], CHAT[-1]])
    assert problem in problem_of_window(said, shown, 60_000, whole=True)
