"""How two states of one conversation, changed apart from each other, become one again.

A memory in one process and the store it is saved in both change; `base` is what they last agreed on.
Turns commute, so both sides keep theirs. Summaries do not: two of them that grew from the same one cover
some turns both and other turns only one of them. So one stands, and what only the other covers becomes
pending again.
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
    """Return the state that holds what both sides have and have done since `base`.

    Our summary stands if the stored one is the one it grew from, or the same; otherwise the stored one
    does, and those of the turns that ours `covered` come back that it neither holds nor remembers.
    The stored order stands, and a turn that is missing there goes before the one that follows it here.

    A turn that both sides had and the store lacks was let go by another process if the stored state
    remembers it; otherwise it was lost to a writer that had not seen it, and is put back. `exact` says
    that there was no such writer: `stored` is itself a merge of `base`.
    """
    keep_ours = (
        stored.body.summary in (base.body.summary, local.body.summary)
        # A state that was loaded by itself meets a store that has no summary yet.
        or not (stored.body.summary or base.turns)
        or (not exact and _lost_our_summary(stored, local, base))
    )
    kept, candidates = stored.turns, (*covered, *local.turns)
    base_ids = _ids(base.turns)
    if keep_ours:
        here = _ids(local.turns)
        # Whether an id is remembered is asked of few: it takes a hash.
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
    boundary = 0
    if pending:
        boundary = max((index + 1 for index, turn in enumerate(turns) if turn.id in pending), default=0)
    merged = replace(
        _body_of(stored, local, base, keep_ours=keep_ours, now=now),
        pending=turns[:boundary],
        recent=turns[boundary:],
    )
    return merged.divided(config, now=now)


def is_unrelated(stored: State | None, base: State, config: ShortTermMemoryConfig) -> bool:
    """Say whether what is stored did not grow from `base`, which stood there: it was erased meanwhile.

    For a store where nobody saves without having seen what stands there; `None` is nothing there.
    """
    if stored is None:
        return True
    if not stored.ours:
        return False
    if stored.gone < base.gone:
        return True
    # A truncated state is saved without the turns that nobody would be shown.
    if config.strategy == "truncation" or stored.gone - base.gone >= REMEMBERED_IDS:
        return False
    held = _ids(stored.turns)
    return any(turn.id not in held and turn.id not in stored.body.forgotten for turn in base.turns)


def _lost_our_summary(stored: State, local: State, base: State) -> bool:
    """Say whether the store fell back to a state that our summary has long left behind.

    It takes a store that saves without conditions: a process that had not seen our confirmed save has
    overwritten it. Ours stands if it covers all that the older one does.
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
    # An attempt that is under way here still is, whatever the store says.
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

    `held` are the ids of those kept.
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
    """Return how many ids have been forgotten since this one."""
    _, found, after = body.forgotten.digests.partition(f",{digest(turn_id)},")
    return after.count(",") if found else 0


def _ids(turns: Sequence[StoredTurn]) -> set[str]:
    return {turn.id for turn in turns}
