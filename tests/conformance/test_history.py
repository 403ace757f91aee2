"""The history that a failing check shows has what explains the answer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stm_backends.drivers.contract import ANY, Key, Page
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, Datastore, DriverContract, FakeClock
from stm_backends.testing.workbench.drivers import names_in
from stm_backends.testing.workbench.faulty import SMALL, faulty_datastore
from stm_backends.testing.workbench.history import SHOWN
from tests.mutants.waiting import DrawsBeforeItLocks


async def open_one() -> MemoryDriver:
    driver = MemoryDriver()
    await driver.open()
    return driver


async def written(count: int) -> tuple[Bench, MemoryDriver, str]:
    """Return a bench whose driver has appended to so many names of one scope."""
    bench = Bench(Datastore(open=open_one))
    driver, scope = await bench.driver(), bench.scope()
    for number in range(count):
        await driver.append(Key(scope, f"{number:02}"), b"", initial_version="v", ttl=None)
    return bench, driver, scope


async def test_a_listing_is_shown_with_everything_that_was_done_in_its_scope() -> None:
    bench, driver, scope = await written(30)
    await driver.load(Key(bench.scope(), "elsewhere"))
    await driver.scan(scope, limit=100)
    lines = bench.history.lines()
    assert len(lines) == 31
    assert all(f"'{number:02}'" in lines[number] for number in range(30))
    assert not any("elsewhere" in line for line in lines)


async def test_a_write_between_two_pages_does_not_hide_the_pages() -> None:
    bench, driver, scope = await written(2)
    page = await driver.scan(scope, limit=1)
    await driver.delete(Key(scope, "00"))
    lines = bench.history.lines()
    assert [line.partition("(")[0] for line in lines] == [
        *("driver1.append", "driver1.append", "driver1.scan", "driver1.delete")
    ]
    assert page.after is not None


async def test_of_too_many_neighbours_those_on_the_same_record_stay() -> None:
    bench, driver, scope = await written(30)
    await driver.load(Key(scope, "03"))
    lines = bench.history.lines()
    assert len(lines) == SHOWN + 1
    assert lines[0] == f"... {31 - SHOWN} earlier operations"
    assert "append(Key(scope1, '03')" in lines[1]
    assert "append(Key(scope1, '29')" in lines[-2]


async def test_the_same_line_again_and_a_long_error_are_cut_short() -> None:
    bench, driver, scope = await written(1)
    for _ in range(3):
        await driver.load(Key(scope, "00"))
    await driver.close()
    with pytest.raises(Unavailable):
        await driver.replace(Key(scope, "00"), b"", version="v", expect=ANY, ttl=None)
    lines = bench.history.lines()
    assert sum("load" in line for line in lines) == 1
    assert lines[1].endswith("(3 times)")
    assert lines[-1].endswith("...")
    assert len(lines[-1]) < 250


class Still(MemoryDriver):
    """Lists one page again and again."""

    pages = 0

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        self.pages += 1
        page = await super().scan(scope, limit=1)
        return Page(page.names, page.names[0])


async def test_a_listing_that_does_not_advance_ends_after_three_pages() -> None:
    driver = Still()
    await driver.open()
    await driver.append(Key("s", "a"), b"", initial_version="v", ttl=None)
    with pytest.raises(AssertionError, match="the listing does not advance: 3 of its pages"):
        await names_in(driver, "s")
    assert driver.pages == 3


def test_an_entry_in_another_place_is_shown_with_the_whole_race_and_its_seed() -> None:
    check = DriverContract.checks()["test_no_entry_appears_before_one_that_a_load_has_seen"]
    datastore = replace(faulty_datastore(DrawsBeforeItLocks, clock=FakeClock(), **SMALL), seed=7)
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        check(DriverContract(), Bench(datastore, quick=True))
    (note,) = (note for note in caught.value.__notes__ if "History:" in note)
    assert "-- the chances are those of `Datastore.seed` 7" in note
    race = re.findall(r"append\(Key\(scope1, '(record\d+)'\), b'(\w+)", note)
    # All of the last race, from its first append on.
    assert next(entry for name, entry in race if name == race[-1][0]) == "first"
