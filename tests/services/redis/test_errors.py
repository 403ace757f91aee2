"""What each error of the client library and the server means, said once in a table and seen on a server."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis import exceptions as client
from redis.asyncio import Redis

from stm_backends.drivers.contract import ANY, Key
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import open_at
from stm_backends_redis.errors import NotConnected, meaning
from tests.support.contract import opened

KEY = Key("private scope", "private name")


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (client.ConnectionError("Connection closed by server."), OutcomeUnknown),
        (client.TimeoutError("Timeout reading from h:6379"), OutcomeUnknown),
        (OSError("broken pipe"), OutcomeUnknown),
        (client.InvalidResponse("Protocol error"), OutcomeUnknown),
        (client.ResponseError("unknown command 'EVALSHA'"), Unavailable),
        (client.ConnectionError("Error 111 connecting to h:6379. Connect call failed"), Unavailable),
        (client.TimeoutError("Timeout connecting to server"), Unavailable),
        (client.ConnectionError("max number of clients reached"), Unavailable),
        (client.ConnectionError("No connection available."), Unavailable),
        (client.MaxConnectionsError("Too many connections"), Unavailable),
        (caused(NotConnected(), client.ConnectionError("Connection closed by server.")), Unavailable),
        (caused(NotConnected(), TimeoutError()), Unavailable),
        (caused(NotConnected(), client.AuthenticationError("invalid password")), Denied),
        (client.AuthenticationError("invalid password"), Denied),
        (client.NoPermissionError("this user has no permissions"), Denied),
        (client.BusyLoadingError("Redis is loading the dataset in memory"), Unavailable),
        (client.ReadOnlyError("You can't write against a read only replica."), Unavailable),
        (client.OutOfMemoryError("command not allowed"), Unavailable),
        (client.MovedError("1 h:7000"), Unavailable),
        (client.AskError("1 h:7000"), Unavailable),
        (client.TryAgainError(), Unavailable),
        (client.ClusterDownError("The cluster is down"), Unavailable),
        (client.ClusterError("TTL exhausted."), Unavailable),
        (client.MasterDownError("Link with MASTER is down"), Unavailable),
        (client.SlotNotCoveredError("slot 1"), Unavailable),
        (client.ResponseError("MISCONF Redis is configured to save RDB snapshots"), Unavailable),
        (client.ResponseError("BUSY Redis is busy running a script"), Unavailable),
        (client.ResponseError("WRONGTYPE Operation against a key"), Corrupt),
        (client.ResponseError("STMCORRUPT"), Corrupt),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_error_has_a_meaning(error, kind):
    found = meaning(error)
    assert found is not None
    assert found[0] is kind


@pytest.mark.parametrize("error", [ValueError(), client.DataError("Invalid input"), AssertionError()])
def test_a_mistake_of_ours_is_not_blamed_on_the_datastore(error):
    assert meaning(error) is None


async def refused(driver, kind):
    """Try a write of each kind; each must be refused as `kind`, in words that show nothing of the data."""
    for write in (
        lambda: driver.append(KEY, b"private turn", initial_version="b", ttl=60),
        lambda: driver.append(KEY, b"private turn", initial_version="b", ttl=None),
        lambda: driver.replace(KEY, b"private turn", version="v", expect=ANY, ttl=None),
    ):
        with pytest.raises(StorageError) as caught:
            await write()
        assert type(caught.value) is kind, repr(caught.value.__cause__)
        assert "private" not in str(caught.value)
    return str(caught.value)


async def test_a_full_server_refuses_a_write_and_nothing_changes(server, driver):
    await driver.append(KEY, b"a", initial_version="b", ttl=None)
    before = await driver.load(KEY)
    server.ask("CONFIG", "SET", "maxmemory", 1)
    assert "memory is full" in await refused(driver, Unavailable)
    assert await driver.load(KEY) == before
    assert await driver.delete(KEY), "what is full can still be emptied"
    assert (await driver.scan(KEY.scope, limit=9)).names == ()
    server.ask("CONFIG", "SET", "maxmemory", 0)
    assert await driver.append(KEY, b"a", initial_version="b", ttl=None) == 1


async def test_a_replica_or_a_master_without_replicas_takes_no_writes(server, driver):
    server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    assert "too few replicas" in await refused(driver, Unavailable)
    server.ask("CONFIG", "SET", "min-replicas-to-write", 0)
    server.ask("REPLICAOF", "127.0.0.1", 1)
    assert "replica" in await refused(driver, Unavailable)


async def test_a_server_busy_running_a_script_says_so(start):
    server = start("--save", "", "--lua-time-limit", "10")
    driver = await open_at(server.url, deadline_s=3.0)
    endless = Redis(port=server.port, socket_timeout=None)
    hog = asyncio.ensure_future(endless.eval("while true do end", 0))
    await asyncio.sleep(0.3)
    assert "busy running another script" in await refused(driver, Unavailable)
    server.ask("SCRIPT", "KILL")
    with pytest.raises(client.ResponseError):
        await hog
    assert await driver.append(KEY, b"a", initial_version="b", ttl=None) == 1
    await endless.aclose()
    await driver.close()


async def test_a_key_that_holds_something_else_is_corrupt_and_left_alone(server, driver):
    await driver.append(KEY, b"a", initial_version="b", ttl=None)
    place = f"stm:{{{KEY.scope}}}:{KEY.name}"
    for value in (("SET", place, "text"), ("RPUSH", place, "one"), ("RPUSH", place, "v", "no measure", "")):
        server.ask("DEL", place)
        server.ask(*value)
        dump = server.ask("DUMP", place)
        await refused(driver, Corrupt)
        with pytest.raises(Corrupt):
            await driver.load(KEY)
        assert server.ask("DUMP", place) == dump
    assert await driver.delete(KEY)


async def test_a_node_of_a_cluster_is_not_taken_for_a_server_of_its_own(start):
    server = start("--save", "", "--cluster-enabled", "yes")
    with pytest.raises(Unavailable, match="cluster"):
        await open_at(server.url)


def announce(server, host):
    server.ask("CONFIG", "SET", "cluster-announce-ip", host)
    while server.ask("CLUSTER", "SLOTS")[0][2][0] != host.encode():
        time.sleep(0.01)


async def test_a_cluster_that_announces_unreachable_addresses_is_told(start):
    server = start("--save", "", "--cluster-enabled", "yes", "--bind", "127.0.0.1")
    server.ask("CLUSTER", "ADDSLOTS", *range(16_384))
    url = f"redis+cluster://127.0.0.1:{server.port}"
    async with opened(f"{url}?deadline_s=30") as driver:
        assert await driver.load(KEY) is None
        announce(server, "127.0.0.2")
        with pytest.raises(Unavailable, match=r"address that the cluster announces; .*nothing listens"):
            await open_at(url)


async def test_a_database_that_is_not_there_is_unavailable_and_named_as_such(start):
    server = start("--databases", "2")
    await (await open_at(f"{server.url}/1")).close()
    with pytest.raises(Unavailable, match="no database with this number"):
        await open_at(f"{server.url}/2")


@pytest.mark.parametrize("member", [b"no NUL", b"", b"\xff\xfe\0", b"\xff"])
async def test_a_member_of_an_index_by_another_program_is_corrupt(server, driver, member):
    await driver.append(KEY, b"a", initial_version="b", ttl=None)
    server.ask("ZADD", f"stm:{{{KEY.scope}}}", 0, member)
    with pytest.raises(Corrupt, match="another program"):
        await driver.scan(KEY.scope, limit=10)
    assert await driver.append(KEY, b"a", initial_version="b", ttl=60) == 2
    assert await driver.delete(KEY)
