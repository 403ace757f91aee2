"""Turns of a conversation that is a list of messages, and a summarizer's view of their tools."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from stm_backends.cutting import SHORTEST_CUT, cut_json, largest
from stm_backends.messages.parts import Message
from stm_backends.messages.providers import as_shape
from stm_backends.messages.shapes import Call, Shape

NO_RESULT = "[no result is known]"
"""The text for a missing result of a call: its program has ended, or is not done yet."""


def begins_turn(message: Message, shape: Shape) -> bool:
    """Say whether a turn begins with this message: it is a user's, and not a tool's result."""
    return shape.role(message) == "user" and not shape.results(message)


def turns(messages: Sequence[Message], shape: Shape | str | None = None) -> list[list[Message]]:
    """Return the messages by turns. Each begins with a user's message; the first one may not."""
    shape = as_shape(shape, messages)
    found: list[list[Message]] = []
    for message in messages:
        if not found or begins_turn(message, shape):
            found.append([])
        found[-1].append(message)
    return found


def digest(
    messages: Sequence[Message],
    *,
    max_tokens: int,
    estimate: Callable[[str], int],
    shape: Shape | str | None = None,
) -> str:
    """Return the calls of tools with their arguments and results, a line each, within the budget.

    `- search: {"q": "tables"} -> 2 found`. Failed calls are among them. Long text is cut in its middle; if
    that is not enough, the oldest lines are left out, and their number is given.
    """
    steps = _steps(messages, as_shape(shape, messages))

    def lines(length: int, newest: int = len(steps)) -> str:
        omitted = len(steps) - newest
        said = [f"[... {omitted:,} more omitted ...]"] if omitted else []
        for call, result in steps[omitted:]:
            arguments, found = (cut_json(text, length) for text in (call.arguments, result))
            said.append(f"- {call.name}: {arguments} -> {found}")
        return "\n".join(said)

    def fits(text: str) -> bool:
        return estimate(text) <= max_tokens

    longest = max((len(text) for call, result in steps for text in (call.arguments, result)), default=0)
    if fits(whole := lines(longest)):
        return whole
    length = largest(longest, lambda length: fits(lines(length)))
    if length >= SHORTEST_CUT:
        return lines(length)
    newest = largest(len(steps), lambda newest: fits(lines(SHORTEST_CUT, newest)))
    return lines(SHORTEST_CUT, newest) if newest else ""


def _steps(messages: Sequence[Message], shape: Shape) -> list[tuple[Call, str]]:
    """Return each call, on one line, with its result. A result answers the oldest call of its id."""
    calls: list[Call] = []
    results: dict[int, str] = {}
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for message in messages:
        for result in shape.results(message):
            if waiting[result.id]:
                results[waiting[result.id].popleft()] = _line(result.text)
        for call in shape.calls(message):
            waiting[call.id].append(len(calls))
            calls.append(Call(call.id, _line(call.name), _line(call.arguments)))
    return [(call, results.get(number, NO_RESULT)) for number, call in enumerate(calls)]


def _line(text: str) -> str:
    """Return a text on one line, so that it cannot imitate the line of another call."""
    return " ".join(text.split())
