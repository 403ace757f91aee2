"""The same faults on each server: a typed error within the deadline, or the right answer; never "no data".

Faults that only one datastore has (passwords, databases, replicas, tables) are tested in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from stm_backends.drivers.contract import ANY, KEEP, Driver, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.faults import Proxy
from tests.support.places import EACH, Place, quick_on
from tests.support.servers import free_port

Proxied = Callable[[str], tuple[Place, Proxy]]

KEY = Key("acme:u1:memory", "chat")
OTHER = Key("acme:u1:memory", "other")

DEADLINE_S = 1.5

GRACE_S = 20.0
"""What a busy machine may add to a deadline; clients that ignore the deadline wait for 30 s and more."""

POOL_SIZE = {"mongo": "maxPoolSize"}
"""What the setting is called where it is not `pool_size`."""

IN_VAIN = {"mongo": (Unavailable, OutcomeUnknown)}
"""How waiting for a connection may end where the deadline can pass while the request is being sent."""

pytestmark = [
    pytest.mark.parametrize("datastore", quick_on("redis", EACH)),
    # PyMongo leaves the socket to the garbage collector if it is cancelled while it connects.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def no_socket_is_left_to_later_tests() -> Iterator[None]:
    """Collect such sockets here, where they are no error."""
    yield
    gc.collect()


@contextlib.asynccontextmanager
async def opened(place: Place, **settings: Any) -> AsyncIterator[Driver]:
    """An open driver, which sets its place up."""
    driver = await open_at(place.options(**{"deadline_s": DEADLINE_S, **settings}), create=True)
    try:
        await warm(driver)
        yield driver
    finally:
        await driver.close()


async def warm(driver: Driver) -> None:
    """Send what a server receives once for each connection, so that the next answer is that of a write."""
    await driver.replace(OTHER, b"x", version=new_version(), expect=ANY, ttl=None)
    for _ in range(2):  # a driver may send another statement for a record that it knows
        await driver.append(OTHER, b"x", initial_version="initial", ttl=None)
    version = (await driver.load(OTHER)).version
    await driver.replace(OTHER, b"x", version=new_version(), expect=version, drop=1, ttl=KEEP)


async def fails_in_time(work: Awaitable[object], *kinds: type[StorageError]) -> StorageError:
    """Await what must fail as one of these kinds within the deadline; return the error."""
    start = time.monotonic()
    with pytest.raises(StorageError) as caught:
        await work
    assert time.monotonic() - start < DEADLINE_S + GRACE_S
    assert type(caught.value) in kinds, repr(caught.value)
    assert KEY.name not in str(caught.value)
    return caught.value


async def answered(work: Callable[[], Awaitable[Any]]) -> Any:
    """Return the answer of an operation that may fail a few times on broken connections."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StorageError):
                return await work()
            await asyncio.sleep(0.05)


async def test_an_outage_is_unavailable_and_ends_when_the_server_is_back(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place) as driver:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        async with proxy.cut():
            await fails_in_time(driver.load(KEY), Unavailable)
            await fails_in_time(driver.scan(KEY.scope, limit=5), Unavailable)
            # Only some clients know that nothing was sent.
            await fails_in_time(
                driver.append(KEY, b"b", initial_version="v1", ttl=None), OutcomeUnknown, Unavailable
            )
        assert await answered(lambda: driver.load(KEY)) == Record("v1", None, (b"a",))


async def test_a_port_where_nothing_listens_is_unavailable(datastore: str, proxied: Proxied):
    place, _ = proxied(datastore)
    nowhere = place.by_way_of(free_port()).options(deadline_s=DEADLINE_S)

    async def open_and_load() -> object:
        driver = await open_at(nowhere)
        try:
            return await driver.load(KEY)
        finally:
            await driver.close()

    await fails_in_time(open_and_load(), Unavailable)


async def test_a_server_that_is_slow_but_in_time_answers_right(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place, deadline_s=10) as driver, proxy.slow(0.15):
        assert await driver.append(KEY, b"a", initial_version="v1", ttl=None) == 1
        assert await driver.append(KEY, b"b", initial_version="v1", ttl=60) == 2
        assert await driver.replace(KEY, b"ab", version="v2", expect="v1", drop=2, ttl=KEEP) is True
        assert await driver.load(KEY) == Record("v2", b"ab", ())
        assert (await driver.scan(KEY.scope, limit=5)).names == (KEY.name, OTHER.name)
        assert await driver.delete(KEY) is True


async def test_no_operation_waits_for_a_slow_server_beyond_its_deadline(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place) as driver:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        async with proxy.slow(60):
            await fails_in_time(driver.load(KEY), Unavailable)
            await fails_in_time(
                driver.append(KEY, b"b", initial_version="v1", ttl=None), OutcomeUnknown, Unavailable
            )
        # What was on its way then is lost with its connection.
        async with proxy.cut():
            pass
        record = await answered(lambda: driver.load(KEY))
        assert record.tail[:1] == (b"a",)


