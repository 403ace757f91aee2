"""What a list of conversations shows of a shared conversation."""

from __future__ import annotations

import math

from stm_backends.catalogue.card import Activity, beginning_of
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot


def activity_of(snapshot: Snapshot) -> Activity | None:
    """Return the last activity that a snapshot shows; `None` if nothing is in it."""
    body, turns = snapshot.body, snapshot.turns
    count = body.folded + body.dropped + len(turns)
    if not count:
        return None
    # The times of what has left the record are rounded up.
    times = [stored.turn.ts for stored in turns[-1:] if 0 < stored.turn.ts < math.inf]
    at = times[0] if times else max((when for when, _ in body.forgotten.ages), default=0.0)
    last, first = (turns[-1].turn, turns[0].turn) if turns else (None, None)
    return Activity(
        {"memory": count},
        at,
        preview=beginning_of((last.assistant_response or last.user_message) if last else body.summary),
        opening=beginning_of(first.user_message if first else ""),
    )


def look_at(shared: SharedConversation) -> Activity | None:
    """Return what this process knows of a conversation; `None` if it has not loaded it."""
    return None if shared.seen.version is None else activity_of(shared.known())
