"""Loads of records: small ones at once, large ones in slices, so that other clients are served in between.

A server copies an answer before it does anything else. A record of 12 MB blocks all other clients for 5 ms,
and the connection for longer. Slices that are read one after another block neither.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.coalesced import ALL
from stm_backends_redis import statements
from stm_backends_redis.statements import Statement

LARGE: Final = 128 * 1024
"""The size in bytes above which loads are large, and the minimum size of their slices."""

_BYTES_A_SECOND: Final = 50_000_000
"""Bytes in a slice per second of round trip time, so that a distant server costs few round trips."""

_AT_ONCE: Final = 2
"""The number of concurrent large loads."""

_ATTEMPTS: Final = 2
"""Number of attempts to read a changing record in slices before it is read at once."""

_ANY_SIZE: Final = 2**53

_REMEMBERED: Final = 10_000
"""Maximum number of loads whose size the driver remembers."""


class Ask(Protocol):
    """Sends a statement for one record; `apart` keeps it off the shared connection."""

    async def __call__(self, statement: Statement, *arguments: int, apart: bool = False) -> list[bytes]: ...


class Slices:
    """Reads the elements of records, with all entries or the newest ones.

    The size of the previous same load decides how to read. If that is unknown, a script returns only the head
    of a large record. A whole record that has become large is read at once one last time.
    """

    def __init__(self) -> None:
        self._sizes: Bounded[int, int] = Bounded(_REMEMBERED)
        self._turn = asyncio.Semaphore(_AT_ONCE)

    async def read(self, key: bytes, ask: Ask, last: int = ALL) -> list[bytes]:
        """Return the elements as of one moment, with only the newest `last` entries.

        Returns none if the record does not exist. Raises `ValueError` if the head of the record is damaged.
        """
        asked = hash((key, last))
        size = self._sizes.use(asked)
        is_large = size is not None and size > LARGE
        elements: list[bytes] = []
        if size is None or (last < ALL and not is_large):
            elements = await ask(statements.LOAD_SMALL, LARGE, last)
            is_large = len(elements) == statements.HEAD_ALONE
        elif not is_large:
            elements = await ask(statements.LOAD, 0, -1)
        if is_large:
            async with self._turn:
                elements = await self._in_slices(ask, last, size or 0)
        self._sizes[asked] = sum(map(len, elements))
        return elements

    async def _in_slices(self, ask: Ask, last: int, before: int) -> list[bytes]:
        """Read a record in slices, which are of one moment if its version is unchanged after the last one.

        Only a new version changes or drops an entry, and a record that is created again has a new version.
        Entries appended meanwhile are left out. `before` is the number of bytes of the previous same load:
        the newest entries may be larger than the average.
        """
        now = asyncio.get_running_loop().time
        for _ in range(_ATTEMPTS):
            began = now()
            elements = await ask(statements.LOAD, 0, 2, apart=True)
            length, size, _ = measured(elements) if elements else (0, 0, 0)
            if not length:
                return elements
            most, count, end = (
                max(LARGE, int((now() - began) * _BYTES_A_SECOND)),
                min(last, length),
                3 + length,
            )
            step = max(1, most * count // max(size * count // length, before, 1))
            for first in range(end - count, end, step):
                elements += await ask(statements.LOAD, first, min(first + step, end) - 1, apart=True)
            if len(elements) == 3 + count and await ask(statements.LOAD, 0, 0) == elements[:1]:
                return elements
        return await ask(statements.LOAD_SMALL, _ANY_SIZE, last, apart=True)


def measured(elements: list[bytes]) -> tuple[int, int, int]:
    """Return the measure in the head of a record: the number of entries, their bytes, and the body's bytes.

    Raises `ValueError` if the head is incomplete.
    """
    _, measure, _, *_ = elements
    length, size, body = map(int, measure.split())
    return length, size, body
