"""The output of the commands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stm_backends.admin.stats import Totals
from stm_backends.cli import figures
from stm_backends.cli.conversation import Conversation
from stm_backends.cli.replay.report import Report
from stm_backends.cli.saying import facts_of
from stm_backends.drivers.plugins import Diagnosis
from stm_backends.inspect.lines import lines_of
from stm_backends.memory.shared.reading import Numbered
from stm_backends.types import MemoryHealth, StoredTurn

console = Console()

_ROWS_OF_PODS: Final = 16
_ROWS_OF_KILLED: Final = 4

# Characters that end a line, change the direction of text, or are not visible. Joiners (U+200C, U+200D) are
# part of some scripts and emoji, so they stay between characters beyond the Latin ones.
_JOINED: Final = "[^\0-\u02ff\u200c\u200d]"
_UNPRINTABLE: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a"
    f"\U000e0000-\U000e0fff]|(?<!{_JOINED})[\u200c\u200d]|[\u200c\u200d](?!{_JOINED})"
)


def plain(text: str) -> str:
    """Return text with control, invisible and other unprintable characters as escapes."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def milliseconds(number: float) -> str:
    """Return a number of milliseconds with three significant digits at most."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def report(result: Report) -> RenderableType:
    """Return the tables at the end of a replay."""
    parts: list[RenderableType] = [_outcome(result), _latencies(result)]
    if result.kill_every and not result.killed:
        took = f"{result.seconds:.1f} s"
        parts.append(
            Text(
                f"No pod was killed: the turns took {took}, and --kill-every was "
                f"{result.kill_every:g} s. Use a smaller value.",
                style="yellow",
            )
        )
    return Group(*parts, _verdict(result))


def drivers(diagnoses: Sequence[Diagnosis]) -> None:
    """Print the installed backends, and below the table their problems and remedies."""
    table = Table(title="Installed backends")
    for heading in ("backend", "URLs", "package", "state"):
        table.add_column(heading, overflow="fold")
    for one in diagnoses:
        schemes = ", ".join(f"{scheme}://" for scheme in one.schemes)
        state = Text(one.state, style="green" if one.state == "ready" else "red")
        table.add_row(one.name, schemes, f"{one.distribution} {one.version}".strip(), state)
    console.print(table)
    for one in diagnoses:
        reason = one.reason.removesuffix(one.install).rstrip()
        for line in filter(None, (plain(reason), one.install and f"  {plain(one.install)}")):
            # On one line, so that it can be copied from a terminal of any width.
            console.print(Text(line), soft_wrap=True)


def conversation(shown: Conversation) -> RenderableType:
    """Return a readable view of one conversation."""
    facts = _pairs()
    facts.add_row("conversation", Text(plain(shown.key), style="bold"))
    for name, value in shown.facts().items():
        facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if shown.body.summary:
        title = shown.summary_title.lower()
        parts.append(Panel(Text(plain(shown.body.summary)), title=title, title_align="left"))
    if shown.pending:
        parts.append(_turns("pending (not summarized yet)", shown.pending))
    if shown.recent:
        parts.append(_turns("recent", shown.recent))
    return Group(*parts)


def numbered(units: Iterable[Numbered]) -> RenderableType:
    """Return turns and messages with their numbers."""
    rows = _pairs()
    for one in units:
        rows.add_row(Text(str(one.number), style="bold"), Text(_facts(one.stored), style="dim"))
        _add_lines(rows, one.stored)
    return rows


def stats(totals: Totals, title: str, *, quick: bool = False) -> RenderableType:
    """Return the table of sums; with `quick`, of the figures from names and cards."""
    table = Table(title=Text(plain(title)), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    read = [
        *((f"  {health.value}", count) for health, count in sorted(totals.health.items()) if count),
        ("turns or messages in full", totals.turns),
        ("  in summaries", totals.folded),
        ("  dropped without a summary", totals.dropped),
        ("  in pages of transcripts", totals.archived),
        ("    waiting for a summary", totals.waiting),
        ("tokens (estimate)", totals.tokens),
    ]
    for name, count in (
        ("users", totals.users),
        ("conversations", totals.conversations),
        *([("turns or messages, by the cards", totals.listed_turns)] if quick else read),
        ("logs of agent frameworks", totals.logs),
        ("saved states", totals.states),
        ("records of graphs", totals.graph_records),
        ("pages of transcripts", totals.pages),
        ("pages of logs", totals.log_pages),
        ("cards in the catalogue", totals.cards),
    ):
        style = "bold red" if name.strip() == MemoryHealth.DEGRADED.value else ""
        table.add_row(name, Text(f"{count:,}", style))
    if not quick:
        table.add_row("stored values", figures.size(totals.bytes))
    table.add_row("last activity", figures.iso(totals.last_activity) or "unknown")
    if totals.damaged:
        table.add_row("unreadable records", Text(f"{totals.damaged:,}", "bold red"))
    return table


def _pairs() -> Table:
    """Return a table of names and values, which shows long words in full."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    return rows


