"""A worker: takes jobs from the queue, has them done, and says so.

It looks at all shards, picks jobs, and writes what it takes. A write that succeeds starts them. What is done
is said by the next write to the shard. So a worker that dies leaves only notes that are still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from stm_backends import logs
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import Corrupt, StmError, StorageError, TooLarge
from stm_backends.races import pause
from stm_backends.records import keys
from stm_backends.work import notes, policy
from stm_backends.work.notes import Note
from stm_backends.work.policy import RENEW_S, Held, Job
from stm_backends.work.queue import Look, WorkQueue

if TYPE_CHECKING:
    from stm_backends.telemetry.observer import Observer

logger = logging.getLogger("stm_backends")

T = TypeVar("T")

Work: TypeAlias = Callable[[Note], Awaitable[float | None]]
"""Does the work of a note; returns after how many seconds more is due, and `None` if nothing is."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""The pause between two looks while there is nothing to take: doubling, with jitter."""

LIST_S: Final = 15.0
"""The interval, in seconds, between two listings of the shards."""

AWAY_S: Final = 2.0
"""The pause, in seconds, after the datastore has failed."""

TRIES: Final = 8
"""The number of attempts at a conversation that cannot be read before its notes are given up."""

LAST_S: Final = 1.0
"""The time, in seconds, that cancelled jobs have to end."""


