"""Whether a fault hit anything, by what the pods have noted meanwhile.

That something went wrong while a fault was in force does not prove that the fault was the reason. So a call
for which another fault may be the reason leaves it open.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from tests.chaos import history
from tests.chaos.history import Event

Hit: TypeAlias = Literal["unknown"] | bool

CALLS: Final = ("add", "read")
"""What is slow, or fails, only if a pod, a server or the network does not work."""

SLOW: Final = 10
AT_LEAST_S: Final = 0.05
"""A call is slow that takes ten times as long as the median of its kind, and at least so long."""

REMEMBERED: Final = 20_000


@dataclass(slots=True)
class Call:
    """Something that a pod did, from `began` to `ended`; `failed` if it was refused or ended unknown."""

    process: str
    what: str
    began: float
    ended: float = math.inf
    failed: bool = False


@dataclass(slots=True)
class Fault:
    """A fault in force; `target` is the process that it befalls, if it is one."""

    kind: str
    target: str
    began: float
    ended: float = math.inf


class Hits:
    """Follows the histories of the pods."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._calls: deque[Call] = deque(maxlen=REMEMBERED)
        self._open: dict[tuple[str, int], Call] = {}
        self._took: dict[str, deque[float]] = {what: deque(maxlen=500) for what in CALLS}
        self._faults: deque[Fault] = deque(maxlen=200)

    def began(self, kind: str, target: str, now: float) -> Fault:
        """Say that a fault begins."""
        fault = Fault(kind, target, now)
        self._faults.append(fault)
        return fault

    def ended(self, fault: Fault, now: float, figures: Mapping[str, Any]) -> Hit:
        """Say that it has ended, and return whether it hit anything."""
        fault.ended = now
        self.hear(self._new())
        return self._hit(fault, figures)

    def hear(self, events: Iterable[Event]) -> None:
        """Take in what pods have noted."""
        for event in events:
            if event.what not in (*CALLS, "summarize"):
                continue
            op = event.process, event.op
            if event.phase == "invoke":
                call = self._open[op] = Call(event.process, event.what, event.t)
                self._calls.append(call)
            elif (call := self._open.pop(op, None)) is not None:
                call.ended, call.failed = event.t, event.phase != "ok"
                if event.what in CALLS and not call.failed:
                    self._took[event.what].append(call.ended - call.began)

    def _new(self) -> Iterable[Event]:
        for file in self._folder.glob("p*.*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                whole, found, _ = lines.read().rpartition(b"\n")
            self._read[file] = self._read.get(file, 0) + len(whole) + len(found)
            yield from history.events_in(whole + found)

    def _hit(self, fault: Fault, figures: Mapping[str, Any]) -> Hit:
        kind = fault.kind
        if (said := _said(kind, figures)) is not None:
            return said
        during = [call for call in self._calls if call.began <= fault.ended and call.ended >= fault.began]
        if kind.startswith("model-"):
            return any(call.what == "summarize" and call.began >= fault.began for call in during)
        during = [call for call in during if call.what in CALLS and fault.target in ("", call.process)]
        if kind == "pod-clock":
            return bool(during)
        if kind == "pod-restart":
            return any(call.began <= fault.began for call in during)
        slow = kind != "pod-descriptors"
        suffered = [call for call in during if call.failed or (slow and self._is_slow(call, fault.ended))]
        others = [self._others(fault, call) for call in suffered]
        # What the pod itself suffers explains its calls.
        others = [kinds for kinds in others if not any(one.target for one in kinds)]
        return True if [] in others else "unknown" if others else False

    def _is_slow(self, call: Call, now: float) -> bool:
        took = self._took[call.what]
        usual = statistics.median(took) if took else 0.0
        return min(call.ended, now) - call.began > max(SLOW * usual, AT_LEAST_S)

    def _others(self, fault: Fault, call: Call) -> list[Fault]:
        """Return the other faults that may be the reason why a call failed, or took long."""
        return [
            other
            for other in self._faults
            if other is not fault
            and other.began <= call.ended
            and other.ended >= call.began
            and (other.target == call.process or _befalls_all(other.kind))
        ]


def _said(kind: str, figures: Mapping[str, Any]) -> Hit | None:
    """Return what a fault says itself; `None` if it does not."""
    if kind.startswith("people-"):
        if figures.get("outcome") == "unknown":
            return "unknown"
        return bool(figures.get("found", False) and figures.get("removed", 1))
    if kind.startswith("command-"):
        changed = (figures.get(name, 1) for name in ("expired", "records"))
        return all(changed) if figures.get("done") else "unknown"
    own = {"pod-kill": "struck", "pod-pause": "struck", "pod-cancel": "calls"}.get(kind)
    if own is None:
        return None
    return bool(figures[own]) if own in figures else "unknown"


def _befalls_all(kind: str) -> bool:
    """Say whether it is a fault of the servers or of the network."""
    return kind.partition("-")[0] not in {"pod", "model", "people", "command"}
