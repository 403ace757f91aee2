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


HIGHEST: Final = 3.0
"""How many times as far as a series may grow it may rise for a while."""

WHILE: Final = 3
"""How many samples in a row a rise lasts that is looked at. Calls that a fault held up end within one."""


def growth(values: Sequence[float]) -> float | None:
    """Return by how much a series grows from its first third to its last, after the warm-up.

    That is the distance between their medians. Returns `None` for a series that is too short to be judged.
    """
    if len(values) < FEWEST:
        return None
    early, late = ends(values)
    return late - early


def rise(values: Sequence[float]) -> float:
    """Return how far a few samples in a row rise above the median of the first third, after the warm-up."""
    settled = values[int(len(values) * WARM_UP) :]
    lasting = (min(settled[at : at + WHILE]) for at in range(len(settled) - WHILE + 1))
    return max(lasting) - ends(values)[0]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and the last third of a series, after the warm-up."""
    settled = values[int(len(values) * WARM_UP) :]
    size = len(settled) // 3
    return statistics.median(settled[:size]), statistics.median(settled[-size:])


def grows(values: Sequence[float], allowed: float) -> bool:
    """Say whether a series grows by more than is allowed, or for a while is far above that."""
    by = growth(values)
    return by is not None and (by > allowed or rise(values) > HIGHEST * allowed)


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
