"""What a message of each shape says, calls, has found and shows; and what is no message."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.errors import ConfigurationError, InvalidState
from stm_backends.messages import (
    SHAPES,
    Call,
    Media,
    Message,
    Part,
    Result,
    Shape,
    as_shape,
    checked,
    digest,
    shape_of,
    tokens_of,
    turns,
    window,
)
from tests.support.dialogues import Answer, Found, User, in_shape

every_shape = pytest.mark.parametrize("name", SHAPES)


# What a message consists of


@every_shape
def test_a_users_message_is_read_in_every_shape(name: str) -> None:
    (message,) = in_shape(name, [User(["Which", "table?"], ["link"], {"x_id": 1})])
    shape = SHAPES[name]
    assert (shape.role(message), shape.text(message)) == ("user", "Which\ntable?")
    assert (shape.calls(message), shape.results(message)) == ([], [])
    assert [one.kind for one in shape.media(message)] == ["image"]


@every_shape
def test_parallel_calls_are_read_in_every_shape(name: str) -> None:
    said = Answer("I look.", [("a", "search", {"q": 1}), ("b", "write", {})], True, {})
    messages = in_shape(name, [said])
    shape = SHAPES[name]
    assert {shape.role(message) for message in messages} == {"assistant"}
    assert [shape.text(message) for message in messages if shape.text(message)] == ["I look."]
    calls = [call for message in messages for call in shape.calls(message)]
    assert [(call.id, call.name) for call in calls] == [("a", "search"), ("b", "write")]
    assert calls[0].arguments.replace(" ", "") == '{"q":1}'


@every_shape
def test_a_result_is_read_in_every_shape_and_is_not_what_is_said(name: str) -> None:
    (message,) = in_shape(name, [Found("a", "search", "2 found", False, False)])
    shape = SHAPES[name]
    assert (shape.role(message), shape.text(message)) == ("tool", "")
    (result,) = shape.results(message)
    assert result.id == "a"
    assert "2 found" in result.text


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            ("image", "https://example.org/a.png"),
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, ("image", "image/png")),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, ("audio", "wav")),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, ("video", "video/mp4")),
        (
            {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}},
            ("audio", "https://example.org/a.wav"),
        ),
        (
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
            ("file", "a.pdf"),
        ),
        ({"type": "file", "file": {"file_id": "file-1"}}, ("file", "file-1")),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            ("image", "image/png"),
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}},
            ("file", "https://example.org/a.pdf"),
        ),
        ({"type": "input_image", "file_id": "file-1"}, ("image", "file-1")),
        ({"type": "image"}, ("image", "image")),
    ],
)
def test_media_are_referred_to_by_what_is_not_their_content(block: Message, found: tuple[str, str]) -> None:
    assert SHAPES["openai"].media({"role": "user", "content": [block]}) == [Media(*found)]


def kinds(name: str, message: Message) -> list[tuple[str, str]]:
    """Return the kinds of a message's parts, and their texts."""
    return [(part.kind, part.text) for part in SHAPES[name].parts(message)]


def test_refusals_are_said_and_recordings_of_the_model_are_kept() -> None:
    said = {"role": "assistant", "refusal": "I cannot.", "audio": {"id": "a"}}
    assert kinds("openai", said) == [("text", "I cannot."), ("other", '{"id":"a"}')]
    assert shape_of(said).name == "openai"


def test_a_call_of_a_function_without_its_result_is_given_one_in_its_words() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "search", "arguments": "{}"}}
    shown = window("", [{"role": "user", "content": "Go"}, call], max_tokens=100, estimate=len)
    assert shown[2] == {"role": "function", "name": "search", "content": "[no result is known]"}


