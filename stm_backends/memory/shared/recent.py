"""What a process has seen of the conversations that it used last, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from stm_backends.drivers.contract import Key
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot

MOST: Final = 4_096
MOST_BYTES: Final = 64 * 1024 * 1024
"""How many conversations a backend keeps, and about how much memory they may take. A conversation beyond that
is read in full when it is used again."""

_EACH: Final = 3_000
"""About how many bytes a conversation takes without its entries."""

_ENTRY: Final = 1_000
"""About how many bytes an entry takes beyond twice its size, which is its bytes and its turn."""


class Recent:
    """The conversations that were used last. Older ones forget what was seen of them."""

    # Not `Bounded`: there are two bounds, what a conversation takes changes, and the one in use is kept.
    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Key, tuple[SharedConversation, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> SharedConversation | None:
        """Return what is kept of a conversation."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def note(self, shared: SharedConversation) -> None:
        """Note that a conversation was used, and what it takes now."""
        kept, key = self._kept, shared.key
        _, before = kept.pop(key, (None, 0))
        size = size_of(shared.seen) + shared.added_size + _ENTRY * len(shared.added)
        kept[key] = shared, size
        self.size += size - before
        while len(kept) > 1 and (len(kept) > self._most or self.size > self._most_bytes):
            _, (oldest, freed) = kept.popitem(last=False)
            self.size -= freed
            oldest.forget()


def size_of(seen: Snapshot) -> int:
    """Return about how many bytes a snapshot takes."""
    body = len(seen.body.summary) + len(seen.body.forgotten.digests)
    return _EACH + body + 2 * seen.size + _ENTRY * len(seen.tail)
