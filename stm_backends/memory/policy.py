"""The decisions of a memory, as pure functions: no clock, no I/O, no event loop.

A conversation is a `Body` (the summary and the state of summarizing) and its turns, oldest first. The last
`full_zone_turns` turns are *recent*; the turns before them are *pending* until a summary covers them. Both
memories use these decisions, and `view` for what the model is shown; they differ only in carrying them out:

- `next_step`: whether there is something to summarize, to trim or to wait for
- `room_step`: what is removed at once when the record is full
- `after_fold`, `after_failure`, `after_trim`, `after_recovery`: the resulting body
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, cast

from stm_backends.cutting import is_blank
from stm_backends.errors import ConfigurationError
from stm_backends.handed_in import Misbehaved, WrongType
from stm_backends.memory.view import shown_text, shown_turn, summary_within_budget
from stm_backends.records.body import Body, Lease, Overdue, as_title
from stm_backends.tokens import PER_TOKEN
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn

SHORTEST_DELAY_S: Final = 0.05
"""The shortest wait before another summarizer call, so that an interval of 0 does not spin."""

LONGEST_BACKOFF_S: Final = 3_600.0


class Gap(NamedTuple):
    """The numbers `first` to `end - 1` of turns in pages that no summary covers; see `Transcript`."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Summarize these turns, on top of this summary.

    The oldest `archived` of them are in pages, where they have the numbers of `gap`. The others are the
    oldest ones of the record.
    """

    previous_summary: str
    turns: tuple[StoredTurn, ...]
    gap: Gap | None = None
    archived: int = 0

    def request(self, config: ShortTermMemoryConfig) -> dict[str, Any]:
        """Return the argument of the summarizer."""
        return {
            "previous_summary": self.previous_summary,
            "turns": [shown_turn(stored.turn, config) for stored in self.turns],
        }

    def still_applies(self, body: Body, head: Sequence[StoredTurn]) -> bool:
        """Say whether the summarized turns are still the oldest ones, on top of the same summary."""
        gap = None if body.transcript is None else body.transcript.gap
        if body.summary != self.previous_summary or gap != (self.gap and self.gap.first):
            return False
        covered = [stored.id for stored in self.turns[self.archived :]]
        return covered == [stored.id for stored in head[: len(covered)]]

    def after_moves(self, first: int, base: int) -> Fold:
        """Return the fold of the same turns once those with numbers below `base` have moved to pages.

        `first` is the number of the first of them that was in the record when the fold began.
        """
        moved = min(base - first, len(self.turns))
        if self.gap is not None or moved <= 0:
            return self
        return replace(self, gap=Gap(first, first + moved), archived=moved)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Summarize the oldest of these turns, which left the record without a summary; they are in pages."""

    gap: Gap


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop the oldest `count` turns. `lost` is true if a summary should have covered them.

    They are lost unless the conversation keeps a transcript: then a summary covers them later.
    """

    count: int
    lost: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """The next step is due in `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Recover:
    """Nothing is left to summarize, so the memory becomes healthy without a summarizer call."""


Step: TypeAlias = Fold | CatchUp | Trim | Wait | Recover | None


class Split(NamedTuple):
    """The turns of a conversation, each part oldest first."""

    pending: Sequence[StoredTurn]
    recent: Sequence[StoredTurn]


def split(turns: Sequence[StoredTurn], config: ShortTermMemoryConfig) -> Split:
    """Divide the turns of a conversation into pending and recent ones."""
    boundary = max(0, len(turns) - config.budget.full_zone_turns)
    return Split(turns[:boundary], turns[boundary:])


def next_step(
    config: ShortTermMemoryConfig,
    body: Body,
    pending: Sequence[StoredTurn],
    *,
    now: float,
    batch: int | None = None,
    known_for: float = 0.0,
    weight: int | None = None,
) -> Step:
    """Decide what the background does with the pending turns.

    `now` is in epoch seconds. `batch` is the smallest number of pending turns to fold, by default the
    configured one. `known_for` is the number of seconds since this process learned of the last failure: after
    the whole delay, it need not rely on a clock that may be wrong. `weight` is at least the sum of
    `view.shown_weight` for the pending turns, if it is known.
    """
    if config.strategy == "none":
        return None
    if config.strategy == "truncation":
        # Trimming at twice the zone spreads one write over as many turns.
        worthwhile = len(pending) > config.budget.full_zone_turns
        return Trim(len(pending), lost=False) if worthwhile else None
    return _rolling_step(config, body, pending, now, batch, known_for, weight)


def _rolling_step(
    config: ShortTermMemoryConfig,
    body: Body,
    pending: Sequence[StoredTurn],
    now: float,
    batch: int | None,
    known_for: float,
    weight: int | None,
) -> Step:
    """Decide the same for a rolling summary."""
    if config.budget.summary_max_tokens == 0 and pending:
        return Trim(len(pending), lost=False)
    gap = _gap_of(config, body)
    if not pending and gap is None:
        return None if body.health is MemoryHealth.HEALTHY else Recover()
    if surplus := surplus_of(config, body, len(pending)):
        return Trim(surplus, lost=True)
    if body.health is MemoryHealth.HEALTHY:
        if gap is None and len(pending) < (config.fold_batch_turns if batch is None else batch):
            return None
    else:
        # Bounded by our own delay: another machine's clock may be wrong by any amount.
        wait = min(body.next_attempt_at - now, delay_after(config, body.attempts) - known_for)
        if wait > 0:
            return _backlog_trim(config, body, pending) or Wait(wait)
    if gap is not None:
        return CatchUp(gap)
    return Fold(body.summary, tuple(oldest_for_fold(config, body, pending, weight)))


def _gap_of(config: ShortTermMemoryConfig, body: Body) -> Gap | None:
    """Return the turns in pages that one more summary can cover, if there are any."""
    transcript = body.transcript
    if transcript is None or transcript.gap is None or config.budget.summary_max_tokens == 0:
        return None
    return Gap(transcript.gap, min(transcript.base, transcript.gap + config.fold_max_turns))


def surplus_of(config: ShortTermMemoryConfig, body: Body, pending: int) -> int:
    """Return how many of the `pending` turns move to pages, because a load should not return them all.

    Zero if no transcript is kept, or if no summary would cover them later.
    """
    if body.transcript is None or config.budget.summary_max_tokens == 0 or pending <= longest_tail(config):
        return 0
    return pending - config.fold_max_turns


def longest_tail(config: ShortTermMemoryConfig) -> int:
    """Return how many pending turns a record with a transcript holds; the oldest of more move to pages."""
    return max(_CALLS_IN_TAIL * config.fold_max_turns, config.recovery_backlog_limit)


_CALLS_IN_TAIL: Final = 4
"""A tail that this many summarizer calls would not cover grows faster than it is summarized."""


def _backlog_trim(config: ShortTermMemoryConfig, body: Body, pending: Sequence[StoredTurn]) -> Trim | None:
    """Return the trim of turns beyond the limit between two attempts. A due attempt comes first."""
    # At least one turn stays: without pending turns no attempt would end `DEGRADED`.
    surplus = len(pending) - max(config.recovery_backlog_limit, 1)
    return Trim(surplus, lost=True) if surplus > 0 and body.health is MemoryHealth.DEGRADED else None


def oldest_for_fold(
    config: ShortTermMemoryConfig, body: Body, pending: Sequence[StoredTurn], weight: int | None = None
) -> Sequence[StoredTurn]:
    """Return the oldest pending turns that one summarizer call covers: at least one.

    At most `fold_max_turns`, and at most `fold_max_tokens` as the summarizer sees them. Both are halved for
    each failure in a row, because the call may have been too large for the model. After a call with a single
    turn has failed, size was not the cause, and they start over, so that a model that is available again gets
    a full batch.
    """
    halvings = body.attempts % config.fold_max_turns.bit_length()
    most, room = config.fold_max_turns >> halvings, config.fold_max_tokens >> halvings
    if weight is not None and config.token_estimator is None and weight // PER_TOKEN + most <= room:
        return pending[:most]
    for count, stored in enumerate(pending[:most]):
        room -= config.estimate(shown_text(stored.turn, config))
        if room < 0 and count:
            return pending[:count]
    return pending[:most]


def room_step(
    config: ShortTermMemoryConfig, step: Step, pending: Sequence[StoredTurn], *, count: int
) -> Step:
    """Return the step that makes room in a full record: `step` if it does, otherwise a trim.

    Between two failed attempts, the oldest `count` turns are dropped so that a new one can be stored. The
    same happens while older turns wait for a summary, because that makes no room.
    """
    if isinstance(step, (Fold, Trim)) or not pending:
        return step
    if config.strategy == "rolling_summary":
        return Trim(min(count, len(pending)), lost=True)
    return Trim(len(pending), lost=False)


def falls_due(config: ShortTermMemoryConfig, before: int, after: int) -> bool:
    """Say whether an addition that takes the pending turns from `before` to `after` is to be noted as work.

    It is if it makes a step due, and again for each further batch while nobody takes the step.
    """
    return _batches(config, after) > _batches(config, before)


def _batches(config: ShortTermMemoryConfig, pending: int) -> int:
    """Return how often so many pending turns have been noted."""
    return 0 if config.strategy == "none" else max(pending, 0) // _first_due(config)


def _first_due(config: ShortTermMemoryConfig) -> int:
    """Return with how many pending turns something is due, while the memory is healthy."""
    if config.strategy == "truncation":
        return config.budget.full_zone_turns + 1
    return 1 if config.budget.summary_max_tokens == 0 else config.fold_batch_turns


def due_since(
    config: ShortTermMemoryConfig, body: Body, pending: Sequence[StoredTurn], *, now: float
) -> float | None:
    """Return since when something is due, in epoch seconds; `None` if nothing is.

    Turns that wait in pages have been due for as long as is unknown, which is 0.
    """
    if config.strategy == "none":
        return None
    gap = _gap_of(config, body) if config.strategy == "rolling_summary" else None
    if body.health is not MemoryHealth.HEALTHY:
        waits = bool(pending or gap) and body.next_attempt_at > now
        return None if waits else body.next_attempt_at
    if gap is not None:
        return 0.0
    first = _first_due(config)
    # The time of the turn that made it due.
    return pending[first - 1].turn.ts if len(pending) >= first else None


def delay_after(config: ShortTermMemoryConfig, attempts: int) -> float:
    """Return the seconds between failure number `attempts` in a row and the next attempt."""
    if attempts > config.retry_attempts:
        return max(config.degraded_retry_interval_s, SHORTEST_DELAY_S)
    backoff = config.retry_backoff_base_s * 2.0 ** min(max(attempts - 1, 0), 62)
    return min(max(backoff, SHORTEST_DELAY_S), LONGEST_BACKOFF_S)


def lease_s(config: ShortTermMemoryConfig, deadline: float) -> float:
    """Return the duration of a lease in seconds, for operations with this deadline.

    It covers one call, and one deadline for the requests before and after it, which usually take a fraction
    of that. If they take longer, another process makes the same call. With a longer lease, summaries would
    pause for longer after the death of a process.
    """
    return config.summarizer_timeout_s + deadline


def lease_left(
    lease: Lease | None,
    *,
    now: float,
    known_for: float,
    clocks_apart: float,
    overdue: Overdue | None = None,
) -> float:
    """Return the remaining seconds of a lease; 0 or less if it has expired or does not exist.

    `known_for` is the time since this process first saw it, in seconds: a wrong clock neither ends a lease
    nor prolongs it. Processes that end before a lease does need a time in the record: it also expires its own
    duration after one of them noted that it was `overdue`. So no single clock ends it, however wrong. Without
    such a note, it expires by its own time `clocks_apart` seconds later.
    """
    if lease is None:
        return 0.0
    left = min(lease.ttl - known_for, lease.at + lease.ttl + clocks_apart - now)
    return min(left, overdue.since + lease.ttl - now) if overdue and _applies(overdue, lease, now) else left


def is_overdue(lease: Lease, overdue: Overdue | None, *, now: float) -> bool:
    """Say whether a lease has ended by this clock, and this is not noted yet."""
    return now >= lease.at + lease.ttl and not (overdue and _applies(overdue, lease, now))


def _applies(overdue: Overdue, lease: Lease, now: float) -> bool:
    # A note from the future comes from a clock ahead of this one, and must not put off the end.
    return overdue.lease_at == lease.at and overdue.since <= now


def patience(config: ShortTermMemoryConfig) -> float:
    """Return the default timeout of `flush` in seconds: one call and all its retries."""
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
    replaced: Sequence[str] = (),
) -> Body:
    """Return the body after a summary covers the turns of `fold`; a summary over its budget is cut.

    `copies` are the ids with a repeat that stays in the record, see `Forgotten.adding`, and `replaced` those
    of checkpoints that go along. Raises `BadSummary` if the budget leaves only a blank summary, so that the
    previous one is kept.
    """
    kept = summary_within_budget(summary, config)
    if not kept and summary:
        raise BadSummary("nothing of the summary is left within summary_max_tokens")
    gone, transcript = fold.turns[fold.archived :], body.transcript
    if transcript is not None:
        transcript = (transcript.caught_up(fold.gap.end) if fold.gap else transcript).moved(
            [stored.id for stored in gone], summarized=True
        )
    return replace(
        body,
        summary=kept,
        health=MemoryHealth.HEALTHY,
        attempts=0,
        next_attempt_at=0.0,
        folded=body.folded + len(fold.turns),
        forgotten=body.forgotten.adding(
            [*replaced, *_entries_of(gone)], now=now, keep_for=keep_for, copies=copies
        ),
        transcript=transcript,
    )


def _entries_of(turns: Sequence[StoredTurn]) -> list[str]:
    """Return the ids of the entries of turns, each once."""
    return [*dict.fromkeys(stored.entry for stored in turns)]


def after_trim(
    body: Body,
    trim: Trim,
    gone: Sequence[StoredTurn],
    *,
    now: float,
    keep_for: float,
    copies: Set[str] = frozenset(),
    replaced: Sequence[str] = (),
) -> Body:
    """Return the body after the turns of a trim were dropped; the rest is as for `after_fold`."""
    ids, transcript = [stored.id for stored in gone], body.transcript
    return replace(
        body,
        dropped=body.dropped + (len(gone) if trim.lost and transcript is None else 0),
        forgotten=body.forgotten.adding(
            [*replaced, *_entries_of(gone)], now=now, keep_for=keep_for, copies=copies
        ),
        transcript=transcript and transcript.moved(ids, summarized=not trim.lost),
    )


def after_hole(body: Body, gap: Gap) -> Body:
    """Return the body of a memory that cannot summarize these turns, because they are in no page."""
    return replace(body, transcript=body.transcript and body.transcript.caught_up(gap.end))


def after_recovery(body: Body) -> Body:
    """Return the body of a memory that has nothing left to summarize."""
    return replace(body, health=MemoryHealth.HEALTHY, attempts=0, next_attempt_at=0.0)


def summarizer_for(
    config: ShortTermMemoryConfig, summarizer: object | None, *, needed: bool = True
) -> Callable[..., object]:
    """Return the summarizer; raises `ConfigurationError` if it is invalid, or missing but `needed`."""
    if isinstance(summarizer, type):
        name = summarizer.__name__
        raise ConfigurationError(f"summarizer is the class {name}; give an instance: {name}(...)")
    if callable(summarizer):
        return summarizer
    if summarizer is not None:
        raise ConfigurationError(
            "summarizer must be an async function that takes a request and returns {'summary': ...}; "
            f"not {type(summarizer).__name__}"
        )
    if needed and config.strategy == "rolling_summary":
        raise ConfigurationError("strategy='rolling_summary' needs a summarizer")
    return _no_summarizer


def _no_summarizer(request: object) -> NoReturn:
    raise BadSummary("this memory has no summarizer")


class BadSummary(Misbehaved):
    """The result of the summarizer is not a usable summary."""


def summary_of(response: object) -> str:
    """Return the summary in a summarizer's result. Raises `WrongType` or `BadSummary` for any other."""
    if not isinstance(response, Mapping):
        raise WrongType("the summarizer", response, "{'summary': TEXT}")
    summary = cast("Mapping[str, object]", response).get("summary")
    if not isinstance(summary, str):
        raise BadSummary(f"the summarizer's 'summary' is {type(summary).__name__}, not a text")
    if is_blank(summary):
        raise BadSummary("the summarizer returned an empty summary")
    return summary


def title_of(response: object) -> str:
    """Return the title in a summarizer's result; `""` if there is none, or none that can be shown."""
    return as_title(cast("Mapping[str, object]", response).get("title"))
