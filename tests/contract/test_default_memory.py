"""The memory of one process keeps the contract of every short-term memory."""

import pytest

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing import Memories, MemoryContract


async def open_memory(key, config, summarizer):
    del key  # it is told by `hydrate`, if at all
    return DefaultShortTermMemory(config=config, summarizer=summarizer)


async def close_memory(memory):
    await memory.close(timeout=0)


class TestDefaultMemory(MemoryContract):
    @pytest.fixture
    def memories(self):
        return Memories(open=open_memory, close=close_memory)
