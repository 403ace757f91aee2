"""The command `compact`: less space for the same records."""

from __future__ import annotations

import typer

from stm_backends.cli import datastores
from stm_backends.cli.options import BackendName, Url
from stm_backends.cli.outcome import interruptible, run
from stm_backends.drivers.compacts import Compacted, compacts_of


def compact(backend: BackendName = None, url: Url = None) -> None:
    """Rewrite an SQLite file in the layout of a new one, and give back free space.

    In a file created by an early version of this library, an entry of 1,000 to 4,000 bytes takes up to five
    times its size. New files and other datastores need no conversion. No record changes, and the early
    version can still use the file. Writes of other processes wait meanwhile, and may fail at their deadline.
    The command needs free disk space of twice the size of the file.
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
