"""A PostgreSQL primary with a synchronous standby, which is promoted when the primary is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Mapping
from typing import Any

import asyncpg

from stm_backends.testing.faults import Proxy
from tests.chaos.stands import Fault
from tests.chaos.stands.common import until
from tests.chaos.stands.postgres import SETTINGS, PostgresStand, binaries, postgres_faults, versions_of
from tests.support.postgresql import Postgres

_SETTINGS = {
    **SETTINGS,
    # The name of each of them, under which it follows the other one.
    "cluster_name": "standby",
    "synchronous_standby_names": "standby",
    "wal_sender_timeout": "5s",
    "wal_receiver_timeout": "5s",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "500ms",
}


class StandbyStand(PostgresStand):
    """Each server has a proxy; the standby follows the primary past it.

    Whoever promotes the standby makes sure first that the primary is dead, as every tool for this does.
    """

    name = "postgres-standby"
    megabytes = 1024

    async def _start(self) -> None:
        self._binaries = binaries(self.folder)
        self._made = 0
        self._primary = await self._make()
        await self._run(self._primary)
        await self._run(await self._make(self._primary))
        for server in self.servers:
            await self._lead_to(server.port)
        hosts = ",".join(proxy.address for proxy in self.proxies)
        self.url = f"postgresql://postgres@{hosts}/postgres?sslmode=disable&target_session_attrs=primary"
        self.versions = await versions_of(self._primary)
        await self._settle()

    @property
    def direct_url(self) -> str:
        """The present primary."""
        return self._primary.url

    async def _make(self, of: Postgres | None = None) -> Postgres:
        self._made += 1
        folder = self.disk.folder / f"server{self._made}"
        return await asyncio.to_thread(Postgres, self._binaries, folder, of=of, **_SETTINGS)

    def _faults(self) -> Mapping[str, Fault]:
        async def primary() -> str:
            return self.direct_url

        return {**postgres_faults(primary), "failover": self._fail_over}

    @contextlib.asynccontextmanager
    async def _fail_over(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Kill the primary, at times while the standby hangs, and promote the standby.

        In the end the former primary is made again, as a standby of the other one.
        """
        old = self._primary
        (new,) = (server for server in self.servers if server is not old)
        figures: dict[str, Any] = {"behind": chance.random() < 0.5}
        async with self._mended(figures):
            if figures["behind"]:
                await asyncio.to_thread(new.pause)
                await asyncio.sleep(chance.uniform(0.1, 2))
            await asyncio.to_thread(old.kill)
            new.go_on()

            async def is_promoted() -> bool:
                return await _ask(new, "SELECT pg_promote() AND NOT pg_is_in_recovery()")

            await until(is_promoted, "a promotion")
            self._primary = new
            try:
                yield figures
            finally:
                await self._replace(old)

    async def _replace(self, old: Postgres) -> None:
        place = self.servers.index(old)
        proxy: Proxy = self.proxies[place]
        # Never started again: it would be a second primary.
        self.servers.pop(place)
        standby = await self._make(self._primary)
        await self._run(standby)
        self.servers.insert(place, self.servers.pop())
        proxy.lead_to(f"127.0.0.1:{standby.port}")
        await asyncio.to_thread(shutil.rmtree, old.directory, ignore_errors=True)

    async def _settle(self) -> None:
        async def is_in_step() -> bool:
            for server in self.servers:
                # A standby whose disk was full may end later than that.
                await asyncio.to_thread(server.recover)
            states = "SELECT string_agg(sync_state, ',') FROM pg_stat_replication WHERE state = 'streaming'"
            return await _ask(self._primary, states) == "sync"

        await until(is_in_step, "a standby in step")


stand = StandbyStand


async def _ask(server: Postgres, question: str) -> Any:
    connection = await asyncpg.connect(server.url, timeout=10)
    try:
        return await connection.fetchval(question, timeout=30)
    finally:
        await connection.close(timeout=10)
