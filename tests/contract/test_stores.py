"""Our stores of states keep the contract of every store, and so do the plain ones that other tests use."""

import functools
from typing import ClassVar

import pytest

from stm_backends.testing import Datastore, StoreContract, Stores, open_at
from stm_backends.testing.stores import stores_on
from stm_backends.testing.workbench.faulty import faulty_datastore
from tests.support.stores import ConditionalStore, PlainStore


class TestStateStoreInProcess(StoreContract):
    @pytest.fixture
    def stores(self):
        return stores_on(faulty_datastore())


class TestStateStoreOnAFile(StoreContract):
    @pytest.fixture
    def stores(self, tmp_path):
        return stores_on(Datastore(open=functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db")))


@pytest.mark.parametrize("kind", [PlainStore, ConditionalStore])
class TestPlainStores(StoreContract):
    opted_out: ClassVar = {
        "test_a_state_that_is_not_json_is_refused_whole_or_comes_back_equal": (
            "json.dumps writes integer keys as text, and these are as simple as the stores that people have"
        )
    }

    @pytest.fixture
    def stores(self, kind):
        store = kind()

        async def open_one():
            return store

        return Stores(open=open_one)
