"""The command `ls`: tenants, users and conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from stm_backends.admin.stats import ConversationStats, Damaged, Found, Totals
from stm_backends.backend import Backend
from stm_backends.catalogue.card import Card
from stm_backends.cli import datastores, figures, item_logs, transfer
from stm_backends.cli.completion import owners as owners_like
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import FAILED, Named, counted, interruptible, run, say_nothing_stored
from stm_backends.cli.owners import Owner, damaged_as, tenants_of, users_of
from stm_backends.cli.progress import Progress
from stm_backends.cli.render import plain
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.types import MemoryHealth, MemoryKey


def list_(
    whose: Annotated[
        str | None,
        typer.Argument(
            help="A tenant, or one of its users. Without it, all tenants, if the datastore can find them.",
            metavar="TENANT[:USER]",
            autocompletion=owners_like,
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long", "-l", help="Read everything, and print turns, bytes, tokens, health and times."
        ),
    ] = False,
    degraded: Annotated[
        bool,
        typer.Option(
            "--degraded", help="List only conversations whose health is degraded, of all users in question."
        ),
    ] = False,
    recent: Annotated[
        int | None,
        typer.Option(
            "--recent",
            help="List the latest N conversations of each user from the catalogue. Reads no conversation.",
            metavar="N",
            min=1,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """List the tenants, the users of a tenant, or the conversations of a user, one per line.

    Conversations with only the log of an agent framework (OpenAI Agents sessions, LangChain messages) come
    last, with `-` for the figures of --long. Other data of a user is counted, but not listed: saved states,
    and the vertices of the graph, which is the long-term memory. The saved states of a tenant as a whole are
    also only counted.

    The exit status is 1 if nothing is stored for the tenant or user. With --long, an unreadable record is
    reported and counted, and the exit status is 1, too.
    """
    listing = _Listing(long=long, as_json=as_json)
    others, exists = list[str](), True

    async def work() -> None:
        nonlocal others, exists
        owner = Owner.of(whose)
        if recent is not None and (long or degraded):
            raise ConfigurationError(
                "give --recent alone: it reads no conversation, and so no health or tokens"
            )
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            if recent is not None:
                await _recent(opened, owner, listing, recent)
            elif degraded:
                await _degraded(opened, owner, listing)
            elif owner.user is not None and owner.tenant is not None:
                await _conversations(opened, owner.tenant, owner.user, listing)
                others = await transfer.count_others(opened, owner.tenant, owner.user, graph=True)
            elif owner.tenant is not None:
                await _users(opened, owner.tenant, listing)
                others = await transfer.count_others(opened, owner.tenant, "", graph=False)
            else:
                await _tenants(opened, listing)
            if owner.tenant is not None and not listing.count:
                exists = await opened.sessions.has(owner.tenant, owner.user)

    with (
        interruptible(lambda: f"{counted(listing.count, 'line')} had been printed."),
        Progress(None, "reading", "records") if long or degraded else nullcontext() as progress,
    ):
        listing.progress = progress
        run(work())
    for key in listing.unnamed:
        typer.echo(
            f"There is also {transfer.named(key)}, which is removed only by erasing the user.", err=True
        )
    transfer.mention(others, "listed")
    if not exists:
        say_nothing_stored(whose or "")
    elif not (listing.count or listing.unnamed or listing.damaged.count or others):
        stored = "No conversation is stored" if whose else "Nothing is stored"
        what = "No conversation is degraded" if degraded else stored
        if recent is not None:
            what = "The catalogue has no conversation (`conversations.rebuild` adds those of older versions)"
        typer.echo(plain(f"{what} for {whose}." if whose else f"{what}."), err=True)
    listing.damaged.print()
    if listing.damaged.count or not exists:
        raise typer.Exit(FAILED)


class _Listing:
    """Prints one line for each tenant, user or conversation."""

    def __init__(self, *, long: bool, as_json: bool) -> None:
        self.long = long
        self.count = 0
        self.unnamed: list[MemoryKey] = []
        self.damaged = Named()
        self.progress: Progress | None = None
        self._read = 0
        self._as_json = as_json

    def add(
        self, key: str, stats: ConversationStats | Totals | None, logs: Sequence[str] = (), **ids: str
    ) -> None:
        """Print a line; `ids` are the parts of the key, of which the last gives the kind.

        Without `stats`, a conversation has only `logs`.
        """
        self.count += 1
        if self._as_json:
            facts: dict[str, Any] = {"key": key, **ids, **({"logs": [*logs]} if logs else {})}
            self._print(json.dumps(facts | (figures.as_json(stats) if stats and self.long else {})))
        elif not self.long:
            self._print(key)
        else:
            kind = {1: "TENANT", 2: "USER", 3: "CONVERSATION"}[len(ids)]
            if self.count == 1:
                self._print(figures.head(kind))
            self._print(figures.line(stats, key, users=kind == "TENANT"))

    def _print(self, line: str) -> None:
        if self.progress is None:
            typer.echo(line)
        else:
            self.progress.echo(line)

    def add_conversation(
        self, key: MemoryKey, stats: ConversationStats | None, logs: Sequence[str] = ()
    ) -> None:
        """Print a conversation, unless its key cannot be written."""
        try:
            text = transfer.escaped(key.composite())
        except InvalidKey:
            self.unnamed.append(key)
        else:
            self.add(text, stats, logs, tenant=key.tenant_id, user=key.user_id, session=key.session_id)

    def add_card(self, card: Card) -> None:
        """Print a conversation as the catalogue shows it, unless its key cannot be written."""
        try:
            text = transfer.escaped(card.key.composite())
        except InvalidKey:
            self.unnamed.append(card.key)
            return
        self.count += 1
        if not self._as_json:
            title = plain(card.title).replace("\n", "\\n")
            if self.count == 1:
                self._print(f"{'LAST ACTIVITY':<23}  {'TURNS':>6}  CONVERSATION  TITLE")
            self._print(f"{figures.when(card.updated)}  {card.turns:>6,}  {text}  {title}")
            return
        ids = {"tenant": card.key.tenant_id, "user": card.key.user_id, "session": card.key.session_id}
        times = {"created": figures.iso(card.created), "updated": figures.iso(card.updated)}
        shown = {"title": card.title, "preview": card.preview, "turns": card.turns, **times}
        flags = {"pinned": card.pinned, "archived": card.archived, "metadata": card.metadata}
        self._print(json.dumps({"key": text, **ids, **shown, **flags, "kinds": card.kinds}))

    def met(self, found: Found) -> None:
        """Count a record as read, and name it if it is unreadable."""
        self._read += 1
        if isinstance(found, Damaged):
            self.damaged.add(damaged_as(found), str(found.error))
        if self.progress is not None:
            self.progress.show(self._read)


async def _tenants(backend: Backend, listing: _Listing) -> None:
    async for tenant in tenants_of(backend, Owner()):
        totals = Totals()
        if listing.long:
            async for user in backend.sessions.users(tenant):
                totals.plus(await backend.stats.of_user(tenant, user, listing.met))
            totals.plus(await backend.stats.of_tenant(tenant, listing.met))
        listing.add(transfer.tenant_composite(tenant), totals, tenant=tenant)


async def _users(backend: Backend, tenant: str, listing: _Listing) -> None:
    async for user in backend.sessions.users(tenant):
        totals = await backend.stats.of_user(tenant, user, listing.met) if listing.long else None
        listing.add(transfer.user_composite(tenant, user), totals, tenant=tenant, user=user)


async def _conversations(backend: Backend, tenant: str, user: str, listing: _Listing) -> None:
    logs: dict[MemoryKey, list[str]] = {}
    async for kind, key in item_logs.of_user(backend, tenant, user):
        logs.setdefault(key, []).append(kind)
    if listing.long:
        async for stats in _readable(backend, tenant, user, listing):
            listing.add_conversation(stats.key, stats, logs.pop(stats.key, ()))
    else:
        async for key in backend.sessions.list(tenant, user):
            listing.add_conversation(key, None, logs.pop(key, ()))
    for key, kinds in logs.items():
        listing.add_conversation(key, None, kinds)


async def _degraded(backend: Backend, owner: Owner, listing: _Listing) -> None:
    async for tenant, user in users_of(backend, owner):
        async for stats in _readable(backend, tenant, user, listing, health=MemoryHealth.DEGRADED):
            listing.add_conversation(stats.key, stats)


async def _recent(backend: Backend, owner: Owner, listing: _Listing, most: int) -> None:
    """List the latest conversations of each user, with their times and titles; reads no conversation."""
    async for tenant, user in users_of(backend, owner):
        for card in (await backend.conversations.list(tenant, user, limit=most)).cards:
            listing.add_card(card)


async def _readable(
    backend: Backend, tenant: str, user: str, listing: _Listing, *, health: MemoryHealth | None = None
) -> AsyncIterator[ConversationStats]:
    async for found in backend.stats.conversations(tenant, user, health=health):
        listing.met(found)
        if not isinstance(found, Damaged):
            yield found
