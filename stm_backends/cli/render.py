"""The output of the commands."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stm_backends.cli.replay import ledger
from stm_backends.cli.replay.report import Report
from stm_backends.drivers.plugins import Diagnosis
from stm_backends.memory import policy
from stm_backends.memory.view import render
from stm_backends.records.body import Body
from stm_backends.records.codec import load_body, load_turn
from stm_backends.types import ConversationTurn, MemoryBudget, ShortTermMemoryConfig, StoredTurn

console = Console()

_ROWS_OF_PODS: Final = 16
_ROWS_OF_KILLED: Final = 4

# With the characters that end a line and those that change the direction of text after them.
_UNPRINTABLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Return text with control characters and other unprintable characters escaped."""
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


def conversation(
    document: Mapping[str, Any], key: str, *, full_zone_turns: int | None = None
) -> RenderableType:
    """Return a readable view of one exported conversation.

    The number of turns that its memory shows in full is not stored; `None` uses the default and says so.
    """
    guessed = full_zone_turns is None
    if full_zone_turns is None:
        full_zone_turns = MemoryBudget().full_zone_turns
    config = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns, total_max_tokens=0))
    body = load_body(document["body"])
    turns = [StoredTurn(turn["turn_id"], load_turn(turn)) for turn in document["turns"]]
    pending, recent = policy.split(turns, config)
    view = render(config, health=body.health, summary=body.summary, pending=pending, recent=recent)
    facts = _facts(key, body, len(turns), view.tokens)
    if guessed and turns:
        facts.add_row(
            "recent", f"the newest {full_zone_turns} (the default; set yours with --full-zone-turns)"
        )
    parts: list[RenderableType] = [facts]
    if body.summary:
        covered, _ = ledger.split(body.summary)
        title = (
            "summary (first line added by replay: the turns that it covers, from 0)" if covered else "summary"
        )
        parts.append(Panel(Text(plain(body.summary)), title=title, title_align="left"))
    if pending:
        parts.append(_turns("pending (not summarized yet)", pending))
    if recent:
        parts.append(_turns("recent", recent))
    return Group(*parts)


def _facts(key: str, body: Body, turns: int, tokens: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("conversation", Text(plain(key), style="bold"))
    table.add_row("health", body.health.value)
    table.add_row(
        "turns", f"{turns} in full, {body.folded} in the summary, {body.dropped} dropped without a summary"
    )
    table.add_row("tokens", f"{tokens:,} (estimate for the whole conversation)")
    return table


def _turns(title: str, turns: Sequence[StoredTurn]) -> Panel:
    rows = Table.grid(padding=(0, 2))
    for stored in turns:
        _add_turn(rows, stored.turn)
    return Panel(rows, title=title, title_align="left")


def _add_turn(rows: Table, turn: ConversationTurn) -> None:
    if turn.ts:
        rows.add_row(Text("time", style="dim"), Text(_when(turn.ts), style="dim"))
    rows.add_row(Text("user", style="bold cyan"), Text(plain(turn.user_message)))
    if turn.trajectory_digest is not None and turn.trajectory_digest.tools_invoked:
        digest = turn.trajectory_digest
        observed = digest.observations_summary or ", ".join(digest.tools_invoked)
        rows.add_row(Text("tools", style="bold yellow"), Text(plain(observed)))
    rows.add_row(Text("assistant", style="bold green"), Text(plain(turn.assistant_response)))


def _when(ts: float) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(ts, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"unknown (ts is {ts!r}, not a time in seconds)"


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
    ):
        row(name, count, bad=count)
    table.add_section()
    row("pods killed", result.killed)
    row("turns retried", result.sent_again)
    row("turns in full", result.in_full)
    if result.newest is not None:
        row(f"turns dropped (older than the newest {result.newest})", result.let_go)
    else:
        row("turns in summaries", result.summarized)
        row("turns not summarized yet", result.pending)
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
            "in order. Older ones were dropped, as the strategy requires.",
            style="green",
        )
    if result.ok:
        return Text("Every acknowledged turn is stored once and in order.", style="green")
    return Text("Verification failed: the stored turns differ from the acknowledged ones.", style="bold red")
