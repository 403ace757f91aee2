"""A MongoDB set of three; each write is in the journals of two of them before it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pymongo.errors import PyMongoError

from tests.chaos.stands import Fault
from tests.chaos.stands.common import Base, until
from tests.chaos.stands.mongo import DATABASE, POOL, checkpoint, mongo_faults, program, versions_of
from tests.support.mongod import Mongod, is_primary

SET = "stm"


class SetStand(Base):
    """The members know each other by their proxies, so a network that fails divides the set as well.

    The driver has the settings of a user who chose none. So a former primary that does not know yet that it
    was deposed may answer reads, of what a majority had.
    """

    name = "mongo-set"
    pooled = 3 * POOL
    # Each member lays out some hundred megabytes of journal.
    megabytes = 2048

    async def _start(self) -> None:
        self.members = [
            Mongod(
                program(),
                self.disk.folder / f"member{number}",
                *("--replSet", SET, "--oplogSize", "64", "--nounixsocket"),
            )
            for number in range(3)
        ]
        for member in self.members:
            await self._lead_to(_port(member))
            await self._run(member)
        config = {
            "_id": SET,
            "members": [{"_id": n, "host": proxy.address} for n, proxy in enumerate(self.proxies)],
            "settings": {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500},
        }
        await asyncio.to_thread(self.members[0].ask, "replSetInitiate", config)
        hosts = ",".join(proxy.address for proxy in self.proxies)
        self.url = f"mongodb://{hosts}/{DATABASE}?replicaSet={SET}&maxPoolSize={POOL}"
        self.versions = await versions_of(self.members[0])
        await self._settle()

    @property
    def direct_url(self) -> str:
        """The present primary."""
        (primary,) = filter(is_primary, self.members)
        return f"mongodb://{primary.address}/{DATABASE}?directConnection=true"

    async def _when_full(self) -> None:
        await checkpoint(self.members)

    def _faults(self) -> Mapping[str, Fault]:
        return {
            **mongo_faults(self._primary),
            "failover": self._fail_over,
            "stepped-down": self._step_down,
        }

    @contextlib.asynccontextmanager
    async def _fail_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Kill the primary, at times while one of the others hangs, and wait until another is elected."""
        old = await self._primary()
        late = chance.choice([member for member in self.members if member is not old])
        figures: dict[str, Any] = {"behind": chance.random() < 0.5}
        async with self._mended(figures):
            if figures["behind"]:
                await asyncio.to_thread(late.pause)
                await asyncio.sleep(chance.uniform(0.1, 1))
            await asyncio.to_thread(old.kill)
            try:
                late.go_on()
                await self._primary(but=old)
                yield figures
            finally:
                await asyncio.to_thread(old.start)

    @contextlib.asynccontextmanager
    async def _step_down(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Have the primary give up its office, and wait until another is elected."""
        old = await self._primary()
        figures: dict[str, Any] = {}
        async with self._mended(figures):
            with contextlib.suppress(PyMongoError):
                await asyncio.to_thread(old.ask, "replSetStepDown", 20, force=True)
            await self._primary(but=old)
            yield figures

    async def _primary(self, *, but: Mongod | None = None) -> Mongod:
        """Return the primary, once there is one beside that."""

        async def found() -> Mongod | None:
            for member in self.members:
                if member is not but and await asyncio.to_thread(is_primary, member):
                    return member
            return None

        return await until(found, "a primary")

    async def _settle(self) -> None:
        async def is_settled() -> bool:
            primary = await self._primary()
            found = await asyncio.to_thread(primary.ask, "replSetGetStatus")
            states = [member["state"] for member in found["members"]]
            roles = [await asyncio.to_thread(is_primary, member) for member in self.members]
            if sorted(states) != [1, 2, 2] or sum(roles) != 1:
                return False
            self._note_epoch(found["term"])
            return True

        await until(is_settled, "a primary and two secondaries")


stand = SetStand


def _port(member: Mongod) -> int:
    return int(member.address.rpartition(":")[2])
