"""Checks of a driver's log lines and error messages."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Generator
from typing import Final

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key
from stm_backends.errors import StorageError
from stm_backends.testing.driver_checks.steps import append_all
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.heard import Heard, hearing_warnings, message_of, packages_of

WRITES: Final = 12
"""Number of writes of a kind that are watched for a warning with each one."""

MARKED: Final = ("a scope", "a name", "an entry", "a body")
"""The parts of a record that must not be in a message, in the order of a check's marks."""

RACES: Final = 8
"""Number of records with conflicting writers."""


class Messages(Contract):
    """Checks of a driver's log lines and error messages."""

    @check("driver.logs")
    async def test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write(
        self, bench: Bench
    ) -> None:
        """A key, an entry or a statement is logged or put into an error, or each write warns."""
        driver, marks = await bench.driver(), [uuid.uuid4().hex for _ in range(4)]
        scope, name, entry, body = f"check:{marks[0]}:memory", marks[1], marks[2].encode(), marks[3].encode()
        key = Key(scope, name)
        bench.clean(scope)
        too_large = entry + bytes(driver.traits.max_entry)
        with _heard_without(marks, driver) as heard:
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
                    heard.judge(message_of(error))
        always = [place for place, times in heard.places.items() if times >= WRITES]
        must_be(always, [], "nothing is wrong, so no write needs a warning")

    @check("driver.logs")
    async def test_no_message_of_a_race_names_a_key_or_stored_text(self, bench: Bench) -> None:
        """A conflict with another writer is logged with the key or the value to be stored."""
        drivers, marks = [await bench.driver() for _ in range(3)], [uuid.uuid4().hex for _ in MARKED]
        scope, entry, body = f"check:{marks[0]}:memory", marks[2].encode(), marks[3].encode()
        bench.clean(scope)
        with _heard_without(marks, drivers[0]) as heard:
            for number in range(RACES):
                key = Key(scope, f"{marks[1]}{number}")
                await append_all(drivers[0], key, entry, entry)
                rivals = [_at_once(driver, key, entry, body, f"v{n}") for n, driver in enumerate(drivers)]
                for outcome in await asyncio.gather(*(call for each in rivals for call in each)):
                    if isinstance(outcome, Exception):
                        heard.judge(message_of(outcome))


def _at_once(driver: Driver, key: Key, entry: bytes, body: bytes, version: str) -> list[Awaitable[object]]:
    """Return conflicting operations on a record of two entries; errors are their results."""

    async def outcome(operation: Awaitable[object]) -> object:
        try:
            return await operation
        except (StorageError, ValueError) as error:
            return error

    return [
        outcome(one)
        for one in (
            driver.append(key, entry, initial_version="initial", ttl=60),
            driver.replace(key, body, version=version, expect="initial", drop=1, ttl=KEEP),
            driver.replace(key, body, version=f"{version}b", expect="initial", rewrite=(entry,), ttl=60),
            driver.replace(key, body, version=f"{version}c", expect=ABSENT, ttl=60),
            driver.delete(key, expect="initial"),
        )
    ]


@contextlib.contextmanager
def _heard_without(marks: list[str], driver: Driver) -> Generator[Heard]:
    """Collect a driver's messages meanwhile, and fail if one contains one of the marks."""
    with hearing_warnings(dict(zip(marks, MARKED, strict=True)), *packages_of(driver)) as heard:
        yield heard
    for found in heard.told.values():
        raise AssertionError(found)
