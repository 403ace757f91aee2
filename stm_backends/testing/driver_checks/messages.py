"""Checks of what a driver logs, and of the messages of its errors."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import uuid
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key
from stm_backends.errors import StorageError
from stm_backends.testing.driver_checks.steps import append_all
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.failures import cut

WRITES: Final = 12
"""How many writes of a kind are watched for a warning that comes with each."""

_LONGEST_TEXT: Final = 200


class Message(NamedTuple):
    """What was logged or warned of.

    `where` is the name of the logger and the level, the line that warned, or an error. `text` is the
    message itself. `beside` is what a handler may print with it: the arguments and the traceback.
    """

    where: str
    text: str
    beside: str = ""


@dataclass
class Heard(logging.Handler):
    """What was logged or warned of, and how often each place in the code warned.

    `packages` are those of the driver. What others log below `WARNING`, such as a client library that logs
    each request when it is told to, is not the driver's.
    """

    packages: tuple[str, ...]
    messages: list[Message] = field(default_factory=list[Message])
    places: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = logging.Handler.__hash__

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
        self.messages.append(message)
        if is_warning:
            self.places[place] += 1


class Messages(Contract):
    """Checks of what a driver logs, and of the messages of its errors."""

    @check("driver.logs")
    async def test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write(
        self, bench: Bench
    ) -> None:
        """A key, an entry or a statement is logged or put into an error, or each write warns of something."""
        driver, marks = await bench.driver(), [uuid.uuid4().hex for _ in range(4)]
        scope, name, entry, body = f"check:{marks[0]}:memory", marks[1], marks[2].encode(), marks[3].encode()
        key = Key(scope, name)
        bench.clean(scope)
        too_large = entry + bytes(driver.traits.max_entry)
        with _listening(*_packages(driver)) as heard:
            for number in range(WRITES):
                await driver.append(key, entry, initial_version="initial", ttl=60)
                await driver.replace(key, body, version=f"v{number}", expect=ANY, ttl=KEEP)
            operations: list[Callable[[], Awaitable[object]]] = [
                lambda: driver.load(key),
                lambda: driver.scan(scope, limit=1),
                lambda: driver.replace(key, body, version="w", expect=ABSENT, ttl=None),
                lambda: driver.replace(key, body, version="w", expect="other", drop=1, ttl=None),
                lambda: driver.delete(key, expect="other"),
                lambda: driver.append(key, too_large, initial_version="initial", ttl=None),
                lambda: driver.replace(key, too_large, version="w", expect=ANY, ttl=None),
                lambda: driver.append(key, entry, initial_version="initial", ttl=-1),
                lambda: driver.delete(key),
                driver.close,
                lambda: driver.load(key),
                lambda: driver.append(key, entry, initial_version="initial", ttl=None),
            ]
            if bench.datastore.damage is not None:
                damaged = Key(f"check:{marks[0]}:damaged", name)
                bench.clean(damaged.scope)
                await append_all(driver, damaged, entry, entry, entry)
                await driver.replace(damaged, body, version="v2", expect="initial", drop=1, ttl=KEEP)
                await bench.damage(damaged)
                operations[:0] = [
                    lambda: driver.load(damaged),
                    lambda: driver.append(damaged, entry, initial_version="initial", ttl=60),
                    lambda: driver.replace(damaged, body, version="w", expect="v2", drop=1, ttl=KEEP),
                ]
            for operation in operations:
                try:
                    await operation()
                except (StorageError, ValueError) as error:
                    heard.messages.append(Message(f"the error {type(error).__name__}", str(error)))
        for message in heard.messages:
            for mark, what in zip(marks, ("a scope", "a name", "an entry", "a body"), strict=True):
                # Not by `assert`: its explanation prints the message again.
                if mark in message.text:
                    raise AssertionError(f"no message may contain {what}, and one does: {_told(message)}")
                if mark in message.beside:
                    raise AssertionError(
                        f"no message may bring {what}, and the arguments or the traceback of one do: "
                        f"{_told(message)}"
                    )
        always = [place for place, times in heard.places.items() if times >= WRITES]
        must_be(always, [], "nothing is wrong, and so nothing is warned of at each write")


def _told(message: Message) -> str:
    return f"{message.where}: {cut(message.text, _LONGEST_TEXT)}"


def _packages(driver: Driver) -> set[str]:
    """Return ours, and those of the driver and the drivers within it."""
    found, layer = {"stm_backends"}, cast("Any", driver)
    while layer is not None:
        found.add(type(layer).__module__.partition(".")[0])
        layer = getattr(layer, "inner", None)
    return found


@contextlib.contextmanager
def _listening(*packages: str) -> Generator[Heard]:
    """Hear all that the loggers of these packages say, and the warnings of all others."""
    heard, root = Heard(packages), logging.getLogger()
    loggers: list[logging.Logger] = [logging.getLogger(package) for package in packages]
    loggers += [
        logger
        for name, logger in root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in packages and "." in name
    ]
    before = [(logger, logger.level, logger.propagate, logger.disabled) for logger in loggers]

    def warned(message: Warning | str, kind: type[Warning], file: str, line: int, *_: Any) -> None:
        place = f"{file}, line {line}: {kind.__name__}"
        heard.note(Message(place, f"{message}"), place, is_warning=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Python shows what a library should no longer use to its authors alone.
        for kind in (DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", kind)
        for package in packages:
            warnings.filterwarnings("always", module=rf"{re.escape(package)}(\.|$)")
        warnings.showwarning = warned
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
