"""One PostgreSQL, with `fsync` and `synchronous_commit` as they are by default: on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import asyncpg

from stm_backends_postgres.statements import OURS, setup
from tests.chaos.stands import Fault
from tests.chaos.stands.common import Base, libraries, repeated
from tests.chaos.stands.disk import Disk
from tests.support.postgresql import Postgres, find_binaries

SETTINGS: Mapping[str, object] = {
    # A small file system has room for it, and checkpoints and vacuums happen within a run.
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "checkpoint_timeout": "30s",
    "autovacuum_naptime": "5s",
}
OF_CLIENTS = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"


class PostgresStand(Base):
    name = "postgres"

    async def start(self) -> None:
        # The server runs as a user of its own if we are root, and that user cannot enter private folders.
        self.folder = Path(tempfile.mkdtemp(prefix="stm-chaos-"))
        self.folder.chmod(0o755)
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.disk = Disk(self.folder / "disk", self.megabytes)
        await super().start()

    async def _start(self) -> None:
        server = await asyncio.to_thread(
            Postgres, binaries(self.folder), self.disk.folder / "one", **SETTINGS
        )
        await self._run(server)
        proxy = await self._lead_to(server.port)
        self.direct_url = server.url
        # Plain text, in which the proxy finds requests and answers.
        self.url = f"postgresql://postgres@{proxy.address}/postgres?sslmode=disable"
        self.versions = await versions_of(server)

    def _faults(self) -> Mapping[str, Fault]:
        async def primary() -> str:
            return self.direct_url

        return postgres_faults(primary)


stand = PostgresStand


def binaries(folder: Path) -> Path:
    """Return where PostgreSQL's programs are; they may be copied into the folder."""
    found = find_binaries(folder)
    assert found, "no PostgreSQL: install the packages of the group `services`"
    return found


async def versions_of(server: Postgres) -> dict[str, str]:
    """Return the versions of a server and of its client library."""
    connection = await asyncpg.connect(server.url)
    try:
        return {"postgresql": await connection.fetchval("SHOW server_version"), **libraries("asyncpg")}
    finally:
        await connection.close()


def postgres_faults(primary: Callable[[], Awaitable[str]]) -> dict[str, Fault]:
    """Return what can be done to a running server that takes writes; `primary` is its URL past the proxy."""

    async def run(statement: str) -> Any:
        """Return the answer to a statement, or nothing if it was refused or cancelled."""
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            connection = await asyncpg.connect(await primary(), timeout=10)
            try:
                return await connection.fetchval(statement, timeout=30)
            finally:
                await connection.close(timeout=10)
        return None

    async def end_clients(_: random.Random) -> int:
        return await run(f"SELECT count(pg_terminate_backend(pid)) {OF_CLIENTS}") or 0

    async def cancel_statements(_: random.Random) -> int:
        return await run(f"SELECT count(pg_cancel_backend(pid)) {OF_CLIENTS} AND state = 'active'") or 0

    async def rebuild_indexes(chance: random.Random) -> int:
        how = chance.choice(("", "CONCURRENTLY "))
        for table in ("stm_record", "stm_entry"):
            await run(f"REINDEX TABLE {how}{table}")
        await run("DROP INDEX IF EXISTS stm_record_due")
        await run("CREATE INDEX IF NOT EXISTS stm_record_due ON stm_record (due) WHERE due IS NOT NULL")
        return 1

    async def vacuum(chance: random.Random) -> int:
        """Vacuum and analyse; now and then rewrite the tables, as some migrations do."""
        await run(chance.choice(("VACUUM ANALYZE", "VACUUM (FULL, ANALYZE)", "VACUUM (FREEZE)")))
        await run("CHECKPOINT")
        return 1

    @contextlib.asynccontextmanager
    async def migrate(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Migrate from layout 2 in a transaction that stays open, so that all wait for its locks.

        A column of a later layout joins the table, or leaves it: present statements are planned again.
        """
        connection = await asyncpg.connect(await primary(), timeout=10)
        figures: dict[str, Any] = {}
        try:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("LOCK TABLE stm_record, stm_entry IN ACCESS EXCLUSIVE MODE")
            await connection.execute("UPDATE stm_layout SET version = 2")
            await connection.execute(
                chance.choice(
                    (
                        "ALTER TABLE stm_record ADD COLUMN IF NOT EXISTS later text",
                        "ALTER TABLE stm_record DROP COLUMN IF EXISTS later",
                        # Rewrites the table.
                        "ALTER TABLE stm_record ALTER COLUMN size TYPE bigint USING size + 0",
                    )
                )
            )
            await connection.execute(setup("public", "off"))
            figures["layout"] = await connection.fetchval("SELECT version FROM stm_layout")
            assert figures["layout"] == OURS.version
            yield figures
            await transaction.commit()
        finally:
            await connection.close(timeout=10)

    return {
        "clients-killed": repeated(end_clients),
        "statements-cancelled": repeated(cancel_statements, every=0.02),
        "indexes-rebuilt": repeated(rebuild_indexes),
        "tables-vacuumed": repeated(vacuum),
        "schema-migrated": migrate,
    }
