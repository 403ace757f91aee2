"""One pod of a replay: a process with its own backend that adds the turns it receives.

It communicates with its parent over a pipe: it receives work and reports the outcome of each turn at once, so
that the parent knows everything a pod has done when it is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from stm_backends.backend import Backend, open_backend
from stm_backends.cli.replay.ledger import LedgerSummarizer, places_in, tokens_of
from stm_backends.cli.replay.verify import Findings, compare
from stm_backends.drivers.bounded import Bounded
from stm_backends.errors import OutcomeUnknown, StmError, Unavailable
from stm_backends.memory import policy
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.sealing.naming import load_sealing
from stm_backends.types import ConversationTurn, MemoryKey, ShortTermMemoryConfig

_MEMORIES_HELD: Final = 256

_STATS_EVERY_S: Final = 0.25
"""Interval at which a pod reports the counts of its memories; a killed pod loses the counts since then."""

SMALLEST_SUMMARY: Final = 64
"""The smallest `summary_max_tokens` with room for a ledger and some text."""

_LEDGER_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The backend and configuration that every process of a replay uses."""

    backend: str
    url: str | None
    tenant: str
    user: str
    config: ShortTermMemoryConfig
    sealing: str | None = None

    def open(self, *, create: bool = False) -> Backend:
        """Return the backend, not opened yet."""
        return open_backend(self.backend, url=self.url, create=create, sealing=load_sealing(self.sealing))

    def key(self, session: str) -> MemoryKey:
        return MemoryKey(self.tenant, self.user, session)

    def memory(
        self, backend: Backend, session: str, *, spent: Counter[str] | None = None
    ) -> DistributedShortTermMemory:
        """Return the memory of one conversation, with a summarizer that writes its ledger.

        The tokens that the summarizer reads and writes are added to `spent`.
        """
        room = self.config.budget.summary_max_tokens - _LEDGER_TOKENS
        summarizer = LedgerSummarizer(ExtractiveSummarizer(max_tokens=room), session, spent=spent)
        return backend.memory(self.key(session), self.config, summarizer=summarizer)

    def lease_s(self, deadline: float) -> float:
        """Return how long a lease outlives its holder, on a backend with this deadline."""
        return policy.lease_s(self.config, deadline)

    @property
    def newest(self) -> int | None:
        """The number of newest turns that the strategy keeps; `None` for all."""
        match self.config.strategy:
            case "none":
                return 0
            case "truncation":
                return self.config.budget.full_zone_turns
            case "rolling_summary":
                return None


class Work(NamedTuple):
    """Add this turn, which has this `place` in its conversation; all earlier ones are acknowledged."""

    session: str
    place: int
    turn: ConversationTurn


class Ready(NamedTuple):
    """The pod has opened its backend."""


class Done(NamedTuple):
    """A turn was acknowledged; times are milliseconds.

    `read` has the problems of the read before the turn, and `waiting` counts the turns that it did not show
    because they waited in pages for a summary. `stats` has the counts of the pod's memories since the last
    report.
    """

    session: str
    place: int
    add_ms: float
    read_ms: float
    tokens: int
    read: Findings
    waiting: int
    stats: Mapping[str, int]


class Failed(NamedTuple):
    """A turn was not acknowledged. `again` is true if it is to be retried."""

    session: str
    place: int
    reason: str
    again: bool


class Ended(NamedTuple):
    """The pod has closed its backend; `reason` says why, if it was not asked to."""

    stats: Mapping[str, int]
    reason: str = ""


def serve(setup: Setup, pipe: Connection) -> None:
    """Work until asked to stop, or until the parent process has ended."""
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("stm_backends").setLevel(logging.ERROR)
    try:
        asyncio.run(_Pod(setup, pipe).run())
    except* ConnectionError:
        # The parent has ended, so there is nothing to report to.
        pass


@dataclass(slots=True)
class _Held:
    memory: DistributedShortTermMemory
    reported: Counter[str] = field(default_factory=Counter[str])

    def news(self) -> Counter[str]:
        """Return the counts of the memory since the last call."""
        stats = Counter[str](dataclasses.asdict(self.memory.stats))
        news, self.reported = stats - self.reported, stats
        return news


class _Pod:
    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self._setup = setup
        self._pipe = pipe
        self._held: Bounded[str, _Held] = Bounded(_MEMORIES_HELD, forgotten=self._forgotten)
        self._news: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()
        self._told = time.monotonic()

    async def run(self) -> None:
        try:
            async with self._setup.open() as backend:
                self._pipe.send(Ready())
                async with asyncio.TaskGroup() as tasks:
                    while (work := await asyncio.to_thread(self._receive)) is not None:
                        tasks.create_task(self._handle(backend, work))
            reason = ""
        except StmError as error:
            reason = f"{type(error).__name__}: {error}"
        self._pipe.send(Ended(self._stats(), reason))

    def _receive(self) -> Work | None:
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    async def _handle(self, backend: Backend, work: Work) -> None:
        held = self._hold(backend, work.session)
        try:
            start = time.perf_counter()
            context = await held.memory.get_llm_context()
            read, waiting = time.perf_counter(), held.memory.waiting
            turn = dataclasses.replace(work.turn, ts=time.time())
            add = time.perf_counter()
            await held.memory.add_turn(turn, turn_id=f"{work.session}#{work.place}")
            end = time.perf_counter()
        except StmError as error:
            again = isinstance(error, (Unavailable, OutcomeUnknown))
            self._pipe.send(Failed(work.session, work.place, f"{type(error).__name__}: {error}", again=again))
            return
        shown: Mapping[str, Any] = context.get("conversation_memory", {})
        found = compare(
            places_in(shown, work.session, waiting=waiting),
            acknowledged=work.place,
            # Another pod may have added this turn and died before it reported it.
            added=work.place + 1,
            newest=self._setup.newest,
        )
        self._pipe.send(
            Done(
                work.session,
                work.place,
                add_ms=(end - add) * 1e3,
                read_ms=(read - start) * 1e3,
                tokens=tokens_of(shown),
                read=found,
                waiting=waiting,
                stats=self._stats_now_and_then(),
            )
        )

    def _hold(self, backend: Backend, session: str) -> _Held:
        held = self._held.use(session)
        if held is None:
            memory = self._setup.memory(backend, session, spent=self._spent)
            held = self._held[session] = _Held(memory)
        return held

    def _forgotten(self, session: str, held: _Held) -> None:
        del session
        self._news += held.news()

    def _stats_now_and_then(self) -> Counter[str]:
        if time.monotonic() - self._told < _STATS_EVERY_S:
            return Counter()
        return self._stats()

    def _stats(self) -> Counter[str]:
        """Return the counts of all memories since the last call."""
        self._told = time.monotonic()
        for held in self._held.values():
            self._news += held.news()
        news, self._news = self._news + self._spent, Counter()
        self._spent.clear()
        return news
