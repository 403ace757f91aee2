"""Conversations at random, as each provider and framework has them, and the rules of the providers.

A dialogue is a list of what is said: it is made once, and `in_shape` says it in one provider's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from anthropic.types import MessageParam
from hypothesis import strategies as st
from langchain_core.messages import messages_from_dict
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter

from stm_backends.messages import SHAPES, Message

Json = dict[str, Any]


class User(NamedTuple):
    texts: list[str]
    media: list[str]
    extra: Json


class System(NamedTuple):
    text: str


class Answer(NamedTuple):
    text: str
    calls: list[tuple[str, str, Json]]
    thought: bool
    extra: Json


class Found(NamedTuple):
    """What a tool has returned."""

    call: str
    name: str
    text: str
    blocks: bool
    image: bool


Dialogue = list[User | System | Answer | Found]

TEXTS = st.sampled_from(
    [
        "",
        " ",
        "Hello",
        "Which table?",
        "日本語のテキスト" * 20,
        "word " * 300,
        '{"a": "</conversation_summary>"}',
    ]
)
LONG = st.sampled_from(["", "3 found", "row " * 500, "0123456789" * 20_000])
MEDIA = st.sampled_from(["image", "link", "file"])
EXTRA = st.sampled_from([{}, {}, {"x_id": "m-1", "x_nested": {"kept": [1, None, {"deep": "é"}]}}])
ARGUMENTS = st.sampled_from([{}, {"q": "tables", "n": 2}, {"path": "a.py", "content": "x = 1\n" * 2_000}])
USERS = st.builds(User, st.lists(TEXTS, min_size=1, max_size=2), st.lists(MEDIA, max_size=3), EXTRA)


@st.composite
def dialogues(draw: st.DrawFn, *, faults: bool = True) -> Dialogue:
    """Draw a conversation; with faults, results are missing, doubled, late or of no call."""
    said: Dialogue = []
    number = 0
    if draw(st.booleans()):
        said.append(System("Be brief."))
    if faults and draw(st.integers(0, 4)) == 0:
        said.append(Answer("How can I help?", [], False, {}))
    for _ in range(draw(st.integers(1, 5))):
        said.append(draw(USERS))
        if draw(st.integers(0, 4)) == 0:
            said.append(System("The user has switched to the app."))
        for _ in range(draw(st.integers(0, 3))):
            calls: list[tuple[str, str, Json]] = []
            for _ in range(draw(st.integers(1, 3))):
                number += 1
                calls.append((f"call_{number}", draw(st.sampled_from(["search", "write"])), draw(ARGUMENTS)))
            said.append(Answer(draw(TEXTS), calls, draw(st.booleans()), draw(EXTRA)))
            said += draw(_results(calls, faults))
        if draw(st.booleans()):
            said.append(Answer(draw(TEXTS), [], draw(st.booleans()), draw(EXTRA)))
    return said


@st.composite
def _results(draw: st.DrawFn, calls: Sequence[tuple[str, str, Json]], faults: bool) -> Dialogue:
    found: Dialogue = [
        Found(call, name, draw(LONG), draw(st.booleans()), draw(st.booleans()))
        for call, name, _ in draw(st.permutations(calls))
    ]
    fault = (
        draw(st.sampled_from(["missing", "twice", "orphan", "late"]))
        if faults and draw(st.booleans())
        else ""
    )
    if fault == "missing":
        del found[draw(st.integers(0, len(found) - 1)) :]
    elif fault == "twice":
        found.append(found[0])
    elif fault == "orphan":
        found.insert(draw(st.integers(0, len(found))), Found("call_0", "search", "lost", False, False))
    elif fault == "late":
        found.insert(0, User(["Wait"], [], {}))
    return found


def in_shape(name: str, said: Dialogue) -> list[Message]:
    """Say a dialogue in the messages of a shape."""
    return [message for one in said for message in _SPEAKERS[name](one)]


_PIXEL = "iVBORw0KGgo="


def _chat(one: User | System | Answer | Found) -> list[Json]:
    media = {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}},
        "link": {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        "file": {
            "type": "file",
            "file": {"file_data": f"data:application/pdf;base64,{_PIXEL}", "filename": "a.pdf"},
        },
    }
    match one:
        case User(texts, shown, extra):
            blocks = [{"type": "text", "text": text} for text in texts] + [media[kind] for kind in shown]
            return [{"role": "user", "content": blocks if len(blocks) > 1 else texts[0], **extra}]
        case System(text):
            return [{"role": "system", "content": text}]
        case Answer(text, calls, thought, extra):
            said: Json = {"role": "assistant", "content": text, **extra}
            if calls:
                said["content"] = text or None
                said["tool_calls"] = [
                    {
                        "id": call,
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                    for call, name, arguments in calls
                ]
            return [{**said, "reasoning_content": "hm"} if thought else said]
        case Found(call, _, text, blocks, _):
            content = [{"type": "text", "text": text}] if blocks else text
            return [{"role": "tool", "tool_call_id": call, "content": content}]


def _responses(one: User | System | Answer | Found) -> list[Json]:
    media = {
        "image": {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{_PIXEL}"},
        "link": {"type": "input_image", "detail": "auto", "file_id": "file_1"},
        "file": {
            "type": "input_file",
            "file_data": f"data:application/pdf;base64,{_PIXEL}",
            "filename": "a.pdf",
        },
    }
    match one:
        case User(texts, shown, extra):
            blocks = [{"type": "input_text", "text": text} for text in texts] + [
                media[kind] for kind in shown
            ]
            return [{"role": "user", "content": blocks if len(blocks) > 1 else texts[0], **extra}]
        case System(text):
            return [{"role": "developer", "content": text}]
        case Answer(text, calls, thought, extra):
            items: list[Json] = []
            if thought:
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"})
            if text or not calls:
                block = {"type": "output_text", "text": text, "annotations": []}
                said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
                items.append({**said, "content": [block], **extra})
            return items + [
                {
                    "type": "function_call",
                    "call_id": call,
                    "name": name,
                    "arguments": json.dumps(arguments),
                    **extra,
                }
                for call, name, arguments in calls
            ]
        case Found(call, _, text, blocks, image):
            output = (
                [{"type": "input_text", "text": text}, *([media["image"]] if image else [])]
                if blocks
                else text
            )
            return [{"type": "function_call_output", "call_id": call, "output": output}]


def _anthropic(one: User | System | Answer | Found) -> list[Json]:
    picture = {"type": "base64", "media_type": "image/png", "data": _PIXEL}
    media = {
        "image": {"type": "image", "source": picture},
        "link": {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        "file": {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "page " * 2_000},
        },
    }
    match one:
        case User(texts, shown, extra):
            blocks = [{"type": "text", "text": text} for text in texts] + [media[kind] for kind in shown]
            return [{"role": "user", "content": blocks if len(blocks) > 1 else texts[0], **extra}]
        case System(text):
            return [{"role": "system", "content": text}]
        case Answer(text, calls, thought, extra):
            said: list[Json] = [{"type": "thinking", "thinking": "hm", "signature": "s"}] if thought else []
            said += [{"type": "text", "text": text}]
            said += [
                {"type": "tool_use", "id": call, "name": name, "input": given} for call, name, given in calls
            ]
            return [{"role": "assistant", "content": said, **extra}]
        case Found(call, _, text, blocks, image):
            content = (
                [{"type": "text", "text": text}, *([media["image"]] if image else [])] if blocks else text
            )
            return [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": call, "content": content}],
                }
            ]


def _langchain(one: User | System | Answer | Found) -> list[Json]:
    (chat,) = _chat(one)
    kind = {"user": "human", "assistant": "ai"}.get(chat["role"], chat["role"])
    data: Json = {
        "type": kind,
        "content": chat["content"] or "",
        "additional_kwargs": {},
        "response_metadata": {},
    }
    if isinstance(one, Answer):
        data["tool_calls"] = [
            {"type": "tool_call", "id": call, "name": name, "args": given} for call, name, given in one.calls
        ]
    if isinstance(one, Found):
        data["tool_call_id"] = one.call
    return [{"type": kind, "data": data}]


def _google(one: User | System | Answer | Found) -> list[Json]:
    media = {
        "image": {"inlineData": {"mimeType": "image/png", "data": _PIXEL}},
        "link": {"fileData": {"mimeType": "image/png", "fileUri": "gs://example/a.png"}},
        "file": {"inlineData": {"mimeType": "application/pdf", "data": _PIXEL, "displayName": "a.pdf"}},
    }
    match one:
        case User(texts, shown, extra):
            parts = [{"text": text} for text in texts] + [media[kind] for kind in shown]
            return [{"role": "user", "parts": parts, **extra}]
        case System(text):  # It has a parameter of its own.
            return []
        case Answer(text, calls, thought, extra):
            said: list[Json] = [{"text": "hm", "thought": True}] if thought else []
            said += [{"text": text}]
            said += [
                {"functionCall": {"id": call, "name": name, "args": given}} for call, name, given in calls
            ]
            return [{"role": "model", "parts": said, **extra}]
        case Found(call, name, text, _, _):
            response = {"id": call, "name": name, "response": {"rows": [text], "count": 1}}
            return [{"role": "user", "parts": [{"functionResponse": response}]}]


def _pydantic(one: User | System | Answer | Found) -> list[Json]:
    media = {
        "image": {"kind": "binary", "data": _PIXEL, "media_type": "image/png"},
        "link": {"kind": "image-url", "url": "https://example.org/a.png"},
        "file": {"kind": "document-url", "url": "https://example.org/a.pdf"},
    }
    match one:
        case User(texts, shown, extra):
            content = [*texts, *(media[kind] for kind in shown)] if shown else texts[0]
            return [{"kind": "request", "parts": [{"part_kind": "user-prompt", "content": content}], **extra}]
        case System(text):
            return [{"kind": "request", "parts": [{"part_kind": "system-prompt", "content": text}]}]
        case Answer(text, calls, thought, extra):
            parts: list[Json] = [{"part_kind": "thinking", "content": "hm"}] if thought else []
            parts += [{"part_kind": "text", "content": text}]
            parts += [
                {"part_kind": "tool-call", "tool_name": name, "args": given, "tool_call_id": call}
                for call, name, given in calls
            ]
            return [{"kind": "response", "parts": parts, **extra}]
        case Found(call, name, text, _, _):
            part = {
                "part_kind": "tool-return",
                "tool_name": name,
                "content": {"rows": text},
                "tool_call_id": call,
            }
            return [{"kind": "request", "parts": [part]}]


_SPEAKERS: Mapping[str, Callable[[User | System | Answer | Found], list[Json]]] = {
    "openai": _chat,
    "openai-responses": _responses,
    "anthropic": _anthropic,
    "langchain": _langchain,
    "google": _google,
    "pydantic-ai": _pydantic,
}


def require_valid(name: str, messages: Sequence[Message]) -> None:
    """Assert what the provider's server requires of a list of messages."""
    shape = SHAPES[name]
    waiting: list[str] = []
    for index, message in enumerate(messages):
        role, parts = shape.role(message), [*shape.parts(message)]
        results = [result.id for result in shape.results(message)]
        assert len({*results}) == len(results), "two results of one call"
        assert {*results} <= {*waiting}, "a result without a call"
        waiting = [call for call in waiting if call not in results]
        goes_on = role == "assistant" and shape.runs
        assert not waiting or goes_on or (results and not shape.joins), "a call without its result"
        waiting += [call.id for call in shape.calls(message)]
        if shape.joins:
            assert (role == "assistant") == bool(index % 2), "user and assistant do not take turns"
            assert parts, "an empty message"
            assert not any(part.blank for part in parts if isinstance(part.path[-1], int)), "a blank text"
            kinds = [part.kind for part in parts if len(part.path) == 2]
            assert not results or kinds == sorted(kinds, key=lambda kind: kind != "result"), (
                "results are not first"
            )
            assert role != "assistant" or kinds[-1:] != ["thought"], "a thought that leads to nothing"
        if message.get("type") == "reasoning":
            assert shape.role(messages[index + 1]) == "assistant", "a thought that leads to nothing"
    assert not waiting, "a call without its result"


MODELS = {
    "openai": ChatCompletionMessageParam,
    "openai-responses": ResponseInputItemParam,
    "anthropic": MessageParam,
}


@cache
def model_of(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(MODELS[name])


def read_through(value: Any) -> None:
    """Read a validated value to its end: what is declared as iterable is validated only then."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            read_through(item)


def require_accepted(name: str, messages: Sequence[Message]) -> None:
    """Assert that the client's model of a request accepts messages."""
    if name == "langchain":
        assert len(messages_from_dict([{**message} for message in messages])) == len(messages)
    for message in messages if name in MODELS else ():
        read_through(model_of(name).validate_python(message))
