"""The appends to a full record that wait for room, and the room that they need."""

from __future__ import annotations

import contextlib
from collections.abc import Generator


class RoomRequest:
    """One append that waits for `size` bytes."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class Room:
    """The requests for room in one record, and the number of times that room was made."""

    def __init__(self) -> None:
        self._requests: set[RoomRequest] = set()
        self._times_made = 0

    @property
    def needed(self) -> int:
        """The largest number of bytes that an append waits for; 0 if none waits."""
        return max(request.size for request in self._requests) if self._requests else 0

    @contextlib.contextmanager
    def request(self, size: int) -> Generator[RoomRequest]:
        """Give a request that ends with the context, whether its append was done or not."""
        request = RoomRequest(size)
        try:
            yield request
        finally:
            self._requests.discard(request)

    def ask(self, request: RoomRequest) -> int:
        """Let an append wait; returns the value that `may_help` compares with."""
        self._requests.add(request)
        return self._times_made

    def may_help(self, request: RoomRequest, *, since: int) -> bool:
        """Say whether a retry may succeed: room was made since `ask`, or is still to be made."""
        return self._times_made > since or request in self._requests

    def made(self) -> None:
        """Note that entries were removed: every append that waits may be retried."""
        self._requests.clear()
        self._times_made += 1

    def refuse(self) -> None:
        """Note that no room can be made."""
        self._requests.clear()
