"""The background work of a backend: one `Maintenance` for each conversation in the process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from stm_backends import logs
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import Driver, Key
from stm_backends.memory.schedule import MAX_SUMMARIES, Schedule
from stm_backends.memory.shared.folds import GIVEN
from stm_backends.memory.shared.maintenance import JOB_S, Maintenance
from stm_backends.memory.shared.recent import Recent
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.touches import Touches
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Pages
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.types import MemoryKey, ShortTermMemoryConfig, Summaries
from stm_backends.work.notes import Note, settings_of
from stm_backends.work.queue import WorkQueue

logger = logging.getLogger("stm_backends")

WORKED: Final = 1_024
"""The number of conversations that a worker keeps the background of after its work on them."""


class Backgrounds:
    """The shared state of a process's memory objects: the background of each conversation, limits and timers.

    A background is kept while a memory object refers to it, or it has work to do or to wait for. Snapshots of
    a conversation are kept longer; see `Recent`. `filled` is called with a conversation and the numbers of
    its pages that have all their turns now. `summaries` applies to memories whose settings leave it open, and
    `work` is the queue of those that leave summaries to workers.
    """

    def __init__(  # noqa: PLR0913 -- a backend passes them all; a driver and a codec suffice
        self,
        driver: Driver,
        codec: Codec,
        *,
        max_summaries: int = MAX_SUMMARIES,
        observer: Observer = SILENT,
        clock: Callable[[], float] = time.time,
        touches: Touches | None = None,
        transcript_turns: int | None = None,
        filled: Callable[[MemoryKey, range], None] | None = None,
        work: WorkQueue | None = None,
        summaries: Summaries = "process",
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._pages = Pages(driver, codec, most=transcript_turns, counted=observer.pages)
        self._observer = observer
        self._clock = clock
        self._touches = touches
        self._filled = filled
        self._work = work or WorkQueue(driver, codec)
        self._summaries = summaries
        self._schedule = Schedule(max_summaries)
        self._recent = Recent()
        self._each: WeakValueDictionary[Key, Maintenance] = WeakValueDictionary()
        self._worked: Bounded[MemoryKey, Maintenance] = Bounded(WORKED)

    def __len__(self) -> int:
        return len(self._each)

    def of(self, key: MemoryKey) -> Maintenance:
        """Return the background of a conversation. Raises `InvalidKey`."""
        record = keys.memory_key(key)
        known = self._each.get(record)
        if known is not None:
            return known
        shared = self._recent.get(record) or SharedConversation(
            self._driver, record, self._codec, self._clock, self._recent.note, self._pages
        )
        maintenance = Maintenance(shared, key.tenant_id, self._schedule, self._observer)
        self._each[record] = maintenance
        maintenance.telling = partial(self._note, key)
        if self._touches is not None and keys.is_dialogue(key):
            maintenance.noting = partial(self._touches.note, key, "memory")
            maintenance.forgetting = partial(self._forget, self._touches, key)
        if self._filled is not None and keys.is_dialogue(key):
            shared.archive.filled = partial(self._filled, key)
        return maintenance

    def leaves_to_workers(self, config: ShortTermMemoryConfig) -> bool:
        """Say whether a memory with these settings leaves summaries to workers."""
        return (config.summaries or self._summaries) == "worker"

    async def _note(self, key: MemoryKey, config: ShortTermMemoryConfig, everything: bool) -> None:
        """Note for a worker that a conversation has work."""
        note = Note(key, self._clock(), settings_of(config), everything=everything)
        await self._work.note(note)

    async def work_through(
        self, note: Note, config: ShortTermMemoryConfig, summarizer: Callable[..., object]
    ) -> float | None:
        """Do for a worker what a note says is due; see `Maintenance.work_through`."""
        maintenance = self.of(note.key)
        # What it knows of the lease of another process, and of its own failures, is needed at the next note.
        self._worked[note.key] = maintenance
        maintenance.use(config, summarizer, given=GIVEN)
        timeout = max(JOB_S, maintenance.lease_s)
        return await maintenance.work_through(everything=note.everything, timeout=timeout)

    async def _forget(self, touches: Touches, key: MemoryKey, *, ttl: float | None) -> None:
        """Remove content that an edit has deleted from searches and lists of conversations."""
        directory, owner = Directory(self._driver, self._codec), (key.tenant_id, key.user_id)
        await WordIndex(self._driver, self._codec, directory, owner).forget(keys.card_key(key).name)
        await touches.again(key, ttl=ttl)

    def start_over(self) -> None:
        """Forget what was done on an event loop that has ended; the next call that sees work starts it."""
        self.open()
        for each in [*self._each.values()]:
            each.start_over()

    def open(self) -> None:
        """Allow work to begin, also after a `close`."""
        self._schedule.closed = False

    async def close(self, *, timeout: float) -> None:
        """Stop all background work; running work may finish within `timeout` seconds. Releases the leases.

        None begins until `open`. Takes no longer than that and a few operations. A cancellation ends the
        waiting for summaries; the rest is still done.
        """
        deadline = self._driver.traits.deadline
        self._schedule.closed = True
        for one in [*self._each.values()]:
            # Those that only wait need not be closed, unless a memory object refers to them.
            one.cancel_plan()
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
                # The tasks that they cancel release their leases, which needs the driver.
                await asyncio.wait(late, timeout=1.0 + deadline)
        for task in closings:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                logger.warning(
                    "closing a memory failed: %s", type(error).__name__, exc_info=logs.shown(error)
                )
