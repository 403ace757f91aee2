"""The memory of one conversation, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from stm_backends.memory.shared.maintenance import Stats
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.types import ConversationTurn, MemoryHealth

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine on the event loop and returns what it returns."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


class Memory:
    """What `backend.memory` returns: a `DistributedShortTermMemory` whose methods wait.

    They promise and raise what its methods do.
    """

    def __init__(self, memory: DistributedShortTermMemory, run: Run) -> None:
        self._memory = memory
        self._run = run

    @property
    def asynchronous(self) -> DistributedShortTermMemory:
        """The memory itself, which belongs to the loop's thread."""
        return self._memory

    @property
    def stats(self) -> Stats:
        """What this object has done so far, as of now."""
        return self._run(_called(lambda: replace(self._memory.stats)))

    @property
    def health(self) -> MemoryHealth:
        """How summarization is doing, as of the last load; asks nobody and waits for nothing."""
        return self._memory.health

    @property
    def busy(self) -> bool:
        """Whether work of this object is under way or scheduled."""
        return self._run(_called(lambda: self._memory.busy))

    def estimate_tokens(self) -> int:
        """Estimate what `get_llm_context` would show, from the last load and our own turns since."""
        return self._run(_called(self._memory.estimate_tokens))

    def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Remember a completed turn: one round trip, and no waiting for a summary."""
        self._run(self._memory.add_turn(turn, turn_id=turn_id))

    def get_llm_context(self) -> dict[str, Any]:
        """Return what the model shall know, in one round trip: `{}` or `{"conversation_memory": ...}`."""
        return self._run(self._memory.get_llm_context())

    def turns(self) -> list[ConversationTurn]:
        """Return every turn that is retained in full, oldest first."""
        return self._run(self._memory.turns())

    def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or the memory is degraded, or `timeout` seconds have passed."""
        self._run(self._memory.flush(timeout))

    def close(self, *, timeout: float = 0.0) -> None:
        """End the background: what runs may finish within `timeout` seconds, the lease is given back."""
        self._run(self._memory.close(timeout=timeout))


async def _called(function: Callable[[], T]) -> T:
    """Call a function on the loop's thread, which alone changes what the function looks at."""
    return function()
