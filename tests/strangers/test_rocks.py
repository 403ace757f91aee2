"""A driver on a log-structured merge tree, written from the page for authors, keeps the contract."""

from __future__ import annotations

import functools

import pytest

from stm_backends.drivers import Record
from stm_backends.testing import Datastore, DriverContract

pytest.importorskip("rocksdict", reason="the dependency group `strangers` brings it")
from tests.strangers.rocks import Head, Opened, open_rocks, place


@pytest.mark.full
class TestRocksDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        async def damage(key):
            db = Opened.shared[tmp_path].db
            db.put(place(key), db.get(place(key))[:-1])

        async def peek(key):
            opened = Opened.shared[tmp_path]
            head = Head.read(opened.db.get(place(key)), 0.0)
            if head is None:
                return None
            body, tail = opened.parts(place(key), head)
            return Record(head.version, body, tuple(tail))

        return Datastore(
            open=functools.partial(open_rocks, f"rocks:///{tmp_path}"),
            damage=damage,
            peek=peek,
            server="RocksDB",
        )
