"""What is measured of a library. A figure that could not be had is `None`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class AtLength:
    """A conversation of so many turns, or messages.

    Times are medians in ms of one turn: storing it, then reading what the model is shown. `ours_ms` was
    measured alternating with `ms`. The bytes and the round trips are those of one turn; `stored` is what it
    adds. Of messages, `shown` is how many the model is shown.
    """

    length: int
    ms: float | None = None
    p95_ms: float | None = None
    ours_ms: float | None = None
    sent: float | None = None
    received: float | None = None
    round_trips: float | None = None
    stored: float | None = None
    shown: int | None = None


@dataclass
class Together:
    """Turns a second of many conversations in one process, beside ours in blocks that alternate."""

    turns_a_second: float
    ours: float


@dataclass
class Counted:
    """The turns of several writers to one conversation: acknowledged, and of these lost and doubled.

    `errors` are classes of exceptions, and how often they were raised.
    """

    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    errors: dict[str, int] = field(default_factory=dict[str, int])


HISTORY, ITEMS, SIDEBAR = "history", "items", "sidebar"


@dataclass
class Shown:
    """What a product shows: medians in ms, beside ours. Without a time, no call returns it.

    `whole`: no call returns only that, so the whole conversation was read.
    """

    what: str
    ms: float | None = None
    ours_ms: float | None = None
    whole: bool = False


@dataclass
class Side:
    """One side of what was measured: a time in ms, bytes, or a count, `of` so many if that says something.

    `right` is the only count that is not wrong; without it, none is. `errors` are classes of exceptions, and
    how often they were raised.
    """

    value: float | None = None
    of: int | None = None
    right: float | None = None
    errors: dict[str, int] = field(default_factory=dict[str, int])


@dataclass
class Pair:
    """The same, measured of a framework's own back end and of ours. `unit` is "ms", "bytes" or "count"."""

    what: str
    unit: str
    theirs: Side
    ours: Side

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Pair:
        """Return what `asdict` made of a pair."""
        sides = (Side(**stored[side]) for side in ("theirs", "ours"))
        return cls(stored["what"], stored["unit"], *sides)


@dataclass
class Measured:
    """All figures of one library on one datastore. `problems` says why some are missing."""

    name: str
    about: str = ""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    lengths: dict[int, AtLength] = field(default_factory=dict[int, AtLength])
    together: Together | None = None
    tasks: Counted | None = None
    processes: Counted | None = None
    shown: dict[str, Shown] = field(default_factory=dict[str, Shown])
    pairs: list[Pair] = field(default_factory=list[Pair])
    problems: list[str] = field(default_factory=list[str])

    def take(self, said: dict[str, Any]) -> None:
        """Take in one figure that a process has reported."""
        (kind, value), *_ = said.items()
        if kind == "length":
            at = AtLength(**value)
            self.lengths[at.length] = at
        elif kind == "shown":
            self.shown[value["what"]] = Shown(**value)
        elif kind == "pair":
            self.pairs.append(Pair.of(value))
        elif kind == "problem":
            self.problems.append(value)
        elif kind == "versions":
            self.versions = value
        elif kind == "together":
            self.together = Together(**value)
        else:
            setattr(self, kind, Counted(**value))

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Measured:
        """Return what `asdict` made of figures, by way of JSON."""
        measured = cls(stored["name"], stored["about"], stored["versions"], problems=stored["problems"])
        for at in stored["lengths"].values():
            measured.take({"length": at})
        for one in stored.get("shown", {}).values():
            measured.take({"shown": one})
        for one in stored.get("pairs", []):
            measured.take({"pair": one})
        for kind in ("together", "tasks", "processes"):
            if stored[kind] is not None:
                measured.take({kind: stored[kind]})
        return measured

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return asdict(self)


def explained(error: BaseException) -> str:
    """Return an exception's class and the beginning of its message."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"`{type(error).__name__}`: {message[:160]}".rstrip(": ").replace("|", "/")
