"""The check of what a driver logs names the logger, the level and the message, each once."""

from __future__ import annotations

import warnings

import pytest

from stm_backends.drivers.contract import Key, Record
from stm_backends.testing import Bench, DriverContract, FakeClock
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


def finding(kind: type[FaultyDriver]) -> str:
    datastore = faulty_datastore(kind, clock=FakeClock(), **SMALL)
    with pytest.raises(AssertionError) as caught:
        DriverContract.checks()[CHECK](DriverContract(), Bench(datastore, quick=True))
    return str(caught.value)


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
