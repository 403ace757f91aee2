"""The commands `drivers`, `schema` and `ping`: the installed backends, and one datastore as a whole."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from stm_backends.cli import datastores, render, transfer
from stm_backends.cli.options import BackendName, Create, Url, UrlOfName
from stm_backends.cli.outcome import FAILED, reported, run
from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError


def drivers(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed backends, with the problem and its remedy for those that cannot be used."""
    diagnoses = plugins.diagnose()
    if as_json:
        facts = [dataclasses.asdict(one) | {"install": one.install} for one in diagnoses]
        typer.echo(json.dumps(facts, indent=2))
    else:
        render.drivers(diagnoses)
    if any(one.state in ("broken", "ambiguous", "newer contract") for one in diagnoses):
        raise typer.Exit(FAILED)


def schema(
    backend: Annotated[
        str | None,
        typer.Argument(help="The backend's name. Not needed if --url is given.", metavar="NAME"),
    ] = None,
    url: UrlOfName = None,
) -> None:
    """Print the statements that --create would run, in the datastore's own language.

    The URL determines the schema, table or database to set up. The command does not connect to the datastore,
    and does not need the backend's client library.
    """
    with reported():
        where = backend or datastores.given(url)
        text = plugins.schema(where, url=url if backend else None)
    if text is None:
        name = plugins.scheme_of(where) or where
        typer.echo(f"The backend {name!r} needs no setup.", err=True)
    else:
        typer.echo(text.rstrip("\n"))


def ping(
    where: Annotated[
        str | None, typer.Argument(help="A URL, or a backend's name.", metavar="URL_OR_NAME")
    ] = None,
    backend: BackendName = None,
    url: Url = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Load a record of this tenant, for a role that may use no other.", metavar="TENANT"
        ),
    ] = None,
    create: Create = False,
) -> None:
    """Load one record from the datastore, and print how long that took."""

    async def work() -> tuple[str, float]:
        by_url = where is not None and ":" in where
        async with datastores.chosen(where or backend, None if by_url else url, create=create) as opened:
            return opened.name, await opened.ping(whose[0])

    with reported():
        whose = transfer.owner(tenant) if tenant else (None, None)
        if whose[1] is not None:
            raise ConfigurationError("--tenant is written TENANT, as in acme")
    name, seconds = run(work(), creates=True)
    typer.echo(f"{name}: answered in {render.milliseconds(seconds * 1e3)} ms")
