"""Drivers that read, compare and write, and are wrong about what may happen in between."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from stm_backends.drivers.contract import Key
from stm_backends.errors import StorageError
from tests.support.optimistic import OptimisticDriver

LOCKED_S = 0.05
"""How long a lock lasts: longer than an operation that nothing pauses, on a machine that is not too busy."""

POLL_S: Final = 0.005

_BEGAN: Final = contextvars.ContextVar("began", default=0.0)


class ComparesTheNumberOfEntries(OptimisticDriver):
    """Writes if the record has as many entries as it had, which a replace of the body leaves so."""

    compared = ("born", "length")


class TrustsItsLock(OptimisticDriver):
    """Locks a record for some time, writes its whole tail, and does not look whether the lock still stands.

    It compares the version, which an append does not change.
    """

    compared = ("born", "version")

    @contextlib.asynccontextmanager
    async def turn(self, key: Key) -> AsyncGenerator[None]:
        while True:
            if await self.ask("load", "lock", key, LOCKED_S):
                break
            await asyncio.sleep(POLL_S)
        try:
            yield
        finally:
            with contextlib.suppress(StorageError):  # it ends by itself
                await self.ask("load", "unlock", key)


class CountsTheWritesOfAKey(OptimisticDriver):
    """Compares a number that each write of a key raises, and that begins again once it is deleted."""

    compared = ("writes",)


class CountsTheWritesOfALife(OptimisticDriver):
    """Compares a number that begins again where a record takes the place of one that has expired."""

    compared = ("life",)


class TakesTheTimeBeforeItsTurn(OptimisticDriver):
    """Judges expiry by the time at which the operation was called, and not by that of its turn."""

    async def change(self, operation: str, key: Key, decide: Any) -> Any:
        _BEGAN.set(time.time())
        return await super().change(operation, key, decide)

    def moment(self) -> float:
        return _BEGAN.get()


class TakesTheTimeBeforeItReads(OptimisticDriver):
    """Judges expiry by the time at which it asked for the record, and not by that of the answer."""

    async def ask(self, operation: str, request: str, *given: object, **named: object) -> Any:
        if request == "read":
            _BEGAN.set(time.time())
        return await super().ask(operation, request, *given, **named)

    def moment(self) -> float:
        return _BEGAN.get()
