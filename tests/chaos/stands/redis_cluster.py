"""A Redis Cluster of three masters, each with a replica that has each write before it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import redis

from tests.chaos.stands import Fault
from tests.chaos.stands.common import Base, asked, until
from tests.chaos.stands.redis import new_server, redis_faults, versions_of
from tests.support.redis_server import RedisServer

SLOTS = 16_384
MASTERS = 3

POOL = 8
"""How many connections a pod may keep to each node. A write that waits for a replica needs one of its own."""

_NODE = """\
appendonly yes
appendfsync always
save ""
cluster-enabled yes
cluster-node-timeout 2000
cluster-require-full-coverage no
cluster-allow-replica-migration no
cluster-announce-ip 127.0.0.1
cluster-announce-port {port}
cluster-announce-bus-port {bus}
repl-diskless-sync no
repl-ping-replica-period 1
repl-timeout 5
"""


class ClusterStand(Base):
    """Clients and replicas go through the proxies; what the nodes tell each other does not.

    The only replica of a master confirms each write, so whichever of the two is promoted has all that was
    acknowledged.
    """

    name = "redis-cluster"
    pooled = 2 * MASTERS * (POOL + 1)

    async def _start(self) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(2 * MASTERS):
            folder = self.disk.folder / f"node{number}"
            # A port is chosen before the server starts, and the server has to announce the proxy's.
            node = new_server(folder, config="")
            proxy = await self._lead_to(node.port)
            config = _NODE.format(port=proxy.port, bus=node.port + 10_000)
            (folder / "redis.conf").write_text(config)
            self.nodes.append(node)
            await self._run(node)
        first = self.nodes[0]
        share = -(-SLOTS // MASTERS)
        for number, node in enumerate(self.nodes):
            await asked(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < MASTERS:
                last = min(SLOTS, (number + 1) * share) - 1
                await asked(node, "CLUSTER", "ADDSLOTSRANGE", number * share, last)
            if node is not first:
                await asked(first, "CLUSTER", "MEET", "127.0.0.1", node.port, node.port + 10_000)
        for number, node in enumerate(self.nodes[MASTERS:]):
            await self._follow(node, self.nodes[number])
        hosts = ",".join(proxy.address for proxy in self.proxies)
        self.url = f"redis+cluster://{hosts}?wait_replicas=1&pool_size={POOL}"
        self.versions = await versions_of(first)
        await self._settle()

    async def _follow(self, replica: RedisServer, master: RedisServer) -> None:
        name = await _name(master)

        async def follows() -> bool:
            # Refused until they know each other.
            await asked(replica, "CLUSTER", "REPLICATE", name)
            return True

        await until(follows, "nodes that know each other")

    @property
    def direct_url(self) -> str:
        """Only through the proxies: clients go where the nodes say that they are."""
        return self.url.partition("?")[0]

    def _faults(self) -> Mapping[str, Fault]:
        return {
            **redis_faults(self),
            "failover": self._fail_over,
            "failover-ordered": self._change_over,
            "slot-moved": self._move,
        }

    @contextlib.asynccontextmanager
    async def _fail_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Kill a master, at times while its replica hangs, and wait until that takes over."""
        master, replica = chance.choice(await self._settled_pairs())
        figures: dict[str, Any] = {"behind": chance.random() < 0.5}
        async with self._mended(figures):
            if figures["behind"]:
                await asyncio.to_thread(replica.pause)
                await asyncio.sleep(chance.uniform(0.1, 1))
            await asyncio.to_thread(master.kill)
            try:
                replica.go_on()
                await self._becomes_master(replica)
                yield figures
            finally:
                await asyncio.to_thread(master.start)

    @contextlib.asynccontextmanager
    async def _change_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Order a replica to take over, with the consent of its master or without."""
        _, replica = chance.choice(await self._settled_pairs())
        figures: dict[str, Any] = {"how": chance.choice(("", "FORCE", "TAKEOVER"))}
        async with self._mended(figures):
            await asked(replica, "CLUSTER", "FAILOVER", *filter(None, [figures["how"]]))
            await self._becomes_master(replica)
            yield figures

    @contextlib.asynccontextmanager
    async def _move(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Move a slot that is in use to another master, one key after the other."""
        masters = [master for master, _ in await self._settled_pairs()]
        source, slot = await _slot_in_use(chance, masters)
        target = chance.choice([master for master in masters if master is not source])
        figures: dict[str, Any] = {"slot": slot, "keys": 0}
        async with self._mended(figures):
            await asked(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", await _name(source))
            await asked(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", await _name(target))

            async def move(pause: float) -> None:
                while keys := await asked(source, "CLUSTER", "GETKEYSINSLOT", slot, 1):
                    await asyncio.sleep(chance.uniform(0, pause))
                    with contextlib.suppress(redis.ResponseError):  # it may be too busy, or the disk too slow
                        await asked(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
                        figures["keys"] += 1

            moving = asyncio.ensure_future(move(seconds / 4))
            try:
                yield figures
            finally:
                moving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await moving
                await move(0)
                name = await _name(target)
                for node in (target, source, *masters):
                    await asked(node, "CLUSTER", "SETSLOT", slot, "NODE", name)

    async def _becomes_master(self, node: RedisServer) -> None:
        async def is_master() -> bool:
            return (await asked(node, "INFO", "replication"))["role"] == "master"

        await until(is_master, "a failover")

    async def _pairs(self) -> list[tuple[RedisServer, RedisServer]]:
        """Return the masters with their replicas."""
        pairs: list[tuple[RedisServer, RedisServer]] = []
        at = {proxy.port: node for node, proxy in zip(self.nodes, self.proxies, strict=True)}
        for node in self.nodes:
            state = await asked(node, "INFO", "replication")
            if state["role"] == "slave" and state["master_link_status"] == "up":
                pairs.append((at[state["master_port"]], node))
        return pairs

    async def _settled_pairs(self) -> list[tuple[RedisServer, RedisServer]]:
        """Return the masters with their replicas, once a network that fails has let them find each other."""
        await self._settle()
        return self._settled

    async def _settle(self) -> None:
        await until(self._is_settled, "three masters with their replicas")

    async def _is_settled(self) -> bool:
        pairs = await self._pairs()
        if len({master for master, _ in pairs}) != MASTERS or len(pairs) != MASTERS:
            return False
        ranges = []
        for node in self.nodes:
            info = str(await asked(node, "CLUSTER", "INFO"))
            if "cluster_state:ok" not in info or "cluster_slots_ok:16384" not in info:
                return False
            # In any order, and each node has its own idea of it.
            slots = await asked(node, "CLUSTER", "SLOTS")
            ranges.append(sorted((first, last, len(nodes), nodes[0][1]) for first, last, *nodes in slots))
            if any(replicas != 2 for _, _, replicas, _ in ranges[-1]):
                return False
        if any(one != ranges[0] for one in ranges):
            return False
        for master, _ in pairs:
            # What was moved here has a replica too, before the next server dies.
            await asked(master, "WAIT", 1, 1000)
        self._note_epoch(frozenset(master for master, _ in pairs))
        self._settled = pairs
        return True


stand = ClusterStand


async def _name(node: RedisServer) -> str:
    return bytes(await asked(node, "CLUSTER", "MYID")).decode()


async def _slot_in_use(chance: random.Random, masters: list[RedisServer]) -> tuple[RedisServer, int]:
    """Return a master and one of its slots that has keys, if any has."""
    for master in chance.sample(masters, len(masters)):
        if key := await asked(master, "RANDOMKEY"):
            return master, await asked(master, "CLUSTER", "KEYSLOT", key)
    return masters[0], (await asked(masters[0], "CLUSTER", "SLOTS"))[0][0]
