"""The figures of one run, and their JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import Alone, Block, Call, Cell, Cost


@dataclass
class Measured:
    """What was measured of one datastore. `failed` says what was not measured, and why."""

    name: str
    about: str
    alone: list[Alone] = field(default_factory=list[Alone])
    cells: list[Cell] = field(default_factory=list[Cell])
    cost: Cost | None = None
    calls: dict[str, Call] = field(default_factory=dict[str, Call])
    external: bool = False
    failed: list[str] = field(default_factory=list[str])

    def cell(self, conversations: int, processes: int = 1) -> Cell | None:
        """Return the blocks for so many conversations in each process, if they were measured."""
        found = (c for c in self.cells if (c.conversations, c.processes) == (conversations, processes))
        return next(found, None)

    def alone_at(self, mode: str, length: int | None = None) -> Alone | None:
        """Return the latencies for a length, by default for the shortest."""
        found = (one for one in self.alone if one.mode == mode and length in (None, one.length))
        return next(found, None)


@dataclass
class Results:
    """Everything that one run has measured. `missing` says why a datastore is missing.

    `machine` describes the machine. `own` is the processor time of a turn on the in-memory driver, by the
    number of conversations.
    """

    machine: str
    date: str = field(default_factory=lambda: time.strftime("%-d %B %Y"))
    quick: bool = False
    own: dict[int, float] = field(default_factory=dict[int, float])
    datastores: list[Measured] = field(default_factory=list[Measured])
    missing: dict[str, str] = field(default_factory=dict[str, str])

    def named(self, name: str) -> Measured | None:
        """Return what was measured of a datastore."""
        return next((measured for measured in self.datastores if measured.name == name), None)

    def save(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read figures that `Results.save` has written."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    data["own"] = {int(count): value for count, value in data["own"].items()}
    data["datastores"] = [_measured(one) for one in data["datastores"]]
    return Results(**data)


def _measured(data: dict[str, Any]) -> Measured:
    data["alone"] = [Alone(**one) for one in data["alone"]]
    data["cells"] = [_cell(one) for one in data["cells"]]
    data["cost"] = data["cost"] and Cost(**data["cost"])
    data["calls"] = {name: Call(**one) for name, one in data.get("calls", {}).items()}
    return Measured(**data)


def _cell(data: dict[str, Any]) -> Cell:
    data["blocks"] = {side: [Block(**one) for one in blocks] for side, blocks in data["blocks"].items()}
    return Cell(**data)
