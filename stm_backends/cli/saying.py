"""The text of a turn or a message by speaker, for all formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from stm_backends.cli.figures import when
from stm_backends.memory.speech import recognized
from stm_backends.messages import Message
from stm_backends.types import StoredTurn, TrajectoryDigest

TOOLS: Final = "tools"

SPEAKERS: Final = frozenset(("user", "assistant"))
"""Speakers with a separate style; others look like tools."""


class Line(NamedTuple):
    """Text of a speaker: `system`, `user`, `assistant`, `tools`; or `message`, for JSON of no known shape."""

    who: str
    text: str


def lines_of(stored: StoredTurn) -> list[Line]:
    """Return the lines of a turn or a message, in order. A message has one or more."""
    if stored.said is not None:
        message = stored.said.message
        return [*_of_message(message)] or [Line("message", json.dumps(message, ensure_ascii=False))]
    turn = stored.turn
    used = [Line(TOOLS, text) for text in (_tools(turn.trajectory_digest),) if text]
    return [Line("user", turn.user_message), *used, Line("assistant", turn.assistant_response)]


def facts_of(stored: StoredTurn) -> list[str]:
    """Return the time, if it is known, and `cut off` for a message that was cut off."""
    at = [when(stored.turn.ts)] if stored.turn.ts else []
    return [*at, "cut off"] if stored.said is not None and "cut" in stored.extra else at


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
