"""The table of shapes: the names of role, text, calls and media in each provider and framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from stm_backends.errors import ConfigurationError
from stm_backends.messages.blocks import (
    MEDIA,
    THOUGHTS,
    call_in,
    list_in,
    medium,
    object_in,
    parts_in,
    role_called,
    text_in,
    typed_block,
)
from stm_backends.messages.parts import Message, Part, Path, Role, require_messages
from stm_backends.messages.shapes import Shape
from stm_backends.messages.typed import (
    AnthropicMessage,
    ChatMessage,
    GoogleContent,
    LangChainMessage,
    PydanticMessage,
    ResponsesItem,
)

_OF_RESPONSES: Final = frozenset(("input_text", "output_text", "input_image", "input_file"))
_OF_ANTHROPIC: Final = THOUGHTS - {"reasoning"} | {"tool_use", "tool_result", "image", "document"}
_OF_CHAT: Final = frozenset(("image_url", "input_audio", "file"))
_FIELDS_OF_CHAT: Final = ("tool_calls", "function_call", "refusal", "audio")


# OpenAI's chat completions


def _chat_role(message: Message) -> Role:
    return role_called(message.get("role"), "openai")


def _chat(message: Message) -> Iterator[Part]:
    if message.get("role") in ("tool", "function"):
        yield Part("result", (), id=text_in(message.get("tool_call_id") or message.get("name")))
    yield from parts_in(message.get("content"), ("content",), typed_block)
    if refusal := text_in(message.get("refusal")):
        yield Part("text", ("refusal",), refusal, ("refusal",))
    if audio := message.get("audio"):
        yield Part("other", ("audio",), audio)
    for index, call in enumerate(map(object_in, list_in(message.get("tool_calls")))):
        at = ("custom", "input") if call.get("type") == "custom" else ("function", "arguments")
        name = object_in(call.get(at[0])).get("name")
        yield call_in(call, ("tool_calls", index), at, call.get("id"), name)
    if call := object_in(message.get("function_call")):
        yield call_in(call, ("function_call",), ("arguments",), call.get("name"), call.get("name"))


def _chat_says(role: Role, text: str) -> ChatMessage:
    return {"role": role, "content": text}


def _chat_answers(call: Part, text: str) -> ChatMessage:
    if call.path == ("function_call",):
        return {"role": "function", "name": call.name, "content": text}
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _chat_owns(message: Message) -> bool:
    return (
        message.get("role") in ("tool", "function")
        or not message.keys().isdisjoint(_FIELDS_OF_CHAT)
        or not _types(message).isdisjoint(_OF_CHAT)
    )


def _types(message: Message) -> set[str]:
    return {text_in(object_in(block).get("type")) for block in list_in(message.get("content"))}


# OpenAI's Responses, and its Agents SDK, whose sessions hold the same items


def _responses_role(item: Message) -> Role:
    kind = text_in(item.get("type"))
    if (kind.endswith("_output") and not _hosted(item)) or kind == "mcp_approval_response":
        return "tool"
    return "assistant" if kind and "role" not in item else role_called(item.get("role"), "openai-responses")


def _hosted(item: Message) -> bool:
    """Say whether the provider's server has run this call by itself, so that no result answers it."""
    return item.get("execution") == "server"


def _responses(item: Message) -> Iterator[Part]:
    kind, call_id = text_in(item.get("type")), item.get("call_id") or item.get("id")
    if kind in ("", "message"):
        yield from parts_in(item.get("content"), ("content",), typed_block)
    elif kind == "reasoning":
        yield Part("thought", (), item)
    elif kind == "image_generation_call":
        yield Part("media", (), text_in(item.get("id")) or "generated", name="image")
    elif _hosted(item):
        yield Part("other", (), item)
    elif kind.endswith("_output"):
        yield Part("result", (), id=text_in(call_id))
        at = "tools" if kind == "tool_search_output" else "output"
        yield from parts_in(item.get(at), (at,), typed_block)
    elif kind == "mcp_approval_response":
        yield Part("result", (), id=text_in(item.get("approval_request_id")))
        yield Part("other", (), item)
    elif kind in ("function_call", "custom_tool_call"):
        at = "arguments" if kind == "function_call" else "input"
        yield call_in(item, (), (at,), call_id, item.get("name"))
    elif item.get("call_id") or kind == "mcp_approval_request":
        yield Part("call", (), {**item}, id=text_in(call_id), name=text_in(item.get("name")) or kind)
    else:
        yield Part("other", (), item)


def _input_text(text: str) -> Mapping[str, str]:
    return {"type": "input_text", "text": text}


def _responses_answers(call: Part, text: str) -> ResponsesItem | None:
    if not call.at:
        return None
    kind = "function_call_output" if call.at[-1] == "arguments" else "custom_tool_call_output"
    return {"type": kind, "call_id": call.id, "output": text}


def _responses_owns(item: Message) -> bool:
    return isinstance(item.get("type"), str) or not _types(item).isdisjoint(_OF_RESPONSES)


