"""One MongoDB server; each write is in its journal before it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pymongo.errors import PyMongoError

from stm_backends_mongo import statements
from tests.chaos.stands import Fault
from tests.chaos.stands.common import Base, libraries, repeated
from tests.support import mongod
from tests.support.mongod import Mongod
from tests.support.servers import Server

DATABASE = "chaos"
COLLECTION = "stm_records"

POOL: Final = 20
"""How many connections a pod may have to each server, which many calls at once open and faults leave open."""


class MongoStand(Base):
    name = "mongo"
    pooled = POOL

    async def _start(self) -> None:
        server = Mongod(program(), self.disk.folder / "data", "--nounixsocket")
        await self._run(server)
        proxy = await self._lead_to(int(server.address.rpartition(":")[2]))
        self.direct_url = f"mongodb://{server.address}/{DATABASE}?directConnection=true"
        self.url = f"mongodb://{proxy.address}/{DATABASE}?directConnection=true&maxPoolSize={POOL}"
        self.versions = await versions_of(server)

    async def _when_full(self) -> None:
        await checkpoint(self.servers)

    def _faults(self) -> Mapping[str, Fault]:
        async def primary() -> Mongod:
            (server,) = self.servers
            assert isinstance(server, Mongod)
            return server

        return mongo_faults(primary)


stand = MongoStand


def program() -> Path:
    """Return the `mongod` of the package index."""
    found = mongod.binary()
    assert found, "no mongod: install the packages of the group `services`"
    return found


async def versions_of(server: Mongod) -> dict[str, str]:
    """Return the versions of a server and of its client library."""
    found = await asyncio.to_thread(server.ask, "buildInfo")
    return {"mongodb": found["version"], **libraries("pymongo")}


async def checkpoint(servers: Iterable[Server]) -> None:
    """Have servers write their data to their files; until then they need no room but in the journal."""
    for server in servers:
        assert isinstance(server, Mongod)
        with contextlib.suppress(PyMongoError):
            await asyncio.to_thread(server.ask, "fsync")


def mongo_faults(primary: Callable[[], Awaitable[Mongod]]) -> dict[str, Fault]:
    """Return what can be done to a running server that takes writes; `primary` finds it."""

    async def ask(command: str, value: object = 1, **more: Any) -> dict[str, Any] | None:
        # Some moments have no primary, and some commands end their own connection.
        with contextlib.suppress(PyMongoError):
            return await asyncio.to_thread((await primary()).ask, command, value, **more)
        return None

    async def kill_sessions(_: random.Random) -> int:
        return await ask("killAllSessions", []) is not None

    async def kill_operations(_: random.Random) -> int:
        found = await ask("currentOp", ns=f"{DATABASE}.{COLLECTION}")
        running = [one["opid"] for one in (found or {}).get("inprog", ())]
        for operation in running:
            await ask("killOp", op=operation)
        return len(running)

    async def rebuild(_: random.Random) -> int:
        """Drop the index of expiry and make it again, also if the fault ends meanwhile: drivers need it."""
        return await asyncio.shield(rebuilt())

    async def rebuilt() -> int:
        done = await ask("dropIndexes", COLLECTION, database=DATABASE, index="*") is not None
        for command in statements.setup(COLLECTION):
            (name, value), *more = command.items()
            while await ask(name, value, database=DATABASE, **dict(more)) is None:  # noqa: ASYNC110 -- no event
                await asyncio.sleep(0.1)
        return done

    async def compact(_: random.Random) -> int:
        return await ask("compact", COLLECTION, database=DATABASE, force=True) is not None

    return {
        "sessions-killed": repeated(kill_sessions),
        "operations-killed": repeated(kill_operations, every=0.02),
        "index-rebuilt": repeated(rebuild),
        "collection-compacted": repeated(compact),
    }
