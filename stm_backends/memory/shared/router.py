"""One memory object for all conversations, for frameworks that hold a single one.

Such a framework names the conversation through `hydrate(store, composite)`, then reads and adds, then
calls `persist(store, composite)`. The router binds the key for the task that called `hydrate` and
passes everything on to that conversation's memory.

The binding is made in two halves. Calling `hydrate` puts an empty binding on top of the caller's stack
*at once*, before there is anything to await; awaiting it fills the binding in. So whatever goes wrong
in between (a key that is none, a timeout, a cancellation) leaves an empty binding on top, and an empty
binding shows nothing and stores nothing. It also makes `asyncio.wait_for(router.hydrate(...), 1)` bind
for the caller on Python 3.11, where `wait_for` awaits in a task of its own with a copied context.

Nobody tells the router that a run has ended without `persist`: it was paused, it raised, it timed out.
While bindings of different keys are stacked, what is on top may therefore belong to such a run, and the
caller to another. Then nothing is taken on trust: a turn is kept back until `persist` says whose it is,
and what a conversation knows is shown once for each `hydrate` and no more. `with router.bound(key):`
says where a run ends, and has no such doubts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from stm_backends.errors import InvalidKey
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records import keys
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey, as_composite, as_config

if TYPE_CHECKING:
    from types import CoroutineType

logger = logging.getLogger("stm_backends")

DEEPEST: Final = 64
"""How many bindings one task stacks; below lie those of calls that ended without `persist`."""

KEPT_MEMORIES: Final = 1_024
"""How many conversations' memory objects are kept for their next turn."""


class _Binding:
    """Which conversation is meant. `memory` is `None` before it is known and after it is over.

    `below` are the bindings of other keys that it was stacked on, and `above` counts those that were
    stacked on it and are not over. `kept` are turns that wait for `persist` to say whose they are.
    """

    __slots__ = ("above", "below", "composite", "exact", "kept", "memory", "shown")

    def __init__(self, composite: str, below: tuple[_Binding, ...], *, exact: bool) -> None:
        self.composite = composite
        self.memory: DistributedShortTermMemory | None = None
        self.below = below
        self.above = 0
        self.exact = exact
        self.shown = False
        self.kept: list[tuple[ConversationTurn, str]] = []
        for other in below:
            other.above += 1

    @property
    def doubtful(self) -> bool:
        """Whether a caller may be another run than the one that made this binding."""
        return self.above > 0 or (bool(self.below) and not self.exact)

    def end(self) -> None:
        """Be over, also in a task that was started inside, lives on and has this in its own stack."""
        self.memory = None
        for other in self.below:
            other.above -= 1
        self.below = ()


