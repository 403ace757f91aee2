"""The DynamoDB driver keeps the contract, on the engine that Amazon gives away for tests."""

import functools
import time
from dataclasses import replace
from typing import ClassVar
from urllib.parse import urlsplit

import boto3
import pytest
from aiobotocore.session import get_session

from stm_backends.drivers.contract import Record
from stm_backends.testing import (
    Bench,
    Datastore,
    DriverContract,
    FakeClock,
    GraphContract,
    HandedIn,
    PodsContract,
    StoreContract,
    graphs_on,
    memories_on,
    open_at,
    stores_on,
)
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.items import Sizes, partition_of
from tests.support.contract import deadline_of, reached, slow_checks
from tests.support.dynamodb import open_with

SMALL = {"max_entry_bytes": 50_000}

USUAL = Sizes(record=1024 * 1024)
"""As users have it, but that a record is full sooner."""

TINY = Sizes(large=2, loose=64, part=100_000, places=6, run=17, crowd=8, record=400_000)
"""So small that the shortest histories have everything that becomes of long ones."""


@pytest.mark.full
class TestDynamoDriver(DriverContract):
    sizes: ClassVar = USUAL
    histories: ClassVar = 6

    @pytest.fixture
    def datastore(self, request, place, behind, proxy):
        # From today on, because DynamoDB's own reaper uses the real time.
        clock, client = FakeClock(time.time()), place.client()
        parts = urlsplit(place.endpoint_url)

        def at(key):
            return {"TableName": place.table, "Key": {"pk": {"S": key.scope}, "sk": {"S": key.name}}}

        async def damage(key):
            client.update_item(**at(key), UpdateExpression="REMOVE tail[0]")

        def parts_of(key):
            found = client.query(
                TableName=place.table,
                ConsistentRead=True,
                KeyConditionExpression="pk = :pk",
                ExpressionAttributeValues={":pk": partition_of(key)},
            )
            return found["Items"]

        async def cut(key):
            tail = client.get_item(**at(key), ConsistentRead=True)["Item"]["tail"]["L"]
            (name, *_) = next(each["S"] for each in reversed(tail) if "S" in each).split(":")
            (part,) = (each for each in parts_of(key) if each["sk"]["S"] == name)
            client.put_item(TableName=place.table, Item={**part, "values": {"L": part["values"]["L"][:-1]}})

        async def stored(key):
            head = client.get_item(**at(key), ConsistentRead=True).get("Item")
            return [*([head] if head else ()), *parts_of(key)]

        async def peek(key):
            item = client.get_item(**at(key), ConsistentRead=True).get("Item")
            return item and Record(
                item["version"]["S"], item["body"].get("B"), tuple(entry["B"] for entry in item["tail"]["L"])
            )

        async def handed_in():
            entered = get_session().create_client("dynamodb", **place.aws)
            theirs = await entered.__aenter__()

            async def is_open():
                return "Table" in await theirs.describe_table(TableName=place.table)

            async def close():
                await entered.__aexit__(None, None, None)

            driver = DynamoDriver(DynamoSettings(table=place.table), client=theirs)
            return HandedIn(driver=driver, is_open=is_open, close=close)

        yield Datastore(
            open=functools.partial(
                open_with,
                behind.url,
                self.sizes,
                clock=clock,
                deadline_s=deadline_of(request),
                **SMALL,
                **place.credentials,
            ),
            pass_time=clock.pass_time,
            tick=60.0,
            histories=self.histories,
            damage=damage,
            cut=cut,
            stored=stored,
            peek=peek if self.sizes is USUAL else None,
            **reached(
                (parts.hostname, parts.port),
                lambda port: replace(place, endpoint_url=f"http://127.0.0.1:{port}").url,
                functools.partial(open_with, sizes=self.sizes, clock=clock, **SMALL, **place.credentials),
            ),
            outage=proxy.cut,
            handed_in=handed_in,
            server=place.version,
        )
        client.close()


@pytest.mark.full
class TestDynamoDriverInTinyParts(TestDynamoDriver):
    """Nearly everything is stored in parts, or moves there."""

    opted_out: ClassVar = slow_checks(
        "asked of the same driver above",
        kept=[
            "test_the_largest_body_fits_and_one_byte_more_is_too_large",
            "test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room",
            "test_a_load_is_a_snapshot_while_another_process_appends_and_folds",
            "test_any_history_with_expiry_matches_the_model",
        ],
    )
    sizes = TINY
    histories = 25


@pytest.mark.full
class TestDynamoDriverAsUsersHaveIt(DriverContract):
    """The real clock and the default settings, with time for an emulator that reads 16 MiB in seconds."""

    opted_out: ClassVar = slow_checks(
        "asked of the same driver above, with a clock that waits",
        kept=[
            "test_an_append_resets_the_time_to_live",
            "test_an_expired_record_is_absent_in_delete",
            "test_the_lease_of_a_killed_process_is_free_once_expired_and_not_before",
        ],
    )

    @pytest.fixture
    def datastore(self, request, place):
        url = f"{place.url}&deadline_s={deadline_of(request)}"
        return Datastore(
            open=functools.partial(open_at, url, **place.credentials),
            tick=1.0,
            histories=3,
            server=place.version,
        )


async def open_on_boto3(table, **aws):
    """Return a driver on a client of boto3, whose calls block and are made in threads."""
    driver = DynamoDriver(DynamoSettings(table=table), client=boto3.client("dynamodb", **aws))
    await driver.open()
    return driver


@pytest.mark.full
@pytest.mark.parametrize(
    "check",
    [
        "test_bytes_are_returned_unchanged",
        "test_folds_never_lose_an_append_and_loads_never_see_half_a_fold",
        "test_a_cancelled_append_is_applied_completely_or_not_at_all",
        "test_closing_ends_each_running_operation_with_a_result_or_an_error",
        "test_any_history_without_expiry_matches_the_model",
    ],
)
def test_on_a_client_of_boto3_the_contract_is_kept_too(place, check):
    """Not the whole suite: only what may come out otherwise where calls block in threads."""
    opening = functools.partial(open_on_boto3, place.table, **place.aws)
    getattr(DriverContract(), check)(Bench(Datastore(open=opening, histories=5)))


@pytest.mark.full
class TestPodsOnDynamo(PodsContract):
    @pytest.fixture
    def memories(self, request, place, behind, proxy):
        deadline_s = deadline_of(request)
        url = f"{behind.url}&deadline_s={deadline_s}"
        datastore = Datastore(open=functools.partial(open_at, url, **place.credentials), outage=proxy.cut)
        return memories_on(datastore, deadline_s=deadline_s)


@pytest.mark.full
class TestStoresOnDynamo(StoreContract):
    @pytest.fixture
    def stores(self, place):
        return stores_on(Datastore(open=functools.partial(open_at, place.url, **place.credentials)))


@pytest.mark.full
class TestGraphsOnDynamo(GraphContract):
    @pytest.fixture
    def graphs(self, place):
        return graphs_on(Datastore(open=functools.partial(open_at, place.url, **place.credentials)))
