"""A real cluster of three nodes: the contract, a slot that moves while writers write, a node that dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import redis
from redis import exceptions as client_errors
from redis.asyncio import RedisCluster
from redis.crc import key_slot

from stm_backends import open_backend
from stm_backends.drivers.contract import KEEP, Key, Record, new_version
from stm_backends.errors import Denied, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import Datastore, DriverContract, HandedIn, open_at
from stm_backends.testing.workbench.processes import fold, ledger
from stm_backends_redis import RedisDriver
from stm_backends_redis import driver as driver_module
from stm_backends_redis.cluster import Cluster as Nodes
from tests.services.redis.conftest import CLUSTER_PERMISSIONS, PERMISSIONS, login
from tests.support.apt import Program
from tests.support.clock import virtually
from tests.support.contract import opened
from tests.support.outliving import outlives
from tests.support.places import quick_on
from tests.support.redis_server import KINDS, RedisServer
from tests.support.tenants import SMALL, serve

SLOTS = 16_384
PREFIX = "stm:"


class Cluster:
    """Three masters without replicas, put together by commands of a client."""

    def __init__(self, nodes: Sequence[RedisServer]) -> None:
        self.nodes = nodes
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    def form(self) -> None:
        """Give each node its share of the slots and make them known to each other."""
        share = -(-SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share)))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        until = time.monotonic() + 60
        while not all(self._is_whole(node) for node in self.nodes):
            assert time.monotonic() < until, "the nodes did not become a cluster"
            time.sleep(0.1)

    def owner(self, slot: int) -> RedisServer:
        share = -(-SLOTS // len(self.nodes))
        return self.nodes[slot // share]

    def _is_whole(self, node: RedisServer) -> bool:
        info = str(node.ask("CLUSTER", "INFO"))
        slots = node.ask("CLUSTER", "SLOTS")
        assert isinstance(slots, list)
        return "cluster_state:ok" in info and len(slots) == len(self.nodes)

    async def move(self, slot: int, source: RedisServer, target: RedisServer, *, pause: float) -> int:
        """Move a slot with all its keys, one at a time, as `redis-cli --cluster reshard` does."""
        self.begin_move(slot, source, target)
        moved = 0
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
            await asyncio.sleep(pause)
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            moved += 1
        self.end_move(slot, source, target)
        return moved

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", id_of(target))

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        for node in (target, source, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", id_of(target))


def id_of(node: RedisServer) -> str:
    return bytes(node.ask("CLUSTER", "MYID")).decode()


@contextlib.contextmanager
def formed(server_program: Program, directories) -> Iterator[Cluster]:
    """Yield a new cluster."""
    nodes: list[RedisServer] = []
    try:
        for _ in range(3):
            options = ("--save", "", "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            directory = directories.mktemp("node")
            nodes.append(
                RedisServer(server_program.path, directory, *options, environment=server_program.environment)
            )
            nodes[-1].start()
        cluster = Cluster(nodes)
        cluster.form()
        yield cluster
    finally:
        for node in nodes:
            node.stop()


@pytest.fixture(scope="module", params=quick_on("", KINDS))
def server_program(request, obtained):
    return obtained(request.param)


@pytest.fixture(scope="module")
def cluster(server_program, tmp_path_factory):
    with formed(server_program, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
def fragile(server_program, tmp_path_factory):
    """A cluster of the test's own, of which one node may fail without the others."""
    with formed(server_program, tmp_path_factory) as cluster:
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster


def place_of(key: Key) -> str:
    return f"{PREFIX}{{{key.scope}}}:{key.name}"


def datastore_on(cluster: Cluster) -> Datastore:
    def ask(key, *command):
        return cluster.owner(key_slot(place_of(key).encode())).ask(command[0], place_of(key), *command[1:])

    async def damage(key):
        ask(key, "RPOP")

    async def peek(key):
        version, measure, body, *tail = ask(key, "LRANGE", 0, -1) or (None, b"", b"")
        body = None if measure.endswith(b"-1") else body
        return version and Record(version.decode(), body, tuple(tail))

    async def handed_in():
        client = RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, decode_responses=True)
        return HandedIn(driver=RedisDriver(client=client), is_open=client.ping, close=client.aclose)

    return Datastore(
        open=functools.partial(open_at, cluster.url, max_entry_bytes=50_000, max_record_bytes=200_000),
        histories=5,
        damage=damage,
        peek=peek,
        handed_in=handed_in,
        server=f"Redis Cluster {server_version(cluster.nodes[0])}",
    )


