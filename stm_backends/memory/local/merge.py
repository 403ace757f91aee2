"""Merges two states of one conversation that were changed independently.

A local memory and the store that it is saved in both change; `base` is their last common state. Turns
commute, so the turns of both sides are kept. Summaries do not: two summaries with the same predecessor share
some turns and differ in others. So one is kept, and turns that only the other covers become pending again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stm_backends.memory.local.state import FORGET_BY_COUNT, State
from stm_backends.records.body import REMEMBERED_IDS, Body, digest
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn


def merge(
    config: ShortTermMemoryConfig,
    stored: State,
    local: State,
    base: State,
    covered: Sequence[StoredTurn] = (),
    *,
    exact: bool = False,
    now: float,
) -> State:
    """Return the state with the changes of both sides since `base`.

    The local summary is kept if the stored one is its predecessor, or equal. Otherwise the stored summary is
    kept, and the `covered` turns of the local one return, unless the stored state has or remembers them. The
    stored order is kept; a turn that is missing there is put before the turn that follows it locally.

    A turn that both sides had and the store lacks was removed by another process if the stored state
    remembers it. Otherwise a writer that had not seen it overwrote it, and it is put back. `exact` is true if
    there was no such writer: `stored` is itself a merge of `base`.
    """
    keep_ours = (
        stored.body.summary in (base.body.summary, local.body.summary)
        # A state from `from_dict` is merged with a store that has no summary yet.
        or not (stored.body.summary or base.turns)
        or (not exact and _lost_our_summary(stored, local, base))
    )
    kept, candidates = stored.turns, (*covered, *local.turns)
    base_ids = _ids(base.turns)
    if keep_ours:
        here = _ids(local.turns)
        # Few ids are looked up in `forgotten`, because that takes a hash.
        kept = tuple(
            t for t in kept if t.id in here or not (t.id in base_ids or t.id in local.body.forgotten)
        )
        candidates = local.turns

    def was_removed(turn: StoredTurn) -> bool:
        if turn.id in stored.body.forgotten:
            return True
        if turn.id not in base_ids and turn.id not in base.body.forgotten:
            return False
        since = stored.gone - base.gone + _younger(base.body, turn.id)
        return exact or not stored.ours or since >= REMEMBERED_IDS

    held = _ids(kept)
    turns = _woven(kept, held, [t for t in candidates if t.id in held or not was_removed(t)])
    pending = _ids(stored.pending)
    boundary = max((index for index, turn in enumerate(turns, 1) if turn.id in pending), default=0)
    merged = replace(
        _body_of(stored, local, base, keep_ours=keep_ours, now=now),
        pending=turns[:boundary],
        recent=turns[boundary:],
    )
    return merged.divided(config, now=now)


def is_unrelated(stored: State | None, base: State, config: ShortTermMemoryConfig) -> bool:
    """Say whether the stored state does not descend from `base`, which was stored: it was erased in between.

    Only valid for a store with conditional saves. `stored` is `None` if there is no state.
    """
    if stored is None:
        return True
    if not stored.ours:
        return False
    if stored.gone < base.gone:
        return True
    # A truncated state is saved without the turns that are not shown.
    if config.strategy == "truncation" or stored.gone - base.gone >= REMEMBERED_IDS:
        return False
    held = _ids(stored.turns)
    return any(turn.id not in held and turn.id not in stored.body.forgotten for turn in base.turns)


def _lost_our_summary(stored: State, local: State, base: State) -> bool:
    """Say whether the store went back to a state before the local summary.

    This happens in a store without conditional saves: a process that had not seen our confirmed save has
    overwritten it. The local summary is kept if it covers all that the older one does.
    """
    went_back = stored.ours and stored.gone < base.gone
    return went_back and set(stored.body.forgotten.each()) <= set(local.body.forgotten.each())


def _body_of(stored: State, local: State, base: State, *, keep_ours: bool, now: float) -> State:
    """Return the merged state without its turns."""
    theirs, mine, before = stored.body, local.body, base.body
    body, gone = theirs, stored.gone
    if keep_ours:
        tried_here = _attempts(mine) != _attempts(before) or mine.summary != theirs.summary
        body = replace(
            mine if tried_here else theirs,
            summary=mine.summary,
            folded=max(theirs.folded, before.folded) + mine.folded - before.folded,
            dropped=max(theirs.dropped, before.dropped) + mine.dropped - before.dropped,
            forgotten=theirs.forgotten.union(mine.forgotten, now=now, keep_for=FORGET_BY_COUNT),
        )
        gone = max(stored.gone, base.gone) + local.gone - base.gone
    # A running attempt of this process still runs, regardless of the store.
    attempting = body.health is MemoryHealth.DEGRADED and (stored.recovering or local.recovering)
    return State(
        body=replace(body, extra={**mine.extra, **theirs.extra}),
        gone=gone,
        recovering=attempting,
        extra={**local.extra, **stored.extra},
    )


def _attempts(body: Body) -> tuple[MemoryHealth, int, float]:
    return body.health, body.attempts, body.next_attempt_at


def _woven(
    kept: Sequence[StoredTurn], held: set[str], candidates: Sequence[StoredTurn]
) -> tuple[StoredTurn, ...]:
    """Put each candidate before the first kept turn that follows it among the candidates, or at the end.

    `held` has the ids of the kept turns.
    """
    before: dict[str, list[StoredTurn]] = {}
    waiting: list[StoredTurn] = []
    for turn in candidates:
        if turn.id not in held:
            waiting.append(turn)
        elif waiting:
            before[turn.id] = waiting
            waiting = []
    if before:
        kept = [t for turn in kept for t in (*before.get(turn.id, ()), turn)]
    return (*kept, *waiting)


def _younger(body: Body, turn_id: str) -> int:
    """Return the number of ids added to `forgotten` after this one."""
    _, found, after = body.forgotten.digests.partition(f",{digest(turn_id)},")
    return after.count(",") if found else 0


def _ids(turns: Sequence[StoredTurn]) -> set[str]:
    return {turn.id for turn in turns}