class Worker:
    """Takes notes from a queue until it is stopped; use each object for one `run`.

    `concurrency` is the number of jobs at a time. With `tenants`, those of other tenants are left to other
    workers. `drain_s` is how long running jobs may go on after `stop`. `on_look` is called after each look at
    the whole queue, for a probe.
    """

    def __init__(
        self,
        queue: WorkQueue,
        work: Work,
        *,
        observer: Observer,
        concurrency: int = 8,
        tenants: Collection[str] = (),
        drain_s: float = 25.0,
        on_look: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id: Final = os.urandom(4).hex()
        self._queue = queue
        self._work = work
        self._observer = observer
        self._places = concurrency
        self._tenants = frozenset(tenants)
        self._drain_s = drain_s
        self._on_look = on_look
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], Job] = {}
        self._done: defaultdict[str, set[str]] = defaultdict(set)
        self._written: dict[str, float] = {}
        self._looks: dict[str, Look] = {}
        self._first_seen: dict[tuple[str, str], tuple[float, float]] = {}
        self._spilled: list[str] = []
        self._list_at = 0.0
        self._stopped = asyncio.Event()
        self._news = asyncio.Event()
        self._due = 0
        self._failed = False

    def stop(self) -> None:
        """Have `run` take nothing more, and end once running jobs have, within `drain_s` seconds."""
        self._stopped.set()
        self._news.set()

    async def run(self, *, until_empty: bool = False) -> None:
        """Work until `stop`; with `until_empty`, until nothing that this worker takes is due.

        An outage of the datastore is waited for. A cancellation ends running jobs at once.
        """
        idle, patient = 0, True
        try:
            while not self._stopped.is_set():
                self._news.clear()
                acted = await self._round()
                if until_empty and acted is not None and not (acted or self._due or self._tasks):
                    return
                idle = 0 if acted else min(idle + 1, 10)
                if not acted:
                    await self._rest(AWAY_S if acted is None else pause(FIRST_PAUSE_S, idle, LONGEST_PAUSE_S))
        except asyncio.CancelledError:
            patient = False
            raise
        finally:
            await self._drain(self._drain_s if patient else 0.0)

    # One look at the whole queue

    async def _round(self) -> bool | None:
        """Look at all shards and take jobs; returns whether any were taken, `None` if a shard failed."""
        self._failed = False
        try:
            shards = await self._shards()
        except StorageError as error:
            logger.warning("a worker could not list the queue of work: %s", error)
            return None
        found = await all_of(self._tried(self._look(shard)) for shard in shards)
        looks, now = [look for look in found if look is not None], self._clock()
        jobs = [job for look in looks for job in self._jobs(look)]
        self._due = sum(job.due <= now and self._wants(job) for job in jobs)
        self._observer.work_waits(len(jobs), policy.lag_of(jobs, now=now))
        picked = list[Job]()
        if not self._stopped.is_set():
            at_work = Counter(job.tenant for job in self._tasks.values())
            wanted = filter(self._wants, jobs)
            picked = policy.pick(wanted, now=now, places=self._places, at_work=at_work)
        of = defaultdict[str, list[Job]](list)
        for job in picked:
            of[job.shard].append(job)
        taken = await all_of(self._tried(self._say(look, of[look.shard])) for look in looks)
        if self._failed:
            return None
        if self._on_look is not None:
            self._on_look()
        return any(taken)

    def _wants(self, job: Job) -> bool:
        return not self._tenants or job.tenant in self._tenants

    async def _tried(self, work: Awaitable[T]) -> T | None:
        """Return the result of an operation on one shard, so that the others do not depend on it."""
        try:
            return await work
        except StorageError as error:
            logger.warning("a worker could not read or write the queue of work: %s", error)
            self._failed = True
            return None

    async def _shards(self) -> list[str]:
        """Return the shards, and further records that a listing has found."""
        now = asyncio.get_running_loop().time()
        if now >= self._list_at:
            self._spilled = [name for name in await self._queue.shards() if name not in notes.shards()]
            self._list_at = now + LIST_S
        return [*notes.shards(), *self._spilled]

    async def _look(self, shard: str) -> Look | None:
        look = await self._queue.look(shard, self._looks.get(shard))
        if look is None:
            self._looks.pop(shard, None)
            return None
        self._looks[shard] = look
        moment = asyncio.get_running_loop().time()
        for worker, held in look.state.held.items():
            at, _ = self._first_seen.get((shard, worker), (None, 0.0))
            if at != held.at:
                self._first_seen[shard, worker] = held.at, moment
        for one in [*self._first_seen]:
            if one[0] == shard and one[1] not in look.state.held:
                del self._first_seen[one]
        return look

    def _jobs(self, look: Look) -> list[Job]:
        now, moment = self._clock(), asyncio.get_running_loop().time()

        def ended(worker: str, held: Held) -> bool:
            _, first = self._first_seen.get((look.shard, worker), (0.0, moment))
            return policy.lease_ended(held.at, now=now, known_for=moment - first)

        mine = self._mine(look.shard) | self._done[look.shard]
        return policy.jobs_of(look.shard, look.state, look.notes, worker=self.id, mine=mine, ended=ended)

    def _mine(self, shard: str) -> set[str]:
        """Return the ids of notes that this worker works on."""
        return {one for job in self._tasks.values() if job.shard == shard for one in job.ids}

    async def _say(self, look: Look, jobs: list[Job]) -> bool:
        """Write what is taken and what is done, and start what was taken; returns whether any was."""
        shard, moment = look.shard, asyncio.get_running_loop().time()
        mine, done = self._mine(shard), frozenset(self._done[shard])
        taken = {one for job in jobs for one in job.ids}
        now = self._clock()
        known = replace(look.state, done=look.state.done | done)
        waiting = policy.in_the_way(known, look.notes, now=now, busy=mine | taken)
        for note in waiting:
            await self._queue.add(note.later(note.due, tries=note.tries))
        done |= {note.id for note in waiting}
        renews = mine and moment - self._written.get(shard, moment) >= RENEW_S
        if not (taken or done or renews):
            return False
        state, drop = policy.said(
            look.state,
            look.notes,
            worker=self.id,
            now=now,
            holds=mine | taken,
            done=done,
            max_drop=self._queue.max_drop,
        )
        try:
            # Its version is another now, so the next look reads it again.
            stored = await self._queue.say(look, state, drop=drop)
        except TooLarge:
            # A full shard may have no room for what is said. Its oldest jobs make room, and are done without
            # a lease, perhaps by another worker, too. What is done is said once enough notes go with it.
            self._start_all(jobs)
            return bool(jobs)
        if not stored:
            return False
        self._done[shard] -= done
        self._written[shard] = moment
        self._start_all(jobs)
        return bool(jobs)

    # One job

    def _start_all(self, jobs: list[Job]) -> None:
        if not self._stopped.is_set():
            for job in jobs:
                self._start(job)

    def _start(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._do(job), name="stm-work")
        self._tasks[task] = job
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a job of a worker failed: %s", type(error).__name__, exc_info=logs.shown(error))

    async def _do(self, job: Job) -> None:
        """Do the work; add a note for what is due later, and only then count this one as done."""
        note = job.note
        try:
            later, tries = await self._work(note), 0
        except Exception as error:  # an unexpected failure must not repeat without end
            if isinstance(error, StorageError) and not isinstance(error, Corrupt):
                logger.warning("a worker could not do its work: %s (%s)", error, _named(note))
                # The notes stay, and are taken again.
                await asyncio.sleep(AWAY_S)
                return
            tries = note.tries + 1
            later = min(2.0 ** (tries + 3), 3_600.0) if tries < TRIES else None
            logger.error(
                "a worker could not do its work: %s; it %s (%s)",
                error if isinstance(error, StmError) else type(error).__name__,
                "is given up until the next note" if later is None else "will be tried again",
                _named(note),
                exc_info=logs.shown(error),
            )
        if later is not None:
            try:
                await self._queue.add(note.later(self._clock() + later, tries=tries))
            except StorageError as error:
                logger.warning("a worker could not note a retry: %s (%s)", error, _named(note))
                await asyncio.sleep(AWAY_S)
                return
        self._done[job.shard] |= job.ids
        self._observer.work("done" if later is None else "later", 1)

    async def _rest(self, seconds: float) -> None:
        """Wait so long, or until a job or this worker has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    # The end

    async def _drain(self, timeout: float) -> None:
        """Let running jobs end, and give back what is not done."""
        self._stopped.set()
        until = asyncio.get_running_loop().time() + timeout
        while self._tasks and (left := until - asyncio.get_running_loop().time()) > 0:
            # Leases are renewed, and what is done is said.
            await asyncio.wait({*self._tasks}, timeout=min(left, RENEW_S))
            await self._round()
        late = {*self._tasks}
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST_S)
        self._tasks.clear()
        for shard in {*self._looks, *self._done}:
            await self._give_back(shard)

    async def _give_back(self, shard: str) -> None:
        """Say what is done in a shard, and that nothing there is held; without that, the lease ends."""
        try:
            for _ in range(3):
                look = await self._queue.look(shard)
                if look is None or not (self._done[shard] or self.id in look.state.held):
                    return
                state, drop = policy.said(
                    look.state,
                    look.notes,
                    worker=self.id,
                    now=self._clock(),
                    holds=(),
                    done=self._done[shard],
                    max_drop=self._queue.max_drop,
                )
                if await self._queue.say(look, state, drop=drop):
                    return
        except StorageError as error:
            logger.warning("a worker could not give back what it held; that is taken over: %s", error)


def _named(note: Note) -> str:
    return f"conversation {keys.log_name(keys.memory_key(note.key))}"