@pytest.fixture(scope="module")
def oldest_cluster(obtained, tmp_path_factory):
    with formed(obtained(KINDS[0]), tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=quick_on("", KINDS[1:]))
def newer_cluster(request, obtained, tmp_path_factory):
    with formed(obtained(request.param), tmp_path_factory) as cluster:
        yield cluster


@pytest.mark.full
class TestRedisDriverOnACluster(DriverContract):
    @pytest.fixture
    def datastore(self, oldest_cluster):
        return datastore_on(oldest_cluster)


class TestRedisDriverOnANewerCluster(DriverContract):
    quick: ClassVar = True  # the slow checks are asked of the same driver on a cluster of an older server

    @pytest.fixture
    def datastore(self, newer_cluster):
        return datastore_on(newer_cluster)


def server_version(node: RedisServer) -> str:
    with contextlib.closing(redis.Redis(port=node.port)) as client:
        return client.info("server")["redis_version"]


async def until_done(write):
    """Send a write again for as long as it is said not to have been done; return its answer."""
    for _ in range(50):
        with contextlib.suppress(Unavailable):
            return await write()
    raise AssertionError("refused for too long")


async def test_nothing_is_lost_or_doubled_while_a_slot_moves(cluster):
    driver, other = await open_at(cluster.url), await open_at(cluster.url)
    scope = "tenant:user:moving"
    slot = key_slot(f"{PREFIX}{{{scope}}}".encode())
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    standing = [Key(scope, f"standing{n}") for n in range(4)]
    for key in standing:
        await driver.append(key, b"start", initial_version=new_version(), ttl=None)
    moving = True
    done: dict[Key, list[str]] = {key: ["start"] for key in standing}
    created: list[str] = []

    async def write(label: int, key: Key) -> None:
        number = 0
        while moving or number < 5:
            entry = f"{label}:{number}"
            writer = (driver, other)[number % 2]
            await until_done(
                lambda entry=entry, writer=writer: writer.append(
                    key, entry.encode(), initial_version=new_version(), ttl=None
                )
            )
            done[key].append(entry)
            number += 1
            if number % 5 == 0:
                await until_done(lambda: fold(driver, key, 3))

    async def create() -> None:
        while moving:
            name = f"created{len(created):03}"
            await until_done(
                lambda name=name: driver.append(
                    Key(scope, name), b"x", initial_version=new_version(), ttl=600
                )
            )
            created.append(name)
            await asyncio.sleep(0.02)

    async def look() -> None:
        key = standing[0]
        while moving:
            before = list(done[key])
            assert (await until_done(lambda: ledger(driver, key)))[: len(before)] == before
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        for label, key in enumerate(standing):
            tasks.create_task(write(label, key))
        tasks.create_task(create())
        tasks.create_task(look())
        await asyncio.sleep(0.2)
        moved = await cluster.move(slot, source, target, pause=0.05)
        await asyncio.sleep(0.2)
        moving = False
    assert moved >= len(standing) + 1, "the records and their index have moved"
    assert target.ask("CLUSTER", "COUNTKEYSINSLOT", slot) == len(standing) + len(created) + 1
    for key in standing:
        assert await ledger(driver, key) == done[key]
    page = await driver.scan(scope, limit=10_000)
    assert list(page.names) == sorted([*created, *(key.name for key in standing)])
    await driver.close()
    await other.close()


