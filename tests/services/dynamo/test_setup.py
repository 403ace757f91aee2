"""How a table is created, and which tables are refused."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import replace

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from tests.services.dynamo.support import opened, opened_on
from tests.support.dynamodb import PRETENDED


@pytest.fixture
def new_table(place):
    new = replace(place, table=f"stm_test_{uuid.uuid4().hex}")
    yield new
    client = place.client()
    with contextlib.suppress(client.exceptions.ResourceNotFoundException):
        client.delete_table(TableName=new.table)
    client.close()


async def test_a_table_of_another_program_is_refused_and_left_alone(new_table):
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


async def test_a_time_to_live_on_another_attribute_is_refused(new_table):
    async with opened(new_table, create=True):
        pass
    client = new_table.client()
    described = client.describe_time_to_live(TableName=new_table.table)["TimeToLiveDescription"]
    assert described == {"TimeToLiveStatus": "ENABLED", "AttributeName": "reap_at"}
    for enabled, attribute in ((False, "reap_at"), (True, "theirs")):
        client.update_time_to_live(
            TableName=new_table.table,
            TimeToLiveSpecification={"Enabled": enabled, "AttributeName": attribute},
        )
    client.close()
    with pytest.raises(ConfigurationError, match="another attribute"):
        async with opened(new_table, create=True):
            pass


async def test_a_table_that_another_process_creates_is_waited_for(old):
    async with opened_on(old):
        driver = DynamoDriver(
            DynamoSettings(endpoint_url=old.url, table="stm_requests", region="eu-west-1", **PRETENDED),
            create=True,
        )
        unknown = (400, "ResourceNotFoundException")
        old.script = [unknown, (400, "ResourceInUseException"), unknown, unknown]
        start = time.monotonic()
        await driver.open()
        assert time.monotonic() - start > 0.9
        assert old.asked[:5] == ["DescribeTable", "CreateTable", *["DescribeTable"] * 3]
        await driver.close()
