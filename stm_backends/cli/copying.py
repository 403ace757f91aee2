"""The command `copy`: copy tenants and users from one datastore to another, and verify the result."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Final, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stm_backends.admin.copying import UNOWNED, Copy, Item, Outcome, Owner, Problem
from stm_backends.backend import open_backend
from stm_backends.cli import datastores, durations, transfer
from stm_backends.cli.files import writing
from stm_backends.cli.observing import observer
from stm_backends.cli.options import Create
from stm_backends.cli.outcome import FAILED, Named, counted, interruptible, reported, run
from stm_backends.cli.progress import Progress
from stm_backends.cli.render import console, plain
from stm_backends.errors import ConfigurationError, StorageError
from stm_backends.records import keys
from stm_backends.types import MemoryKey


def copy(  # noqa: PLR0913, PLR0917 -- one per option
    source: Annotated[str, typer.Argument(help="The URL to copy from.", metavar="FROM")],
    target: Annotated[str, typer.Argument(help="The URL to copy to.", metavar="TO")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Copy a tenant with all its users; may be repeated.", metavar="TENANT"),
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option(help="Copy a user; may be repeated.", metavar="TENANT:USER"),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Copy all tenants, if the source can list them, and the states of --other-states.",
        ),
    ] = False,
    other_states: Annotated[
        bool,
        typer.Option("--other-states", help="Also copy states whose keys name no tenant and user."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace records at the target that differ.")
    ] = False,
    ttl: Annotated[
        str | None,
        typer.Option(
            help=f"Time to live of the copied records, from now on: {durations.SPELLING}. "
            "[default: no expiry]",
            metavar="DURATION",
        ),
    ] = None,
    create: Create = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this file as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Copy tenants and users to another datastore, then read everything back and compare.

    Copies conversations, logs, saved states and graphs byte for byte. The remaining time to live of a record
    cannot be read, so the copies do not expire unless --ttl is given. Graphs never expire.

    Records that are identical at the target are skipped, so run the command again to resume an interrupted
    copy. Records that differ are reported and left unchanged, unless --replace is given. The source may be in
    use: records that change during the copy are reported, and running the command again copies them. The
    target must not be in use yet.

    The exit status is 0 only if all data of these tenants and users is at the target, byte for byte.
    """
    with reported():
        owners = owners_given(
            "copy", tenant or (), user or (), everything=everything, other_states=other_states
        )
        ttl_s = durations.optional("--ttl", ttl)
        if source == target:
            raise ConfigurationError("FROM and TO are the same")
    named = Named()
    copies: list[Copy] = []

    def so_far() -> str:
        there = sum(one.tally[fate] for one in copies for fate in _THERE)
        done = f"{counted(there, 'record')} had been copied" if there else "Nothing was copied"
        return f"{done}; run the command again to resume."

    with reported(), interruptible(so_far), writing(json_file) if json_file else nullcontext() as numbers:
        try:
            done, left = run(
                _copied(
                    *(source, target, owners, named, copies),
                    everything=everything,
                    replace=replace,
                    ttl=ttl_s,
                    create=create,
                )
            )
        except typer.Exit:  # an outage
            if copies:
                typer.echo(so_far(), err=True)
            raise
        if numbers is not None:
            facts = {"ok": not named.count, "records": dict(done.tally), "other_states_left_out": left}
            json.dump(facts, numbers, indent=2)
    named.print()
    console.print(_report(done, owners, forever=ttl is None))
    if left:
        console.print(Text(_LEFT_OUT, style="yellow"))
    if named.count:
        raise typer.Exit(FAILED)


def owners_given(
    doing: str,
    tenants: Collection[str],
    users: Collection[str],
    *,
    everything: bool = False,
    other_states: bool = False,
) -> list[Owner]:
    """Return the owners that the options of a command name; with `everything`, the tenants are added later.

    Raises `ConfigurationError` without any.
    """
    if everything and (tenants or users):
        raise ConfigurationError("give --all, or some of --tenant and --user, not both")
    owners = [Owner(*transfer.owner(text)) for text in tenants]
    if any(owner.user is not None for owner in owners):
        raise ConfigurationError("--tenant is written TENANT, as in acme; for a user give --user acme:u123")
    of_users = [Owner(*transfer.owner(text)) for text in users]
    if any(owner.user is None for owner in of_users):
        raise ConfigurationError("--user is written TENANT:USER, as in acme:u123")
    owners += of_users
    if other_states or everything:
        owners.append(UNOWNED)
    if not owners:
        raise ConfigurationError(f"nothing to {doing}: give --all, --tenant TENANT or --user TENANT:USER")
    return owners


