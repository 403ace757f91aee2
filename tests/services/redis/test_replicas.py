"""Replicas and sentinels: what WAIT promises, and a master that dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import time

import pytest
from redis.asyncio import Redis

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.contract import ABSENT, ANY, Key, Record, new_version
from stm_backends.errors import ConfigurationError, Denied, OutcomeUnknown, TooLarge, Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.faults import Proxy
from stm_backends.testing.workbench.processes import ledger
from stm_backends_redis import RedisDriver, RedisSettings
from stm_backends_redis.client import Sentinels
from stm_backends_redis.durability import Safeguard
from stm_backends_redis.errors import NotConnected
from stm_backends_redis.stream import LARGE
from tests.services.redis.conftest import PERMISSIONS, is_at_least
from tests.support.outliving import outlives
from tests.support.places import quick_on
from tests.support.redis_server import KINDS, NO_PERSISTENCE, RedisServer

KEY = Key("tenant:user:memory", "conversation")
OTHER = Key("tenant:user:memory", "other")


@pytest.fixture(scope="module", params=quick_on("Redis 8.2", KINDS))
def server_program(request, obtained):
    return obtained(request.param)


@pytest.fixture
def replicated(start):
    """A master and a replica that follows it."""
    master = start(*NO_PERSISTENCE, "--repl-diskless-sync", "no")
    replica = start(*NO_PERSISTENCE, "--replicaof", "127.0.0.1", str(master.port))
    eventually(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up")
    return master, replica


@pytest.fixture
def sentinel(server_program, tmp_path, replicated):
    """One sentinel that watches that master, and alone may depose it."""
    master, _ = replicated
    directory = tmp_path / "sentinel"
    directory.mkdir()
    config = directory / "sentinel.conf"
    config.write_text(
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 500\n"
        "sentinel failover-timeout main 5000\n"
    )
    server = RedisServer(
        server_program.path, directory, "--sentinel", config=config, environment=server_program.environment
    )
    server.start()
    eventually(lambda: server.ask("SENTINEL", "REPLICAS", "main"))
    yield server
    server.stop()


def eventually(is_so) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


async def test_what_a_replica_has_confirmed_outlives_the_master(replicated, sentinel):
    master, replica = replicated
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
    driver = await open_at(url, wait_replicas=1, deadline_s=2.0)
    acknowledged: list[str] = []
    for number in range(50):
        await driver.append(KEY, f"a:{number}".encode(), initial_version=new_version(), ttl=None)
        acknowledged.append(f"a:{number}")
    eventually(lambda: "slave0" in master.ask("INFO", "replication"))
    master.kill()
    assert replica.ask("DBSIZE") == 2
    # The only server left has no replica to confirm, so a write is done but its outcome is unknown.
    until = asyncio.get_running_loop().time() + 60
    while True:
        try:
            await driver.append(KEY, b"b:0", initial_version=new_version(), ttl=None)
        except OutcomeUnknown as error:
            if "not confirmed in time" in str(error):
                break
        except Unavailable:
            pass
        assert asyncio.get_running_loop().time() < until, "the driver did not find the new master"
        await asyncio.sleep(0.2)
    await driver.close()
    driver = await open_at(url)
    entries = await ledger(driver, KEY)
    assert entries[:50] == acknowledged
    assert set(entries[50:]) == {"b:0"}
    await driver.append(KEY, b"c:0", initial_version=new_version(), ttl=None)
    await driver.close()


@pytest.mark.full
async def test_a_conversation_that_folds_outlives_its_master(start, replicated, sentinel):
    master, _ = replicated
    # A replica is left to confirm what the new master has.
    other = start(*NO_PERSISTENCE, "--replicaof", "127.0.0.1", str(master.port))
    eventually(lambda: other.ask("INFO", "replication")["master_link_status"] == "up")
    eventually(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", "main")) == 2)
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main?wait_replicas=1&deadline_s=2"
    async with open_backend(url) as backend:
        await outlives(backend, lambda: asyncio.to_thread(master.kill))


@pytest.mark.parametrize("opened", ["by URL", "on a client"])
async def test_no_connection_to_a_demoted_master_is_used_again(start, opened):
    old, new = start(), start()
    proxy = Proxy(f"127.0.0.1:{old.port}")
    proxy.start()
    client = Redis(port=proxy.port)
    driver = RedisDriver(client=client)
    if opened == "by URL":
        driver = await open_at(f"redis://127.0.0.1:{proxy.port}")
    # Several connections, all of them to a server which the name of the master then no longer leads to:
    # those of large answers beside the one that small answers share.
    await driver.append(OTHER, b"x" * LARGE, initial_version="initial", ttl=None)
    await driver.load(OTHER)
    old.pause()
    loads = [asyncio.ensure_future(driver.load(OTHER)) for _ in range(5)]
    await asyncio.sleep(0.1)
    old.go_on()
    assert all(await asyncio.gather(*loads))
    old.ask("REPLICAOF", "127.0.0.1", new.port)
    proxy.lead_to(f"127.0.0.1:{new.port}")
    with pytest.raises(Unavailable, match="replica"):
        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert await driver.append(KEY, b"a", initial_version="initial", ttl=None) == 1
    assert new.ask("EXISTS", f"stm:{{{KEY.scope}}}:{KEY.name}") == 1
    assert await driver.append(OTHER, b"x" * LARGE, initial_version="initial", ttl=None) == 1
    await driver.close()
    await client.aclose()
    proxy.stop()


async def test_a_service_that_no_sentinel_knows_is_unavailable(sentinel, unused_port):
    with pytest.raises(Unavailable, match="sentinel"):
        await open_at(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
    with pytest.raises(Unavailable, match="sentinel"):
        await open_at(f"redis+sentinel://127.0.0.1:{unused_port}/main")


async def test_a_sentinel_that_hangs_is_passed_over(sentinel):
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        hosts = f"127.0.0.1:{hanging.getsockname()[1]},127.0.0.1:{sentinel.port}"
        driver = await open_at(f"redis+sentinel://{hosts}/main?deadline_s=6")
        assert await driver.append(KEY, b"a", initial_version="initial", ttl=None) == 1
        await driver.close()


async def test_no_sentinel_is_forgotten_when_several_operations_ask(sentinel, unused_port):
    sentinels = Sentinels([("127.0.0.1", unused_port), ("127.0.0.1", sentinel.port)])
    known = set(sentinels.sentinels)
    for _ in range(3):
        await asyncio.gather(*(sentinels.discover_master("main") for _ in range(5)))
    assert set(sentinels.sentinels) == known
    await sentinels.aclose()


async def test_operations_that_look_for_the_master_at_once_ask_once(sentinel):
    sentinels = Sentinels([("127.0.0.1", sentinel.port)])
    before = sentinel.ask("INFO", "clients")["connected_clients"]
    first, *others = (asyncio.create_task(sentinels.discover_master("main")) for _ in range(20))
    await asyncio.sleep(0)
    first.cancel()
    found = await asyncio.gather(*others)
    assert len(set(found)) == 1, "the one that was cancelled takes no answer from the others"
    assert sentinel.ask("INFO", "clients")["connected_clients"] == before + 1
    await sentinels.aclose()


async def test_closing_ends_a_question_that_no_sentinel_answers():
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        sentinels = Sentinels([hanging.getsockname()])
        asking = asyncio.create_task(sentinels.discover_master("main"))
        await asyncio.sleep(0.1)
        await sentinels.aclose()
        # The operation that waits for the answer was not cancelled itself.
        with pytest.raises(NotConnected):
            await asking
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_write_is_unknown_until_a_replica_has_confirmed_it(replicated, short_waits):
    master, replica = replicated
    driver = await open_at(f"{master.url}?wait_replicas=1&deadline_s=30")
    assert await driver.append(KEY, b"a", initial_version="initial", ttl=None) == 1
    master.ask("CONFIG", "RESETSTAT")
    assert await driver.append(KEY, b"b", initial_version="initial", ttl=None) == 2
    stats = master.ask("INFO", "commandstats")
    assert (stats["cmdstat_evalsha"]["calls"], stats["cmdstat_wait"]["calls"]) == (1, 1), "one round trip"
    fold = functools.partial(driver.replace, KEY, b"body", version="v", expect="initial", drop=2, ttl=None)
    replica.pause()
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
            await fold()
    replica.go_on()
    assert await confirmed(fold) is True
    await driver.close()


async def test_a_retry_on_another_connection_waits_for_a_replica_too(replicated, short_waits):
    master, replica = replicated
    url = f"{master.url}?wait_replicas=1&deadline_s=30"
    first, again = await open_at(url), await open_at(url)
    rewritten = Key(OTHER.scope, "rewritten")
    for key in (KEY, OTHER, rewritten):
        await first.append(key, b"a", initial_version="initial", ttl=None)
    replica.pause()
    rewrite = {"version": "r", "expect": "initial", "rewrite": (b"A",), "ttl": None}
    writes = (
        lambda driver: driver.replace(rewritten, b"body", **rewrite),
        lambda driver: driver.replace(KEY, b"body", version="v", expect="initial", drop=1, ttl=None),
        lambda driver: driver.delete(OTHER),
        lambda driver: driver.append(KEY, b"b", initial_version="initial", ttl=None),
    )
    for write in writes:
        for driver in (first, again):
            with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
                await write(driver)
    replica.go_on()
    await confirmed(lambda: again.replace(KEY, b"body", version="v", expect="initial", drop=1, ttl=None))
    await confirmed(lambda: again.replace(rewritten, b"body", **rewrite))
    assert await confirmed(lambda: again.delete(OTHER)) is False, "the first of them removed it"
    assert master.ask("EXISTS", f"stm:{{{OTHER.scope}}}:{OTHER.name}") == 0
    # What was confirmed is there, although the master is lost with everything that it did not pass on.
    master.kill()
    replica.ask("REPLICAOF", "NO", "ONE")
    survivor = await open_at(replica.url)
    assert (await survivor.load(KEY)).version == "v"
    assert await survivor.load(rewritten) == Record("r", b"body", (b"A",))
    assert await survivor.load(OTHER) is None
    for driver in (first, again, survivor):
        await driver.close()


@pytest.mark.full
async def test_a_repeated_erasure_waits_for_a_replica_too(replicated, short_waits):
    """The master already has the result, and the replica still does not."""
    master, replica = replicated
    url = f"{master.url}?wait_replicas=1&deadline_s=30"
    mine = MemoryKey("acme", "ada", "chat")
    settings = ShortTermMemoryConfig(strategy="truncation")
    async with open_backend(url) as here, open_backend(url) as there:
        memories = [backend.memory(mine, settings) for backend in (here, there)]
        await memories[0].add_turn(ConversationTurn("first", "fine"))
        replica.pause()
        for memory in (*memories, *memories):
            with pytest.raises(OutcomeUnknown):
                await memory.add_turn(ConversationTurn("second", "fine"), turn_id="second")
            assert len(await memory.turns()) == 2
            await memory.get_llm_context()
        replica.go_on()
        await confirmed(lambda: memories[1].add_turn(ConversationTurn("second", "fine"), turn_id="second"))
        assert len(await memories[0].turns()) == 2
        replica.pause()
        for _ in range(20):
            with pytest.raises(OutcomeUnknown):
                await here.sessions.erase_tenant("acme")
            if master.ask("DBSIZE") == 0:
                break
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                await here.sessions.erase_tenant("acme")
        replica.go_on()
        await confirmed(lambda: here.sessions.erase_tenant("acme"))
        assert replica.ask("DBSIZE") == 0


async def test_a_repeated_turn_waits_for_a_replica_too(replicated, short_waits):
    master, replica = replicated
    url = f"{master.url}?wait_replicas=1&deadline_s=30"
    config, turn = ShortTermMemoryConfig(strategy="truncation"), ConversationTurn("question", "answer")
    async with open_backend(url) as sender, open_backend(url) as reader:
        first, other = (one.memory(MemoryKey("acme", "u1", "c1"), config) for one in (sender, reader))
        await first.add_turn(ConversationTurn("before", "answer"))
        replica.pause()
        with pytest.raises(OutcomeUnknown):
            await first.add_turn(turn, turn_id="one")
        # Only the master has it, and shows it to all readers.
        assert len(await other.turns()) == 2
        await other.get_llm_context()
        for memory in (first, other):
            with pytest.raises(OutcomeUnknown):
                await memory.add_turn(turn, turn_id="one")
        replica.go_on()
        for memory in (first, other):
            await confirmed(lambda memory=memory: memory.add_turn(turn, turn_id="one"))
        master.kill()
    replica.ask("REPLICAOF", "NO", "ONE")
    async with open_backend(replica.url) as survivor:
        turns = await survivor.memory(MemoryKey("acme", "u1", "c1"), config).turns()
    assert [one.user_message for one in turns] == ["before", "question"]


async def test_a_script_that_the_server_does_not_know_is_waited_for_once(replicated):
    master, _ = replicated
    driver = await open_at(f"{master.url}?wait_replicas=1")
    master.ask("SCRIPT", "FLUSH")
    master.ask("CONFIG", "RESETSTAT")
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    found = str(master.ask("INFO", "commandstats"))
    await driver.close()
    assert re.search(r"cmdstat_wait'?: ?\W*calls\W+1\b", found), found


async def confirmed(write):
    """Send a write again until it is confirmed."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OutcomeUnknown):
                return await write()


