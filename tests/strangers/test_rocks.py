"""A driver on a log-structured merge tree, written from the page for authors, keeps the contract."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from stm_backends.drivers import Key, Record
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


async def test_a_close_that_is_cancelled_is_done_nevertheless(tmp_path):
    one, key, busy = await open_rocks(f"rocks:///{tmp_path}"), Key("s", "a"), threading.Event()
    await one.append(key, b"a", initial_version="v", ttl=None)
    opened = Opened.shared[tmp_path]
    opened.thread.submit(busy.wait, 30)
    closing = asyncio.create_task(one.close())
    await asyncio.sleep(0)
    assert not closing.done(), "it must not block the event loop until its thread is free"
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    two = await open_rocks(f"rocks:///{tmp_path}")
    busy.set()
    assert (await two.load(key)).tail == (b"a",)
    assert opened.users == 1
    await two.close()
    assert not Opened.shared
