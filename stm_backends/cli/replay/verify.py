"""Compare the turns that a memory contains with those that were acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stm_backends.cli.replay.ledger import Place


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems, counted in turns; all zero if there are none.

    `lost`: acknowledged but missing. `doubled`: surplus copies. `out_of_order`: after a turn that was added
    later. `foreign`: from another conversation, altered, or never added.
    """

    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    foreign: int = 0

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.out_of_order + other.out_of_order,
            self.foreign + other.foreign,
        )

    @property
    def total(self) -> int:
        """The number of problems."""
        return self.lost + self.doubled + self.out_of_order + self.foreign

    def __bool__(self) -> bool:
        """True if there is a problem."""
        return bool(self.total)


def compare(
    held: Sequence[Place], *, acknowledged: int, added: int | None = None, newest: int | None = None
) -> Findings:
    """Compare the turns in a memory, oldest first, with the first `acknowledged` turns of the conversation.

    Later turns up to `added` were in progress and may be present or not. A memory that keeps only the
    `newest` turns may have dropped older ones, from the beginning and without gaps.
    """
    possible = acknowledged if added is None else added
    own = [place for place in held if 0 <= place < possible]
    distinct = list(dict.fromkeys(own))
    first_due = 0 if newest is None else max(0, max([acknowledged - 1, *distinct]) + 1 - newest)
    due = range(min([first_due, *distinct]), acknowledged)
    latest, late = -1, 0
    for place in distinct:
        late += place < latest
        latest = max(latest, place)
    return Findings(
        lost=len(set(due).difference(distinct)),
        doubled=len(own) - len(distinct),
        out_of_order=late,
        foreign=len(held) - len(own),
    )
