"""What a model would be shown of a conversation now, part by part, and what is left out; pure functions.

The budget of a memory is not stored. So these functions take a configuration, by default that of a memory
without one, and the page says which it used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any, Final, NamedTuple

from stm_backends.errors import StmError
from stm_backends.inspect.lines import Line, lines_in
from stm_backends.memory.defaults import remembering, speaking
from stm_backends.memory.shared.conversation import window_of
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import said_by
from stm_backends.memory.view import shown_turn
from stm_backends.messages import Message, Shape, as_shape, background, tokens_of
from stm_backends.messages.blocks import list_in
from stm_backends.plain_json import encode_json
from stm_backends.records.body import Body, Transcript
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, as_config

_encode: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


class Part(NamedTuple):
    """One part of what the model is shown: the summary, instructions, or a turn or message with a number.

    `cut` says that a part of it is missing. `number` is `None` for what is no turn or message of the record.
    """

    what: str
    number: int | None
    tokens: int
    cut: bool
    lines: list[Line]


class LeftOut(NamedTuple):
    """Turns or messages that the model is not shown, by their numbers, and the reason.

    `reason` is a word for programs, and `why` a sentence for people.
    """

    first: int
    last: int
    reason: str
    why: str


class Summary(NamedTuple):
    """The stored summary: whether the model is shown the `whole`, a `part` or `none` of it, and why."""

    text: str
    tokens: int
    shown: str
    why: str


class Shown(NamedTuple):
    """What a model would be shown. `error` says why nothing can be shown."""

    tokens: int
    parts: list[Part]
    left_out: list[LeftOut]
    summary: Summary
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it for the page."""
        return {
            "tokens": self.tokens,
            "parts": [part._asdict() for part in self.parts],
            "left_out": [one._asdict() for one in self.left_out],
            "summary": self.summary._asdict(),
            "error": self.error,
        }


def assumed(body: Body, given: ShortTermMemoryConfig | None) -> ShortTermMemoryConfig:
    """Return the configuration that was given or, without one, that of a memory or conversation without."""
    if given is not None:
        return given
    return as_config((speaking if body.messages else remembering)(None, None)[0])


def shown_of(snapshot: Snapshot, config: ShortTermMemoryConfig) -> Shown:
    """Return what the model would be shown of a conversation, whose numbers its transcript gives."""
    if not snapshot.body.messages:
        return _of_turns(snapshot, config)
    try:
        return _of_messages(snapshot, config)
    except StmError as error:
        return Shown(0, [], [*_left_before(snapshot.body)], _summary(snapshot.body, config, ""), str(error))


def transcript_of(body: Body) -> Transcript:
    """Return the transcript of a body, which says the numbers of its turns."""
    return body.transcript or Transcript("")


# Turns


def _of_turns(snapshot: Snapshot, config: ShortTermMemoryConfig) -> Shown:
    body, turns = snapshot.body, snapshot.turns
    base = transcript_of(body).base
    view = snapshot.view(config)
    memory: dict[str, Any] = view.patch().get("conversation_memory", {})
    shown: list[dict[str, Any]] = [*memory.get("pending_turns", ()), *memory.get("recent_turns", ())]
    first = base + len(turns) - len(shown)
    text: str = memory.get("summary", "")
    parts = list[Part]()
    if text:
        told = [Line("summary", text)]
        parts.append(Part("summary", None, config.estimate(_encode(text)), text != body.summary, told))
    for number, one in enumerate(shown, first):
        whole = shown_turn(turns[number - base].turn, config)
        parts.append(Part("turn", number, config.estimate(_encode(one)), one != whole, _lines(one)))
    hidden = base + (len(snapshot.split(config).pending) if _hides_pending(body, config, snapshot) else 0)
    left = [*_left_before(body)]
    if config.strategy == "none":
        left += _range(base, base + len(turns), "none", "The strategy `none` shows nothing.")
    else:
        left += _range(base, min(hidden, first), *_why_hidden(body, config))
        left += _range(max(base, hidden), first, "budget", _beyond(config))
    return Shown(view.tokens, parts, left, _summary(body, config, text, snapshot))


def _lines(shown: dict[str, Any]) -> list[Line]:
    """Return what a turn says as the model sees it."""
    rest = {name: shown[name] for name in ("trajectory_digest", "artifacts_shown") if name in shown}
    tools = [Line("tools", json.dumps(rest, indent=2, ensure_ascii=False))] if rest else []
    return [Line("user", str(shown["user"])), *tools, Line("assistant", str(shown["assistant"]))]


def _hides_pending(body: Body, config: ShortTermMemoryConfig, snapshot: Snapshot) -> bool:
    """Say whether pending turns are hidden whatever the budget is."""
    if config.strategy == "truncation":
        return True
    return body.health is MemoryHealth.DEGRADED and bool(snapshot.split(config).pending)


def _why_hidden(body: Body, config: ShortTermMemoryConfig) -> tuple[str, str]:
    if config.strategy == "truncation":
        zone = config.budget.full_zone_turns
        return "truncation", f"The strategy `truncation` shows the newest {zone:,} turns."
    return "degraded", (
        f"The memory is degraded: the summarizer has failed {body.attempts:,} times in a row. Until it "
        "succeeds, the model is shown recent turns only."
    )


def _beyond(config: ShortTermMemoryConfig) -> str:
    return f"They do not fit within the budget: total_max_tokens={config.budget.total_max_tokens}."