def test_prompts_and_results_of_pydantic_ai_are_texts_media_and_any_json() -> None:
    text, mark = {"kind": "text-content", "content": "Hello"}, {"kind": "cache-point", "ttl": "5m"}
    picture = {"kind": "binary", "media_type": "image/png", "data": "AAAA"}
    prompt = {"part_kind": "user-prompt", "content": [text, "you", picture, mark]}
    assert kinds("pydantic-ai", {"kind": "request", "parts": [prompt]}) == [
        ("text", "Hello"),
        ("text", "you"),
        ("media", "image/png"),
        ("other", '{"kind":"cache-point","ttl":"5m"}'),
    ]
    found = {
        "part_kind": "tool-return",
        "tool_name": "f",
        "tool_call_id": "a",
        "content": [{"rows": 2}, picture],
    }
    assert SHAPES["pydantic-ai"].results({"kind": "request", "parts": [found]}) == [Result("a", '{"rows":2}')]
    made = {"part_kind": "file", "content": picture}
    assert kinds("pydantic-ai", {"kind": "response", "parts": [made]}) == [("media", "image/png")]
    again = {"part_kind": "retry-prompt", "content": "No such table.", "tool_name": None}
    assert SHAPES["pydantic-ai"].role({"kind": "request", "parts": [again]}) == "tool"


def test_a_system_prompt_beside_the_users_is_not_what_the_user_says() -> None:
    shape = SHAPES["pydantic-ai"]
    prompts = [
        {"part_kind": "system-prompt", "content": "S"},
        {"part_kind": "user-prompt", "content": "Hello"},
    ]
    assert shape.text({"kind": "request", "parts": prompts}) == "Hello"
    assert shape.text({"kind": "request", "parts": prompts[:1]}) == "S"


def test_contents_of_google_are_read_in_the_names_of_python_with_fields_that_are_none() -> None:
    shape = SHAPES["google"]
    none = dict.fromkeys(("text", "thought", "inline_data", "function_call", "function_response"))
    call = {**none, "function_call": {"id": None, "name": "search", "args": None}}
    found = {**none, "function_response": {"id": None, "name": "search", "response": {"rows": 2}}}
    said: list[Message] = [
        {"role": None, "parts": [{**none, "text": "Go"}]},
        {"role": "model", "parts": [{**none, "text": "hm", "thought": True}, call]},
        {"role": "user", "parts": [found]},
    ]
    assert [shape.role(message) for message in said] == ["user", "assistant", "tool"]
    assert shape.calls(said[1]) == [Call("search", "search", "")]
    assert shape.results(said[2]) == [Result("search", '{"rows":2}')]
    assert window("", said, max_tokens=100, estimate=len) == said
    (answered,) = window("", said[:2], max_tokens=100, estimate=len)[2:]
    assert answered["parts"] == [
        {"function_response": {"name": "search", "response": {"error": "[no result is known]"}}}
    ]


def test_documents_that_a_search_found_are_texts_of_its_result() -> None:
    found = {
        "type": "search_result",
        "source": "a",
        "title": "A",
        "content": [{"type": "text", "text": "Sino"}],
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found]}
    assert SHAPES["anthropic"].results({"role": "user", "content": [result]}) == [Result("a", "Sino")]


def test_older_calls_of_functions_are_calls() -> None:
    shape = SHAPES["openai"]
    call = {"role": "assistant", "content": None, "function_call": {"name": "search", "arguments": "{}"}}
    assert shape.calls(call) == [Call("search", "search", "{}")]
    assert shape.results({"role": "function", "name": "search", "content": "2"}) == [Result("search", "2")]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (
            {"type": "custom_tool_call", "call_id": "a", "name": "sql", "input": "select 1"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "1"},
        ),
        (
            {"type": "computer_call", "id": "cu_1", "call_id": "a", "action": {"type": "screenshot"}},
            {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot"}},
        ),
        (
            {
                "type": "mcp_approval_request",
                "id": "a",
                "name": "pay",
                "arguments": "{}",
                "server_label": "s",
            },
            {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        ),
        (
            {"type": "tool_search_call", "call_id": "a", "execution": "client", "arguments": {}},
            {"type": "tool_search_output", "call_id": "a", "execution": "client", "tools": [{"name": "f"}]},
        ),
    ],
)
def test_other_calls_of_responses_have_their_results(call: Message, result: Message) -> None:
    shape = SHAPES["openai-responses"]
    assert (shape.role(call), shape.role(result)) == ("assistant", "tool")
    assert [one.id for one in shape.calls(call)] == [one.id for one in shape.results(result)] == ["a"]


