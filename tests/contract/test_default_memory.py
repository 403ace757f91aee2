"""The memory of one process keeps the contract of every short-term memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from stm_backends.default import DefaultShortTermMemory
from stm_backends.testing.memory_contract import MakeMemory, MemoryContract


class TestDefaultMemory(MemoryContract):
    @pytest.fixture
    async def make_memory(self) -> AsyncGenerator[MakeMemory]:
        made: list[DefaultShortTermMemory] = []

        async def make(config: object, summarizer: Any = None) -> DefaultShortTermMemory:
            made.append(DefaultShortTermMemory(config=config, summarizer=summarizer))
            return made[-1]

        yield make
        for memory in made:
            await memory.close(timeout=0)
