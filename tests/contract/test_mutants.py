"""The suite rejects each mutant by the check meant for it, in its quick form too, and passes correct code."""

from __future__ import annotations

import asyncio
import functools
import gc
import tempfile
import time
import warnings
from dataclasses import replace

import pytest

from stm_backends.errors import StmError
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing import (
    Bench,
    Datastore,
    DriverContract,
    FakeClock,
    GraphContract,
    Graphs,
    Memories,
    MemoryContract,
    PodsContract,
    StoreContract,
    Stores,
    graphs_on,
    memories_on,
)
from stm_backends.testing.driver_checks import leftovers, optional
from stm_backends.testing.driver_checks.network import Network
from stm_backends.testing.driver_checks.stepping import Stepping
from stm_backends.testing.graph_contract import GraphBench
from stm_backends.testing.store_contract import StoreBench
from stm_backends.testing.workbench import drivers
from stm_backends.testing.workbench.check import check_of
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore
from stm_backends.testing.workbench.memories import MemoryBench
from tests.mutants import (
    BACKEND_GRAPHS,
    DRIVERS,
    FILES,
    GRAPHS,
    MEMORIES,
    NETWORKED,
    OPTIMISTIC,
    PODS,
    STORES,
)
from tests.mutants.graphs import Ground, PlainGraph
from tests.mutants.network import GreetsTheServer, LeaksAFailedOpening, LeaksConnections
from tests.mutants.pods import pods_of
from tests.mutants.stores import JsonStore, Shelf
from tests.mutants.waiting import FollowsTheServersClock, open_on_file
from tests.support import clock
from tests.support.networked import NetworkedDriver, networked_datastore
from tests.support.optimistic import OptimisticDriver, optimistic_datastore

DEADLINE_S = 0.1
"""Short, so that the lease of a killed pod does not stand long."""

REJECTED = (
    AssertionError,
    pytest.fail.Exception,
    ExceptionGroup,
    StmError,
    RuntimeError,
    TimeoutError,
    TypeError,
)

every = pytest.mark.parametrize


def run(contract, caught, bench):
    """Run one check as the suite does."""
    contract.checks()[caught.check](contract(), bench, **caught.given)


@pytest.fixture(autouse=True)
def folders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def many_records_are_few(monkeypatch):
    """Just so many that a mutant can be told from the correct driver."""
    monkeypatch.setattr(leftovers, "MANY_KEYS", leftovers.FEWEST_KEYS)


@pytest.fixture(autouse=True)
def no_other_purge_is_waited_for(monkeypatch):
    monkeypatch.setattr(optional, "PATIENCE", 2)


@pytest.fixture
def no_connection_is_left(where):
    """Collect what a mutant has left in event loops that have ended, so that no later test fails for it."""
    yield
    if where in (on_network, on_cells):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def virtual(monkeypatch):
    """Have the next checks run in virtual time: what they wait for takes none."""
    monkeypatch.setattr(asyncio, "run", clock.run)
    monkeypatch.setattr(time, "time", lambda: asyncio.get_running_loop().time())


def on_driver(kind):
    # Short, because some mutants let others wait for a lock until their deadline.
    return Bench(faulty_datastore(kind, clock=FakeClock(), deadline_s=1.0, **SMALL), quick=True)


def on_file(kind):
    opening = functools.partial(open_on_file, kind, f"{tempfile.mkdtemp()}/stm.db")
    return Bench(Datastore(open=opening), quick=True)


def on_network(kind):
    return Bench(networked_datastore(kind), quick=True)


def on_cells(kind):
    return Bench(optimistic_datastore(kind), quick=True)


def on_store(kind):
    shelf = Shelf()

    async def open_one():
        return kind(shelf)

    return StoreBench(Stores(open=open_one, outage=shelf.outage, damage=shelf.damage))


def on_graph(kind):
    ground = Ground()

    async def open_one(name):
        return kind(ground, name)

    return GraphBench(Graphs(open=open_one, outage=ground.outage))


def on_backend_graph(kind):
    return GraphBench(graphs_on(faulty_datastore(), kind))


def on_memory(kind):
    async def open_one(key, config, summarizer):
        del key
        return kind(config, summarizer)

    async def close(memory):
        await memory.close(timeout=0)

    return MemoryBench(Memories(open=open_one, close=close))


def correct_memory(config, summarizer):
    return DefaultShortTermMemory(config=config, summarizer=summarizer)


def on_pods(kind):
    datastore = faulty_datastore(kind.driver, deadline_s=DEADLINE_S)
    # A mutant that never lets its lease go is waited for less long than the correct one may take.
    return MemoryBench(replace(pods_of(kind, datastore, deadline_s=DEADLINE_S), lease_s=1.5))


