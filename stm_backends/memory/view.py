"""What the model is shown of a conversation, as pure functions: everything there is, within the budget.

`render` is asked on every read. Sizes are tokens by the configured estimator, counted on the very JSON that
is shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    ShortTermMemoryConfig,
    StoredTurn,
    TrajectoryDigest,
)

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode

_FEW: Final = 32
"""So many turns are looked at all at once; of more, only those that may be shown."""

SHORTEST_CUT: Final = 8
"""A turn of which so few characters would be left, and a mark, is not worth showing."""

_CLOSING_TAG: Final = "</session_summary>"
_TAG: Final = re.compile(r"</?[A-Za-z_]+>")
_BROKEN_TAG: Final = re.compile(r"</?[A-Za-z_]*$")


class _Shape(NamedTuple):
    """Which turns are shown: the newest `whole` ones as they are, and the one before them cut.

    `cut` is how many characters are left of each of its texts; 0 shows no such turn. `digest` is whether
    it keeps its trajectory digest, cut likewise.
    """

    whole: int = 0
    cut: int = 0
    digest: bool = True

    @property
    def kept(self) -> int:
        """How many turns are shown."""
        return self.whole + (self.cut > 0)


class View:
    """What the model may see of a conversation, within its budget.

    `kept` is how many turns are in it; `trimmed` says whether the token budget left something out, be it
    the middle of a turn.
    """

    def __init__(
        self, context: _Context, shape: _Shape, summary: str, *, trimmed: bool, shown: bool = True
    ) -> None:
        self._context = context
        self._shape = shape
        self._summary = summary
        self._shown = shown
        self.kept = shape.kept
        self.trimmed = trimmed

    @property
    def tokens(self) -> int:
        """The estimate of what is seen, counted when it is asked for."""
        context = self._context
        return context.tokens(self._shape, self._summary) if self._shown else context.config.estimate("{}")

    def patch(self) -> dict[str, Any]:
        """Return what is merged into the model's context: `{}` or `{"conversation_memory": ...}`."""
        if not self._shown:
            return {}
        return {"conversation_memory": self._context.payload(self._shape, self._summary)}

    def require_room(self) -> None:
        """Raise `MemoryBudgetExceeded`, for the turn that is to be stored, if something was left out."""
        if self.trimmed:
            raise MemoryBudgetExceeded(
                "this turn would take the memory past "
                f"total_max_tokens={self._context.config.budget.total_max_tokens}; it was not stored"
            )


def render(
    config: ShortTermMemoryConfig,
    *,
    health: MemoryHealth,
    summary: str,
    pending: Sequence[StoredTurn],
    recent: Sequence[StoredTurn],
) -> View:
    """Return what the model sees: everything there is, unless the strategy or the budget leaves it out.

    `truncate_oldest` (and `error`, which refuses turns but never a read) drops pending turns, then
    recent ones, then the summary; `truncate_summary` cuts the summary first. A turn that is larger than
    the whole budget is cut in its middle when its turn comes, and so is the newest one if there is no room
    for all of it: turns are dropped oldest first, and never all of them for one that is large. Once the
    summary has gone, turns are shown in its place. A degraded conversation shows its summary only if
    nothing waits to be summarized. The cost is linear in what is shown and in its largest turn, whatever
    the length of the conversation.
    """
    if config.strategy == "none":
        return View(_Context(config, (), 0), _Shape(), "", trimmed=False, shown=False)
    if config.strategy == "truncation" or (health is MemoryHealth.DEGRADED and pending):
        summary, pending = "", ()
    whole = summary_within_budget(summary, config)
    context = _Context(config, [*pending, *recent], len(pending))
    everything = _Shape(context.size)
    total = config.budget.total_max_tokens
    if not total or (context.size <= _FEW and context.at_most(whole) <= total):
        return View(context, everything, whole, trimmed=False)
    shape, text = context.newest(whole, total), whole
    fits = context.tokens(shape, whole) <= total
    if config.budget.overflow_policy == "truncate_summary" and not (fits and shape == everything):
        shape, text = context.newest("", total), ""
        if shape == everything:
            text = cut_summary(whole, lambda cut: context.tokens(shape, cut) <= total)
    elif not fits:
        shape, text = context.newest("", total), ""
    if context.tokens(shape, text) > total:
        return View(context, _Shape(), "", trimmed=True, shown=False)
    return View(context, shape, text, trimmed=shape != everything or text != whole)


