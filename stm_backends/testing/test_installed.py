"""What `pytest --stm-backend=NAME --pyargs stm_backends.testing` runs: no code has to be written."""

from __future__ import annotations

import pytest

from stm_backends.testing import (
    Datastore,
    DriverContract,
    Memories,
    PodsContract,
    StoreContract,
    Stores,
    memories_on,
    stores_on,
)


class TestDriver(DriverContract):
    """The driver of the backend that the options name."""

    profile = "driver"

    @pytest.fixture
    def datastore(self, stm_datastore: Datastore) -> Datastore:
        return stm_datastore


class TestStore(StoreContract):
    """The store of states that this library builds on that driver."""

    profile = "store"

    @pytest.fixture
    def stores(self, stm_datastore: Datastore) -> Stores:
        return stores_on(stm_datastore)


class TestMemory(PodsContract):
    """The distributed memory that this library builds on that driver."""

    profile = "memory"

    @pytest.fixture
    def memories(self, stm_datastore: Datastore) -> Memories:
        return memories_on(stm_datastore)
