"""One memory object for all conversations, for frameworks that hold a single one.

Such a framework names the conversation through `hydrate(store, composite)`, then reads and adds, then
calls `persist(store, composite)`. The router binds the key for the task that called `hydrate` and
passes everything on to that conversation's memory.

A binding is made in two steps. Calling `hydrate` pushes an empty binding onto the caller's stack immediately,
before anything is awaited; awaiting it fills the binding in. An error in between (an invalid key, a timeout,
a cancellation) therefore leaves an empty binding on top, which shows nothing and stores nothing. It also
makes `asyncio.wait_for(router.hydrate(...), 1)` bind for the caller on Python 3.11, where `wait_for` awaits
in a new task with a copied context.

The router is not notified of a run that ends without `persist` because it was paused, raised or timed out.
While bindings of different keys are stacked, the top may belong to such a run and the caller to another one.
In that case a turn is held back until `persist` names its conversation, and each context is shown only once
for each `hydrate`. `with router.bound(key):` marks the end of a run, so it needs no such caution.

Before a conversation is shown or added to, its state from another memory is taken over: by `hydrate` or,
within `bound`, which awaits nothing, by the first method that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, Final

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_event_loop
from stm_backends.errors import InvalidKey
from stm_backends.memory.estimating import checked_config
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn
from stm_backends.protocols import ConfigLike
from stm_backends.records import keys
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey, as_composite

logger = logging.getLogger("stm_backends")

DEEPEST: Final = 64
"""Maximum number of bindings in one task; the lower ones belong to calls that ended without `persist`."""

KEPT_MEMORIES: Final = 1_024
"""Maximum number of conversations with a cached memory object."""

THERE: Final = 65_536
"""Number of conversations for which a process remembers that nothing is to be taken over."""


class _Binding:
    """A bound conversation. `memory` is `None` before the binding is filled in and after it has ended.

    `below` has the bindings of other keys below it, and `above` counts the active bindings stacked on it.
    `kept` has the turns that are held back until `persist` names their conversation. `settled` is true once
    nothing more is to be taken over, and `ended` once it can no longer be filled in.
    """

    __slots__ = ("above", "below", "composite", "ended", "exact", "kept", "memory", "settled", "shown")

    def __init__(self, composite: str, below: tuple[_Binding, ...], *, exact: bool) -> None:
        self.composite = composite
        self.memory: DistributedShortTermMemory | None = None
        self.below = below
        self.above = 0
        self.exact = exact
        self.shown = self.settled = self.ended = False
        self.kept: list[tuple[ConversationTurn, str]] = []
        for other in below:
            other.above += 1

    @property
    def doubtful(self) -> bool:
        """True if the caller may belong to another run than the one that made this binding."""
        return self.above > 0 or (bool(self.below) and not self.exact)

    def end(self) -> None:
        """End the binding, also for tasks that were started within it and have it on their stacks."""
        self.memory, self.ended = None, True
        for other in self.below:
            other.above -= 1
        self.below = ()


class MemoryRouter:
    """A `ShortTermMemory` that is, for each task, the memory of the conversation bound there.

    Without a binding it shows nothing, stores nothing, and logs a warning.
    """

    def __init__(
        self,
        make_memory: Callable[[MemoryKey], DistributedShortTermMemory],
        config: ConfigLike | None = None,
        *,
        keep: int = KEPT_MEMORIES,
        adopt: Callable[[MemoryKey], Awaitable[bool]] | None = None,
    ) -> None:
        """`adopt` takes a conversation over, and returns whether it exists here afterwards."""
        self._make_memory = make_memory
        self._adopt = adopt
        self._there: Bounded[str, bool] = Bounded(THERE)
        self._config = checked_config(config)
        # A binding keeps its memory object, and a running background keeps itself.
        self._memories: Bounded[str, DistributedShortTermMemory] = Bounded(keep)
        self._stack: ContextVar[tuple[_Binding, ...]] = ContextVar("stm_bindings", default=())

    def hydrate(self, store: object, key: str | MemoryKey) -> CoroutineType[Any, Any, None]:
        """Bind a conversation for the current task until `persist`; `key` is its composite, or its key.

        Takes effect when called, and hides the previous binding. Awaiting it raises `InvalidKey` for anything
        but three `:`-separated parts as `MemoryKey.composite()` writes them. `store` is not used: the
        conversation is in the backend already. With `adopt_from`, it also raises the errors of
        `Sessions.adopt`; then nothing is bound.
        """
        try:
            composite = as_composite(key)
        except InvalidKey as error:
            self._push("")
            return _raise(error)
        return self._fill(self._push(composite), composite)

    def persist(self, store: object, key: str | MemoryKey) -> CoroutineType[Any, Any, None]:
        """End the binding of `key` and those stacked on it, and store the turns that were held back.

        All other turns are stored already.
        """
        try:
            key = as_composite(key)
        except InvalidKey as error:
            return _raise(error)
        stack = self._stack.get()
        top = stack[-1] if stack else None
        bound = next((one for one in reversed(stack) if one.composite == key), None)
        # A caller that persists the top has added all of its turns. Any other caller has added the last one,
        # and the conversation of the others is unknown.
        kept = [] if top is None else top.kept if bound is top else top.kept[-1:]
        lost = 0 if top is None else len(top.kept) - len(kept)
        if lost:
            logger.error("%d turns of a run that ended without persist were not stored", lost)
        memory = None if bound is None else bound.memory
        if top is not None:
            top.kept = []
        if bound is not None:
            self._pop(bound)
        elif not kept:
            logger.warning("persist was called for a conversation that is not bound here")
        return self._store(kept, key, memory)

    @contextlib.contextmanager
    def bound(self, key: MemoryKey) -> Generator[None]:
        """Bind a conversation for the body of a `with` statement in a coroutine.

        Raises `InvalidKey`, and `ConfigurationError` in a thread without an event loop: other tasks would not
        see the binding.
        """
        keys.require_key(key)
        require_event_loop(
            "router.bound(...) binds for the task that enters it, and this thread has no event loop, so "
            "that no task would see the binding; in FastAPI, make the dependency `async def`"
        )
        composite = key.composite()
        memory = self._memory_of(composite, key)
        binding = self._push(composite, exact=True)
        binding.memory = memory
        try:
            yield
        finally:
            self._pop(binding)

    @property
    def health(self) -> MemoryHealth:
        """The health of the bound conversation; `HEALTHY` if none is bound."""
        _, memory = self._bound("health")
        return MemoryHealth.HEALTHY if memory is None else memory.health

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Remember a turn of the bound conversation; stores nothing if none is bound.

        Within another conversation's run the turn is checked at once and stored by `persist`.
        """
        binding, memory = self._bound("add_turn")
        if memory is None or binding is None:
            return
        await self._settle(binding)
        if binding.doubtful:
            stored = memory.checked(turn, turn_id)
            binding.kept.append((stored.turn, stored.id))
        else:
            await memory.add_turn(turn, turn_id=turn_id)

    async def get_llm_context(self) -> dict[str, Any]:
        """Return the context of the bound conversation; `{}` if none is bound.

        Within another conversation's run it is shown once for each `hydrate`.
        """
        binding, memory = self._bound("get_llm_context", shows=True)
        if memory is None or binding is None:
            return {}
        binding.shown = True
        await self._settle(binding)
        return await memory.get_llm_context()

    async def turns(self) -> list[ConversationTurn]:
        """Return every turn of the bound conversation that is retained in full."""
        binding, memory = self._bound("turns", shows=True)
        await self._settle(binding)
        return [] if memory is None else await memory.turns()

    async def transcript(
        self,
        *,
        before: int | None = None,
        after: int | None = None,
        at: int | None = None,
        limit: int = 50,
    ) -> TranscriptPage:
        """Return up to `limit` turns of the whole bound conversation by their numbers, oldest first."""
        binding, memory = self._bound("transcript", shows=True)
        await self._settle(binding)
        if memory is None:
            return TranscriptPage((), 0, -1)
        return await memory.transcript(before=before, after=after, at=at, limit=limit)

    def each_turn(self, *, after: int | None = None) -> AsyncGenerator[TranscriptTurn]:
        """Yield all turns after a number of the conversation that is bound when this is called, oldest first.

        The binding may end while they are read.
        """
        binding, memory = self._bound("each_turn", shows=True)
        return self._each_turn(binding, memory, after)

    def estimate_tokens(self) -> int:
        """Estimate the tokens of the bound conversation's context."""
        _, memory = self._bound("estimate_tokens")
        return self._config.estimate("{}") if memory is None else memory.estimate_tokens()

    def get_artifact(self, ref: str) -> Any | None:
        """Return an artifact of the bound conversation, or `None`."""
        _, memory = self._bound("get_artifact", shows=True)
        return None if memory is None else memory.get_artifact(ref)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing of the bound conversation is pending."""
        _, memory = self._bound("flush")
        if memory is not None:
            await memory.flush(timeout)

    async def close(self, *, timeout: float = 0.0) -> None:
        """Stop the background work of every cached conversation."""
        memories = [*self._memories.values()]
        self._memories.clear()
        await asyncio.gather(*(memory.close(timeout=timeout) for memory in memories))

    # Bindings: a tuple for each context; copied contexts share the bindings in it

    def _push(self, composite: str, *, exact: bool = False) -> _Binding:
        stack = self._stack.get()
        below = tuple(one for one in stack if one.memory is not None and one.composite != composite)
        binding = _Binding(composite, below, exact=exact)
        stack = (*stack, binding)
        for dropped in stack[:-DEEPEST]:
            dropped.end()
        self._stack.set(stack[-DEEPEST:])
        return binding

    def _pop(self, binding: _Binding) -> None:
        """End a binding and the bindings stacked on it."""
        stack = self._stack.get()
        depth = stack.index(binding) if binding in stack else len(stack)
        self._stack.set(stack[:depth])
        for ended in {binding, *stack[depth:]}:
            ended.end()

    async def _fill(self, binding: _Binding, composite: str) -> None:
        memory = self._memory_of(composite, keys.parse_composite(composite))
        await self._settle(binding)
        if not binding.ended:
            binding.memory = memory

    async def _settle(self, binding: _Binding | None) -> None:
        """Take over a conversation that another memory has saved, once for each binding."""
        if binding is not None and not binding.settled:
            await self._take_over(binding.composite)
            binding.settled = True

    async def _take_over(self, composite: str) -> None:
        """Take over a conversation that another memory has saved, unless it exists here."""
        if self._adopt is None or self._there.use(composite):
            return
        if await self._adopt(keys.parse_composite(composite)):
            self._there[composite] = True

    async def _each_turn(
        self, binding: _Binding | None, memory: DistributedShortTermMemory | None, after: int | None
    ) -> AsyncGenerator[TranscriptTurn]:
        await self._settle(binding)
        if memory is not None:
            async for turn in memory.each_turn(after=after):
                yield turn

    async def _store(
        self,
        kept: list[tuple[ConversationTurn, str]],
        composite: str,
        memory: DistributedShortTermMemory | None,
    ) -> None:
        if kept:
            memory = memory or self._memory_of(composite, keys.parse_composite(composite))
            await self._take_over(composite)
            for turn, turn_id in kept:
                await memory.add_turn(turn, turn_id=turn_id)

    def _bound(
        self, asked: str, *, shows: bool = False
    ) -> tuple[_Binding | None, DistributedShortTermMemory | None]:
        stack = self._stack.get()
        binding = stack[-1] if stack else None
        if binding is None or binding.memory is None:
            logger.warning("%s without a bound conversation: nothing is shown or stored", asked)
            return None, None
        if shows and binding.doubtful and (binding.shown or binding.above):
            logger.warning("%s within another conversation's run: nothing is shown a second time", asked)
            return None, None
        return binding, binding.memory

    # Cached memory objects

    def _memory_of(self, composite: str, key: MemoryKey) -> DistributedShortTermMemory:
        memory = self._memories.use(composite)
        if memory is None:
            memory = self._memories[composite] = self._make_memory(key)
        return memory


async def _raise(error: InvalidKey) -> None:
    """Raise an error when awaited."""
    raise error
