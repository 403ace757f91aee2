"""What a memory decides, as pure functions: no clock, no I/O, no event loop.

A conversation is a `Body` (the summary and how summarizing goes) and its turns, oldest first. The last
`full_zone_turns` are *recent*; what stands before them is *pending* until a summary covers it. Both
memories ask the same questions here and differ only in how they carry the answers out:

- `render`: what may the model see, within the token budget?
- `next_step`: is there something to summarize, to trim or to wait for?
- `after_fold`, `after_failure`, `after_trim`: what is the body then?
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeAlias

from stm_backends.errors import ConfigurationError, MemoryBudgetExceeded
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    ShortTermMemoryConfig,
    StoredTurn,
    TrajectoryDigest,
)

REMEMBERED_IDS: Final = 256
"""How many ids of folded and trimmed turns are always remembered (younger ones come on top)."""

SHORTEST_DELAY_S: Final = 0.05
"""The shortest wait before another summarizer call, so that an interval of 0 does not spin."""

LONGEST_BACKOFF_S: Final = 3_600.0

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode

_FEW: Final = 32
"""So many turns are looked at all at once; of more, only those that may be shown."""

_CLOSING_TAG = "</session_summary>"
_TAG = re.compile(r"</?[A-Za-z_]+>")
_BROKEN_TAG = re.compile(r"</?[A-Za-z_]*$")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The ids of turns that stand in the record no longer, as short hashes, oldest first.

    They are what makes adding such a turn again harmless. `digests` is `",d1,d2,"`; `ages` has a pair
    `(epoch seconds, how many)` for each recent fold or trim, in the same order, after one pair whose
    time is 0 for all the older ones.
    """

    digests: str = ","
    ages: tuple[tuple[float, int], ...] = ()

    def __contains__(self, turn_id: str) -> bool:
        return len(self.digests) > 1 and f",{digest(turn_id)}," in self.digests

    def adding(self, turn_ids: Sequence[str], *, now: float, keep_for: float) -> Forgotten:
        """Return these and more, without those that are both old and past `REMEMBERED_IDS`."""
        return self._adding([digest(turn_id) for turn_id in turn_ids], now=now, keep_for=keep_for)

    def union(self, newer: Forgotten, *, now: float, keep_for: float) -> Forgotten:
        """Return these, then those of `newer` that are not among them."""
        known = set(self.each())
        return self._adding([d for d in newer.each() if d not in known], now=now, keep_for=keep_for)

    def each(self) -> list[str]:
        """Return the short hashes, oldest first."""
        return self.digests.strip(",").split(",") if self.ages else []

    def _adding(self, newer: list[str], *, now: float, keep_for: float) -> Forgotten:
        if not newer:
            return self
        digests = [*self.each(), *newer]
        # Times are rounded up to tenths of `keep_for`, so that there are few of them however many folds.
        grain = keep_for / 10 if keep_for > 0 else 1.0
        when = math.ceil(now / grain) * grain
        # A clock that was ahead must not keep ids for as long as it was.
        young = [(min(time, when), count) for time, count in self.ages]
        if young and young[-1][0] == when:
            young[-1] = (when, young[-1][1] + len(newer))
        else:
            young.append((when, len(newer)))
        old = 0
        while young and young[0][0] <= now - keep_for:
            old += young.pop(0)[1]
        # Only the old ones may go, and of those only what is past the number that always stays.
        old -= min(old, max(0, len(digests) - REMEMBERED_IDS))
        kept = old + sum(count for _, count in young)
        ages = ((0.0, old), *young) if old else tuple(young)
        return Forgotten(f",{','.join(digests[len(digests) - kept :])},", ages)


