"""The output of `erase`: the receipt of an erasure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TextIO

import typer

from stm_backends.admin.receipt import RECORDS, Counted, Receipt
from stm_backends.cli.outcome import counted, say_nothing_stored, say_wrong
from stm_backends.cli.render import plain

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
