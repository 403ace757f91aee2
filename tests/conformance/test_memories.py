"""The memory profile asks an implementation only for what it has, and says what it did not ask."""

from __future__ import annotations

import pytest

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.testing import Memories, MemoryContract
from stm_backends.testing.workbench.memories import BEYOND_THE_PROTOCOL, MemoryBench


class Bare:
    """A memory with the protocol and nothing beyond it."""

    def __init__(self, config, summarizer):
        self._memory = DefaultShortTermMemory(config=config, summarizer=summarizer)

    @property
    def health(self):
        return self._memory.health

    async def add_turn(self, turn):
        await self._memory.add_turn(turn)

    async def get_llm_context(self):
        return await self._memory.get_llm_context()

    def estimate_tokens(self):
        return self._memory.estimate_tokens()

    async def flush(self):
        await self._memory.flush()


async def open_bare(key, config, summarizer):
    del key
    return Bare(config, summarizer)


class TestBareMemory(MemoryContract):
    @pytest.fixture
    def memories(self):
        return Memories(open=open_bare, without=BEYOND_THE_PROTOCOL)


def test_what_a_memory_does_not_have_is_named():
    bench = MemoryBench(Memories(open=open_bare, without=("turn_id",)))
    with pytest.raises(pytest.skip.Exception, match="needs `turn_id`, which"):
        MemoryContract().test_adding_the_same_turn_id_again_changes_nothing(bench)
