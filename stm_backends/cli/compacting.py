"""The command `compact`: less space for the same records."""

from __future__ import annotations

import typer

from stm_backends.cli import datastores
from stm_backends.cli.options import BackendName, Url
from stm_backends.cli.outcome import interruptible, run
from stm_backends.drivers.compacts import Compacted, compacts_of


def compact(backend: BackendName = None, url: Url = None) -> None:
    """Store an SQLite file as a new one would be stored, and give back free space.

    In a file that an early version of this library made, an entry of 1,000 to 4,000 bytes takes up to five
    times its size. New files need no conversion, and other datastores nothing at all. No record changes, and
    that version can use the file afterwards. Writes of other processes wait meanwhile, and may fail at their
    deadline. It needs as much free space on the disk as the file takes, twice.
    """

    async def work() -> tuple[str, Compacted | None]:
        async with datastores.chosen(backend, url) as opened:
            compacts = compacts_of(opened.driver)
            return opened.name, None if compacts is None else await compacts.compact()

    with interruptible(lambda: "The file is as it was, or converted; run the command again."):
        name, compacted = run(work())
    if compacted is None:
        typer.echo(f"The backend {name!r} needs no compacting.")
    else:
        typer.echo(f"{name}: {compacted.before:,} bytes before, {compacted.after:,} bytes after")