async def test_a_write_whose_answer_is_lost_is_unknown_and_safe_to_retry(
    datastore: str, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
):
    # No purge after a write: its statement would be sent in two steps the first time.
    monkeypatch.setattr(random, "random", lambda: 0.9)
    place, proxy = proxied(datastore)
    async with opened(place) as driver, opened(place.by_way_of(place.address[1])) as beside:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        await warm(driver)
        fold = {"version": "v2", "expect": "v1", "drop": 1, "ttl": KEEP}
        for write, done, is_cut in (
            (
                lambda: driver.append(KEY, b"b", initial_version="v1", ttl=None),
                Record("v1", None, (b"a", b"b")),
                True,
            ),
            # Here the deadline passes without an answer.
            (lambda: driver.replace(KEY, b"a", **fold), Record("v2", b"a", (b"b",)), False),
        ):
            async with proxy.stalled("answers"):
                writing = asyncio.ensure_future(write())
                async with asyncio.timeout(30):
                    while await beside.load(KEY) != done:  # noqa: ASYNC110 -- nothing else tells
                        await asyncio.sleep(0.02)
                async with proxy.cut() if is_cut else contextlib.nullcontext():
                    await fails_in_time(writing, OutcomeUnknown)
            await answered(lambda: warm(driver))
        assert await driver.load(KEY) == Record("v2", b"a", (b"b",))
        assert await driver.replace(KEY, b"a", **fold) is True, "a retry"
        assert await driver.load(KEY) == Record("v2", b"a", (b"b",))


async def test_a_read_that_was_cut_off_is_unavailable_and_never_no_data(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place) as driver:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        for work in (lambda: driver.load(KEY), lambda: driver.scan(KEY.scope, limit=5)):
            async with proxy.stalled("answers"):
                reading = asyncio.ensure_future(work())
                await asyncio.sleep(0.3)
                async with proxy.cut():
                    await fails_in_time(reading, Unavailable)
            assert await answered(work)


async def test_an_exhausted_pool_is_unavailable_and_nothing_was_sent(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place, **{POOL_SIZE.get(datastore, "pool_size"): 1}) as driver:
        await driver.append(KEY, b"a", initial_version="v1", ttl=None)
        async with proxy.stalled("answers"):
            holding = asyncio.ensure_future(driver.load(OTHER))
            await asyncio.sleep(0.1)
            appends = (driver.append(KEY, b"b", initial_version="v1", ttl=None) for _ in range(3))
            waiting = (fails_in_time(append, *IN_VAIN.get(datastore, (Unavailable,))) for append in appends)
            await asyncio.gather(*waiting, fails_in_time(holding, Unavailable))
            async with proxy.cut():
                pass
        assert await answered(lambda: driver.load(KEY)) == Record("v1", None, (b"a",))


async def test_more_callers_than_connections_wait_for_a_free_one(datastore: str, proxied: Proxied):
    place, _ = proxied(datastore)
    async with opened(place, deadline_s=30, **{POOL_SIZE.get(datastore, "pool_size"): 2}) as driver:
        appends = (driver.append(KEY, b"%d" % n, initial_version="v1", ttl=None) for n in range(30))
        assert sorted(await asyncio.gather(*appends)) == list(range(1, 31))


async def test_cancelling_many_calls_leaves_the_pool_usable(datastore: str, proxied: Proxied):
    place, proxy = proxied(datastore)
    async with opened(place, **{POOL_SIZE.get(datastore, "pool_size"): 2}) as driver:
        keys = [Key(KEY.scope, str(number)) for number in range(6)]
        for key in keys:
            await driver.append(key, key.name.encode(), initial_version="v1", ttl=None)
        for steps in range(12):
            async with proxy.stalled("answers"):
                loads = [asyncio.ensure_future(driver.load(key)) for key in keys]
                for _ in range(steps):
                    await asyncio.sleep(0)
                for load in loads:
                    load.cancel()
                # One that has failed already cannot be cancelled; none has an answer.
                ended = await asyncio.gather(*loads, return_exceptions=True)
                assert all(isinstance(one, asyncio.CancelledError | StorageError) for one in ended)
            records = [await answered(lambda key=key: driver.load(key)) for key in keys]
            assert [record.tail for record in records] == [(key.name.encode(),) for key in keys]


async def test_closing_does_not_wait_for_a_server_that_hangs(datastore: str, proxied: Proxied):
    """PyMongo would wait for half a minute to end its session on the server."""
    place, proxy = proxied(datastore)
    driver = await open_at(place.options(deadline_s=DEADLINE_S), create=True)
    await warm(driver)
    async with proxy.stalled():
        lost = asyncio.ensure_future(driver.append(KEY, b"a", initial_version="v1", ttl=None))
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S + GRACE_S):
            await driver.close()
        with pytest.raises(StorageError):
            await lost
