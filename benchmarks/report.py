"""The page and the chart of `nox -s bench`, from the figures alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.charts import Series, bars
from benchmarks.datastores import TOGETHER
from benchmarks.machine import BUSY
from benchmarks.measuring import DIALOGUE, EXTRA_ROUNDS, Cell
from benchmarks.pages import spread, table
from benchmarks.results import Measured, Results

GOALS = {"Redis": 1.0, "PostgreSQL": 0.7, "MongoDB": 0.9, "SQLite": 0.7, "DynamoDB": 1.0}
"""The least share of the bare turns a second, at `TOGETHER` conversations without folding."""

FOLDING_GOAL = 0.75
"""The least part of that share with folding."""

ALONE_GOALS = {"SQLite": 1.4}
ALONE_GOAL = 1.3
"""The highest ratio of a turn's latency to the bare turn's."""

OWN_GOALS = {"in a tight loop": 60.0, "together": 120.0}
"""The most processor time of our own code for a turn, in microseconds."""

BEGINNING = f"""\
# Results

Written by `nox -s bench`. [The note](README.md) says how it is measured, and where the time goes.

A **turn** is `add_turn` and `get_llm_context`. A **bare turn** is one write and one read of about as many
bytes with the same client library: what one would write without this library. *Folding off* is the strategy
`truncation` in dialogues of {DIALOGUE} turns. *Folding on* summarizes five turns at a time in conversations
that do not end, with a summarizer that answers at once. Figures are medians of blocks, and in parentheses the
lowest and the highest. Blocks of the bare client, of folding off and of folding on alternate in random order.

**~** marks a figure from a run in which other programs used more than {BUSY:.0%} of a processor, after up to
{EXTRA_ROUNDS} more rounds.
"""


@dataclass(frozen=True)
class Verdict:
    """A ratio beside its goal."""

    values: Sequence[float]
    goal: float
    noisy: bool
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the median reaches the goal."""
        median = statistics.median(self.values)
        return median <= self.goal if self.at_most else median >= self.goal

    def columns(self, digits: int = 2) -> list[str]:
        """Return the value, the goal and the verdict as columns of a table."""
        sign = "≤" if self.at_most else "≥"
        goal = f"{self.goal:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{self.goal:.0f}"
        verdict = "reached" if self.reached else "**missed**"
        return [f"{spread(self.values, digits)}{_mark(self.noisy)}", f"{sign} {goal}", verdict]


def throughput(measured: Measured, side: str) -> Verdict | None:
    """Judge the turns a second at `TOGETHER` conversations; `side` is `off` or `on`."""
    cell = measured.cell(TOGETHER)
    if cell is None:
        return None
    share = GOALS.get(measured.name, 1.0) * (FOLDING_GOAL if side == "on" else 1.0)
    return Verdict(cell.ratios(side), round(share, 3), cell.noisy)


def latency(measured: Measured, mode: str, length: int | None = None) -> Verdict | None:
    """Judge the latency of a turn in a single conversation."""
    alone = measured.alone_at(mode, length)
    if alone is None:
        return None
    return Verdict(alone.ratios, ALONE_GOALS.get(measured.name, ALONE_GOAL), alone.noisy, at_most=True)


