"""Turn errors into one line, what would help, and an exit status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
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
    StorageError,
    TooLarge,
    Unavailable,
)

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130
"""What a shell says of a command that Ctrl-C has ended."""

_REMEDIES: Final[dict[type[StmError], str]] = {
    SessionExists: "Give --merge to add the turns that are missing, or --replace to erase what is there.",
    SessionNotFound: "List a user's conversations with: stm-backends ls TENANT:USER",
    Unavailable: "Nothing was changed. Once the cause is mended, the same may be tried again.",
    OutcomeUnknown: "The last write was perhaps done; doing the same again is harmless.",
    TooLarge: "Nothing was written. The limits are settings of the backend.",
    Corrupt: "Nothing was overwritten.",
    Denied: "See whether user and password are right, and whether that user may read and write there.",
}

_OPENING: Final[dict[type[StmError], str]] = {
    Unavailable: "See whether the URL is right, and whether what it names is there.",
    Corrupt: "Nothing was overwritten. See whether the URL names the right file or database.",
}
"""What helps if there was nothing to open yet."""

_NEWER: Final = "by another version"
"""What a message says of a format that this version does not read."""

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run the asynchronous part of a command; a typed error ends the command."""
    with reported():
        return asyncio.run(work)


@contextmanager
def reported(what: str = "") -> Generator[None]:
    """End the command for a typed error: one line, the remedy, exit status 2 for misuse, else 1.

    `what` says whom it befell.
    """
    logger = logging.getLogger("stm_backends")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except StmError as error:
        fail(error, what=what)
        misuse = isinstance(error, (ConfigurationError, SessionExists, SessionNotFound))
        raise typer.Exit(MISUSED if misuse else FAILED) from None
    finally:
        logger.setLevel(level)


@contextmanager
def interruptible(so_far: Callable[[], str]) -> Generator[None]:
    """End the command for Ctrl-C: what `so_far` returns, which is what was done and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(plain(f"Interrupted. {so_far()}"), err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def told_as(operation: str) -> Generator[None]:
    """Have a stored conversation that cannot be read told as a failure of this, not of what it is made of."""
    try:
        yield
    except Corrupt as error:
        error.operation = operation
        raise


def fail(error: StmError, *, what: str = "") -> None:
    """Print an error and what would help, on standard error; `what` says whom it befell."""
    say_wrong(f"{what}: {error}" if what else str(error))
    if remedy := _remedy(error):
        _console().print(Text(remedy))


def say_wrong(message: str) -> None:
    """Print one line about what went wrong, on standard error."""
    _console().print(Text.assemble(("Error: ", "bold red"), (plain(" ".join(message.split())), "red")))


def counted(count: int, what: str) -> str:
    """Return how many there are of what: `3 records`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _remedy(error: StmError) -> str:
    if isinstance(error, Corrupt) and _NEWER in str(error):
        return "Nothing was overwritten. Upgrade stm-backends to the version that wrote it."
    table = _REMEDIES
    if isinstance(error, StorageError) and error.operation == "open":
        table = {**_REMEDIES, **_OPENING}
    return next((remedy for kind, remedy in table.items() if isinstance(error, kind)), "")


def _console() -> Console:
    return Console(stderr=True, soft_wrap=True)
