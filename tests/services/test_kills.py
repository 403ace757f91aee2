"""A server that is killed while writers write: what it acknowledged is there when it starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends.drivers.contract import Key, new_version
from stm_backends.errors import StorageError
from tests.support.contract import opened
from tests.support.places import EACH
from tests.support.servers import Server

pytestmark = [pytest.mark.full, pytest.mark.parametrize("datastore", EACH)]

SCOPE = "acme:u1:memory"


@pytest.fixture
def durable(
    datastore: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, str]]:
    """A server of the test's own that keeps everything on its disk, and the URL of a place in it."""
    made = _made(datastore, request.getfixturevalue, tmp_path, monkeypatch)
    made[0].start()
    yield made
    made[0].kill()


def _made(datastore: str, fixture: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, str]:
    if datastore == "redis":
        from tests.support.redis_server import ALWAYS_SYNCED, RedisServer  # noqa: PLC0415 -- its library

        server = RedisServer(fixture("redis_binary"), folder, *ALWAYS_SYNCED)
        return server, server.url
    if datastore == "postgres":
        from tests.support.postgresql import Postgres  # noqa: PLC0415

        server = Postgres(fixture("postgres_binaries"), fixture("postgres_folder") / folder.name)
        return server, server.url
    if datastore == "mongo":
        from tests.support.mongod import Mongod  # noqa: PLC0415

        server = Mongod(fixture("mongod_program"), folder / "data")
        return server, f"mongodb://{server.address}/chats?directConnection=true"
    from tests.support.dynamodb import Local  # noqa: PLC0415

    server = Local(fixture("dynamodb_jar"), folder, on_disk=True)
    for name, value in server.place.environment.items():
        monkeypatch.setenv(name, value)
    return server, server.place.url


async def test_what_was_acknowledged_survives_the_death_of_the_server(
    durable: tuple[Server, str],
) -> None:
    server, url = durable
    acknowledged: dict[str, list[bytes]] = {name: [] for name in "abc"}
    enough = asyncio.Event()
    async with opened(f"{url}{'&' if '?' in url else '?'}deadline_s=10", create=True) as driver:

        async def write(name: str) -> None:
            for number in range(1_000_000):
                entry = b"%d" % number
                await driver.append(Key(SCOPE, name), entry, initial_version=new_version(), ttl=600)
                acknowledged[name].append(entry)
                if min(map(len, acknowledged.values())) >= 30:
                    enough.set()

        writers = [asyncio.ensure_future(write(name)) for name in acknowledged]
        await enough.wait()
        await asyncio.to_thread(server.kill)
        outcomes = await asyncio.gather(*writers, return_exceptions=True)
        assert all(isinstance(outcome, StorageError) for outcome in outcomes), outcomes
        await asyncio.to_thread(server.start)
    async with opened(url) as driver:
        for name, mine in acknowledged.items():
            record = await driver.load(Key(SCOPE, name))
            assert record is not None
            # One more may have been done whose answer was lost.
            assert record.tail[: len(mine)] == tuple(mine)
            assert record.tail in (tuple(mine), (*mine, b"%d" % len(mine)))
            after = await driver.append(Key(SCOPE, name), b"after", initial_version="v", ttl=None)
            assert after == len(record.tail) + 1
        assert (await driver.scan(SCOPE, limit=9)).names == tuple(acknowledged)