def digest(turn_id: str) -> str:
    """Return the short hash under which an id is remembered: 48 bits in 8 characters."""
    raw = hashlib.blake2b(turn_id.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return base64.urlsafe_b64encode(raw).decode("ascii")


@dataclass(frozen=True, slots=True)
class Body:
    """What a conversation's record holds beside its turns.

    `health` is never `RECOVERING`. `attempts` counts failures in a row, `next_attempt_at` is in epoch
    seconds. `folded` and `dropped` count turns that a summary covers and turns that were lost to the
    backlog limit. `extra` holds fields of a newer version of this library, which survive a rewrite.
    """

    summary: str = ""
    health: MemoryHealth = MemoryHealth.HEALTHY
    attempts: int = 0
    next_attempt_at: float = 0.0
    folded: int = 0
    dropped: int = 0
    forgotten: Forgotten = Forgotten()
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Fold:
    """Summarize these turns, on top of this summary."""

    previous_summary: str
    turns: tuple[StoredTurn, ...]

    def request(self, config: ShortTermMemoryConfig) -> dict[str, Any]:
        """Return what the summarizer is called with."""
        return {
            "previous_summary": self.previous_summary,
            "turns": [shown_turn(stored.turn, config) for stored in self.turns],
        }

    def still_applies(self, body: Body, head: Sequence[StoredTurn]) -> bool:
        """Say whether what was summarized is still what stands at the head of a conversation."""
        covered = [stored.id for stored in self.turns]
        return body.summary == self.previous_summary and covered == [
            stored.id for stored in head[: len(covered)]
        ]


@dataclass(frozen=True, slots=True)
class Trim:
    """Let the oldest `count` turns go. `lost` says that no summary covers them, against all intent."""

    count: int
    lost: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """There will be something to do in so many seconds."""

    seconds: float


Step: TypeAlias = Fold | Trim | Wait | None


def split(
    turns: Sequence[StoredTurn], config: ShortTermMemoryConfig
) -> tuple[Sequence[StoredTurn], Sequence[StoredTurn]]:
    """Divide a conversation into what is pending and what is recent."""
    boundary = max(0, len(turns) - config.budget.full_zone_turns)
    return turns[:boundary], turns[boundary:]


def next_step(
    config: ShortTermMemoryConfig,
    body: Body,
    pending: Sequence[StoredTurn],
    *,
    now: float,
    batch: int | None = None,
) -> Step:
    """Decide what the background shall do about the turns that are not recent any more.

    `now` is in epoch seconds. `batch` is how many pending turns make a fold worthwhile; unless given it
    is the configured one.
    """
    if config.strategy == "none" or not pending:
        return None
    if config.strategy == "truncation":
        # Trimming at twice the zone spreads one write over as many turns.
        worthwhile = len(pending) > config.budget.full_zone_turns
        return Trim(len(pending), lost=False) if worthwhile else None
    if config.budget.summary_max_tokens == 0:
        return Trim(len(pending), lost=False)
    if body.health is MemoryHealth.DEGRADED:
        # One turn at least: with nothing to summarize there would be no attempt that ends it.
        backlog = max(config.recovery_backlog_limit, 1)
        if len(pending) > backlog:
            return Trim(len(pending) - backlog, lost=True)
    if body.health is MemoryHealth.HEALTHY:
        if len(pending) < (config.fold_batch_turns if batch is None else batch):
            return None
    else:
        # Bounded by our own delay: another machine's clock may be wrong by any amount.
        wait = min(body.next_attempt_at - now, delay_after(config, body.attempts))
        if wait > 0:
            return Wait(wait)
    return Fold(body.summary, tuple(pending))


def delay_after(config: ShortTermMemoryConfig, attempts: int) -> float:
    """Return how many seconds lie between failure number `attempts` in a row and the next attempt."""
    if attempts > config.retry_attempts:
        return max(config.degraded_retry_interval_s, SHORTEST_DELAY_S)
    backoff = config.retry_backoff_base_s * 2.0 ** min(max(attempts - 1, 0), 62)
    return min(max(backoff, SHORTEST_DELAY_S), LONGEST_BACKOFF_S)


def after_failure(config: ShortTermMemoryConfig, body: Body, *, now: float) -> Body:
    """Return the body after one more summarizer call has failed."""
    attempts = body.attempts + 1
    return replace(
        body,
        attempts=attempts,
        health=MemoryHealth.RETRY if attempts <= config.retry_attempts else MemoryHealth.DEGRADED,
        next_attempt_at=now + delay_after(config, attempts),
    )


def after_fold(
    config: ShortTermMemoryConfig, body: Body, fold: Fold, summary: str, *, now: float, keep_for: float
) -> Body:
    """Return the body after a summary covers the turns of `fold`; a summary over its budget is cut."""
    return replace(
        body,
        summary=cut_summary(summary, within_summary_budget(config)),
        health=MemoryHealth.HEALTHY,
        attempts=0,
        next_attempt_at=0.0,
        folded=body.folded + len(fold.turns),
        forgotten=body.forgotten.adding([t.id for t in fold.turns], now=now, keep_for=keep_for),
    )


def after_trim(body: Body, trim: Trim, gone: Sequence[StoredTurn], *, now: float, keep_for: float) -> Body:
    """Return the body after the turns of a trim have gone."""
    return replace(
        body,
        dropped=body.dropped + (len(gone) if trim.lost else 0),
        forgotten=body.forgotten.adding([stored.id for stored in gone], now=now, keep_for=keep_for),
    )


def summarizer_for(
    config: ShortTermMemoryConfig, summarizer: Callable[..., object] | None
) -> Callable[..., object]:
    """Return what summarizes; raises `ConfigurationError` if the strategy needs one and there is none."""
    if summarizer is not None:
        return summarizer
    if config.strategy == "rolling_summary":
        raise ConfigurationError("strategy='rolling_summary' needs a summarizer")
    return _no_summarizer


def _no_summarizer(request: object) -> NoReturn:
    raise BadSummary("the strategy of this memory needs no summarizer, and it has none")


class BadSummary(Exception):
    """What the summarizer answered is no summary."""


def summary_of(response: object) -> str:
    """Return the summary in a summarizer's answer; raises `BadSummary` for anything else."""
    if not isinstance(response, Mapping):
        raise BadSummary(f"the summarizer returned {type(response).__name__}, not a mapping")
    summary: object = response.get("summary")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] -- it is checked here
    if not isinstance(summary, str):
        raise BadSummary("the summarizer's 'summary' is not a string")
    if is_blank(summary):
        raise BadSummary("the summarizer returned an empty summary")
    return summary


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


