"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from stm_backends.sealing.naming import KEYS_VARIABLE, SEALING_VARIABLE

URL_VARIABLE: Final = "STM_BACKENDS_URL"

BackendName: TypeAlias = Annotated[
    str | None,
    typer.Option("--backend", "-b", help="The backend's name. Not needed if --url is given.", metavar="NAME"),
]

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        envvar=URL_VARIABLE,
        help="The URL of the datastore, e.g. sqlite:///memory.db",
        metavar="URL",
    ),
]

UrlOfName: TypeAlias = Annotated[
    str | None, typer.Option("--url", "-u", help="The URL of its datastore.", metavar="URL")
]
"""The URL for a backend named as an argument. Not read from the environment, whose URL may be another's."""

Create: TypeAlias = Annotated[
    bool, typer.Option("--create", help="First create tables and indexes if needed; `schema` prints them.")
]

SealingName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--sealing",
        envvar=SEALING_VARIABLE,
        help=f"The Sealing of your program, to read encrypted data. {KEYS_VARIABLE} may name a file of keys.",
        metavar="MODULE:OBJECT",
    ),
]
