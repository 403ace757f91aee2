"""Steps of a conversation: messages that a model is shown together or not at all, as providers require."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stm_backends.messages.parts import Message, Part, Path, Role, without
from stm_backends.messages.shapes import Shape
from stm_backends.messages.turns import NO_RESULT, begins_turn

EMPTY: Final = "[empty message]"
"""The text of an empty user message, for providers that refuse empty messages."""


@dataclass(slots=True, eq=False)
class Step:
    """A message, or an answer of the assistant with the results of all its calls, which follow it.

    `open` are the calls without a result, each with the place of its message.
    """

    role: Role
    begins_turn: bool
    messages: list[Message] = field(default_factory=list[Message])
    results: list[Message] = field(default_factory=list[Message])
    open: list[tuple[int, Part]] = field(default_factory=list[tuple[int, Part]])

    def close(self, call_id: str) -> None:
        """Note the result of the oldest open call of this id."""
        self.open.remove(next(one for one in self.open if one[1].id == call_id))


def steps_of(messages: Sequence[Message], shape: Shape) -> list[Step]:
    """Return the steps of a conversation. No call is without a result, and no result without its call.

    A result answers the oldest open call with its id, and moves to it. A result without a call, or for
    another step than the results next to it, is left out. A call without a result gets one that says so. A
    thought that led to nothing and an empty message are left out, but a user's empty message says that it is
    empty.
    """
    steps: list[Step] = []
    waiting: defaultdict[str, deque[Step]] = defaultdict(deque)
    for original in messages:
        role = shape.role(original)
        message = _said(original, role, shape)
        step: Step | None = None
        orphans: list[Part] = []
        for result in (part for part in _parts(message, shape) if part.kind == "result"):
            asked = waiting[result.id]
            if asked and step in (None, asked[0]):
                step = asked.popleft()
                step.close(result.id)
            else:
                orphans.append(result)
        message = without(message, [result.path for result in orphans])
        if not (parts := _parts(message, shape)):
            continue
        if step is not None:
            step.results.append(message)
            continue
        if not (_goes_on(steps, shape) and role == "assistant"):
            steps.append(Step(role, role != "system" and begins_turn(message, shape)))
        step = steps[-1]
        for call in (part for part in parts if part.kind == "call"):
            waiting[call.id].append(step)
            step.open.append((len(step.messages), call))
        step.messages.append(message)
    for step in steps:
        _settle(step, shape)
    return [step for step in steps if step.messages]


def _parts(message: Message, shape: Shape) -> list[Part]:
    """Return the parts of a message, of which nothing may be left."""
    return [*shape.parts(message)] if message else []


def _goes_on(steps: Sequence[Step], shape: Shape) -> bool:
    """Say whether the newest step is an answer that may have more messages."""
    return shape.runs and bool(steps) and steps[-1].role == "assistant" and not steps[-1].results


def _said(message: Message, role: Role, shape: Shape) -> Message:
    """Return a message as its provider accepts it; `{}` if it is empty."""
    parts = [*shape.parts(message)]
    if shape.joins:
        message = without(
            message, [part.path for part in parts if part.blank and isinstance(part.path[-1], int)]
        )
        parts = [part for part in parts if not part.blank]
        if role == "system":
            text = shape.text(message)
            return shape.says("user", f"<system>\n{text}\n</system>") if text.strip() else {}
    if parts:
        return message
    return {**message, **shape.says("user", EMPTY)} if role == "user" else {}


def _settle(step: Step, shape: Shape) -> None:
    """Give each open call a result, or remove it, and remove the thoughts that lead to nothing."""
    gone: defaultdict[int, list[Path]] = defaultdict(list)
    for place, call in step.open:
        if (answer := shape.answers(call, NO_RESULT)) is None:
            gone[place].append(call.path)
        else:
            step.results.append(answer)
    said: list[Message] = []
    ends = True
    for place in reversed(range(len(step.messages))):
        message, ends = without(step.messages[place], gone.get(place, ())), ends or place in gone
        while (parts := _parts(message, shape)) and ends and parts[-1].kind == "thought":
            message = without(message, [parts[-1].path])
        if parts:
            said.insert(0, message)
            ends = False
    step.messages = said