async def test_writes_are_refused_while_a_record_has_moved_without_its_index(cluster):
    # Refusals are tried again for four fifths of it; the rest is for a machine that is busy.
    driver = await open_at(cluster.url, deadline_s=4)
    key = Key("tenant:user:split", "conversation")
    slot = key_slot(place_of(key).encode())
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    await driver.append(key, b"a", initial_version="initial", ttl=None)
    before = await driver.load(key)
    cluster.begin_move(slot, source, target)
    source.ask("MIGRATE", "127.0.0.1", target.port, place_of(key), 0, 5000)
    with pytest.raises(Unavailable, match="moving"):
        await driver.append(key, b"b", initial_version="initial", ttl=60)
    with pytest.raises(Unavailable, match="moving"):
        await driver.replace(key, b"", version="v", expect="initial", drop=1, ttl=KEEP)
    with pytest.raises(Unavailable, match="moving"):
        await driver.replace(key, b"", version="v", expect="initial", rewrite=(b"A",), ttl=KEEP)
    with pytest.raises(Unavailable, match="moving"):
        await driver.append(Key(key.scope, "new"), b"b", initial_version="initial", ttl=None)
    assert await driver.load(key) == before, "one key alone can be read wherever it is"
    assert (await driver.scan(key.scope, limit=9)).names == (key.name,)
    source.ask("MIGRATE", "127.0.0.1", target.port, f"{PREFIX}{{{key.scope}}}", 0, 5000)
    assert await driver.append(key, b"b", initial_version="initial", ttl=None) == 2, (
        "both are there, though not officially"
    )
    cluster.end_move(slot, source, target)
    assert await driver.append(key, b"c", initial_version="initial", ttl=None) == 3
    await driver.close()


async def test_the_last_name_of_a_scope_goes_while_its_slot_moves(cluster):
    driver = await open_at(cluster.url)
    scope = "tenant:user:last"
    erased, expiring = Key(scope, "erased"), Key(scope, "expiring")
    index = f"{PREFIX}{{{scope}}}"
    slot = key_slot(index.encode())
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    await driver.append(erased, b"a", initial_version="initial", ttl=None)
    cluster.begin_move(slot, source, target)
    assert await driver.delete(erased)
    assert await driver.load(erased) is None
    assert await driver.scan(scope, limit=9) == ((), None)
    cluster.end_move(slot, source, source)

    await driver.append(expiring, b"a", initial_version="initial", ttl=0.001)
    source.ask("PERSIST", index)
    await asyncio.sleep(0.01)
    assert await driver.load(expiring) is None
    cluster.begin_move(slot, source, target)
    assert await driver.scan(scope, limit=9) == ((), None)
    cluster.end_move(slot, source, source)
    await driver.close()


class Node:
    """A node of a cluster of one, which moves its slots away, and to where nothing is known."""

    def __init__(self, answers: Sequence[object]) -> None:
        self.answers = iter(answers)
        self.is_closed = False
        self.asked = asyncio.Event()

    async def exchange(self, key, *commands, apart=False, asking=False):
        if commands[0] == ("CLUSTER", "SLOTS"):
            return [[[0, SLOTS - 1, [b"here", 1]]]]
        await asyncio.sleep(0)
        self.asked.set()
        return [next(self.answers, client_errors.TryAgainError("TRYAGAIN"))]

    async def close(self):
        while not self.asked.is_set():  # what is under way ends first
            await self.asked.wait()
        self.is_closed = True


@pytest.mark.parametrize("answers", [[1], [1, client_errors.MovedError("0 there:1")]])
async def test_a_retry_while_the_driver_closes_leaves_no_connection(monkeypatch, answers):
    nodes: list[Node] = []

    def connect(_):
        async def seeds():
            return [("here", 1)]

        def node_at(_):
            nodes.append(Node([] if nodes else answers))
            return nodes[-1]

        return Nodes(node_at, seeds)

    monkeypatch.setattr(driver_module, "make_client", connect)
    driver = RedisDriver()
    await driver.open()
    nodes[0].asked.clear()
    loading = asyncio.create_task(driver.load(Key("scope", "name")))
    await asyncio.sleep(0)
    await driver.close()
    with pytest.raises(Unavailable):
        await loading
    assert [node.is_closed for node in nodes] == [True] * len(nodes)


