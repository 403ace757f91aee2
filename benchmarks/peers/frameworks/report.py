"""The figures about frameworks: a section of the page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import machine, table
from benchmarks.peers.figures import Measured, Pair, Side
from benchmarks.peers.frameworks.catalogue import FRAMEWORKS, Framework
from benchmarks.peers.report import DATASTORES, kilo, not_measured, number, write_section

_BEGINNING = """\
## Frameworks

Written by `python3 -m nox -s peers -- --frameworks --write`. {date}; {machine}; a load of {load:.1f}
at the end.

Each framework's own back end, and our integration, in one process and on one server, through the framework's
interface: both are given the same calls with the same data.

- **Times** are medians in ms of calls that alternate, in random order. A turn has about 110 bytes
  of text, words of the dialogues at random.
- **Times ours** is the own back end's time, or its bytes, divided by ours: above 1, ours takes less.
- **Counts** say what should be: those that are wrong stand in bold. How many are lost varies with timing.
  Exceptions that were raised are counted beside them; what raises is not acknowledged.
- **-**: there is no such thing.
"""

_NOTES = """\
- **Claude Agent SDK, Pydantic AI**: their only stores keep objects in the memory of one process. Ours is
  measured on its in-memory driver, which stores the bytes that a datastore would be given.
- **Google ADK**: four processes read the session, append an event that changes the session's, the user's and
  the app's state, and read again after a `StaleSessionError`, as ADK asks for.
- **LangGraph**: a graph of one node, with the default `durability="async"`. A run stores several checkpoints;
  its time is divided by their number. Bytes are values without indexes and pages, after a run for each two
  messages. Ours stores what a checkpoint adds, and older ones in pages, which are compressed. Where a run of
  ours raises `EditConflict`, nothing of its step is stored; `saver.turn` lets runs wait for each other.
- **Agent Framework**: a run reads the history once, and stores two messages. `agent-framework-redis` admits
  no redis-py after 7.2.0, so this section is measured with an earlier one than the others.
- **Strands**: its own are files, and ours is in SQLite. An exchange is a call of an agent whose model answers
  at once, with the agent's own work. It has the default window of 40 messages. Each of four processes makes
  an agent for each exchange.
- **OpenAI Agents**: each call is cancelled at a random moment. It has landed later if a read after the
  cancellation did not return the item, and one half a second after the last call did.
- **LangChain**: tools returned bytes, a time, a Decimal, a set and an exception beside their text. Ours keeps
  what JSON can say of them.
- **LlamaIndex**: each of four processes adds messages and, after each fourth, deletes the oldest one; as many
  as are deleted were there before. Its `PostgresChatStore` admits no asyncpg after 0.30, and ours none before
  0.32.
"""


def section(results: Sequence[Measured]) -> str:
    """Return the section of a run with `--frameworks`."""
    beginning = _BEGINNING.format(date=time.strftime("%-d %B %Y"), machine=machine(), load=os.getloadavg()[0])
    parts = [beginning]
    framework = ""
    for one in results:
        about = FRAMEWORKS[one.name]
        if about.framework != framework:
            framework = about.framework
            parts.append(f"### {framework}\n")
        if one.pairs:
            parts.append(table(_columns(about), map(_row, one.pairs)))
    parts += not_measured(results, FRAMEWORKS)
    return "\n".join([*parts, "### Settings of frameworks\n", _settings(results), _NOTES])


def _columns(about: Framework) -> list[str]:
    where = f"{about.framework} on {DATASTORES[about.datastore]}"
    return [where, about.own, about.ours, "times ours"]


def _row(pair: Pair) -> list[str]:
    return [pair.what, _cell(pair.unit, pair.theirs), _cell(pair.unit, pair.ours), times_ours(pair)]


def times_ours(pair: Pair) -> str:
    """Return how many times ours theirs takes; nothing for counts."""
    if pair.unit == "count" or pair.theirs.value is None or not pair.ours.value:
        return ""
    return number(pair.theirs.value / pair.ours.value, digits=2)


def _cell(unit: str, side: Side) -> str:
    if side.value is None:
        return "-"
    if unit == "ms":
        return f"{number(side.value, digits=2)} ms"
    if unit == "bytes":
        return f"{kilo(side.value)} kB"
    shown = f"{side.value:,.0f}" + ("" if side.of is None else f" of {side.of:,}")
    judged = shown if side.right in (None, side.value) else f"**{shown}**"
    errors = ", ".join(f"{times} x `{kind}`" for kind, times in sorted(side.errors.items()))
    return f"{judged}; {errors}" if errors else judged


def _settings(results: Sequence[Measured]) -> str:
    def row(one: Measured) -> list[str]:
        about = FRAMEWORKS[one.name]
        versions = ", ".join(f"{package} {found}" for package, found in one.versions.items())
        label = f"[{about.label}]({about.link})"
        return [label, one.about or DATASTORES[about.datastore], versions, about.settings]

    columns = ["framework and its own back end", "datastore", "versions", "settings"]
    return table(columns, map(row, results)).replace("---:", "---")


def write(results: Sequence[Measured], root: Path) -> None:
    """Write the section of PEERS.md."""
    write_section(section(results), root)
