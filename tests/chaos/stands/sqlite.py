"""One SQLite file that all pods open."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tests.chaos.stands import Fault

SIZE_MB = 64


class SqliteStand:
    """A file in a folder of its own; as root it is on a small file system, which can be full."""

    name = "sqlite"
    versions: Mapping[str, str] = {"sqlite": sqlite3.sqlite_version}

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "disk"
        self._small = False
        self._file = self._folder / "chaos.db"
        self.url = self.direct_url = f"sqlite:///{self._file}"

    async def start(self) -> None:
        self._folder.mkdir(parents=True)
        mount = ("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "stm-chaos", str(self._folder))
        self._small = await asyncio.to_thread(_succeeds, *mount)

    async def stop(self) -> None:
        if self._small:
            await asyncio.to_thread(_succeeds, "umount", "--lazy", str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)

    def faults(self) -> Mapping[str, Fault]:
        faults: dict[str, Fault] = {
            "locked": self._locked,
            "checkpoint": self._checkpoint,
            "vacuum": self._vacuum,
        }
        return {**faults, "disk-full": self._disk_full} if self._small else faults

    @asynccontextmanager
    async def _locked(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Hold the lock of all writers, as a backup or a person at a prompt does."""
        with closing(await asyncio.to_thread(self._connect)) as connection:
            held = await asyncio.to_thread(_attempt, connection, "BEGIN IMMEDIATE")
            yield {"held": held}

    @asynccontextmanager
    async def _checkpoint(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Move everything from the log of writes into the file, and empty the log."""
        with closing(await asyncio.to_thread(self._connect)) as connection:
            done = await asyncio.to_thread(_attempt, connection, "PRAGMA wal_checkpoint(TRUNCATE)")
            yield {"done": done}

    @asynccontextmanager
    async def _vacuum(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Write the whole file again."""
        with closing(await asyncio.to_thread(self._connect)) as connection:
            yield {"done": await asyncio.to_thread(_attempt, connection, "VACUUM")}

    @asynccontextmanager
    async def _disk_full(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Leave no room on the file system."""
        ballast = self._folder / "ballast"
        try:
            await asyncio.to_thread(_fill, ballast)
            yield {"free": shutil.disk_usage(self._folder).free}
        finally:
            ballast.unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=3.0, check_same_thread=False, isolation_level=None)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            pass


def _attempt(connection: sqlite3.Connection, statement: str) -> bool:
    try:
        connection.execute(statement).fetchall()
    except sqlite3.OperationalError:
        return False
    return True


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


stand = SqliteStand
