"""A cache of parts, so that a load of a longer record is one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import Key

MOST_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of the parts that a driver remembers, in bytes."""

_OVERHEAD: Final = 400
"""Approximate memory used by an empty part, in bytes."""


class Parts:
    """The most recently used parts, up to `most` bytes.

    A part never changes, and its name is never reused. So a remembered part is always the one that a head
    names, and no head names a deleted one.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._parts: Bounded[tuple[Key, str], Sequence[bytes]] = Bounded(most, size_of=_size_of)

    def of(self, key: Key, names: Iterable[str]) -> dict[str, Sequence[bytes]]:
        """Return the remembered ones of a record's named parts."""
        found = {name: self._parts.use((key, name)) for name in names}
        return {name: values for name, values in found.items() if values is not None}

    def keep(self, key: Key, parts: Mapping[str, Sequence[bytes]]) -> None:
        """Remember parts of a record, and forget the least recently used ones."""
        for name, values in parts.items():
            if (key, name) not in self._parts:
                self._parts[key, name] = values


def _size_of(values: Sequence[bytes]) -> int:
    return _OVERHEAD + sum(map(len, values))
