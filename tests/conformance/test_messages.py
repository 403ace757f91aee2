"""The check of what a driver logs names the logger, the level and the message, each once."""

from __future__ import annotations

import logging
import warnings

import pytest

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.workbench.failures import Overheard
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore
from tests.mutants.messages import LogsKeys, logger

CHECK = "test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write"


class LogsAnErrorThatQuotes(FaultyDriver):
    """Logs an error whose traceback quotes the key."""

    async def load(self, key: Key) -> Record | None:
        try:
            raise RuntimeError(f"no {key.name}")
        except RuntimeError:
            logger.exception("a load failed")
        return await super().load(key)


class WarnsOfKeys(FaultyDriver):
    """Warns with the key in the text."""

    async def load(self, key: Key) -> Record | None:
        warnings.warn(f"slow: {key.name}", ResourceWarning, stacklevel=1)
        return await super().load(key)


class UsesALibrary(FaultyDriver):
    """Not wrong: its client library logs each request when it is told to, and uses what is deprecated."""

    level = logging.INFO

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        logging.getLogger("library.command").log(self.level, "sent %s", key)
        for kind in (DeprecationWarning, PendingDeprecationWarning):
            warnings.warn_explicit(f"{key}: no longer use this", kind, "library.py", 1, module="library")
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class UsesALoudLibrary(UsesALibrary):
    """Uses a library that warns with each key."""

    level = logging.WARNING


class UsesWhatIsDeprecated(FaultyDriver):
    """Calls what is deprecated itself."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        warnings.warn("utcnow is deprecated", DeprecationWarning, stacklevel=1)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


def run(kind: type[FaultyDriver], check: str = CHECK) -> None:
    datastore = faulty_datastore(kind, clock=FakeClock(), **SMALL)
    DriverContract.checks()[check](DriverContract(), Bench(datastore, quick=True))


def finding(kind: type[FaultyDriver]) -> str:
    with pytest.raises(AssertionError) as caught:
        run(kind)
    return str(caught.value)


class NamesKeysInAnOutage(FaultyDriver):
    """Says in an outage which record could not be reached."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Unavailable as error:
            raise Unavailable(f"no {key.scope[:60]}", backend=self.name, operation="load") from error


class ShowsEntriesToThoseWhoDebug(FaultyDriver):
    """Logs the entries that it stores, below all levels that are usually shown."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        logger.debug("storing %r", entry[:100])
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


OUTAGE = "test_after_an_outage_the_same_driver_works_and_nothing_is_lost"
SIZES = "test_the_largest_entry_fits_and_one_byte_more_is_too_large"


@pytest.mark.parametrize(
    ("kind", "check", "what"),
    [
        (NamesKeysInAnOutage, OUTAGE, "a scope, and one does: the error Unavailable: "),
        (ShowsEntriesToThoseWhoDebug, SIZES, f"stored bytes, and one does: {logger.name}, DEBUG: storing "),
    ],
)
def test_the_messages_of_a_check_that_passes_are_read(
    kind: type[FaultyDriver], check: str, what: str
) -> None:
    with pytest.raises(Overheard, match="the check itself has passed") as caught:
        run(kind, check)
    assert f"no message may contain {what}" in str(caught.value)
    # So that all checks that meet it are one finding.
    assert caught.value.cause.startswith("said by ")
    assert not any("Usual cause: " in note for note in caught.value.__notes__)


def test_levels_of_loggers_are_after_a_check_what_they_were() -> None:
    loggers = (logger, logging.getLogger("stm_backends"))
    before = [(each.level, each.propagate, each.disabled) for each in loggers]
    run(FaultyDriver, SIZES)
    after = [(each.level, each.propagate, each.disabled) for each in loggers]
    assert after == before


def test_what_a_library_says_to_those_who_debug_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run(UsesALibrary)
    assert "sent Key(" in caplog.text


def test_what_a_library_warns_of_is_judged() -> None:
    assert "library.command, WARNING: sent Key(" in finding(UsesALoudLibrary)


def test_what_the_driver_itself_should_not_use_is_judged() -> None:
    assert "DeprecationWarning" in finding(UsesWhatIsDeprecated)


def test_a_finding_names_logger_level_and_message_once() -> None:
    found = finding(LogsKeys)
    assert f"a name, and one does: {logger.name}, DEBUG: load " in found
    assert found.count(logger.name) == found.count("DEBUG") == found.count("load") == 1


def test_a_finding_says_that_a_traceback_quotes_a_key() -> None:
    found = finding(LogsAnErrorThatQuotes)
    assert found.endswith(f"the arguments or the traceback of one do: {logger.name}, ERROR: a load failed")


def test_a_finding_of_a_warning_names_the_line_and_the_class() -> None:
    found = finding(WarnsOfKeys)
    assert "ResourceWarning: slow: " in found
    assert found.count("slow") == found.count("test_messages.py, line ") == 1
