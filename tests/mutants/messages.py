"""Drivers that log what they must not."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any, ClassVar

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing.workbench.faulty import FaultyDriver

logger = logging.getLogger("stm_backends.mutant")


class LogsKeys(FaultyDriver):
    """Says for debugging what it loads."""

    async def load(self, key: Key) -> Record | None:
        logger.debug("load %s", key.name)
        return await super().load(key)


class LogsEntries(FaultyDriver):
    """Logs an error with a traceback whose message quotes the entry."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except ValueError:
            logger.warning("an append of %r failed", entry)
            raise


class ErrorsNameKeys(FaultyDriver):
    """Says in an error which record it is about."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Corrupt as error:
            message = f"the record {key.name} is damaged"
            raise Corrupt(message, backend=self.name, operation="load") from error


class WarnsOfEachWrite(FaultyDriver):
    """Warns each time of something that is as it should be."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        warnings.warn("the statement was truncated", stacklevel=1)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class Conflicting(FaultyDriver):
    """Notes which records a write is under way to, and meets conflicts."""

    _busy: ClassVar[Counter[Key]] = Counter()

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        self._busy[key] += 1
        try:
            done = await super().replace(key, body, **how)
            if not done and self._busy[key] > 1:
                self.conflict(key, body)
            return done
        finally:
            self._busy[key] -= 1

    def conflict(self, key: Key, body: bytes) -> None:
        """Say that a write has met another one."""
        raise NotImplementedError


class LogsConflicts(Conflicting):
    """Logs the key of a write that has met another one."""

    def conflict(self, key: Key, body: bytes) -> None:
        logger.info("lost a race for %s", key.name)


class ErrorsOfConflictsShowText(Conflicting):
    """Says in an error what was to be stored, if another write was under way."""

    def conflict(self, key: Key, body: bytes) -> None:
        raise Unavailable(f"could not store {body!r}", backend=self.name, operation="replace")