@pytest.mark.parametrize("answers", [[], [[b"version", b"1 200000 -1"], [b"version", b"1 200000 -1", b""]]])
@virtually
async def test_a_read_that_is_refused_until_the_end_is_retried_and_ends_with_the_reason(monkeypatch, answers):
    async def seeds():
        return [("here", 1)]

    node = Node([1, *answers])
    monkeypatch.setattr(driver_module, "make_client", lambda _: Nodes(lambda _: node, seeds))
    driver = RedisDriver()
    await driver.open()
    for reading in (driver.load(Key("scope", "name")), driver.scan("scope", limit=1)):
        with pytest.raises(Unavailable, match="failing over"):
            await reading
    await driver.close()


class Pod:
    """The one node of a cluster, at an address that changes. It closes when the test lets it, or fails to."""

    made: ClassVar[list[Pod]]
    address: ClassVar[bytes]

    def __init__(self, address) -> None:
        self.may_answer, self.may_close, self.fails = asyncio.Event(), asyncio.Event(), False
        self.may_answer.set()
        self.is_closed = False
        Pod.made.append(self)

    async def exchange(self, key, *commands, apart=False, asking=False):
        if commands[0] == ("CLUSTER", "SLOTS"):
            return [[[0, SLOTS - 1, [Pod.address, 1]]]]
        await self.may_answer.wait()
        return ["answer"]

    async def close(self):
        await self.may_answer.wait()  # what is under way ends first
        try:
            await self.may_close.wait()
        finally:
            self.is_closed = True
            if self.fails:
                raise OSError


@pytest.fixture
async def pods():
    """A cluster of one such node, the node that is asked first, and what moves it to another address."""
    Pod.made, Pod.address = [], b"first"

    async def seeds():
        return [("seed", 1)]

    nodes = Nodes(Pod, seeds)

    async def move(address):
        Pod.address = address
        nodes._looked_at = -1e9  # noqa: SLF001 -- as if a second had passed
        nodes._look_again()  # noqa: SLF001
        await nodes._topology()  # noqa: SLF001

    assert await nodes.exchange(b"key", ("GET",)) == ["answer"]
    return nodes, move


async def test_a_node_that_left_is_closed_once_it_has_answered(pods):
    nodes, move = pods
    seed, first = Pod.made
    first.may_answer.clear()
    under_way = asyncio.create_task(nodes.exchange(b"key", ("GET",)))
    await asyncio.sleep(0)
    await move(b"second")
    first.may_close.set()
    await asyncio.sleep(0)
    assert not first.is_closed
    first.may_answer.set()
    assert await under_way == ["answer"]
    await asyncio.sleep(0)
    assert first.is_closed
    assert not seed.is_closed, "it is asked first for the topology"
    assert await nodes.exchange(b"key", ("GET",)) == ["answer"]
    assert len(Pod.made) == 3


async def test_a_close_waits_for_a_node_that_left(pods):
    nodes, move = pods
    await move(b"second")
    first = Pod.made[1]
    closing = asyncio.create_task(nodes.close())
    await asyncio.sleep(0)
    for other in Pod.made:
        other.may_close.set() if other is not first else None
    await asyncio.sleep(0.01)
    assert not closing.done()
    first.may_close.set()
    await closing
    assert [pod.is_closed for pod in Pod.made] == [True] * len(Pod.made)


@pytest.mark.parametrize("within", [0, 0.01])
async def test_a_close_that_is_cancelled_ends_nodes_that_left_too(pods, within):
    nodes, move = pods
    await move(b"second")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(within):
            await nodes.close()
    assert [pod.is_closed for pod in Pod.made] == [True] * len(Pod.made)


async def test_a_node_that_fails_to_close_disturbs_nothing(pods, caplog):
    nodes, move = pods
    for pod in Pod.made:
        pod.fails = True
        pod.may_close.set()
    await move(b"second")
    await asyncio.sleep(0.01)
    assert await nodes.exchange(b"key", ("GET",)) == ["answer"]
    for pod in Pod.made:
        pod.may_close.set()
    await nodes.close()
    assert [pod.is_closed for pod in Pod.made] == [True] * len(Pod.made)
    gc.collect()
    assert not caplog.records, "an exception that was never retrieved"


