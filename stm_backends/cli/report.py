"""The numbers of a replay, put together from what its pods said and what was read back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stm_backends.cli.conversations import Conversation
from stm_backends.cli.ledger import estimate_turns, marked, unmarked
from stm_backends.cli.pods import Setup
from stm_backends.cli.readback import ReadBack
from stm_backends.cli.replay import RunReport
from stm_backends.cli.verify import Findings
from stm_backends.policy import shown_turn


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one process's calls took, in milliseconds; NaN if it made none."""

    process: str
    killed: bool
    turns: int
    add_p50: float
    add_p99: float
    read_p50: float
    read_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay did, and what is wrong with what it left, if anything."""

    backend: str
    strategy: str
    pods: int
    conversations: int
    turns: int
    found: Findings
    bad_reads: int
    killed: int
    sent_again: int
    summaries: int
    lost_races: int
    summarizer_calls: int
    summarized: int
    in_full: int
    pending: int
    tokens_with: int
    tokens_without: int
    seconds: float
    latencies: Sequence[Latency]

    @property
    def ok(self) -> bool:
        """Whether all that was acknowledged is there, once and in order, and was at every read."""
        return not self.found and not self.bad_reads

    @property
    def turns_per_second(self) -> float:
        return self.turns / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        latencies = [
            {name: None if value != value else value for name, value in dataclasses.asdict(one).items()}  # noqa: PLR0124 -- NaN
            for one in self.latencies
        ]
        return {
            **dataclasses.asdict(self),
            "latencies": latencies,
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
) -> Report:
    """Return the report of a replay that ran to its end."""
    latencies = [
        _latency(f"pod {pod.number}", [pod.add_ms], [pod.read_ms], killed=pod.killed) for pod in run.pods
    ]
    overall = _latency("all", [pod.add_ms for pod in run.pods], [pod.read_ms for pod in run.pods])
    return Report(
        backend=backend,
        strategy=setup.config.strategy,
        pods=pods,
        conversations=len(conversations),
        turns=run.turns,
        found=read.findings,
        bad_reads=run.bad_reads,
        killed=run.killed,
        sent_again=run.sent_again,
        summaries=run.stats["summaries"] + read.stats["summaries"],
        lost_races=run.stats["lost_races"] + read.stats["lost_races"],
        summarizer_calls=run.stats["summarizer_calls"] + read.stats["summarizer_calls"],
        summarized=read.summarized,
        in_full=read.in_full,
        pending=read.pending,
        tokens_with=run.tokens,
        tokens_without=sum(_whole_history(setup, conversation) for conversation in conversations),
        seconds=run.seconds,
        latencies=[overall, *latencies],
    )


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of all; NaN of none."""
    if not sorted_values:
        return math.nan
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]


def _latency(
    process: str, add: Iterable[Sequence[float]], read: Iterable[Sequence[float]], *, killed: bool = False
) -> Latency:
    adds = sorted(value for values in add for value in values)
    reads = sorted(value for values in read for value in values)
    return Latency(
        process,
        killed,
        len(adds),
        percentile(adds, 0.5),
        percentile(adds, 0.99),
        percentile(reads, 0.5),
        percentile(reads, 0.99),
    )


def _whole_history(setup: Setup, conversation: Conversation) -> int:
    """Return the tokens sent if the model is shown all turns so far before each turn."""
    total = history = 0
    for place, turn in enumerate(conversation.turns):
        total += history
        shown = shown_turn(marked(turn, conversation.session, place), setup.config)
        history += estimate_turns([unmarked(shown)])
    return total
