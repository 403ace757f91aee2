"""The results of a replay, combined from the reports of its pods and the stored turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.ledger import estimate_turns, marked, unmarked
from stm_backends.cli.replay.pods import Setup
from stm_backends.cli.replay.readback import ReadBack
from stm_backends.cli.replay.run import PodReport, RunReport
from stm_backends.cli.replay.verify import Findings
from stm_backends.memory.view import shown_turn


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one pod's calls, in milliseconds; NaN without calls. `pod` may name several pods."""

    pod: str
    killed: bool
    turns: int
    add_p50: float
    add_p99: float
    read_p50: float
    read_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The counts of a replay, and the problems that were found.

    `newest` is the number of turns of a conversation that the strategy keeps; `None` means all. `transcript`
    has the problems of the transcripts, which keep all, and `in_transcript` counts their turns. `waiting`
    turns are in pages and in no summary, and `waiting_reads` counts the reads that did not show some of them.
    `tokens_with` and `tokens_without` count the contexts that the LLM receives, one before each turn.
    `seconds` is the time for adding turns; `seconds_in_all` includes final summaries and reading back.
    `latencies` begins with those of all pods together; `killed_together` combines the killed pods.
    """

    backend: str
    strategy: str
    newest: int | None
    pods: int
    conversations: int
    turns: int
    found: Findings
    transcript: Findings
    in_transcript: int
    bad_reads: int
    waiting_reads: int
    kill_every: float | None
    killed: int
    sent_again: int
    summaries: int
    lost_races: int
    summarizer_calls: int
    summarized: int
    in_full: int
    pending: int
    waiting: int
    tokens_with: int
    tokens_without: int
    summarizer_tokens_read: int
    summarizer_tokens_written: int
    seconds: float
    seconds_in_all: float
    latencies: Sequence[Latency]
    killed_together: Latency

    @property
    def ok(self) -> bool:
        """True if all acknowledged turns were stored once and in order, at the end and at every read."""
        return not self.found and not self.transcript and not self.bad_reads

    @property
    def let_go(self) -> int:
        """The number of turns that the strategy dropped from the records; the transcripts keep them."""
        return 0 if self.newest is None else self.turns - self.in_full - self.found.lost

    @property
    def turns_per_second(self) -> float:
        return self.turns / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            **dataclasses.asdict(self),
            "latencies": [_as_json(one) for one in self.latencies],
            "killed_together": _as_json(self.killed_together),
            "turns_per_second": self.turns_per_second,
            "ok": self.ok,
        }


def put_together(
    setup: Setup,
    conversations: Sequence[Conversation],
    run: RunReport,
    read: ReadBack,
    *,
    backend: str,
    pods: int,
    kill_every: float | None,
    seconds_in_all: float,
) -> Report:
    """Return the report of a completed replay."""
    latencies = [
        _latency(f"{pod.number}", [pod.add_ms], [pod.read_ms], killed=pod.killed) for pod in run.pods
    ]
    overall = _together("all", run.pods)
    killed = [pod for pod in run.pods if pod.killed]
    stats = run.stats + read.stats
    return Report(
        backend=backend,
        strategy=setup.config.strategy,
        newest=setup.newest,
        pods=pods,
        conversations=len(conversations),
        turns=run.turns,
        found=read.findings,
        transcript=read.transcript,
        in_transcript=read.in_transcript,
        bad_reads=run.bad_reads,
        waiting_reads=run.waiting_reads,
        kill_every=kill_every,
        killed=run.killed,
        sent_again=run.sent_again,
        summaries=stats["summaries"],
        lost_races=stats["lost_races"],
        summarizer_calls=stats["summarizer_calls"],
        summarized=read.summarized,
        in_full=read.in_full,
        pending=read.pending,
        waiting=read.waiting,
        tokens_with=run.tokens,
        tokens_without=sum(_whole_history(setup, conversation) for conversation in conversations),
        summarizer_tokens_read=stats["tokens_read"],
        summarizer_tokens_written=stats["tokens_written"],
        seconds=run.seconds,
        seconds_in_all=seconds_in_all,
        latencies=[overall, *latencies],
        killed_together=_together(f"killed ({len(killed)})", killed),
    )


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of all values; NaN without values."""
    if not sorted_values:
        return math.nan
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]


def _as_json(latency: Latency) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in dataclasses.asdict(latency).items()
    }


def _together(name: str, pods: Sequence[PodReport]) -> Latency:
    return _latency(name, [pod.add_ms for pod in pods], [pod.read_ms for pod in pods])


def _latency(
    pod: str, add: Iterable[Sequence[float]], read: Iterable[Sequence[float]], *, killed: bool = False
) -> Latency:
    adds = sorted(value for values in add for value in values)
    reads = sorted(value for values in read for value in values)
    return Latency(
        pod,
        killed,
        len(adds),
        percentile(adds, 0.5),
        percentile(adds, 0.99),
        percentile(reads, 0.5),
        percentile(reads, 0.99),
    )


def _whole_history(setup: Setup, conversation: Conversation) -> int:
    """Return the tokens sent if the context contained all earlier turns each time."""
    total = history = 0
    for place, turn in enumerate(conversation.turns):
        total += history
        shown = shown_turn(marked(turn, conversation.session, place), setup.config)
        history += estimate_turns([unmarked(shown)])
    return total
