"""What a message consists of, and how a part of it is replaced or removed; pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from stm_backends.errors import InvalidState
from stm_backends.plain_json import DEEPEST_IN_TURN, decode_json, encode_json, require_json

Message: TypeAlias = Mapping[str, Any]
"""A message as its provider or framework has it: JSON, whose unknown fields are kept."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

Path: TypeAlias = tuple[str | int, ...]
"""Where something stands in a message: `("content", 0)` is the first block of its content, `()` all of it."""

Kind: TypeAlias = Literal["text", "call", "result", "media", "thought", "other"]

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Part(NamedTuple):
    """One part of a message.

    - `text`: `value` is what is said, or JSON that is read as text.
    - `call`: `name` and `id` are those of a tool's call, and `value` its arguments.
    - `result`: `id` is that of the call. What the result says and shows are parts that follow, within `path`.
    - `media`: an image, a recording or a file; `name` says which, and `value` is a reference to it.
    - `thought`: reasoning, which nothing may change and which must be followed by what it led to.
    - `other`: anything else.

    The part can be removed at `path`. Its `value` stands `at` a path if it may be cut there.
    """

    kind: Kind
    path: Path
    value: Any = ""
    at: Path = ()
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """What a model reads of `value`."""
        return self.value if isinstance(self.value, str) else _dump(self.value)

    @property
    def blank(self) -> bool:
        """Whether this is a text that says nothing."""
        return self.kind == "text" and isinstance(self.value, str) and not self.value.strip()

    def within(self, path: Path) -> bool:
        """Say whether the part stands within what stands at a path."""
        return self.path[: len(path)] == path


def checked(message: object, path: str = "message") -> Message:
    """Return a copy of a message, which shares nothing with it.

    Raises `InvalidState`, naming what is wrong where, for anything but a mapping that JSON carries there and
    back. Tuples come back as lists.
    """
    return cast("Message", decode_json(encode_json(_json(message, path))))


def require_messages(messages: object) -> None:
    """Raise `InvalidState`, naming what is wrong where, for anything but a list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidState(f"messages is {type(messages).__name__}, not a list of dicts of JSON")
    for index, message in enumerate(cast("Sequence[object]", messages)):
        _json(message, f"messages[{index}]")


def _json(message: object, path: str) -> dict[str, Any]:
    """Return a message as a `dict`."""
    if not isinstance(message, Mapping):
        dump = (
            "; pass its model_dump(mode='json', exclude_none=True)" if hasattr(message, "model_dump") else ""
        )
        raise InvalidState(f"{path} is {type(message).__name__}, not a dict of JSON{dump}")
    content = dict(cast("Mapping[str, Any]", message))
    require_json(content, path, deepest=DEEPEST_IN_TURN)
    return content


def changed(message: Message, path: Path, value: object) -> Message:
    """Return a copy of a message with another value at a path; what is not on the path is shared."""
    return _changed(message, path, value)


def without(message: Message, paths: Iterable[Path]) -> Message:
    """Return a copy of a message without what stands at some paths; `{}` if the message itself is one.

    A list of which nothing is left goes, too.
    """
    # The last of a list first, so that the others keep their places.
    for path in sorted(paths, key=_place, reverse=True):
        if not path:
            return {}
        message = changed(message, path, _GONE)
        if len(path) > 1 and not value_at(message, path[:-1]):
            message = changed(message, path[:-1], _GONE)
    return message


_GONE: Final = object()


def _place(path: Path) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (0, step) for step in path]


def value_at(node: Any, path: Path) -> Any:
    """Return what stands at a path."""
    for step in path:
        node = node[step]
    return node


def _changed(node: Any, path: Path, value: object) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    copy: Any = list(node) if isinstance(step, int) else dict(node)
    if value is _GONE and not rest:
        del copy[step]
    else:
        copy[step] = _changed(node[step], rest, value)
    return copy
