"""Snapshots of the conversations that a process used last, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from stm_backends.drivers.contract import Key
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot

MOST: Final = 4_096
MOST_BYTES: Final = 64 * 1024 * 1024
"""Maximum number of conversations that a backend keeps, and about how much memory they may take. A
conversation beyond that is read in full when it is used again."""

_EACH: Final = 3_000
"""Approximate number of bytes of a conversation without its entries."""

_ENTRY: Final = 1_000
"""Approximate number of bytes of an entry beyond twice its size, which is its bytes and its turn."""


class Recent:
    """The conversations that were used last. Older ones drop their snapshots."""

    # Not `Bounded`: there are two bounds, what a conversation takes changes, and the one in use is kept.
    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Key, tuple[SharedConversation, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> SharedConversation | None:
        """Return the kept state of a conversation."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def note(self, shared: SharedConversation) -> None:
        """Note that a conversation was used, and its present size."""
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
    """Return the approximate number of bytes of a snapshot."""
    body = len(seen.body.summary) + len(seen.body.forgotten.digests)
    return _EACH + body + 2 * seen.size + _ENTRY * len(seen.tail)
