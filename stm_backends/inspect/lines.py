"""The text of a turn, a message or an item of a log, by speaker; pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

from stm_backends.history.activity import text_of
from stm_backends.history.log import LogItem
from stm_backends.memory.shared.reading import Numbered
from stm_backends.memory.speech import recognized
from stm_backends.messages import Message
from stm_backends.types import ConversationTurn, StoredTurn, TrajectoryDigest

TOOLS: Final = "tools"


class Line(NamedTuple):
    """Text of a speaker: `system`, `user`, `assistant`, `tools`; or `message`, for JSON of no known shape."""

    who: str
    text: str


def lines_of(stored: StoredTurn) -> list[Line]:
    """Return the lines of a turn or a message, in order. A message has one or more."""
    if stored.said is not None:
        return lines_in(stored.said.message)
    turn = stored.turn
    used = [Line(TOOLS, text) for text in (_tools(turn.trajectory_digest),) if text]
    return [Line("user", turn.user_message), *used, Line("assistant", turn.assistant_response)]


def lines_in(message: Message) -> list[Line]:
    """Return what a message says, in order: one line or more."""
    return [*_of_message(message)] or [Line("message", json.dumps(message, ensure_ascii=False))]


def whole_lines_of(stored: StoredTurn) -> list[Line]:
    """Return the same with everything that a digest of tools says, and the artifacts of a turn."""
    if stored.said is not None:
        return lines_of(stored)
    turn = stored.turn
    return [
        Line("user", turn.user_message),
        *(Line(TOOLS, text) for text in (_all_of(turn.trajectory_digest),) if text),
        Line("assistant", turn.assistant_response),
        *_artifacts(turn),
    ]


def as_json(one: Numbered, stored: StoredTurn) -> dict[str, Any]:
    """Return a turn or a message for the page; `stored` is what it shows of it."""
    return {
        "number": one.number,
        "at": _time(stored.turn.ts),
        "summarized": one.summarized,
        "retained": one.retained,
        "removed": stored.removed,
        "cut": stored.said is not None and "cut" in stored.extra,
        "lines": [] if stored.removed else whole_lines_of(stored),
    }


def item_as_json(one: LogItem) -> dict[str, Any]:
    """Return an item of a log for the page."""
    text = text_of(one.item) or json.dumps(one.item, indent=2, ensure_ascii=False)
    return {
        "number": one.number,
        "at": _time(one.at),
        "summarized": False,
        "retained": one.retained,
        "removed": False,
        "cut": False,
        "lines": [Line(_speaker(one), text)],
    }


def _time(at: float) -> float:
    """Return a time that JSON has; 0 for an unknown one."""
    return at if math.isfinite(at) else 0.0


def _speaker(one: LogItem) -> str:
    inner: Any = one.item.get("message")
    kind: Any = cast("dict[str, Any]", inner).get("kind") if isinstance(inner, dict) else None
    return str(one.item.get("role") or one.item.get("type") or kind or "item")


def _of_message(message: Message) -> Iterator[Line]:
    shape = recognized(message)
    if shape is None:
        return
    role = shape.role(message)
    who = TOOLS if role == "tool" else role
    media = [f"[{one.kind}: {one.reference}]" for one in shape.media(message)]
    text = "\n".join([shape.text(message), *media])
    if text.strip():
        yield Line(who, text.strip("\n"))
    for call in shape.calls(message):
        yield Line(TOOLS, f"{call.name}({call.arguments})")
    for result in shape.results(message):
        yield Line(TOOLS, f"-> {result.text}")


def _tools(digest: TrajectoryDigest | None) -> str:
    """Return the tools of a turn in a line, and their results in the lines below."""
    if digest is None:
        return ""
    return "\n".join(filter(None, (", ".join(digest.tools_invoked), digest.observations_summary)))


def _all_of(digest: TrajectoryDigest | None) -> str:
    if digest is None:
        return ""
    rest = (digest.reasoning_summary, ", ".join(digest.artifacts_refs))
    return "\n".join(filter(None, (_tools(digest), *rest)))


def _artifacts(turn: ConversationTurn) -> Iterator[Line]:
    if turn.artifacts_shown:
        yield Line("artifacts", json.dumps(turn.artifacts_shown, indent=2, ensure_ascii=False))
