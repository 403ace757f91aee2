"""The suite bites: each broken driver is rejected by the check that is meant for it."""

import asyncio

import pytest

from stm_backends.errors import StmError
from stm_backends.reference import MemoryDriver, MemoryStore
from stm_backends.testing import Bench, Datastore, DriverContract, FakeClock
from stm_backends.testing.mutants import MUTANTS


async def run_check(name, driver_class):
    """Run one check on a driver class, as the suite would, and clean up nothing: the store is its own."""
    clock, store = FakeClock(), MemoryStore()

    async def open_one():
        driver = driver_class(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=50_000)
        await driver.open()
        return driver

    bench = Bench(Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0))
    async with asyncio.timeout(10):
        await getattr(DriverContract(), name)(bench)


@pytest.mark.parametrize(
    ("mutant", "check"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None)
)
async def test_a_mutant_is_rejected_by_the_check_that_is_meant_for_it(mutant, check):
    with pytest.raises((AssertionError, pytest.fail.Exception, ExceptionGroup, StmError)):
        await run_check(check, mutant)


@pytest.mark.parametrize("check", sorted(set(MUTANTS.values())))
async def test_the_reference_passes_every_check_that_rejects_a_mutant(check):
    await run_check(check, MemoryDriver)
