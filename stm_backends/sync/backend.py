"""An open backend, for programs without an event loop."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from stm_backends import backend as asynchronous
from stm_backends.drivers.checks import not_open
from stm_backends.drivers.contract import Traits
from stm_backends.memory import policy
from stm_backends.messages import Shape
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.records.codec import Transform
from stm_backends.records.limits import Limits
from stm_backends.sealing.keys import Sealing
from stm_backends.sync.conversation import Conversation
from stm_backends.sync.conversations import Conversations
from stm_backends.sync.memory import Memory
from stm_backends.sync.state_store import StateStore, TenantStates
from stm_backends.sync.summarizers import PlainSummarizer, in_threads
from stm_backends.sync.thread import LoopThread, require_coroutine
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.types import MemoryIsolation, MemoryKey, Summaries, as_config

if TYPE_CHECKING:
    from stm_backends.sync.sessions import Sessions

T = TypeVar("T")


def open_backend(  # noqa: PLR0913 -- one for each setting
    name_or_url: str,
    *,
    url: str | None = None,
    create: bool = False,
    transforms: Sequence[Transform] = (),
    sealing: Sealing | None = None,
    isolation: MemoryIsolation | None = None,
    limits: Limits | None = None,
    max_summaries: int = 8,
    summaries: Summaries = "process",
    close_timeout_s: float = 10.0,
    observer: Observer = SILENT,
    **options: Any,
) -> Backend:
    """Return a backend by its entry-point name or by URL, to be used in a `with` statement.

    Takes the arguments of the asynchronous `open_backend`, and raises the same errors.
    """
    return Backend(
        asynchronous.open_backend(
            name_or_url,
            url=url,
            create=create,
            transforms=transforms,
            sealing=sealing,
            isolation=isolation,
            limits=limits,
            max_summaries=max_summaries,
            summaries=summaries,
            close_timeout_s=close_timeout_s,
            observer=observer,
            **options,
        )
    )


class Backend(AbstractContextManager["Backend"]):
    """A backend with blocking methods, and the thread whose event loop they run on.

    Usually created by `open_backend`. When constructed directly, it opens and closes the asynchronous
    `backend` that it is given. Several backends can share one `loop`, which stays open; without it, each
    backend has its own thread. A backend that is still open when the program ends is closed then.
    """

    def __init__(self, backend: asynchronous.Backend, *, loop: LoopThread | None = None) -> None:
        self._backend = backend
        self._given_loop = loop
        self._loop: LoopThread | None = None
        # Reentrant, because a signal handler may call close() during close().
        self._lifecycle = threading.RLock()
        self._process = 0
        self._given_up: WeakSet[threading.Thread] = WeakSet()
        self.state_store = StateStore(backend.state_store, self.run)
        self.conversations = Conversations(backend.conversations, self.run)

    @cached_property
    def sessions(self) -> Sessions:
        """The listings of the conversations of every tenant and user."""
        from stm_backends.sync.sessions import Sessions  # noqa: PLC0415 -- slow, and few processes need it

        return Sessions(self._backend.sessions, self.run)

    @property
    def asynchronous(self) -> asynchronous.Backend:
        """The asynchronous backend, which belongs to the loop's thread; use it through `run`."""
        return self._backend

    @property
    def name(self) -> str:
        """The backend's name, as errors and reports show it."""
        return self._backend.name

    @property
    def traits(self) -> Traits:
        """Facts about the datastore: its reach, its limits, its clock."""
        return self._backend.traits

    @property
    def record_traits(self) -> Traits:
        """The limits of one record, less the overhead of sealing; `traits` has those of values in parts."""
        return self._backend.record_traits

    def memory(
        self,
        key: MemoryKey,
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | PlainSummarizer | None = None,
    ) -> Memory:
        """Return the memory of one conversation, shared with every thread and process that uses its key.

        A summarizer may be a plain function, which is called in a separate thread. It must return eventually:
        while 32 calls that exceeded `summarizer_timeout_s` are still running, every further call fails. This
        method reads and writes nothing. Raises the same errors as the asynchronous one.
        """
        threaded = self._in_threads(config, summarizer)

        async def make() -> Memory:
            return Memory(self._backend.memory(key, config, summarizer=threaded), self.run)

        return self.run(make())

    def conversation(
        self,
        tenant: str,
        user: str,
        id: str,  # noqa: A002 -- what it is called
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | PlainSummarizer | None = None,
        shape: Shape | str | None = None,
        max_tokens: int | None = None,
    ) -> Conversation:
        """Return a conversation of messages, shared with every thread and process that uses its three ids.

        A summarizer may be a plain function, as for `memory`. Raises the same errors as the asynchronous one.
        """
        threaded = self._in_threads(config, summarizer)

        async def make() -> Conversation:
            found = self._backend.conversation(
                tenant, user, id, config, summarizer=threaded, shape=shape, max_tokens=max_tokens
            )
            return Conversation(found, self.run)

        return self.run(make())

    def _in_threads(
        self, config: ConfigLike | None, summarizer: Summarizer | PlainSummarizer | None
    ) -> Summarizer | None:
        # Checked before it is wrapped: every wrapper is callable. The backend knows whether one is needed.
        checked = policy.summarizer_for(as_config(config), summarizer, needed=False)
        return None if summarizer is None else in_threads(checked, self._given_up)

    def tenant_state(self, tenant: str) -> TenantStates:
        """Return the states that belong to a tenant as a whole, rather than to one of its users."""
        return TenantStates(self._backend.tenant_state(tenant), self.run)

    def ping(self, tenant: str | None = None) -> float:
        """Load a record that does not exist, and return how many seconds that took. See `Backend.ping`."""
        return self.run(self._backend.ping(tenant))

    def run(self, work: Coroutine[Any, Any, T], /) -> T:
        """Run a coroutine on the backend's event loop and return its result.

        For everything that only the asynchronous interface offers:
        `backend.run(backend.asynchronous.sessions.erase(key))`. See `LoopThread.run`.
        """
        loop = self._loop
        if loop is None:
            require_coroutine(work)
            work.close()
            raise not_open(opened=bool(self._process), backend=self.name, operation="run")
        return loop.run(work)

    def open(self) -> None:
        """Open the backend. Opening twice is harmless; a failed open leaves nothing open.

        Raises `ConfigurationError` in a process that was forked while the backend was open.
        """
        self._require_callable()
        with self._lifecycle:
            if self._loop is not None:
                self.run(self._backend.open())
                return
            self._loop, self._process = self._given_loop or LoopThread(), os.getpid()
            try:
                self.run(self._backend.open())
            except BaseException:
                self._leave_loop()
                raise
            atexit.register(self.close)

    def close(self) -> None:
        """Wait for running summaries, release leases, close the driver, and end the thread if we started it.

        Takes no longer than the asynchronous `close`; an interrupt ends the wait early. Closing twice is
        harmless, and so is closing in a forked process. Calls that other threads are making raise
        `OutcomeUnknown`.
        """
        if os.getpid() != self._process:
            return
        self._require_callable()
        with self._lifecycle:
            if self._loop is None:
                return
            try:
                self.run(self._backend.close())
            finally:
                self._leave_loop()

    def _require_callable(self) -> None:
        """Refuse to wait for a lock whose holder waits for this thread, or exists only in the parent."""
        loop = self._loop
        if loop is not None:
            loop.require_callable()

    def _leave_loop(self) -> None:
        atexit.unregister(self.close)
        loop, self._loop = self._loop, None
        if loop is not None and loop is not self._given_loop:
            loop.close()

    def __enter__(self) -> Backend:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
