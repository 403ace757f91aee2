"""How records are read: a small one at once, a large one in slices, between which the server does other work.

A server copies an answer before it does anything else. A record of 12 MB keeps it from all other clients for
5 ms, and the connection for longer. Read one after the other, slices of it keep neither.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from stm_backends.drivers.bounded import Bounded
from stm_backends_redis import statements
from stm_backends_redis.statements import Statement

LARGE: Final = 128 * 1024
"""A record with more bytes than this is large, and is read in slices of so many bytes."""

_BYTES_A_SECOND: Final = 50_000_000
"""A slice has so many bytes for each second of a round trip, so that a far server costs few round trips."""

_AT_ONCE: Final = 2
"""How many large records are read at the same time."""

_ATTEMPTS: Final = 2
"""How often a record that changes meanwhile is read in slices, before it is read at once."""

_REMEMBERED: Final = 10_000
"""Of how many records the driver remembers whether they are large."""


class Ask(Protocol):
    """Sends a statement for one record; `apart` keeps it from the connection that other commands share."""

    async def __call__(self, statement: Statement, *arguments: int, apart: bool = False) -> list[bytes]: ...


class Slices:
    """Reads the elements of records.

    What a record was last decides how it is read. If that is not known, a script returns no more than the
    head of a large record. A record that has become large is read at once for a last time.
    """

    def __init__(self) -> None:
        self._is_large: Bounded[int, bool] = Bounded(_REMEMBERED)
        self._turn = asyncio.Semaphore(_AT_ONCE)

    async def read(self, key: bytes, ask: Ask) -> list[bytes]:
        """Return all elements as they were at one moment; none if there is no record.

        Raises `ValueError` if the head of the record is damaged.
        """
        is_large = self._is_large.use(hash(key))
        elements: list[bytes] = []
        if is_large is None:
            elements = await ask(statements.LOAD_SMALL, LARGE)
            is_large = len(elements) == statements.HEAD_ALONE
        elif not is_large:
            elements = await ask(statements.LOAD, 0, -1)
        if is_large:
            async with self._turn:
                elements = await self._in_slices(ask)
        self._is_large[hash(key)] = sum(map(len, elements)) > LARGE
        return elements

    async def _in_slices(self, ask: Ask) -> list[bytes]:
        """Read a record in slices, which are of one moment if its version is still the same after the last.

        Only a new version changes or drops an entry, and a record that is created again has another one.
        Entries that were appended meanwhile are left out.
        """
        now = asyncio.get_running_loop().time
        for _ in range(_ATTEMPTS):
            began = now()
            elements = await ask(statements.LOAD, 0, 2, apart=True)
            length, size, _ = measured(elements) if elements else (0, 0, 0)
            if not length:
                return elements
            most = max(LARGE, int((now() - began) * _BYTES_A_SECOND))
            step, end = max(1, most * length // max(size, 1)), 3 + length
            for first in range(3, end, step):
                elements += await ask(statements.LOAD, first, min(first + step, end) - 1, apart=True)
            if len(elements) == end and await ask(statements.LOAD, 0, 0) == elements[:1]:
                return elements
        return await ask(statements.LOAD, 0, -1, apart=True)


def measured(elements: list[bytes]) -> tuple[int, int, int]:
    """Return what the head of a record says: how many entries, their bytes, and the bytes of the body.

    Raises `ValueError` if the head is incomplete.
    """
    _, measure, _, *_ = elements
    length, size, body = map(int, measure.split())
    return length, size, body
