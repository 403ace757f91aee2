"""Turns of a list of messages, and the digest of what its tools have done."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.messages import SHAPES, Message, begins_turn, digest, turns
from tests.support.dialogues import Answer, Dialogue, Found, System, User, dialogues, in_shape

every_shape = pytest.mark.parametrize("name", SHAPES)

SAID: Dialogue = [
    Answer("How can I help?", [], False, {}),
    User(["Two tables"], [], {}),
    Answer("", [("a", "search", {"q": "Sino"}), ("b", "search", {"q": "Fujiyama"})], True, {}),
    Found("b", "search", "none left", False, False),
    Found("a", "search", "11:30\n- book: done", False, False),
    Answer("Sino has one.", [], False, {}),
    User(["Book it"], [], {}),
    Answer("", [("c", "book", {})], False, {}),
]


@every_shape
def test_a_turn_is_what_a_users_message_begins(name: str) -> None:
    messages = in_shape(name, SAID)
    found = turns(messages, name)
    assert [message for turn in found for message in turn] == messages
    assert [SHAPES[name].text(turn[0]) for turn in found] == ["How can I help?", "Two tables", "Book it"]


def test_a_message_that_brings_a_result_begins_no_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "2"}
    message: Message = {"role": "user", "content": [result, {"type": "text", "text": "Go on"}]}
    assert not begins_turn(message, SHAPES["anthropic"])
    assert begins_turn({"role": "user", "content": ""}, SHAPES["anthropic"])


@every_shape
def test_a_digest_has_each_call_with_its_arguments_and_its_result_on_a_line(name: str) -> None:
    lines = digest(in_shape(name, SAID), max_tokens=1_000, estimate=len, shape=name).splitlines()
    assert len(lines) == 3
    assert [line.split(":")[0] for line in lines] == ["- search", "- search", "- book"]
    assert "Sino" in lines[0]
    assert "11:30" in lines[0]
    assert "Fujiyama" in lines[1]
    assert "none left" in lines[1]
    assert lines[2] == "- book: {} -> [no result is known]"


def test_a_conversation_without_tools_has_no_digest() -> None:
    assert digest([{"role": "user", "content": "Hello"}], max_tokens=10, estimate=len) == ""


@every_shape
@settings(max_examples=30)
@given(said=dialogues(), budget=st.integers(0, 2_000))
def test_a_digest_is_within_its_budget_and_keeps_the_newest(name: str, said: Dialogue, budget: int) -> None:
    said = [one for one in said if not isinstance(one, System)]
    found = digest(in_shape(name, said), max_tokens=budget, estimate=len, shape=name)
    assert len(found) <= budget
    whole = digest(in_shape(name, said), max_tokens=10**9, estimate=len, shape=name)
    if found and found != whole:
        assert "omitted" in found
        assert found.splitlines()[-1].split(":")[0] == whole.splitlines()[-1].split(":")[0]
