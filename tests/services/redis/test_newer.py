"""The contract on newer servers than the shared one, and on Valkey."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest

from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing import Datastore, DriverContract, open_at
from tests.services.redis.test_errors import KEY, refused
from tests.support.places import quick_on
from tests.support.redis_server import KINDS, NO_PERSISTENCE, RedisServer

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


@pytest.fixture(scope="module", params=quick_on("", KINDS[1:]))
def newer(request, obtained, tmp_path_factory):
    """A server of Redis 7 or later, or of Valkey."""
    program = obtained(request.param)
    folder = tmp_path_factory.mktemp("newer")
    server = RedisServer(program.path, folder, *NO_PERSISTENCE, environment=program.environment)
    server.start()
    yield server
    server.stop()


class TestRedisDriverOnANewerServer(DriverContract):
    quick: ClassVar = True  # the slow checks are asked of the same driver on an older server

    @pytest.fixture
    def datastore(self, newer):
        said = newer.ask("INFO", "server")
        name, version = said.get("server_name", "redis"), said["redis_version"]
        opening = functools.partial(open_at, newer.url, **SMALL)
        return Datastore(open=opening, histories=3, server=f"{name} {said.get('valkey_version', version)}")


async def test_errors_that_end_a_script_are_known_in_the_words_of_newer_servers(newer):
    driver = await open_at(newer.url)
    await driver.append(KEY, b"a", initial_version="b", ttl=None)
    newer.ask("CONFIG", "SET", "maxmemory", 1)
    assert "memory is full" in await refused(driver, Unavailable)
    newer.ask("CONFIG", "SET", "maxmemory", 0)
    newer.ask("SET", f"stm:{{{KEY.scope}}}:{KEY.name}", "text")
    await refused(driver, Corrupt)
    await driver.delete(KEY)
    await driver.close()
