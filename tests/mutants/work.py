"""Workers with a mistake each, which the simulation of processes and workers must notice."""

from __future__ import annotations

import asyncio
from typing import Any

from stm_backends.work.policy import Job
from stm_backends.work.worker import Worker


class DoneOnceTaken(Worker):
    """Says that a job is done when it begins, so that a worker that is killed takes its notes along."""

    def _start(self, job: Job) -> None:
        self._done[job.shard] |= job.ids
        super()._start(job)


class NotesNoRetry(Worker):
    """Counts a job as done whose summarizer has failed, although the record says when to try again."""

    async def _do(self, job: Job) -> None:
        work = self._work

        async def for_good(note: Any) -> None:
            await work(note)

        self._work = for_good
        try:
            await super()._do(job)
        finally:
            self._work = work


class TakesWhatArrives(Worker):
    """Counts notes as done that arrived after the conversation was last loaded."""

    async def _do(self, job: Job) -> None:
        await super()._do(job)
        await asyncio.sleep(3.0)
        look = await self._queue.look(job.shard)
        notes = () if look is None else look.notes
        self._done[job.shard] |= {one.id for one in notes if one is not None and one.key == job.note.key}


WORKERS = (DoneOnceTaken, NotesNoRetry, TakesWhatArrives)
