"""What happened in a run: events that every process appends to a file of its own, as lines of JSON.

Times are of the machine's monotonic clock, which all processes on one machine share and which no fault of a
clock moves.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Phase: TypeAlias = Literal["invoke", "ok", "fail", "unknown", "info"]
"""An operation is invoked, then answered, or refused without effect, or it is not known how it ended.

An operation without a second event never ended: its process was killed. `info` events stand alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a history.

    `process` is a pod and its life, as in `p3.2`, or `nemesis`. `op` pairs an invocation with its end, within
    one process; -1 in `info` events. `data` depends on `what`; see ACTIONS.
    """

    t: float
    process: str
    op: int
    phase: Phase
    what: str
    conversation: str = ""
    data: dict[str, Any] = field(default_factory=dict[str, Any])


ACTIONS = {
    "add": ("a turn is added; `turn` is its id; `ok` may have `repeated`: the same id was added before"),
    "read": (
        "the context is read; `ok` has `summary`, `pending`, `recent`: ids of turns in their "
        "order as the reader sees them, `foreign`: how many turns are of another conversation or "
        "altered, `dropped`: how many turns were dropped while degraded, `waiting`: how many wait in pages "
        "for a summary, `health`: its name"
    ),
    "transcript": (
        "the whole conversation is read; `ok` has `ids`: the turns, oldest first, and `foreign`: how "
        "many are of another conversation or altered"
    ),
    "summarize": (
        "the summarizer is called under the lease; `turns`: the ids that it is given, `covered`: "
        "those that the earlier summary covers; ends when the model has answered"
    ),
    "flush": "all that is due is summarized",
    "erase": (
        "the conversation is erased; `by`: whether through the memory, the command line or the backend"
    ),
    "health": "`info`: a pod saw the health change; `old`, `new`",
    "write": (
        "`info`: the driver reported a successful replace; `record`, `version`, `expect`: the version "
        "that it replaced, if it asked for one, `began`: the time of the call, `drop`, and `lease`: when "
        "the lease in it was taken, and for how many seconds, if there is one"
    ),
    "defect": "`info`: a call raised what is not an error of the library; `during`, `error`",
    "fault": (
        "the nemesis begins a fault, and ends it with `ok`; `kind`, `target`, `hit`: whether it "
        "hit anything, true, false or unknown, and its figures; of kills and "
        "pauses `aim`: what they waited for, `struck`: what was under way, and `at` when"
    ),
    "doubt": (
        "`info`: from `begin` to `end`, in the time of the events, a deposed master may have answered reads; "
        "written when the run is over"
    ),
    "model": "`info`: the model changes; `how` is one of well, hangs, raises, garbage, slow",
    "figures": (
        "`info`: a pod's `memory` in bytes, `tasks`, `descriptors`, `connections`, and its `adds` so far"
    ),
    "people": (
        "a person's command; `kind` is one of export, import, copy, purge, reseal, stats, session-end; "
        "`found`: whether something was there, `older`: whether an earlier export was imported"
    ),
    "remember": (
        "a fact is stored in a session of the tiers; `session`, `key`, and its `importance`: from 0.5 on "
        "it is promoted when the session ends"
    ),
    "forget": "a user of the tiers is erased, with all facts; `session`",
    "remembered": "`info`: what long-term memory has in the end; `session`, `keys`, `altered`",
    "final": (
        "`info`: the run has ended, all faults are over and all pods have flushed; reads after it are final"
    ),
}
"""Every `what` that a history may have, and its data."""


class Writer:
    """Appends the events of one process to a file; a line is written at once, so that a kill loses none."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._file = (folder / f"{process}.jsonl").open("ab", buffering=0)
        self._ops = 0

    def invoke(self, what: str, conversation: str = "", **data: Any) -> int:
        """Note that an operation begins; return its number, which its end names."""
        self._ops += 1
        self._write(self._ops, "invoke", what, conversation, data)
        return self._ops

    def end(self, op: int, phase: Phase, what: str, conversation: str = "", **data: Any) -> None:
        """Note how an operation ended."""
        self._write(op, phase, what, conversation, data)

    def info(self, what: str, conversation: str = "", **data: Any) -> None:
        """Note what has no duration."""
        self._write(-1, "info", what, conversation, data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, op: int, phase: Phase, what: str, conversation: str, data: dict[str, Any]) -> None:
        event = Event(
            t=time.monotonic(),
            process=self.process,
            op=op,
            phase=phase,
            what=what,
            conversation=conversation,
            data=data,
        )
        self._file.write(json.dumps(dataclasses.asdict(event), separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[Event]:
    """Return the events of all processes of a run, in the order of their times."""
    files = sorted(folder.glob("*.jsonl"))
    events = (event for file in files for event in events_in(file.read_bytes()))
    return sorted(events, key=lambda event: event.t)


def write(folder: Path, events: Iterable[Event]) -> None:
    """Write events in one file, as a run would have; for tests of the checker."""
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(event)) + "\n" for event in events)


def events_in(lines: bytes) -> Iterator[Event]:
    """Yield the events of a part of a file, in the order in which they were noted."""
    for line in lines.splitlines(keepends=True):
        # A killed process may leave half a line at the end.
        if line.endswith(b"\n"):
            yield Event(**json.loads(line))
