"""The messages of providers and frameworks as types, as far as this library makes and reads them.

Each may have more fields. They are `Mapping[str, Any]` where a type checker wants a `Message`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

Blocks: TypeAlias = Sequence[Mapping[str, Any]]


class ChatMessage(TypedDict):
    """A message of OpenAI's chat completions, and of the many servers that speak it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[str | Blocks | None]
    tool_calls: NotRequired[Blocks]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class ResponsesItem(TypedDict, total=False):
    """An item of OpenAI's Responses and of its Agents SDK: a message, a call, a result, and so on."""

    type: str
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Blocks
    id: str
    call_id: str
    name: str
    arguments: str
    output: str | Blocks


class AnthropicMessage(TypedDict):
    """A message of Anthropic's, whose calls and results are blocks of its content."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class LangChainMessage(TypedDict):
    """A message of LangChain as `messages_to_dict` has it."""

    type: str
    data: Mapping[str, Any]


class GoogleContent(TypedDict):
    """A content of Google's models, as the Agent Development Kit keeps it."""

    role: NotRequired[Literal["user", "model"]]
    parts: Blocks


class PydanticMessage(TypedDict):
    """A message of Pydantic AI as its `ModelMessagesTypeAdapter` has it."""

    kind: Literal["request", "response"]
    parts: Blocks
