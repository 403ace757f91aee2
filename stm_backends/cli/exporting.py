"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TextIO

import typer

from stm_backends.cli import datastores, graphs, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.files import is_standard, writing
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import FAILED, interruptible, reported, run, say_wrong
from stm_backends.errors import ConfigurationError


def export_(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="Conversations, as tenant:user:session.", metavar="KEY", autocompletion=conversations
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Export all conversations of a user.", metavar="TENANT:USER")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write. [default: standard output, -]", metavar="FILE"
        ),
    ] = None,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Export conversations as JSON Lines, one per line.

    With --user, the vertices of the user's graph, which is its long-term memory, follow, one per line.

    An unreadable conversation or vertex is reported and skipped, and the exit status is 1. The same applies
    to the turns of a damaged page: the conversation is exported without them. The file is replaced in one
    step at the end; if nothing could be exported, an existing file is kept.

    Logs of agent frameworks (OpenAI Agents sessions, LangChain messages) are exported like conversations.
    Saved states are not exported; `copy` copies them.
    """
    others = list[str]()
    exported = transfer.Exported(user)

    async def work(out: TextIO) -> None:
        nonlocal others
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            if whose and whose[1]:
                others = await transfer.count_others(opened, whose[0], whose[1], graph=False)
            await transfer.write_export(
                opened,
                transfer.selected(opened, wanted, (whose[0], whose[1]) if whose and whose[1] else None),
                out,
                exported,
            )
            if whose and whose[1]:
                await graphs.write(
                    opened,
                    (whose[0], whose[1]),
                    out,
                    failed=exported.unread_vertices.failed,
                    on_written=exported.wrote_vertex,
                )

    def so_far() -> str:
        if is_standard(output):
            return f"{exported} had been written; run the command again for all of them."
        return f"{output} was not written; run the command again."

    with reported(), interruptible(so_far):
        if bool(keys) == bool(user):
            raise ConfigurationError(
                "give either conversations (KEY...) or all of a user (--user TENANT:USER)"
            )
        wanted = [transfer.conversation_key(key) for key in keys or ()]
        whose = transfer.owner(user) if user else None
        if whose and whose[1] is None:
            raise ConfigurationError("--user is written TENANT:USER, as in acme:u123")
        with writing(output) as out:
            run(work(out))
            transfer.mention(others, "written")
            if not exported.count:
                if not exported.say_unread():
                    say_wrong(
                        "there is no conversation to export; list them with: stm-backends ls TENANT:USER"
                    )
                raise typer.Exit(FAILED)
    if not is_standard(output):
        typer.echo(f"{exported} written to {output}", err=True)
    if exported.say_unread():
        raise typer.Exit(FAILED)