async def test_masters_that_left_are_connected_to_again_until_the_next_look(pods):
    """A purge goes on with the nodes that it found at its beginning."""
    nodes, move = pods
    (master,) = await nodes.masters()
    await move(b"second")
    for pod in Pod.made:
        pod.may_close.set()
    assert await master(b"", ("SCAN",)) == ["answer"]
    await move(b"third")
    for pod in Pod.made:
        pod.may_close.set()
    await nodes.close()
    assert [pod.is_closed for pod in Pod.made] == [True] * len(Pod.made)


@contextlib.asynccontextmanager
async def in_hand(cluster):
    """Yield a driver on a client of the test's own."""
    async with RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port) as client:
        driver = RedisDriver(client=client)
        yield driver
        await driver.close()


@contextlib.asynccontextmanager
async def by_url(cluster):
    driver = await open_at(cluster.url)
    yield driver
    await driver.close()


@pytest.mark.parametrize("opened", [by_url, in_hand])
async def test_moved_records_are_read_and_written_while_their_slot_moves(cluster, opened):
    key = Key(f"tenant:user:{opened.__name__}", "conversation")
    slot = key_slot(place_of(key).encode())
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    async with opened(cluster) as driver:
        await driver.append(key, b"0", initial_version="initial", ttl=None)
        # Several connections to each node, so that two commands in a row seldom have the same one.
        names = [Key(f"tenant:user{n}:{opened.__name__}", "conversation") for n in range(48)]
        await asyncio.gather(*(driver.load(name) for name in names))
        cluster.begin_move(slot, source, target)
        for place in (place_of(key), f"{PREFIX}{{{key.scope}}}"):
            source.ask("MIGRATE", "127.0.0.1", target.port, place, 0, 5000)
        for number in range(1, 20):
            assert await driver.append(key, b"%d" % number, initial_version="initial", ttl=None) == number + 1
            records = await asyncio.gather(*(driver.load(key) for _ in range(8)))
            assert {len(record.tail) for record in records} == {number + 1}
        assert (await driver.scan(key.scope, limit=9)).names == (key.name,)
        assert source.ask("CLUSTER", "COUNTKEYSINSLOT", slot) == 0
        cluster.end_move(slot, source, target)
        assert await driver.delete(key)


async def test_a_dead_node_affects_its_own_slots_only(fragile):
    cluster = fragile
    driver = await open_at(cluster.url, deadline_s=2.0)
    keys = [Key(f"tenant:user{n}:memory", "conversation") for n in range(12)]
    for key in keys:
        await driver.append(key, b"a", initial_version="initial", ttl=None)
    dead = cluster.nodes[2]
    lost = [key for key in keys if cluster.owner(key_slot(place_of(key).encode())) is dead]
    healthy = [key for key in keys if key not in lost]
    assert lost
    assert healthy
    for node in cluster.nodes:
        node.ask("CONFIG", "RESETSTAT")
    dead.kill()
    began, failed = time.monotonic(), 0
    for _ in range(30):
        for key in lost:
            with pytest.raises(StorageError) as caught:
                await driver.append(key, b"b", initial_version="initial", ttl=None)
            assert key.scope not in str(caught.value)
            failed += 1
        # Each at once, and never in doubt.
        await asyncio.gather(
            *(driver.append(key, b"b", initial_version="initial", ttl=None) for key in healthy)
        )
    seconds = time.monotonic() - began
    used = [node.ask("INFO", "commandstats") for node in cluster.nodes[:2]]
    # `cluster|slots` from 7.0 on.
    looks = sum(stats.get(name, {"calls": 0})["calls"] for stats in used for name in CLUSTER_SLOTS)
    assert looks <= 2 + seconds < failed, "what fails does not have the topology read each time"
    assert not any("cmdstat_command" in stats for stats in used)

    # The node comes back; writers of other slots do not notice.
    back = asyncio.Event()

    async def write(key: Key) -> int:
        count = 0
        while not back.is_set():
            await driver.append(key, b"c", initial_version="initial", ttl=None)
            count += 1
        return count

    async with asyncio.TaskGroup() as tasks:
        writers = [tasks.create_task(write(key)) for key in healthy]
        try:
            await asyncio.to_thread(dead.start)
            async with asyncio.timeout(60):
                for key in lost:
                    while True:
                        with contextlib.suppress(StorageError):
                            await driver.append(key, b"c", initial_version="initial", ttl=None)
                            break
                        await asyncio.sleep(0.05)
        finally:
            back.set()
    for key, writer in zip(healthy, writers, strict=True):
        assert len((await driver.load(key)).tail) == 31 + writer.result()
    await driver.close()


