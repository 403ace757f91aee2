"""The driver keeps the contract of stm-backends."""

import functools
import json
from base64 import b64decode
from collections.abc import Iterator

import nats
import pytest
from nats.aio.client import Client
from stm_backends_nats.driver import NatsDriver
from stm_backends_nats.layout import GONE, decode, subject_of
from stm_backends_nats.plugin import open_driver
from stm_backends_nats.settings import NatsSettings

from stm_backends.drivers import Driver, Key, Record
from stm_backends.testing import Datastore, DriverContract, FakeClock, HandedIn, open_at
from stm_backends.testing.faults import Proxy

STREAM = "TESTS"


def url(address: str, *, deadline_s: float = 2) -> str:
    return f"nats://{address}/{STREAM}?deadline_s={deadline_s}"


async def through(address: str) -> Driver:
    return await open_at(url(address), create=True)


class Behind:
    """What is done past the driver, on a connection of its own."""

    def __init__(self, address: str) -> None:
        self.address = f"nats://{address}"

    async def messages(self, key: Key) -> list[bytes]:
        """Return the message of a record, and the raw one of a delete; nothing if there is none."""
        async with await nats.connect(self.address) as client:
            request = json.dumps({"last_by_subj": subject_of(STREAM, key)}).encode()
            answer = json.loads(
                (await client.request(f"$JS.API.STREAM.MSG.GET.{STREAM}", request, timeout=5)).data
            )
            return [b64decode(answer["message"].get("data", ""))] if "message" in answer else []

    async def write(self, key: Key, data: bytes) -> None:
        async with await nats.connect(self.address) as client:
            await client.jetstream().publish(subject_of(STREAM, key), data)

    async def damage(self, key: Key) -> None:
        [data] = await self.messages(key)
        await self.write(key, data[:-1] + bytes([data[-1] ^ 1]))

    async def cut(self, key: Key) -> None:
        [data] = await self.messages(key)
        await self.write(key, data[:-1])

    async def peek(self, key: Key) -> Record | None:
        found = [data for data in await self.messages(key) if data != GONE]
        return decode(found[0]).record if found else None

    async def handed_in(self) -> HandedIn:
        client: Client = await nats.connect(self.address)
        driver = open_driver(f"nats:///{STREAM}", client=client, create=True)
        await driver.open()

        async def is_open() -> bool:
            return client.is_connected

        return HandedIn(driver=driver, is_open=is_open, close=client.close)


class TestNatsDriver(DriverContract):
    @pytest.fixture
    def datastore(self, server: str) -> Iterator[Datastore]:
        behind = Behind(server)
        with Proxy(server) as proxy:
            yield Datastore(
                open=functools.partial(open_at, url(proxy.address, deadline_s=10), create=True),
                address=server,
                through=through,
                outage=proxy.cut,
                damage=behind.damage,
                cut=behind.cut,
                stored=behind.messages,
                peek=behind.peek,
                handed_in=behind.handed_in,
                server="nats-server 2.9.10",
            )


async def open_with_a_clock(address: str, clock: FakeClock) -> Driver:
    settings = NatsSettings.from_url(url(address, deadline_s=10))
    driver = NatsDriver(settings, create=True, clock=lambda: clock.now)
    await driver.open()
    return driver


class TestNatsDriverWithAClock(DriverContract):
    """The same with a clock that only the checks move; other processes would have another one."""

    @pytest.fixture
    def datastore(self, server: str) -> Datastore:
        clock = FakeClock()
        return Datastore(open=functools.partial(open_with_a_clock, server, clock), pass_time=clock.pass_time)
