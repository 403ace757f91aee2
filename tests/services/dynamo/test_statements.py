"""How many requests an operation takes, and which are retried."""

from __future__ import annotations

import asyncio
import functools
import time

import boto3
import pytest

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Record
from stm_backends.errors import OutcomeUnknown, TooLarge, Unavailable
from stm_backends.testing import Bench, Datastore, DriverContract, FakeClock
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.items import Sizes
from tests.services.dynamo.support import DROPPED, KEY, Requests, noted, opened_on
from tests.support.dynamodb import PRETENDED


async def fail_next(requests: Requests, status: int, code: str) -> None:
    """Let the request that is being asked fail."""
    requests.script = [(status, code)]


def client_of_boto3(url):
    """A client of the caller, which retries as boto3 does by default."""
    keys = {f"aws_{name}": value for name, value in PRETENDED.items()}
    return boto3.client("dynamodb", region_name="eu-west-1", endpoint_url=url, **keys)


# how many ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_operation_is_one_request_to_a_server_of_today(moto):
    client = client_of_boto3(moto)
    counted = []
    client.meta.events.register("before-send.dynamodb", lambda **_: counted.append(1))

    async def open_counted():
        driver = DynamoDriver(DynamoSettings(table="stm_counted"), client=client, create=True)
        await driver.open()
        return driver

    datastore = Datastore(open=open_counted, round_trips=lambda: len(counted))
    DriverContract().test_one_operation_is_one_round_trip(Bench(datastore))
    assert counted
    client.close()


@pytest.mark.parametrize(("server", "lost"), [pytest.param("moto", 1, marks=pytest.mark.full), ("local", 2)])
def test_only_a_first_append_and_on_old_servers_a_lost_race_take_two(server, lost, request):
    asyncio.run(count_all(request.getfixturevalue(server), lost))


async def count_all(url, lost):
    clock = FakeClock(time.time())
    async with noted(url) as requests, opened_on(requests, clock=clock) as driver:

        async def count(work):
            requests.asked.clear()
            await work
            return len(requests.asked)

        append = functools.partial(driver.append, KEY, b"a", initial_version="v1")
        replace = functools.partial(driver.replace, KEY, b"body")
        assert await count(driver.load(KEY)) == 1
        assert await count(append(ttl=60)) == 2
        assert await count(append(ttl=60)) == 1
        clock.now += 61
        assert await count(append(ttl=60)) == 2, "created in place of an expired record"
        assert await count(append(ttl=None)) == 1
        assert await count(replace(version="v2", expect="v1", drop=1, ttl=KEEP)) == 1
        assert await count(replace(version="v2", expect="v1", drop=1, ttl=KEEP)) == lost, "a retry"
        assert await count(replace(version="v3", expect="v1", drop=1, ttl=KEEP)) == lost
        assert await count(replace(version="v3", expect="v2", rewrite=(b"A",), ttl=KEEP)) == 1
        assert await count(replace(version="v3", expect="v2", rewrite=(b"A",), ttl=KEEP)) == lost, "a retry"
        assert await count(replace(version="v2", expect="v1", rewrite=(b"A",), ttl=KEEP)) == lost
        assert await count(replace(version="v3a", expect=ABSENT, ttl=60)) == lost
        assert await count(replace(version="v3a", expect=ANY, ttl=60)) == 1
        assert await count(replace(version="v3a", expect=ANY, ttl=60)) == lost, "a retry"
        assert await count(replace(version="v4", expect=ANY, ttl=KEEP)) == 1
        assert await count(driver.scan(KEY.scope, limit=10)) == 1
        assert await count(driver.delete(KEY, expect="v1")) == lost, "it is another version"
        assert await count(driver.delete(KEY)) == 1
        assert await count(driver.delete(KEY)) == 2, "there is none"
        assert await count(replace(version="v5", expect=ABSENT, ttl=60)) == 1
        await driver.delete(KEY)
        assert await count(replace(version="v6", expect=ANY, ttl=KEEP)) == 2