async def test_a_lost_race_needs_no_replica_to_be_known(replicated, short_waits):
    master, replica = replicated
    driver = await open_at(f"{master.url}?wait_replicas=1&deadline_s=30")
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    replica.pause()
    assert await driver.replace(KEY, b"", version="v", expect="another", drop=1, ttl=None) is False
    assert await driver.replace(KEY, b"", version="v", expect=ABSENT, ttl=None) is False
    assert await driver.delete(KEY, expect="another") is False
    assert (await driver.load(KEY)).version == "initial"
    await driver.close()
    replica.go_on()


async def test_a_refused_write_needs_no_replica_to_be_known(server, short_waits):
    driver = await open_at(f"{server.url}?wait_replicas=1&deadline_s=30&max_record_bytes=10")
    with pytest.raises(TooLarge):
        await driver.append(KEY, b"eleven byte", initial_version="initial", ttl=None)
    with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
        await driver.append(KEY, b"ten bytes.", initial_version="initial", ttl=None)
    await driver.close()


async def test_a_user_who_may_not_wait_is_denied_or_told_that_it_was_done(server):
    server.ask("ACL", "SETUSER", "user", "on", ">p", "~stm:*", *PERMISSIONS, "-wait")
    by_user = f"redis://user:p@127.0.0.1:{server.port}?wait_replicas=1"
    with pytest.raises(Denied):
        await open_at(by_user)
    server.ask("ACL", "SETUSER", "user", "+wait")
    driver = await open_at(by_user)
    server.ask("ACL", "SETUSER", "user", "-wait")
    with pytest.raises(OutcomeUnknown, match="done, but the server refused to wait"):
        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert (await driver.load(KEY)).tail == (b"a",)
    await driver.close()


