"""What was measured, as Markdown and as a picture."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.datastores import TOGETHER
from benchmarks.measuring import REQUESTS_OF_A_FOLD, AtLength, Calls, Compared, Together

GOAL_RATIO = 1.3
GOAL_CPU_US = 100

BEGINNING = """\
# Results

Written by `nox -s bench`. [The note](README.md) says how it is measured, and where the time goes.

Each call of the memory is compared with a **bare round trip**: one write or one read of the same bytes
through the same client library, with the same settings and durability, made in turns with it. A ratio is the
median of ours over the median of the bare one. *Own code* is the processor time of the memory, the codec and
the driver, without the client library. *More in all* is what a call costs this process
beyond a bare one, the client library's part included. The goals: a ratio of at most {ratio}, the same however
many turns were ever added, and less than {cpu} µs of own code. Values that miss a goal are in bold.
"""

TOGETHER_TEXT = """\
## {count} conversations at once

Each conversation adds a turn, reads its context, and repeats, in one process on one event loop. Blocks of
these alternate with blocks of as many bare loops of one write and one read. Summaries are written at the
same time, by a summarizer that answers at once; each takes {requests} more requests, which a bare loop lacks.
*Turns* is our number of turns as a share of the bare one; *requests* also counts the requests of folding.
One thread of Python does all of it, the client library's part included, so this compares processor time
rather than waiting. Times are medians in ms; after the slash, the 95th percentile.
"""

IN_PROCESS_TEXT = """\
## `DefaultShortTermMemory`, in process

No datastore, so nothing to compare with. Times are in µs, as above.
"""


@dataclass
class Measured:
    """What was measured of one datastore."""

    name: str
    about: str
    lengths: list[AtLength]
    together: Together


@dataclass
class Results:
    """Everything that one run has measured. `missing` says why a datastore is missing."""

    rounds: int
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    in_process: list[tuple[int, Calls, Calls]] = field(default_factory=list[tuple[int, Calls, Calls]])
    datastores: list[Measured] = field(default_factory=list[Measured])
    missing: dict[str, str] = field(default_factory=dict[str, str])


def markdown(results: Results, picture: str | None) -> str:
    """Return the page; `picture` is its path relative to the page."""
    lengths = [at.length for at in results.datastores[0].lengths] if results.datastores else []
    parts = [
        BEGINNING.format(ratio=GOAL_RATIO, cpu=GOAL_CPU_US),
        *(
            [f"![The ratios to a bare round trip, and the processor time of own code]({picture})\n"]
            if picture
            else []
        ),
        _about(results),
        "## Ratios, alone\n",
        _table(
            [
                "",
                "call",
                *(f"after {length:,} turns" for length in lengths),
                "own code, µs",
                "more in all, µs",
            ],
            (
                [
                    measured.name if call == "add_turn" else "",
                    f"`{call}`",
                    *(_judged(f"{one.ratio:.2f}", one.ratio <= GOAL_RATIO) for one in compared),
                    _ends(compared, lambda one: one.own_cpu, GOAL_CPU_US),
                    _ends(compared, lambda one: one.more_cpu),
                ]
                for measured in results.datastores
                for call, compared in _calls(measured)
            ),
        ),
        f"Medians of {results.rounds} rounds; processor time after the fewest turns and after the most.\n",
        "## The times behind them\n",
        "Medians in µs; after the slash, the 95th percentile.\n",
        _table(
            ["", "turns", "`add_turn`", "bare write", "`get_llm_context`", "bare read"],
            (
                [
                    measured.name if at is measured.lengths[0] else "",
                    f"{at.length:,}",
                    *(
                        _times(calls)
                        for compared in (at.add, at.read)
                        for calls in (compared.ours, compared.bare)
                    ),
                ]
                for measured in results.datastores
                for at in measured.lengths
            ),
        ),
        *(_blocking(measured) for measured in results.datastores if measured.lengths[-1].blocking[0].times),
        TOGETHER_TEXT.format(count=TOGETHER, requests=REQUESTS_OF_A_FOLD),
        _table(
            [
                "",
                "turns a second",
                "bare",
                "turns",
                "requests",
                "`add_turn`, ms",
                "bare write, ms",
                "`get_llm_context`, ms",
                "bare read, ms",
            ],
            (_together(measured.name, measured.together) for measured in results.datastores),
        ),
        IN_PROCESS_TEXT,
        _table(
            ["turns", "`add_turn`", "`get_llm_context`"],
            ([f"{length:,}", _times(adds), _times(reads)] for length, adds, reads in results.in_process),
        ),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _about(results: Results) -> str:
    lines = [
        (
            f"- {time.strftime('%-d %B %Y')}, {_processor()}, {os.cpu_count()} processors, "
            f"{platform.system()}, Python {platform.python_version()}; a load of {results.load_before:.1f} "
            "when it began."
        ),
        *(f"- {measured.name}: {measured.about}." for measured in results.datastores),
        *(f"- {name} was left out: {why}." for name, why in results.missing.items()),
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    """Return what the system calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _calls(measured: Measured) -> Sequence[tuple[str, list[Compared]]]:
    return (
        ("add_turn", [at.add for at in measured.lengths]),
        ("get_llm_context", [at.read for at in measured.lengths]),
    )


