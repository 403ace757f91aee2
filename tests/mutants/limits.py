"""Limits that are broken: each driver is the correct one with one promise taken away."""

from __future__ import annotations

import math
from typing import Any, Final

from stm_backends.drivers.contract import Key
from stm_backends.records.limited import Known, LimitedDriver


class ChecksAfterTheWrite(LimitedDriver):
    """Appends first, and then looks whether there was room."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        length = await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)
        await super()._require_room(key, b"", Known(sizes=[0] * length))
        return length

    async def _require_room(self, key: Key, entry: bytes, known: Known) -> None:
        del key, entry, known


class ForgetsItsOwnTurns(LimitedDriver):
    """Counts what it has loaded, and not what it has appended since."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        known = self._known.get(key)
        before = [*known.sizes] if known is not None else []
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        self._known[key].sizes = before
        return length


class CountsOnlyAnswers(LimitedDriver):
    """Does not count the appends that were not answered yet."""

    async def _require_room(self, key: Key, entry: bytes, known: Known) -> None:
        sent, known.sent = known.sent, []
        try:
            await super()._require_room(key, entry, known)
        finally:
            known.sent = sent


class CountsTheExpired(LimitedDriver):
    """Counts the conversations that it has created, and never looks which are left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._created: dict[str, int] = {}

    async def _count(self, scope: str, prefix: str, most: int) -> int:
        del prefix, most
        count = self._created.get(scope, 0)
        self._created[scope] = count + 1
        return count


class RefusesByWhatItKnew(LimitedDriver):
    """Refuses because of turns that another process has folded since."""

    async def _require_room(self, key: Key, entry: bytes, known: Known) -> None:
        del entry
        self._guard.require("conversation_turns", known.length + 1)


class TrustsWhatHasExpired(LimitedDriver):
    """Takes a conversation for granted that it has seen once."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        if key in self._known:
            self._known[key].at = math.inf
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class LooksEveryTime(LimitedDriver):
    """Loads the conversation before each append."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        await self.load(key)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


LIMITS: Final[dict[type[LimitedDriver], str]] = {
    ChecksAfterTheWrite: "a_refused_turn_is_not_written",
    ForgetsItsOwnTurns: "one_process_never_exceeds_a_limit",
    CountsOnlyAnswers: "concurrent_turns_count_each_other",
    CountsTheExpired: "an_expired_conversation_does_not_count",
    RefusesByWhatItKnew: "what_others_removed_is_not_counted",
    TrustsWhatHasExpired: "a_conversation_created_again_is_counted",
    LooksEveryTime: "no_further_round_trip_is_taken",
}
"""Drivers with broken limits, and the check in `tests/unit/test_limits.py` that rejects each."""
