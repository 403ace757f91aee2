"""The suite passes drivers that are unusual and right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.workbench.check import NotAsked
from stm_backends.testing.workbench.faulty import FaultyDriver, faulty_datastore

EXACTLY = "test_a_record_is_full_with_exactly_max_record_bytes"
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
