"""Messages of agents and models: their parts, their turns, and a model's view of them.

Pure functions of messages, which are JSON in the provider's format.
"""

from stm_backends.messages.parts import Message, Part, Path, Role, checked
from stm_backends.messages.providers import SHAPES, as_shape, shape_of
from stm_backends.messages.shapes import Call, Media, Result, Shape
from stm_backends.messages.turns import begins_turn, digest, turns
from stm_backends.messages.typed import (
    AnthropicMessage,
    ChatMessage,
    GoogleContent,
    LangChainMessage,
    PydanticMessage,
    ResponsesItem,
)
from stm_backends.messages.window import background, tokens_of, window

__all__ = [
    "SHAPES",
    "AnthropicMessage",
    "Call",
    "ChatMessage",
    "GoogleContent",
    "LangChainMessage",
    "Media",
    "Message",
    "Part",
    "Path",
    "PydanticMessage",
    "ResponsesItem",
    "Result",
    "Role",
    "Shape",
    "as_shape",
    "background",
    "begins_turn",
    "checked",
    "digest",
    "shape_of",
    "tokens_of",
    "turns",
    "window",
]