def eventually(is_so) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


CLUSTER_SLOTS = ("cmdstat_cluster", "cmdstat_cluster|slots")


@pytest.fixture
def replica(fragile, server_program, tmp_path):
    """A replica of the first node of that cluster."""
    master = fragile.nodes[0]
    options = ("--save", "", "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    # On a busy machine an election may take longer than a replica may be without its master by default.
    options += ("--cluster-replica-validity-factor", "0")
    replica = RedisServer(server_program.path, tmp_path, *options, environment=server_program.environment)
    replica.start()
    replica.ask("CLUSTER", "MEET", "127.0.0.1", master.port)
    eventually(lambda: id_of(master) in str(replica.ask("CLUSTER", "NODES")))
    replica.ask("CLUSTER", "REPLICATE", id_of(master))
    eventually(lambda: "slave0" in master.ask("INFO", "replication"))
    eventually(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up")
    eventually(lambda: all(id_of(replica) in str(node.ask("CLUSTER", "NODES")) for node in fragile.nodes))
    yield replica
    replica.stop()


def key_on(cluster: Cluster, node: RedisServer) -> Key:
    keys = (Key(f"tenant:user{n}:memory", "conversation") for n in range(100))
    return next(key for key in keys if cluster.owner(key_slot(place_of(key).encode())) is node)


async def test_what_a_replica_has_confirmed_survives_its_promotion(fragile, replica, short_waits):
    key = key_on(fragile, fragile.nodes[0])
    driver = await open_at(fragile.url, wait_replicas=1, deadline_s=5.0)
    assert await driver.append(key, b"a", initial_version="initial", ttl=None) == 1
    replica.pause()
    with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
        await driver.replace(key, b"body", version="v", expect="initial", drop=1, ttl=None)
    replica.go_on()
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OutcomeUnknown):
                assert await driver.replace(key, b"body", version="v", expect="initial", drop=1, ttl=None)
                break
    # It hangs, so that nothing but the silence tells that another node has its slots now.
    fragile.nodes[0].pause()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(StorageError):
                assert await driver.load(key) == Record("v", b"body", ())
                break
    with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
        await driver.append(key, b"b", initial_version="initial", ttl=None)
    assert replica.ask("INFO", "replication")["role"] == "master"
    fragile.nodes[0].go_on()
    await driver.close()


@pytest.mark.full
async def test_a_conversation_that_folds_outlives_the_node_of_its_record(fragile, replica):
    """Its pages are on other nodes, or on the same."""
    user = key_on(fragile, fragile.nodes[0]).scope.split(":")[1]

    async def fail_over() -> None:
        master = fragile.nodes[0]
        # No acknowledgement waits for the replica, which not every node has.
        eventually(
            lambda: (
                replica.ask("INFO", "replication")["slave_repl_offset"]
                >= master.ask("INFO", "replication")["master_repl_offset"]
            )
        )
        await asyncio.to_thread(master.kill)

    async with open_backend(f"{fragile.url}?deadline_s=2") as backend:
        await outlives(backend, fail_over, user=user, quiet=True)
    assert replica.ask("INFO", "replication")["role"] == "master"


async def test_no_connection_to_a_node_that_left_is_kept(fragile):
    first, second, leaving = fragile.nodes
    key = key_on(fragile, leaving)

    def connections():
        return leaving.ask("INFO", "clients")["connected_clients"]

    before = connections()
    async with opened(f"redis+cluster://127.0.0.1:{first.port}", deadline_s=2.0) as driver:
        assert await driver.load(key) is None
        assert connections() == before + 1
        for node in (first, second):
            node.ask("CLUSTER", "FORGET", id_of(leaving))
        leaving.ask("CLUSTER", "RESET", "HARD")
        async with asyncio.timeout(30):
            while connections() != before:
                with contextlib.suppress(StorageError):
                    await driver.load(key)
                await asyncio.sleep(0.1)


async def test_a_hanging_node_takes_no_connections_from_the_others(fragile):
    driver = await open_at(fragile.url, pool_size=2, deadline_s=2.0)
    keys = [Key(f"tenant:user{n}:memory", "conversation") for n in range(12)]
    frozen = fragile.nodes[1]
    lost = [key for key in keys if fragile.owner(key_slot(place_of(key).encode())) is frozen]
    frozen.pause()
    waiting = [asyncio.ensure_future(driver.load(key)) for key in lost for _ in range(3)]
    await asyncio.sleep(0.1)
    for key in keys:
        if key not in lost:
            assert await driver.append(key, b"a", initial_version="initial", ttl=None) == 1
    assert not any(load.done() for load in waiting)
    for load in waiting:
        with pytest.raises(Unavailable):
            await load
    frozen.go_on()
    await driver.close()


async def test_a_read_that_the_cluster_refuses_ends_in_time_with_the_reason(fragile):
    # Longer than it may take until the topology is read again.
    driver = await open_at(fragile.url, deadline_s=3.0)
    key = Key("tenant:user:memory", "conversation")
    slot = key_slot(place_of(key).encode())
    await driver.append(key, b"a", initial_version="initial", ttl=None)
    for node in fragile.nodes:
        node.ask("CLUSTER", "DELSLOTS", slot)
    with pytest.raises(Unavailable, match="failing over"):
        await driver.load(key)
    loading = asyncio.ensure_future(driver.load(key))
    await asyncio.sleep(0.1)
    fragile.owner(slot).ask("CLUSTER", "ADDSLOTS", slot)
    assert (await loading).tail == (b"a",)
    await driver.close()


async def test_one_reachable_node_is_enough_to_find_the_others(cluster, unused_port):
    driver = await open_at(f"redis+cluster://127.0.0.1:{unused_port},127.0.0.1:{cluster.nodes[1].port}")
    for number in range(6):
        key = Key(f"tenant:finder{number}:memory", "conversation")
        assert await driver.append(key, b"a", initial_version="initial", ttl=None) == 1
    await driver.close()
    with pytest.raises(Unavailable, match="no node of the cluster"):
        await open_at(f"redis+cluster://127.0.0.1:{unused_port}")


async def test_the_permissions_of_the_readme_are_enough_for_a_cluster(cluster):
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "enough", "on", ">p", "~stm:*", *PERMISSIONS, *CLUSTER_PERMISSIONS)
    driver = await open_at(cluster.url, **login("enough"))
    for number in range(6):
        key = Key(f"tenant:allowed{number}:memory", "conversation")
        assert await driver.append(key, b"a", initial_version="initial", ttl=60) == 1
        assert (await driver.scan(key.scope, limit=1)).names == (key.name,)
    await driver.close()


async def test_names_of_expired_records_are_purged_on_all_masters(cluster):
    driver = await open_at(cluster.url)
    scopes = [f"purged:{number}:memory" for number in range(12)]
    for scope in scopes:
        index = f"{PREFIX}{{{scope}}}"
        owner = cluster.owner(key_slot(index.encode()))
        for name in ("a", "b"):
            owner.ask("ZADD", index, 0, f"{name}\x001")
    assert len({cluster.owner(key_slot(f"{PREFIX}{{{scope}}}".encode())) for scope in scopes}) == 3
    found = await driver.expired()
    assert found >= 24
    assert await driver.purge(found + 100) >= 24
    assert await driver.expired() == 0
    await driver.close()


async def test_a_user_of_one_tenant_is_served_by_a_cluster_too(cluster):
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "acme", "on", ">p", "~stm:{acme:*", *PERMISSIONS, *CLUSTER_PERMISSIONS)
        node.ask("ACL", "LOG", "RESET")
    async with open_backend(cluster.url, **login("acme"), max_entry_bytes=SMALL) as backend:
        await serve(backend, "acme")
        with pytest.raises(Denied):
            await serve(backend, "victim")