def test_the_tools_that_a_search_found_are_its_result() -> None:
    found = {"type": "tool_search_output", "call_id": "a", "execution": "client", "tools": [{"name": "f"}]}
    assert SHAPES["openai-responses"].results(found) == [Result("a", '{"name":"f"}')]


@pytest.mark.parametrize("call_id", [None, "a"])
def test_a_search_that_the_server_ran_is_shown_with_what_it_found(call_id: str | None) -> None:
    search = {"type": "tool_search_call", "id": "ts_1", "call_id": call_id, "execution": "server"}
    found = {**search, "type": "tool_search_output", "id": "to_1", "tools": [{"name": "f"}]}
    said = [{"role": "user", "content": "Go"}, search, found]
    assert window("", said, max_tokens=1_000, estimate=len) == said


# Which shape it is


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "user", "content": "Hello"}, "openai"),
        ({"role": "developer", "content": "Be brief."}, "openai"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "openai"),
        ({"role": "assistant", "content": [{"type": "thinking"}], "tool_calls": None}, "openai"),
        ({"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, "openai-responses"),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, "openai-responses"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, "anthropic"),
        ({"type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}, "anthropic"),
        ({"type": "human", "data": {"content": "Hello"}}, "langchain"),
        ({"role": "model", "parts": [{"text": "Hello"}]}, "google"),
        ({"kind": "request", "parts": []}, "pydantic-ai"),
    ],
)
def test_a_shape_is_recognized_from_a_message(message: Message, name: str) -> None:
    assert shape_of(message).name == name


def test_the_first_message_that_only_one_shape_has_says_the_shape_of_all() -> None:
    plain: Message = {"role": "user", "content": "Hello"}
    used: Message = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
    }
    assert shape_of(plain, used).name == "anthropic"


def test_what_is_no_message_has_no_shape() -> None:
    nothing: Any = None
    with pytest.raises(InvalidState, match=r"^messages\[0\] is NoneType, not a dict of JSON$"):
        shape_of(nothing)


def test_a_shape_is_given_by_its_name() -> None:
    assert as_shape("anthropic", []) is SHAPES["anthropic"]
    with pytest.raises(ConfigurationError, match="shape must be a Shape or one of openai, openai-responses"):
        as_shape("claude", [])


def test_a_shape_of_ones_own_is_a_few_functions() -> None:
    def parts(message: Message) -> Iterator[Part]:
        assert message
        if "returned" in message:
            yield Part("result", (), id="only")
            yield Part("text", ("returned",), message["returned"], ("returned",))
        if "said" in message:
            yield Part("text", ("said",), message["said"], ("said",))
        for index, name in enumerate(message.get("ran", [])):
            yield Part("call", ("ran", index), id="only", name=name)

    own = Shape(
        "own",
        role=lambda message: message["who"],
        parts=parts,
        says=lambda role, text: {"who": role, "said": text},
        block=str,
    )
    messages: list[Message] = [
        {"who": "user", "said": "List the files."},
        {"who": "assistant", "said": "I do.", "ran": ["ls"]},
        {"who": "tool", "returned": "a.py " * 1_000},
        {"who": "assistant", "said": "And more.", "ran": ["ps", "top"]},
    ]
    shown = window("S", messages, max_tokens=300, estimate=lambda text: len(text) // 4, shape=own)
    assert shown[0]["who"] == "system"
    assert shown[1:3] == messages[:2]
    assert "characters omitted" in shown[3]["returned"]
    # A call that cannot be given a result goes.
    assert shown[4] == {"who": "assistant", "said": "And more."}


# What is no message


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, "message is NoneType, not a dict of JSON"),
        ("Hello", "message is str, not a dict of JSON"),
        ([{"role": "user"}], "message is list, not a dict of JSON"),
        ({"role": b"user"}, "message.role is bytes, which JSON does not have"),
        ({1: "user"}, "message has a key that is not a string: int"),
        ({"content": [{"text": {1, 2}}]}, r"message.content\[0\].text is set, which JSON does not have"),
    ],
)
def test_what_is_no_message_is_refused_with_its_path(given: Any, problem: str) -> None:
    with pytest.raises(InvalidState, match=f"^{problem}"):
        checked(given)


