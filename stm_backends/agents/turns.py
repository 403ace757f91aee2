"""Build the turn to store for one call of an agent: both messages and a digest of the tool calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

from stm_backends.errors import InvalidState
from stm_backends.types import ConversationTurn, TrajectoryDigest

OBSERVED_CHARACTERS: Final = 400
"""Maximum length of a tool's stored result, in characters."""


class ToolStep(NamedTuple):
    """One call of a tool. It succeeded if it has an observation and no error."""

    name: str
    observation: object = None
    error: object = None


def build_turn(
    query: str,
    answer: object,
    steps: Iterable[ToolStep] = (),
    *,
    reasoning: str | None = None,
    artifacts_shown: Mapping[str, Any] | None = None,
    artifacts_hidden_refs: Iterable[str] = (),
    ts: float | None = None,
) -> ConversationTurn:
    """Return the turn for a query and its answer, with a digest of the tools that succeeded, if any.

    An `answer` that is not text is stored as JSON; for a mapping whose `raw_answer` is text, that text is
    stored. Each tool's observation becomes one line of at most `OBSERVED_CHARACTERS` characters, plus an
    ellipsis. `reasoning` is one line on why the tools were called; it is stored with them. `ts` is in seconds
    since 1970 and defaults to now. Raises `InvalidState` for a step that is not a `ToolStep`.
    """
    steps = [_as_step(step) for step in steps]
    succeeded = [step for step in steps if step.error is None and step.observation is not None]
    names = [_line(step.name) for step in succeeded]
    digest = TrajectoryDigest(
        tools_invoked=names,
        observations_summary="\n".join(
            f"- {name}: {_line(step.observation)}" for name, step in zip(names, succeeded, strict=True)
        ),
        reasoning_summary=reasoning,
    )
    return ConversationTurn(
        query,
        _answer(answer),
        digest if succeeded else None,
        artifacts_shown=dict(artifacts_shown or {}),
        artifacts_hidden_refs=list(artifacts_hidden_refs),
        ts=time.time() if ts is None else ts,
    )


def _as_step(step: object) -> ToolStep:
    if all(hasattr(step, name) for name in ToolStep._fields):
        return cast("ToolStep", step)
    raise InvalidState(f"a step must be a ToolStep(name, observation, error), not {type(step).__name__}")


def _answer(answer: object) -> str:
    if isinstance(answer, Mapping):
        raw = cast("Mapping[str, object]", answer).get("raw_answer")
        answer = raw if isinstance(raw, str) else cast("object", answer)
    return "" if answer is None else _text(answer)


def _line(observation: object) -> str:
    """Return a name or an observation on one line, so that it cannot imitate the line of another tool."""
    text = " ".join(_text(observation).split())
    return text if len(text) <= OBSERVED_CHARACTERS else f"{text[:OBSERVED_CHARACTERS]}…"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)