def shown_turn(turn: ConversationTurn, config: ShortTermMemoryConfig) -> dict[str, Any]:
    """Return one turn as the model and the summarizer see it."""
    shown: dict[str, Any] = {"user": turn.user_message, "assistant": turn.assistant_response}
    digest = turn.trajectory_digest
    if config.include_trajectory_digest and digest is not None:
        shown["trajectory_digest"] = {
            "tools_invoked": list(digest.tools_invoked),
            "observations_summary": digest.observations_summary,
            "reasoning_summary": digest.reasoning_summary,
            "artifacts_refs": list(digest.artifacts_refs),
        }
    return shown


def shown_text(turn: ConversationTurn, config: ShortTermMemoryConfig) -> str:
    """Return one turn as the text whose tokens are counted."""
    return _encode(shown_turn(turn, config))


def is_blank(summary: str) -> bool:
    """Say whether a summary says nothing: white space and tags alone."""
    return not _TAG.sub("", summary).strip()


def cut_summary(summary: str, fits: Callable[[str], bool]) -> str:
    """Return the longest beginning of a summary that fits, with its closing tag if it had one.

    Returns `""` if nothing that says something fits.
    """
    if fits(summary):
        return summary
    text = summary.rstrip()
    closing = f"\n{_CLOSING_TAG}" if text.endswith(_CLOSING_TAG) else ""
    text = text.removesuffix(_CLOSING_TAG)

    def cut(length: int) -> str:
        return _BROKEN_TAG.sub("", text[:length]).rstrip() + closing

    kept = cut(_largest(len(text), lambda length: fits(cut(length))))
    return "" if is_blank(kept) or not fits(kept) else kept


def summary_within_budget(summary: str, config: ShortTermMemoryConfig) -> str:
    """Return a summary, cut to `summary_max_tokens` if it is longer; 0 leaves nothing of it."""
    limit = config.budget.summary_max_tokens
    return cut_summary(summary, lambda text: config.estimate(text) <= limit) if summary and limit else ""