# Anthropic


def _anthropic_role(message: Message) -> Role:
    blocks = list_in(message.get("content"))
    if any(object_in(block).get("type") == "tool_result" for block in blocks):
        return "tool"
    return role_called(message.get("role"), "anthropic")


def _anthropic(message: Message) -> Iterator[Part]:
    return parts_in(message.get("content"), ("content",), typed_block)


def _anthropic_says(role: Role, text: str) -> AnthropicMessage:
    return {"role": "assistant" if role == "assistant" else "user", "content": text}


def _anthropic_answers(call: Part, text: str) -> AnthropicMessage:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": text}]}


def _anthropic_owns(message: Message) -> bool:
    # Some servers that speak OpenAI's chat have blocks of reasoning that are called the same.
    return "stop_reason" in message or (
        message.keys().isdisjoint(_FIELDS_OF_CHAT) and not _types(message).isdisjoint(_OF_ANTHROPIC)
    )


def _text_block(text: str) -> Mapping[str, str]:
    return {"type": "text", "text": text}


# LangChain, as `messages_to_dict` has it


def _langchain_role(message: Message) -> Role:
    kind = message.get("type")
    return role_called(object_in(message.get("data")).get("role") if kind == "chat" else kind, "langchain")


def _langchain(message: Message) -> Iterator[Part]:
    data = object_in(message.get("data"))
    if message.get("type") in ("tool", "function"):
        yield Part("result", (), id=text_in(data.get("tool_call_id") or data.get("name")))
    for part in parts_in(data.get("content"), ("data", "content"), typed_block):
        # The same calls are in `tool_calls`, in which every provider's are alike.
        yield Part("other", part.path, part.value) if part.kind == "call" else part
    for index, call in enumerate(map(object_in, list_in(data.get("tool_calls")))):
        yield call_in(call, ("data", "tool_calls", index), ("args",), call.get("id"), call.get("name"))


_LANGCHAIN: Final[Mapping[Role, str]] = {
    "system": "system",
    "user": "human",
    "assistant": "ai",
    "tool": "tool",
}


def _langchain_says(role: Role, text: str) -> LangChainMessage:
    return {"type": _LANGCHAIN[role], "data": {"type": _LANGCHAIN[role], "content": text}}


def _langchain_answers(call: Part, text: str) -> LangChainMessage:
    return {
        "type": "tool",
        "data": {"type": "tool", "content": text, "tool_call_id": call.id, "name": call.name},
    }


def _langchain_owns(message: Message) -> bool:
    return isinstance(message.get("type"), str) and isinstance(message.get("data"), Mapping)


# Google's contents, as the Agent Development Kit keeps them, in the names of JSON or of Python


def _google_role(content: Message) -> Role:
    if any(part.kind == "result" for part in _google(content)):
        return "tool"
    return role_called(content.get("role") or "user", "google")


def _google(content: Message) -> Iterator[Part]:
    for index, part in enumerate(map(object_in, list_in(content.get("parts")))):
        path = ("parts", index)
        if isinstance(text := part.get("text"), str):
            yield (
                Part("thought", path, text)
                if part.get("thought")
                else Part("text", path, text, (*path, "text"))
            )
        elif key := _key(part, "functionCall", "function_call"):
            call = part[key]
            name = text_in(call.get("name"))
            yield call_in(part, path, (key, "args"), call.get("id") or name, name)
        elif key := _key(part, "functionResponse", "function_response"):
            result = part[key]
            yield Part("result", path, id=text_in(result.get("id") or result.get("name")))
            yield Part("text", (*path, key), result.get("response", ""), (*path, key, "response"))
        elif key := _key(part, "inlineData", "inline_data", "fileData", "file_data"):
            yield medium(part[key], path, "file")
        else:
            yield Part("other", path, part)


def _key(part: Mapping[str, Any], *names: str) -> str:
    return next((name for name in names if isinstance(part.get(name), Mapping)), "")


def _google_says(role: Role, text: str) -> GoogleContent:
    return {"role": "model" if role == "assistant" else "user", "parts": [{"text": text}]}


def _google_answers(call: Part, text: str) -> GoogleContent:
    found = {"name": call.name, "response": {"error": text}}
    key = "function_response" if "function_call" in call.at else "functionResponse"
    return {"role": "user", "parts": [{key: found if call.id == call.name else {"id": call.id, **found}}]}


def _google_block(text: str) -> Mapping[str, str]:
    return {"text": text}


def _google_owns(content: Message) -> bool:
    return isinstance(content.get("parts"), list) and "kind" not in content


# Pydantic AI


def _pydantic_role(message: Message) -> Role:
    if message.get("kind") != "request":
        return role_called(message.get("kind"), "pydantic-ai")
    kinds = _kinds(message)
    if any(part.kind == "result" for part in _pydantic(message)) or not kinds & {
        "user-prompt",
        "system-prompt",
    }:
        return "tool"
    return "user" if "user-prompt" in kinds else "system"


