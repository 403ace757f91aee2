"""A mapping that forgets its least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping of at most `most` entries: those that were set or used last.

    With `size_of`, `most` is the sum of their sizes; the size of a value must not change. `forgotten` is
    called with each key and value that newer ones displace.
    """

    __slots__ = ("_entries", "_forgotten", "_size_of", "most", "size")

    def __init__(
        self,
        most: int,
        *,
        size_of: Callable[[V], int] | None = None,
        forgotten: Callable[[K, V], None] | None = None,
    ) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._size_of = size_of
        self._forgotten = forgotten
        self.most = most
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key)
        self._entries[key] = value
        self.size += self._one(value)
        while self.size > self.most:
            oldest, value = self._entries.popitem(last=False)
            self.size -= self._one(value)
            if self._forgotten is not None:
                self._forgotten(oldest, value)

    def get(self, key: K) -> V | None:
        """Return the value of a key, which does not count as a use; `None` if there is none."""
        return self._entries.get(key)

    def use(self, key: K) -> V | None:
        """Return the value of a key, which is now the one used last; `None` if there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def pop(self, key: K) -> V | None:
        """Remove a key and return its value; `None` if there is none."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.size -= self._one(value)
        return value

    def clear(self) -> None:
        """Remove all entries, without calling `forgotten`."""
        self._entries.clear()
        self.size = 0

    def values(self) -> ValuesView[V]:
        """Return the values, the one used last at the end."""
        return self._entries.values()

    def items(self) -> ItemsView[K, V]:
        """Return the keys and values, the one used last at the end."""
        return self._entries.items()

    def _one(self, value: V) -> int:
        return 1 if self._size_of is None else self._size_of(value)
