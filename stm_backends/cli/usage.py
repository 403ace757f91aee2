"""The command `usage`: tokens and costs of answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from stm_backends.backend import Backend
from stm_backends.cli import datastores, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import FAILED, counted, interruptible, run, say_nothing_stored
from stm_backends.cli.owners import Owner, users_of
from stm_backends.cli.render import plain
from stm_backends.errors import SessionNotFound
from stm_backends.records.keys import memory_key
from stm_backends.records.usage import DAYS, Usage, total
from stm_backends.types import MemoryKey


def usage(
    whose: Annotated[
        str,
        typer.Argument(
            help="A conversation, a user, or a tenant for each of its users.",
            metavar="TENANT[:USER[:SESSION]]",
            autocompletion=conversations,
        ),
    ],
    days: Annotated[
        int | None,
        typer.Option(
            "--days",
            help="Sum the last N days in UTC, including today. [default: all]",
            metavar="N",
            min=1,
            max=DAYS,
        ),
    ] = None,
    daily: Annotated[bool, typer.Option("--daily", help="Print each day, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Sum the usage of answers: the numbers that programs passed as `usage` when they added messages.

    For a user, only the cards in the catalogue are read, which may lag by a minute, and no conversation.
    Conversations that were erased or have expired are not counted.
    """
    found = list[Usage]()

    def show(owner: str, sums: Usage) -> None:
        if sums.total:
            found.append(sums)
            typer.echo(_as_json(owner, sums) if as_json else _lines(owner, sums, daily=daily))

    async def work() -> bool:
        key = transfer.conversation_key(whose) if whose.count(":") > 1 else None
        owner = Owner() if key else Owner.of(whose)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            if key is not None:
                show(transfer.named(key), await _of_conversation(opened, key, days))
                return True
            async for tenant, user in users_of(opened, owner):
                sums = await opened.conversations.usage(tenant, user, days=days)
                show(transfer.user_composite(tenant, user), sums)
            return bool(found) or await opened.sessions.has(owner.tenant or "", owner.user)

    with interruptible(lambda: f"{counted(len(found), 'user')} had been printed."):
        if not run(work()):
            say_nothing_stored(whose)
            raise typer.Exit(FAILED)
    if len(found) > 1 and not as_json:
        typer.echo(_lines("all users", Usage(_sum(sums.total for sums in found))))
    if not found:
        when = "" if days is None else f" on the last {counted(days, 'day')}"
        typer.echo(plain(f"No answer of {whose} has any usage{when}: see add(..., usage=...)."), err=True)


async def _of_conversation(opened: Backend, key: MemoryKey, days: int | None) -> Usage:
    """Return the sums of a conversation, without creating it."""
    if await opened.driver.load(memory_key(key), last=0) is None:
        raise SessionNotFound("there is no conversation under this key")
    snapshot = await opened.memory(key).shared.load_copy("usage")
    since = None if days is None else datetime.now(UTC).date() - timedelta(days - 1)
    return total([snapshot.usage], since=since)


def _sum(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = [*several]
    return {
        name: _added(row.get(name, 0) for row in rows) for name in dict.fromkeys(n for r in rows for n in r)
    }


def _added(amounts: Iterable[float]) -> float:
    """Return the sum, as an integer if all numbers are integers."""
    some = [*amounts]
    whole = all(isinstance(one, int) for one in some)
    return sum(some) if whole else round(math.fsum(some), 12)


def _lines(owner: str, sums: Usage, *, daily: bool = False) -> str:
    lines = [owner, *_rows(sums.total)]
    for day, row in sums.days.items() if daily else ():
        lines += [f"  {day}", *(f"  {line}" for line in _rows(row))]
    return "\n".join(lines)


def _rows(row: Mapping[str, float]) -> list[str]:
    return [f"  {plain(name):<40} {_number(amount):>16}" for name, amount in row.items()]


def _number(amount: float) -> str:
    """Return a sum without an exponent, as people read prices."""
    return f"{amount:,}" if isinstance(amount, int) else f"{amount:,.12f}".rstrip("0")


def _as_json(owner: str, sums: Usage) -> str:
    days = {day.isoformat(): {**row} for day, row in sums.days.items()}
    return json.dumps({"key": owner, "total": {**sums.total}, "days": days})
