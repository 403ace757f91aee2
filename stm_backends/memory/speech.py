"""Turns as messages, and messages as turns; pure functions.

Summarizers and the context of a memory speak in turns, and a conversation of messages may have begun in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, get_args

from stm_backends.errors import InvalidState
from stm_backends.memory import policy
from stm_backends.memory.policy import Split
from stm_backends.messages import SHAPES, Message, Role, Shape, begins_turn, digest, shape_of
from stm_backends.messages.parts import value_at
from stm_backends.messages.window import MEDIA_TOKENS
from stm_backends.plain_json import encoded
from stm_backends.tokens import PER_TOKEN, default_token_estimator, weigh
from stm_backends.types import ConversationTurn, ShortTermMemoryConfig, StoredTurn, TrajectoryDigest

TOOLS_TOKENS: Final = 400
"""Maximum number of tokens of the tool calls in one turn, as summarizers see them."""


def recognized(*messages: Message) -> Shape | None:
    """Return the shape that all of these messages have; `None` if only a custom shape has such messages."""
    try:
        shape = shape_of(*messages)
        for message in messages:
            shape.role(message)
    except InvalidState:
        return None
    return shape


def _of(message: Message, shape: Shape | None) -> Shape | None:
    """Return the given shape, or the recognized one for a message of another shape; see `recognized`."""
    if shape is not None:
        # A custom shape may raise anything for a message that it does not know.
        with suppress(Exception):
            if shape.role(message) in get_args(Role):
                return shape
    return recognized(message)


def shown(message: Message, at: float) -> tuple[ConversationTurn, bool]:
    """Return a message as a turn, and whether a turn begins with it."""
    shape = recognized(message)
    if shape is None:
        return ConversationTurn("", "", ts=at), False
    return ConversationTurn(*_said(message, shape), ts=at), begins_turn(message, shape)


def weight_of(message: Message) -> int:
    """Return the weight of a message in a budget: its JSON, with each medium as a model counts it.

    So a conversation can hold a few images. Every `_OF_MEDIUM` characters of an image count as one medium, so
    that large images do not stay in a record and burden its loads.
    """
    weight = weigh(encoded(message))
    if weight <= _MEDIUM or (shape := recognized(message)) is None:
        return weight
    for part in shape.parts(message):
        if part.kind == "media":
            medium = encoded(value_at(message, part.path))
            weight -= max(weigh(medium) - _MEDIUM * math.ceil(len(medium) / _OF_MEDIUM), 0)
    return weight


_MEDIUM: Final = MEDIA_TOKENS * PER_TOKEN
_OF_MEDIUM: Final = 256 * 1024


def _said(message: Message, shape: Shape) -> tuple[str, str]:
    """Return the user's text in a message, and the assistant's."""
    role, text = shape.role(message), shape.text(message)
    return text if role == "user" else "", text if role == "assistant" else ""


def as_turns(units: Sequence[StoredTurn], shape: Shape | None = None) -> Sequence[StoredTurn]:
    """Return turns and messages as turns, oldest first; the digest of each has its tools.

    A turn that was stored as one is returned as it is. Without a `shape`, that of messages is recognized.
    """
    if not any(unit.said for unit in units):
        return units
    units = [unit for unit in units if not unit.removed]
    turns: list[list[StoredTurn]] = []
    for unit in units:
        if unit.begins or not turns or turns[-1][0].said is None:
            turns.append([])
        turns[-1].append(unit)
    return [turn[0] if turn[0].said is None else _turn_of(turn, shape) for turn in turns]


def _turn_of(units: Sequence[StoredTurn], shape: Shape | None) -> StoredTurn:
    """Return these messages as a turn."""
    messages = [unit.said.message for unit in units if unit.said is not None]
    # Each by itself: a conversation may have continued with another provider.
    shapes = [_of(message, shape) for message in messages]
    said = [
        ("", "") if one is None else _said(message, one)
        for message, one in zip(messages, shapes, strict=True)
    ]
    user, assistant = ("\n".join(filter(None, texts)) for texts in zip(*said, strict=True))
    if any(one is not shape for one in shapes):
        shape = recognized(*messages)
    tools = [] if shape is None else [call.name for message in messages for call in shape.calls(message)]
    told = None
    if tools:
        observed = digest(messages, max_tokens=TOOLS_TOKENS, estimate=default_token_estimator, shape=shape)
        told = TrajectoryDigest([*dict.fromkeys(tools)], observed)
    return StoredTurn(units[0].id, ConversationTurn(user, assistant, told, ts=units[-1].turn.ts))


def settled(units: Sequence[StoredTurn]) -> list[int]:
    """Return the places in a turn, except its beginning, before which each call of a tool has its result."""
    waiting, places = set[str](), list[int]()
    for place, unit in enumerate(units):
        if place and not waiting:
            places.append(place)
        message: Message = {} if unit.said is None else unit.said.message
        if (shape := recognized(message)) is not None:
            waiting |= {call.id for call in shape.calls(message)}
            waiting -= {result.id for result in shape.results(message)}
    return places


def whole_turns(turns: Sequence[StoredTurn], count: int, *, ends: bool) -> int:
    """Return how many of these turns and messages one call covers: about `count`, so that no turn is divided.

    `ends` is true if no turn continues after the last of them. A turn whose end is not among them is divided
    where no call waits for its result.
    """
    places = [place for place in range(1, len(turns)) if turns[place].begins] + [len(turns)] * ends
    places = places or settled(turns)
    if not count or not places:
        return count
    return max((place for place in places if place <= count), default=places[0])


def instructions(units: Sequence[StoredTurn]) -> tuple[Message, ...]:
    """Return the system messages that come before the first turn."""
    first = itertools.takewhile(lambda unit: not unit.begins, units)
    said = (unit.said.message for unit in first if unit.said is not None)
    return tuple(one for one in said if (shape := recognized(one)) and shape.role(one) == "system")


def said_by(unit: StoredTurn, shape: Shape | None = None) -> list[Message]:
    """Return the message of a unit, or both of a turn that was stored as one, in a shape."""
    if unit.said is not None:
        return [] if unit.removed else [unit.said.message]
    says = (shape or SHAPES["openai"]).says
    return [says("user", unit.turn.user_message), says("assistant", unit.turn.assistant_response)]


def waits_for_answer(units: Sequence[StoredTurn], shape: Shape | None = None) -> bool:
    """Say whether a conversation that ends with these waits for an answer of the assistant."""
    last = next((unit for unit in reversed(units) if not unit.removed), None)
    if last is None or (said := last.said) is None:
        return False
    shape = _of(said.message, shape)
    return shape is not None and (
        shape.role(said.message) in ("user", "tool") or bool(shape.calls(said.message))
    )


def split(turns: Sequence[StoredTurn], config: ShortTermMemoryConfig) -> Split:
    """Divide turns and messages into pending and recent ones.

    Recent messages begin with a turn. They are no more than the budget shows, except for the last turn, which
    may still grow; of a last turn beyond `LONG_TURN`, they are the newest steps.
    """
    if not any(one.said for one in turns):
        return policy.split(turns, config)
    boundary = _first_recent(turns, max(config.budget.full_zone_turns, 1), config)
    return Split(turns[:boundary], turns[boundary:])


def _first_recent(turns: Sequence[StoredTurn], zone: int, config: ShortTermMemoryConfig) -> int:
    """Return where the newest `zone` turns begin, or fewer, so that they are within the budget."""
    budget, begun, first = config.budget, 0, 0
    room = (budget.total_max_tokens - budget.summary_max_tokens) * PER_TOKEN
    place, left = len(turns), room if budget.total_max_tokens else math.inf
    while place and not (begun and (begun == zone or left < 0)):
        place -= 1
        said = turns[place].said
        left -= 0 if said is None else said.weight
        if turns[place].begins and (left >= 0 or not begun):
            begun, first = begun + 1, place
    if first == len(instructions(turns[:first])):
        # They go with the first turn: alone, they are nothing to summarize.
        first = 0
    is_long = begun <= 1 and left < 0 and len(turns) - first > LONG_TURN
    return first + _newest_steps(turns[first:], room) if is_long else first


def _newest_steps(turn: Sequence[StoredTurn], room: int) -> int:
    """Return where the newest steps of a turn begin that have room; 0 if it cannot be divided."""
    places = [place for place in settled(turn) if turn[place].entry != turn[place - 1].entry]
    weights = [0 if one.said is None else one.said.weight for one in turn]
    fitting = (place for place in (0, *places) if sum(weights[place:]) <= room)
    return next(fitting, places[-1] if places else 0)


LONG_TURN: Final = 64
"""Number of messages from which a turn may be divided. The question stays: see `Body.asked`."""
