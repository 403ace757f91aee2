"""What a test class can ask of a driver on NATS JetStream: the server past the driver, and its faults."""

from __future__ import annotations

import contextlib
import functools
import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import nats
from nats.aio.client import Client

from stm_backends.drivers import Driver, Key, Record
from stm_backends.testing import Datastore, HandedIn
from stm_backends.testing.faults import Proxy
from tests.strangers.nats_backend.layout import GONE, decode, subject_of
from tests.support.nats import without_a_leader


class Beside:
    """The server past the driver, on connections of the test."""

    def __init__(self, address: str, stream: str) -> None:
        self.url, self.stream = f"nats://{address}", stream

    async def messages(self, key: Key) -> list[bytes]:
        """Return the message of a record, or the one that a delete leaves; nothing if there is neither."""
        async with await nats.connect(self.url) as client:
            request = json.dumps({"last_by_subj": subject_of(self.stream, key)}).encode()
            asked = await client.request(f"$JS.API.STREAM.MSG.GET.{self.stream}", request, timeout=5)
        answer = json.loads(asked.data)
        return [b64decode(answer["message"].get("data", ""))] if "message" in answer else []

    async def write(self, key: Key, data: bytes) -> None:
        async with await nats.connect(self.url) as client:
            await client.jetstream().publish(subject_of(self.stream, key), data)

    async def damage(self, key: Key) -> None:
        (data,) = await self.messages(key)
        await self.write(key, data[:-1] + bytes([data[-1] ^ 1]))

    async def cut(self, key: Key) -> None:
        (data,) = await self.messages(key)
        await self.write(key, data[:-1])

    async def peek(self, key: Key) -> Record | None:
        found = [data for data in await self.messages(key) if data != GONE]
        return decode(found[0]).record if found else None


def url_of(address: str, stream: str, deadline_s: float = 10.0) -> str:
    return f"nats://{address}/{stream}?deadline_s={deadline_s}"


@contextlib.contextmanager
def given(
    address: str,
    stream: str,
    *,
    opened: Callable[[str], Awaitable[Driver]],
    made: Callable[..., Driver],
) -> Iterator[Datastore]:
    """Yield a datastore with all means that JetStream has.

    `opened` returns an open driver for a URL, and makes the stream; `made` is the `open` of the plugin.
    """
    beside = Beside(address, stream)

    async def through(address: str) -> Driver:
        # A read is sent again after a third of it, which is longer than the suite pauses an operation.
        return await opened(url_of(address, stream, deadline_s=3.0))

    async def handed_in() -> HandedIn:
        client: Client = await nats.connect(beside.url)
        driver = made(f"nats:///{stream}", client=client, create=True)
        await driver.open()

        async def is_open() -> bool:
            return client.is_connected

        async def kept() -> list[Any]:
            return [*vars(client)["_subs"].values()]

        return HandedIn(driver=driver, is_open=is_open, close=client.close, kept=kept)

    with Proxy(address) as proxy:

        @contextlib.asynccontextmanager
        async def refusal() -> AsyncGenerator[None]:
            with without_a_leader() as other:
                try:
                    await lead_to(other)
                    yield
                finally:
                    await lead_to(address)

        async def lead_to(server: str) -> None:
            proxy.lead_to(server)
            async with proxy.cut():  # what is connected to the other one
                pass

        yield Datastore(
            open=functools.partial(opened, url_of(proxy.address, stream)),
            address=address,
            through=through,
            outage=proxy.cut,
            refusal=refusal,
            damage=beside.damage,
            cut=beside.cut,
            stored=beside.messages,
            peek=beside.peek,
            handed_in=handed_in,
            server="nats-server",
        )
