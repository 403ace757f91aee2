"""The next step for a shared conversation, as a pure function of the record that was read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stm_backends.drivers.contract import Traits
from stm_backends.memory import policy
from stm_backends.memory.policy import CatchUp, Fold, Step, Trim, Wait
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import pages
from stm_backends.types import ShortTermMemoryConfig

PAGES_AT_ONCE: Final = 16
"""The pages of turns that leave a record at once. Processes that soon end make progress, too."""

REPEATS_KEPT: Final = 16
"""Number of repeats at the head of a record that justifies a write to remove them."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Remove the oldest `entries`: repeats of turns that stay in the record or have left it."""

    entries: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move the oldest `count` turns to pages while a process holds the lease, which it keeps.

    They cannot wait for its summary, which covers them where they are then.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Held:
    """Another process holds the lease for at most `seconds` more, so nothing is written here.

    The exception, if the lease is `overdue`, is a note for processes that see it later.
    """

    seconds: float
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class KeepTranscript:
    """Write that the record keeps a transcript, so that processes without the setting keep it, too."""


class Mend:
    """Finish an edit whose process has ended."""


Due: TypeAlias = Step | Compact | Move | Held | KeepTranscript | Mend


def next_step(
    config: ShortTermMemoryConfig,
    snapshot: Snapshot,
    *,
    now: float,
    traits: Traits,
    room: int,
    batch: int | None,
    known_for: float,
) -> Due:
    """Return the step that is due, in portions that a driver with these traits accepts.

    `room` is the number of bytes an append to a full record waits for; 0 if none waits. `now`, `batch` and
    `known_for` are those of `policy.next_step`.
    """
    pending = snapshot.split(config).pending
    if room and not pending and snapshot.repeats and not snapshot.body.messages:
        # Entries are removed from the oldest end only, and these turns come before the repeats.
        pending = snapshot.turns
    step = policy.next_step(
        config,
        snapshot.body,
        pending,
        now=now,
        batch=1 if room else batch,
        known_for=known_for,
        weight=snapshot.weight,
    )
    if room:
        step = policy.room_step(config, step, pending, count=snapshot.turns_of(room, room=traits.room))
    worthwhile = 1 if room else REPEATS_KEPT
    if snapshot.repeats >= worthwhile and (room or step is None or isinstance(step, Wait)):
        count = min(snapshot.leading_repeats(), traits.max_drop)
        if count >= worthwhile:
            return Compact(count)
    if isinstance(step, Fold):
        portion = max(1, snapshot.within(step.turns, traits.max_drop))
        count = snapshot.cut(portion, len(pending), max_drop=traits.max_drop)
        if count > 2 * portion and snapshot.body.transcript is not None:
            # Too many for one call, as where an entry has a long history: from pages they go in portions.
            return Trim(_portion(snapshot, count, len(pending), traits), lost=True)
        return replace(step, turns=snapshot.turns[:count]) if count else None
    if isinstance(step, Trim):
        count = _portion(snapshot, step.count, len(pending), traits)
        return replace(step, count=count) if count else None
    return step


def _portion(snapshot: Snapshot, count: int, most: int, traits: Traits) -> int:
    """Return how many of the oldest `count` turns leave the record with one write: at least one.

    For messages, more if these cannot leave alone, up to `most`, or 0.
    """
    if snapshot.body.transcript is not None:
        count = min(count, PAGES_AT_ONCE * pages.TURNS)
    count = max(1, snapshot.within(snapshot.turns[:count], traits.max_drop))
    return snapshot.cut(count, most, max_drop=traits.max_drop)


def without_model(
    config: ShortTermMemoryConfig, snapshot: Snapshot, step: Due, *, traits: Traits, room: int
) -> Due:
    """Return the step of a process that leaves summaries to a worker: it only makes room.

    `traits` and `room` are those of `next_step`. In the place of a summary, the oldest turns leave the
    record: to pages, where it keeps a transcript, and otherwise they are dropped.
    """
    if not room:
        return None
    if not isinstance(step, Fold | CatchUp):
        return step
    pending = snapshot.split(config).pending
    count = min(snapshot.turns_of(room, room=traits.room), len(pending))
    count = _portion(snapshot, count, len(pending), traits) if count else 0
    return Trim(count, lost=True) if count else None


def next_move(config: ShortTermMemoryConfig, snapshot: Snapshot, *, traits: Traits, room: int) -> Move | None:
    """Return the turns that move to pages before a summary: those that make the tail or the record too long.

    `traits` and `room` are those of `next_step`.
    """
    body, pending = snapshot.body, snapshot.split(config).pending
    if config.strategy != "rolling_summary" or body.transcript is None or not pending:
        return None
    count = policy.surplus_of(config, body, len(pending))
    if room and config.budget.summary_max_tokens:
        count = max(count, min(snapshot.turns_of(room, room=traits.room), len(pending)))
    count = _portion(snapshot, count, len(pending), traits) if count else 0
    return Move(count) if count else None


def or_mark(step: Due, snapshot: Snapshot) -> Due:
    """Return the step; or, if nothing is due here and others drop turns without a transcript, its mark.

    Without others, the first write that takes turns out of the record makes the mark. With them, a process
    may never be the one that writes.
    """
    transcript = snapshot.body.transcript
    is_new = transcript is not None and transcript.epoch == snapshot.version
    idle = step is None or isinstance(step, Wait) or (isinstance(step, Held) and not step.overdue)
    return KeepTranscript() if idle and is_new and snapshot.body.left else step


def unless_held(step: Due, move: Move | None, lease_left: float, *, overdue: bool = False) -> Due:
    """Return the step; or, if it writes and another process has a lease with these seconds left, the move.

    If there is none, that is `Held`.
    """
    if step is None or isinstance(step, Wait) or lease_left <= 0:
        return step
    return move or Held(lease_left, overdue)
