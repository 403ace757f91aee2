"""What the model is shown of a conversation, as pure functions: everything there is, within the budget.

`render` is asked on every read. Sizes are tokens by the configured estimator, counted on the very JSON that
is shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

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

_CLOSING_TAG: Final = "</session_summary>"
_TAG: Final = re.compile(r"</?[A-Za-z_]+>")
_BROKEN_TAG: Final = re.compile(r"</?[A-Za-z_]*$")


class View:
    """What the model may see of a conversation, within its budget.

    `kept` is how many turns are in it; `trimmed` says whether the token budget left something out.
    """

    def __init__(
        self, context: _Context, kept: int, summary: str, *, trimmed: bool, shown: bool = True
    ) -> None:
        self._context = context
        self._summary = summary
        self._shown = shown
        self.kept = kept
        self.trimmed = trimmed

    @property
    def tokens(self) -> int:
        """The estimate of what is seen, counted when it is asked for."""
        context = self._context
        return context.tokens(self.kept, self._summary) if self._shown else context.config.estimate("{}")

    def patch(self) -> dict[str, Any]:
        """Return what is merged into the model's context: `{}` or `{"conversation_memory": ...}`."""
        return {"conversation_memory": self._context.payload(self.kept, self._summary)} if self._shown else {}

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
    recent ones, then the summary; `truncate_summary` cuts the summary first. The cost is linear in what
    is shown, whatever the length of the conversation.
    """
    if config.strategy == "none":
        return View(_Context(config, (), 0), 0, "", trimmed=False, shown=False)
    if config.strategy == "truncation" or health is MemoryHealth.DEGRADED:
        summary, pending = "", ()
    whole = summary_within_budget(summary, config)
    context = _Context(config, [*pending, *recent], len(pending))
    total = config.budget.total_max_tokens

    def fits(keep: int, text: str) -> bool:
        return context.tokens(keep, text) <= total

    everything = context.size
    if not total or (everything <= _FEW and context.at_most(whole) <= total):
        return View(context, everything, whole, trimmed=False)
    summary_first = config.budget.overflow_policy == "truncate_summary"
    keep, text = _largest(everything, lambda count: fits(count, whole)), whole
    if summary_first and (keep < everything or not fits(keep, whole)):
        keep = _largest(everything, lambda count: fits(count, ""))
        text = cut_summary(whole, lambda cut: fits(keep, cut)) if keep == everything else ""
    elif not fits(keep, whole):
        text = ""
    if not fits(keep, text):
        return View(context, 0, "", trimmed=True, shown=False)
    return View(context, keep, text, trimmed=keep < everything or text != whole)


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
    """The newest `keep` turns and a summary, as a payload and as the text whose tokens are counted.

    Turns are serialized once each, and only when they are looked at.
    """

    def __init__(self, config: ShortTermMemoryConfig, turns: Sequence[StoredTurn], pending: int) -> None:
        self.config = config
        self._turns = turns
        self._pending = pending
        self._texts: dict[int, str] = {}
        self._tokens: dict[tuple[int, str], int] = {}
        self.size = len(turns)

    def payload(self, keep: int, summary: str) -> dict[str, Any]:
        shown = [shown_turn(stored.turn, self.config) for stored in self._turns[self.size - keep :]]
        pending = self._kept_pending(keep)
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
        for _, turn in self._turns:
            characters += len(turn.user_message) + len(turn.assistant_response) + 20
            if turn.trajectory_digest is not None:
                characters += _characters(turn.trajectory_digest)
        return self.config.estimate("") + (6 * characters + 100) / 4

    def tokens(self, keep: int, summary: str) -> int:
        known = self._tokens.get((keep, summary))
        if known is None:
            known = self._tokens[keep, summary] = self._count(keep, summary)
        return known

    def _count(self, keep: int, summary: str) -> int:
        texts = [self._text(index) for index in range(self.size - keep, self.size)]
        pending = self._kept_pending(keep)
        members: list[str] = []
        if pending:
            members.append(f'"pending_turns": [{", ".join(texts[:pending])}]')
        members.append(f'"recent_turns": [{", ".join(texts[pending:])}]')
        if summary:
            members.append(f'"summary": {_encode(summary)}')
        return self.config.estimate(f"{{{', '.join(members)}}}")

    def _kept_pending(self, keep: int) -> int:
        return max(0, self._pending - (self.size - keep))

    def _text(self, index: int) -> str:
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = shown_text(self._turns[index].turn, self.config)
        return text


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
