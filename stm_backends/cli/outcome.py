"""Turn errors into one line, what would help, and an exit status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from stm_backends.cli.render import plain
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    OutcomeUnknown,
    SessionExists,
    SessionNotFound,
    StmError,
    TooLarge,
    Unavailable,
)

FAILED: Final = 1
MISUSED: Final = 2

_REMEDIES: Final[dict[type[StmError], str]] = {
    SessionExists: "Give --merge to add the turns that are missing, or --replace to erase what is there.",
    SessionNotFound: "List a user's conversations with: stm-backends ls TENANT:USER",
    Unavailable: "Nothing was changed. See whether the datastore is up, with: stm-backends ping URL",
    OutcomeUnknown: "The last write was perhaps done; doing the same again is harmless.",
    TooLarge: "Nothing was written. The limits are settings of the backend.",
    Corrupt: "Nothing was overwritten. If a newer version of stm-backends wrote it, upgrade this one.",
    Denied: "See whether this user may read and write that file or database.",
}

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run the asynchronous part of a command; a typed error ends the command."""
    with reported():
        return asyncio.run(work)


@contextmanager
def reported() -> Generator[None]:
    """End the command for a typed error: one line, the remedy, exit status 2 for misuse, else 1."""
    logger = logging.getLogger("stm_backends")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except StmError as error:
        fail(error)
        misuse = isinstance(error, (ConfigurationError, SessionExists, SessionNotFound))
        raise typer.Exit(MISUSED if misuse else FAILED) from None
    finally:
        logger.setLevel(level)


def fail(error: StmError) -> None:
    """Print an error and what would help, on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("Error: ", "bold red"), (plain(" ".join(str(error).split())), "red")))
    for kind, remedy in _REMEDIES.items():
        if isinstance(error, kind):
            console.print(Text(remedy))
