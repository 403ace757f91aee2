"""The library's distributed memories on a driver, in the form that the memory checks need."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from stm_backends.backend import Backend
from stm_backends.drivers.contract import KEEP, Driver, Key, Record, new_version
from stm_backends.errors import Unavailable
from stm_backends.records.codec import Codec, encode_turn
from stm_backends.records.keys import memory_key
from stm_backends.records.pages import Leaving, Pages
from stm_backends.sealing.keys import Sealing
from stm_backends.testing.workbench.drivers import OPERATIONS, Datastore
from stm_backends.testing.workbench.former import FormerServer, fail_over
from stm_backends.testing.workbench.memories import Act, Memories
from stm_backends.types import ConversationTurn, MemoryKey, StoredTurn

FUTURE: Final = b'stm/999 body\n{"what": "only a later version of this library knows"}'
"""A body that this version must refuse and leave alone."""

LONGEST_SUMMARY_S: Final = 0.5
"""The time limit of a summarizer that is killed with its pod, in seconds."""


def memories_on(datastore: Datastore, *, deadline_s: float = 5.0) -> Memories:
    """Return the distributed memories of a datastore's driver, each with its own driver instance.

    `deadline_s` is the driver's deadline, which determines how long the lease of a killed pod may last.
    """
    pods = _Pods(datastore)
    memories = Memories(
        open=pods.open,
        close=pods.close,
        again=pods.again,
        kill=pods.kill,
        damage=pods.damage,
        stored=pods.stored,
        outage=datastore.outage,
        round_trips=lambda: pods.round_trips,
        lease_s=LONGEST_SUMMARY_S + 3 * deadline_s + 5.0,
        sealed=lambda sealing: replace(memories, open=partial(pods.open, sealing=sealing)),
        erase=pods.erase,
        fail_over=pods.fail_over,
        around=pods.around,
        copy_first=pods.copy_first,
    )
    return memories


class _Pods:
    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore
        self._open: dict[int, tuple[Backend, _Mortal, MemoryKey]] = {}
        self._given: dict[int, tuple[Any, Any]] = {}
        self._users: Counter[str] = Counter()
        self._former: dict[Key, Record] = {}
        self.round_trips = 0

    async def open(
        self, key: MemoryKey, config: Any, summarizer: Any, *, sealing: Sealing | None = None
    ) -> Any:
        where, inner = memory_key(key), await self._datastore.open()
        if where in self._former:
            inner = FormerServer(inner, where, self._former.pop(where))
        driver = _Mortal(inner, self)
        backend = Backend(cast("Driver", driver), sealing=sealing, close_timeout_s=0.2)
        await backend.open()
        memory = backend.memory(key, config, summarizer=summarizer)
        self._open[id(memory)] = backend, driver, key
        self._given[id(memory)] = config, summarizer
        self._users[key.tenant_id] += 1
        return memory

    def again(self, memory: Any) -> Any:
        backend, _, key = self._open[id(memory)]
        config, summarizer = self._given[id(memory)]
        return backend.memory(key, config, summarizer=summarizer)

    async def close(self, memory: Any) -> None:
        del self._given[id(memory)]
        backend, driver, key = self._open.pop(id(memory))
        driver.dead = False
        self._users[key.tenant_id] -= 1
        await memory.close(timeout=0)
        if not self._users[key.tenant_id]:
            # The last one removes the check's data; it was opened first, and has the right keys.
            await backend.sessions.erase_tenant(key.tenant_id)
        await backend.close()

    async def erase(self, memory: Any) -> None:
        backend, _, key = self._open[id(memory)]
        await backend.sessions.erase_user(key.tenant_id, key.user_id)

    async def kill(self, memory: Any) -> None:
        self._open[id(memory)][1].dead = True
        memory.abandon()
        await asyncio.sleep(0.05)

    async def damage(self, key: MemoryKey) -> None:
        driver, where = await self._datastore.open(), memory_key(key)
        try:
            record = await driver.load(where)
            assert record is not None, "the record to damage must exist"
            await driver.replace(where, FUTURE, version="future", expect=record.version, ttl=KEEP)
        finally:
            await driver.close()

    async def fail_over(self, key: MemoryKey, lost: int) -> None:
        driver, where = await self._datastore.open(), memory_key(key)
        try:
            self._former[where] = await fail_over(driver, where, lost)
        finally:
            await driver.close()

    def around(self, memory: Any, operation: str, kind: str, act: Act) -> None:
        self._open[id(memory)][1].acts[operation, kind] = act

    async def copy_first(self, key: MemoryKey, turn_id: str, turn: ConversationTurn, rev: int) -> None:
        driver, where, codec = await self._datastore.open(), memory_key(key), Codec()
        try:
            record = await driver.load(where)
            assert record is not None, "the conversation must have been stored"
            body = codec.open_body(record.body)
            assert body.transcript is not None, "the first turn must have left the record"
            if rev > body.transcript.rev:
                changed = codec.seal_body(replace(body, transcript=replace(body.transcript, rev=rev)))
                version, expect = new_version(), record.version
                await driver.replace(where, changed, version=version, expect=expect, ttl=KEEP)
            copy = [Leaving(turn_id, encode_turn(StoredTurn(turn_id, turn)))]
            first = replace(body.transcript, base=0, last="", rev=rev)
            await Pages(driver, codec).put(where, first, copy, summary="", ttl=None)
        finally:
            await driver.close()

    async def stored(self, key: MemoryKey) -> object:
        driver = await self._datastore.open()
        try:
            return await driver.load(memory_key(key))
        finally:
            await driver.close()


class _Mortal:
    """The driver of one pod: counts its operations, and refuses them once it is dead.

    `acts` has the replacements for the next operation with a given name on a record of a given kind.
    """

    def __init__(self, driver: Driver, pods: _Pods) -> None:
        self._driver = driver
        self._pods = pods
        self.acts: dict[tuple[str, str], Act] = {}
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._driver, name)
        if name not in OPERATIONS:
            return attribute

        async def operation(key: Key | str, *arguments: Any, **named: Any) -> Any:
            async def send() -> Any:
                if self.dead:
                    raise Unavailable("this process is dead", backend=self._driver.name, operation=name)
                self._pods.round_trips += 1
                return await attribute(key, *arguments, **named)

            kind = (key if isinstance(key, str) else key.scope).rpartition(":")[2]
            act = self.acts.pop((name, kind), None) if self.acts else None
            return await (send() if act is None else act(send))

        return operation
