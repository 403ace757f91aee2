"""The tools of a memory check: new conversations, memories of them, and the content that these show."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, TypeAlias, cast

from stm_backends.sealing.keys import Sealing
from stm_backends.testing.workbench.check import not_asked
from stm_backends.testing.workbench.history import History, Recorded
from stm_backends.testing.workbench.summarizers import covered
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
)


class Memory(Protocol):
    """The methods that checks call: those of `ShortTermMemory`, and optional ones."""

    @property
    def health(self) -> MemoryHealth: ...
    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None: ...
    async def get_llm_context(self) -> Mapping[str, Any]: ...
    async def turns(self) -> list[ConversationTurn]: ...
    def estimate_tokens(self) -> int: ...
    async def flush(self, timeout: float | None = None) -> None: ...


BEYOND_THE_PROTOCOL: Final = (
    "turns",
    "turn_id",
    "timeout",
    "fold_batch_turns",
    "transcript",
    "their_classes",
    "failing_estimator",
)
"""Features of this library's memories beyond `ShortTermMemory`; see `Memories.without`."""


Act: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""A function called in place of an operation, with a function that carries the operation out."""


async def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Memories:
    """Gives a suite access to the memories of one implementation.

    `open(key, config, summarizer)` returns a memory of the conversation `key`; if memories are shared, a new
    one each time, as if in another process. `close` ends one for good.

    The rest is optional; a check that needs a missing part is reported as not asked:

    - `without` names the parts of `BEYOND_THE_PROTOCOL` that this implementation lacks.
    - `again(memory)` returns another memory object of the same conversation, in the same process.
    - `kill(memory)` ends one as SIGKILL would: nothing is released, and nothing more is written.
    - `lease_s` is the number of seconds that another may have to wait after that.
    - `damage(key)` makes the stored data of a conversation unreadable; `stored(key)` returns them.
    - `outage()` is a context in which the datastore cannot be reached.
    - `round_trips()` returns the number of requests sent to the datastore so far.
    - `sealed(sealing)` returns the memories of processes that seal their data with these keys, on the same
      datastore.
    - `erase(memory)` erases all data of a memory's user, with the user's data keys, in its process.
    - `fail_over(key, lost)` makes a server lose the newest `lost` turns of a conversation. That server still
      answers the next memory opened on it, until that memory summarizes or drops turns, which reaches the
      server that took over.
    - `around(memory, operation, kind, act)` awaits `act(send)` in place of the next such operation of a
      memory's process on a record of that kind, such as `append` to a `page`. `send()` carries it out.
    - `copy_first(key, turn_id, turn, rev)` adds another copy of the first turn of a conversation, which has
      left the record, as a process with this revision of the turn does.
    """

    open: Callable[[MemoryKey, Any, Any], Awaitable[Any]]
    close: Callable[[Any], Awaitable[None]] = _nothing
    without: tuple[str, ...] = ()
    again: Callable[[Any], Any] | None = None
    kill: Callable[[Any], Awaitable[None]] | None = None
    lease_s: float = 20.0
    damage: Callable[[MemoryKey], Awaitable[None]] | None = None
    stored: Callable[[MemoryKey], Awaitable[object]] | None = None
    outage: Callable[[], AbstractAsyncContextManager[object]] | None = None
    round_trips: Callable[[], int] | None = None
    sealed: Callable[[Sealing], Memories] | None = None
    erase: Callable[[Any], Awaitable[None]] | None = None
    fail_over: Callable[[MemoryKey, int], Awaitable[None]] | None = None
    around: Callable[[Any, str, str, Act], None] | None = None
    copy_first: Callable[[MemoryKey, str, ConversationTurn, int], Awaitable[None]] | None = None


class MemoryBench:
    """The workbench of one check; leaving it closes the memories that the check has opened."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.history = History()
        self._opened: list[Any] = []

    def key(self) -> MemoryKey:
        """Return the key of a new conversation."""
        return MemoryKey(f"check-{uuid.uuid4().hex}", "user", "chat")

    async def memory(
        self,
        config: object = None,
        summarizer: Any = None,
        *,
        key: MemoryKey | None = None,
        sealing: Sealing | None = None,
    ) -> Memory:
        """Return a memory in a process with these keys; without `key`, of a new conversation."""
        memories = self.memories
        if sealing is not None:
            if memories.sealed is None:
                not_asked("needs `Memories.sealed`")
            memories = memories.sealed(sealing)
        memory = await memories.open(key or self.key(), config, summarizer)
        self._opened.append(memory)
        noted = ("add_turn", "get_llm_context", "turns", "flush", "close")
        recorded = Recorded(memory, self.history, f"memory{len(self._opened)}", noted)
        return cast("Memory", _Asked(recorded, self))

    def needs(self, what: str) -> None:
        """Skip the check if this implementation lacks this feature beyond the protocol."""
        if what in self.memories.without:
            not_asked(f"needs `{what}`, which this memory is declared to lack")

    async def kill(self, memory: Memory) -> None:
        """End a memory as SIGKILL would."""
        if self.memories.kill is None:
            not_asked("needs `Memories.kill`")
        self.history.say("the memory's process is killed")
        # The wrapper that records calls is ours; the implementation knows only its own object.
        await self.memories.kill(cast("_Asked", memory).recorded.inner)

    def around(self, memory: Memory, operation: str, kind: str, act: Act) -> None:
        """Await `act(send)` in place of the next such operation of a memory's process."""
        if self.memories.around is None:
            not_asked("needs `Memories.around`")
        self.memories.around(cast("_Asked", memory).recorded.inner, operation, kind, act)

    async def erase(self, memory: Memory) -> None:
        """Erase all data of a memory's user, in its process."""
        if self.memories.erase is None:
            not_asked("needs `Memories.erase`")
        self.history.say("the user is erased")
        await self.memories.erase(cast("_Asked", memory).recorded.inner)

    def again(self, memory: Memory) -> Memory:
        """Return another memory object of the same conversation, in the same process."""
        if self.memories.again is None:
            not_asked("needs `Memories.again`")
        return self.memories.again(cast("_Asked", memory).recorded.inner)

    async def __aenter__(self) -> MemoryBench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:
            for memory in self._opened:
                closing.push_async_callback(self.memories.close, memory)


