"""Loads at once share a request for the heads: each caller gets its own record, or its own error."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from aiobotocore.session import get_session
from botocore.exceptions import ClientError

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing import FakeClock
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.client import make_client
from stm_backends_dynamo.items import Sizes
from stm_backends_dynamo.statements import MAX_HEADS
from tests.mutants.dynamo import AnswersInTheOrderAsked, AppendsTwice, UnreadIsAbsent
from tests.services.dynamo.support import DROPPED, opened_on
from tests.support.dynamodb import PRETENDED

TABLE = "stm_requests"
COUNT = 12


@pytest.fixture
def keys(key):
    """Keys of the test's own."""
    return [Key(key.scope, f"chat {n}") for n in range(COUNT)]


@contextlib.asynccontextmanager
async def hooked(requests, **hooks):
    """Yield a client of aiobotocore whose events call the hooks. The table must exist."""
    keys = {f"aws_{name}": value for name, value in PRETENDED.items()}
    place = {"region_name": "eu-west-1", "endpoint_url": requests.url}
    async with (
        opened_on(requests),
        get_session().create_client("dynamodb", **place, **keys) as client,
    ):
        for event, hook in hooks.items():
            client.meta.events.register(f"{event.replace('_', '-')}.dynamodb", hook)
        yield client


def driver_on(client, kind=DynamoDriver, **options):
    return kind(DynamoSettings(table=TABLE, deadline_s=60.0), client=client, **options)


async def write(driver, keys):
    for n, key in enumerate(keys):
        await driver.append(key, b"%d" % n, initial_version=f"v{n}", ttl=None)


async def load_all(driver, keys, **how):
    return await asyncio.gather(*(driver.load(key) for key in keys), **how)


def written(count):
    return [Record(f"v{n}", None, (b"%d" % n,)) for n in range(count)]


async def loads_share(requests, keys, kind=DynamoDriver):
    """Load records of which some are absent, some have expired, and one has a part."""
    clock = FakeClock(time.time())
    async with hooked(requests) as client:
        driver = driver_on(client, kind, clock=clock)
        await write(driver, keys[:8])
        await driver.append(keys[8], b"late", initial_version="v", ttl=5)
        await driver.append(keys[9], b"x" * 3_000, initial_version="v9", ttl=None)
        clock.now += 6
        requests.asked.clear()
        # This process does not know the part.
        records = await load_all(driver_on(client, kind, clock=clock), keys)
    assert records == [*written(8), None, Record("v9", None, (b"x" * 3_000,)), None, None]
    assert requests.asked[:3] == ["GetItem", "BatchGetItem", "Query"]


async def test_loads_at_once_share_a_request_and_get_their_own_records(old, keys):
    await loads_share(old, keys)


async def test_more_loads_than_one_request_takes_are_divided(old, key):
    keys = [Key(key.scope, f"chat {n}") for n in range(2 * MAX_HEADS + 2)]
    async with opened_on(old, pool_size=len(keys)) as driver:
        await write(driver, keys[:3])
        old.asked.clear()
        records = await load_all(driver, keys)
        assert records == [*written(3), *[None] * (len(keys) - 3)]
        assert old.asked == ["GetItem", "BatchGetItem", "BatchGetItem", "GetItem"]


async def unread_keys_are_read(requests, keys, kind=DynamoDriver):
    """The server answers for some keys alone, and in another order."""

    def leave_out(parsed, model, **_):
        if model.name == "BatchGetItem":
            heads = parsed["Responses"][TABLE]
            left = [{name: head[name] for name in ("pk", "sk")} for head in heads[::2]]
            parsed["Responses"][TABLE] = heads[1::2][::-1]
            parsed["UnprocessedKeys"] = {TABLE: {"Keys": left, "ConsistentRead": True}}

    async with hooked(requests, after_call=leave_out) as client:
        driver = driver_on(client, kind)
        await write(driver, keys)
        requests.asked.clear()
        records = await load_all(driver, keys)
    assert records == written(COUNT)
    assert requests.asked[:8] == ["GetItem", "BatchGetItem", *["GetItem"] * 6]


async def test_keys_that_the_server_left_out_are_read_alone(old, keys):
    await unread_keys_are_read(old, keys)


async def appends_are_sent_once(requests, keys, kind=DynamoDriver):
    async with hooked(requests) as client:
        driver = driver_on(client, kind)
        await write(driver, keys)
        requests.asked.clear()
        lengths = await asyncio.gather(
            *(driver.append(key, b"%d" % n, initial_version="v", ttl=None) for key in keys for n in range(3))
        )
        assert requests.asked == ["UpdateItem"] * 3 * COUNT
        assert sorted(lengths) == sorted([2, 3, 4] * COUNT)
        records = await load_all(driver, keys)
    assert [sorted(record.tail[1:]) for record in records] == [[b"0", b"1", b"2"]] * COUNT


