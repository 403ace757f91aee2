"""Checks of listing a scope in pages."""

from __future__ import annotations

import itertools

from stm_backends.drivers.contract import ANY, Key
from stm_backends.testing.driver_checks.samples import NAMES
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench, Positions, names_in
from stm_backends.testing.workbench.expectations import must_be


class Scanning(Contract):
    """Checks of listing a scope in pages."""

    @check("driver.scan")
    async def test_a_scan_lists_names_in_the_order_of_their_utf8_bytes(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in NAMES:
            await driver.replace(Key(scope, name), b"", version="v", expect=ANY, ttl=None)
        expected = sorted(NAMES, key=str.encode)
        for limit in (1, 2, 7, len(NAMES), 1000):
            listed = await names_in(driver, scope, limit=limit)
            must_be(listed, expected, f"these are the names, also in pages of {limit}")

    @check("driver.scan")
    async def test_a_page_holds_no_more_than_its_limit(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for number in range(5):
            await driver.append(Key(scope, f"{number}"), b"", initial_version="v", ttl=None)
        for limit in (1, 3, 5, 6):
            page = await driver.scan(scope, limit=limit)
            assert len(page.names) <= limit, f"a page with limit={limit} must hold no more names"

    @check("driver.scan")
    async def test_a_scan_begins_after_any_name_even_one_that_is_not_there(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in ("a", "c", "e"):
            await driver.append(Key(scope, name), b"", initial_version="v", ttl=None)
        for after, names in {"b": ("c", "e"), "c": ("e",), "e": ()}.items():
            page = await driver.scan(scope, after=after, limit=10)
            must_be(page.names, names, f"a, c and e are there, and these are greater than {after}")

    @check("driver.scan")
    async def test_a_scan_of_an_empty_scope_ends(self, bench: Bench) -> None:
        driver = await bench.driver()
        must_be(await names_in(driver, bench.scope()), [], "nothing was ever stored in this scope")

    @check("driver.scan")
    async def test_a_listing_goes_on_after_pages_of_expired_names(self, bench: Bench) -> None:
        """A page with only expired names is taken as the last one."""
        driver, scope = await bench.driver(), bench.scope()
        names = [f"{number:02}" for number in range(12)]
        living = names[5::6]
        for name in names:
            ttl = None if name in living else bench.tick
            await driver.append(Key(scope, name), b"", initial_version="v", ttl=ttl)
        await bench.pass_time(bench.tick * 1.1)
        for limit in (1, 2, 5, 100):
            listed = await names_in(driver, scope, limit=limit)
            must_be(listed, living, f"the other names have expired, also in pages of {limit}")

    @check("driver.scan")
    async def test_a_name_that_stays_is_listed_exactly_once_during_concurrent_writes(
        self, bench: Bench
    ) -> None:
        driver, other, scope = await bench.driver(), await bench.driver(), bench.scope()
        staying = [f"{number:03}" for number in range(0, 90, 2)]
        for name in staying:
            await driver.append(Key(scope, name), b"", initial_version="v", ttl=None)
        coming = (f"{number:03}" for number in itertools.cycle(range(1, 90, 2)))
        listed, positions = list[str](), Positions()
        after: str | None = ""
        while after is not None:
            page = await driver.scan(scope, after=after, limit=4)
            listed += page.names
            after = positions.next(page.after)
            name = Key(scope, next(coming))
            await other.append(name, b"", initial_version="v", ttl=None)
            await other.append(
                Key(scope, staying[len(listed) % len(staying)]), b"x", initial_version="v", ttl=None
            )
            await other.append(Key(scope, f"0{len(listed)}-"), b"", initial_version="v", ttl=None)
            await other.delete(name)
        found = [name for name in listed if name in set(staying)]
        must_be(found, staying, "these names were there from the beginning to the end")

    @check("driver.scan")
    async def test_deleting_what_was_listed_does_not_hide_what_follows(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        names = [f"{number:02}" for number in range(20)]
        for name in names:
            await driver.append(Key(scope, name), b"", initial_version="v", ttl=None)
        listed, positions = list[str](), Positions()
        after: str | None = ""
        while after is not None:
            page = await driver.scan(scope, after=after, limit=3)
            for name in page.names:
                await driver.delete(Key(scope, name))
            listed += page.names
            after = positions.next(page.after)
        must_be(listed, names, "a name is deleted only after it was listed")
