"""The checks that `pytest --stm-backend=NAME --pyargs stm_backends.testing` runs, without user code.

It needs the plugin: `-p stm_backends.testing`.
"""

from __future__ import annotations

from typing import Final

import pytest

from stm_backends.testing import (
    Datastore,
    DriverContract,
    GraphContract,
    Graphs,
    Memories,
    PodsContract,
    StoreContract,
    Stores,
    graphs_on,
    memories_on,
    stores_on,
)
from stm_backends.testing.driver_checks.first_look import look

PLUGIN: Final = "stm_backends.testing.runner.plugin"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a run without the plugin, which has the options that name a backend."""
    if not metafunc.config.pluginmanager.hasplugin(PLUGIN):
        raise pytest.Collector.CollectError(
            "the options of the suite are not there: add `-p stm_backends.testing`"
        )


class TestDriver(DriverContract):
    """The driver of the backend named by the options."""

    profile = "driver"

    @pytest.fixture
    def datastore(self, stm_networked_datastore: Datastore) -> Datastore:
        return stm_networked_datastore


class TestStore(StoreContract):
    """The state store that this library builds on that driver."""

    profile = "store"

    @pytest.fixture
    def stores(self, request: pytest.FixtureRequest, stm_datastore: Datastore) -> Stores:
        look(request, stm_datastore)
        return stores_on(stm_datastore)


class TestGraph(GraphContract):
    """The graph that this library builds on that driver."""

    profile = "graph"

    @pytest.fixture
    def graphs(self, request: pytest.FixtureRequest, stm_datastore: Datastore) -> Graphs:
        look(request, stm_datastore)
        return graphs_on(stm_datastore)


class TestMemory(PodsContract):
    """The distributed memory that this library builds on that driver."""

    profile = "memory"

    @pytest.fixture
    def memories(self, request: pytest.FixtureRequest, stm_datastore: Datastore) -> Memories:
        look(request, stm_datastore)
        return memories_on(stm_datastore)
