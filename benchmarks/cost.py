"""What a day of turns takes on each datastore, calculated from measured figures; no prices."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass

from benchmarks.datastores import TOGETHER
from benchmarks.measuring import Cell
from benchmarks.pages import table
from benchmarks.results import Results
from benchmarks.scale_report import Scale

DAY_S = 86_400


@dataclass(frozen=True)
class Day:
    """A day of turns. `peak` is how many times the mean the busiest time has."""

    turns: int = 100_000_000
    peak: float = 3.0
    turns_each: int = 20

    @property
    def rate(self) -> float:
        """Turns a second at the peak."""
        return self.turns / DAY_S * self.peak

    @property
    def conversations(self) -> float:
        """New conversations in a day."""
        return self.turns / self.turns_each


def cores(day: Day, cell: Cell, side: str) -> tuple[float, float]:
    """Return the cores of the clients and of the server at the peak.

    The client process uses one core.
    """
    clients = day.rate / statistics.median(cell.rates(side))
    return clients, day.rate * cell.cost(side, "server") / 1e6


_CORES = "## Cores at the peak\n"
_BYTES = "## Bytes stored\n"


def markdown(day: Day, bench: Results | None, scale: Scale) -> str:
    """Return the page."""
    parts = [
        f"# What a day of {day.turns:,} turns takes\n",
        """\
Written by `nox -s scale` from its own figures and from those of the last [`nox -s bench`](RESULTS.md). It
gives cores, bytes and request units, and no prices: multiply by yours.
""",
        *(
            ["**From a small or quick run: the figures only show the form.**\n"]
            if _small(bench, scale)
            else []
        ),
        f"""\
- {day.turns:,} turns / {DAY_S:,} s = {day.turns / DAY_S:,.0f} turns a second on average.
- x {day.peak:g}, an assumed peak factor = **{day.rate:,.0f} turns a second** at the busiest time.
- / {day.turns_each} turns, an assumed length = {day.conversations:,.0f} conversations a day.

A turn is one `add_turn` and one `get_llm_context`. Measured on {scale.machine}.
""",
        cores_section(day, bench),
        _BYTES,
        f"""\
- A folded conversation of {day.turns_each} turns has a body with the summary and the turns that are kept in
  full: {scale.folded_bytes:,} bytes. The table has what the datastore takes for one, indexes included,
  right after it was stored. Updates leave dead rows in PostgreSQL until its vacuum runs, which are not in it.
- Gigabytes a day = conversations a day x bytes of a conversation. They stay until they expire: multiply by
  the days of your time to live.
""",
        _bytes(day, scale),
        "## DynamoDB's units\n",
        _units(day, scale),
    ]
    return "\n".join(parts).rstrip() + "\n"


def cores_section(day: Day, bench: Results | None) -> str:
    """Return the section about cores, the only one with figures of `nox -s bench`."""
    text = f"""\
{_CORES}
- Client cores = peak turns a second / turns a second of one process at {TOGETHER} conversations, which uses
  one core.
- DynamoDB: client cores = peak turns a second x the client's processor time of a turn, because DynamoDB Local
  limits the turns a second here.
- Server cores = peak turns a second x the server's processor time of a turn. SQLite has no server; its cores
  are those of the processes, each with a file of its own.
- Machines = all cores / {os.cpu_count()}, the processors of the machine that was measured, rounded up.
- A single Redis uses about one core for commands: more than that means a cluster.
"""
    table_of_cores = _cores(day, bench) if bench else "There are no figures of `nox -s bench` yet.\n"
    return f"{text}\n{table_of_cores}"


def with_cores(page: str, day: Day, bench: Results) -> str:
    """Return a page whose section about cores has the figures of a later `nox -s bench`."""
    before, _, rest = page.partition(_CORES)
    return f"{before}{cores_section(day, bench)}\n{_BYTES}{rest.partition(_BYTES)[2]}"


def _small(bench: Results | None, scale: Scale) -> bool:
    return scale.small or (bench is not None and bench.quick)


def _cores(day: Day, bench: Results) -> str:
    rows: list[list[str]] = []
    processors = os.cpu_count() or 1
    for measured in bench.datastores:
        cell = measured.cell(TOGETHER)
        if cell is None:
            continue
        for side in ("off", "on"):
            clients, server = cores(day, cell, side)
            name = measured.name if side == "off" else ""
            rate = f"{statistics.median(cell.rates(side)):,.0f}"
            if measured.name == "DynamoDB":
                # DynamoDB Local is the limit of the turns a second, and is not part of a real system.
                clients = day.rate * cell.cost(side, "client") / 1e6
                machines = math.ceil(clients / processors)
                rows.append([name, side, "", f"{clients:.1f}", "", "", f"{machines}"])
                continue
            machines = math.ceil((clients + server) / processors)
            theirs = [f"{cell.cost(side, 'server'):,.0f}", f"{server:.1f}"]
            if measured.name == "SQLite":
                theirs = ["", ""]
            rows.append([name, side, rate, f"{clients:.1f}", *theirs, f"{machines}"])
    columns = ["", "folding", "turns/s of a process", "client cores", "server, µs a turn", "server cores"]
    return table([*columns, "machines"], rows) + f"\nFigures of {bench.date}.\n"


def _bytes(day: Day, scale: Scale) -> str:
    rows = [
        [one.name, f"{one.folded_bytes:,.0f}", f"{day.conversations * one.folded_bytes / 1e9:,.1f}"]
        for one in scale.datastores
        if one.folded_bytes
    ]
    return table(["", "bytes of a conversation", "GB a day"], rows)


def _units(day: Day, scale: Scale) -> str:
    missing = next((one.missing for one in scale.units.values() if one.missing), "")
    if missing or not scale.units:
        return f"Not measured: {missing or 'there was no DynamoDB'}.\n"
    rows: list[list[str]] = []
    for mode, one in scale.units.items():
        rows.append(
            [
                f"folding {mode}",
                *(f"{value:.2f}" for value in (one.requests, one.writes, one.reads)),
                *(f"{value * day.turns / 1e6:,.0f}" for value in (one.writes, one.reads)),
                *(f"{value * day.rate:,.0f}" for value in (one.writes, one.reads)),
                *(f"{value:,.0f}" for value in (one.sent, one.received)),
            ]
        )
    columns = ["", "requests a turn", "WRU a turn", "RRU a turn", "million WRU a day", "million RRU a day"]
    columns += ["WRU/s at the peak", "RRU/s at the peak", "bytes sent a turn", "bytes received a turn"]
    text = """\
Units are those that the server reports (`ReturnConsumedCapacity`): a write unit (WRU) for each KB of a
written item, a read unit (RRU) for each 4 KB of a consistent read. Units a day = units a turn x turns; units
at the peak = units a turn x peak turns a second.
"""
    return f"{text}\n{table(columns, rows)}"
