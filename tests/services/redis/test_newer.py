"""The contract on a newer Redis than the package index brings: Debian's, where apt is at hand."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest

from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing import Datastore, DriverContract, open_at
from tests.services.redis.test_errors import KEY, refused
from tests.support import apt
from tests.support.contract import slow_checks
from tests.support.redis_server import NO_PERSISTENCE, RedisServer

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """A Redis 7 or later."""
    try:
        program = apt.find("redis-server", "redis-server", "redis-tools", "libjemalloc2", "liblzf1")
    except apt.NotAtHand as error:
        # Not from the package index, so that its absence fails nobody.
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("newer")
    server = RedisServer(program.path, folder, *NO_PERSISTENCE, environment=program.environment)
    server.start()
    yield server
    server.stop()


class TestRedisDriverOnANewerServer(DriverContract):
    opted_out: ClassVar = slow_checks("asked of the same driver on an older server")

    @pytest.fixture
    def datastore(self, newer):
        version = newer.ask("INFO", "server")["redis_version"]
        opening = functools.partial(open_at, newer.url, **SMALL)
        return Datastore(open=opening, histories=3, server=f"Redis {version}")


async def test_errors_that_end_a_script_are_known_in_the_words_of_newer_servers(newer):
    driver = await open_at(newer.url)
    await driver.append(KEY, b"a", birth="b", ttl=None)
    newer.ask("CONFIG", "SET", "maxmemory", 1)
    assert "memory is full" in await refused(driver, Unavailable)
    newer.ask("CONFIG", "SET", "maxmemory", 0)
    newer.ask("SET", f"stm:{{{KEY.scope}}}:{KEY.name}", "text")
    await refused(driver, Corrupt)
    await driver.delete(KEY)
    await driver.close()
