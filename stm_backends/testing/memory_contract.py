"""The contract of every short-term memory, local or distributed."""

from __future__ import annotations

import pytest

from stm_backends.testing.memory_checks.budgets import Budgets
from stm_backends.testing.memory_checks.callbacks import Callbacks
from stm_backends.testing.memory_checks.fidelity import Fidelity
from stm_backends.testing.memory_checks.flushing import Flushing
from stm_backends.testing.memory_checks.health import Health
from stm_backends.testing.memory_checks.isolation import Isolation
from stm_backends.testing.memory_checks.strategies import Strategies
from stm_backends.testing.memory_checks.summarizing import Summarizing
from stm_backends.testing.workbench.memories import Memories, MemoryBench, config, shown, turn, until

__all__ = ["MemoryContract", "config", "shown", "turn", "until"]


class MemoryContract(Strategies, Fidelity, Summarizing, Health, Budgets, Callbacks, Flushing, Isolation):
    """Checks of everything in a memory that an agent may rely on.

    A subclass supplies the fixture `memories`. Each check uses new conversations.
    """

    @pytest.fixture
    def memories(self) -> Memories:
        """The memories under test; a subclass must override this."""
        raise NotImplementedError("override the fixture `memories`")

    @pytest.fixture
    def bench(self, memories: Memories) -> MemoryBench:
        """The workbench of one check, which enters and leaves it."""
        return MemoryBench(memories)
