"""The command `reseal`: seal stored data with the primary key, so that an older key can be removed."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from stm_backends.admin.copying import UNOWNED, Owner
from stm_backends.admin.resealing import Problem, ResealReport
from stm_backends.cli import datastores, transfer
from stm_backends.cli.copying import owners_given, whose
from stm_backends.cli.files import writing
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import (
    FAILED,
    Named,
    counted,
    interruptible,
    reported,
    run,
    say_nothing_stored,
    say_wrong,
)
from stm_backends.cli.progress import Progress
from stm_backends.cli.render import console, plain
from stm_backends.drivers.contract import Key
from stm_backends.errors import StorageError
from stm_backends.records import keys
from stm_backends.sealing.naming import load_sealing
from stm_backends.types import MemoryKey

_ROWS: Final = {
    "records": "sealed with the primary key",
    "values": "values in these",
    "current": "sealed with it already",
    "data_keys": "data keys wrapped again",
    "lost_races": "writes repeated, because a record changed",
    "left": "still need an older key: changed too often, or too many entries",
    "failed": "unreadable, or too large",
}


def reseal(
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Reseal a tenant with all its users; may be repeated.", metavar="TENANT"),
    ] = None,
    user: Annotated[
        list[str] | None, typer.Option(help="Reseal a user; may be repeated.", metavar="TENANT:USER")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Reseal all tenants, if the datastore can list them, and the states of --other-states.",
        ),
    ] = False,
    other_states: Annotated[
        bool,
        typer.Option(
            "--other-states", help="Also reseal states and paused runs whose keys name no tenant and user."
        ),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this file as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Seal all data of tenants and users with the primary key, so that an older key can be removed.

    First make the new key primary in all running services. They may keep running during this command. Values
    that are already sealed with the primary key are skipped, so run the command again after an interruption,
    or to check the result. With `accept_clear=True`, values in clear text are sealed, too.

    The exit status is 0 only if no value needs an older key. It is 1 if nothing is stored for one of the
    tenants and users. With `accept_clear=True`, it is also 1 if the datastore failed to remove clear text
    that it can remove, such as SQLite's log.
    """
    reports: list[ResealReport] = []
    missing: list[Owner] = []
    problems = Named()

    def note(key: Key, problem: Problem, error: StorageError | None) -> None:
        problems.add(_named(key), _ROWS[problem] if error is None else str(error))

    async def work(owners: list[Owner]) -> ResealReport:
        async with datastores.existing(
            backend or datastores.given(url), url=url if backend else None, sealing=load_sealing(sealing)
        ) as opened:
            if everything:
                owners[:0] = [Owner(tenant) async for tenant in opened.sessions.tenants()]
            resealing = opened.sessions.resealing(owners, on_problem=note)
            named = [owner for owner in owners if owner != UNOWNED]
            missing.extend([owner for owner in named if not await opened.sessions.has(*owner)])
            reports.append(resealing.report)
            with Progress(await resealing.count(), "resealing", "records") as progress:
                return await resealing.run(progress.show)

    def so_far() -> str:
        done = reports[0].records if reports else 0
        return f"{counted(done, 'record')} had been resealed; run the command again for the rest."

    with reported(), interruptible(so_far), writing(json_file) if json_file else nullcontext() as numbers:
        owners = owners_given(
            "reseal", tenant or (), user or (), everything=everything, other_states=other_states
        )
        try:
            report = run(work(owners))
        except typer.Exit:  # an outage
            if reports:
                typer.echo(so_far(), err=True)
            raise
        ok = report.ok and not missing and report.cleaned is not False
        if numbers is not None:
            json.dump({"ok": ok, **dataclasses.asdict(report)}, numbers, indent=2)
    problems.print()
    console.print(_table(report))
    if report.remains:
        typer.echo(plain(f"Replaced clear text remains as deleted records do. {report.remains}"))
    for owner in missing:
        say_nothing_stored(whose(owner))
    if report.cleaned is False:
        say_wrong(
            "the datastore still holds clear text that it can remove; run the command again to repeat it"
        )
    if not report.ok:
        typer.echo("Keep the older keys, and run the command again once the cause is resolved.", err=True)
    if not ok:
        raise typer.Exit(FAILED)


def _table(report: ResealReport) -> Table:
    table = Table(title="Records", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, meaning in _ROWS.items():
        count: int = getattr(report, name)
        if count or name in ("records", "current"):
            table.add_row(meaning, Text(f"{count:,}", "bold red" if name in ("left", "failed") else ""))
    return table


def _named(key: Key) -> str:
    """Return the name of a record for messages."""
    tenant, user = keys.owner_of(key.scope)
    kind = key.scope.rpartition(":")[2]
    if kind == "memory":
        return transfer.named(MemoryKey(tenant, user, keys.unname(key.name)))
    if user:
        return f"a record of {transfer.user_composite(tenant, user)} ({kind})"
    return f"a record of {transfer.tenant_composite(tenant)} ({kind})" if tenant else f"a record ({kind})"
