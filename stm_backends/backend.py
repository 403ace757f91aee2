"""A backend that is open: everything that a program does with one datastore starts here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final
from weakref import WeakSet

from stm_backends import plugins, policy
from stm_backends.checks import require_count, require_seconds
from stm_backends.codec import Codec, Transform
from stm_backends.directory import Directory
from stm_backends.distributed import DistributedShortTermMemory
from stm_backends.driver import Driver, Key, Traits
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.item_log import ItemLog
from stm_backends.keys import LogKind
from stm_backends.large import LargeEntries
from stm_backends.observer import SILENT, Observer
from stm_backends.protocols import Summarizer
from stm_backends.router import MemoryRouter
from stm_backends.sessions import Sessions
from stm_backends.state_store import StateStore
from stm_backends.types import MemoryKey, as_config

logger = logging.getLogger("stm_backends")

NOWHERE: Final = Key("::ping", "ping")
"""A key that nothing is ever stored under: no tenant is empty, so its scope is nobody's."""


def open_backend(
    name_or_url: str,
    *,
    url: str | None = None,
    create: bool = False,
    transforms: Sequence[Transform] = (),
    max_summaries: int = 8,
    close_timeout_s: float = 10.0,
    observer: Observer = SILENT,
    **options: Any,
) -> Backend:
    """Return a backend by its entry-point name or by URL, to be used as `async with`.

    `create=True` sets up what the datastore needs beforehand, such as tables. `transforms` change what
    is stored, in order: compression, encryption. `max_summaries` bounds the summarizer calls in flight.
    `close_timeout_s` is how long closing waits for summaries under way. `observer` hears what is done, such
    as `telemetry.Telemetry()`. `options` are the driver's own.
    A name, a URL or an option that is wrong raises a `ConfigurationError` right here.
    """
    driver = plugins.open_driver(name_or_url, url=url, create=create, **options)
    return Backend(
        driver,
        transforms=transforms,
        max_summaries=max_summaries,
        close_timeout_s=close_timeout_s,
        observer=observer,
    )


class Backend(AbstractAsyncContextManager["Backend"]):
    """One driver and what is built on it: saved states, conversations, and the care for both.

    `open_backend` makes one by name; a driver made by hand, with a client of one's own, goes in here.
    Closing a backend closes its driver.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        transforms: Sequence[Transform] = (),
        max_summaries: int = 8,
        close_timeout_s: float = 10.0,
        observer: Observer = SILENT,
    ) -> None:
        require_count("max_summaries", max_summaries)
        require_seconds("close_timeout_s", close_timeout_s, zero=True)
        if not isinstance(observer, Observer):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
            raise ConfigurationError(f"observer is an Observer, not {type(observer).__name__}")
        self.driver = driver = LargeEntries(observer.driver(driver))
        self._observer = observer
        self._codec = Codec(transforms)
        self._directory = Directory(driver, self._codec)
        self.state_store = StateStore(driver, self._codec, self._directory)
        self.sessions = Sessions(driver, self._codec, self._directory)
        self._max_summaries = max_summaries
        self._slots = asyncio.Semaphore(max_summaries)
        self._close_timeout_s = close_timeout_s
        self._given: WeakSet[DistributedShortTermMemory | MemoryRouter] = WeakSet()
        self._open = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """The backend's name, as errors and reports show it."""
        return self.driver.name

    @property
    def traits(self) -> Traits:
        """Facts about the datastore: its reach, its limits, its clock."""
        return self.driver.traits

    def memory(
        self, key: MemoryKey, config: object | None = None, *, summarizer: Summarizer | None = None
    ) -> DistributedShortTermMemory:
        """Return the memory of one conversation, shared with every process that asks for the same key.

        Nothing is read or written by this. The backend sees to its background when closing. Raises
        `InvalidKey` for what is no key, and `ConfigurationError` for a configuration or a summarizer that
        cannot work.
        """
        _require_key(key)
        memory = DistributedShortTermMemory(
            self.driver,
            key,
            config,
            summarizer=summarizer,
            codec=self._codec,
            directory=self._directory,
            slots=self._slots,
            observer=self._observer,
        )
        self._given.add(memory)
        return memory

    def router(self, config: object | None = None, *, summarizer: Summarizer | None = None) -> MemoryRouter:
        """Return one memory object for all conversations, as agent frameworks want it.

        Raises `ConfigurationError` for a configuration or a summarizer that cannot work.
        """
        config = as_config(config)
        policy.summarizer_for(config, summarizer)
        router = MemoryRouter(partial(self.memory, config=config, summarizer=summarizer), config)
        self._given.add(router)
        return router

    def item_log(self, key: MemoryKey, kind: LogKind, *, ttl_s: float | None = None) -> ItemLog:
        """Return what an agent framework keeps of one conversation, shared as a memory is.

        Nothing is read or written by this. A log that nobody adds to for `ttl_s` seconds is forgotten;
        `None`: never. Raises `InvalidKey` for what is no key.
        """
        _require_key(key)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        return ItemLog(self.driver, key, kind, codec=self._codec, directory=self._directory, ttl_s=ttl_s)

    async def ping(self) -> float:
        """Ask the datastore for a record that is not there; returns how many seconds that took."""
        start = time.perf_counter()
        await self.driver.load(NOWHERE)
        return time.perf_counter() - start

    async def open(self) -> None:
        """Make ready. Opening twice is harmless; an opening that fails leaves nothing open."""
        try:
            await self.driver.open()
        except BaseException:
            try:
                await self.driver.close()
            except Exception as error:  # noqa: BLE001 -- the caller is to see why it would not open
                logger.warning("closing after a failed opening failed too: %s", type(error).__name__)
            raise
        self._open = True

    async def close(self) -> None:
        """End the background of every memory handed out, give back leases, close the driver.

        Takes no longer than `close_timeout_s` and a few operations. If it is cancelled, it waits for no
        summary any more and still does all of this before it ends. Closing twice is harmless, and
        whoever closes while another does waits for that.
        """
        closing = self._closing
        if closing is not None and closing.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({closing})
            return
        if not self._open:
            return
        self._open = False
        self._closing = closing = asyncio.get_running_loop().create_future()
        try:
            try:
                await self._close_memories()
            finally:
                # A semaphore belongs to the event loop it was first waited for on; the next may be another.
                self._slots = asyncio.Semaphore(self._max_summaries)
                await self.driver.close()
        finally:
            self._closing = None
            closing.set_result(None)

    async def _close_memories(self) -> None:
        timeout, deadline = self._close_timeout_s, self.traits.deadline
        closings = {asyncio.ensure_future(given.close(timeout=timeout)) for given in tuple(self._given)}
        if not closings:
            return
        try:
            await asyncio.wait(closings, timeout=timeout + deadline)
        finally:
            late = {task for task in closings if not task.done()}
            for task in late:
                task.cancel()
            if late:
                # What they cancel in turn gives its lease back, which takes the driver.
                await asyncio.wait(late, timeout=1.0 + deadline)
        for task in closings:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("a memory did not close well: %s", type(error).__name__)

    async def __aenter__(self) -> Backend:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _require_key(key: object) -> None:
    if not all(hasattr(key, part) for part in ("tenant_id", "user_id", "session_id")):
        raise InvalidKey(
            "a conversation's key is a MemoryKey(tenant, user, session); make one of its composite with "
            f"stm_backends.keys.parse_composite(...); not {type(key).__name__}"
        )
