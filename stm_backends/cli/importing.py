"""The command `import`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stm_backends.admin.importing import OnConflict
from stm_backends.backend import open_backend
from stm_backends.cli import datastores, durations, transfer
from stm_backends.cli.exports import MIB, ExportFile, FileLimits, export_file
from stm_backends.cli.observing import observer
from stm_backends.cli.options import BackendName, Create, SealingName, Url
from stm_backends.cli.outcome import FAILED, counted, interruptible, reported, run, say_wrong
from stm_backends.cli.seals import require_same_seal
from stm_backends.errors import ConfigurationError
from stm_backends.sealing.naming import load_sealing


def import_(  # noqa: PLR0913, PLR0917 -- each is an option
    file: Annotated[
        Path,
        typer.Argument(
            help="A file written by `export`, or with states saved by a memory; - is standard input.",
            metavar="FILE",
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add missing turns to existing conversations.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing conversations.")] = False,
    ttl: Annotated[
        str | None,
        typer.Option(
            help=f"Time to live of imported data, from now on: {durations.SPELLING}. [default: no expiry]",
            metavar="DURATION",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Import only data of this tenant or user, and skip all other lines.",
            metavar="TENANT[:USER]",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="The conversation of a saved state that does not name its own.",
            metavar="TENANT:USER:SESSION",
        ),
    ] = None,
    max_line_mib: Annotated[
        int, typer.Option(help="Maximum length of a line, in MiB of text. Memory use grows with it.", min=1)
    ] = FileLimits().line // MIB,
    max_total_mib: Annotated[
        int, typer.Option(help="Maximum length of the file, in MiB of text.", min=1)
    ] = FileLimits().total // MIB,
    max_turns: Annotated[
        int, typer.Option(help="Maximum number of turns of one conversation.", min=1)
    ] = FileLimits().turns,
    create: Create = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Import exported conversations and graphs. Fails if one of them already exists.

    With --merge, missing turns, vertices and edges are added. With --replace, existing data is replaced.

    A line may also be a state saved by PenguiFlow's memory, with its conversation as "key".

    The whole file is checked before anything is stored. It must not change during the import. With --only,
    lines of other tenants and users are not imported. With --merge, --ttl also applies to existing
    conversations that get a turn.
    """
    imported = transfer.Imported()
    on_conflict: OnConflict = "merge" if merge else "replace" if replace else "refuse"
    limits = FileLimits(line=max_line_mib * MIB, total=max_total_mib * MIB, turns=max_turns)

    async def work(file: ExportFile) -> None:
        where = backend or datastores.given(url)
        async with open_backend(
            where,
            url=url if backend else None,
            create=create,
            sealing=load_sealing(sealing),
            observer=observer(),
        ) as opened:
            await transfer.import_all(
                opened,
                file,
                on_conflict=on_conflict,
                imported=imported,
                ttl=ttl_s,
                require_owner=partial(require_same_seal, opened),
            )

    with reported(), interruptible(lambda: imported.so_far(on_conflict)):
        if merge and replace:
            raise ConfigurationError("give --merge or --replace, not both")
        ttl_s = durations.optional("--ttl", ttl)
        whose = transfer.owner(only) if only is not None else None
        of = None if key is None else transfer.conversation_key(key)
        with export_file(file, limits=limits, only=whose, of=of) as exported:
            try:
                run(work(exported), creates=True)
            except typer.Exit:
                if imported.done:
                    typer.echo(imported.so_far(on_conflict), err=True)
                raise
    if imported.skipped:
        typer.echo(f"{counted(imported.skipped, 'line')} of others skipped", err=True)
        if not imported.done:
            say_wrong(f"the file has nothing of {only}")
            raise typer.Exit(FAILED)
    if not merge:
        typer.echo(f"{imported} imported", err=True)
    elif changed := imported.changed + imported.changed_vertices:
        typer.echo(f"{imported} merged, {changed} of them changed", err=True)
    else:
        typer.echo(f"{imported} merged, none of them changed", err=True)
    imported.holes.print(partial(typer.echo, err=True))
    if merge and imported.conversations and (imported.changed or ttl):
        typer.echo(_merged_ttl(ttl, unchanged=imported.conversations - imported.changed), err=True)


def _merged_ttl(ttl: str | None, *, unchanged: int) -> str:
    """Describe the effect of a merge on the time to live of conversations."""
    if ttl is None:
        return "Conversations that got a turn do not expire; --ttl sets a time to live."
    left = f"; {counted(unchanged, 'unchanged conversation')} kept the old time to live" if unchanged else ""
    return (
        f"Conversations that got a turn expire in {ttl.strip()}{left}. `stm-backends expire` sets it for all."
    )
