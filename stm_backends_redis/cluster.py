"""A Redis Cluster: finding the node that has a key, and following a key that has moved.

The client library's own cluster client is not used for this. It sends ASKING and the following command on
different connections, so a key that has moved ahead of its slot is often not found. After each failed call,
it also reads the whole topology again, or closes the connections of all nodes.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from redis import exceptions as client
from redis.crc import key_slot

from stm_backends.errors import Denied, StorageError, Unavailable
from stm_backends_redis.errors import Unreachable, meaning
from stm_backends_redis.servers import Command, Exchange, Node
from stm_backends_redis.settings import Address

Seeds: TypeAlias = Callable[[], Awaitable[Iterable[Address]]]

_PAUSE_S: Final = 1.0
"""Minimum number of seconds between two reads of the topology, even if many calls fail."""

_PATIENCE_S: Final = 2.0
"""The time limit of one node for returning the topology, in seconds."""

_REDIRECTIONS: Final = 5
"""Maximum number of redirections that a command follows before it counts as refused for the moment."""

_UNNAMED: Final = ("", "?")
"""The host that a node returns if it does not know its name: the caller uses the node's own address."""


class Cluster:
    """The nodes of a cluster.

    `connect` connects to a node, `seeds` returns the nodes to ask first, and `remap` maps an address
    announced by the cluster to one that can be reached from here.
    """

    is_cluster = True

    def __init__(
        self,
        connect: Callable[[Address], Node],
        seeds: Seeds,
        *,
        remap: Callable[[Address], Address] = lambda address: address,
    ) -> None:
        self._connect = connect
        self._seeds = seeds
        self._remap = remap
        self._nodes: dict[Address, Node] = {}
        self._owners: dict[int, Address] = {}
        self._answered: set[Address] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._look: asyncio.Task[None] | None = None
        self._looked_at = -math.inf

    async def exchange(self, key: bytes, *commands: Command, apart: bool = False) -> list[Any]:
        """Send commands to the node that has this key, following redirections of the first command."""
        if not self._owners:
            await self._topology()
        slot = key_slot(key)
        address = self._owners.get(slot)
        if address is None:
            self._look_again()
            raise client.ClusterDownError("no node has this slot")
        asking = False
        for _ in range(_REDIRECTIONS):
            try:
                node = self._node(address)
                answers = await node.exchange(key, *commands, apart=apart, asking=asking)
            except (client.ConnectionError, client.TimeoutError, OSError, asyncio.CancelledError) as error:
                self._look_again(address)
                what = meaning(error)
                if address not in self._answered and what and what[0] is Unavailable:
                    raise Unreachable from error
                raise
            self._answered.add(address)
            answer = answers[0]
            if isinstance(answer, client.AskError):  # MOVED is a subclass
                where: Any = answer
                address = self._address(where.host, where.port, told_by=address)
                asking = not isinstance(answer, client.MovedError)
                if not asking:
                    self._owners[slot] = address
                    self._look_again()
                continue
            if isinstance(answer, client.ClusterDownError):
                self._look_again(address)
            return answers
        raise client.ClusterError("redirected too many times")

    async def masters(self) -> Sequence[Exchange]:
        """Return a sender for each node that has slots; it connects again if the node was left meanwhile."""
        if not self._owners:
            await self._topology()
        return [functools.partial(self._ask, address) for address in dict.fromkeys(self._owners.values())]

    async def close(self) -> None:
        """Wait for operations in progress, each limited by its deadline, and close the connections."""
        # An operation in progress may be redirected to another node.
        while self._look or self._nodes or self._leaving:
            look, self._look, self._owners = self._look, None, {}
            if look is not None:
                look.cancel()
            self._leave(self._nodes.keys())
            leaving = {*self._leaving}
            try:
                if leaving:
                    await asyncio.wait(leaving)
            except asyncio.CancelledError:
                # All have started by now, so each closes its connections before it ends.
                for node in leaving:
                    node.cancel()
                await asyncio.gather(*leaving, return_exceptions=True)
                raise

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._connect(address)
        return self._nodes[address]

    async def _ask(self, address: Address, key: bytes, *commands: Command) -> list[Any]:
        return await self._node(address).exchange(key, *commands)

    def _leave(self, addresses: Iterable[Address]) -> None:
        """Begin to close nodes; each first waits for its operations in progress."""
        for address in [*addresses]:
            leaving = asyncio.create_task(self._nodes.pop(address).close(), name="stm-redis-leave")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._left)

    def _left(self, leaving: asyncio.Task[None]) -> None:
        self._leaving.discard(leaving)
        if not leaving.cancelled():
            leaving.exception()  # the node is no longer in use

    def _address(self, host: str, port: int, *, told_by: Address) -> Address:
        return self._remap((told_by[0] if host in _UNNAMED else host, port))

    # Topology

    def _look_again(self, suspect: Address | None = None) -> None:
        """Start to read the topology in the background, unless that is in progress or has just been done."""
        now = asyncio.get_running_loop().time()
        if self._look is None and now - self._looked_at >= _PAUSE_S:
            self._begin(suspect)

    async def _topology(self) -> None:
        """Read the topology for the first time, once for all waiting operations."""
        look = self._look or self._begin(None)
        await asyncio.wait([look])
        if look.cancelled():
            raise client.ClusterError("closed while reading the topology")
        look.result()

    def _begin(self, suspect: Address | None) -> asyncio.Task[None]:
        self._looked_at = asyncio.get_running_loop().time()
        self._look = asyncio.create_task(self._read(suspect))
        self._look.add_done_callback(self._end)
        return self._look

    def _end(self, look: asyncio.Task[None]) -> None:
        if self._look is look:
            self._look = None
        if not look.cancelled():
            look.exception()  # callers that wait retrieve it; a background refresh ignores it

    async def _read(self, suspect: Address | None) -> None:
        """Ask one node after another, the suspect last, until one returns the topology."""
        seeds = [*await self._seeds()]
        known = list(dict.fromkeys([*self._owners.values(), *seeds]))
        random.shuffle(known)
        problem: Exception | None = None
        for address in sorted(known, key=lambda one: one == suspect):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    (answer,) = await self._node(address).exchange(b"", ("CLUSTER", "SLOTS"))
                self._answered.add(address)
                if isinstance(answer, Exception):
                    raise answer
            except Exception as error:
                what = meaning(error)
                if not isinstance(error, StorageError) and (what is None or what[0] is Denied):
                    raise
                problem = error
                continue
            owners: dict[int, Address] = {}
            for first, last, (host, port, *_), *_ in answer:
                owner = self._address((host or b"").decode(), port, told_by=address)
                owners.update(dict.fromkeys(range(first, last + 1), owner))
            self._owners = owners
            # If addresses change, as those of pods do, old ones would keep their connections for good.
            here = {*owners.values(), *seeds}
            self._answered &= here
            self._leave(self._nodes.keys() - here)
            return
        raise client.RedisClusterException("no node returned the topology") from problem