def test_an_answer_of_a_client_is_refused_with_what_to_pass_instead() -> None:
    class Answered:
        def model_dump(self) -> None: ...

    with pytest.raises(InvalidState, match=r"pass its model_dump\(mode='json', exclude_none=True\)"):
        checked(Answered())


def test_a_checked_message_shares_nothing_with_the_given_one() -> None:
    blocks = [{"type": "text", "text": "Hello", "x": (1, None)}]
    message = checked(MappingProxyType({"role": "user", "content": blocks, "x_own": {"kept": True}}))
    assert message == {"role": "user", "content": [{**blocks[0], "x": [1, None]}], "x_own": {"kept": True}}
    message["content"][0]["text"] = "Bye"
    assert blocks[0]["text"] == "Hello"


@pytest.mark.parametrize(
    "message",
    [{}, {"role": "robot", "content": "x"}, {"role": 1}, {"content": "x"}, {"type": "remove", "data": {}}],
)
def test_a_message_without_a_role_is_refused_with_what_was_expected(message: Message) -> None:
    with pytest.raises(
        InvalidState,
        match=r"the shape '.*' has; expected system, user, assistant, tool; also ai, ",
    ):
        window("", [message], max_tokens=100, estimate=len)


@pytest.mark.parametrize(
    "messages", ["text", None, {"role": "user"}, [None], [{"role": "user", "content": {1}}]]
)
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    for function in (window, digest, tokens_of):
        given = ("", messages) if function is window else (messages,)
        limits = {} if function is tokens_of else {"max_tokens": 100}
        with pytest.raises(InvalidState, match=r"^messages"):
            function(*given, **limits, estimate=len)


WORDS = [
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "arguments",
    "id",
    "call_id",
    "output",
    "data",
]
WORDS += [
    "parts",
    "kind",
    "part_kind",
    "tool_name",
    "tool_use_id",
    "functionCall",
    "functionResponse",
    "source",
]
VALUES = [
    "user",
    "assistant",
    "tool",
    "request",
    "response",
    "human",
    "ai",
    "function_call",
    "tool_result",
    "image",
]
VALUES += [
    "user-prompt",
    "tool-return",
    "tool-call",
    "message",
    "reasoning",
    "tool_use",
    "image_url",
    "model",
]
FIELDS = st.sampled_from(WORDS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=20,
)


@every_shape
@given(
    st.lists(
        st.dictionaries(FIELDS, st.sampled_from(VALUES) | JSON, max_size=5)
        | st.fixed_dictionaries({"role": st.sampled_from(VALUES)}, optional={"content": JSON, "parts": JSON}),
        max_size=4,
    )
)
def test_any_json_is_shown_or_refused_with_an_error_of_this_library(name: str, messages: list[Any]) -> None:
    try:
        shown = window("S", messages, max_tokens=400, estimate=len, shape=name)
    except InvalidState:
        return
    assert tokens_of(shown, estimate=len, shape=name) <= 400
    turns(messages, name)
    digest(messages, max_tokens=50, estimate=len, shape=name)
