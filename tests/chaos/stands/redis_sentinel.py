"""A Redis master with a replica, which has each write before it is acknowledged, and three sentinels."""

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

SERVICE = "main"

POOL = 8
"""How many connections a pod may have to each server, so that full pools are no leak."""

# In its file, which the sentinels have it rewrite: after a restart it is still what it has become.
_NODE = """\
appendonly yes
appendfsync always
save ""
replica-announce-ip 127.0.0.1
replica-announce-port {port}
repl-diskless-sync no
repl-ping-replica-period 1
repl-timeout 5
{follows}
"""
_SENTINEL = f"""\
sentinel monitor {SERVICE} 127.0.0.1 {{port}} 2
sentinel down-after-milliseconds {SERVICE} 1000
sentinel failover-timeout {SERVICE} 3000
"""


class SentinelStand(Base):
    """All but the final reads goes through the proxies: pods, replication, and what sentinels ask.

    The only replica confirms each write, so whichever server is promoted has all that was acknowledged.
    Until a former master hears that it was deposed, it answers reads, and shows what nobody has confirmed.
    """

    name = "redis-sentinel"
    # Both nodes, each of which was the master, and three sentinels.
    pooled = 5 * (POOL + 1)

    async def _start(self) -> None:
        self.nodes: list[RedisServer] = []
        self._addresses: dict[RedisServer, int] = {}
        follows = ""
        for number in range(2):
            # A port is chosen before the server starts, and the server has to announce the proxy's.
            node = new_server(self.disk.folder / f"node{number}", config="")
            proxy = await self._lead_to(node.port)
            config = _NODE.format(port=proxy.port, follows=follows)
            (self.disk.folder / f"node{number}" / "redis.conf").write_text(config)
            follows = f"replicaof 127.0.0.1 {proxy.port}"
            self._addresses[node] = proxy.port
            self.nodes.append(node)
            await self._run(node)
        self._sentinels: list[RedisServer] = []
        for number in range(3):
            folder = self.disk.folder / f"sentinel{number}"
            config = _SENTINEL.format(port=self._addresses[self.nodes[0]])
            self._sentinels.append(new_server(folder, "--sentinel", config=config))
            await self._run(self._sentinels[-1])
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self._sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}?wait_replicas=1&pool_size={POOL}"
        self.versions = await versions_of(self.nodes[0])
        await self._settle()

    @property
    def direct_url(self) -> str:
        """The present master."""
        port = self._sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]
        (master,) = (node for node in self.nodes if self._addresses[node] == int(port))
        return master.url

    def _faults(self) -> Mapping[str, Fault]:
        return {**redis_faults(self), "failover": self._fail_over, "failover-ordered": self._change_over}

    @contextlib.asynccontextmanager
    async def _fail_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Kill the master, at times while the replica hangs, and wait until the other one is the master."""
        master = await until(self._agreed_master, "one master")
        (replica,) = (node for node in self.nodes if node is not master)
        figures: dict[str, Any] = {"behind": chance.random() < 0.5}
        async with self._mended(figures):
            if figures["behind"]:
                await asyncio.to_thread(replica.pause)
                await asyncio.sleep(chance.uniform(0.1, 1))
            await asyncio.to_thread(master.kill)
            try:
                replica.go_on()

                async def is_promoted() -> bool:
                    return await self._agreed_master() is replica

                await until(is_promoted, "a failover")
                yield figures
            finally:
                await asyncio.to_thread(master.start)

    @contextlib.asynccontextmanager
    async def _change_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Order the sentinels to make the replica the master, while the master goes on."""
        master = await until(self._agreed_master, "one master")
        figures: dict[str, Any] = {}
        async with self._mended(figures):

            async def is_ordered() -> bool:
                # Refused for some seconds after another failover.
                await asked(chance.choice(self._sentinels), "SENTINEL", "FAILOVER", SERVICE)
                return True

            async def is_done() -> bool:
                return await self._agreed_master() is not master

            await until(is_ordered, "an ordered failover")
            await until(is_done, "the end of an ordered failover")
            yield figures

    async def _agreed_master(self) -> RedisServer | None:
        """Return what all sentinels say the master is, if they agree and nothing is wrong."""
        found: set[int] = set()
        for sentinel in self._sentinels:
            state: dict[bytes, bytes] = await asked(sentinel, "SENTINEL", "MASTER", SERVICE)
            if state[b"flags"] != b"master" or state[b"num-other-sentinels"] != b"2":
                return None
            found.add(int(state[b"port"]))
        return next((node for node in self.nodes if found == {self._addresses[node]}), None)

    async def _settle(self) -> None:
        await until(self._is_settled, "a master and its replica")

    async def _is_settled(self) -> bool:
        master = await self._agreed_master()
        if master is None or (await _replication(master))["role"] != "master":
            return False
        (other,) = (node for node in self.nodes if node is not master)
        state = await _replication(other)
        if state["role"] == "master":
            # The sentinels would do it, ten seconds later.
            with contextlib.suppress(redis.RedisError):
                await asked(other, "REPLICAOF", "127.0.0.1", self._addresses[master])
            return False
        if state["master_port"] != self._addresses[master] or state["master_link_status"] != "up":
            return False
        known = [await asked(one, "SENTINEL", "REPLICAS", SERVICE) for one in self._sentinels]
        if not all(known) or any(b"down" in one[b"flags"] for replicas in known for one in replicas):
            return False
        states = [await asked(one, "SENTINEL", "MASTER", SERVICE) for one in self._sentinels]
        self._note_epoch(max(int(state[b"config-epoch"]) for state in states))
        return True


stand = SentinelStand


async def _replication(node: RedisServer) -> dict[str, Any]:
    return await asked(node, "INFO", "replication")
