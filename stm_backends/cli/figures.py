"""Statistics as lines of text and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final

from stm_backends.admin.stats import ConversationStats, Totals
from stm_backends.types import MemoryHealth

_WIDTHS: Final = {
    "USERS": 5,
    "CONVS": 5,
    "TURNS": 6,
    "BYTES": 9,
    "TOKENS": 8,
    "DEGRADED": 8,
    "HEALTH": 8,
    "CARDS": 5,
    "ALL TURNS": 9,
    "PAGES": 6,
}
_SPANS: Final = 10
"""Maximum number of spans of numbers that are named."""

_OF_CONVERSATIONS: Final = ("TURNS", "BYTES", "TOKENS", "HEALTH")
_OF_USERS: Final = ("CONVS", "TURNS", "BYTES", "TOKENS", "DEGRADED")
_LISTED: Final = ("CONVS", "CARDS", "ALL TURNS", "PAGES")


def iso(when: float | None) -> str | None:
    """Return a time in ISO 8601, in UTC and whole seconds; `None` if it is unknown or no time."""
    try:
        moment = None if when is None else datetime.datetime.fromtimestamp(when, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment and f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def when(ts: float) -> str:
    """Return a time for people."""
    return (iso(ts) or "unknown").replace("T", " ").replace("Z", " UTC")


def spans(numbers: Iterable[int | range]) -> str:
    """Return ascending numbers in words, such as `3, 64 to 127`; of many spans the first ones."""
    merged: list[range] = []
    for one in numbers:
        span = range(one, one + 1) if isinstance(one, int) else one
        if merged and merged[-1].stop == span.start:
            span = range(merged.pop().start, span.stop)
        merged.append(span)
    # Without separators of thousands, which look like those of the list, and no option takes.
    said = [
        str(span.start) if span.stop - span.start == 1 else f"{span.start} to {span.stop - 1}"
        for span in merged[:_SPANS]
    ]
    more = len(merged) - len(said)
    return ", ".join(said) + (f" and {more:,} more such" if more else "")


def head(what: str, *, quick: bool = False) -> str:
    """Return the headings for lines of `CONVERSATION`, `USER`, `TENANT`, or `TENANT[:USER]`."""
    names = _OF_CONVERSATIONS if what == "CONVERSATION" else _LISTED if quick else _OF_USERS
    names = ("USERS", *names) if what.startswith("TENANT") else names
    return f"{_columns(dict(zip(names, names, strict=True)))}  {'LAST ACTIVITY':<17}  {what}"


def line(stats: ConversationStats | Totals | None, key: str, *, users: bool = False) -> str:
    """Return one line; `users` adds their number. The key comes last, because it may have spaces.

    Without figures, it is that of a conversation.
    """
    if stats is None:
        return f"{_columns(dict.fromkeys(_OF_CONVERSATIONS, '-'))}  {'-':<17}  {key}"
    columns: dict[str, object] = {"USERS": stats.users} if users and isinstance(stats, Totals) else {}
    if isinstance(stats, Totals):
        columns["CONVS"] = stats.conversations
    columns |= {"TURNS": stats.turns, "BYTES": stats.bytes, "TOKENS": stats.tokens}
    if isinstance(stats, Totals):
        columns["DEGRADED"] = stats.health[MemoryHealth.DEGRADED]
    else:
        columns["HEALTH"] = stats.health.value
    return f"{_columns(columns)}  {_minute(stats.last_activity):<17}  {key}"


def listed_line(totals: Totals, key: str) -> str:
    """Return one line of the figures from names and cards."""
    columns = {"USERS": totals.users, "CONVS": totals.conversations, "CARDS": totals.cards}
    columns |= {"ALL TURNS": totals.listed_turns, "PAGES": totals.pages}
    return f"{_columns(columns)}  {_minute(totals.last_activity):<17}  {key}"


def as_json(stats: ConversationStats | Totals, *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of a conversation or of many; with `quick`, those from names and cards."""
    if quick and isinstance(stats, Totals):
        names = ("users", "conversations", "cards", "listed_turns", "pages", "log_pages", "logs", "states")
        figures = {name: getattr(stats, name) for name in (*names, "graph_records", "damaged")}
        return figures | {"last_activity": iso(stats.last_activity)}
    figures = {
        "turns": stats.turns,
        "folded": stats.folded,
        "dropped": stats.dropped,
        "archived": stats.archived,
        "waiting": stats.waiting,
        "bytes": stats.bytes,
        "tokens": stats.tokens,
        "last_activity": iso(stats.last_activity),
    }
    if isinstance(stats, ConversationStats):
        return figures | {"health": stats.health.value}
    return {
        "users": stats.users,
        "conversations": stats.conversations,
        **figures,
        "health": {health.value: stats.health[health] for health in _STORED},
        "logs": stats.logs,
        "states": stats.states,
        "graph_records": stats.graph_records,
        "pages": stats.pages,
        "log_pages": stats.log_pages,
        "cards": stats.cards,
        "damaged": stats.damaged,
    }


def _minute(when: float | None) -> str:
    """Return a time in one word, to the minute."""
    moment = iso(when)
    return "-" if moment is None else f"{moment[:-4]}Z"


def size(count: int) -> str:
    """Return a number of bytes in the unit that suits it: `1.2 MB`."""
    number, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{count:,} bytes" if unit == "bytes" else f"{number:.1f} {unit}"


_STORED: Final = (MemoryHealth.HEALTHY, MemoryHealth.RETRY, MemoryHealth.DEGRADED)


def _columns(columns: dict[str, Any]) -> str:
    return "  ".join(f"{value:>{_WIDTHS[name]}}" for name, value in columns.items())
