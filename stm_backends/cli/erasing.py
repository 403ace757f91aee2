"""The command `erase`. Its output is the receipt of an erasure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, TextIO

import typer

from stm_backends.admin.receipt import RECORDS, Counted, Receipt
from stm_backends.cli import datastores, transfer
from stm_backends.cli.files import NotWritten, creating
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import (
    FAILED,
    counted,
    fail,
    interruptible,
    reported,
    run,
    say_nothing_stored,
    say_wrong,
)
from stm_backends.cli.render import plain
from stm_backends.cli.seals import require_keys
from stm_backends.errors import ConfigurationError

_NAMES: Final[Mapping[Counted, str]] = {
    "conversations": "conversation",
    "logs": "log",
    "states": "saved state",
    "paused_runs": "paused run",
    "graph_records": "graph record",
    "pages": "page of transcripts",
    "cards": "record of the catalogue",
    "parts": "part of large values",
    "expired": "expired record",
    "data_keys": "set of data keys",
    "directory_entries": "directory entry",
}
_PLURALS: Final = {
    "page of transcripts": "pages of transcripts",
    "record of the catalogue": "records of the catalogue",
    "part of large values": "parts of large values",
    "set of data keys": "sets of data keys",
} | {"directory entry": "directory entries"}

_KEYS_LEFT: Final = (
    "The records were sealed, and this command had no keys: data keys in a separate store were not erased"
)


def erase(
    what: Annotated[
        str,
        typer.Argument(
            help="A conversation (tenant:user:session), a user (tenant:user) or a tenant.",
            metavar="KEY|TENANT:USER|TENANT",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    receipt_file: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            help="Also write a receipt to this new file as JSON; it names the ids.",
            metavar="FILE",
        ),
    ] = None,
    keep_keys: Annotated[
        bool,
        typer.Option(
            "--keep-keys",
            help="Erase sealed records without --sealing. Data keys in a separate store stay.",
        ),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Erase a conversation, a user or a tenant, permanently.

    Logs of agent frameworks are erased as well. Afterwards, everything is read again. The exit status is 1
    if nothing was stored there, if another process wrote in the meantime, or if the datastore failed to
    remove leftovers that it can remove, such as SQLite's log.
    """
    kinds = {0: "everything of the tenant", 1: "everything of the user"}
    with reported():
        transfer.check(what)
        if keep_keys and sealing:
            raise ConfigurationError("give --sealing or --keep-keys, not both: --sealing erases data keys")
    if not yes:
        typer.confirm(
            f"Erase {kinds.get(what.count(':'), 'the conversation')} {plain(what)} permanently?",
            abort=True,
        )

    async def work() -> Receipt:
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            # A conversation has no data keys.
            if not keep_keys and what.count(":") < 2:
                await require_keys(opened, *transfer.owner(what))
            return await transfer.erase(opened, what)

    so_far = "Some records may be erased; run the command again to erase the rest."
    receipt, written = None, True
    with reported(), interruptible(lambda: so_far):
        try:
            # Opened first, so that an unwritable path is reported before anything is erased.
            with creating(receipt_file) if receipt_file else contextlib.nullcontext() as out:
                try:
                    receipt = run(work())
                except typer.Exit as end:
                    if end.exit_code == FAILED:  # an outage
                        typer.echo(so_far, err=True)
                    raise
                if out is not None:
                    datastore = datastores.shown(backend or datastores.given(url), url)
                    write(receipt, out, datastore=datastore)
        except NotWritten as error:
            # The records are erased nevertheless.
            fail(error)
            written = False
    # Last: the file stays if standard output is closed.
    if not (receipt and show(receipt, what, keep_keys=keep_keys) and written):
        raise typer.Exit(FAILED)


def write(receipt: Receipt, out: TextIO, *, datastore: str) -> None:
    """Write a receipt as JSON."""
    json.dump(receipt.as_json(datastore=datastore), out, indent=2)
    out.write("\n")


def show(receipt: Receipt, what: str, *, keep_keys: bool = False) -> bool:
    """Print what was erased and what remains.

    Returns `True` if something was erased and erasing again could remove nothing more; with
    `keep_keys`, data keys may be left.
    """
    if not receipt.existed:
        say_nothing_stored(what)
    else:
        records: dict[Counted, int] = {
            kind: receipt.erased[kind] for kind in RECORDS if kind in receipt.erased
        }
        others: dict[Counted, int] = {
            kind: count for kind, count in receipt.erased.items() if kind not in RECORDS
        }
        what = f": {_listed(records)}" if records else ""
        beside = f"; also {_listed(others)}" if others else ""
        typer.echo(f"{counted(receipt.records, 'record')} erased{what}{beside}")
        typer.echo(plain(receipt.remains))
    if receipt.undecided is None:
        typer.echo(
            "Not checked, for lack of permission: saved states under keys that may belong to another owner, "
            "because an id in them contains ':' or '%'.",
            err=True,
        )
    elif receipt.undecided:
        typer.echo(
            f"Not erased: {counted(receipt.undecided, 'saved state')} under keys that may belong to another "
            "owner, because an id in them contains ':' or '%'. Delete each with delete_memory_state(key).",
            err=True,
        )
    if receipt.keys_left and keep_keys:
        typer.echo(f"{_KEYS_LEFT}.", err=True)
    elif receipt.keys_left:
        say_wrong(f"{_KEYS_LEFT}; erase each of the users again with --sealing")
    if receipt.found:
        say_wrong(f"a second reading found {_listed(receipt.found)}: written by another process meanwhile")
    else:
        typer.echo("A second reading found nothing.")
    if receipt.cleaned is False:
        say_wrong("the datastore still holds deleted records that it can remove; erase again to repeat it")
    return receipt.existed and (
        receipt.complete or (keep_keys and replace(receipt, keys_left=False).complete)
    )


def _listed(counts: Mapping[Counted, int]) -> str:
    return ", ".join(
        f"{count:,} {_NAMES[kind] if count == 1 else _PLURALS.get(_NAMES[kind], f'{_NAMES[kind]}s')}"
        for kind, count in counts.items()
    )
