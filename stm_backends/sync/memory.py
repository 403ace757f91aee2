"""The memory of one conversation, for programs without an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from stm_backends.memory.shared.base import SharedBase
from stm_backends.memory.shared.folds import Stats
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn
from stm_backends.types import ConversationTurn, MemoryHealth

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine on the event loop and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


class Shared:
    """The base of memories and conversations of messages."""

    def __init__(self, memory: SharedBase, run: Run) -> None:
        self._shared = memory
        self._run = run

    @property
    def stats(self) -> Stats:
        """Counts of this object's work so far."""
        return self._run(called(lambda: replace(self._shared.stats)))

    @property
    def health(self) -> MemoryHealth:
        """The state of summarization as of the last load; does not access the datastore."""
        return self._shared.health

    @property
    def waiting(self) -> int:
        """The number of turns that wait in pages of the transcript for a summary, as of the last load."""
        return self._shared.waiting

    @property
    def busy(self) -> bool:
        """True while this object has running or scheduled work."""
        return self._run(called(lambda: self._shared.busy))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or the memory is degraded, or `timeout` seconds have passed."""
        self._run(self._shared.flush(timeout))

    def close(self, *, timeout: float = 0.0) -> None:
        """Stop background work, which may take `timeout` seconds to finish, and release the lease."""
        self._run(self._shared.close(timeout=timeout))


class Memory(Shared):
    """A `DistributedShortTermMemory` with blocking methods; `backend.memory` returns one.

    Its methods guarantee and raise the same as the asynchronous ones.
    """

    def __init__(self, memory: DistributedShortTermMemory, run: Run) -> None:
        super().__init__(memory, run)
        self._memory = memory

    @property
    def asynchronous(self) -> DistributedShortTermMemory:
        """The asynchronous memory, which belongs to the loop's thread."""
        return self._memory

    def estimate_tokens(self) -> int:
        """Estimate the tokens of `get_llm_context`, from the last load and the turns added here since."""
        return self._run(called(self._memory.estimate_tokens))

    def get_artifact(self, ref: str) -> Any | None:
        """Return the artifact `ref` of the newest turn that shows it, or `None`."""
        return self._run(called(lambda: self._memory.get_artifact(ref)))

    def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Store a completed turn in one round trip, without waiting for a summary."""
        self._run(self._memory.add_turn(turn, turn_id=turn_id))

    def get_llm_context(self) -> dict[str, Any]:
        """Return the context for the model in one round trip: `{}` or `{"conversation_memory": ...}`."""
        return self._run(self._memory.get_llm_context())

    def turns(self) -> list[ConversationTurn]:
        """Return every turn that is kept in full, oldest first."""
        return self._run(self._memory.turns())

    def transcript(
        self,
        *,
        before: int | None = None,
        after: int | None = None,
        at: int | None = None,
        limit: int = 50,
    ) -> TranscriptPage:
        """Return up to `limit` turns of the whole conversation by their numbers, oldest first."""
        return self._run(self._memory.transcript(before=before, after=after, at=at, limit=limit))

    def each_turn(self, *, after: int | None = None) -> Iterator[TranscriptTurn]:
        """Yield all turns of the conversation after a number, oldest first, in memory of a few pages."""
        return each(self._memory.each_turn(after=after), self._run)


def each(items: AsyncIterator[T], run: Run) -> Iterator[T]:
    """Yield the items of an asynchronous iterator, of which `None` is the end."""

    async def following() -> T | None:
        return await anext(items, None)

    while (item := run(following())) is not None:
        yield item


async def called(function: Callable[[], T]) -> T:
    """Call a function on the loop's thread, the only one that changes what the function reads."""
    return function()
