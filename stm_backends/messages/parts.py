"""The parts of a message, and how one is replaced or removed; pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from stm_backends.errors import InvalidState
from stm_backends.plain_json import DEEPEST_IN_TURN, decode_json, encode_json, require_json

Message: TypeAlias = Mapping[str, Any]
"""A message in the format of its provider or framework: JSON, whose unknown fields are kept."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

Path: TypeAlias = tuple[str | int, ...]
"""A place in a message: `("content", 0)` is the first block of its content, `()` all of it."""

Kind: TypeAlias = Literal["text", "call", "result", "media", "thought", "other"]

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Part(NamedTuple):
    """One part of a message.

    - `text`: `value` is the text, or JSON that is read as text.
    - `call`: `name` and `id` are those of a tool's call, and `value` its arguments.
    - `result`: `id` is that of the call. Its texts and media are the parts that follow, within `path`.
    - `media`: an image, a recording or a file; `name` says which, and `value` is a reference to it.
    - `thought`: reasoning, which must not be changed, and must be followed by its outcome.
    - `other`: anything else.

    The part can be removed at `path`. Its `value` is `at` a path if it may be cut there.
    """

    kind: Kind
    path: Path
    value: Any = ""
    at: Path = ()
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The text that a model reads of `value`."""
        return self.value if isinstance(self.value, str) else _dump(self.value)

    @property
    def blank(self) -> bool:
        """True if this is a blank text."""
        return self.kind == "text" and isinstance(self.value, str) and not self.value.strip()

    def within(self, path: Path) -> bool:
        """Say whether the part is within the value at a path."""
        return self.path[: len(path)] == path


def checked(message: object, path: str = "message") -> Message:
    """Return a copy of a message, which shares nothing with it.

    Raises `InvalidState`, naming the problem and its place, for anything but a mapping that survives a round
    trip through JSON. Tuples become lists.
    """
    return cast("Message", decode_json(encode_json(_json(message, path))))


def require_messages(messages: object) -> None:
    """Raise `InvalidState`, naming the problem and its place, for anything but a list of messages."""
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
    """Return a copy of a message with another value at a path; values off the path are shared."""
    return _changed(message, path, value)


def without(message: Message, paths: Iterable[Path]) -> Message:
    """Return a copy of a message without the values at some paths; `{}` if the message itself is one.

    A list that becomes empty is removed, too.
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
    """Return the value at a path."""
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
