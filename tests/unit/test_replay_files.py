"""Files of conversations: both shapes, and what is said about a line that has neither."""

import json
from pathlib import Path
from typing import Any

import pytest

from stm_backends.admin.exporting import FORMAT
from stm_backends.cli.replay.conversations import BadFile, Conversation, read_conversations
from stm_backends.types import ConversationTurn, TrajectoryDigest

EXAMPLES = Path(__file__).parents[2] / "examples" / "conversations.jsonl"


def read(tmp_path: Path, *lines: object, limit: int | None = None) -> list[Conversation]:
    path = tmp_path / "c.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_conversations(path, limit=limit)


def messages(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}


def spoken(conversation: Conversation) -> list[tuple[str, str]]:
    return [(turn.user_message, turn.assistant_response) for turn in conversation.turns]


def test_turns_with_their_tools_become_turns_with_a_digest(tmp_path: Path):
    call = {"name": "Find", "arguments": {"city": "Bern"}, "results": [{"name": "Sino"}, {"name": "Pho"}]}
    (conversation,) = read(
        tmp_path,
        {
            "session": "a",
            "turns": [
                {"user": "Hi", "assistant": "Hello"},
                {"user": "Eat?", "assistant": "Sino", "tools": [call, {"name": "Pay"}]},
            ],
        },
    )

    assert conversation == Conversation(
        "a",
        (
            ConversationTurn("Hi", "Hello"),
            ConversationTurn(
                "Eat?",
                "Sino",
                TrajectoryDigest(
                    ["Find", "Pay"], "Find(city=Bern): name=Sino (and 1 more)\nPay(): no results"
                ),
            ),
        ),
    )


def test_what_a_tool_returned_is_remembered_in_short(tmp_path: Path):
    turn = {"user": "?", "assistant": "!", "tools": [{"name": "read", "results": "x" * 10_000}]}
    (conversation,) = read(tmp_path, {"turns": [turn]})

    digest = conversation.turns[0].trajectory_digest
    assert digest is not None
    assert len(digest.observations_summary) < 300


def test_messages_are_paired_and_the_system_is_ignored(tmp_path: Path):
    (conversation,) = read(
        tmp_path,
        messages(("system", "Be nice."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), id=7),
    )

    assert conversation.session == "7"
    assert spoken(conversation) == [("Hi", "Hello"), ("Bye", "")]


def test_messages_in_a_row_of_one_side_belong_together(tmp_path: Path):
    (conversation,) = read(
        tmp_path,
        messages(
            ("assistant", "Welcome"), ("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D")
        ),
    )

    assert spoken(conversation) == [("", "Welcome"), ("A\nB", "C\nD")]


def test_content_in_parts_is_joined_and_what_is_no_text_is_named(tmp_path: Path):
    parts = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}]
    (conversation,) = read(tmp_path, messages(("user", parts), ("assistant", None)))

    assert spoken(conversation) == [("Look\n[image_url]", "")]


def test_tool_messages_belong_to_their_turn_with_the_call_arguments(tmp_path: Path):
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    (conversation,) = read(
        tmp_path,
        {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "assistant", "content": "Sunny."},
            ]
        },
    )

    assert conversation.turns == (
        ConversationTurn("Weather?", "Sunny.", TrajectoryDigest(["weather"], "weather(city=Bern): sunny")),
    )


def test_a_conversation_without_a_name_is_called_by_its_line(tmp_path: Path):
    found = read(tmp_path, messages(("user", "a")), "", messages(("user", "b")))

    assert [conversation.session for conversation in found] == ["line-1", "line-3"]


def test_a_limit_leaves_the_rest_unread(tmp_path: Path):
    assert len(read(tmp_path, messages(("user", "a")), "not JSON", limit=1)) == 1


TURN = {"user": "a", "assistant": "b"}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON at column 2"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the line is not a JSON object"),
        ({"session": "a"}, "neither 'turns' nor 'messages'"),
        ({"turns": {}}, "turns is not a list"),
        ({"turns": []}, "no turns"),
        ({"turns": ["a"]}, r"turns\[0\] is not a JSON object"),
        ({"turns": [TURN, {"user": "a"}]}, r"turns\[1\]\.assistant is missing"),
        ({"turns": [{**TURN, "user": 1}]}, r"turns\[0\]\.user is not text"),
        ({"turns": [{**TURN, "tools": {}}]}, r"turns\[0\]\.tools is not a list"),
        ({"turns": [{**TURN, "tools": [{}]}]}, r"turns\[0\]\.tools\[0\]\.name is missing"),
        ({"turns": [TURN], "session": " "}, "'session' must be non-blank text"),
        ({"turns": [TURN], "session": True}, "'session' must be non-blank text"),
        (messages(("robot", "a")), r"messages\[0\]\.role is 'robot'"),
        (messages(("user", 5)), r"messages\[0\]\.content is not a list"),
        (messages(("system", "a")), "no turns"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\]\.function is not"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: object, wrong: str):
    with pytest.raises(BadFile, match=rf"c\.jsonl:2: .*{wrong}"):
        read(tmp_path, messages(("user", "fine")), line)


@pytest.mark.parametrize("text", ['{\n  "session": "a",\n  "turns": []\n}', '[{"turns": []}]'])
def test_a_file_that_is_not_laid_out_one_conversation_a_line_is_told_so(tmp_path: Path, text: str):
    with pytest.raises(BadFile, match=r"c\.jsonl:1: .*one conversation per line"):
        read(tmp_path, text)


def test_two_conversations_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(BadFile, match=r":2: the session 'a' is also on line 1"):
        read(tmp_path, {"session": "a", "turns": [TURN]}, {"session": "a", "turns": [TURN]})


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')

    with pytest.raises(BadFile, match=r":1: not UTF-8 at byte 8"):
        read_conversations(path)


def test_an_exported_conversation_is_answered_with_the_import(tmp_path: Path):
    exported = {"format": FORMAT, "version": 1, "turns": [{"user_message": "Hello"}]}
    with pytest.raises(BadFile, match=r"c\.jsonl:1: .*stm-backends import FILE"):
        read(tmp_path, exported)


def test_a_file_that_is_empty_or_not_there_is_refused(tmp_path: Path):
    with pytest.raises(BadFile, match="no conversation"):
        read(tmp_path, "")
    with pytest.raises(BadFile, match="No such file"):
        read_conversations(tmp_path / "nothing")


def test_the_conversations_that_come_with_the_project_are_ones():
    found = read_conversations(EXAMPLES)

    assert found[0].session == "trip-to-lisbon"
    assert len(found) >= 10
    assert all(8 <= len(conversation.turns) <= 14 for conversation in found)