def _kinds(message: Message) -> set[str]:
    return {text_in(object_in(part).get("part_kind")) for part in list_in(message.get("parts"))}


def _pydantic(message: Message) -> Iterator[Part]:
    kinds = _kinds(message)
    for index, part in enumerate(map(object_in, list_in(message.get("parts")))):
        path, kind = ("parts", index), text_in(part.get("part_kind"))
        if kind in ("tool-return", "retry-prompt") and part.get("tool_name"):
            yield Part("result", path, id=text_in(part.get("tool_call_id")))
            yield from parts_in(part.get("content"), (*path, "content"), _shown)
        elif kind == "tool-call":
            yield call_in(part, path, ("args",), part.get("tool_call_id"), part.get("tool_name"))
        elif kind == "user-prompt":
            yield from parts_in(part.get("content"), (*path, "content"), _shown)
        elif kind in ("text", "retry-prompt") or (kind == "system-prompt" and "user-prompt" not in kinds):
            yield Part("text", path, part.get("content", ""), (*path, "content"))
        elif kind == "thinking":
            yield Part("thought", path, part)
        elif kind == "file":
            yield medium(part, path, "file")
        else:
            yield Part("other", path, part)


def _shown(block: Mapping[str, Any], path: Path) -> Iterator[Part]:
    """Yield the part of an item of a prompt or of a tool's result, which may be any JSON."""
    kind = text_in(block.get("kind"))
    if kind == "text-content":
        yield Part("text", path, block.get("content", ""), (*path, "content"))
    elif kind in MEDIA:
        yield medium(block, path, MEDIA[kind])
    elif kind == "cache-point":
        yield Part("other", path, block)
    else:
        yield Part("text", path, block, path)


def _pydantic_says(role: Role, text: str) -> PydanticMessage:
    if role == "assistant":
        return {"kind": "response", "parts": [{"part_kind": "text", "content": text}]}
    kind = "system-prompt" if role == "system" else "user-prompt"
    return {"kind": "request", "parts": [{"part_kind": kind, "content": text}]}


def _pydantic_answers(call: Part, text: str) -> PydanticMessage:
    part = {"part_kind": "tool-return", "tool_name": call.name, "content": text, "tool_call_id": call.id}
    return {"kind": "request", "parts": [part]}


def _pydantic_owns(message: Message) -> bool:
    return message.get("kind") in ("request", "response") and isinstance(message.get("parts"), list)


_ALL: Final = (
    Shape("openai", _chat_role, _chat, _chat_says, _text_block, _chat_answers),
    Shape(
        "openai-responses",
        _responses_role,
        _responses,
        _chat_says,
        _input_text,
        _responses_answers,
        runs=True,
    ),
    Shape(
        "anthropic",
        _anthropic_role,
        _anthropic,
        _anthropic_says,
        _text_block,
        _anthropic_answers,
        runs=True,
        joins="content",
    ),
    Shape("langchain", _langchain_role, _langchain, _langchain_says, _text_block, _langchain_answers),
    Shape(
        "google",
        _google_role,
        _google,
        _google_says,
        _google_block,
        _google_answers,
        runs=True,
        joins="parts",
    ),
    Shape("pydantic-ai", _pydantic_role, _pydantic, _pydantic_says, str, _pydantic_answers, runs=True),
)

SHAPES: Final[Mapping[str, Shape]] = MappingProxyType({shape.name: shape for shape in _ALL})
"""The shapes that are known, by their names. OpenAI's Agents SDK keeps items of `openai-responses`."""

_OWNERS: Final[tuple[tuple[str, Callable[[Message], bool]], ...]] = (
    ("pydantic-ai", _pydantic_owns),
    ("google", _google_owns),
    ("langchain", _langchain_owns),
    ("anthropic", _anthropic_owns),
    ("openai-responses", _responses_owns),
    ("openai", _chat_owns),
)
"""The test that a message is of this shape, and of none that follows."""


def shape_of(*messages: Message) -> Shape:
    """Return the shape of messages: that of the first message that fits only one shape.

    If no message does, because each has only a role and a text, it is `openai`: name the shape if it is
    another. Raises `InvalidState` for a message that fits no shape.
    """
    require_messages(messages)
    for message in messages:
        if name := next((name for name, owns in _OWNERS if owns(message)), ""):
            return SHAPES[name]
    for message in messages:
        _chat_role(message)
    return SHAPES["openai"]


def as_shape(shape: Shape | str | None, messages: Sequence[Message]) -> Shape:
    """Return the shape of messages, which is given, named or recognized.

    Raises `InvalidState` for anything but a list of messages, and `ConfigurationError` for an unknown name.
    """
    require_messages(messages)
    if shape is None:
        return shape_of(*messages)
    found = SHAPES.get(shape) if isinstance(shape, str) else shape
    if not isinstance(found, Shape):
        expected = ", ".join(SHAPES)
        unknown = "another name" if isinstance(shape, str) else type(shape).__name__
        raise ConfigurationError(f"shape must be a Shape or one of {expected}; not {unknown}")
    return found