def markdown(results: Results, picture: str | None = None) -> str:
    """Return the page; `picture` is the chart's path relative to it."""
    parts = [
        BEGINNING,
        *(["**A quick run: fewer and shorter blocks than usual.**\n"] if results.quick else []),
        *(
            [f"![Turns a second as a share of the bare client's, with the goals]({picture})\n"]
            if picture
            else []
        ),
        _about(results),
        f"## {TOGETHER} conversations at once, one process\n",
        _together(results),
        _reasons(results.datastores),
        "## One conversation\n",
        "The latency of a turn in microseconds. The background settles before each turn.\n",
        _alone(results),
        _calls(results.datastores),
        "## Our own code\n",
        _own(results),
        "## Other numbers of conversations, and of processes\n",
        "p99 is that of one call, in milliseconds. *Errors* are calls that failed.\n",
        _scaling(results.datastores),
        f"## Processor time of a turn, {TOGETHER} conversations\n",
        "In microseconds. *Server* is that of the server's processes, where the benchmark started them.\n",
        _processor(results.datastores),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _about(results: Results) -> str:
    lines = [
        f"- {results.date}, {results.machine}.",
        *(f"- {one.name}: {one.about}." for one in results.datastores),
        *(f"- {name} is missing: {why}." for name, why in results.missing.items()),
        *(f"- {one.name} is incomplete: {why}." for one in results.datastores for why in one.failed),
    ]
    return "\n".join(lines) + "\n"


def _together(results: Results) -> str:
    columns = ["", "bare, turns/s"]
    for side in ("folding off", "folding on"):
        columns += [f"{side}, turns/s", "of bare", "goal", ""]
    return table(columns, filter(None, map(_together_row, results.datastores)))


def _together_row(measured: Measured) -> list[str] | None:
    cell = measured.cell(TOGETHER)
    if cell is None:
        return None
    row = [measured.name, _rate(cell, "bare")]
    for side in ("off", "on"):
        verdict = throughput(measured, side)
        row += [_rate(cell, side), *(verdict.columns() if verdict else [""] * 3)]
    return row


def _reasons(datastores: Iterable[Measured]) -> str:
    """Say for each goal that is missed what the processors were at work on."""
    lines: list[str] = []
    for measured in datastores:
        for side in ("off", "on"):
            cell, verdict = measured.cell(TOGETHER), throughput(measured, side)
            if cell is None or verdict is None or verdict.reached:
                continue
            at_work = [statistics.median(b.client / b.wall for b in cell.blocks[s]) for s in (side, "bare")]
            lines.append(
                f"- {measured.name}, folding {side}: a turn takes {cell.cost(side, 'client'):,.0f} µs of "
                f"the client's processor time, a bare one {cell.cost('bare', 'client'):,.0f}. "
                f"The client process is at work {at_work[0]:.0%} of the time, "
                f"with the bare client {at_work[1]:.0%}."
            )
            if side == "off" and measured.cost is not None and measured.cost.operations:
                each = ", ".join(f"{n:.2f} {name}" for name, n in measured.cost.operations.items())
                lines[-1] += f" A turn takes these operations of the driver: {each}."
            if not (measured.external or measured.name == "SQLite"):
                server, bare = cell.cost(side, "server"), cell.cost("bare", "server")
                lines[-1] += f" The server takes {server:,.0f} µs, for a bare turn {bare:,.0f}."
    return "Where a goal is missed:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _alone(results: Results) -> str:
    rows: list[list[str]] = []
    for measured in results.datastores:
        name = measured.name
        for alone in measured.alone:
            verdict = latency(measured, alone.mode, alone.length)
            if verdict is None:
                continue
            rows.append(
                [
                    name,
                    alone.mode,
                    f"{alone.length:,}",
                    f"{statistics.median(alone.bare):,.0f}",
                    f"{statistics.median(alone.ours):,.0f}",
                    *verdict.columns(),
                ]
            )
            name = ""
    return table(["", "folding", "after turns", "bare, µs", "ours, µs", "of bare", "goal", ""], rows)


def _calls(datastores: Iterable[Measured]) -> str:
    """Say which call of a turn takes how long, in this process's processor time and elsewhere."""
    names = ["bare write", "driver append", "memory add", "bare read", "driver load", "memory read"]
    rows = [
        [one.name, *(f"{one.calls[name].wall:,.0f} ({one.calls[name].client:,.0f})" for name in names)]
        for one in datastores
        if one.calls
    ]
    text = f"""\
Where a turn's latency comes from, in a dialogue of {DIALOGUE} turns without folding: the latency of each call
alone, and in parentheses the processor time of this process. A call of the memory includes the driver's.
"""
    return f"{text}\n{table(['', *names], rows)}"


def _own(results: Results) -> str:
    rows: list[list[str]] = []
    for count, value in results.own.items():
        goal = OWN_GOALS["in a tight loop" if count == 1 else "together"]
        verdict = Verdict([value], goal, noisy=False, at_most=True)
        where = "in-memory driver, " + ("a tight loop" if count == 1 else f"{count} conversations")
        rows.append([where, *[""] * 4, f"{value:.0f}", *verdict.columns(0)[1:]])
    for measured in results.datastores:
        cost = measured.cost
        if cost is None:
            continue
        rest = max(0.0, cost.total - cost.own - cost.library)
        verdict = Verdict([cost.own], OWN_GOALS["together"], cost.busy, at_most=True)
        parts = (cost.memory, cost.driver, cost.library, rest)
        own, *judged = verdict.columns(0)
        rows.append([measured.name, *(f"{part:.0f}" for part in parts), own, *judged])
    text = f"""\
Processor time of a turn without folding, in microseconds. On the in-memory driver it is that of the process.
On a datastore, with {TOGETHER} conversations, *own code* is that of the coroutines of the memory and of the
driver; *library* is that of the client library's coroutines, and *rest* is the event loop, its callbacks and
other threads. What reading the clocks takes is subtracted.
"""
    columns = ["", "memory", "driver", "library", "rest", "own code", "goal", ""]
    return f"{text}\n{table(columns, rows)}"


def _scaling(datastores: Iterable[Measured]) -> str:
    columns = ["", "conversations", "bare, turns/s", "folding off", "of bare", "folding on", "of bare"]
    columns += ["p99, bare", "off", "on", "errors"]
    rows: list[list[str]] = []
    for measured in datastores:
        name = measured.name
        for cell in measured.cells:
            many = (
                f"{cell.conversations} in each of {cell.processes}"
                if cell.processes > 1
                else f"{cell.conversations}"
            )
            row = [name, many, f"{_rate(cell, 'bare')}{_mark(cell.noisy)}"]
            for side in ("off", "on"):
                row += [_rate(cell, side), spread(cell.ratios(side))]
            p99 = (statistics.median(b.p99 for b in cell.blocks[side]) for side in ("bare", "off", "on"))
            rows.append([*row, *(f"{value:,.1f}" for value in p99), f"{cell.errors}"])
            name = ""
    return table(columns, rows)


def _processor(datastores: Iterable[Measured]) -> str:
    columns = ["", "client, bare", "folding off", "folding on", "server, bare", "folding off", "folding on"]
    rows: list[list[str]] = []
    for measured in datastores:
        cell = measured.cell(TOGETHER)
        if cell is None:
            continue
        client = [f"{cell.cost(side, 'client'):,.0f}" for side in ("bare", "off", "on")]
        # SQLite's engine runs in the client's process.
        no_server = measured.external or measured.name == "SQLite"
        server = ["" if no_server else f"{cell.cost(side, 'server'):,.0f}" for side in ("bare", "off", "on")]
        rows.append([f"{measured.name}{_mark(cell.noisy)}", *client, *server])
    return table(columns, rows)


def _rate(cell: Cell, side: str) -> str:
    return f"{statistics.median(cell.rates(side)):,.0f}"


def _mark(noisy: bool) -> str:
    return " ~" if noisy else ""


def chart(results: Results) -> str:
    """Draw the share of the bare turns a second at `TOGETHER` conversations, with the goals."""
    shown = [measured for measured in results.datastores if measured.cell(TOGETHER)]
    series: list[Series] = []
    for side in ("off", "on"):
        verdicts = [throughput(measured, side) for measured in shown]
        series.append(
            Series(
                f"folding {side}",
                [statistics.median(one.values) if one else None for one in verdicts],
                [one.goal if one else None for one in verdicts],
            )
        )
    title = f"Turns a second at {TOGETHER} conversations, as a share of the bare client's (dashed: goals)"
    return bars(title, [measured.name for measured in shown], series)
