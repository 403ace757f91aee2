"""Turn errors into one line, a remedy and an exit status."""

from __future__ import annotations

import asyncio
import logging
import re
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
    KeyMismatch,
    OutcomeUnknown,
    SessionExists,
    SessionNotFound,
    StmError,
    StorageError,
    TooLarge,
    Unavailable,
)
from stm_backends.sealing.naming import KEYS_VARIABLE

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130
"""The exit status that shells report for a command ended by Ctrl-C."""

_NAMED: Final = 20
"""Maximum number of problematic records that are named."""

_KEPT: Final = "Nothing was overwritten."

GIVE_KEYS: Final = f"Give the keys: --sealing MODULE:OBJECT, or a file of keys that {KEYS_VARIABLE} names."
"""The remedy if data is sealed and a command has no keys."""

_OTHER_KEYS: Final = (
    "Give the keys that sealed the data: --sealing MODULE:OBJECT, or a file of keys that "
    f"{KEYS_VARIABLE} names."
)

_REMEDIES: Final[dict[type[StmError], str]] = {
    SessionExists: "Use --merge to add missing turns, or --replace to replace the conversation.",
    SessionNotFound: "List a user's conversations with: stm-backends ls TENANT:USER",
    Unavailable: "The operation that failed changed nothing. Retry once the cause is resolved.",
    OutcomeUnknown: "The last write may have been applied; running the command again is harmless.",
    TooLarge: "Nothing was written. The limits are settings of the backend.",
    KeyMismatch: f"{_KEPT} {_OTHER_KEYS}",
    Corrupt: _KEPT,
    Denied: "Check the user and password, and whether that user may read and write there.",
}

_OPENING: Final[dict[type[StmError], str]] = {
    Corrupt: f"{_KEPT} Check whether the URL names the right file or database.",
}
"""Remedies for errors that occur while opening."""

_CORRUPT: Final = {
    "by another version": f"{_KEPT} Upgrade stm-backends to the version that wrote it.",
    "bytes are sealed": f"{_KEPT} {GIVE_KEYS}",
    "has no sealing": f"{_KEPT} {GIVE_KEYS}",
    "sealed with the key": f"{_KEPT} Add the key of that id to the keys of this command.",
    "is not sealed": (
        f"{_KEPT} To migrate clear text: --sealing MODULE:OBJECT of a Sealing(keys, accept_clear=True)."
    ),
}
"""Remedies for `Corrupt` by a part of its message."""

_UNREACHED: Final = re.compile(
    "no connection|cannot be reached|no answer|refused|host name|no reachable|closed the connection|no node"
)
"""Parts of messages of drivers that cannot connect."""

_NOT_THERE: Final = re.compile("no database file|no such database|does not exist")

_KEY_STORE: Final = "the store of the data keys"
"""A part of messages about a datastore other than that of the URL."""

_SET_UP: Final = "create=True"
"""A part of messages of drivers about missing tables or indexes. They say how to create these."""

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T], *, creates: bool = False) -> _T:
    """Run the asynchronous part of a command; an `StmError` ends the command. `creates` as for `reported`."""
    with reported(creates=creates):
        return asyncio.run(work)


@contextmanager
def reported(what: str = "", *, creates: bool = False) -> Generator[None]:
    """End the command on an `StmError`: print it and its remedy, and exit with 2 for misuse, else 1.

    `what` names the object that the error is about. `creates=True` says that the command's `--create` would
    set it up.
    """
    logger = logging.getLogger("stm_backends")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except StmError as error:
        fail(error, what=what, creates=creates)
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


def fail(error: StmError, *, what: str = "", creates: bool = False, told: set[str] | None = None) -> None:
    """Print an error and its remedy to standard error; `what` names the object that it is about.

    A remedy in `told` is not printed again, and a printed one is added to it.
    """
    say_wrong(f"{what}: {error}" if what else str(error))
    remedy = _remedy(error, creates=creates)
    if remedy and (told is None or remedy not in told):
        _console().print(Text(remedy))
        if told is not None:
            told.add(remedy)


def say_wrong(message: str) -> None:
    """Print one line about an error to standard error."""
    _console().print(Text.assemble(("Error: ", "bold red"), (plain(" ".join(message.split())), "red")))


def say_nothing_stored(what: str) -> None:
    """Print that nothing is stored under a name that the command was given; its exit status is then 1."""
    say_wrong(f"nothing is stored for {what}")


class Named:
    """Collects problems of records; the first `_NAMED` problems are printed at the end."""

    def __init__(self) -> None:
        self.count = 0
        self._messages: list[str] = []

    def add(self, what: str, problem: str) -> None:
        """Add a problem of a record."""
        self.count += 1
        if len(self._messages) < _NAMED:
            self._messages.append(f"{what}: {problem}")

    def print(self, say: Callable[[str], None] = say_wrong) -> None:
        """Print the problems to standard error, by default as errors."""
        for message in self._messages:
            say(message)
        if more := self.count - len(self._messages):
            say(f"and {counted(more, 'record')} more")


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `3 records`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _remedy(error: StmError, *, creates: bool) -> str:
    message = str(error)
    if isinstance(error, Corrupt):
        for part, remedy in _CORRUPT.items():
            if part in message:
                return remedy
    if isinstance(error, StorageError) and error.operation == "open":
        if _SET_UP in message:
            return "Or run this command again with --create." if creates else ""
        if isinstance(error, Unavailable) and _KEY_STORE not in message:
            if _NOT_THERE.search(message):
                return "Check the URL."
            if _UNREACHED.search(message):
                return "Check the URL, and whether the datastore is running."
        found = next((remedy for kind, remedy in _OPENING.items() if isinstance(error, kind)), "")
        if found:
            return found
    return next((remedy for kind, remedy in _REMEDIES.items() if isinstance(error, kind)), "")


def _console() -> Console:
    return Console(stderr=True, soft_wrap=True)