async def test_appends_and_loads_at_once_are_each_sent_once(old, keys):
    await appends_are_sent_once(old, keys)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (AnswersInTheOrderAsked, loads_share),
        (UnreadIsAbsent, unread_keys_are_read),
        (AppendsTwice, appends_are_sent_once),
    ],
)
async def test_each_mutant_is_killed_by_its_test(mutant, check, old, keys):
    with pytest.raises(AssertionError):
        await check(old, keys, mutant)


async def test_loads_that_share_cost_the_read_units_of_single_ones(old, keys):
    units = []

    def ask(params, model, **_):
        if model.name in ("GetItem", "BatchGetItem"):
            params["ReturnConsumedCapacity"] = "TOTAL"

    def note(parsed, **_):
        consumed = parsed.get("ConsumedCapacity", [])
        units.extend(one["CapacityUnits"] for one in (consumed if isinstance(consumed, list) else [consumed]))

    async with hooked(old, provide_client_params=ask, after_call=note) as client:
        driver = driver_on(client, sizes=Sizes(loose=100_000))
        await write(driver, keys)
        for n, key in enumerate(keys):
            for _ in range(n):
                await driver.append(key, b"x" * 900, initial_version="v", ttl=None)
        units.clear()
        alone = [await driver.load(key) for key in keys]
        cost = sum(units)
        units.clear()
        assert await load_all(driver, keys) == alone
    assert len(units) == 2
    assert sum(units) == cost > COUNT


@pytest.mark.parametrize(
    "code", ["AccessDeniedException", "ProvisionedThroughputExceededException", "ThrottlingException"]
)
async def test_a_request_for_many_that_is_refused_becomes_one_for_each(old, keys, code):
    """A throttled caller waits alone. A role may lack the permission for this request only."""

    async def refuse():
        old.script = [(400, code)]

    async with opened_on(old) as driver:
        await write(driver, keys)
        old.asked.clear()
        old.meanwhile = {"BatchGetItem": refuse}
        assert await load_all(driver, keys) == written(COUNT)
        assert old.asked == ["GetItem", "BatchGetItem", *["GetItem"] * (COUNT - 1)]
        old.asked.clear()
        assert await load_all(driver, keys) == written(COUNT)
        assert ("BatchGetItem" in old.asked) is (code != "AccessDeniedException")


@pytest.mark.parametrize(("status", "code"), [(500, "InternalServerError"), (500, DROPPED)])
async def test_a_request_for_many_that_failed_is_retried(old, keys, status, code):
    async def fail():
        old.script = [(status, code)]

    async with opened_on(old) as driver:
        await write(driver, keys)
        old.asked.clear()
        old.meanwhile = {"BatchGetItem": fail}
        assert await load_all(driver, keys) == written(COUNT)
        assert old.asked.count("BatchGetItem") >= 2


async def test_a_damaged_record_fails_its_own_load_and_no_other(old, keys):
    async with hooked(old) as client:
        driver = driver_on(client)
        await write(driver, keys)
        key = {"pk": {"S": keys[4].scope}, "sk": {"S": keys[4].name}}
        await client.update_item(TableName=TABLE, Key=key, UpdateExpression="REMOVE tail[0]")
        records = await load_all(driver, keys, return_exceptions=True)
    assert isinstance(records[4], Corrupt)
    assert [*records[:4], *records[5:]] == [one for n, one in enumerate(written(COUNT)) if n != 4]


async def test_a_cancelled_load_ends_alone(old, keys):
    loads = []

    async def cancel_some():
        for load in loads[1::2]:
            load.cancel()

    async with opened_on(old) as driver:
        await write(driver, keys)
        old.meanwhile = {"BatchGetItem": cancel_some}
        loads += [asyncio.ensure_future(driver.load(key)) for key in keys]
        answers = await asyncio.gather(*loads, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[1::2])
        assert answers[::2] == written(COUNT)[::2]


async def test_closing_waits_for_loads_that_share_a_request(old, keys):
    closing = []

    async with opened_on(old) as driver:
        await write(driver, keys)

        async def close():
            closing.append(asyncio.ensure_future(driver.close()))

        old.meanwhile = {"GetItem": close}
        assert await load_all(driver, keys) == written(COUNT)
        await closing[0]
        with pytest.raises(Unavailable, match="not open"):
            await driver.load(keys[0])
        await driver.open()


async def test_our_client_names_the_library_and_leaves_checks_to_the_server(old):
    agents = []
    settings = DynamoSettings(region="eu-west-1", endpoint_url=old.url, **PRETENDED)
    async with opened_on(old), make_client(settings) as client:
        client.meta.events.register(
            "before-send.dynamodb", lambda request, **_: agents.append(request.headers["User-Agent"])
        )
        with pytest.raises(ClientError, match="ValidationException"):
            await client.get_item(TableName=TABLE)  # botocore would have refused this itself
    assert [agent.decode().split("/")[0] for agent in agents] == ["stm-backends aiobotocore"]