async def _copied(  # noqa: PLR0913 -- one per option
    source: str,
    target: str,
    owners: list[Owner],
    named: Named,
    copies: list[Copy],
    *,
    everything: bool,
    replace: bool,
    ttl: float | None,
    create: bool,
) -> tuple[Copy, bool]:
    """Copy and compare; appends the copy to `copies` once it has begun.

    With `everything`, all tenants of the source are added to `owners`. Also returns whether the source has
    states without tenant and user that were left out.
    """
    origin, destination = datastores.shown(source), datastores.shown(target)
    async with AsyncExitStack() as ends:
        # The source first: a mistake in its URL must not create a new database at the target.
        with reported(f"the source, {origin}"):
            opened = await ends.enter_async_context(datastores.existing(source))
            if everything:
                owners[:0] = [Owner(tenant) async for tenant in opened.sessions.tenants()]
        with reported(f"the target, {destination}", creates=True):
            taking = await ends.enter_async_context(open_backend(target, create=create))
        if taking.traits.reach == "process":
            raise ConfigurationError(f"{destination} keeps its data only until this command ends")

        def trouble(item: Item, trouble: Problem, error: StorageError | None) -> None:
            named.add(_named(item), _PROBLEMS[trouble] if error is None else str(error))

        copy = Copy(
            opened.driver,
            taking.driver,
            owners,
            replace=replace,
            ttl=ttl,
            on_problem=trouble,
            observer=observer(),
        )
        counts = await copy.count()
        for owner, count in counts.items():
            if not count and not everything:
                named.add(whose(owner), "not found at the source")
        owners[:] = [owner for owner, count in counts.items() if count or everything]
        others = await opened.driver.scan(keys.OTHER_BLOBS, limit=1)
        total = sum(counts.values())
        every = _together(counts)
        typer.echo(plain(f"Copying {counted(total, 'record')} of {every} from {origin} to {destination}"))
        typer.echo("The catalogue of conversations comes along, and is not counted.")
        copies.append(copy)
        with Progress(total, "copying", "records") as progress:
            await copy.copy(progress.show)
        with Progress(total, "comparing", "records") as progress:
            await copy.verify(progress.show)
        return copy, bool(others.names) and UNOWNED not in owners


_LISTED: Final = 20
"""Number of owners that are listed by name."""

_THERE: Final[tuple[Outcome, ...]] = ("copied", "completed", "replaced", "unchanged")

_PROBLEMS: Final[dict[Problem, str]] = {
    "left": "differs at the target, left unchanged",
    "behind": "added to at the source during the copy",
    "changed": "changed at one end during the copy",
}


def whose(owner: Owner) -> str:
    """Return the name of an owner for messages."""
    if owner == UNOWNED:
        return "other states"
    tenant, user = owner
    return transfer.tenant_composite(tenant) if user is None else transfer.user_composite(tenant, user)


def _together(owners: Collection[Owner]) -> str:
    """Return the owners in one line: all of them, or how many there are."""
    if len(owners) <= _LISTED:
        *others, last = map(whose, owners)
        return f"{', '.join(others)} and {last}" if others else last
    return counted(len(owners), "owner")


def _named(item: Item) -> str:
    if item.kind == "memory":
        return transfer.named(MemoryKey(item.tenant, item.user, item.name))
    if item.kind == "blob":
        return f"the state saved under {plain(item.name)!r}"
    return f"a record of {transfer.user_composite(item.tenant, item.user)} ({item.kind})"


_ROWS: Final[dict[Outcome, str]] = {
    "copied": "copied",
    "completed": "extended by missing entries",
    "replaced": "replaced",
    "unchanged": "identical already",
    "left": "different at the target, left unchanged",
    "failed": "unreadable, or too large for the target",
    "verified": "read back and identical",
    "behind": "added to at the source during the copy",
    "changed": "changed at one end during the copy",
    "extra": "only at the target",
}

_ADVICE: Final[dict[Outcome, str]] = {
    "left": "Records that differ: run the command again with --replace to overwrite them, or merge the "
    "conversations of both ends with `stm-backends export` and `stm-backends import --merge`.",
    "behind": "Records that were added to: run the command again.",
    "changed": "Records that changed: run the command again with --replace, unless the target is in use.",
    "extra": "Records only at the target were erased or have expired at the source, or never existed there; "
    "`stm-backends erase` removes them.",
}

_FOREVER: Final = (
    "The copies do not expire, because the remaining time to live of a record cannot be read. --ttl sets one."
)


_LEFT_OUT: Final = (
    "Not copied: states at the source whose keys name no tenant and user. --other-states copies them."
)


def _report(copy: Copy, owners: Collection[Owner], *, forever: bool) -> RenderableType:
    table = Table(title="Records", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for fate, meaning in _ROWS.items():
        count, bad = copy.tally[fate], fate in get_args(Problem)
        if count or fate in ("copied", "verified"):
            table.add_row(meaning, Text(f"{count:,}", "bold red" if bad else ""))
    parts: list[RenderableType] = [table]
    parts += [Text(advice) for fate, advice in _ADVICE.items() if copy.tally[fate]]
    if forever and copy.tally["copied"] + copy.tally["completed"] + copy.tally["replaced"]:
        parts.append(Text(_FOREVER))
    if not copy.ok:
        verdict = Text("The target does not have all data of the source.", style="bold red")
    elif copy.tally["verified"]:
        every = plain(_together(owners))
        verdict = Text(f"All data of {every} is at the target, byte for byte.", style="green")
    else:
        verdict = Text("There was nothing to copy.", style="yellow")
    return Group(*parts, verdict)
