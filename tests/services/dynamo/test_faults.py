"""What the driver does when the server, the network, a clock or a crowd is against it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from dataclasses import replace

import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Key, Page, Record, new_version
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    Unavailable,
)
from stm_backends.testing import FakeClock, open_at
from stm_backends.testing.workbench.drivers import names_in
from stm_backends.testing.workbench.processes import Task, Worker, ledger
from stm_backends_dynamo import DynamoDriver, DynamoSettings, DynamoShortTermMemory, DynamoStateStore
from stm_backends_dynamo.items import item_of, key_of
from tests.support.dynamodb import Local
from tests.support.servers import free_port


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


async def test_where_nobody_listens_nothing_was_done(place, key):
    async with opened(replace(place, endpoint_url=f"http://127.0.0.1:{free_port()}")) as driver:
        for operation in (
            lambda: driver.load(key),
            lambda: driver.append(key, b"a", initial_version="v", ttl=None),
            lambda: driver.replace(key, b"a", version="v", expect=ANY, ttl=None),
            lambda: driver.delete(key),
        ):
            with pytest.raises(Unavailable, match="no connection could be made"):
                await operation()


async def test_an_answer_that_is_lost_leaves_a_write_unknown_and_sending_it_again_is_harmless(
    behind, proxy, key
):
    async with opened(behind, deadline_s=1.0) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        proxy.silence("to client")
        fold = functools.partial(driver.replace, key, b"body", version="v2", expect="v1", drop=1, ttl=KEEP)
        with pytest.raises(OutcomeUnknown):
            await fold()
        with pytest.raises(OutcomeUnknown):
            await driver.append(key, b"b", initial_version="v", ttl=None)
        with pytest.raises(Unavailable):
            await driver.load(key)
        proxy.restore()
        assert await driver.load(key) == Record("v2", b"body", (b"b",)), "both were done"
        assert await fold() is True
        assert await driver.load(key) == Record("v2", b"body", (b"b",))


async def test_a_connection_that_breaks_in_the_middle_leaves_a_write_unknown(behind, proxy, key):
    async with opened(behind) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        proxy.silence("to client")
        append = asyncio.ensure_future(driver.append(key, b"b", initial_version="v", ttl=None))
        await asyncio.sleep(0.3)
        proxy.cut()
        with pytest.raises(OutcomeUnknown, match="the connection was lost"):
            await append
        proxy.restore()
        assert await driver.load(key) == Record("v1", None, (b"a", b"b"))


async def test_cancelling_many_in_the_middle_leaves_the_pool_usable(behind, proxy, key):
    async with opened(behind, pool_size=4) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        for _ in range(3):
            proxy.silence("to client")
            loads = [asyncio.ensure_future(driver.load(key)) for _ in range(12)]
            await asyncio.sleep(0.1)
            for load in loads:
                load.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError)
                for one in await asyncio.gather(*loads, return_exceptions=True)
            )
            proxy.restore()
            records = await asyncio.gather(*(driver.load(key) for _ in range(12)))
            assert records == [Record("v1", None, (b"a",))] * 12


# the server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(dynamodb_jar, tmp_path):
    server = Local(dynamodb_jar, tmp_path, on_disk=True)
    server.start()
    yield server
    server.stop()


async def test_a_server_that_hangs_is_waited_for_no_longer_than_the_deadline(server, key):
    async with opened(server.place, create=True):
        pass
    async with opened(server.place, deadline_s=2.5) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        server.pause()
        try:
            for operation, kind in (
                (driver.load(key), Unavailable),
                (driver.append(key, b"b", initial_version="v", ttl=None), OutcomeUnknown),
            ):
                start = time.monotonic()
                with pytest.raises(kind):
                    await operation
                assert time.monotonic() - start < 6
        finally:
            server.go_on()
        assert (await driver.load(key)).tail[0] == b"a"


async def test_what_was_acknowledged_is_there_after_the_server_was_killed_and_started_again(server, key):
    """On disk, as far as this engine is; DynamoDB itself keeps several copies."""
    async with opened(server.place, create=True) as driver:
        acknowledged: list[str] = []
        enough = asyncio.Event()

        async def write():
            for number in range(1_000_000):
                await driver.append(key, f"w:{number}".encode(), initial_version=new_version(), ttl=None)
                acknowledged.append(f"w:{number}")
                if number == 30:
                    enough.set()

        writing = asyncio.ensure_future(write())
        await enough.wait()
        server.kill()
        with pytest.raises(StorageError):
            await writing
        server.start()
        entries = await ledger(driver, key)
        assert entries[: len(acknowledged)] == acknowledged
        # One more may have been done whose answer the server did not live to give.
        assert len(entries) - len(acknowledged) in (0, 1)
        assert await driver.append(key, b"after", initial_version="v", ttl=None) == len(entries) + 1


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
        with pytest.raises(Corrupt, match=r"dynamo\.load: the record is incomplete"):
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


async def test_ten_processes_may_create_the_table_at_once(new_table, key):
    opening = functools.partial(open_at, new_table.url, create=True, **new_table.credentials)
    workers = [await Worker.start(Task(open=opening, key=key, label=f"w{n}", count=1)) for n in range(10)]
    await asyncio.gather(*(worker.finish() for worker in workers))
    async with opened(new_table) as driver:
        assert sorted(await ledger(driver, key)) == sorted(f"w{n}:0" for n in range(10))
    client = new_table.client()
    described = client.describe_time_to_live(TableName=new_table.table)["TimeToLiveDescription"]
    assert described == {"TimeToLiveStatus": "ENABLED", "AttributeName": "reap_at"}
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


async def test_memory_and_store_work_on_a_client_of_ones_own(place):
    client, user = place.client(), uuid.uuid4().hex
    key, config = MemoryKey("acme", user, "chat"), ShortTermMemoryConfig(strategy="truncation")
    memory = DynamoShortTermMemory(client, config, key=key, table=place.table)
    await memory.add_turn(ConversationTurn("Are you there?", "I am."))
    other = DynamoShortTermMemory(client, config, key=key, table=place.table)
    assert [turn.user_message for turn in await other.turns()] == ["Are you there?"]
    store = DynamoStateStore(client, table=place.table)
    await store.save_memory_state(key.composite(), {"n": 1})
    assert await store.load_memory_state(key.composite()) == {"n": 1}
    for one in (memory, other):
        await one.close()
    client.describe_table(TableName=place.table)
    client.close()
