"""The model's view of a conversation within the token budget, as pure functions.

`render` is called on every read. Sizes are in tokens by the configured estimator, counted on the JSON that is
shown.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stm_backends.cutting import SHORTEST_CUT, cut_json, cut_summary, largest
from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.tokens import PER_TOKEN, default_token_estimator, weigh
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    ShortTermMemoryConfig,
    StoredTurn,
    TrajectoryDigest,
)

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode

_encode_text = json.encoder.encode_basestring
_DEFAULT: Final = ShortTermMemoryConfig()

_SEPARATOR: Final = weigh(", ")
_FRAME: Final = default_token_estimator('{"pending_turns": [], "recent_turns": [], "summary": ""}')
_LABELS: Final = weigh('{"assistant": , "user": }, ')

_FEW: Final = 32
"""Up to this many turns are measured at once; of more, only those that may be shown."""


class _Shape(NamedTuple):
    """The turns that are shown: the newest `whole` ones as they are, and the one before them cut.

    `cut` is the number of characters left of each text of the cut turn; 0 means that no turn is cut. `digest`
    is true if that turn keeps its trajectory digest and its artifacts, which are cut in the same way.
    """

    whole: int = 0
    cut: int = 0
    digest: bool = True

    @property
    def kept(self) -> int:
        """The number of turns that are shown."""
        return self.whole + (self.cut > 0)


class View:
    """The model's view of a conversation within the budget.

    `kept` is the number of its turns; `trimmed` is true if the budget left anything out, even a part of a
    turn.
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
        """The estimated tokens, computed on access."""
        context = self._context
        return context.tokens(self._shape, self._summary) if self._shown else context.config.estimate("{}")

    def patch(self) -> dict[str, Any]:
        """Return the part of the model's context: `{}` or `{"conversation_memory": ...}`."""
        if not self._shown:
            return {}
        return {"conversation_memory": self._context.payload(self._shape, self._summary)}

    def require_room(self) -> None:
        """Raise `MemoryBudgetExceeded` if anything was left out."""
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
    weight: int | None = None,
) -> View:
    """Return the model's view: all turns and the summary, as far as strategy and budget allow.

    `truncate_oldest` (and `error`, which rejects turns but never a read) drops pending turns, then recent
    ones, then the summary; `truncate_summary` cuts the summary first. Turns are dropped oldest first. A turn
    that is larger than the whole budget is cut in the middle instead of dropped, and so is the newest turn if
    it does not fit. If the summary is dropped, turns take its place. A degraded conversation shows its
    summary only if no turns are pending. The cost is linear in what is shown and in the largest turn shown,
    regardless of the length of the conversation. `weight` is the sum of `shown_weight` for these turns, if it
    is known.
    """
    if config.strategy == "none":
        return View(_Context(config, (), 0), _Shape(), "", trimmed=False, shown=False)
    if config.strategy == "truncation" or (health is MemoryHealth.DEGRADED and pending):
        summary, pending = "", ()
    whole = summary_within_budget(summary, config)
    context = _Context(config, [*pending, *recent], len(pending))
    everything = _Shape(context.size)
    total = config.budget.total_max_tokens
    if not total or context.at_most(whole, weight) <= total:
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
    if turn.artifacts_shown:
        shown["artifacts_shown"] = copy.deepcopy(turn.artifacts_shown)
    return shown


def artifact_in(turns: Sequence[StoredTurn], ref: str) -> Any | None:
    """Return a copy of the artifact that was stored last under this name, or `None`."""
    shown = (stored.turn.artifacts_shown for stored in reversed(turns))
    return next((copy.deepcopy(artifacts[ref]) for artifacts in shown if ref in artifacts), None)


def shown_text(turn: ConversationTurn, config: ShortTermMemoryConfig) -> str:
    """Return one turn as the text whose tokens are counted."""
    if turn.trajectory_digest is None and not turn.artifacts_shown:
        user, assistant = _encode_text(turn.user_message), _encode_text(turn.assistant_response)
        return f'{{"assistant": {assistant}, "user": {user}}}'
    return _encode(shown_turn(turn, config))


def shown_weight(turn: ConversationTurn) -> int:
    """Return at least the weight of `shown_text` for any configuration, see `tokens.weigh`."""
    return weigh(shown_text(turn, _DEFAULT))


def summary_within_budget(summary: str, config: ShortTermMemoryConfig) -> str:
    """Return a summary, cut to `summary_max_tokens`; 0 returns `""`."""
    limit = config.budget.summary_max_tokens
    return cut_summary(summary, lambda text: config.estimate(text) <= limit) if summary and limit else ""


