"""What the nemesis does and when, from a seed alone."""

from __future__ import annotations

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


def planned(seed: int, weights: Mapping[str, float], *, gap: float, lease: float) -> Iterator[Planned]:
    """Yield faults without end; the same arguments yield the same faults."""
    chance = random.Random(f"faults {seed}")
    kinds = sorted(weights)
    while True:
        (kind,) = chance.choices(kinds, [weights[one] for one in kinds])
        long = chance.random() < LONG
        seconds = lease * chance.uniform(1.1, 1.6) if long else min(chance.expovariate(2.0) + 0.05, 2.0)
        # Faults of one kind strike at once, others follow: several are in force at a time.
        yield Planned(
            kind=kind,
            seconds=round(seconds, 3),
            gap=round(min(chance.expovariate(1 / gap), 4 * gap), 3),
            chance=chance.getrandbits(32),
        )
