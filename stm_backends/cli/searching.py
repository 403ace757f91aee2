"""The command `search`: find conversations and messages by their words."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stm_backends.backend import Backend
from stm_backends.catalogue.matching import Found, Match
from stm_backends.cli import datastores, figures, transfer
from stm_backends.cli.completion import owners
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import FAILED, counted, interruptible, run, say_nothing_stored
from stm_backends.cli.owners import Owner, users_of
from stm_backends.cli.render import plain
from stm_backends.errors import ConfigurationError


def search(
    whose: Annotated[
        str,
        typer.Argument(
            help="A user, or a tenant for all of its users.",
            metavar="TENANT[:USER]",
            autocompletion=owners,
        ),
    ],
    words: Annotated[list[str], typer.Argument(help="The words to look for.", metavar="WORD...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Find conversations whose title, summary, or one turn or message has all of the words.

    The search matches whole words, regardless of case. Conversations are listed as in `ls --recent`, the
    latest first, each with up to three turns or messages and their numbers: `history KEY --at NUMBER` opens
    it there.
    """
    count, exists = 0, True

    async def work() -> None:
        nonlocal count, exists
        owner = Owner.of(whose)
        if not any(char.isalnum() for char in "".join(words)):
            raise ConfigurationError("give a word to look for; punctuation alone is not found")
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            async for tenant, user in users_of(opened, owner):
                count += await _search(opened, tenant, user, " ".join(words), as_json=as_json)
            if not count and owner.tenant is not None:
                exists = await opened.sessions.has(owner.tenant, owner.user)

    with interruptible(lambda: f"{counted(count, 'conversation')} had been found."):
        run(work())
    if not exists:
        say_nothing_stored(whose)
        raise typer.Exit(FAILED)
    if not count:
        typer.echo(plain(f"No conversation of {whose} has all of these words."), err=True)


async def _search(opened: Backend, tenant: str, user: str, words: str, *, as_json: bool) -> int:
    """Print the matches in a user's conversations; returns the number of conversations."""
    count, after = 0, None
    while True:
        results = await opened.conversations.search(tenant, user, words, after=after)
        for found in results.found:
            typer.echo(_as_json(found) if as_json else _lines(found))
        count += len(results.found)
        if (after := results.after) is None:
            return count


def _lines(found: Found) -> str:
    title = plain(found.card.title).replace("\n", "\\n")
    # The title is above already.
    rest = [_line(match) for match in found.matches if match.where != "title"]
    return "\n".join([f"{transfer.named(found.card.key)}  {title}".rstrip(), *rest])


def _line(match: Match) -> str:
    # As in `history`, a number is that of a turn or a message.
    where = f"{match.number:,}" if match.number is not None else match.where
    return f"  {where:>8}  {plain(match.snippet)}"


def _as_json(found: Found) -> str:
    key = found.card.key
    ids = {"tenant": key.tenant_id, "user": key.user_id, "session": key.session_id}
    matches = [{"where": one.where, "number": one.number, "snippet": one.snippet} for one in found.matches]
    shown = {"title": found.card.title, "updated": figures.iso(found.card.updated), "matches": matches}
    return json.dumps({"key": transfer.named(key), **ids, **shown})
