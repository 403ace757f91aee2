"""The parts that a process remembers, so that a load of a longer record is one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stm_backends.drivers.bounded import Bounded
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
        self._parts: Bounded[tuple[Key, str], Sequence[bytes]] = Bounded(most, size_of=_size_of)

    def of(self, key: Key, names: Iterable[str]) -> dict[str, Sequence[bytes]]:
        """Return those of the named parts of a record that are remembered."""
        found = {name: self._parts.use((key, name)) for name in names}
        return {name: values for name, values in found.items() if values is not None}

    def keep(self, key: Key, parts: Mapping[str, Sequence[bytes]]) -> None:
        """Remember parts of a record, and forget those that were not used for the longest time."""
        for name, values in parts.items():
            if (key, name) not in self._parts:
                self._parts[key, name] = values


def _size_of(values: Sequence[bytes]) -> int:
    return _OVERHEAD + sum(map(len, values))
