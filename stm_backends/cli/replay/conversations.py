"""Read conversations from a JSON Lines file, one per line, in either of two formats.

```
{"session": "a", "turns": [{"user": "...", "assistant": "...", "tools": [{"name", "arguments", "results"}]}]}
{"session": "b", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
```
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from stm_backends.admin.exporting import FORMAT
from stm_backends.errors import ConfigurationError
from stm_backends.types import ConversationTurn, TrajectoryDigest

_OBSERVED: Final = 200
"""Maximum number of characters kept of a tool's results."""

_FORMAT: Final = "the file must be JSON Lines, one conversation per line"


class BadFile(ConfigurationError):
    """An invalid file of conversations; the message names the file, the line and the problem."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a file, at least one turn long."""

    session: str
    turns: tuple[ConversationTurn, ...]


def read_conversations(path: Path, *, limit: int | None = None) -> list[Conversation]:
    """Return the conversations of a file in order, at most `limit` of them.

    Raises `BadFile` for the first invalid line. The session id is the field `session` or `id`, or else
    `line-N`. Blank lines are skipped.
    """
    found: dict[str, tuple[int, Conversation]] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(found) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    conversation = _conversation(_json(line), number)
                    if conversation.session in found:
                        first = found[conversation.session][0]
                        raise _Wrong(f"the session {conversation.session!r} is also on line {first}")
                except _Wrong as wrong:
                    raise BadFile(f"{path}:{number}: {wrong}") from None
                found[conversation.session] = number, conversation
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or type(error).__name__}") from error
    if not found:
        raise BadFile(f"{path}: the file contains no conversation")
    return [conversation for _, conversation in found.values()]


class _Wrong(Exception):
    """A problem with a line."""


def _json(line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"not JSON at column {error.colno}: {error.msg} ({_FORMAT})") from None
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"not JSON: {error}") from None
    return _object(content, "the line", f" ({_FORMAT})")


def _conversation(content: Mapping[str, Any], number: int) -> Conversation:
    if content.get("format") == FORMAT:
        raise _Wrong("this is an exported conversation; store it with: stm-backends import FILE")
    if "turns" in content:
        turns = [_turn(_object(turn, f"turns[{i}]"), f"turns[{i}]") for i, turn in _items(content, "turns")]
    elif "messages" in content:
        turns = _paired(content)
    else:
        raise _Wrong("has neither 'turns' nor 'messages'")
    if not turns:
        raise _Wrong("the conversation has no turns")
    return Conversation(_session(content, number), tuple(turns))


def _session(content: Mapping[str, Any], number: int) -> str:
    for name in ("session", "id"):
        value = content.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise _Wrong(f"{name!r} must be non-blank text or an integer")
        return str(value)
    return f"line-{number}"


def _turn(content: Mapping[str, Any], path: str) -> ConversationTurn:
    draft = _Draft(user=[_text(content, "user", path)], assistant=[_text(content, "assistant", path)])
    if content.get("tools") is not None:
        for i, tool in _items(content, "tools", f"{path}."):
            call = _object(tool, f"{path}.tools[{i}]")
            draft.observe(
                _text(call, "name", f"{path}.tools[{i}]"), call.get("arguments"), call.get("results")
            )
    return draft.turn()


# Messages


@dataclass(slots=True)
class _Draft:
    """A turn while its messages are still being read."""

    user: list[str] = field(default_factory=list[str])
    assistant: list[str] = field(default_factory=list[str])
    tools: list[str] = field(default_factory=list[str])
    observed: list[str] = field(default_factory=list[str])

    @property
    def answered(self) -> bool:
        return bool(self.assistant or self.tools)

    def observe(self, tool: str, arguments: object, results: object) -> None:
        self.tools.append(tool)
        self.observed.append(f"{tool}({_brief(arguments)}): {_brief(results) or 'no results'}")

    def turn(self) -> ConversationTurn:
        return ConversationTurn(
            "\n".join(filter(None, self.user)),
            "\n".join(filter(None, self.assistant)),
            TrajectoryDigest(self.tools, "\n".join(self.observed)) if self.tools else None,
        )


def _paired(content: Mapping[str, Any]) -> list[ConversationTurn]:
    """Group messages into turns: a user message after an answer begins a new turn."""
    drafts: list[_Draft] = []
    calls: dict[str, tuple[str, object]] = {}
    for i, item in _items(content, "messages"):
        path = f"messages[{i}]"
        message = _object(item, path)
        role = _text(message, "role", path)
        text = _content(message, path)
        if role in ("system", "developer"):
            continue
        if not drafts or (role == "user" and drafts[-1].answered):
            drafts.append(_Draft())
        if role == "user":
            drafts[-1].user.append(text)
        elif role == "assistant":
            drafts[-1].assistant.append(text)
            calls.update(_tool_calls(message, path))
        elif role in ("tool", "function"):
            asked = calls.get(str(message.get("tool_call_id")), ("", None))
            drafts[-1].observe(asked[0] or str(message.get("name") or "tool"), asked[1], text)
        else:
            raise _Wrong(f"{path}.role is {role!r}, not system, developer, user, assistant or tool")
    return [draft.turn() for draft in drafts]


def _tool_calls(message: Mapping[str, Any], path: str) -> dict[str, tuple[str, object]]:
    if message.get("tool_calls") is None:
        return {}
    calls: dict[str, tuple[str, object]] = {}
    for i, item in _items(message, "tool_calls", f"{path}."):
        call = _object(item, f"{path}.tool_calls[{i}]")
        function = _object(call.get("function"), f"{path}.tool_calls[{i}].function")
        name = _text(function, "name", f"{path}.tool_calls[{i}].function")
        arguments: object = function.get("arguments")
        # Written by a model; if it is not JSON, it is kept as text.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls[str(call.get("id"))] = name, arguments
    return calls


def _content(message: Mapping[str, Any], path: str) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_object(part, f"{path}.content[{i}]") for i, part in _items(message, "content", f"{path}.")]
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


# Values


def _object(value: object, path: str, hint: str = "") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{path} is not a JSON object{hint}")
    return cast("dict[str, Any]", value)


def _items(content: Mapping[str, Any], name: str, prefix: str = "") -> list[tuple[int, object]]:
    value: object = content[name]
    if not isinstance(value, list):
        raise _Wrong(f"{prefix}{name} is not a list")
    return list(enumerate(cast("list[object]", value)))


def _text(content: Mapping[str, Any], name: str, path: str) -> str:
    value: object = content.get(name)
    if not isinstance(value, str):
        raise _Wrong(f"{path}.{name} is {'missing' if name not in content else 'not text'}")
    return value


def _brief(value: object) -> str:
    """Return a JSON value as a short line."""
    if isinstance(value, list):
        items = cast("list[object]", value)
        more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
        return f"{_brief(items[0])}{more}" if items else ""
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value)
        text = ", ".join(f"{name}={_brief(item)}" for name, item in pairs.items())
    else:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text if len(text) <= _OBSERVED else f"{text[: _OBSERVED - 1]}…"
