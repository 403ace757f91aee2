"""The one place where what the memories do can be heard: counted, timed, traced.

Nobody listens unless told to. `telemetry.py` listens for OpenTelemetry; another observer is a class of
one's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from types import CoroutineType

    from stm_backends.drivers.contract import Driver
    from stm_backends.types import MemoryHealth

TurnEvent: TypeAlias = Literal["appended", "folded", "dropped"]
KeyPart: TypeAlias = Literal["tenant", "user", "session"]

P = ParamSpec("P")
T = TypeVar("T")


class Observer:
    """Hears what memories do in this process. Derive from it and override what you want to hear.

    Nothing that it is told has text of a conversation or an id in it; only an error's message may. It is
    called in the middle of the work, on the event loop: it returns at once and raises nothing. One
    observer may serve any number of backends and memories.
    """

    def driver(self, driver: Driver) -> Driver:
        """Return what a backend shall use in place of its driver: that, or one around it."""
        return driver

    def call(self, name: str) -> AbstractContextManager[object]:
        """Return what is entered around a call of a memory, or of its summarizer (`summarize`)."""
        del name
        return _NOTHING

    def background(self) -> AbstractContextManager[object]:
        """Return what is entered around one step of the background, which no call waits for."""
        return _NOTHING

    def turns(self, event: TurnEvent, count: int) -> None:
        """Hear that turns were stored, are covered by a summary now, or were let go without one."""

    def race_lost(self) -> None:
        """Hear that a summary, or a trim, came too late: somebody else had changed the conversation."""

    def summarizer_failed(self, error: Exception) -> None:
        """Hear that a summarizer call failed. The message of `error` may quote the conversation."""

    def health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        """Hear that this process changed a conversation's health."""

    def context_shown(self, tokens: Callable[[], int]) -> None:
        """Hear that the model is shown a context; `tokens` estimates how many tokens that has."""

    def key_unresolved(self, part: KeyPart) -> None:
        """Hear that a call has no memory because its context has no usable tenant, user or session."""


_NOTHING: Final = nullcontext()

SILENT: Final = Observer()
"""Tells nobody."""


class Observable(Protocol):
    """Whatever tells an observer what it does."""

    @property
    def observer(self) -> Observer: ...


S = TypeVar("S", bound=Observable)


def observed(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], CoroutineType[Any, Any, T]]:
    """Tell the observer of an object of every call of a method."""
    name = method.__name__

    @wraps(method)
    async def observing(self: S, *args: P.args, **options: P.kwargs) -> T:
        if self.observer is SILENT:
            # What nobody listens to is not to be slower for it.
            return await method(self, *args, **options)
        with self.observer.call(name):
            return await method(self, *args, **options)

    return observing
