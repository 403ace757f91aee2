"""Logs of agent frameworks at the command line: how `history` and `show` present them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stm_backends.backend import Backend
from stm_backends.cli.figures import iso, when
from stm_backends.cli.render import plain
from stm_backends.errors import ConfigurationError, Corrupt, InvalidKey, SessionNotFound
from stm_backends.history.activity import text_of
from stm_backends.history.items import Item
from stm_backends.history.log import LogItem, LogPage
from stm_backends.records import keys, operations
from stm_backends.records.keys import LogKind
from stm_backends.types import MemoryKey

SHOWN: Final = 20
"""The number of items that `show` shows."""

_SPEAKERS: Final[dict[str, Literal["user", "assistant"]]] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "request": "user",
    "response": "assistant",
}

LogName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--log",
        help=f"Show the log of an agent framework: {' or '.join(keys.LOG_KINDS)}. [default: the only one of "
        "a conversation that has no turns]",
        metavar="FRAMEWORK",
    ),
]


@dataclass(frozen=True, slots=True)
class Found:
    """A page of the log of a framework."""

    kind: LogKind
    page: LogPage


def kind_in(name: str | None) -> LogKind | None:
    """Return the framework of an option. Raises `ConfigurationError` for any other."""
    for kind in get_args(LogKind):
        if kind == name:
            return kind
    if name is not None:
        raise ConfigurationError(f"--log is one of: {', '.join(keys.LOG_KINDS)}")
    return None


async def is_there(opened: Backend, key: MemoryKey, kind: LogKind) -> bool:
    """Say whether a conversation has a log of a framework; an unreadable one counts.

    A log that was ended, or emptied by a purge, does not count, though its record may exist.
    """
    try:
        return (await opened.item_log(key, kind).newest(0)).exists
    except (Corrupt, InvalidKey):
        return True


async def of_user(opened: Backend, tenant: str, user: str) -> AsyncIterator[tuple[LogKind, MemoryKey]]:
    """Yield the logs of a user that exist; reads their heads, several at once."""
    listed = [one async for one in opened.sessions.logs(tenant, user)]
    for start in range(0, len(listed), operations.AT_ONCE):
        some = listed[start : start + operations.AT_ONCE]
        there = await operations.together(some, lambda one: is_there(opened, one[1], one[0]))
        for one in itertools.compress(some, there):
            yield one


async def page_of(
    opened: Backend,
    key: MemoryKey,
    kind: LogKind | None,
    *,
    before: int | None = None,
    after: int | None = None,
    at: int | None = None,
    limit: int = SHOWN,
) -> Found:
    """Return items of a log, as `ItemLog.transcript` does; by default of the only log.

    Raises `SessionNotFound` if there is none, and `ConfigurationError` if there are several.
    """
    asked: tuple[LogKind, ...] = (kind,) if kind else keys.LOG_KINDS
    kinds: list[LogKind] = [one for one in asked if await is_there(opened, key, one)]
    if not kinds:
        what = f"log of {kind}" if kind else "conversation"
        raise SessionNotFound(f"there is no {what} under this key")
    if len(kinds) > 1:
        raise ConfigurationError(f"the conversation has several logs; give one: {_options(kinds)}")
    log = opened.item_log(key, kinds[0])
    return Found(kinds[0], await log.transcript(before=before, after=after, at=at, limit=limit))


def _options(kinds: list[LogKind]) -> str:
    return ", ".join(f"--log {kind}" for kind in kinds)


def as_json(one: LogItem) -> dict[str, Any]:
    """Return one item as `history --json` prints it."""
    return {"number": one.number, "retained": one.retained, "at": iso(one.at or None), "item": one.item}


def numbered(page: LogPage) -> RenderableType:
    """Return items with their numbers."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for one in page.items:
        text = text_of(one.item) or json.dumps(one.item)
        rows.add_row(Text(str(one.number), style="bold"), Text(plain(who(one.item))), Text(plain(text)))
    return rows


def shown(found: Found, key: str) -> RenderableType:
    """Return the output of `show` for a log."""
    rows = Table.grid(padding=(0, 2))
    for name, value in {"log of": found.kind, **facts(found.page, len(found.page.items))}.items():
        rows.add_row(name, Text(value))
    return Group(Text(plain(key), style="bold"), rows, numbered(found.page))


def document(found: Found, key: str) -> dict[str, Any]:
    """Return the output of `show --json` for a log."""
    page = found.page
    return {
        "key": key,
        "log": found.kind,
        "oldest": page.oldest,
        "newest": page.newest,
        "items": [as_json(one) for one in page.items],
    }


def facts(page: LogPage, below: int) -> dict[str, str]:
    """Return the facts above the items of a log; `below` is the number of items shown."""
    last = max((one.at for one in page.items), default=0.0)
    count = page.newest - page.oldest + 1
    return {
        "items": f"{count:,}" + (f", the newest {below:,} below" if below < count else ""),
        "last activity": when(last) if last else "unknown",
    }


def who(item: Item) -> str:
    """Return the author of an item, in the words of the framework."""
    message: object = item.get("message")
    inner = cast("Item", message) if isinstance(message, dict) else {}
    return str(item.get("role") or item.get("type") or inner.get("kind") or "")


def speaker(item: Item) -> Literal["user", "assistant", ""]:
    """Return the author of an item in the words of a turn, if that is a person or a model."""
    return _SPEAKERS.get(who(item), "") if text_of(item) else ""
