"""The suite tidies up the damage that it does, and says so where a driver does not let it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from stm_backends.drivers.contract import ANY, AnyType, Key, Page
from stm_backends.errors import Corrupt
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks.network import Network
from stm_backends.testing.workbench.check import check
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore
from tests.support.networked import DictionaryServer, networked_datastore


class ReadsNamesFromRecords(FaultyDriver):
    """Is correct, and cannot list a scope in which a record is damaged."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        if scope in self.store.damaged:
            raise Corrupt("the name cannot be read", backend=self.name, operation="scan")
        return await super().scan(scope, after=after, limit=limit)


class OverwritesDamage(FaultyDriver):
    """Is correct, and overwrites a damaged record whole when it is told to replace any."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        if how["expect"] is ANY:
            await self.delete(key)
        return await super().replace(key, body, **how)


class KeepsDamage(ReadsNamesFromRecords):
    """Does not delete a damaged record."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        if key.scope in self.store.damaged:
            raise Corrupt("the record cannot be read", backend=self.name, operation="delete")
        return await super().delete(key, expect=expect)


class Damages(DriverContract):
    """A check that passes and leaves a damaged record behind, and one that fails with it."""

    @check("driver.load")
    async def test_what_was_damaged_is_left_behind(self, bench: Bench) -> None:
        """Not said of what fails afterwards."""
        await self.damaged(bench)

    @check("driver.load")
    async def test_what_fails_shows_the_damage(self, bench: Bench) -> None:
        """Said of what fails here."""
        await self.damaged(bench)
        raise AssertionError("as it should")

    async def damaged(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="v", ttl=None)
        await bench.damage(key)


def bench_of(kind: type[FaultyDriver]) -> Bench:
    return Bench(faulty_datastore(kind, clock=FakeClock(), **SMALL), quick=True)


def failure_of(name: str, kind: type[FaultyDriver]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- the tests judge which it is
        Damages.checks()[name](Damages(), bench_of(kind))
    return caught.value


DAMAGING = [
    name for name, made in DriverContract.checks().items() if "bench.damage(" in inspect.getsource(made)
]


def test_every_check_that_damages_a_record_lets_the_bench_do_it() -> None:
    assert len(DAMAGING) == 6
    assert not any("store.damage(" in inspect.getsource(made) for made in DriverContract.checks().values())


@pytest.mark.parametrize("name", DAMAGING)
def test_a_driver_whose_scan_raises_corrupt_passes_the_checks(name: str) -> None:
    bench = bench_of(ReadsNamesFromRecords)
    if name in Network.checks():
        bench = Bench(networked_datastore(server=DictionaryServer(ReadsNamesFromRecords)), quick=True)
    DriverContract.checks()[name](DriverContract(), bench)


def test_a_replace_of_any_record_may_overwrite_damage_whole() -> None:
    name = "test_no_write_makes_a_damaged_record_look_healthy"
    DriverContract.checks()[name](DriverContract(), bench_of(OverwritesDamage))


SENTENCES = (
    "A damaged record raises `Corrupt`, and two operations end that.",
    "`delete` with `expect=ANY` removes it.",
    "`replace` with `expect=ANY` may overwrite it whole, or raise `Corrupt`.",
    "Nothing else may make it readable.",
)


@pytest.mark.parametrize(
    "file",
    [
        "stm_backends/drivers/contract.py",
        "docs/how-to/writing-a-backend.md",
        "docs/explanation/conformance.md",
    ],
)
def test_what_ends_damage_is_said_in_the_same_words_everywhere(file: str) -> None:
    text = " ".join((Path(__file__).parents[2] / file).read_text("utf-8").split())
    assert " ".join(SENTENCES) in text


def test_damage_is_shown_in_the_history() -> None:
    notes = "\n".join(failure_of("test_what_fails_shows_the_damage", ReadsNamesFromRecords).__notes__)
    assert "  -- Key(scope1, 'record') is damaged" in notes
    assert "Usual cause: Said of what fails here." in notes


def test_what_fails_after_a_check_has_passed_is_told_as_that() -> None:
    error: Any = failure_of("test_what_was_damaged_is_left_behind", KeepsDamage)
    notes = "\n".join(error.__notes__)
    assert str(error).startswith("the check itself has passed, and tidying up after it failed: Corrupt: ")
    assert "test_damage.py:" in notes
    assert not any(word in notes for word in ("Clause ", "Expected: ", "Usual cause: "))
    assert "-- Key(scope1, 'record') is damaged" in notes
