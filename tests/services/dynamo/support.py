"""Drivers on DynamoDB, and a proxy that notes the requests and can answer them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import ClientSession, web

from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown
from stm_backends.testing.workbench.memories import until
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.items import Sizes
from tests.support.dynamodb import PRETENDED, Place

TINY = Sizes(large=4, loose=64, part=100_000, places=6, run=17, crowd=8, record=4_000_000)
"""So small that short records have everything that becomes of long ones; only full is none of them soon."""

KEY = Key("acme:u1:memory", "chat")

DROPPED = "the connection is closed before an answer"


class Requests:
    """Notes each request; answers with `script` first, then passes requests on.

    `meanwhile` holds what happens, once, just before a request of that name is carried out.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.script: list[tuple[int, str]] = []
        self.meanwhile: dict[str, Callable[[], Awaitable[object]]] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append(request.headers["X-Amz-Target"].partition(".")[2])
        self.bodies.append(json.loads(body))
        if meanwhile := self.meanwhile.pop(self.asked[-1], None):
            await meanwhile()
        if self.script:
            status, code = self.script.pop(0)
            if code == DROPPED:
                request.transport.close()
            text = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "no"})
            return web.Response(status=status, text=text, content_type="application/x-amz-json-1.0")
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.post(self._upstream, data=body, headers=headers) as response,
        ):
            passed = {"Content-Type", "x-amz-crc32", "x-amzn-RequestId"}
            return web.Response(
                status=response.status,
                body=await response.read(),
                headers={name: value for name, value in response.headers.items() if name in passed},
            )


@contextlib.asynccontextmanager
async def noted(upstream: str) -> AsyncIterator[Requests]:
    """Yield a proxy that notes what a DynamoDB is asked."""
    requests = Requests(upstream)
    application = web.Application()
    application.router.add_post("/", requests.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    requests.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield requests
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def opened(
    place: Place, *, clock: Callable[[], float] = time.time, create: bool = False, **settings: Any
) -> AsyncIterator[DynamoDriver]:
    """Yield a driver on the table of a place, with a clock of the test's own."""
    options = {"table": place.table, "region": place.region, "endpoint_url": place.endpoint_url}
    options = {**options, **place.credentials, **settings}
    driver = DynamoDriver(DynamoSettings(**options), create=create, clock=clock)
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


@contextlib.asynccontextmanager
async def opened_on(
    requests: Requests, *, clock: Callable[[], float] = time.time, sizes: Sizes | None = None, **settings: Any
) -> AsyncIterator[DynamoDriver]:
    """Yield a driver whose requests are noted, and delete the record `KEY` in the end."""
    options = {"table": "stm_requests", "region": "eu-west-1", **PRETENDED, **settings}
    driver = DynamoDriver(
        DynamoSettings(endpoint_url=requests.url, **options), create=True, clock=clock, sizes=sizes or Sizes()
    )
    await driver.open()
    requests.asked.clear()
    try:
        yield driver
    finally:
        await until(lambda: _erased(driver), within=30)
        await driver.close()


async def _erased(driver: DynamoDriver) -> bool:
    """Delete the record; `False` if a busy machine took longer than the deadline of the driver."""
    try:
        await driver.delete(KEY)
    except OutcomeUnknown:
        return False
    return True


def items_of(client, place, key):
    """Return the head of a record and all its parts, past the driver."""
    head = client.get_item(
        TableName=place.table, Key={"pk": {"S": key.scope}, "sk": {"S": key.name}}, ConsistentRead=True
    ).get("Item")
    parts = client.query(
        TableName=place.table,
        KeyConditionExpression="pk = :pk",
        ExpressionAttributeValues={":pk": {"S": f"{key.scope}\0{key.name}"}},
        ConsistentRead=True,
    )["Items"]
    return head, parts


async def assert_erased(driver, client, place, key):
    """Assert that a delete removes everything, also what was left behind before."""
    await driver.delete(key)
    assert items_of(client, place, key) == (None, [])
