"""The numbers in the pages of a conversation or a log, as read from the lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from stm_backends.errors import Corrupt, InvalidState

Unreadable: TypeAlias = Callable[[Corrupt, Sequence[int]], None]
"""Receives the error and the numbers of unreadable turns or items that an export leaves out."""


def refused(error: Corrupt, numbers: Sequence[int]) -> None:
    """Raise the error: nothing is left out."""
    del numbers
    raise error


class Numbers:
    """The numbers of the pages so far, in order. `end` is the one after the last of them."""

    def __init__(self) -> None:
        self.end = 0
        self._start = self._count = 0
        self._is_spoiled = False
        self._holes: list[range] = []

    def add(self, first: int, count: int) -> bool:
        """Add the numbers of one page; `False` if they do not follow the previous ones.

        Raises `InvalidState` if a page was refused.
        """
        self._require_sound()
        if not self._count:
            self._start = self.end = first
        if first < self.end:
            return False
        self._holes.append(range(self.end, first))
        self.end, self._count = first + count, self._count + count
        return True

    def spoil(self) -> None:
        """Note that a page was refused: the others would make a conversation with a hole."""
        self._is_spoiled = True

    def missing(self, first: int, end: int, count: int) -> tuple[range, ...] | None:
        """Return the numbers from `first` to `end - 1` that no page had; `None` unless they are `count`.

        Raises `InvalidState` if a page was refused.
        """
        self._require_sound()
        start, last = (self._start, self.end) if self._count else (first, first)
        if not first <= start <= last <= end or end - first - self._count != count:
            return None
        return tuple(filter(None, (range(first, start), *self._holes, range(last, end))))

    def _require_sound(self) -> None:
        if self._is_spoiled:
            raise InvalidState("a page before this line was refused, so this line is refused, too")
