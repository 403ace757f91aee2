"""The command `stats`: amounts of stored data, and the health of conversations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated

import typer

from stm_backends.admin.stats import Damaged, Found, Totals, WorkStats
from stm_backends.backend import Backend
from stm_backends.catalogue.card import Card
from stm_backends.cli import datastores, figures, render
from stm_backends.cli.completion import owners as owners_like
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import FAILED, Named, counted, interruptible, reported, run, say_nothing_stored
from stm_backends.cli.owners import Owner, damaged_as, tenants_of, users_of
from stm_backends.cli.progress import Progress
from stm_backends.errors import ConfigurationError, Corrupt, Denied
from stm_backends.types import MemoryHealth


def stats(
    whose: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tenants and users. Without any, all tenants, if the datastore can find them.",
            metavar="TENANT[:USER]",
            autocompletion=owners_like,
        ),
    ] = None,
    degraded: Annotated[
        bool, typer.Option("--degraded", help="Count only conversations whose health is degraded.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Read only the cards of the catalogue: number of records of each kind, turns and "
            "last activity.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line, the last with the totals."),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Count users, conversations, turns, bytes and tokens of tenants and users, and their health.

    Turns in pages are turns of transcripts that have left the record. Cards are the entries of the catalogue
    of conversations. They follow a turn within a minute; conversations of older versions have none.

    Every record is read once, in pages. Bytes count the stored values, without the overhead of the
    datastore. Tokens are the memory's estimate. The time to live of a record cannot be read, so none is
    shown.

    The last line says how many conversations of the tenants wait for `work`, if any ever did.

    An unreadable record is reported and counted, and the exit status is 1. It is also 1 if nothing is stored
    for one of the tenants and users.
    """
    with reported():
        if quick and degraded:
            raise ConfigurationError("give --quick or --degraded, not both: a card does not say the health")
        given = dict.fromkeys(Owner.of(text) for text in whose or ())
        # A user of a tenant that is counted as a whole is not counted twice.
        owners = [one for one in given if one.user is None or Owner(one.tenant) not in given] or [Owner()]
    one = len(owners) == 1 and owners[0].tenant is not None
    counting = _Counting(degraded=degraded, quick=quick)
    rows, missing = 0, list[Owner]()
    queue = list[WorkStats]()

    def row(owner: Owner, totals: Totals) -> None:
        nonlocal rows
        rows += 1
        if as_json:
            progress.echo(json.dumps({"owner": str(owner), **figures.as_json(totals, quick=quick)}))
        elif not one:
            if rows == 1:
                progress.echo(figures.head("TENANT[:USER]" if whose else "TENANT", quick=quick))
            line = figures.listed_line if quick else partial(figures.line, users=True)
            progress.echo(line(totals, str(owner)))

    async def count() -> None:
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            for owner in given:
                if owner.tenant is not None and not await opened.sessions.has(owner.tenant, owner.user):
                    missing.append(owner)
            for owner in owners:
                if owner in missing:
                    continue
                async for tenant in tenants_of(opened, owner):
                    each = Owner(tenant, owner.user)
                    row(each, await counting.of(opened, each))
            if not (quick or degraded):
                queue.extend(await _queue(opened, given))

    def so_far() -> str:
        return f"{counted(counting.read, 'record')} had been read."

    with interruptible(so_far), Progress(None, "reading", "records") as progress:
        counting.progress = progress
        run(count())
    if whose and len(missing) == len(given):
        pass  # the errors say it all
    elif as_json:
        total = figures.as_json(counting.total, quick=quick)
        typer.echo(json.dumps({"owner": None, **total, **_as_json(queue)}))
    else:
        title = str(owners[0]) if one else "Total"
        title = f"{title}, degraded only" if degraded else title
        render.console.print(render.stats(counting.total, title, quick=quick))
        for waits in queue:
            typer.echo(_line(waits))
    if not (counting.read or counting.total.users or whose):
        typer.echo("Nothing is stored.", err=True)
    for owner in missing:
        say_nothing_stored(str(owner))
    counting.damaged.print()
    if counting.damaged.count or missing:
        raise typer.Exit(FAILED)


def _as_json(queue: Sequence[WorkStats]) -> dict[str, object]:
    return {"work": dataclasses.asdict(queue[0])} if queue else {}


def _line(waits: WorkStats) -> str:
    many = counted(waits.waiting, "conversation")
    return f"Queue of work: {many}, the oldest due for {waits.lag:,.0f} s"


async def _queue(opened: Backend, owners: Iterable[Owner]) -> list[WorkStats]:
    """Return how much waits for workers, in a list; an empty one if nobody may know, or none ever did."""
    # A role for one tenant may not read the queue, nor a command without keys a sealed one.
    with contextlib.suppress(Denied, Corrupt):
        found = await opened.stats.work({one.tenant for one in owners if one.tenant is not None})
        return [] if found is None else [found]
    return []


class _Counting:
    """Adds up the records of owners."""

    def __init__(self, *, degraded: bool, quick: bool) -> None:
        self.total = Totals()
        self.damaged = Named()
        self.read = 0
        self.progress: Progress | None = None
        self._degraded = degraded
        self._quick = quick

    async def of(self, backend: Backend, owner: Owner) -> Totals:
        """Return the sums for one tenant or user, and add them to the total."""
        totals = Totals()
        async for tenant, user in users_of(backend, owner):
            totals.plus(await self._of_user(backend, tenant, user))
        if owner.tenant is not None and owner.user is None and not self._degraded:
            totals.plus(await backend.stats.of_tenant(owner.tenant, self._met, by_name=self._quick))
        self.total.plus(totals)
        return totals

    async def _of_user(self, backend: Backend, tenant: str, user: str) -> Totals:
        if self._quick:
            return await backend.stats.listed(tenant, user, self._met)
        if not self._degraded:
            return await backend.stats.of_user(tenant, user, self._met)
        totals = Totals()
        async for found in backend.stats.conversations(tenant, user, health=MemoryHealth.DEGRADED):
            self._met(found)
            totals.add(found)
        totals.users = min(1, totals.conversations)
        return totals

    def _met(self, found: Found | Card) -> None:
        self.read += 1
        if isinstance(found, Damaged):
            self.damaged.add(damaged_as(found), str(found.error))
        if self.progress is not None:
            self.progress.show(self.read)