def within_summary_budget(config: ShortTermMemoryConfig) -> Callable[[str], bool]:
    """Return the test for a summary that keeps to `summary_max_tokens`."""
    limit = config.budget.summary_max_tokens
    return lambda summary: not summary or (limit > 0 and config.estimate(summary) <= limit)


class View:
    """What the model may see of a conversation, within its budget.

    `trimmed` says whether the token budget left something out, `kept` how many turns are in it.
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
    def payload(self) -> dict[str, Any] | None:
        """The value of `conversation_memory`; `None` if the model sees nothing."""
        return self._context.payload(self.kept, self._summary) if self._shown else None

    @property
    def tokens(self) -> int:
        """The estimate of what is seen, counted when it is asked for."""
        return self._context.tokens(self.kept, self._summary) if self._shown else self._context.nothing

    def patch(self) -> dict[str, Any]:
        """Return what is merged into the model's context."""
        payload = self.payload
        return {} if payload is None else {"conversation_memory": payload}


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
    whole = cut_summary(summary, within_summary_budget(config))
    context = _Context(config, [*pending, *recent], len(pending))
    total = config.budget.total_max_tokens

    def fits(keep: int, text: str) -> bool:
        return context.tokens(keep, text) <= total

    everything = context.size
    if not total or (everything <= _FEW and context.at_most(whole) <= total):
        return View(context, everything, whole, trimmed=False)
    summary_first = config.budget.overflow_policy == "truncate_summary"
    keep, text = _largest(everything, lambda count: fits(count, whole)), whole
    if summary_first and whole and not (keep == everything and fits(keep, whole)):
        keep = _largest(everything, lambda count: fits(count, ""))
        text = cut_summary(whole, lambda cut: fits(keep, cut)) if keep == everything else ""
    elif not fits(keep, whole):
        text = ""
    if not fits(keep, text):
        return View(context, 0, "", trimmed=True, shown=False)
    return View(context, keep, text, trimmed=keep < everything or text != whole)