class _Context:
    """The newest turns and a summary, as a payload and as the text whose tokens are counted.

    Each turn is serialized at most once, and only when it is needed.
    """

    def __init__(self, config: ShortTermMemoryConfig, turns: Sequence[StoredTurn], pending: int) -> None:
        self.config = config
        self._turns = turns
        self._pending = pending
        self._texts: dict[int, str] = {}
        self._tokens: dict[tuple[_Shape, str], int] = {}
        self.size = len(turns)

    def newest(self, summary: str, total: int) -> _Shape:
        """Return as many of the newest turns as fit with a summary; no turns is not tested."""

        def fits(shape: _Shape) -> bool:
            return self.tokens(shape, summary) <= total

        whole = largest(self.size, lambda count: fits(_Shape(count)))
        # A turn that fits the budget by itself is not cut, unless it is the only turn that can be shown.
        if whole == self.size or (whole and self._alone(self.size - whole - 1) <= total):
            return _Shape(whole)
        longest = len(self._text(self.size - whole - 1))
        # A turn with short texts may fit without its digest.
        for digest in (True, False):
            cut = largest(longest, lambda length, digest=digest: fits(_Shape(whole, length, digest)))
            if cut >= SHORTEST_CUT and fits(_Shape(whole, cut, digest)):
                return _Shape(whole, cut, digest)
        return _Shape(whole)

    def payload(self, shape: _Shape, summary: str) -> dict[str, Any]:
        first = self.size - shape.kept
        shown = [shown_turn(stored.turn, self.config) for stored in self._turns[first:]]
        if shape.cut:
            shown[0] = self._shown_cut(shape)
        pending = self._kept_pending(shape.kept)
        payload: dict[str, Any] = {"recent_turns": shown[pending:]}
        if pending:
            payload["pending_turns"] = shown[:pending]
        if summary:
            payload["summary"] = summary
        return payload

    def at_most(self, summary: str, weight: int | None) -> float:
        """Return an upper bound on the tokens of all turns and the summary, without serializing them.

        A JSON escape takes at most six characters. With a custom estimator there is no bound, and none is
        computed for many turns whose `weight` is not known.
        """
        if self.config.token_estimator is not None or (weight is None and self.size > _FEW):
            return math.inf
        most = weigh(summary)
        for turn in (stored.turn for stored in self._turns) if weight is None else ():
            most += weigh(turn.user_message) + weigh(turn.assistant_response) + _LABELS
            if turn.trajectory_digest is not None:
                most += _most_of(turn.trajectory_digest)
            if turn.artifacts_shown:
                most += weigh(_encode(turn.artifacts_shown)) + _LABELS
        return (6 * most + (weight or 0) + _SEPARATOR * self.size) / PER_TOKEN + _FRAME

    def tokens(self, shape: _Shape, summary: str) -> int:
        known = self._tokens.get((shape, summary))
        if known is None:
            known = self._tokens[shape, summary] = self._count(shape, summary)
        return known

    def _count(self, shape: _Shape, summary: str) -> int:
        texts = [self._text(index) for index in range(self.size - shape.whole, self.size)]
        if shape.cut:
            texts.insert(0, _encode(self._shown_cut(shape)))
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
        """Return how many tokens a turn takes by itself."""
        return self.config.estimate(f'{{"recent_turns": [{self._text(index)}]}}')

    def _shown_cut(self, shape: _Shape) -> dict[str, Any]:
        """Return the turn that is cut."""
        shown = shown_turn(self._turns[self.size - shape.kept].turn, self.config)
        if not shape.digest:
            shown.pop("trajectory_digest", None)
            shown.pop("artifacts_shown", None)
        return cut_json(shown, shape.cut)

    def _text(self, index: int) -> str:
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = shown_text(self._turns[index].turn, self.config)
        return text


def _most_of(digest: TrajectoryDigest) -> float:
    """Return at least a sixth of the weight of a digest as JSON."""
    texts = [digest.observations_summary, digest.reasoning_summary or ""]
    texts += [*digest.tools_invoked, *digest.artifacts_refs]
    if not all(isinstance(text, str) for text in texts):  # pyright: ignore[reportUnnecessaryIsInstance] -- a loaded state may hold anything there
        return math.inf
    return sum(map(weigh, texts)) + _LABELS * (len(texts) + 2)