class _Asked:
    """A memory that skips the check when a feature is used that this implementation lacks."""

    def __init__(self, recorded: Recorded, bench: MemoryBench) -> None:
        self.recorded = recorded
        self._bench = bench

    async def add_turn(self, turn: Any, **named: Any) -> None:
        if named:
            self._bench.needs("turn_id")
        await self.recorded.add_turn(turn, **named)

    async def flush(self, *given: float, **named: float) -> None:
        if given or named:
            self._bench.needs("timeout")
        await self.recorded.flush(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "turns":
            self._bench.needs(name)
        if name == "each_turn":
            self._bench.needs("transcript")
        return getattr(self.recorded, name)


def turn(number: int | str, text: str = "fine") -> ConversationTurn:
    """Return a turn whose user message is `u<number>`."""
    return ConversationTurn(f"u{number}", text, ts=1.0)


def config(strategy: Any = "rolling_summary", zone: int = 2, **settings: Any) -> ShortTermMemoryConfig:
    """Return a configuration with short waits. Budget settings may be passed by name."""
    budget = {
        name: settings.pop(name)
        for name in ("summary_max_tokens", "total_max_tokens", "overflow_policy")
        if name in settings
    }
    settings = {"retry_backoff_base_s": 0.0, "degraded_retry_interval_s": 0.0, **settings}
    return ShortTermMemoryConfig(
        strategy=strategy, budget=MemoryBudget(full_zone_turns=zone, **budget), **settings
    )


async def shown(memory: Memory) -> dict[str, Any]:
    """Return the model's view: `summary`, and the user messages of `pending` and `recent`."""
    view = (await memory.get_llm_context()).get("conversation_memory", {})
    return {
        "summary": covered(view.get("summary", "")),
        "pending": [item["user"] for item in view.get("pending_turns", [])],
        "recent": [item["user"] for item in view.get("recent_turns", [])],
    }


async def told(memory: Memory) -> list[tuple[int, str]]:
    """Return the whole conversation as it can be read: the number and the user message of each turn."""
    return [(one.number, one.turn.user_message) async for one in cast("Any", memory).each_turn()]


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    expected: str = "the condition holds",
    *,
    within: float = 5.0,
) -> None:
    """Wait until a condition holds; if it does not in time, fail and say what was expected."""
    try:
        async with asyncio.timeout(within):
            while True:
                held = condition()
                if held is True or (not isinstance(held, bool) and await held):
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"expected within {within:g} s: {expected}") from None
