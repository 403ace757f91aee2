"""The command `history`: all that was said in a conversation, by number."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from stm_backends.cli import datastores, render, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run, told_as
from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn
from stm_backends.records.codec import dump_turn
from stm_backends.records.pages import MOST
from stm_backends.types import StoredTurn


def history(
    key: Annotated[
        str,
        typer.Argument(
            help="The conversation, as tenant:user:session.", metavar="KEY", autocompletion=conversations
        ),
    ],
    before: Annotated[
        int | None,
        typer.Option("--before", help="Show the turns before this number.", metavar="N", min=0),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="How many turns to show.", metavar="N", min=1, max=MOST)
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Show all that was said in a conversation, by number: the newest turns, or those before a number.

    The first turn has the number 0. Turns that the model is no longer shown are there too, if the
    conversation keeps a transcript. A page or two are read, however long the conversation is.
    """

    async def work() -> TranscriptPage:
        parsed = transfer.conversation_key(key)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            with told_as("history"):
                page = await opened.memory(parsed).transcript(before=before, limit=limit)
                if not page.turns:
                    await opened.sessions.export(parsed)  # tells one without turns from none
                return page

    with reported():
        page = run(work())
    if as_json:
        for one in page.turns:
            typer.echo(json.dumps(_as_json(one)))
    elif page.turns:
        render.console.print(render.numbered((one.number, one.turn) for one in page.turns))
    _say_more(page, key)


def _as_json(one: TranscriptTurn) -> dict[str, Any]:
    where = {"number": one.number, "summarized": one.summarized, "retained": one.retained}
    return where | dump_turn(StoredTurn(one.id, one.turn))


def _say_more(page: TranscriptPage, key: str) -> None:
    """Say on standard error what is not shown."""
    first = page.turns[0].number if page.turns else page.oldest
    if first > page.oldest:
        typer.echo(f"Earlier turns: stm-backends history {key} --before {first}", err=True)
    elif page.oldest:
        typer.echo(f"The turns before number {page.oldest} are no longer stored.", err=True)
    if page.missing:
        typer.echo(f"Not stored any more: {', '.join(map(str, page.missing))}", err=True)
