"""What the driver does when the server, the network, a clock or a crowd is against it."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from dataclasses import replace

import pytest

from stm_backends.drivers.contract import ABSENT, Key, Page, Record, new_version
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    TooLarge,
)
from stm_backends.testing import FakeClock
from stm_backends.testing.workbench.drivers import names_in
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.items import item_of, key_of


@contextlib.asynccontextmanager
async def opened(place, *, clock=time.time, create=False, **settings):
    options = {"table": place.table, "region": place.region, "endpoint_url": place.endpoint_url}
    driver = DynamoDriver(
        DynamoSettings(**{**options, **place.credentials, **settings}), create=create, clock=clock
    )
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture
def key():
    return Key(f"acme:{uuid.uuid4().hex}:memory", "chat")


# the network ---------------------------------------------------------------------------------------------


# the server ----------------------------------------------------------------------------------------------


# clocks --------------------------------------------------------------------------------------------------


async def test_hosts_half_a_second_apart_agree_for_half_a_second_about_the_shortest_time_to_live(place, key):
    now = time.time()
    slow, fast = FakeClock(now), FakeClock(now + 0.5)
    async with opened(place, clock=slow) as one, opened(place, clock=fast) as two:
        ttl = one.traits.min_ttl
        assert one.traits.clock == "client"
        for holder, other in ((one, two), (two, one)):
            assert await holder.replace(key, b"", version="v1", expect=ABSENT, ttl=ttl) is True
            for clock in (slow, fast):
                clock.now += 0.49
            assert await other.replace(key, b"", version="v2", expect=ABSENT, ttl=ttl) is False
            for clock in (slow, fast):
                clock.now += ttl + 0.02
            assert await other.replace(key, b"", version="v3", expect=ABSENT, ttl=ttl) is True
            await other.delete(key)


async def test_dynamodbs_own_reaper_never_comes_before_the_end(place, key):
    clock = FakeClock(1_900_000_000.25)
    async with opened(place, clock=clock) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=0.5)
        client = place.client()
        item = client.get_item(TableName=place.table, Key={"pk": {"S": key.scope}, "sk": {"S": key.name}})[
            "Item"
        ]
        client.close()
        assert item["expires"] == {"N": "1900000000.75"}
        assert item["reap_at"] == {"N": "1900000001"}


# listings ------------------------------------------------------------------------------------------------


async def test_a_page_of_expired_names_is_empty_and_not_the_last(place, key):
    clock = FakeClock(time.time())
    async with opened(place, clock=clock) as driver:
        for number in range(4):
            await driver.append(Key(key.scope, f"{number}"), b"a", initial_version="v", ttl=60)
        await driver.append(Key(key.scope, "9"), b"a", initial_version="v", ttl=None)
        clock.now += 61
        assert await driver.scan(key.scope, limit=2) == Page((), "1")
        assert await driver.scan(key.scope, after="1", limit=2) == Page((), "3")
        assert await names_in(driver, key.scope, limit=2) == ["9"]


async def test_a_listing_goes_on_after_the_megabyte_that_a_page_ends_at(place, key):
    client = place.client()
    async with opened(place) as driver:
        names = [f"{number}" for number in range(5)]
        for name in names:
            # As earlier versions stored it; what is large stands beside the item that is listed now.
            item = item_of("v", None, [b"x" * 300_000], ttl=None, now=0.0)
            client.put_item(TableName=place.table, Item={**key_of(Key(key.scope, name)), **item})
        page = await driver.scan(key.scope, limit=100)
        assert 0 < len(page.names) < 5
        assert page.after == page.names[-1]
        assert await names_in(driver, key.scope) == names
        for name in names:
            await driver.delete(Key(key.scope, name))
    client.close()


# limits --------------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_the_largest_record_under_the_longest_key_fits(place):
    key = Key("s" * 1000, "\u00e9" * 500)
    async with opened(place, deadline_s=30.0) as driver:
        largest = b"x" * driver.traits.max_entry
        count = driver.traits.max_record // len(largest)
        for number in range(count):
            assert await driver.append(key, largest, initial_version=new_version(), ttl=60) == number + 1
        with pytest.raises(TooLarge):
            await driver.append(key, largest, initial_version=new_version(), ttl=60)
        assert (await driver.load(key)).tail == (largest,) * count
        assert await driver.delete(key) is True


@pytest.mark.full
async def test_the_largest_drop_fits_into_one_expression_and_a_larger_one_is_refused(place, key):
    async with opened(place) as driver:
        most = driver.traits.max_drop
        for number in range(most + 2):
            await driver.append(key, b"%d" % number, initial_version="v1", ttl=None)
        with pytest.raises(ValueError, match="drops at most 250"):
            await driver.replace(key, b"", version="v2", expect="v1", drop=most + 1, ttl=None)
        fold = functools.partial(driver.replace, key, b"", expect="v1", drop=most)
        assert await fold(version="v2", ttl=60) is True
        assert await driver.load(key) == Record("v2", b"", (b"250", b"251"))
        await driver.delete(key)


@pytest.mark.parametrize(
    "damage",
    [
        "REMOVE tail[0]",
        "REMOVE tail",
        "REMOVE body",
        "REMOVE version",
        "REMOVE entries",
        "SET tail = :text",
        "SET body = :text",
        "SET expires = :text",
    ],
)
async def test_whatever_is_missing_or_of_another_type_is_corrupt(place, key, damage):
    client = place.client()
    async with opened(place) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=60)
        client.update_item(
            TableName=place.table,
            Key={"pk": {"S": key.scope}, "sk": {"S": key.name}},
            UpdateExpression=damage,
            **({"ExpressionAttributeValues": {":text": {"S": "else"}}} if ":text" in damage else {}),
        )
        with pytest.raises(Corrupt, match=r"dynamo\.load: the record is not whole"):
            await driver.load(key)
    client.close()


# crowds --------------------------------------------------------------------------------------------------


@pytest.fixture
def new_table(place):
    new = replace(place, table=f"stm_test_{uuid.uuid4().hex}")
    yield new
    client = place.client()
    with contextlib.suppress(client.exceptions.ResourceNotFoundException):
        client.delete_table(TableName=new.table)
    client.close()


async def test_a_table_of_somebody_else_is_refused_and_left_as_it_is(new_table):
    client = new_table.client()
    client.create_table(
        TableName=new_table.table,
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    with pytest.raises(ConfigurationError, match="other keys"):
        async with opened(new_table, create=True):
            pass
    found = client.describe_time_to_live(TableName=new_table.table)["TimeToLiveDescription"]
    assert found["TimeToLiveStatus"] == "DISABLED"
    client.close()


async def test_a_time_to_live_on_another_attribute_is_refused_and_left_as_it_is(new_table):
    async with opened(new_table, create=True):
        pass
    client = new_table.client()
    for enabled, attribute in ((False, "reap_at"), (True, "theirs")):
        client.update_time_to_live(
            TableName=new_table.table,
            TimeToLiveSpecification={"Enabled": enabled, "AttributeName": attribute},
        )
    client.close()
    with pytest.raises(ConfigurationError, match="another attribute"):
        async with opened(new_table, create=True):
            pass


# by hand -------------------------------------------------------------------------------------------------
