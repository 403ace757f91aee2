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

from stm_backends.admin.sessions import Sessions
from stm_backends.drivers import plugins
from stm_backends.drivers.checks import require_count, require_seconds
from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.history.log import ItemLog
from stm_backends.memory import policy
from stm_backends.memory.shared.backgrounds import MAX_SUMMARIES, Backgrounds
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.router import MemoryRouter
from stm_backends.protocols import Summarizer
from stm_backends.records.codec import Codec, Transform
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.state_store import StateStore
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.types import MemoryKey, as_config

logger = logging.getLogger("stm_backends")

PING_KEY: Final = Key("::ping", "ping")
"""A key that nothing is ever stored under: no tenant is empty, so its scope is nobody's."""


def open_backend(
    name_or_url: str,
    *,
    url: str | None = None,
    create: bool = False,
    transforms: Sequence[Transform] = (),
    max_summaries: int = MAX_SUMMARIES,
    close_timeout_s: float = 10.0,
    observer: Observer = SILENT,
    **options: Any,
) -> Backend:
    """Return a backend by its entry-point name or by URL, to be used as `async with`.

    `create=True` sets up what the datastore needs beforehand, such as tables. `transforms` change what
    is stored, in order: compression, encryption. `max_summaries` bounds the summarizer calls in flight; a
    tenant that has some leaves a quarter of them to the others. `close_timeout_s` is how long closing waits
    for summaries under way. `observer` hears what is done, such as `telemetry.Telemetry()`. `options` are the
    driver's own.
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
        max_summaries: int = MAX_SUMMARIES,
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
        self._backgrounds = Backgrounds(driver, self._codec, max_summaries=max_summaries, observer=observer)
        self._close_timeout_s = close_timeout_s
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

        Nothing is read or written by this. All memory objects of a conversation have one background, which
        works with the settings and the summarizer of the newest, and ends when the backend is closed. Raises
        `InvalidKey` for what is no key, and `ConfigurationError` for a configuration or a summarizer that
        cannot work.
        """
        _require_key(key)
        return DistributedShortTermMemory(
            self.driver,
            key,
            config,
            summarizer=summarizer,
            codec=self._codec,
            directory=self._directory,
            backgrounds=self._backgrounds,
            observer=self._observer,
        )

    def router(self, config: object | None = None, *, summarizer: Summarizer | None = None) -> MemoryRouter:
        """Return one memory object for all conversations, as agent frameworks want it.

        Raises `ConfigurationError` for a configuration or a summarizer that cannot work.
        """
        config = as_config(config)
        policy.summarizer_for(config, summarizer)
        return MemoryRouter(partial(self.memory, config=config, summarizer=summarizer), config)

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
        await self.driver.load(PING_KEY)
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
        """End the background of every conversation, give back leases, close the driver.

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
                await self._backgrounds.close(timeout=self._close_timeout_s)
            finally:
                await self.driver.close()
        finally:
            self._closing = None
            closing.set_result(None)

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
            f"stm_backends.records.keys.parse_composite(...); not {type(key).__name__}"
        )
