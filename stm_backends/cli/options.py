"""Options that several commands have, alike in name and meaning."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

URL_VARIABLE: Final = "STM_BACKENDS_URL"

BackendName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--backend", "-b", help="The backend's name. Not needed if the URL says it.", metavar="NAME"
    ),
]

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        envvar=URL_VARIABLE,
        help="Where the datastore is, e.g. sqlite:///conversations.db",
        metavar="URL",
    ),
]

UrlOfName: TypeAlias = Annotated[
    str | None, typer.Option("--url", "-u", help="Where its datastore is.", metavar="URL")
]
"""The URL of a backend that is an argument: the environment's may be another backend's."""

Create: TypeAlias = Annotated[
    bool, typer.Option("--create", help="Set up what the datastore needs first; `schema` shows what.")
]
