"""The command `history`: a whole conversation, by number."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import typer

from stm_backends.cli import datastores, figures, item_logs, render, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.conversation import said_in
from stm_backends.cli.item_logs import LogName
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run, told_as
from stm_backends.history.log import LogPage
from stm_backends.memory.shared.reading import Numbered, UnitsPage, read_units_page
from stm_backends.memory.units import unit_content
from stm_backends.records.keys import memory_key
from stm_backends.records.pages import MOST


class _Asked(TypedDict):
    """The requested place, at most one of these; without any, the newest items."""

    before: int | None
    after: int | None
    at: int | None


def history(  # noqa: PLR0913, PLR0917 -- one per option
    key: Annotated[
        str,
        typer.Argument(
            help="The conversation, as tenant:user:session.", metavar="KEY", autocompletion=conversations
        ),
    ],
    before: Annotated[
        int | None,
        typer.Option("--before", help="Show what was said before this number.", metavar="N", min=0),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after",
            help="Show what was said after this number; -1 is the oldest.",
            metavar="N",
            min=-1,
        ),
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", help="Show what was said around this number.", metavar="N", min=0)
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", help="Number of turns or messages.", metavar="N", min=1, max=MOST),
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    log: LogName = None,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Show the turns or messages of a conversation by number: the newest ones, or others.

    The first one has the number 0. Turns that the model is no longer shown are included, if the conversation
    keeps a transcript. Only a page or two are read, however long the conversation is. For a conversation
    kept by an agent framework, its items are shown.
    """
    place = _Asked(before=before, after=after, at=at)

    async def work() -> UnitsPage | item_logs.Found:
        parsed = transfer.conversation_key(key)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            with told_as("history"):
                kind = item_logs.kind_in(log)
                if kind is None:
                    page = await read_units_page(opened.memory(parsed).shared, **place, limit=limit)
                    if page.units or await opened.driver.load(memory_key(parsed), last=0):
                        return page
                return await item_logs.page_of(opened, parsed, kind, **place, limit=limit)

    with reported():
        page = run(work())
    again = _command(key, {"--backend": backend, "--url": url, "--sealing": sealing}) + f" -n {limit}"
    if isinstance(page, item_logs.Found):
        _show_items(page, again, place, as_json=as_json)
        return
    if as_json:
        for one in page.units:
            typer.echo(json.dumps(_as_json(one)))
    elif page.units:
        render.console.print(render.numbered(page.units))
    what = said_in(page.snapshot.body, page.snapshot.turns)
    _say_more(again, what, [one.number for one in page.units], page, place)


def _command(key: str, given: Mapping[str, str | None]) -> str:
    """Return the command that shows more, quoted for a shell, without options that the environment gives.

    A URL that may have a password is not shown.
    """
    known, words = {*os.environ.values()}, ["stm-backends", "history", key]
    for option, value in given.items():
        if value is not None and value not in known:
            words += [option, "URL" if option == "--url" and "@" in value else value]
    return shlex.join(words)


def _show_items(found: item_logs.Found, again: str, place: _Asked, *, as_json: bool) -> None:
    page = found.page
    if as_json:
        for one in page.items:
            typer.echo(json.dumps(item_logs.as_json(one)))
    elif page.items:
        render.console.print(item_logs.numbered(page))
    _say_more(f"{again} --log {found.kind}", "items", [one.number for one in page.items], page, place)


def _as_json(one: Numbered) -> dict[str, Any]:
    where = {"number": one.number, "summarized": one.summarized, "retained": one.retained}
    return where | unit_content(one.stored)


def _say_more(
    again: str, what: str, numbers: Sequence[int], page: UnitsPage | LogPage, place: _Asked
) -> None:
    """Name on standard error the items that are not shown; `again` is the command that shows more.

    Items on the other side of a given number are left out: they were shown before.
    """
    shown = [*numbers, *page.missing]
    first = min(shown, default=page.oldest if place["before"] is not None else page.newest + 1)
    if not shown:
        asked = "".join(f" {name} number {number}" for name, number in place.items() if number is not None)
        typer.echo(f"There are no {what}{asked}.", err=True)
    if first > page.oldest and place["after"] is None:
        typer.echo(f"Earlier {what}: {again} --before {first}", err=True)
    elif first == page.oldest and page.oldest:
        typer.echo(f"The {what} before number {page.oldest} are no longer stored.", err=True)
    if place["before"] is None and max(shown, default=page.newest) < page.newest:
        typer.echo(f"Later {what}: {again} --after {max(shown)}", err=True)
    if page.missing:
        typer.echo(f"No longer stored: {figures.spans(page.missing)}", err=True)
