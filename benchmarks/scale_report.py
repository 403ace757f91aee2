"""The page of `nox -s scale`, from the figures alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.measuring import Alone
from benchmarks.pages import spread, table
from benchmarks.units import Units

STORED_AT_ONCE = 128
"""How many conversations are stored at once."""

PODS_AT_ONCE = 128
"""How many pods are at work at once; they share one client."""

MEMORY_GOAL = 200e6
"""The most resident bytes of a process that touches every conversation once."""


@dataclass
class Directories:
    """The directories of many pods that list the same users: their writes, and those of a second time.

    `seconds` is how long the first time took, `p99_ms` that of one call.
    """

    writes: int
    again: int
    seconds: float
    p99_ms: float
    listing_ms: float


@dataclass
class Scaled:
    """What was measured of one datastore.

    `bytes_each` and `folded_bytes` are those that the datastore takes for a conversation of one turn and for
    a folded one. `resident` are bytes of memory before, after and at the highest.
    """

    name: str
    about: str
    filled: int = 0
    fill_s: float = 0.0
    bytes_each: float = 0.0
    folded_bytes: float = 0.0
    page_ms: list[float] = field(default_factory=list[float])
    listing_s: float = 0.0
    purged: int = 0
    purge_s: float = 0.0
    long: list[Alone] = field(default_factory=list[Alone])
    directories: Directories | None = None
    resident: tuple[int, int, int] | None = None
    failed: list[str] = field(default_factory=list[str])


@dataclass
class Scale:
    """Everything that one run has measured.

    `units` are those of a turn on DynamoDB, with folding off and on. `folded_bytes` are those of the body and
    the entries of a folded conversation.
    """

    machine: str
    conversations: int
    lengths: list[int]
    pods: int
    users: int
    small: bool = False
    busy: bool = False
    date: str = field(default_factory=lambda: time.strftime("%-d %B %Y"))
    datastores: list[Scaled] = field(default_factory=list[Scaled])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    units: dict[str, Units] = field(default_factory=dict[str, Units])
    folded_bytes: int = 0


def markdown(scale: Scale) -> str:
    """Return the page."""
    parts = [
        "# Scale\n",
        "Written by `nox -s scale`, as is [what a day of turns costs](COST.md).\n",
        *(["**A small run, which only shows that everything works.**\n"] if scale.small else []),
        *(["**Other programs were running; times may be too long.**\n"] if scale.busy else []),
        _about(scale),
        f"## One tenant with {scale.conversations:,} conversations\n",
        f"""\
All are conversations of one user, so one scope holds them all. Each has one turn, stored by the driver's
`append`, {STORED_AT_ONCE} at a time. Bytes are those of the datastore's files or memory, indexes included. A
*page* is a `scan` of 200 names at the start, in the middle and before the end. *Purged a second* are expired
conversations of 600 bytes; Redis removes expired keys by itself.
""",
        _tenant(scale.datastores),
        "## A process that touches all of them once\n",
        f"""\
A new process reads the context of every conversation with a memory object of its own, 64 at a time, and adds
a turn to every tenth. The goal is at most {MEMORY_GOAL / 1e6:.0f} MB of resident memory at the highest, the
interpreter, the libraries and the client included.
""",
        _memory(scale.datastores),
        "## One long conversation\n",
        """\
The latency of a turn (`add_turn` and `get_llm_context`) in microseconds, folding on, beside one bare write
and one bare read, as a median of blocks with the lowest and the highest.
""",
        _long(scale),
        f"## {scale.pods:,} pods and one directory\n",
        f"""\
A pod is a process of a service; here it is a directory object of its own, and one process with one client
has them all. Each pod lists the same {scale.users:,} users of one tenant, {PODS_AT_ONCE} pods at a time; then
all do it again. A pod remembers a user for a minute, so the second time takes no write. Afterwards the
tenant's listing has every user exactly once.
""",
        _directories(scale.datastores),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _about(scale: Scale) -> str:
    lines = [
        f"- {scale.date}, {scale.machine}.",
        *(f"- {one.name}: {one.about}." for one in scale.datastores),
        *(f"- {name} is missing: {why}." for name, why in scale.missing.items()),
        *(f"- {one.name} is incomplete: {why}." for one in scale.datastores for why in one.failed),
    ]
    return "\n".join(lines) + "\n"


def _tenant(datastores: Iterable[Scaled]) -> str:
    columns = ["", "stored a second", "bytes each", "page at the start, ms", "middle", "end"]
    columns += ["whole listing, s", "purged a second"]
    rows = (
        [
            one.name,
            f"{one.filled / one.fill_s:,.0f}",
            f"{one.bytes_each:,.0f}",
            *(f"{ms:.2f}" for ms in one.page_ms),
            *[""] * (3 - len(one.page_ms)),
            f"{one.listing_s:.1f}",
            f"{one.purged / one.purge_s:,.0f}" if one.purge_s else "",
        ]
        for one in datastores
        if one.filled
    )
    return table(columns, rows)


def _memory(datastores: Iterable[Scaled]) -> str:
    rows: list[list[str]] = []
    for one in datastores:
        if one.resident is not None:
            sizes = [f"{size / 1e6:,.0f}" for size in one.resident]
            reached = one.resident[-1] <= MEMORY_GOAL
            rows.append([one.name, *sizes, "reached" if reached else "**missed**"])
    return table(["", "before, MB", "after", "highest", ""], rows)


def _long(scale: Scale) -> str:
    columns = ["", *(f"after {length:,} turns" for length in scale.lengths)]
    columns += [f"bare, after {length:,}" for length in scale.lengths[-1:]]
    rows: list[list[str]] = []
    for one in scale.datastores:
        if len(one.long) == len(scale.lengths):
            bare = f"{statistics.median(one.long[-1].bare):,.0f}"
            rows.append([one.name, *(spread(alone.ours, 0) + _mark(alone) for alone in one.long), bare])
    return table(columns, rows)


def _mark(alone: Alone) -> str:
    return " ~" if alone.noisy else ""


def _directories(datastores: Iterable[Scaled]) -> str:
    columns = ["", "writes", "seconds", "p99 of one, ms", "writes the second time", "listing, ms"]
    rows = (
        [
            one.name,
            f"{it.writes:,}",
            f"{it.seconds:.1f}",
            f"{it.p99_ms:,.0f}",
            f"{it.again:,}",
            f"{it.listing_ms:.0f}",
        ]
        for one in datastores
        if (it := one.directories) is not None
    )
    return table(columns, rows)
