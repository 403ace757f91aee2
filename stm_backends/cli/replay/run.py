"""Replay conversations on several pods at once, each a process, killing some if asked to."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.dispatch import Dispatch
from stm_backends.cli.replay.ledger import Place
from stm_backends.cli.replay.pods import Done, Ended, Failed, Ready, Setup, Work, serve
from stm_backends.errors import StmError

_TRIES: Final = 20
"""Maximum number of attempts of a turn before the replay fails."""

_START_S: Final = 60.0
_STOP_S: Final = 30.0

_CONVERSATIONS_PER_POD: Final = 16


class ReplayFailed(StmError):
    """The replay could not continue."""


@dataclass(slots=True)
class PodReport:
    """The results of one pod; times are in milliseconds."""

    number: int
    killed: bool = False
    add_ms: array[float] = field(default_factory=lambda: array("d"))
    read_ms: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class RunReport:
    """The results of all pods together; `seconds` is the time for adding turns.

    `bad_reads` counts reads before a turn that did not account for all earlier turns, and `waiting_reads`
    those during which turns waited in pages for a summary. `sent_again` counts retries of turns that were not
    acknowledged. `stats` are the memories' own counts, without those that killed pods could not report.
    """

    turns: int = 0
    seconds: float = 0.0
    tokens: int = 0
    sent_again: int = 0
    bad_reads: int = 0
    waiting_reads: int = 0
    stats: Counter[str] = field(default_factory=Counter[str])
    pods: list[PodReport] = field(default_factory=list[PodReport])

    @property
    def killed(self) -> int:
        return sum(pod.killed for pod in self.pods)


@contextlib.contextmanager
def _interrupts_ignored() -> Generator[None]:
    """Make a process that is started here ignore Ctrl-C, which reaches the whole process group."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _PodProcess:
    """A process, its pipe and its unacknowledged turns.

    `slot` is its number among the running pods; its replacement gets the same.
    """

    def __init__(self, number: int, slot: int, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=serve, args=(setup, theirs), name=f"pod-{number}", daemon=True
        )
        with _interrupts_ignored():
            self.process.start()
        theirs.close()
        self.slot = slot
        self.report = PodReport(number)
        self.holds: dict[tuple[str, Place], Work] = {}
        self.ready_by: float | None = time.monotonic() + _START_S

    def hand(self, work: Work) -> None:
        self.holds[work.session, work.place] = work
        self.send(work)

    def stop(self) -> None:
        self.send(None)

    def send(self, message: Work | None) -> None:
        # A pod that was just killed no longer reads; the closed pipe shows that it has ended.
        with contextlib.suppress(ConnectionError):
            self.pipe.send(message)

    def kill(self) -> None:
        self.process.kill()
        self.report.killed = True


