"""Finds the names of expired records in the indexes of all scopes.

Redis removes an expired record by itself, and an index once all its records have expired. An index that once
had a record without a time to live does not expire, so names of expired records stay in it until a listing
reads them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

from stm_backends_redis.servers import Command, Connected, Exchange

Look: TypeAlias = Callable[[bytes, bytes, int], Awaitable[tuple[int, bytes]]]
"""Checks a page of an index after a name; returns how many have expired, and the start of the rest."""

_KEYS: Final = 1_000
"""Number of keys that one SCAN covers."""

_PAGE: Final = 200
"""Number of names in an index that one script checks."""


class Tidying:
    """One pass over all indexes, which can be continued."""

    def __init__(self, indexes: AsyncIterator[bytes], look: Look) -> None:
        self._indexes = indexes
        self._look = look
        self._index: bytes | None = None
        self._after = b""

    async def step(self, limit: int) -> int | None:
        """Check one page of at most `limit` names. Returns how many had expired, or `None` at the end."""
        if self._index is None:
            self._index = await anext(self._indexes, None)
            if self._index is None:
                return None
        expired, self._after = await self._look(self._index, self._after, min(limit, _PAGE))
        if not self._after:
            self._index = None
        return expired


async def indexes(
    connected: Connected,
    key_prefix: str,
    ask: Callable[[Exchange, Command], Awaitable[tuple[bytes | int, list[bytes]]]],
) -> AsyncIterator[bytes]:
    """Yield the keys of all indexes with a prefix; each at least once if it exists throughout."""
    pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", key_prefix) + "{*}"
    for master in await connected.masters():
        cursor = 0
        while True:
            command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS, "TYPE", "zset")
            position, found = await ask(master, command)
            for index in found:
                yield index
            # Bytes, or a number if the client library parsed the answer.
            cursor = int(position)
            if not cursor:
                break