class _Context:
    """The newest turns and a summary, as a payload and as the text whose tokens are counted.

    Whole turns are serialized once each, and only when they are looked at.
    """

    def __init__(self, config: ShortTermMemoryConfig, turns: Sequence[StoredTurn], pending: int) -> None:
        self.config = config
        self._turns = turns
        self._pending = pending
        self._texts: dict[int, str] = {}
        self._tokens: dict[tuple[_Shape, str], int] = {}
        self.size = len(turns)

    def newest(self, summary: str, total: int) -> _Shape:
        """Return as many of the newest turns as fit beside a summary; untested if that is none."""

        def fits(shape: _Shape) -> bool:
            return self.tokens(shape, summary) <= total

        whole = _largest(self.size, lambda count: fits(_Shape(count)))
        # What would be shown whole at another time is not cut now, unless it is all that there is to show.
        if whole == self.size or (whole and self._alone(self.size - whole - 1) <= total):
            return _Shape(whole)
        # Of a turn with short texts the digest alone may have to go.
        longest = max(SHORTEST_CUT, self._longest(self.size - whole - 1))
        for digest in (True, False):
            cut = _largest(longest, lambda length, digest=digest: fits(_Shape(whole, length, digest)))
            if cut >= SHORTEST_CUT and fits(_Shape(whole, cut, digest)):
                return _Shape(whole, cut, digest)
        return _Shape(whole)

    def payload(self, shape: _Shape, summary: str) -> dict[str, Any]:
        shown = [self._shown(index, shape) for index in range(self.size - shape.kept, self.size)]
        pending = self._kept_pending(shape.kept)
        payload: dict[str, Any] = {"recent_turns": shown[pending:]}
        if pending:
            payload["pending_turns"] = shown[:pending]
        if summary:
            payload["summary"] = summary
        return payload

    def at_most(self, summary: str) -> float:
        """Return a number of tokens that everything surely does not exceed, without serializing it.

        JSON escapes make at most six characters of one. Nothing is known of a custom estimator.
        """
        if self.config.token_estimator is not None:
            return math.inf
        characters: float = len(summary)
        for _, turn, _ in self._turns:
            characters += len(turn.user_message) + len(turn.assistant_response) + 20
            if turn.trajectory_digest is not None:
                characters += _characters(turn.trajectory_digest)
        return self.config.estimate("") + (6 * characters + 100) / 4

    def tokens(self, shape: _Shape, summary: str) -> int:
        known = self._tokens.get((shape, summary))
        if known is None:
            known = self._tokens[shape, summary] = self._count(shape, summary)
        return known

    def _count(self, shape: _Shape, summary: str) -> int:
        texts = [self._text(index) for index in range(self.size - shape.whole, self.size)]
        if shape.cut:
            texts.insert(0, _encode(self._shown(self.size - shape.kept, shape)))
        pending = self._kept_pending(shape.kept)
        members: list[str] = []
        if pending:
            members.append(f'"pending_turns": [{", ".join(texts[:pending])}]')
        members.append(f'"recent_turns": [{", ".join(texts[pending:])}]')
        if summary:
            members.append(f'"summary": {_encode(summary)}')
        return self.config.estimate(f"{{{', '.join(members)}}}")

    def _kept_pending(self, keep: int) -> int:
        return max(0, self._pending - (self.size - keep))

    def _alone(self, index: int) -> int:
        """Return how many tokens a turn takes with nothing beside it."""
        return self.config.estimate(f'{{"recent_turns": [{self._text(index)}]}}')

    def _longest(self, index: int) -> int:
        """Return how many characters the longest text of a turn has."""
        return max(_lengths(shown_turn(self._turns[index].turn, self.config)))

    def _shown(self, index: int, shape: _Shape) -> dict[str, Any]:
        shown = shown_turn(self._turns[index].turn, self.config)
        if not shape.cut or index != self.size - shape.kept:
            return shown
        if not shape.digest:
            shown.pop("trajectory_digest", None)
        return _cut_turn(shown, shape.cut)

    def _text(self, index: int) -> str:
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = shown_text(self._turns[index].turn, self.config)
        return text


def _cut_turn(value: Any, length: int) -> Any:
    """Return a shown turn with each text, and each list, cut to `length` characters and a mark.

    What would not be shorter for the mark is left as it is.
    """
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _cut_turn(item, length) for name, item in items}
    if isinstance(value, list):
        return _cut_list(cast("list[Any]", value), length)
    if not isinstance(value, str):
        return value
    mark = f"[... {len(value) - length:,} characters omitted ...]"
    if len(value) <= length + len(mark):
        return value
    tail = length // 2
    return f"{value[: length - tail]}{mark}{value[len(value) - tail :]}"


def _cut_list(items: list[Any], length: int) -> list[Any]:
    """Return the first items of a list, as many as have `length` characters, and how many more there were."""
    for index, item in enumerate(items):
        length -= len(str(item))
        if length < 0:
            return [*items[:index], f"[... {len(items) - index:,} more omitted ...]"]
    return items


def _lengths(value: Any) -> Iterator[int]:
    """Yield how many characters each text and each list of a shown turn has."""
    if isinstance(value, dict):
        for item in cast("dict[str, Any]", value).values():
            yield from _lengths(item)
    else:
        yield (
            sum(len(str(item)) for item in cast("list[Any]", value))
            if isinstance(value, list)
            else len(str(value))
        )


def _characters(digest: TrajectoryDigest) -> float:
    """Return a sixth, at least, of the characters that a digest takes as JSON."""
    lists = [*digest.tools_invoked, *digest.artifacts_refs]
    if not all(isinstance(item, str) for item in lists):  # pyright: ignore[reportUnnecessaryIsInstance] -- a loaded state may hold anything there
        return math.inf
    text = len(digest.observations_summary) + len(digest.reasoning_summary or "")
    return text + sum(map(len, lists)) + len(lists) + 30


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return a number up to `limit` that fits, the largest if larger never fits better; 0 untested.

    Doubles from below, so that the cost follows the answer and not the limit.
    """
    low, high = 0, min(limit, _FEW)
    while low < high and fits(high):
        low, high = high, min(limit, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
