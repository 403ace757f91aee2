"""What a memory decides, as pure functions: no clock, no I/O, no event loop.

A conversation is a `Body` (the summary and how summarizing goes) and its turns, oldest first. The last
`full_zone_turns` are *recent*; what stands before them is *pending* until a summary covers it. Both
memories ask the same questions here, and in `view` what the model may see of all that; they differ only
in how they carry the answers out:

- `next_step`: is there something to summarize, to trim or to wait for?
- `room_step`: what gives way at once when the record is full?
- `after_fold`, `after_failure`, `after_trim`, `after_recovery`: what is the body then?
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeAlias

from stm_backends.errors import ConfigurationError
from stm_backends.memory.view import is_blank, shown_text, shown_turn, summary_within_budget
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn

REMEMBERED_IDS: Final = 256
"""How many ids of folded and trimmed turns are always remembered (younger ones come on top)."""

SHORTEST_DELAY_S: Final = 0.05
"""The shortest wait before another summarizer call, so that an interval of 0 does not spin."""

LONGEST_BACKOFF_S: Final = 3_600.0


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

    def adding(
        self, turn_ids: Sequence[str], *, now: float, keep_for: float, copies: Set[str] = frozenset()
    ) -> Forgotten:
        """Return these and more, without those that are both old and past `REMEMBERED_IDS`.

        `copies` are the ids of which a repeat still stands in the record. They are kept however old they
        are: forgotten, the repeat would become a turn.
        """
        standing = frozenset(digest(turn_id) for turn_id in copies)
        return self._adding(
            [digest(turn_id) for turn_id in turn_ids], now=now, keep_for=keep_for, standing=standing
        )

    def union(self, newer: Forgotten, *, now: float, keep_for: float) -> Forgotten:
        """Return these, then those of `newer` that are not among them."""
        known = set(self.each())
        return self._adding([d for d in newer.each() if d not in known], now=now, keep_for=keep_for)

    def each(self) -> list[str]:
        """Return the short hashes, oldest first."""
        return self.digests.strip(",").split(",") if self.ages else []

    def _adding(
        self, newer: list[str], *, now: float, keep_for: float, standing: Set[str] = frozenset()
    ) -> Forgotten:
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
        going = min(old, max(0, len(digests) - REMEMBERED_IDS))
        kept = [one for one in digests[:going] if one in standing] + digests[going:]
        old = len(kept) - sum(count for _, count in young)
        ages = ((0.0, old), *young) if old else tuple(young)
        return Forgotten(f",{','.join(kept)},", ages)


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


@dataclass(frozen=True, slots=True)
class Recover:
    """Nothing is left to summarize, so nothing is wrong: the memory is healthy, without a call."""


Step: TypeAlias = Fold | Trim | Wait | Recover | None


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
    known_for: float = 0.0,
) -> Step:
    """Decide what the background shall do about the turns that are not recent any more.

    `now` is in epoch seconds. `batch` is how many pending turns make a fold worthwhile; unless given it
    is the configured one. `known_for` is for how many seconds this process has known of the last failure:
    a process that has waited for the whole delay need not trust a clock that may be wrong.
    """
    if config.strategy == "none":
        return None
    if config.strategy == "truncation":
        # Trimming at twice the zone spreads one write over as many turns.
        worthwhile = len(pending) > config.budget.full_zone_turns
        return Trim(len(pending), lost=False) if worthwhile else None
    if not pending:
        return None if body.health is MemoryHealth.HEALTHY else Recover()
    if config.budget.summary_max_tokens == 0:
        return Trim(len(pending), lost=False)
    if body.health is MemoryHealth.HEALTHY:
        if len(pending) < (config.fold_batch_turns if batch is None else batch):
            return None
    else:
        # Bounded by our own delay: another machine's clock may be wrong by any amount.
        wait = min(body.next_attempt_at - now, delay_after(config, body.attempts) - known_for)
        if wait > 0:
            return _backlog_trim(config, body, pending) or Wait(wait)
    return Fold(body.summary, tuple(oldest_for_fold(config, body, pending)))


def _backlog_trim(config: ShortTermMemoryConfig, body: Body, pending: Sequence[StoredTurn]) -> Trim | None:
    """Return what is past the limit between two attempts. A due attempt comes first: it may save them."""
    # One turn at least: with nothing to summarize there would be no attempt that ends it.
    surplus = len(pending) - max(config.recovery_backlog_limit, 1)
    return Trim(surplus, lost=True) if surplus > 0 and body.health is MemoryHealth.DEGRADED else None


def oldest_for_fold(
    config: ShortTermMemoryConfig, body: Body, pending: Sequence[StoredTurn]
) -> Sequence[StoredTurn]:
    """Return the oldest pending turns that one summarizer call covers: at least one.

    At most `fold_max_turns`, and at most `fold_max_tokens` as the summarizer sees them. Both are halved for
    each failure in a row, because what failed may have been too much for the model. Once a single turn has
    failed, it was not that, and they start over: a model that was away finds the backlog in one batch.
    """
    halvings = body.attempts % config.fold_max_turns.bit_length()
    most, room = config.fold_max_turns >> halvings, config.fold_max_tokens >> halvings
    for count, stored in enumerate(pending[:most]):
        room -= config.estimate(shown_text(stored.turn, config))
        if room < 0 and count:
            return pending[:count]
    return pending[:most]


def room_step(
    config: ShortTermMemoryConfig, step: Step, pending: Sequence[StoredTurn], *, count: int
) -> Step:
    """Return what makes room in a full record at once: `step` if it does, else a trim.

    Between two attempts that fail, the oldest `count` turns are lost so that a new one can be stored.
    """
    if isinstance(step, (Fold, Trim)) or not pending:
        return step
    if config.strategy == "rolling_summary":
        return Trim(min(count, len(pending)), lost=True)
    return Trim(len(pending), lost=False)


def delay_after(config: ShortTermMemoryConfig, attempts: int) -> float:
    """Return how many seconds lie between failure number `attempts` in a row and the next attempt."""
    if attempts > config.retry_attempts:
        return max(config.degraded_retry_interval_s, SHORTEST_DELAY_S)
    backoff = config.retry_backoff_base_s * 2.0 ** min(max(attempts - 1, 0), 62)
    return min(max(backoff, SHORTEST_DELAY_S), LONGEST_BACKOFF_S)


def patience(config: ShortTermMemoryConfig) -> float:
    """Return how many seconds a `flush` waits unless told otherwise: for one call and all its retries."""
    retries = range(1, min(config.retry_attempts, 10) + 1)
    waits = sum(delay_after(config, attempt) for attempt in retries)
    return waits + config.summarizer_timeout_s * (len(retries) + 1)


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
    config: ShortTermMemoryConfig,
    body: Body,
    fold: Fold,
    summary: str,
    *,
    now: float,
    keep_for: float,
    copies: Set[str] = frozenset(),
) -> Body:
    """Return the body after a summary covers the turns of `fold`; a summary over its budget is cut.

    `copies` are the ids of which a repeat stays in the record, see `Forgotten.adding`. Raises `BadSummary`
    if nothing that says something is left of the summary: the previous one says more.
    """
    kept = summary_within_budget(summary, config)
    if not kept:
        raise BadSummary("nothing of the summary is left within summary_max_tokens")
    return replace(
        body,
        summary=kept,
        health=MemoryHealth.HEALTHY,
        attempts=0,
        next_attempt_at=0.0,
        folded=body.folded + len(fold.turns),
        forgotten=body.forgotten.adding(
            [t.id for t in fold.turns], now=now, keep_for=keep_for, copies=copies
        ),
    )


def after_trim(
    body: Body,
    trim: Trim,
    gone: Sequence[StoredTurn],
    *,
    now: float,
    keep_for: float,
    copies: Set[str] = frozenset(),
) -> Body:
    """Return the body after the turns of a trim have gone; `copies` as for `after_fold`."""
    return replace(
        body,
        dropped=body.dropped + (len(gone) if trim.lost else 0),
        forgotten=body.forgotten.adding(
            [stored.id for stored in gone], now=now, keep_for=keep_for, copies=copies
        ),
    )


def after_recovery(body: Body) -> Body:
    """Return the body of a memory that has nothing left to summarize."""
    return replace(body, health=MemoryHealth.HEALTHY, attempts=0, next_attempt_at=0.0)


def summarizer_for(config: ShortTermMemoryConfig, summarizer: object | None) -> Callable[..., object]:
    """Return what summarizes; raises `ConfigurationError` if it cannot, or is missing and needed."""
    if isinstance(summarizer, type):
        name = summarizer.__name__
        raise ConfigurationError(f"summarizer is the class {name}; give an instance: {name}(...)")
    if callable(summarizer):
        return summarizer
    if summarizer is not None:
        raise ConfigurationError(
            "summarizer is an async function that takes a request and returns {'summary': ...}; "
            f"not {type(summarizer).__name__}"
        )
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