PROFILES = [
    (DriverContract, DRIVERS, on_driver),
    (DriverContract, FILES, on_file),
    (DriverContract, NETWORKED, on_network),
    (DriverContract, OPTIMISTIC, on_cells),
    (StoreContract, STORES, on_store),
    (GraphContract, GRAPHS, on_graph),
    (GraphContract, BACKEND_GRAPHS, on_backend_graph),
    (MemoryContract, MEMORIES, on_memory),
    (PodsContract, PODS, on_pods),
]
SLOW = {
    "ClosesNothing",
    "CountsTimeAfterItsQueue",
    "FailureLosesItsRace",
    "FollowsTheClientsClock",
    "KeepsATaskForEachRecord",
    "KeepsDeadConnections",
    "KeepsTheLockAfterAnError",
    "LeaksAFailedOpening",
    "LeaksConnections",
    "LeaksConnectionsOfErrors",
    "LeaseForEver",
    "MarksNoGap",
    "MovesNothingMeanwhile",
    "NoDeadline",
    "OpensTwice",
    "RewritesPagesBlindly",
    "TrimsWithoutTheLease",
    "WaitsWithoutADeadline",
}
"""Mutants whose check waits for seconds: they are in the full run only."""

MUTANTS = [
    pytest.param(
        *(contract, kind, caught, where),
        id=kind.__name__,
        marks=pytest.mark.full if kind.__name__ in SLOW else (),
    )
    for contract, kinds, where in PROFILES
    for kind, caught in kinds.items()
]


@every(("contract", "kind", "caught", "where"), MUTANTS)
@pytest.mark.usefixtures("no_connection_is_left")
def test_a_mutant_is_rejected_by_the_check_that_is_meant_for_it(contract, kind, caught, where, monkeypatch):
    if contract is MemoryContract:
        virtual(monkeypatch)
    with pytest.raises(REJECTED) as rejected:
        run(contract, caught, where(kind))
    (note,) = (note for note in rejected.value.__notes__ if note.startswith("Clause "))
    sentence = caught.check.removeprefix("test_").replace("_", " ").capitalize()
    assert f"Expected: {sentence}." in note
    assert "History:" in note


@every(("contract", "kind", "caught", "where"), [one for one in MUTANTS if one.values[2].given])
def test_a_quick_run_has_the_parameters_that_reject_a_mutant(contract, kind, caught, where):
    del kind, where
    assert not check_of(contract.checks()[caught.check]).is_slow(caught.given)


def unique(kinds):
    return [
        pytest.param(caught, id=caught.check) for caught in {str(one): one for one in kinds.values()}.values()
    ]


@every("caught", unique(DRIVERS))
def test_the_correct_driver_passes_every_check_that_rejects_a_mutant(caught, monkeypatch):
    # A mutant ends a race as soon as it is found; this one does not.
    monkeypatch.setattr(drivers, "QUICK_RACES_S", 0.3)
    run(DriverContract, caught, on_driver(FaultyDriver))


@every("caught", unique(FILES))
def test_the_correct_driver_on_a_file_passes_every_check_that_rejects_a_mutant(caught):
    run(DriverContract, caught, on_file(FollowsTheServersClock))


@every("caught", unique(NETWORKED))
def test_the_correct_networked_driver_passes_every_check_that_rejects_a_mutant(caught):
    run(DriverContract, caught, on_network(NetworkedDriver))


def test_a_correct_driver_that_asks_something_when_it_is_opened_passes():
    run(DriverContract, NETWORKED[LeaksAFailedOpening], on_network(GreetsTheServer))


@every("caught", unique(OPTIMISTIC))
def test_the_correct_optimistic_driver_passes_every_check_that_rejects_a_mutant(caught):
    run(DriverContract, caught, on_cells(OptimisticDriver))


def test_a_correct_driver_whose_pool_grows_on_demand_passes():
    class LargePool(NetworkedDriver):
        def __init__(self, address):
            super().__init__(address)
            self._free = asyncio.Semaphore(100)

    run(DriverContract, NETWORKED[LeaksConnections], on_network(LargePool))


@every("caught", unique(STORES))
def test_the_correct_store_passes_every_check_that_rejects_a_mutant(caught):
    run(StoreContract, caught, on_store(JsonStore))


@every("caught", unique(GRAPHS))
def test_the_correct_graph_passes_every_check_that_rejects_a_mutant(caught):
    run(GraphContract, caught, on_graph(PlainGraph))


@every("caught", unique(MEMORIES))
def test_the_correct_memory_passes_every_check_that_rejects_a_mutant(caught, monkeypatch):
    virtual(monkeypatch)
    run(MemoryContract, caught, on_memory(correct_memory))


@every("caught", unique(PODS))
def test_the_correct_pods_pass_every_check_that_rejects_a_mutant(caught):
    datastore = faulty_datastore(deadline_s=DEADLINE_S)
    run(PodsContract, caught, MemoryBench(memories_on(datastore, deadline_s=DEADLINE_S)))


@pytest.mark.full
def test_every_check_passes_ten_times_in_a_row_on_the_reference_driver():
    for _ in range(10):
        for name, check in DriverContract.checks().items():
            if name in {**vars(Network), **vars(Stepping)}:
                continue  # the correct drivers behind a network pass these above
            bench = on_driver(FaultyDriver)
            try:
                check(DriverContract(), bench)
            except pytest.skip.Exception as skipped:
                assert "reach ends with the process" in str(skipped)  # noqa: PT017 -- of many checks, some are skipped


def test_there_are_at_least_thirty_mutants():
    assert len(MUTANTS) >= 30
