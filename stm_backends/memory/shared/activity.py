"""The activity of a shared conversation, as lists of conversations show it."""

from __future__ import annotations

import math

from stm_backends.catalogue.card import Activity, beginning_of
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records.usage import Sums
from stm_backends.types import StoredTurn


def activity_of(
    snapshot: Snapshot, first: StoredTurn | None = None, *, usage: Sums | None = None
) -> Activity | None:
    """Return the last activity that a snapshot shows; `None` if it is empty, and always was.

    `first` is the first turn, if it is known and has left the record, and `usage` that of `Activity`.
    """
    turns, count, transcript = snapshot.turns, count_of(snapshot), snapshot.body.transcript
    if not count and not (transcript and transcript.branches):
        return None
    # The times of what has left the record are rounded up.
    ages = snapshot.body.forgotten.ages
    at = _time_of(turns[-1] if turns else None) or max((when for when, _ in ages), default=0.0)
    said = (stored.turn for stored in reversed(turns))
    last = next((text for turn in said if (text := turn.assistant_response or turn.user_message)), "")
    asked = [stored for stored in ([first] if first else []) + [*turns] if stored.turn.user_message]
    return Activity(
        {"memory": count},
        at,
        preview=beginning_of(last or snapshot.body.summary),
        opening=beginning_of(asked[0].turn.user_message if asked else ""),
        created=_time_of(first or (turns[0] if turns else None)),
        usage=usage,
        title=snapshot.body.title,
        is_answered=bool(turns and turns[-1].turn.assistant_response),
    )


def count_of(snapshot: Snapshot) -> int:
    """Return the number of turns of a conversation, in its record or not.

    With a transcript, turns that left the record without a summary also count, but not those that left before
    the transcript began.
    """
    body, transcript = snapshot.body, snapshot.body.transcript
    left = body.folded + body.dropped
    if transcript is not None:
        left = max(transcript.base, left + transcript.base - transcript.summarized)
    return left + len(snapshot.turns)


def _time_of(stored: StoredTurn | None) -> float:
    """Return when a turn was added, 0 if that is unknown."""
    return stored.turn.ts if stored is not None and 0 < stored.turn.ts < math.inf else 0.0


def look_at(shared: SharedConversation) -> Activity | None:
    """Return this process's view of a conversation's activity; `None` if it has not loaded the conversation.

    `None` also if usage is summed: the additions of others would be missing from the sum, and a later view of
    one process may know less than an earlier one of another.
    """
    known = shared.known()
    return None if known.version is None or known.usage else activity_of(known)
