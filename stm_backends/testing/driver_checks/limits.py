"""Checks of what is too large, and of what makes no sense."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from stm_backends.driver import ABSENT, ANY, Record
from stm_backends.errors import TooLarge
from stm_backends.testing.bench import Bench
from stm_backends.testing.contract import Contract, check, not_asked
from stm_backends.testing.driver_checks.steps import append_all, loaded, noise

LARGEST_RECORD = 256 * 1024 * 1024
"""What a check fills a record with at most, in bytes."""


class Limits(Contract):
    """Checks of what is too large, and of what makes no sense."""

    @check("driver.limits")
    async def test_the_largest_entry_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = noise(driver.traits.max_entry)
        assert await driver.append(key, largest, birth="birth", ttl=None) == 1
        with pytest.raises(TooLarge) as caught:
            await driver.append(key, largest + b"x", birth="birth", ttl=None)
        assert caught.value.what == "entry"
        record = await loaded(driver, key)
        assert record.tail == (largest,), "a refused entry was written, or cut"

    @check("driver.limits", slow=True)
    async def test_the_largest_body_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = noise(driver.traits.max_entry)
        await driver.append(key, b"a", birth="birth", ttl=None)
        with pytest.raises(TooLarge) as caught:
            await driver.replace(key, largest + b"x", version="v2", expect="birth", drop=1, ttl=None)
        assert caught.value.what == "entry"
        assert await driver.load(key) == Record("birth", None, (b"a",))
        assert await driver.replace(key, largest, version="v2", expect="birth", drop=1, ttl=None) is True
        assert await driver.load(key) == Record("v2", largest, ())

    @check("driver.limits", slow=True)
    async def test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room(
        self, bench: Bench
    ) -> None:
        driver, key = await bench.driver(), bench.key()
        if driver.traits.max_record > LARGEST_RECORD:
            not_asked(f"would write {driver.traits.max_record:,} bytes; give the driver a smaller limit")
        entry = noise(driver.traits.max_entry)
        count = driver.traits.max_record // len(entry)
        await append_all(driver, key, *[entry] * count)
        with pytest.raises(TooLarge) as caught:
            await driver.append(key, entry, birth="birth", ttl=None)
        assert caught.value.what == "record"
        assert (await loaded(driver, key)).tail == (entry,) * count
        with pytest.raises(TooLarge) as caught:
            await driver.replace(key, entry, version="v2", expect="birth", ttl=None)
        assert caught.value.what == "record"
        assert (await loaded(driver, key)).version == "birth"
        assert await driver.replace(key, b"body", version="v2", expect="birth", drop=count, ttl=None) is True
        assert await driver.append(key, entry[:-4], birth="birth", ttl=None) == 1

    @check("driver.arguments")
    async def test_nonsense_arguments_are_a_value_error_and_write_nothing(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.append(key, b"a", birth="birth", ttl=0),
            lambda: driver.append(key, b"a", birth="birth", ttl=-1.0),
            lambda: driver.append(key, b"a", birth="birth", ttl=float("nan")),
            lambda: driver.replace(key, b"a", version="v", expect=ANY, ttl=0),
            lambda: driver.replace(key, b"a", version="v", expect=ANY, drop=1, ttl=None),
            lambda: driver.replace(key, b"a", version="v", expect=ABSENT, drop=1, ttl=None),
            lambda: driver.replace(key, b"a", version="v", expect="u", drop=-1, ttl=None),
            lambda: driver.scan(key.scope, limit=0),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r".+"):
                await call()
        assert await driver.load(key) is None