@pytest.mark.parametrize(("server", "met"), [pytest.param("moto", 0, marks=pytest.mark.full), ("local", 1)])
async def test_records_with_parts_take_the_requests_that_the_page_says(server, met, request):
    """`met` is the look at what refused a write, where the server does not say."""
    large, url = b"x" * 3_000, request.getfixturevalue(server)
    async with (
        noted(url) as requests,
        opened_on(requests) as driver,
        opened_on(requests) as other,
        opened_on(requests) as third,
    ):

        async def asked(work):
            requests.asked.clear()
            await work
            return requests.asked

        append = functools.partial(driver.append, KEY, initial_version="v1", ttl=None)
        look = ["GetItem"] * met
        put = ["PutItem", "UpdateItem"]
        assert await asked(append(large)) == ["GetItem", "TransactWriteItems"], "the first"
        assert await asked(append(large)) == ["GetItem", *put]
        assert await asked(append(b"small")) == ["UpdateItem"]
        assert await asked(driver.load(KEY)) == ["GetItem"], "it knows the parts that it put"
        assert await asked(third.load(KEY, last=1)) == ["GetItem"], "the newest is in the head"
        assert await asked(third.load(KEY, last=2)) == ["GetItem", "GetItem"], "and the other in one part"
        assert await asked(third.load(KEY, last=2)) == ["GetItem"], "it has read that"
        assert await asked(other.load(KEY)) == ["GetItem", "Query"]
        assert await asked(other.load(KEY)) == ["GetItem"], "it has read them"
        fold = driver.replace(KEY, b"", version="v2", expect="v1", drop=1, ttl=KEEP)
        assert await asked(fold) == ["GetItem", "UpdateItem", "BatchWriteItem"]
        fold = driver.replace(KEY, large, version="v3", expect="v2", ttl=KEEP)
        assert await asked(fold) == ["GetItem", *put]
        save = driver.replace(KEY, large, version="v4", expect=ANY, ttl=None)
        assert await asked(save) == ["GetItem", *put, "BatchWriteItem"]
        for entry in (large, large, b"small"):
            await append(entry)
        rewrite = {"rewrite": (large + b"!", large + b"?"), "ttl": KEEP}
        rewritten = driver.replace(KEY, b"", version="v5", expect="v4", **rewrite)
        assert await asked(rewritten) == ["GetItem", *put, "BatchWriteItem"], "both in one part"
        rewritten = driver.replace(KEY, b"", version="v6", expect="v5", rewrite=(b"A", large), ttl=KEEP)
        # One entry of the old part and all of the new one: the same number of places.
        assert await asked(rewritten) == ["GetItem", *put, "BatchWriteItem"]
        erased = await asked(driver.delete(KEY))
        ending = ["UpdateItem", "Query", "GetItem", "BatchWriteItem", "DeleteItem"]
        assert erased == ["DeleteItem", *look, *ending]
        # A record of small entries, until they are moved into a part.
        for number in range(4):
            one = ["UpdateItem"] if number else ["UpdateItem", "PutItem"]
            assert await asked(append(b"x" * 1_000)) == one
        assert await asked(append(b"x" * 1_100)) == ["UpdateItem", "GetItem", "TransactWriteItems", "GetItem"]
        assert await asked(append(large)) == ["GetItem", *put]


@pytest.mark.parametrize("small", [True, False])
async def test_a_full_record_says_so_before_anything_is_written(old, small):
    async with opened_on(old, sizes=Sizes(record=500_000)) as driver:
        for _ in range(2):
            await driver.append(KEY, b"x" * 249_500, initial_version="v1", ttl=None)
        old.asked.clear()
        with pytest.raises(TooLarge, match="the record would take 50") as caught:
            await driver.append(KEY, b"x" * (2_000 if small else 3_000), initial_version="v1", ttl=None)
        assert (caught.value.what, caught.value.limit) == ("record", 500_000)
        assert old.asked == (["UpdateItem", "PutItem", "GetItem"] if small else ["GetItem"])
        assert len((await driver.load(KEY)).tail) == 2


