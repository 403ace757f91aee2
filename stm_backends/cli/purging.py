"""The commands `purge` and `expire`: retention of stored data."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer

from stm_backends.admin.expiring import Expiring
from stm_backends.admin.purging import Found, Purged
from stm_backends.backend import Backend
from stm_backends.cli import datastores, durations, transfer
from stm_backends.cli.files import writing
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import (
    FAILED,
    GIVE_KEYS,
    Named,
    counted,
    interruptible,
    reported,
    run,
    say_nothing_stored,
    say_wrong,
)
from stm_backends.cli.progress import Progress
from stm_backends.cli.render import plain
from stm_backends.cli.seals import lacks_keys
from stm_backends.errors import ConfigurationError
from stm_backends.types import MemoryKey

Tenant = Annotated[str | None, typer.Option(help="A tenant with all its users.", metavar="TENANT")]
User = Annotated[str | None, typer.Option(help="One user.", metavar="TENANT:USER")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this file as JSON.", metavar="FILE")
]

_PURGED: Final = {
    "expired": ("expired record", "expired records"),
    "conversations": ("old conversation", "old conversations"),
    "logs": ("old log of an agent framework", "old logs of agent frameworks"),
    "pages": ("page of a transcript", "pages of transcripts"),
    "parts": ("left-over part of large values", "left-over parts of large values"),
    "cards": ("left-over record of the catalogue", "left-over records of the catalogue"),
}
"""Names of the records that a purge removes."""

_KEPT: Final = {
    name: (what, what)
    for name, what in {
        "kept": "newer",
        "undated": "without a time (`stm-backends expire` gives a time to live)",
        "empty": "emptied by an earlier purge, not yet expired",
        "changed": "written to at that moment",
        "unreadable": "unreadable",
    }.items()
}
"""Names of the records that a purge with `--older-than` keeps."""

_EXPIRING: Final = {
    "conversations": ("conversation", "conversations"),
    "logs": ("log of an agent framework", "logs of agent frameworks"),
    "states": ("state", "states"),
    "pages": ("page of a transcript", "pages of transcripts"),
}

_LEFT: Final = {
    "changed": "were replaced by others at each attempt; run the command again",
    "failed": "could not be read, or have no room",
}


def purge(  # noqa: PLR0913, PLR0917 -- one per option
    tenant: Tenant = None,
    user: User = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            help=f"Also remove records without an addition for this long: {durations.SPELLING}.",
            metavar="DURATION",
        ),
    ] = None,
    transcripts_older_than: Annotated[
        str | None,
        typer.Option(
            help=f"Also remove the pages of transcripts whose turns are all this old: {durations.SPELLING}.",
            metavar="DURATION",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only count what would be removed; write nothing.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print each conversation and log that is purged, one per line."
        ),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
    json_file: Json = None,
) -> None:
    """Remove expired records and, with an age, older ones.

    Without --tenant and --user, removes only expired records, of all tenants, if the datastore keeps them:
    SQLite, PostgreSQL and Redis. MongoDB and DynamoDB remove them by themselves. For a tenant or a user,
    also removes left-over parts of large values and left-over cards.

    The age of a conversation is that of its newest turn, by the turn's own time; conversations without a
    time are kept. --older-than empties conversations and logs of agent frameworks. The empty records stay
    listed until they expire, after the same duration. A turn that is added during the purge stays.

    --transcripts-older-than removes the oldest turns of conversations with a transcript, 64 at a time, and
    keeps the rest of each conversation. Turns that no summary covers yet are kept.

    The command works in short steps, while services are running. Run it again after an interruption. The exit
    status is 1 if a record could not be read, or if nothing is stored for the tenant or user.
    """
    purged, found, exists, keyless = Purged(), list[Found](), True, False
    unreadable = Named()

    def note(one: Found) -> None:
        if json_file:
            found.append(one)
        if verbose:
            typer.echo(_named(one))

    def so_far() -> str:
        gone = sum(getattr(purged, name) for name in _PURGED)
        return f"At least {counted(gone, 'record')} {_done(dry_run)}; run the command again for the rest."

    async def work(owner: tuple[str | None, str | None]) -> None:
        nonlocal purged, exists, keyless
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            exists, keyless = await _found(opened, *owner)
            with Progress(0, "purging", "records") as progress:

                def step(counts: Purged) -> None:
                    nonlocal purged
                    purged = counts
                    progress.show(counts.looked_at)

                purged = await opened.sessions.purge(
                    *owner,
                    older_than=seconds,
                    transcripts_older_than=transcript_seconds,
                    dry_run=dry_run,
                    on_step=step,
                    on_found=note,
                    on_unreadable=lambda one, error: unreadable.add(_named(one), str(error)),
                )

    with reported(), interruptible(so_far), writing(json_file) if json_file else nullcontext() as numbers:
        seconds = durations.optional("--older-than", older_than)
        transcript_seconds = durations.optional("--transcripts-older-than", transcripts_older_than)
        owner = _owner(tenant, user)
        if owner is None and (seconds, transcript_seconds) != (None, None):
            which = "--older-than" if seconds is not None else "--transcripts-older-than"
            raise ConfigurationError(f"{which} needs --tenant TENANT or --user TENANT:USER")
        try:
            run(work(owner or (None, None)))
        except typer.Exit:
            if purged.looked_at:
                typer.echo(so_far(), err=True)
            raise
        if numbers is not None:
            listed = [{**one._asdict(), "kind": one.kind} for one in found]
            json.dump({"dry_run": dry_run, **dataclasses.asdict(purged), "found": listed}, numbers, indent=2)
    _print_counts(purged, _PURGED, _done(dry_run))
    if seconds is not None:
        _print_counts(purged, _KEPT, "kept")
        if not dry_run and purged.conversations + purged.logs:
            typer.echo(f"Their empty records stay listed until they expire in {(older_than or '').strip()}.")
    if purged.unreadable:
        _say_left(f"{counted(purged.unreadable, 'record')} could not be read", keyless=keyless)
        if not keyless:
            unreadable.print()
    if not exists:
        say_nothing_stored(tenant or user or "")
    if purged.unreadable or not exists:
        raise typer.Exit(FAILED)


def expire(
    ttl: Annotated[
        str, typer.Option(help=f"The time to live, from now on: {durations.SPELLING}.", metavar="DURATION")
    ],
    tenant: Tenant = None,
    user: User = None,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
    json_file: Json = None,
) -> None:
    """Give the stored data of a tenant or a user a time to live, and keep its content.

    Applies to conversations with their transcripts, logs of agent frameworks and saved states. Graphs stay
    unchanged: `on_idle` removes unused entries from the long-term memory. A time to live cannot be read, so
    a shorter or a longer one is replaced. Run the command once, for example after setting `session_ttl_s`:
    another run restarts the time. A turn that is added afterwards resets the time to live to
    `session_ttl_s` or `transcript_ttl_s`, except for complete pages of the transcript. The exit status is 1
    if a record was left unchanged, or if nothing is stored for the tenant or user.
    """
    expiring, exists, keyless = Expiring(), True, False

    def so_far() -> str:
        done = sum(getattr(expiring, name) for name in _EXPIRING)
        return f"At least {counted(done, 'record')} got the time to live; run the command again for all."

    async def work(tenant: str, user: str | None, seconds: float) -> None:
        nonlocal expiring, exists, keyless
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            exists, keyless = await _found(opened, tenant, user)
            with Progress(0, "expiring", "records") as progress:

                def step(counts: Expiring) -> None:
                    nonlocal expiring
                    expiring = counts
                    progress.show(counts.looked_at)

                expiring = await opened.sessions.expire(tenant, user, ttl=seconds, on_step=step)

    with reported(), interruptible(so_far), writing(json_file) if json_file else nullcontext() as numbers:
        seconds, owner = durations.seconds("--ttl", ttl), _owner(tenant, user)
        if owner is None:
            raise ConfigurationError("name the owner of the records: --tenant TENANT or --user TENANT:USER")
        try:
            run(work(*owner, seconds))
        except typer.Exit:
            if expiring.looked_at:
                typer.echo(so_far(), err=True)
            raise
        if numbers is not None:
            json.dump(dataclasses.asdict(expiring), numbers, indent=2)
    _print_counts(expiring, _EXPIRING, f"expire in {ttl.strip()}")
    left = [f"{getattr(expiring, name):,} {what}" for name, what in _LEFT.items() if getattr(expiring, name)]
    if left:
        _say_left(f"not changed: {'; '.join(left)}", keyless=keyless)
    if not exists:
        say_nothing_stored(tenant or user or "")
    if left or not exists:
        raise typer.Exit(FAILED)


def _owner(tenant: str | None, user: str | None) -> tuple[str, str | None] | None:
    """Return the tenant, and the user or `None`; `None` if neither was given."""
    if tenant and user:
        raise ConfigurationError("give --tenant or --user, not both: a user is written TENANT:USER")
    if tenant:
        found = transfer.owner(tenant)
        if found[1] is not None:
            raise ConfigurationError(
                "--tenant is written TENANT, as in acme; for a user give --user acme:u123"
            )
        return found
    if user:
        found = transfer.owner(user)
        if found[1] is None:
            raise ConfigurationError("--user is written TENANT:USER, as in acme:u123")
        return found
    return None


async def _found(backend: Backend, tenant: str | None, user: str | None) -> tuple[bool, bool]:
    """Say whether anything is stored for the owner, if any, and whether it is sealed without its keys."""
    if tenant is None:
        return True, False
    return await backend.sessions.has(tenant, user), await lacks_keys(backend, tenant, user)


def _say_left(what: str, *, keyless: bool) -> None:
    say_wrong(f"{what}: the data is sealed, and no keys were given" if keyless else what)
    if keyless:
        typer.echo(GIVE_KEYS, err=True)


def _done(dry_run: bool) -> str:
    return "would be removed" if dry_run else "removed"


def _named(found: Found) -> str:
    key = transfer.named(MemoryKey(found.tenant, found.user, found.name))
    what = "transcript" if found.kind == "page" else found.kind
    return key if found.kind == "memory" else f"{key} ({what})"


def _print_counts(counts: Purged | Expiring, meanings: dict[str, tuple[str, str]], done: str) -> None:
    """Print one line with the counts that are not zero, or `nothing`; nouns are for one and many."""
    told = [
        f"{count:,} {what[count != 1]}" for name, what in meanings.items() if (count := getattr(counts, name))
    ]
    if told or done != "kept":
        typer.echo(plain(f"{done.capitalize()}: {', '.join(told) or 'nothing'}"))
