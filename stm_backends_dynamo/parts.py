"""The parts that a process remembers, so that a load of a longer record is one request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stm_backends.drivers.contract import Key

MOST_BYTES: Final = 16 * 1024 * 1024
"""How many bytes of parts a driver remembers."""

_OVERHEAD: Final = 400
"""About how many bytes an empty part takes in memory."""


class Parts:
    """Parts that were read or written, the ones used last, up to `most` bytes.

    A part never changes, and its name is never used again. So a remembered part is what the head means that
    names it, and one that was deleted is named by no head.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._size = 0
        self._parts: OrderedDict[tuple[Key, str], Sequence[bytes]] = OrderedDict()

    def of(self, key: Key, names: Iterable[str]) -> dict[str, Sequence[bytes]]:
        """Return those of the named parts of a record that are remembered."""
        found: dict[str, Sequence[bytes]] = {}
        for name in names:
            if (values := self._parts.get((key, name))) is not None:
                self._parts.move_to_end((key, name))
                found[name] = values
        return found

    def keep(self, key: Key, parts: Mapping[str, Sequence[bytes]]) -> None:
        """Remember parts of a record, and forget those that were not used for the longest time."""
        for name, values in parts.items():
            if (key, name) not in self._parts:
                self._parts[key, name] = values
                self._size += _size_of(values)
        while self._size > self._most:
            _, values = self._parts.popitem(last=False)
            self._size -= _size_of(values)


def _size_of(values: Sequence[bytes]) -> int:
    return _OVERHEAD + sum(map(len, values))