def _judged(text: str, is_good: bool) -> str:
    return text if is_good else f"**{text}**"


def _ends(compared: Sequence[Compared], what: Callable[[Compared], float], goal: float = math.inf) -> str:
    first, last = what(compared[0]), what(compared[-1])
    return _judged(f"{first:.0f}, {last:.0f}", max(first, last) < goal)


def _times(calls: Calls) -> str:
    return f"{calls.median:,.0f} / {calls.p95:,.0f}"


def _blocking(measured: Measured) -> str:
    at = measured.lengths[-1]
    write, read = at.blocking
    return (
        f"{measured.name} without the hand-off to a thread, which blocks the event loop: a bare "
        f"write takes {_times(write)}, a bare read {_times(read)}, after {at.length:,} turns.\n"
    )


def _together(name: str, together: Together) -> list[str]:
    return [
        name,
        f"{together.turns_a_second:,.0f}",
        f"{together.bare_turns_a_second:,.0f}",
        f"{together.throughput:.2f}",
        f"{together.requests:.2f}",
        *(
            f"{calls.median / 1e3:.1f} / {calls.p95 / 1e3:.1f}"
            for compared in (together.add, together.read)
            for calls in (compared.ours, compared.bare)
        ),
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which those can tell apart who do not see all colours."""

_GOAL = {"color": "#444444", "linewidth": 1, "linestyle": "--"}


def draw(results: Results, path: Path) -> None:
    """Draw the ratios against the number of turns, and the processor time of own code, beside their goals."""
    pyplot.rcParams.update({"svg.hashsalt": "stm-backends", "font.size": 10})
    figure, (adds, reads, cpu) = pyplot.subplots(
        1, 3, figsize=(12, 4), layout="constrained", width_ratios=(3, 3, 2)
    )
    highest = 2.0
    for axes, title, index in ((adds, "add_turn", 0), (reads, "get_llm_context", 1)):
        for measured, color, marker in zip(results.datastores, _COLORS, "osD^v", strict=False):
            _, compared = _calls(measured)[index]
            lengths = [at.length for at in measured.lengths]
            ratios = [one.ratio for one in compared]
            highest = max(highest, *(1.05 * ratio for ratio in ratios))
            axes.plot(lengths, ratios, color=color, marker=marker, markersize=5, label=measured.name)
            axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axhline(GOAL_RATIO, **_GOAL)
        axes.set_xlabel("turns ever added")
        axes.set_title(title, family="monospace")
    adds.set_ylabel("times a bare round trip (dashed: the goal)")
    for axes in (adds, reads):
        axes.set_ylim(0, highest)
    adds.legend(loc="lower left", frameon=False, ncols=2)
    names = [measured.name for measured in results.datastores]
    for offset, title, index in ((-0.2, "add_turn", 0), (0.2, "get_llm_context", 1)):
        own = [_calls(measured)[index][1][-1].own_cpu for measured in results.datastores]
        places = [place + offset for place in range(len(names))]
        cpu.barh(places, own, height=0.38, color=("#555555", "#aaaaaa")[index], label=title)
    cpu.set_yticks(range(len(names)), names)
    cpu.invert_yaxis()
    cpu.axvline(GOAL_CPU_US, **_GOAL)
    cpu.set_xlabel("µs")
    cpu.set_title("processor time of own code")
    cpu.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), frameon=False, ncols=2)
    for axes in (adds, reads, cpu):
        axes.spines[["top", "right"]].set_visible(False)
    # Without a date, so that a picture of the same numbers is the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)