@pytest.mark.parametrize("room", ["folded", "erased"])
async def test_a_record_that_has_room_again_takes_the_entry_after_all(old, local, room):
    async with (
        opened_on(old, sizes=Sizes(record=500_000)) as driver,
        noted(local) as theirs,
        opened_on(theirs) as another,
    ):
        for _ in range(2):
            await driver.append(KEY, b"x" * 249_500, initial_version="v1", ttl=None)

        async def make_room():
            if room == "erased":
                assert await another.delete(KEY)
            else:
                assert await another.replace(KEY, b"", version="v2", expect="v1", drop=2, ttl=KEEP)

        old.meanwhile = {"GetItem": make_room}
        assert await driver.append(KEY, b"x" * 2_000, initial_version="v3", ttl=None) == 1
        assert (await driver.load(KEY)).version == ("v3" if room == "erased" else "v2")


# retries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TransactionConflictException",
    ],
)
async def test_a_throttled_write_is_retried_and_done_once(old, code):
    async with opened_on(old) as driver:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        old.asked.clear()
        old.script = [(400, code)] * 3
        assert await driver.append(KEY, b"b", initial_version="v1", ttl=None) == 2
        assert old.asked == ["UpdateItem"] * 4
        assert await driver.load(KEY) == Record("v1", None, (b"a", b"b"))


async def test_what_is_throttled_until_the_deadline_was_not_done(old):
    async with opened_on(old, deadline_s=0.6) as driver:
        old.script = [(400, "ThrottlingException")] * 1000
        start = time.monotonic()
        with pytest.raises(Unavailable, match="throttled"):
            await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        assert time.monotonic() - start < 5
        assert 2 <= len(old.asked) < 100, "sent in a busy loop, or never again"
        old.script = []
        assert await driver.load(KEY) is None


async def test_our_client_does_not_retry_a_write_whose_outcome_is_unknown(old):
    async with opened_on(old) as driver:
        old.script = [(500, "InternalServerError")]
        with pytest.raises(OutcomeUnknown, match="the server failed"):
            await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        assert old.asked == ["UpdateItem"]


@pytest.mark.parametrize(
    ("status", "code"), [(500, "InternalServerError"), (503, "ServiceUnavailable"), (500, DROPPED)]
)
async def test_a_read_that_failed_at_once_is_retried(old, status, code):
    async with opened_on(old) as driver, opened_on(old) as other:
        await other.append(KEY, b"a", initial_version="v1", ttl=None)
        old.asked.clear()
        old.script = [(status, code)]
        assert await driver.load(KEY) == Record("v1", None, (b"a",))
        assert old.asked == ["GetItem", "GetItem"]
        # Also the second request of a load.
        await other.append(KEY, b"x" * 3_000, initial_version="v1", ttl=None)
        old.asked.clear()
        old.meanwhile = {"Query": functools.partial(fail_next, old, status, code)}
        assert (await driver.load(KEY)).tail == (b"a", b"x" * 3_000)
        assert old.asked == ["GetItem", "Query"] * 2
        old.asked.clear()
        old.script = [(status, code)]
        assert (await driver.scan(KEY.scope, limit=10)).names == (KEY.name,)
        assert old.asked == ["Query", "Query"]


async def test_a_handed_in_client_may_send_again_and_works_without_opening(old):
    client = client_of_boto3(old.url)
    async with opened_on(old):
        driver = DynamoDriver(DynamoSettings(table="stm_requests"), client=client)
        old.script = [(500, "InternalServerError")]
        assert await driver.append(KEY, b"0", initial_version="v0", ttl=None) == 1
        assert old.asked == ["UpdateItem", "UpdateItem", "PutItem"]
        lengths = await asyncio.gather(
            *(driver.append(KEY, b"%d" % n, initial_version=f"v{n}", ttl=None) for n in range(1, 9))
        )
        assert sorted(lengths) == list(range(2, 10))
        await driver.close()
        with pytest.raises(Unavailable, match="not open"):
            await driver.load(KEY)
    client.close()
