"""Expired items that DynamoDB has not removed yet can be erased; a table without time to live is noticed."""

from __future__ import annotations

import functools
import uuid
from dataclasses import replace

import pytest

from stm_backends.drivers.contract import ANY, Key
from stm_backends.testing import FakeClock
from stm_backends_dynamo.statements import CREATE_TABLE
from tests.services.dynamo import support
from tests.services.dynamo.support import items_of, noted

opened = functools.partial(support.opened, deadline_s=60)
"""No test here is about the deadline, which a busy machine may reach."""


@pytest.fixture
def client(place):
    client = place.client()
    yield client
    client.close()


@pytest.mark.parametrize("size", [10, 20_000], ids=["whole", "with parts"])
async def test_an_expired_record_is_listed_as_such_and_deleted(place, client, size):
    clock, key = FakeClock(), Key(f"acme:{uuid.uuid4().hex}:memory", "chat")
    async with opened(place, clock=clock) as driver:
        for _ in range(3):
            await driver.append(key, b"x" * size, initial_version="v", ttl=60)
        assert (await driver.scan_expired(key.scope, limit=10)).names == ()
        await clock.pass_time(61)
        assert await driver.load(key) is None
        assert (await driver.scan(key.scope, limit=10)).names == ()
        assert (await driver.scan_expired(key.scope, limit=10)).names == ("chat",)
        # It does not exist, so the answer is no; its items go all the same.
        assert await driver.delete(key) is False
        assert items_of(client, place, key) == (None, [])
        assert (await driver.scan_expired(key.scope, limit=10)).names == ()


async def test_a_record_created_meanwhile_is_not_deleted_as_expired(place, client):
    clock, key = FakeClock(), Key(f"acme:{uuid.uuid4().hex}:memory", "chat")
    async with opened(place, clock=clock) as driver:
        await driver.append(key, b"old", initial_version="v", ttl=60)
        await clock.pass_time(61)
        async with opened(place, clock=clock) as other:
            await other.replace(key, b"new", version="w", expect=ANY, ttl=None)
        assert (await driver.scan_expired(key.scope, limit=10)).names == ()
        assert await driver.delete(key, expect="v") is False
        assert items_of(client, place, key)[0] is not None
        assert await driver.delete(key) is True


@pytest.fixture
def bare_table(place, client):
    """A table without a time to live."""
    bare = replace(place, table=f"stm_test_{uuid.uuid4().hex}")
    client.create_table(TableName=bare.table, **CREATE_TABLE.arguments)
    yield bare
    client.delete_table(TableName=bare.table)


async def test_a_table_without_time_to_live_is_warned_of_once(bare_table, caplog):
    async with opened(bare_table) as driver:
        await driver.open()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no time to live on 'reap_at'" in caplog.text
    assert "stm-backends ping --create" in caplog.text
    caplog.clear()
    async with opened(bare_table, create=True), opened(bare_table):
        assert caplog.text == ""


async def test_a_role_that_may_not_look_at_the_time_to_live_opens_the_table(place, caplog):
    async with noted(place.endpoint_url) as requests:
        requests.script = [(400, "AccessDeniedException")]
        async with opened(replace(place, endpoint_url=requests.url)) as driver:
            assert requests.asked == ["DescribeTimeToLive"]
            assert await driver.load(Key("acme:u1:memory", "none")) is None
    assert caplog.text == ""
