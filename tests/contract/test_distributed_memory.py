"""The distributed memory keeps the contract of every short-term memory, on both embedded drivers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from stm_backends.distributed import DistributedShortTermMemory
from stm_backends.driver import Driver
from stm_backends.reference import MemoryDriver
from stm_backends.sqlite import SqliteDriver, SqliteSettings
from stm_backends.testing.memory_contract import MakeMemory, MemoryContract
from stm_backends.types import MemoryKey


class _Distributed(MemoryContract):
    @pytest.fixture
    async def make_memory(self, driver: Driver) -> AsyncGenerator[MakeMemory]:
        made: list[DistributedShortTermMemory] = []

        async def make(config: object, summarizer: Any = None) -> DistributedShortTermMemory:
            key = MemoryKey("acme", "u1", uuid.uuid4().hex)
            made.append(DistributedShortTermMemory(driver, key, config, summarizer=summarizer))
            return made[-1]

        yield make
        for memory in made:
            await memory.close()


class TestDistributedMemoryInProcess(_Distributed):
    @pytest.fixture
    async def driver(self) -> AsyncGenerator[Driver]:
        driver = MemoryDriver()
        await driver.open()
        yield driver
        await driver.close()


class TestDistributedMemoryOnSqlite(_Distributed):
    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncGenerator[Driver]:
        driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "memory.db")))
        await driver.open()
        yield driver
        await driver.close()
