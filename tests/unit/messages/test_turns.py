"""Turns of a list of messages, and the digest of what its tools have done."""

from __future__ import annotations

from dataclasses import replace

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


def test_a_result_never_begins_a_turn_whoever_it_is_said_to_be_from() -> None:
    shape = replace(SHAPES["anthropic"], role=lambda message: message["role"])
    assert not begins_turn({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, shape)


def called(*results: str) -> list[Message]:
    """Return calls in parallel whose ids are the same, and their results."""
    call = {"id": "0", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    found = [{"role": "tool", "tool_call_id": "0", "content": result} for result in results]
    return [{"role": "assistant", "content": None, "tool_calls": [call] * len(results)}, *found]


def test_calls_of_one_id_have_their_results_in_the_digest_in_order() -> None:
    lines = digest(called("1", "2"), max_tokens=100, estimate=len).splitlines()
    assert lines == ["- search: {} -> 1", "- search: {} -> 2"]


def test_long_results_in_a_digest_are_cut_and_then_the_oldest_lines_are_left_out() -> None:
    messages = called("1" * 500, "2" * 500, "3" * 500)
    lines = digest(messages, max_tokens=300, estimate=len).splitlines()
    assert len(lines) == 3
    assert all("characters omitted" in line for line in lines)
    first, second = digest(messages, max_tokens=90, estimate=len).splitlines()
    assert first == "[... 2 more omitted ...]"
    assert second == "- search: {} -> 3333[... 492 characters omitted ...]3333"


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