# Messages


def _of_messages(snapshot: Snapshot, config: ShortTermMemoryConfig) -> Shown:
    body, units = snapshot.body, snapshot.turns
    base = transcript_of(body).base
    shape = as_shape(None, [one.said.message for one in units if one.said and not one.removed])
    found = window_of(snapshot, config)
    there = Counter(piece for message in found for piece in _pieces(message, shape))
    numbers: dict[bytes, list[int]] = {}
    missing = list[int]()
    # From the newest on: of two messages that say the same, the later one is the first to be shown.
    for number, unit in reversed([*enumerate(units, base)]):
        pieces = [piece for message in said_by(unit, shape) for piece in _pieces(message, shape)]
        if pieces and all(there[piece] > 0 for piece in pieces):
            there.subtract(pieces)
            for piece in pieces:
                numbers.setdefault(piece, []).insert(0, number)
        elif pieces:
            missing.insert(0, number)
    kept = {piece for message in body.lead for piece in _pieces(message, shape)}
    if body.asked is not None:
        kept |= {*_pieces(body.asked, shape)}
    parts = [_part(message, shape, config, numbers, kept) for message in found]
    told = "\n".join(line.text for part in parts for line in part.lines if _BEGIN in line.text)
    summary = _summary(body, config, body.summary if background(body.summary) in told else told)
    # Messages that are shown in part are the newest of those that are not shown whole.
    cut = sum(part.cut for part in parts)
    left = [*_left_before(body)]
    for number in missing[: max(0, len(missing) - cut)]:
        if left and left[-1].reason == "budget" and left[-1].last == number - 1:
            left[-1] = left[-1]._replace(last=number)
        else:
            left.append(LeftOut(number, number, "budget", _beyond(config)))
    return Shown(tokens_of(found, estimate=config.estimate, shape=shape), parts, left, summary)


def _pieces(message: Message, shape: Shape) -> list[bytes]:
    """Return the blocks of a message, where a provider wants messages joined, or all of it as one."""
    content: Any = message.get(shape.joins) if shape.joins else None
    blocks = [shape.block(content)] if isinstance(content, str) else list_in(content)
    return [encode_json(block) for block in blocks] or [encode_json(message)]


def _part(
    message: Message,
    shape: Shape,
    config: ShortTermMemoryConfig,
    numbers: dict[bytes, list[int]],
    kept: Set[bytes],
) -> Part:
    """Return a message of the window, with the number of the oldest one in it that is shown whole."""
    tokens, lines = tokens_of([message], estimate=config.estimate, shape=shape), lines_in(message)
    pieces = _pieces(message, shape)
    found = [numbers[piece].pop(0) for piece in pieces if numbers.get(piece)]
    if found:
        return Part("message", found[0], tokens, cut=False, lines=lines)
    if any(_BEGIN in line.text for line in lines):
        return Part("summary", None, tokens, cut=False, lines=lines)
    what = "instructions" if shape.role(message) == "system" else "message"
    return Part(what, None, tokens, cut=what == "message" and not kept >= {*pieces}, lines=lines)


_BEGIN: Final = background("").partition("\n")[0]
"""What a summary begins with as a model is shown it."""


# Both


def _summary(
    body: Body, config: ShortTermMemoryConfig, shown: str, snapshot: Snapshot | None = None
) -> Summary:
    """Return the stored summary, of which the model is shown this."""
    tokens = config.estimate(_encode(body.summary)) if body.summary else 0
    if not body.summary:
        return Summary("", 0, "none", "No summary is stored.")
    if shown == body.summary:
        return Summary(body.summary, tokens, "whole", "")
    if shown:
        return Summary(body.summary, tokens, "part", "The summary is cut to fit within the budget.")
    if snapshot is not None and _hides_pending(body, config, snapshot):
        return Summary(body.summary, tokens, "none", _why_hidden(body, config)[1])
    if config.strategy != "rolling_summary":
        return Summary(body.summary, tokens, "none", f"The strategy `{config.strategy}` shows no summary.")
    if not config.budget.summary_max_tokens:
        return Summary(body.summary, tokens, "none", "summary_max_tokens=0 turns the summary off.")
    return Summary(body.summary, tokens, "none", "The summary does not fit within the budget.")


def _left_before(body: Body) -> Iterator[LeftOut]:
    """Yield what has left the record."""
    transcript = transcript_of(body)
    yield from _range(0, transcript.first, "gone", _why_gone(body))
    covered = max(transcript.first, transcript.summarized)
    if body.summary:
        yield from _range(transcript.first, covered, "summarized", "The summary covers them.")
    else:
        yield from _range(
            transcript.first, covered, "no summary", "They have left the record, and no summary covers them."
        )
    yield from _range(
        covered,
        transcript.base,
        "waiting",
        "They have left the record and wait for a summary. The summarizer fails or is slower than the "
        "conversation.",
    )


def _why_gone(body: Body) -> str:
    said = ["They are no longer stored."]
    if body.folded and body.summary:
        said.append(f"A summary was written of {body.folded:,}.")
    if body.dropped:
        said.append(f"{body.dropped:,} were dropped without a summary, because the memory was degraded.")
    return " ".join(said)


def _range(first: int, end: int, reason: str, why: str) -> Iterator[LeftOut]:
    if end > first:
        yield LeftOut(first, end - 1, reason, why)