def require_room(
    config: ShortTermMemoryConfig,
    *,
    health: MemoryHealth,
    summary: str,
    pending: Sequence[StoredTurn],
    recent: Sequence[StoredTurn],
) -> None:
    """Raise `MemoryBudgetExceeded` if `overflow_policy="error"` and this does not fit the budget."""
    if config.budget.overflow_policy != "error":
        return
    view = render(config, health=health, summary=summary, pending=pending, recent=recent)
    if view.trimmed:
        raise MemoryBudgetExceeded(
            f"this turn would take the memory past total_max_tokens={config.budget.total_max_tokens}; "
            "it was not stored"
        )


def shown_turn(turn: ConversationTurn, config: ShortTermMemoryConfig) -> dict[str, Any]:
    """Return one turn as the model and the summarizer see it."""
    shown: dict[str, Any] = {"user": turn.user_message, "assistant": turn.assistant_response}
    digest_ = turn.trajectory_digest
    if config.include_trajectory_digest and digest_ is not None:
        shown["trajectory_digest"] = {
            "tools_invoked": list(digest_.tools_invoked),
            "observations_summary": digest_.observations_summary,
            "reasoning_summary": digest_.reasoning_summary,
            "artifacts_refs": list(digest_.artifacts_refs),
        }
    return shown


class _Context:
    """The newest `keep` turns and a summary, as a payload and as the text whose tokens are counted.

    Turns are serialized once each, and only when they are looked at.
    """

    def __init__(self, config: ShortTermMemoryConfig, turns: Sequence[StoredTurn], pending: int) -> None:
        self._config = config
        self._turns = turns
        self._pending = pending
        self._texts: dict[int, str] = {}
        self._tokens: dict[tuple[int, str], int] = {}
        self.size = len(turns)

    def payload(self, keep: int, summary: str) -> dict[str, Any]:
        shown = [shown_turn(stored.turn, self._config) for stored in self._turns[self.size - keep :]]
        pending = self._kept_pending(keep)
        payload: dict[str, Any] = {"recent_turns": shown[pending:]}
        if pending:
            payload["pending_turns"] = shown[:pending]
        if summary:
            payload["summary"] = summary
        return payload

    @property
    def nothing(self) -> int:
        """The estimate of a model's seeing nothing at all."""
        return self._config.estimate("{}")

    def at_most(self, summary: str) -> float:
        """Return a number of tokens that everything surely does not exceed, without serializing it.

        JSON escapes make at most six characters of one. Nothing is known of a custom estimator.
        """
        if self._config.token_estimator is not None:
            return math.inf
        characters: float = len(summary)
        for _, turn in self._turns:
            characters += len(turn.user_message) + len(turn.assistant_response) + 20
            if turn.trajectory_digest is not None:
                characters += _characters(turn.trajectory_digest)
        return self._config.estimate("") + (6 * characters + 100) / 4

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
        return self._config.estimate(f"{{{', '.join(members)}}}")

    def _kept_pending(self, keep: int) -> int:
        return max(0, self._pending - (self.size - keep))

    def _text(self, index: int) -> str:
        text = self._texts.get(index)
        if text is None:
            shown = shown_turn(self._turns[index].turn, self._config)
            text = self._texts[index] = _encode(shown)
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
