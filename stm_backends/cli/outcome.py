"""Turn errors into one line, a remedy and an exit status."""

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
"""The exit status that shells report for a command ended by Ctrl-C."""

_NAMED: Final = 20
"""How many problematic records are named."""

_REMEDIES: Final[dict[type[StmError], str]] = {
    SessionExists: "Use --merge to add missing turns, or --replace to erase what exists.",
    SessionNotFound: "List a user's conversations with: stm-backends ls TENANT:USER",
    Unavailable: "The operation that failed changed nothing. Retry once the cause is resolved.",
    OutcomeUnknown: "The last write may have been applied; running the command again is harmless.",
    TooLarge: "Nothing was written. The limits are settings of the backend.",
    Corrupt: "Nothing was overwritten.",
    Denied: "Check the user and password, and whether that user may read and write there.",
}

_OPENING: Final[dict[type[StmError], str]] = {
    Unavailable: "Check the URL, and whether the datastore is running.",
    Corrupt: "Nothing was overwritten. Check whether the URL names the right file or database.",
}
"""Remedies for errors that occur while opening."""

_NEWER: Final = "by another version"
"""A part of the message about a format that this version cannot read."""

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run the asynchronous part of a command; an `StmError` ends the command."""
    with reported():
        return asyncio.run(work)


@contextmanager
def reported(what: str = "") -> Generator[None]:
    """End the command on an `StmError`: print it and its remedy, and exit with 2 for misuse, else 1.

    `what` names the object that the error is about.
    """
    logger = logging.getLogger("stm_backends")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except StmError as error:
        fail(error, what=what)
        misuse = isinstance(error, (ConfigurationError, SessionExists))
        raise typer.Exit(MISUSED if misuse else FAILED) from None
    finally:
        logger.setLevel(level)


@contextmanager
def interruptible(so_far: Callable[[], str]) -> Generator[None]:
    """End the command on Ctrl-C, and print `so_far()`: what was done and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(plain(f"Interrupted. {so_far()}"), err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def told_as(operation: str) -> Generator[None]:
    """Report an unreadable conversation as a failure of this operation, not of an inner one."""
    try:
        yield
    except Corrupt as error:
        error.operation = operation
        raise


def fail(error: StmError, *, what: str = "") -> None:
    """Print an error and its remedy to standard error; `what` names the object that it is about."""
    say_wrong(f"{what}: {error}" if what else str(error))
    if remedy := _remedy(error):
        _console().print(Text(remedy))


def say_wrong(message: str) -> None:
    """Print one line about an error to standard error."""
    _console().print(Text.assemble(("Error: ", "bold red"), (plain(" ".join(message.split())), "red")))


def say_nothing_stored(what: str) -> None:
    """Print that nothing is stored under a name that the command was given; its exit status is then 1."""
    say_wrong(f"nothing is stored for {what}")


class Named:
    """Collects problems; the first `_NAMED` are printed at the end."""

    def __init__(self) -> None:
        self.count = 0
        self._messages: list[str] = []

    def add(self, what: str, problem: str) -> None:
        """Add a problem of a record."""
        self.count += 1
        if len(self._messages) < _NAMED:
            self._messages.append(f"{what}: {problem}")

    def print(self) -> None:
        """Print the problems to standard error."""
        for message in self._messages:
            say_wrong(message)
        if more := self.count - len(self._messages):
            say_wrong(f"and {counted(more, 'record')} more")


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `3 records`."""
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
