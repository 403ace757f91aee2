"""The driver keeps the contract of stm-backends."""

import functools
from pathlib import Path

import lmdb
import pytest
from stm_backends_lmdb.driver import Environment, find, place

from stm_backends.testing import Datastore, DriverContract, open_at


class TestLmdbDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path: Path) -> Datastore:
        def environment() -> lmdb.Environment:
            return Environment.shared[tmp_path].lmdb

        async def damage(key):
            with environment().begin(write=True) as txn:
                txn.put(place(*key), txn.get(place(*key))[:-1])

        async def stored(key):
            with environment().begin() as txn:
                return [data for data in [txn.get(place(*key))] if data is not None]

        async def peek(key):
            with environment().begin() as txn:
                return find(txn, key, 0.0)[0]

        return Datastore(
            open=functools.partial(open_at, f"lmdb:///{tmp_path}", create=True),
            damage=damage,
            stored=stored,
            peek=peek,
            server="LMDB " + ".".join(map(str, lmdb.version())),
        )