class Replay:
    """One run of conversations over `pods` processes, each working on `concurrency` turns at once.

    A pod is killed and a new one started once all have worked for `kill_every` seconds, so that work goes on
    however long the start of a pod takes. `on_turn` is called after each acknowledged turn.
    """

    def __init__(
        self,
        setup: Setup,
        conversations: Sequence[Conversation],
        *,
        pods: int,
        concurrency: int,
        kill_every: float | None = None,
        on_turn: Callable[[RunReport], None] = lambda report: None,
    ) -> None:
        self._setup = setup
        self._dispatch = Dispatch(
            conversations, pods=pods, at_once=pods * max(_CONVERSATIONS_PER_POD, concurrency)
        )
        self._count = pods
        self._concurrency = concurrency
        self._kill_every = kill_every
        self._on_turn = on_turn
        self._report = RunReport()
        self._pods: dict[connection.Connection, _PodProcess] = {}
        self._free: deque[_PodProcess] = deque()
        self._tries: Counter[str] = Counter()

    def run(self) -> RunReport:
        """Add every turn. Raises `ReplayFailed` if a pod ends unexpectedly or a turn cannot be added."""
        try:
            for slot in range(self._count):
                self._start_pod(slot)
            self._add_all()
            self._stop_all()
        finally:
            for pod in self._pods.values():
                pod.process.kill()
                pod.process.join()
        return self._report

    def _start_pod(self, slot: int) -> None:
        pod = _PodProcess(len(self._report.pods) + 1, slot, self._setup)
        self._pods[pod.pipe] = pod
        self._report.pods.append(pod.report)

    def _add_all(self) -> None:
        start: float | None = None
        interval, next_kill = self._kill_every or float("inf"), float("inf")
        while not self._dispatch.finished:
            self._receive(timeout=min(0.2, max(0.0, next_kill - time.monotonic())))
            now = time.monotonic()
            if start is None and self._free:
                start = now
            self._hand_out()
            if now >= next_kill:
                self._kill_one()
                next_kill = float("inf")
            if any(pod.ready_by is not None for pod in self._pods.values()):
                next_kill = float("inf")
            else:
                next_kill = min(next_kill, now + interval)
        self._report.seconds = time.monotonic() - (start or time.monotonic())

    def _hand_out(self) -> None:
        idle: set[int] = set()
        for _ in range(len(self._free)):
            pod = self._free.popleft()
            if pod.report.killed:
                continue
            work = None if pod.slot in idle else self._dispatch.take(pod.slot)
            if work is None:
                idle.add(pod.slot)
                self._free.append(pod)
            else:
                pod.hand(work)

    def _kill_one(self) -> None:
        working = [pod for pod in self._pods.values() if pod.holds and not pod.report.killed]
        if working:
            pod = random.choice(working)
            pod.kill()
            self._start_pod(pod.slot)

    def _stop_all(self) -> None:
        for pod in self._pods.values():
            pod.stop()
        until = time.monotonic() + _STOP_S
        while self._pods and time.monotonic() < until:
            self._receive(timeout=0.2, stopping=True)
        if self._pods:
            raise ReplayFailed(f"{len(self._pods)} pods did not end within {_STOP_S:g} s")

    # Messages from pods

    def _receive(self, *, timeout: float, stopping: bool = False) -> None:
        heard = set(connection.wait(list(self._pods), timeout))
        for pod in [pod for pipe, pod in self._pods.items() if pipe in heard]:
            try:
                message: Any = pod.pipe.recv()
            except (EOFError, OSError):
                # A kill may leave an incomplete message, which ends like the pipe.
                self._gone(pod, stopping=stopping)
            else:
                self._heard(pod, message, stopping=stopping)
        for pod in self._pods.values():
            if pod.ready_by is not None and time.monotonic() > pod.ready_by:
                raise ReplayFailed(f"pod {pod.report.number} did not start within {_START_S:g} s")

    def _heard(self, pod: _PodProcess, message: object, *, stopping: bool) -> None:
        match message:
            case Ready():
                pod.ready_by = None
                self._free.extend([pod] * self._concurrency)
            case Done():
                self._done(pod, message)
            case Failed(session, place, reason, again):
                del pod.holds[session, place]
                self._free.append(pod)
                self._again(session, reason if not again else "")
            case Ended(stats, reason):
                self._report.stats.update(stats)
                if reason or not stopping:
                    raise ReplayFailed(f"pod {pod.report.number} ended: {reason or 'for an unknown reason'}")
            case _:
                raise AssertionError(message)

    def _done(self, pod: _PodProcess, done: Done) -> None:
        del pod.holds[done.session, done.place]
        pod.report.add_ms.append(done.add_ms)
        pod.report.read_ms.append(done.read_ms)
        self._report.turns += 1
        self._report.tokens += done.tokens
        self._report.bad_reads += bool(done.read)
        self._report.waiting_reads += bool(done.waiting)
        self._report.stats.update(done.stats)
        self._tries.pop(done.session, None)
        self._dispatch.acknowledged(done.session)
        self._free.append(pod)
        self._on_turn(self._report)

    def _gone(self, pod: _PodProcess, *, stopping: bool) -> None:
        del self._pods[pod.pipe]
        pod.pipe.close()
        pod.process.join()
        if not (pod.report.killed or stopping):
            raise ReplayFailed(
                f"pod {pod.report.number} ended unexpectedly, exit code {pod.process.exitcode}"
            )
        for work in pod.holds.values():
            self._again(work.session, "")

    def _again(self, session: str, final: str) -> None:
        self._tries[session] += 1
        if final or self._tries[session] >= _TRIES:
            raise ReplayFailed(f"a turn could not be added: {final or 'no pod acknowledged it'}")
        self._report.sent_again += 1
        self._dispatch.unanswered(session)
