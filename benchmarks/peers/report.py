"""The figures as a page, as charts, and as the short table of README.md."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.charts import Series, bars
from benchmarks.pages import machine, table
from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.figures import HISTORY, ITEMS, SIDEBAR, AtLength, Counted, Measured

DATASTORES = {
    "memory": "memory",
    "redis": "Redis",
    "postgres": "PostgreSQL",
    "mongo": "MongoDB",
    "sqlite": "SQLite",
    "dynamo": "DynamoDB",
}

_BEGINNING = """\
# Compared with other libraries

Written by `python3 -m nox -s peers -- --write`. {date}; {machine}; a load of {load:.1f} at the end. A load
above the number of processors means that other programs ran, and that times are too long.

A **turn** stores a question and its answer, then reads what the model is shown. The dialogues are those of
`examples/conversations.jsonl`, or of the file that `--dialogues` names; a turn has about 100 bytes of text.
Each library runs in a process of its own, on the same server as the others, with the settings
[below](#settings-and-versions).

- **Beside ours.** Every process also measures `stm-backends` with summaries, alternating with the other
  library. The figure in parentheses is ours, from the same seconds.
- **Time** is the median of one turn at a time, in a conversation of 10, 100 and 1,000 turns. Our summaries
  are written between the timed turns; they are included in the turns a second and in the bytes.
- **Turns a second** are those of 32 conversations at once in one process, from 10 turns each.
- **Sent and received** are the bytes of one turn as the client sees them, counted by a proxy. A **round
  trip** begins when a client sends after it has received.
- **Stored** is what one more turn adds at that length: values without indexes and pages; for Redis,
  `MEMORY USAGE`. Summaries remove turns, so the figure can be negative.
- **Lost** turns were acknowledged and cannot be read back; **doubled** turns are stored more than once. Eight
  tasks of one process, or four processes, add to one conversation. Each reads, waits 2 ms in place of a
  model, and stores. Libraries that summarize are told to keep every turn for this count. The number of lost
  turns varies with timing.

What is read differs: most libraries return every message; `stm-backends` and PenguiFlow return a summary and
the recent turns. *{every}* shows what `stm-backends` costs when it returns every turn.
"""

_SHOWN = """\
## What a product shows

Written by `python3 -m nox -s peers -- --shown --write`. {date}; {machine}; a load of {load:.1f} at the end.

A conversation of 2,000 turns has 4,000 items, and a user has 1,000 conversations of one turn. *History* is 50
turns from the middle of the conversation, *newest* its last 20 items, and *sidebar* the 50 conversations with
the latest activity. Medians of 20 calls in ms that alternate with ours, which are in parentheses. The handles
that read have stored nothing.

- **whole**: no call of the library returns only that. The whole conversation was read, to cut it from there.
- **no**: no call of the library returns it.
- Ours are `memory.transcript(at=)`, `StmSession.get_items(limit=20)` and `backend.conversations.list`.
- All conversations were active in the same hour.
- Not every library may have been measured; a run with `--peers` has only those that it names.
- LangGraph's checkpointers list checkpoints of all users, latest first. Each conversation has one here; where
  it has several, 50 checkpoints are fewer conversations. They have no title.
"""

_SETTINGS = """\
## Settings and versions

Each library has the settings that its documentation recommends for speed, and otherwise its defaults.
"""

_NOTES = """\
## Notes

- LangGraph's graph has one node, which adds the answer. `durability="exit"` stores one checkpoint for each
  turn and is the fastest mode; the default stores one for each step. A
  [`DeltaChannel`](https://github.com/langchain-ai/langgraph/pull/7586) stores differences and is in beta. The
  open source library does not order two runs of one thread; LangSmith Deployment
  [queues them](https://docs.langchain.com/langsmith/double-texting).
- LangGraph stores the state of a whole graph and can return to earlier states. The other libraries keep a
  conversation only.
- PenguiFlow loads its memory before a run and saves it after; the later save wins.
- py-key-value stores values. Its rows show what keeping all messages as one value costs.
- The sessions of the OpenAI Agents SDK return the last `limit` items where one is set. By default they return
  all.
- `DynamoDBSaver` stores empty values. DynamoDB accepts them since May 2020, DynamoDB Local 1.11 does not.
- `RedisChatMessageHistory` of langchain-redis is deprecated since 0.2.6 in favour of LangGraph.
"""


def page(results: Sequence[Measured], charts: dict[str, str]) -> str:
    """Return the page; `charts` are paths of the pictures, by datastore."""
    parts = [
        _BEGINNING.format(
            date=time.strftime("%-d %B %Y"),
            machine=machine(),
            load=os.getloadavg()[0],
            every=PEERS["ours-all-redis"].label,
        )
    ]
    for datastore, name in DATASTORES.items():
        chosen = _on(results, datastore)
        if not chosen:
            continue
        parts += [f"## {name}\n", f"{next((one.about for one in chosen if one.about), name)}.\n"]
        if datastore in charts:
            parts.append(f"![Milliseconds for one turn on {name}, for each library]({charts[datastore]})\n")
        parts += [_times(chosen), _bytes(chosen), _losses(chosen)]
        parts += not_measured(chosen)
    parts += [_SETTINGS, settings_of(results), _NOTES]
    return "\n".join(parts).rstrip() + "\n"


def chart(results: Sequence[Measured], datastore: str) -> str | None:
    """Return the times of one turn on a datastore as SVG, or `None` if there are none."""
    chosen = [one for one in _on(results, datastore) if one.lengths]
    lengths = lengths_of(chosen)
    if not lengths:
        return None
    series = [
        Series(f"{length:,} turns", [at_length(one, length).ms for one in chosen]) for length in lengths
    ]
    title = f"{DATASTORES[datastore]}: milliseconds for one turn, by the length of the conversation"
    return bars(title, [_peer(one).short for one in chosen], series)


def short_table(results: Sequence[Measured]) -> str:
    """Return the table of README.md: the libraries on Redis, at the shortest and the longest length."""
    chosen = _on(results, "redis")
    lengths = lengths_of(chosen)
    ends = (lengths[0], lengths[-1]) if lengths else (0, 0)
    after = f"after {ends[0]:,} / {ends[1]:,} turns"
    most = max((one.processes.acknowledged for one in chosen if one.processes), default=0)
    lost = f"lost of {most} turns that four processes add at once"

    def row(one: Measured) -> list[str]:
        peer = _peer(one)
        first, last = (at_length(one, length) for length in ends)
        wire = [sum_of(at.sent, at.received) for at in (first, last)]
        return [
            peer.label if peer.is_ours else f"[{peer.label}]({peer.link})",
            f"{number(first.ms)} / {number(last.ms)}",
            f"{kilo(wire[0])} / {kilo(wire[1])}",
            str(one.processes.lost) if one.processes else "-",
            peer.shows,
        ]

    columns = ["on Redis", f"ms for a turn, {after}", f"kB on the wire, {after}", lost, "the model is shown"]
    return table(columns, map(row, chosen)).replace("---: |\n", "--- |\n", 1)


_MARKED = re.compile(r"(<!-- peers: .*? -->\n).*?(\n<!-- end of peers -->)", re.DOTALL)


def in_readme(text: str, results: Sequence[Measured]) -> str:
    """Return the text of README.md with its table replaced."""
    written, times = _MARKED.subn(lambda found: f"{found[1]}\n{short_table(results)}{found[2]}", text)
    if times != 1:
        raise ValueError("README.md has no place for the table, or several")
    return written


def shown(results: Sequence[Measured]) -> str:
    """Return the section about what a product shows, of a run with `--shown`."""

    def cell(one: Measured, what: str) -> str:
        found = one.shown.get(what)
        if found is None:
            return "-"
        if found.ms is None:
            return "no"
        return f"{'whole: ' if found.whole else ''}{beside(found.ms, found.ours_ms)}"

    beginning = _SHOWN.format(date=time.strftime("%-d %B %Y"), machine=machine(), load=os.getloadavg()[0])
    parts = [beginning]
    for name, chosen in ((name, _on(results, datastore)) for datastore, name in DATASTORES.items()):
        if chosen:
            whats = (HISTORY, ITEMS, SIDEBAR)
            rows = ([_peer(one).label, *(cell(one, what) for what in whats)] for one in chosen)
            parts.append(table([name, "history", "newest", "sidebar"], rows))
    return "\n".join([*parts, *not_measured(results)])


SECTIONS = ("## Messages\n", "## Frameworks\n", "## What a product shows\n")
"""What other runs write into the page, before its settings."""


def with_section(page: str, section: str) -> str:
    """Return the page with this section in the place of an earlier one, or before the settings."""
    heading = _heading(section)
    kept = {each: section if each == heading else section_of(page, each) for each in SECTIONS}
    settings = _heading(_SETTINGS)
    before, _, after = page.partition(settings)
    for each in SECTIONS:
        before = before.partition(each)[0]
    return before + "".join(f"{one}\n" for one in kept.values() if one) + settings + after


def section_of(page: str, heading: str) -> str:
    """Return the section that the page has under a heading, or nothing."""
    _, found, rest = page.partition(heading)
    own, *_ = rest.split("\n## ", 1)
    return found and f"{found}{own.rstrip()}\n"


def _heading(text: str) -> str:
    return text.partition("\n")[0] + "\n"


def write_section(section: str, root: Path) -> None:
    """Write one section of the page, and nothing else."""
    path = root / "benchmarks" / "PEERS.md"
    path.write_text(with_section(path.read_text("utf-8"), section), encoding="utf-8")


def write_shown(results: Sequence[Measured], root: Path) -> None:
    """Write the section about what a product shows, and nothing else."""
    write_section(shown(results), root)


def write(results: Sequence[Measured], root: Path) -> None:
    """Write the page, its charts, and the table of README.md. The sections of other runs stay."""
    folder = root / "benchmarks"
    drawn = {datastore: chart(results, datastore) for datastore in DATASTORES}
    charts = {datastore: f"peers-{datastore}.svg" for datastore, picture in drawn.items() if picture}
    for datastore, name in charts.items():
        (folder / name).write_text(drawn[datastore] or "", encoding="utf-8")
    path = folder / "PEERS.md"
    earlier, written = path.read_text("utf-8"), page(results, charts)
    for heading in SECTIONS:
        if kept := section_of(earlier, heading):
            written = with_section(written, kept)
    path.write_text(written, encoding="utf-8")
    readme = root / "README.md"
    readme.write_text(in_readme(readme.read_text("utf-8"), results), encoding="utf-8")


# The parts


def _peer(measured: Measured) -> Peer:
    return PEERS[measured.name]


def _on(results: Iterable[Measured], datastore: str) -> list[Measured]:
    return [one for one in results if _peer(one).datastore == datastore]


def lengths_of(results: Iterable[Measured]) -> list[int]:
    """Return the lengths that were measured."""
    return sorted({length for one in results for length in one.lengths})


def at_length(measured: Measured, length: int) -> AtLength:
    """Return what was measured at a length, or nothing."""
    return measured.lengths.get(length) or AtLength(length)


def _times(results: Sequence[Measured]) -> str:
    lengths = lengths_of(results)
    at_lengths = (f"at {length:,} turns" for length in lengths)
    columns = ["ms for one turn, and (ours)", *at_lengths, "turns a second at 32", "round trips"]

    def row(one: Measured) -> list[str]:
        several = one.together
        trips = [at.round_trips for at in one.lengths.values() if at.round_trips is not None]
        return [
            _peer(one).label,
            *(beside(at.ms, at.ours_ms) for at in (at_length(one, length) for length in lengths)),
            beside(several and several.turns_a_second, several and several.ours, digits=0),
            number(trips[-1] if trips else None),
        ]

    return table(columns, map(row, results))


def _bytes(results: Sequence[Measured]) -> str:
    lengths = lengths_of(results)
    slashed = " / ".join(f"{length:,}" for length in lengths)
    columns = [f"kB for one turn, at {slashed} turns", "sent", "received", "stored"]

    def row(one: Measured) -> list[str]:
        ats = [at_length(one, length) for length in lengths]
        kinds = ([at.sent for at in ats], [at.received for at in ats], [at.stored for at in ats])
        return [_peer(one).label, *(" / ".join(map(kilo, each)) for each in kinds)]

    return table(columns, map(row, results))


def not_measured(results: Sequence[Measured], peers: Mapping[str, Peer] = PEERS) -> list[str]:
    """Return why figures are missing, if any are."""
    problems = [f"- {peers[one.name].label}: {problem}." for one in results for problem in one.problems]
    return ["Not measured:\n\n" + "\n".join(problems) + "\n"] if problems else []


def _losses(results: Sequence[Measured]) -> str:
    columns = ["lost + doubled turns", "8 tasks", "4 processes"]
    rows = ([_peer(one).label, counted(one.tasks), counted(one.processes)] for one in results)
    return table(columns, rows)


def settings_of(results: Sequence[Measured], peers: Mapping[str, Peer] = PEERS) -> str:
    """Return the table of settings and versions."""

    def row(one: Measured) -> list[str]:
        peer = peers[one.name]
        versions = ", ".join(f"{package} {number}" for package, number in one.versions.items())
        return [
            f"[{peer.label}]({peer.link}), {DATASTORES[peer.datastore]}",
            versions or ", ".join(peer.packages),
            peer.settings,
            peer.shows,
        ]

    rows = table(["library", "versions", "settings", "the model is shown"], map(row, results))
    return rows.replace("---:", "---")


def number(value: float | None, digits: int = 1) -> str:
    """Return a figure, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def kilo(value: float | None) -> str:
    """Return bytes as kB, with three digits."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 1e3 else 1 if abs(value) < 1e5 else 0
    return f"{value / 1e3:,.{digits}f}"


def sum_of(*values: float | None) -> float | None:
    """Return the sum of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def beside(value: float | None, ours: float | None, digits: int = 1) -> str:
    """Return a figure, and ours in parentheses."""
    return "-" if value is None else f"{number(value, digits)} ({number(ours, digits)})"


def counted(found: Counted | None) -> str:
    """Return what was lost and doubled, and what was raised."""
    if found is None:
        return "-"
    errors = ", ".join(f"{times} x `{kind}`" for kind, times in sorted(found.errors.items()))
    lost = f"{found.lost} + {found.doubled} of {found.acknowledged}"
    judged = f"**{lost}**" if found.lost or found.doubled else lost
    return f"{judged}; {errors}" if errors else judged
