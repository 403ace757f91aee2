"""Whether a figure of a process stays flat: a rule for series that rise and fall anyway."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

FEWEST: Final = 24
"""How many samples can be judged; of fewer, chance decides."""

WARM_UP: Final = 0.25
"""Which part of a series does not count: caches fill and connections open."""


def growth(values: Sequence[float]) -> float | None:
    """Return by how much a series grows for certain from its first third to its last, after the warm-up.

    That is the distance between the middle halves of the two thirds, if they do not meet, and if the middle
    third lies between them: a saw's teeth and a single step have no such distance, a leak has. Returns `None`
    for a series that is too short to be judged.
    """
    if len(values) < FEWEST:
        return None
    early, middle, late = _thirds(values)
    if not _above(early) < _below(middle) or not _above(middle) < _below(late):
        return 0.0
    return _below(late) - _above(early)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and the last third of a series, after the warm-up."""
    early, _, late = _thirds(values)
    return statistics.median(early), statistics.median(late)


def grows(values: Sequence[float], allowed: float) -> bool:
    """Say whether a series grows for certain, and by more than is allowed."""
    return (growth(values) or 0.0) > allowed


def _thirds(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    settled = values[int(len(values) * WARM_UP) :]
    size = len(settled) // 3
    return settled[:size], settled[size:-size], settled[-size:]


def _below(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _above(values: Sequence[float]) -> float:
    return sorted(values)[(3 * len(values)) // 4]
