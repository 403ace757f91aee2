"""The background of a conversation with one fault, which a backend that closes is to notice."""

from __future__ import annotations

from stm_backends.memory.shared.maintenance import Maintenance


class BeginsWhileOthersClose(Maintenance):
    """Begins again once it is closed itself, in a place that the closing of another has made free."""

    @property
    def closing(self) -> bool:
        return self._closing