async def test_opening_waits_for_no_replica(start):
    began = time.monotonic()
    driver = await open_at(f"{start().url}?wait_replicas=1&deadline_s=100")
    assert time.monotonic() - began < 30
    await driver.close()


async def test_opening_refuses_a_server_that_cannot_wait_for_its_disk(start):
    server = start()
    with pytest.raises(ConfigurationError, match=r"Redis 7\.2.*appendonly yes"):
        await open_at(f"{server.url}?wait_fsync=true")


@pytest.fixture
def logging_server(start):
    """A server that can wait for its disk."""
    server = start("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
    if not is_at_least(server, 7, 2):
        pytest.skip("WAITAOF came with Redis 7.2")
    return server


async def test_a_write_is_acknowledged_once_it_is_on_the_disk(logging_server):
    driver = await open_at(f"{logging_server.url}?wait_fsync=true")
    for number in range(3):
        await driver.append(KEY, b"%d" % number, initial_version="initial", ttl=None)
    logging_server.kill()
    logging_server.start()
    assert (await driver.load(KEY)).tail == (b"0", b"1", b"2")
    await driver.close()


async def test_a_retry_on_another_connection_waits_for_the_disk_too(logging_server, short_waits):
    url = f"{logging_server.url}?wait_fsync=true&deadline_s=30"
    first, again = await open_at(url), await open_at(url)
    logging_server.ask("CONFIG", "SET", "appendfsync", "no")
    for driver in (first, again):
        with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
            await driver.replace(KEY, b"body", version="v", expect=ANY, ttl=None)
    logging_server.ask("CONFIG", "SET", "appendfsync", "always")
    assert await confirmed(lambda: again.replace(KEY, b"body", version="v", expect=ANY, ttl=None))
    for driver in (first, again):
        await driver.close()


@pytest.mark.parametrize(
    ("safe", "enough"), [([1, 2], True), ([1, 3], True), ([0, 2], False), ([1, 1], False)]
)
def test_the_disks_that_are_asked_for_are_counted_apart(safe, enough):
    safeguard = Safeguard(RedisSettings(wait_fsync=True, wait_replicas=2, deadline_s=1.0))
    assert safeguard.behind == (("WAITAOF", 1, 2, 400),)
    with contextlib.nullcontext() if enough else pytest.raises(OutcomeUnknown):
        assert safeguard.confirmed(7, safe) == 7