class MemoryRouter:
    """A `ShortTermMemory` that is, for each task, the memory of the conversation bound there.

    Nothing bound means: shows nothing, stores nothing, and says so in the log.
    """

    def __init__(
        self,
        make_memory: Callable[[MemoryKey], DistributedShortTermMemory],
        config: object | None = None,
        *,
        keep: int = KEPT_MEMORIES,
    ) -> None:
        self._make_memory = make_memory
        self._config = as_config(config)
        self._keep = keep
        self._memories: OrderedDict[str, DistributedShortTermMemory] = OrderedDict()
        self._stack: ContextVar[tuple[_Binding, ...]] = ContextVar("stm_bindings", default=())

    def hydrate(self, store: object, key: str | MemoryKey) -> CoroutineType[Any, Any, None]:
        """Bind a conversation for the current task until `persist`; `key` is its composite, or its key.

        Whatever was bound is hidden from this very call on. Raises `InvalidKey`, when awaited, for
        anything but three `:`-separated parts as `MemoryKey.composite()` writes them. `store` is not
        used: the conversation is in the backend already.
        """
        try:
            composite = as_composite(key)
        except InvalidKey as error:
            self._push("")
            return _raise(error)
        return self._fill(self._push(composite), composite)

    def persist(self, store: object, key: str | MemoryKey) -> CoroutineType[Any, Any, None]:
        """End the binding of `key`, and those stacked on it.

        The turns are stored already, but for those that had to be kept back: they are stored now.
        """
        try:
            key = as_composite(key)
        except InvalidKey as error:
            return _raise(error)
        stack = self._stack.get()
        top = stack[-1] if stack else None
        bound = next((one for one in reversed(stack) if one.composite == key), None)
        # Whoever persists the top has added all of it. Another has added the last turn, and whose the
        # others are, nobody will say any more.
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
        """Bind a conversation for the body of a `with` statement."""
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

        Within another conversation's run the turn is checked now and stored by `persist`.
        """
        binding, memory = self._bound("add_turn")
        if memory is None or binding is None:
            return
        if binding.doubtful:
            stored = memory.checked(turn, turn_id)
            binding.kept.append((stored.turn, stored.id))
        else:
            await memory.add_turn(turn, turn_id=turn_id)

    async def get_llm_context(self) -> dict[str, Any]:
        """Return what the model shall know of the bound conversation; `{}` if none is bound.

        Within another conversation's run it is shown once for each `hydrate`.
        """
        binding, memory = self._bound("get_llm_context", shows=True)
        if memory is None or binding is None:
            return {}
        binding.shown = True
        return await memory.get_llm_context()

    async def turns(self) -> list[ConversationTurn]:
        """Return every turn of the bound conversation that is retained in full."""
        _, memory = self._bound("turns", shows=True)
        return [] if memory is None else await memory.turns()

    def estimate_tokens(self) -> int:
        """Estimate the tokens of the bound conversation's context."""
        _, memory = self._bound("estimate_tokens")
        return self._config.estimate("{}") if memory is None else memory.estimate_tokens()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing of the bound conversation is pending."""
        _, memory = self._bound("flush")
        if memory is not None:
            await memory.flush(timeout)

    async def close(self, *, timeout: float = 0.0) -> None:
        """End the background work of every conversation that is still held."""
        memories = [*self._memories.values()]
        self._memories.clear()
        await asyncio.gather(*(memory.close(timeout=timeout) for memory in memories))

    # Bindings: a tuple per context, of cells that a copied context shares

    def _push(self, composite: str, *, exact: bool = False) -> _Binding:
        stack = self._stack.get()
        below = tuple(one for one in stack if one.memory is not None and one.composite != composite)
        binding = _Binding(composite, below, exact=exact)
        stack = (*stack, binding)
        for forgotten in stack[:-DEEPEST]:
            forgotten.end()
        self._stack.set(stack[-DEEPEST:])
        return binding

    def _pop(self, binding: _Binding) -> None:
        """End a binding and those stacked on it."""
        stack = self._stack.get()
        depth = stack.index(binding) if binding in stack else len(stack)
        self._stack.set(stack[:depth])
        for ended in {binding, *stack[depth:]}:
            ended.end()

    async def _fill(self, binding: _Binding, composite: str) -> None:
        binding.memory = self._memory_of(composite, keys.parse_composite(composite))

    async def _store(
        self,
        kept: list[tuple[ConversationTurn, str]],
        composite: str,
        memory: DistributedShortTermMemory | None,
    ) -> None:
        if kept:
            memory = memory or self._memory_of(composite, keys.parse_composite(composite))
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

    # Memory objects of conversations seen lately

    def _memory_of(self, composite: str, key: MemoryKey) -> DistributedShortTermMemory:
        memory = self._memories.pop(composite, None) or self._make_memory(key)
        self._memories[composite] = memory
        while len(self._memories) > self._keep:
            # One that a binding needs lives on in it, and its background by itself.
            self._memories.popitem(last=False)
        return memory


async def _raise(error: InvalidKey) -> None:
    """Raise an error once it is awaited."""
    raise error
