"""The interface for observing memories: counting, timing and tracing.

By default nothing is observed. `opentelemetry.py` reports to OpenTelemetry; derive from `Observer` for
anything else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper, wraps
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
)

if TYPE_CHECKING:
    from types import CoroutineType

    from stm_backends.drivers.contract import Driver
    from stm_backends.records.pages import PageEvent
    from stm_backends.types import MemoryHealth, MemoryKey

TurnEvent: TypeAlias = Literal["appended", "folded", "moved", "caught_up", "dropped"]
MemoryEvent: TypeAlias = Literal["promoted", "pruned", "merged", "truncated", "uncounted"]
TouchEvent: TypeAlias = Literal["written", "lost"]
WorkEvent: TypeAlias = Literal["noted", "lost", "done", "later"]
KeyPart: TypeAlias = Literal["tenant", "user", "session"]


class Subject(NamedTuple):
    """The owner of an event's data. `""` for a session means all of a user, for a user all of a tenant.

    All three are `""` for data that names no tenant, such as paused runs.
    """

    tenant: str = ""
    user: str = ""
    session: str = ""

    @classmethod
    def of(cls, key: MemoryKey) -> Subject:
        """Return the subject of one conversation."""
        return cls(key.tenant_id, key.user_id, key.session_id)


P = ParamSpec("P")
T = TypeVar("T")


class Observer:
    """Receives events of memories in this process. Derive from it and override the methods you need.

    No argument contains text of a conversation, except perhaps an error's message. Only a `Subject` contains
    ids; hash them before you store them, as `examples/audit.py` does. The methods are called during the work,
    on the event loop, so they must return at once. An error that they raise is logged without its message and
    does not affect the work. One observer may serve any number of backends and memories.
    """

    def driver(self, driver: Driver) -> Driver:
        """Return the driver that a backend uses: the given one, or one around it."""
        return driver

    def call(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager around a call of a memory, or of its summarizer (`summarize`)."""
        del name
        return _NOTHING

    def background(self) -> AbstractContextManager[object]:
        """Return a context manager around one step of the background, which no call waits for."""
        return _NOTHING

    def turns(self, event: TurnEvent, count: int) -> None:
        """Receive that turns were stored, were folded into a summary, or were dropped without one.

        `moved` ones left the record before a summary covers them, and wait in pages; `caught_up` ones wait
        there no longer. They are counted as folded or dropped, too, except where a strategy without summaries
        has ended the wait.
        """

    def pages(self, event: PageEvent, count: int) -> None:
        """Receive that pages of transcripts were written, or were read for their turns."""

    def touches(self, event: TouchEvent, count: int) -> None:
        """Receive that activities of conversations were written to the catalogue, or given up."""

    def work(self, event: WorkEvent, count: int) -> None:
        """Receive that notes of the queue of work were stored or could not be, or that jobs ended.

        `done` ones have nothing left to do, and `later` ones wait for a retry, or have more to do.
        """

    def work_waits(self, count: int, lag: float) -> None:
        """Receive what a worker finds in the queue: its jobs, and for how long the oldest has been due.

        `lag` is in seconds, and 0 if none is due. Jobs that are being done count, and those that wait for a
        retry count without a lag.
        """

    def race_lost(self) -> None:
        """Receive that a summary or a failed attempt lost the race against a concurrent change."""

    def summarizer_failed(self, error: Exception) -> None:
        """Receive that a summarizer call failed. The message of `error` may quote the conversation."""

    def function_failed(self, function: str, error: BaseException) -> None:
        """Receive that a function that was handed in failed: `token_estimator`, `callback`, ...

        The message of `error` may quote the conversation.
        """

    def health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        """Receive that this process changed a conversation's health."""

    def context_shown(self, tokens: Callable[[], int]) -> None:
        """Receive that a context is shown to the model; `tokens` estimates its number of tokens."""

    def clear_text_met(self) -> None:
        """Receive that a value was read which is not sealed, as `Sealing(accept_clear=True)` allows."""

    def key_unresolved(self, part: KeyPart) -> None:
        """Receive that a call has no memory because its context lacks a usable tenant, user or session."""

    def memories(self, event: MemoryEvent, tier: str, count: int) -> None:
        """Receive that entries of `short_term` or `long_term` memory were promoted, pruned or merged.

        `tier` is the one that received the promoted entries, or lost the others. A merge removes an entry
        that duplicates another; a prune removes one that is irrelevant, stale or too many. `truncated`: a
        model failed, and a summary is cut text instead. `uncounted`: entries were read, and these accesses
        could not be counted.
        """

    # For accountability

    def erased(self, subject: Subject, records: int) -> None:
        """Receive that an erasure is complete, and how many records it removed, perhaps none."""

    def purged(self, subject: Subject, records: int) -> None:
        """Receive that a purge emptied a conversation or a log because of its age."""

    def exported(self, subject: Subject) -> None:
        """Receive that a conversation was exported."""

    def imported(self, subject: Subject) -> None:
        """Receive that an exported conversation was imported."""

    def copied(self, subject: Subject, records: int) -> None:
        """Receive that records were copied to another datastore, byte for byte."""

    def denied(self, subject: Subject, operation: str) -> None:
        """Receive that the datastore or the store of keys refused an operation for lack of permission."""

    def limit_reached(self, subject: Subject, limit: str) -> None:
        """Receive that a turn or a conversation was refused; `limit` names the limit that it exceeds."""


_NOTHING: Final = nullcontext()

SILENT: Final = Observer()
"""The observer that does nothing."""


class Observable(Protocol):
    """An object with an observer."""

    @property
    def observer(self) -> Observer: ...


S = TypeVar("S", bound=Observable)


def observed(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], CoroutineType[Any, Any, T]]:
    """Report every call of a method to the observer of its object; without one, it is the method itself."""
    return cast("Any", _Observed(method))


class _Observed:
    """A descriptor, so that a call costs no further coroutine if its object has no observer."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        name = method.__name__

        @wraps(method)
        async def observing(instance: Observable, *args: Any, **options: Any) -> Any:
            with instance.observer.call(name):
                return await method(instance, *args, **options)

        self._method = method
        self._observing = observing
        update_wrapper(self, method)

    def __get__(
        self, instance: Observable | None, owner: type | None = None
    ) -> Callable[..., Awaitable[Any]]:
        if instance is None:
            return self._method
        return MethodType(self._method if instance.observer is SILENT else self._observing, instance)

    def __call__(self, instance: Observable, *args: Any, **options: Any) -> Awaitable[Any]:
        return self.__get__(instance)(*args, **options)
