"""A Redis Cluster: which node has a key, and what is done when it has moved.

The client library's own cluster client is not used for this. It sends ASKING and the command that ASKING
is for on different connections, so that a key which has moved ahead of its slot is often not found. And
each call that fails makes it read the whole topology again, or close the connections of all nodes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

from redis import exceptions as client
from redis.crc import key_slot

from stm_backends.errors import Denied, StorageError
from stm_backends_redis.errors import meaning
from stm_backends_redis.servers import Command, Connected
from stm_backends_redis.settings import Address

Seeds: TypeAlias = Callable[[], Awaitable[Iterable[Address]]]

_PAUSE_S: Final = 1.0
"""The topology is read at most once in so many seconds, however many calls fail."""

_PATIENCE_S: Final = 2.0
"""How long one node may take to tell the topology."""

_REDIRECTIONS: Final = 5
"""How often one command is sent elsewhere before it counts as refused for the moment."""

_UNNAMED: Final = ("", "?")
"""What a node calls a host whose name it does not know: the one that it was itself reached by."""


class Cluster:
    """The nodes of a cluster.

    `connect` makes the way to a node, `seeds` are the nodes that are asked first, and `remap` says where an
    address that the cluster gives out is reached from here.
    """

    def __init__(
        self,
        connect: Callable[[Address], Connected],
        seeds: Seeds,
        *,
        remap: Callable[[Address], Address] = lambda address: address,
    ) -> None:
        self._connect = connect
        self._seeds = seeds
        self._remap = remap
        self._nodes: dict[Address, Connected] = {}
        self._owners: dict[int, Address] = {}
        self._look: asyncio.Task[None] | None = None
        self._looked_at = -math.inf

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands to the node that has this key, and follow where the first of them is sent on to."""
        if not self._owners:
            await self._topology()
        slot = key_slot(key)
        address = self._owners.get(slot)
        if address is None:
            self._look_again()
            raise client.ClusterDownError("no node has this slot")
        asking: tuple[Command, ...] = ()
        for _ in range(_REDIRECTIONS):
            try:
                # ASKING holds for the next command of the same connection only.
                answers = await self._node(address).exchange(key, *asking, *commands)
            except (client.ConnectionError, client.TimeoutError, OSError, asyncio.CancelledError):
                self._look_again(address)
                raise
            answer = answers[len(asking)]
            if isinstance(answer, client.AskError):  # which MOVED is a kind of
                where: Any = answer
                address = self._address(where.host, where.port, told_by=address)
                asking = (("ASKING",),)
                if isinstance(answer, client.MovedError):
                    self._owners[slot], asking = address, ()
                    self._look_again()
                continue
            if isinstance(answer, client.ClusterDownError):
                self._look_again(address)
            return answers[len(asking) :]
        raise client.ClusterError("sent from node to node")

    async def close(self) -> None:
        """Wait until nothing is under way, as the deadline sees to, and close what is ours."""
        while self._look or self._nodes:  # what ends meanwhile may be redirected to yet another node
            look, nodes = self._look, self._nodes
            self._look, self._nodes, self._owners = None, {}, {}
            if look is not None:
                look.cancel()
            await asyncio.gather(*(node.close() for node in nodes.values()))

    def _node(self, address: Address) -> Connected:
        if address not in self._nodes:
            self._nodes[address] = self._connect(address)
        return self._nodes[address]

    def _address(self, host: str, port: int, *, told_by: Address) -> Address:
        return self._remap((told_by[0] if host in _UNNAMED else host, port))

    # Which node has which slot

    def _look_again(self, suspect: Address | None = None) -> None:
        """Have the topology read in the background, unless that is being done or was done just now."""
        now = asyncio.get_running_loop().time()
        if self._look is None and now - self._looked_at >= _PAUSE_S:
            self._begin(suspect)

    async def _topology(self) -> None:
        """Read the topology for the first time, once for all who wait for it."""
        look = self._look or self._begin(None)
        await asyncio.wait([look])
        if look.cancelled():
            raise client.ClusterError("closed meanwhile")
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
            look.exception()  # whoever waits for it has it; the others only meant to be up to date

    async def _read(self, suspect: Address | None) -> None:
        """Ask one node after the other, a suspect one last, until one of them tells."""
        known = list(dict.fromkeys([*self._owners.values(), *await self._seeds()]))
        random.shuffle(known)
        problem: Exception | None = None
        for address in sorted(known, key=lambda one: one == suspect):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    (answer,) = await self._node(address).exchange(b"", ("CLUSTER", "SLOTS"))
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
            return
        raise client.RedisClusterException("no node told the topology") from problem