def _turns(title: str, turns: Sequence[StoredTurn]) -> Panel:
    rows = _pairs()
    for stored in turns:
        if facts := _facts(stored):
            rows.add_row(Text("time", style="dim"), Text(facts, style="dim"))
        _add_lines(rows, stored)
    return Panel(rows, title=title, title_align="left")


_STYLES: Final = {"user": "bold cyan", "assistant": "bold green"}


def _add_lines(rows: Table, stored: StoredTurn) -> None:
    for who, text in lines_of(stored):
        rows.add_row(Text(who, style=_STYLES.get(who, "bold yellow")), Text(plain(text)))


def _facts(stored: StoredTurn) -> str:
    return ", ".join(facts_of(stored))


# Replay


def _outcome(result: Report) -> Table:
    pods = f"{result.pods} pod{'' if result.pods == 1 else 's'}"
    table = Table(title=f"Replay on {result.backend}, {result.strategy}, {pods}", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(name: str, value: object, *, bad: object = False) -> None:
        table.add_row(
            name, Text(f"{value:,}" if isinstance(value, int) else str(value), "bold red" if bad else "")
        )

    row("conversations", result.conversations)
    row("turns written", result.turns)
    for name, count in (
        ("turns lost", result.found.lost),
        ("turns duplicated", result.found.doubled),
        ("turns out of order", result.found.out_of_order),
        ("turns foreign or altered", result.found.foreign),
        ("reads with a missing or duplicate turn", result.bad_reads),
        ("turns missing, duplicated or altered in transcripts", result.transcript.total),
    ):
        row(name, count, bad=count)
    table.add_section()
    row("pods killed", result.killed)
    row("turns retried", result.sent_again)
    row("turns in transcripts", result.in_transcript)
    row("turns or messages in full", result.in_full)
    if result.waiting_reads:
        row("reads while turns waited in transcripts for a summary", result.waiting_reads)
    if result.newest is not None:
        row(f"turns in transcripts alone (older than the newest {result.newest})", result.let_go)
    else:
        row("turns in summaries", result.summarized)
        row("turns not summarized yet", result.pending + result.waiting)
        row("summaries written", result.summaries)
        row("lost summary races", result.lost_races)
        row("summarizer calls", result.summarizer_calls)
    table.add_section()
    row("tokens of memory sent to the LLM", result.tokens_with)
    row("without memory (all turns every time)", result.tokens_without)
    if result.newest is None:
        row("tokens read by the summarizer", result.summarizer_tokens_read)
        row("tokens written by the summarizer", result.summarizer_tokens_written)
    table.add_section()
    row("time for adding turns", f"{result.seconds:.1f} s")
    row("total time, with final summaries and reading back", f"{result.seconds_in_all:.1f} s")
    row("turns per second", f"{result.turns_per_second:,.0f}")
    return table


def _latencies(result: Report) -> Table:
    table = Table("pod", "turns", title="Latency in ms", caption_justify="left")
    for name in ("add_turn p50", "p99", "get_llm_context p50", "p99"):
        table.add_column(name, justify="right")
    table.columns[1].justify = "right"
    rows = [one for one in result.latencies if not one.killed or result.killed <= _ROWS_OF_KILLED]
    if result.killed > _ROWS_OF_KILLED:
        rows.append(result.killed_together)
    for one in rows[:_ROWS_OF_PODS]:
        numbers = (one.add_p50, one.add_p99, one.read_p50, one.read_p99)
        killed = " (killed)" if one.killed else ""
        shown = ("-" if math.isnan(number) else f"{number:.2f}" for number in numbers)
        table.add_row(f"{one.pod}{killed}", f"{one.turns:,}", *shown)
    if len(rows) > _ROWS_OF_PODS:
        table.caption = f"and {len(rows) - _ROWS_OF_PODS} more pods; --json lists all"
    return table


def _verdict(result: Report) -> Text:
    if result.ok and result.newest is not None:
        return Text(
            f"The newest turns (at least {result.newest} of each conversation, or all) are stored once and "
            "in order. Older ones are in the transcripts, once and in order.",
            style="green",
        )
    if result.ok:
        return Text("Every acknowledged turn is stored once and in order.", style="green")
    return Text("Verification failed: the stored turns differ from the acknowledged ones.", style="bold red")
