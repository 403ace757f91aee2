"""The backgrounds of a backend: one of each conversation, however many memory objects ask for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from stm_backends.drivers.contract import Driver, Key
from stm_backends.memory.shared.concurrency import Slots
from stm_backends.memory.shared.maintenance import Maintenance
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.schedule import Waiting
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

MAX_SUMMARIES: Final = 8
"""How many summarizer calls are in flight at once, unless told otherwise."""


class Backgrounds:
    """What the memory objects of one process share: each conversation's background, slots and timers.

    A background lives as long as a memory object holds it, or it has something to do or to wait for.
    """

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        *,
        max_summaries: int = MAX_SUMMARIES,
        observer: Observer = SILENT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._observer = observer
        self._clock = clock
        self._slots = Slots(max_summaries)
        self._waiting = Waiting()
        self._each: WeakValueDictionary[Key, Maintenance] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._each)

    def of(self, key: MemoryKey) -> Maintenance:
        """Return the background of a conversation. Raises `InvalidKey`."""
        record = keys.memory_key(key)
        known = self._each.get(record)
        if known is not None:
            return known
        shared = SharedConversation(self._driver, key, self._codec, self._clock)
        maintenance = Maintenance(
            shared, keys.lease_key(key), key.tenant_id, self._slots, self._waiting, self._observer
        )
        self._each[record] = maintenance
        return maintenance

    async def close(self, *, timeout: float) -> None:
        """End all of them: what runs may finish within `timeout` seconds, leases are given back.

        Takes no longer than that and a few operations. If it is cancelled, it waits for no summary any more
        and still does all of this before it ends.
        """
        deadline = self._driver.traits.deadline
        closings = {asyncio.ensure_future(one.close(timeout=timeout)) for one in [*self._each.values()]}
        if not closings:
            return
        try:
            await asyncio.wait(closings, timeout=timeout + deadline)
        finally:
            late = {task for task in closings if not task.done()}
            for task in late:
                task.cancel()
            if late:
                # What they cancel in turn gives its lease back, which takes the driver.
                await asyncio.wait(late, timeout=1.0 + deadline)
        for task in closings:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("a memory did not close well: %s", type(error).__name__)
