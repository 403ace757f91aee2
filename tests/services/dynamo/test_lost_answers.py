"""A client of the caller's own that sends a request again, because its answer was lost after the work."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Record
from stm_backends.errors import Denied, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.faults import Proxy
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.errors import REFUSED
from tests.support.clock import virtually

LARGE = b"x" * 5_000


@pytest.fixture
async def retrying(place):
    """A driver on a client that retries as boto3 does by default, and the proxy that loses answers."""
    parts = urlsplit(place.endpoint_url or "")
    if parts.scheme != "http":
        pytest.skip("a proxy can be put in front of plain HTTP alone")
    async with Proxy(f"{parts.hostname}:{parts.port}") as proxy:
        where = {**place.aws, "endpoint_url": f"http://{proxy.address}"}
        # One connection, so that a request is sent again on a new one.
        client = boto3.client("dynamodb", **where, config=Config(max_pool_connections=1))
        with contextlib.closing(client):
            driver = DynamoDriver(DynamoSettings(table=place.table, deadline_s=30), client=client)
            await driver.open()
            yield driver, proxy
            await driver.close()


async def losing(proxy, request, work):
    """Lose the answer to the next such request, and return what the work answers all the same."""
    loss = proxy.lose_answer(request)
    try:
        return await work
    finally:
        assert loss.happened


async def test_an_append_that_creates_is_stored_once(retrying, key):
    driver, proxy = retrying
    creating = driver.append(key, b"a", initial_version="v1", ttl=None)
    assert await losing(proxy, b"PutItem", creating) == 1
    assert await driver.load(key) == Record("v1", None, (b"a",))


async def test_an_append_of_a_large_entry_that_creates_is_stored_once(retrying, key):
    driver, proxy = retrying
    creating = driver.append(key, LARGE, initial_version="v1", ttl=None)
    assert await losing(proxy, b"TransactWriteItems", creating) == 1
    assert await driver.load(key) == Record("v1", None, (LARGE,))


@pytest.mark.parametrize("body", [b"body", LARGE])
async def test_a_replace_is_not_taken_for_a_lost_race(retrying, key, body):
    driver, proxy = retrying
    sent = b"TransactWriteItems" if body is LARGE else b"PutItem"
    create = driver.replace(key, body, version="v1", expect=ABSENT, ttl=60)
    assert await losing(proxy, sent, create) is True
    await driver.append(key, b"a", initial_version="no", ttl=60)
    fold = driver.replace(key, body, version="v2", expect="v1", drop=1, ttl=KEEP)
    assert await losing(proxy, b"UpdateItem", fold) is True
    await driver.append(key, b"b", initial_version="no", ttl=60)
    rewrite = driver.replace(key, body, version="v3", expect="v2", rewrite=(b"B",), ttl=KEEP)
    assert await losing(proxy, b"UpdateItem", rewrite) is True
    assert await driver.load(key) == Record("v3", body, (b"B",))
    sent = b"UpdateItem" if body is LARGE else b"PutItem"
    save = driver.replace(key, body, version="v4", expect=ANY, ttl=60)
    assert await losing(proxy, sent, save) is True
    assert await driver.load(key) == Record("v4", body, ())


@pytest.mark.parametrize("expect", ["v1", ANY])
async def test_a_deletion_is_unknown_and_not_anothers(retrying, key, expect):
    """The answer `False` would mean that another has deleted it, for example taken a paused run."""
    driver, proxy = retrying
    await driver.append(key, b"a", initial_version="v1", ttl=None)
    with pytest.raises(OutcomeUnknown, match="sent it already"):
        await losing(proxy, b"DeleteItem", driver.delete(key, expect=expect))
    assert await driver.load(key) is None
    assert await driver.delete(key, expect=expect) is False


class Refusing:
    """A client whose writes are refused `after` as many repeats of its own; reads find an item or fail."""

    meta = SimpleNamespace(service_model=SimpleNamespace(service_name="dynamodb"))

    def __init__(self, after, item, *, throttles):
        self.after, self.item, self.throttles = after, item, throttles

    async def close(self): ...

    async def get_item(self, **_):
        if self.throttles:
            raise ClientError({"Error": {"Code": "ThrottlingException"}}, "GetItem")
        return {"Item": self.item}

    async def _refuse(self, **_):
        error = {"Error": {"Code": REFUSED}, "Item": self.item}
        raise ClientError({**error, "ResponseMetadata": {"RetryAttempts": self.after}}, "a write")

    put_item = update_item = delete_item = _refuse


@pytest.mark.parametrize(("after", "kind"), [(0, Unavailable), (1, OutcomeUnknown)])
@pytest.mark.parametrize("throttles", [False, True])
@pytest.mark.parametrize("operation", ["append", "delete"])
@virtually
async def test_what_was_sent_again_is_never_said_to_be_undone(key, operation, throttles, after, kind):
    """Other writers are in its way until the last round, or the table is throttled when it looks."""
    # A record with parts that is never caught, or one that is gone whenever it is read.
    kept_changing = operation == "delete" and not throttles
    item = {"version": {"S": "v"}, "life": {"S": "life"}} if kept_changing else {}
    client = Refusing(after, item, throttles=throttles)
    driver = DynamoDriver(DynamoSettings(deadline_s=1), client=client)
    write = {
        "append": lambda: driver.append(key, b"a", initial_version="v", ttl=None),
        "delete": lambda: driver.delete(key),
    }[operation]
    with pytest.raises(kind, match=rf"dynamo\.{operation}: ") as caught:
        await write()
    assert type(caught.value) is kind
    await driver.close()


class Failing(Refusing):
    """A client that may have sent a write before, which now fails; it sends each up to so many times."""

    def __init__(self, error, *, attempts=None):
        super().__init__(0, {}, throttles=False)
        self.error = error
        retries = {"total_max_attempts": attempts} if attempts else None
        self.meta = SimpleNamespace(**vars(Refusing.meta), config=SimpleNamespace(retries=retries))

    async def _fail(self, **_):
        raise self.error

    get_item = put_item = update_item = delete_item = _fail


class FailingToSign(Failing):
    async def _fail(self, **_):
        # The driver knows the client's functions by their package.
        signers = {"__name__": "botocore.signers", "error": self.error}
        exec("def sign():\n    raise error", signers)  # noqa: S102 -- a module of the client
        signers["sign"]()

    get_item = put_item = update_item = delete_item = _fail


@pytest.mark.parametrize(("attempts", "kind"), [(None, OutcomeUnknown), (1, Unavailable)])
@virtually
async def test_credentials_that_fail_before_an_attempt_may_follow_a_sent_one(key, attempts, kind):
    client = FailingToSign(LookupError("pin 4711"), attempts=attempts)
    driver = DynamoDriver(DynamoSettings(deadline_s=1), client=client)
    with pytest.raises(StorageError, match=r"that it calls, failed \(LookupError") as caught:
        await driver.append(key, b"a", initial_version="v", ttl=None)
    assert type(caught.value) is kind
    with pytest.raises(Unavailable):
        await driver.load(key)
    await driver.close()


def throttled(repeats):
    response = {"Error": {"Code": "ThrottlingException"}, "ResponseMetadata": {"RetryAttempts": repeats}}
    return ClientError(response, "a request")


@pytest.fixture
def paused(monkeypatch):
    """Set once the driver pauses; then the deadline ends the pause, as an event loop that is late does."""
    begun = asyncio.Event()

    async def pause(_: float) -> None:
        begun.set()
        await asyncio.Event().wait()

    its = SimpleNamespace(sleep=pause, get_running_loop=asyncio.get_running_loop, to_thread=asyncio.to_thread)
    monkeypatch.setattr("stm_backends_dynamo.client.asyncio", its)
    return begun


@pytest.mark.parametrize(("repeats", "kind"), [(0, Unavailable), (3, OutcomeUnknown)])
@virtually
async def test_what_is_throttled_was_not_done_if_the_deadline_ends_a_pause(key, repeats, kind, paused):
    driver = DynamoDriver(DynamoSettings(deadline_s=1), client=Failing(throttled(repeats)))
    with pytest.raises(kind, match="throttled until" if kind is Unavailable else "no answer") as caught:
        await driver.append(key, b"a", initial_version="v", ttl=None)
    assert type(caught.value) is kind
    assert paused.is_set()
    await driver.close()


class ThrottlingAfterErasing(Refusing):
    """A client that erases a record with parts, and is throttled when it looks for them."""

    def __init__(self):
        super().__init__(0, {"version": {"S": "v"}, "life": {"S": "life"}}, throttles=False)

    async def update_item(self, **_):
        return {"Attributes": self.item}

    async def query(self, **_):
        raise throttled(0)


@virtually
async def test_what_was_erased_is_never_said_to_be_undone_if_the_deadline_ends_a_pause(key, paused):
    driver = DynamoDriver(DynamoSettings(deadline_s=1), client=ThrottlingAfterErasing())
    with pytest.raises(OutcomeUnknown, match="no answer within the deadline"):
        await driver.delete(key)
    assert paused.is_set()
    await driver.close()


@pytest.mark.parametrize(
    ("client", "kind"),
    [
        (Failing(throttled(3)), OutcomeUnknown),
        (Failing(throttled(0)), Unavailable),
        (Failing(EndpointConnectionError(endpoint_url="there")), OutcomeUnknown),
        (Failing(EndpointConnectionError(endpoint_url="there"), attempts=3), OutcomeUnknown),
        (Failing(EndpointConnectionError(endpoint_url="there"), attempts=1), Unavailable),
        # Nothing is sent without credentials.
        (Failing(NoCredentialsError(), attempts=3), Denied),
    ],
)
@virtually
async def test_a_write_that_may_have_been_sent_before_it_failed_is_in_doubt(key, client, kind):
    driver = DynamoDriver(DynamoSettings(deadline_s=1), client=client)
    with pytest.raises(StorageError) as caught:
        await driver.append(key, b"a", initial_version="v", ttl=None)
    assert type(caught.value) is kind
    cause = "throttled until" if isinstance(client.error, ClientError) else "no c"
    assert str(caught.value).startswith(f"dynamo.append: {cause}"), "the cause can be mended"
    with pytest.raises(StorageError) as caught:
        await driver.load(key)
    assert not isinstance(caught.value, OutcomeUnknown), "a load changes nothing"
    await driver.close()
