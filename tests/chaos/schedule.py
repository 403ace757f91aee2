"""What the nemesis does and when, from a seed alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

LONG: Final = 0.08
"""The share of faults that last longer than a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault: `seconds` is how long it is held, `gap` how long after it begins the next one does.

    `chance` is the seed of whatever else it draws, such as its target.
    """

    kind: str
    seconds: float
    gap: float
    chance: int


CALM_AFTER: Final = 150
"""After so many faults there is none for a while, in which everything has to become healthy."""


def planned(
    seed: int, weights: Mapping[str, float], *, gap: float, lease: float, calm: float
) -> Iterator[Planned]:
    """Yield faults without end; the same arguments yield the same faults.

    They begin `gap` seconds apart on average. Most are short, and so several are in force at a time; some
    are held for longer than a `lease`. `calm` is how long none begins now and then.
    """
    chance = random.Random(f"faults {seed}")
    kinds = sorted(weights)
    for number in itertools.count(1):
        (kind,) = chance.choices(kinds, [weights[one] for one in kinds])
        long = chance.random() < LONG
        seconds = lease * chance.uniform(1.1, 1.6) if long else min(chance.expovariate(2.0) + 0.05, 2.0)
        rest = calm if number % CALM_AFTER == 0 else min(chance.expovariate(1 / gap), 4 * gap)
        yield Planned(kind=kind, seconds=round(seconds, 3), gap=round(rest, 3), chance=chance.getrandbits(32))
