"""The removal of expired records and of dropped entries after a write, in steps, by a background task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.errors import StmError

logger = logging.getLogger("stm_backends")

_RUN_S: Final = 1.0
"""Seconds after which a run begins no further step; the next run continues."""


class Cleaner:
    """Runs the steps of one driver, one at a time, and ends by itself.

    `purge` is one step for expired records, and returns `None` if there were none. `sweep` is one step for
    entries below the tail of a record, and returns whether more remain. Unfinished work stays in the
    database: any process's next purge finds expired records, and a record's next fold finds the entries below
    its tail.
    """

    def __init__(
        self,
        purge: Callable[[], Awaitable[int | None]],
        sweep: Callable[[int], Awaitable[bool]],
    ) -> None:
        self._purge = purge
        self._sweep = sweep
        self._is_due = False
        self._unswept: list[int] = []
        self._task: asyncio.Task[None] | None = None

    def purge(self) -> None:
        """Schedule the removal of expired records."""
        self._is_due = True
        self._start()

    def sweep(self, record: int) -> None:
        """Schedule the removal of entries below the tail of a record; `record` is its id."""
        self._unswept.append(record)
        self._start()

    async def close(self, patience_s: float) -> None:
        """Wait for the current run, at most `patience_s` seconds, and then cancel it."""
        task = self._task
        if task is None:
            return
        try:
            await asyncio.wait({task}, timeout=patience_s)
        finally:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._task = None

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="stm-postgres-clean")

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        until = now() + _RUN_S
        try:
            while (self._unswept or self._is_due) and now() < until:
                if self._unswept:
                    if not await self._sweep(self._unswept[0]):
                        del self._unswept[0]
                elif await self._purge() is None:
                    self._is_due = False
        except StmError as error:
            # The preceding writes are done; a later run retries.
            logger.debug("postgres: could not remove expired records: %s", type(error).__name__)
        finally:
            # There was no await since the check that nothing is due, so no request is lost.
            self._task, self._is_due = None, False
            self._unswept.clear()
