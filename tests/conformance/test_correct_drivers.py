"""The suite passes drivers that are unusual and right."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks import optional
from stm_backends.testing.workbench.check import NotAsked
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore

EXACTLY = "test_a_record_is_full_with_exactly_max_record_bytes"
PURGE = "test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"
OUTAGE = "test_after_an_outage_the_same_driver_works_and_nothing_is_lost"
FULL = (
    "test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room",
    "test_a_rewrite_that_makes_a_record_too_large_is_refused",
    "test_no_operation_leaves_a_transaction_or_a_lock_behind",
)
"""Checks that fill a record with its largest entries."""


class CountsNoOverhead(FaultyDriver):
    """Takes more entries than it promises, because the overhead of its traits is the most it may be."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.traits = replace(self.traits, overhead=64)


class KeepsLargeValuesElsewhere(FaultyDriver):
    """Has room for any number of large values, which take nothing of the record."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.traits = replace(self.traits, max_inline=1_000)


class FindsMuchToPurge(FaultyDriver):
    """Is on a datastore in which others have left many expired records."""

    _swept = 0
    purges = 0

    def __init__(self, *given: Any, clock: FakeClock, **options: Any) -> None:
        super().__init__(*given, clock=clock, **options)
        self._time = clock

    async def expired(self) -> int:
        for number in range(5_000):
            await super().append(Key("others", f"{number}"), b"", initial_version="v", ttl=1)
        self._time.now += 2
        return await super().expired()

    async def purge(self, limit: int) -> int:
        type(self).purges += 1
        return await super().purge(limit)


class PassesOverWhatOthersHold(FaultyDriver):
    """Removes nothing at first, because another purge has all records in hand, which is then given up."""

    _swept = 0
    purges = 0

    async def purge(self, limit: int) -> int:
        self.purges += 1
        return await super().purge(limit) if self.purges > 1 else 0


class PausesBeforeItConnects(FaultyDriver):
    """Has a client that, once it has met an outage, refuses everything until a pause is over."""

    _until = 0.0

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[Any, float]]:
        clock = asyncio.get_running_loop().time
        if self.store.down:
            self._until = clock() + self.traits.deadline * 0.8
        if clock() < self._until:
            raise Unavailable("not connected", backend=self.name, operation=operation)
        with super()._scope(name, operation) as found:
            yield found


def run(name: str, kind: type[FaultyDriver], **limits: int) -> None:
    """Run one check on a driver that is right."""
    datastore = replace(faulty_datastore(kind, clock=FakeClock(), **limits), races_s=0.1)
    DriverContract.checks()[name](DriverContract(), Bench(datastore, quick=True))


@pytest.mark.parametrize("largest", [100, 2_000, 60_000])
def test_a_driver_that_takes_more_than_it_promises_passes(largest: int) -> None:
    run(EXACTLY, CountsNoOverhead, max_entry_bytes=largest, max_record_bytes=200_000)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("kind", [CountsNoOverhead, KeepsLargeValuesElsewhere])
def test_no_record_must_be_full_before_its_values_exceed_the_limit(
    name: str, kind: type[FaultyDriver]
) -> None:
    try:
        run(name, kind, max_entry_bytes=2_000, max_record_bytes=200_000)
    except NotAsked as reason:
        assert "do not say how many" in str(reason)  # noqa: PT017 -- of some checks


def test_bytes_are_cut_to_the_largest_entry_of_a_driver() -> None:
    run("test_bytes_are_returned_unchanged", FaultyDriver, max_entry_bytes=100, max_record_bytes=2_000)


def test_a_purge_of_what_others_have_left_is_short() -> None:
    run(PURGE, FindsMuchToPurge)
    assert FindsMuchToPurge.purges < 20


def test_a_purge_may_pass_over_what_another_has_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "PATIENCE", 2)
    run(PURGE, PassesOverWhatOthersHold)


def test_a_driver_may_take_a_deadline_until_it_works_after_an_outage() -> None:
    datastore = faulty_datastore(PausesBeforeItConnects, clock=FakeClock(), deadline_s=0.5, **SMALL)
    DriverContract.checks()[OUTAGE](DriverContract(), Bench(datastore, quick=True))
