"""A driver's log lines, warnings and errors during a check, and the text they must not contain."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from stm_backends.drivers.contract import Driver, Key
from stm_backends.testing.workbench.failures import cut

_LONGEST_TEXT: Final = 200

_MARK: Final = re.compile(r"[A-Za-z0-9]{12,}")
"""Matches recognisable text in a message: a run of letters and digits that is not a normal word."""

_LOOKED_THROUGH: Final = 1_000
"""Maximum number of bytes of a value searched for such a run."""

_KEPT: Final = 20
"""Maximum number of messages kept that contain a mark."""

_SHOWN: Final = 24
"""Number of a run's characters to look for, because a message may cut it."""


class Message(NamedTuple):
    """A log line, a warning or an error.

    `where` is the name and level of the logger, the line that warned, or the error's class. `text` is the
    message itself. `beside` is what a handler may print with it: the arguments and the traceback.
    """

    where: str
    text: str
    beside: str = ""

    def tells(self, marks: Mapping[str, str]) -> str:
        """Return the complaint if it contains one of the marks, mapped to their origins; or `""`."""
        told = f"{self.where}: {cut(self.text, _LONGEST_TEXT)}"
        # A copy, because a driver may log in its own threads.
        for mark, what in list(marks.items()):
            if mark in self.text:
                return f"no message may contain {what}, and one does: {told}"
            if mark in self.beside:
                return f"no message may bring {what}, and the arguments or the traceback of one do: {told}"
        return ""


@dataclass(eq=False)
class Heard(logging.Handler):
    """The messages that contain a mark, and how often each place in the code warned.

    `packages` are those of the driver. Messages of others below `WARNING`, such as those of a client library
    that logs each request on demand, are not the driver's. `told` has the first messages, each with its
    complaint; a driver may log with each operation, so the others are not kept.
    """

    packages: tuple[str, ...]
    marks: Mapping[str, str]
    told: dict[Message, str] = field(default_factory=dict[Message, str])
    places: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message of a logger, with its arguments and its traceback."""
        if record.levelno < logging.WARNING and record.name.partition(".")[0] not in self.packages:
            return
        beside = f"{record.args}"
        if record.exc_info and record.exc_info[1]:
            beside += "".join(traceback.format_exception(record.exc_info[1]))
        message = Message(f"{record.name}, {record.levelname}", record.getMessage(), beside)
        self.note(message, f"{record.name}, line {record.lineno}", record.levelno >= logging.WARNING)

    def note(self, message: Message, place: str, is_warning: bool) -> None:
        """Note a message."""
        self.judge(message)
        if is_warning:
            self.places[place] += 1

    def judge(self, message: Message) -> None:
        """Note a message that contains one of the marks."""
        if len(self.told) < _KEPT and (found := message.tells(self.marks)):
            self.told[message] = found


def message_of(error: BaseException) -> Message:
    """Return the message of an error."""
    return Message(f"the error {type(error).__name__}", str(error))


def packages_of(driver: Driver) -> set[str]:
    """Return this library's packages, and those of the driver and its inner drivers."""
    found, layer = {"stm_backends"}, cast("Any", driver)
    while layer is not None:
        found.add(type(layer).__module__.partition(".")[0])
        layer = getattr(layer, "inner", None)
    return found


def marks_of(key: Key | str, *values: bytes) -> dict[str, str]:
    """Return the recognisable parts of a key, or of a scope alone, and of stored bytes, each with its name.

    They are long runs of letters and digits, such as the random word in the scopes of checks. Without such a
    run, text cannot be told from the words of a message.
    """
    parts = [("a scope", key)] if isinstance(key, str) else [("a scope", key.scope), ("a name", key.name)]
    parts += [("stored bytes", value[:_LOOKED_THROUGH].decode("latin-1")) for value in values]
    found = ((what, _MARK.search(text)) for what, text in parts)
    return {mark[0][:_SHOWN]: what for what, mark in found if mark}


@contextlib.contextmanager
def hearing(marks: Mapping[str, str], *packages: str) -> Generator[Heard]:
    """Collect all log lines of these packages, and the warnings that others log."""
    heard, root = Heard(packages, marks), logging.getLogger()
    loggers: list[logging.Logger] = [logging.getLogger(package) for package in packages]
    loggers += [
        logger
        for name, logger in root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in packages and "." in name
    ]
    before = [(logger, logger.level, logger.propagate, logger.disabled) for logger in loggers]
    root.addHandler(heard)
    try:
        for logger in loggers:
            logger.setLevel(logging.DEBUG)
            logger.propagate, logger.disabled = True, False
        yield heard
    finally:
        root.removeHandler(heard)
        for logger, level, propagate, disabled in before:
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled


@contextlib.contextmanager
def hearing_warnings(marks: Mapping[str, str], *packages: str) -> Generator[Heard]:
    """Also collect Python's warnings, which nobody else gets meanwhile."""
    with hearing(marks, *packages) as heard, warnings.catch_warnings():

        def warned(message: Warning | str, kind: type[Warning], file: str, line: int, *_: Any) -> None:
            place = f"{file}, line {line}: {kind.__name__}"
            heard.note(Message(place, f"{message}"), place, is_warning=True)

        warnings.simplefilter("always")
        # Python shows deprecation warnings only to the authors of the code.
        for kind in (DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", kind)
        for package in packages:
            warnings.filterwarnings("always", module=rf"{re.escape(package)}(\.|$)")
        warnings.showwarning = warned
        yield heard
