"""Appends to the records of a graph, whose tails are folded into their bodies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from stm_backends.drivers.contract import KEEP, Driver, Key, Record, new_version
from stm_backends.errors import StorageError, TooLarge, located
from stm_backends.records import ledger

logger = logging.getLogger("stm_backends")

FOLD_AT: Final = 64
"""After how many entries a tail is folded into its body."""

_ROUNDS: Final = 64
"""How often an append to a full record folds it and starts again."""


class Tails:
    """Appends entries to records of one kind. `fold` returns a body with the entries of a record's tail."""

    def __init__(self, driver: Driver, fold: Callable[[Record], bytes]) -> None:
        self._driver = driver
        self._fold = fold

    async def append(self, where: Key, entry: bytes) -> bool:
        """Append an entry; returns whether that may have created the record.

        Folds a long tail afterwards, and a full record before the next attempt.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                appended = await ledger.append(self._driver, where, entry, ttl=None)
                break
            except TooLarge as error:
                if error.what == "entry" or attempt == _ROUNDS:
                    raise
                await self.fold(where)
        if appended.length % FOLD_AT == 0:
            try:
                await self.fold(where)
            except StorageError as error:
                logger.warning("could not fold a record of a graph; a later write will: %s", error)
        return appended.created

    async def fold(self, where: Key) -> None:
        """Move the entries of a tail into the body; another process may do so first."""
        record = await self._driver.load(where)
        if record is None or not record.tail:
            return
        with located(self._driver.name, "fold"):
            body, version = self._fold(record), new_version()
        drop = min(len(record.tail), self._driver.traits.max_drop)
        await ledger.retried(
            lambda: self._driver.replace(
                where, body, version=version, expect=record.version, drop=drop, ttl=KEEP
            )
        )
