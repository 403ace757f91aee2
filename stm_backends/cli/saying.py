"""The facts shown above a turn or a message, in all formats."""

from __future__ import annotations

from stm_backends.cli.figures import when
from stm_backends.types import StoredTurn


def facts_of(stored: StoredTurn) -> list[str]:
    """Return the time, if it is known, and `cut off` for a message that was cut off."""
    at = [when(stored.turn.ts)] if stored.turn.ts else []
    return [*at, "cut off"] if stored.said is not None and "cut" in stored.extra else at
