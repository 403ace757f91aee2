"""Any sequence of operations has the answers that a model of a few lines gives."""

import asyncio
import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.testing import Bench, Datastore, DriverContract, FakeClock, open_at
from stm_backends.testing.driver_checks.state_machine import driver_machine
from stm_backends.testing.workbench.faulty import faulty_datastore
from tests.mutants.expiry import ExpiredComesBack
from tests.mutants.replaces import DropIsClamped, ReplaceForgetsItsToken

FEW = settings(
    report_multiple_bugs=False,
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def memory_datastore(driver_class=MemoryDriver):
    clock, store = FakeClock(), MemoryStore()

    async def open_one():
        driver = driver_class(store, clock=clock)
        await driver.open()
        return driver

    return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0)


def test_the_memory_driver_behaves_as_modelled():
    run_state_machine_as_test(driver_machine(memory_datastore), settings=FEW)


def test_the_sqlite_driver_behaves_as_modelled(tmp_path):
    numbers = itertools.count()

    def sqlite_datastore():
        clock = FakeClock()
        url = f"sqlite:///{tmp_path}/{next(numbers)}.db"
        return Datastore(
            open=functools.partial(open_at, url, clock=clock), pass_time=clock.pass_time, tick=60.0
        )

    run_state_machine_as_test(driver_machine(sqlite_datastore), settings=settings(FEW, max_examples=20))


@pytest.mark.full
def test_a_slow_datastore_on_a_real_clock_is_not_blamed_for_the_time_that_goes_by():
    pauses = itertools.cycle([0.0, 0.001, 0.03, 0.002])

    class Slow(MemoryDriver):
        async def load(self, key):
            await asyncio.sleep(next(pauses))
            return await super().load(key)

        async def append(self, key, entry, *, initial_version, ttl):
            await asyncio.sleep(next(pauses))
            length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
            await asyncio.sleep(next(pauses))
            return length

    store = MemoryStore()

    async def open_one():
        driver = Slow(store)
        await driver.open()
        return driver

    slow = Datastore(open=open_one, tick=0.04)
    run_state_machine_as_test(driver_machine(lambda: slow), settings=settings(FEW, max_examples=15))


@pytest.mark.parametrize("mutant", [DropIsClamped, ExpiredComesBack, ReplaceForgetsItsToken])
def test_the_machine_finds_a_broken_driver(mutant):
    machine = driver_machine(functools.partial(memory_datastore, mutant))
    # Shrinking makes a failure readable; that there is one is enough here.
    find = settings(FEW, max_examples=300, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=find)


def test_the_check_of_any_history_shows_the_shortest_one_on_which_the_driver_is_wrong():
    bench = Bench(faulty_datastore(DropIsClamped, clock=FakeClock()))
    with pytest.raises(AssertionError) as caught:
        # As many as it takes: how it is told is of interest here. Hypothesis ends some shrinking early.
        DriverContract().test_any_history_without_expiry_matches_the_model(
            Bench(replace(bench.datastore, histories=500, seed=1))
        )
    notes = "\n".join(caught.value.__notes__)
    assert "state.fold(" in notes
    # Hypothesis sometimes leaves steps in that do nothing, made as simple as they can be.
    assert notes.count("state.") - notes.count("state.reopen(which=0)") < 8
    assert "Clause driver.model" in notes
