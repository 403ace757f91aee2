"""A replay kills a pod only while all others work, however long the start of a pod takes."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import Pipe
from typing import ClassVar

import pytest

from stm_backends import ConversationTurn, MemoryBudget, ShortTermMemoryConfig
from stm_backends.cli.replay import run
from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.pods import Done, Ended, Ready, Setup, Work
from stm_backends.cli.replay.run import PodReport, Replay
from stm_backends.cli.replay.verify import Findings

KILL_EVERY_S = 0.02
START_S = 0.1
"""A pod takes longer to start than is between two kills."""

SETUP = Setup(
    backend="sqlite",
    url=None,
    tenant="demo",
    user="replay",
    config=ShortTermMemoryConfig("rolling_summary", MemoryBudget(2)),
)


class Process:
    """What a replay asks of a process."""

    exitcode = 0

    def kill(self) -> None:
        """Nothing is running."""

    def join(self) -> None:
        """Nothing is running."""


class SlowToStart:
    """A pod that adds each turn at once, and takes its time to start."""

    all: ClassVar[list[SlowToStart]] = []
    starting_at_a_kill: ClassVar[list[int]] = []

    def __init__(self, number: int, slot: int, setup: Setup) -> None:
        del setup
        self.pipe, self._theirs = Pipe()
        # A timer that sends while the pipe is closed could write to the next one with that file descriptor.
        self._sending = threading.Lock()
        self.process = Process()
        self.slot = slot
        self.report = PodReport(number)
        self.holds: dict[tuple[str, int], Work] = {}
        self.ready_by: float | None = float("inf")
        threading.Timer(START_S, self._say, [Ready()]).start()
        self.all.append(self)

    def hand(self, work: Work) -> None:
        self.holds[work.session, work.place] = work
        done = Done(work.session, work.place, 1.0, 1.0, 1, Findings(), 0, {})
        threading.Timer(0.005, self._say, [done]).start()

    def stop(self) -> None:
        self._say(Ended({}))
        self._close()

    def kill(self) -> None:
        self.starting_at_a_kill.append(sum(pod.ready_by is not None for pod in self.all))
        self.report.killed = True
        self._close()

    def _say(self, message: object) -> None:
        # A pod that was killed says nothing any more.
        with self._sending, contextlib.suppress(OSError):
            self._theirs.send(message)

    def _close(self) -> None:
        with self._sending:
            self._theirs.close()


def test_a_pod_is_killed_only_once_all_others_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PodProcess", SlowToStart)
    turns = tuple(ConversationTurn(f"u{number}", "Yes.") for number in range(60))
    report = Replay(SETUP, [Conversation("a", turns)], pods=3, concurrency=1, kill_every=KILL_EVERY_S).run()
    assert report.turns == 60
    assert len(SlowToStart.starting_at_a_kill) == report.killed >= 3
    assert not any(SlowToStart.starting_at_a_kill)
