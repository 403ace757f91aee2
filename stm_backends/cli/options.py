"""Options that several commands share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from stm_backends.sealing.keys import is_shared
from stm_backends.sealing.naming import KEYS_VARIABLE, SEALING_VARIABLE

URL_VARIABLE: Final = "STM_BACKENDS_URL"


class Command(TyperCommand):
    """A command that shows no type where an option takes no value."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments."""
        return _shown(super().get_params(ctx))


class Commands(TyperGroup):
    """The same for the program itself."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options."""
        return _shown(super().get_params(ctx))


def _shown(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if isinstance(one, TyperOption) and one.is_flag:
            one.metavar = ""
    return parameters


def _warned(context: typer.Context, sealing: str | None) -> str | None:
    """Return the value of `--sealing`; without one, warn of a file of keys that others may use."""
    file = os.environ.get(KEYS_VARIABLE)
    if file and not sealing and not context.resilient_parsing:
        with contextlib.suppress(OSError):  # which is reported when the file is read
            if is_shared(Path(file)):
                typer.echo(f"Warning: other users may read or change {file}; run: chmod 600 {file}", err=True)
    return sealing


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
        callback=_warned,
    ),
]
