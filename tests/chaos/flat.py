"""Whether a figure of a process stays flat: a rule for series that rise and fall anyway."""

from __future__ import annotations

import itertools
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


BLOCKS: Final = 12
"""Into how many pieces a series is cut whose slow climb is looked for."""

STEADY: Final = 50
"""By how many more pairs of pieces must rise than fall, of 66. Chance gives so many once in 2,000 series; one
step up gives 36 and two give 48, so neither is a climb."""

ENOUGH: Final = 48
"""How many samples a slow climb needs, so that a piece has three."""


def climb(values: Sequence[float]) -> float | None:
    """Return by how much a series rises after the warm-up, if it does so steadily; otherwise 0.

    The series is cut into 12 pieces, whose medians are compared in pairs. If nearly all pairs rise, the rise
    is the median slope of the pairs times the length. So a leak is found that is smaller than the teeth of a
    saw. Returns `None` for a series that is too short to be judged.
    """
    if len(values) < ENOUGH:
        return None
    settled = values[int(len(values) * WARM_UP) :]
    ends = [len(settled) * number // BLOCKS for number in range(BLOCKS + 1)]
    medians = [statistics.median(settled[a:b]) for a, b in itertools.pairwise(ends)]
    pairs = list(itertools.combinations(enumerate(medians), 2))
    if sum((b > a) - (b < a) for (_, a), (_, b) in pairs) < STEADY:
        return 0.0
    return BLOCKS * statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs)


def _thirds(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    settled = values[int(len(values) * WARM_UP) :]
    size = len(settled) // 3
    return settled[:size], settled[size:-size], settled[-size:]


def _below(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _above(values: Sequence[float]) -> float:
    return sorted(values)[(3 * len(values)) // 4]
