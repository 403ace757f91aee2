"""Runs of one thread, one at a time across all processes, by a claim that its holder renews."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    suppress,
)
from types import TracebackType
from typing import Final
from weakref import WeakValueDictionary

from stm_backends.backend import Backend
from stm_backends.drivers.tasks import to_its_end
from stm_backends.errors import EditConflict, StorageError
from stm_backends.integrations.blocking import Waits, refuse
from stm_backends.logs import conversation
from stm_backends.races import pause
from stm_backends.records.keys import RESERVED_PREFIX
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

LEASE_S: Final = 15.0
"""Seconds until a claim that is not renewed expires. It is renewed three times within this time."""


class Turn(AbstractAsyncContextManager[None], AbstractContextManager[None]):
    """A context in which no other process runs a thread: `async with`, or `with` in another thread."""

    def __init__(self, held: AbstractAsyncContextManager[None], run: Waits | None) -> None:
        self._held = held
        self._run = run

    async def __aenter__(self) -> None:
        await self._held.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._held.__aexit__(kind, error, traceback)

    def __enter__(self) -> None:
        if self._run is None:
            refuse("with", "write `async with`")
        self._run(self.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if self._run is None:
            return None
        return self._run(self.__aexit__(kind, error, traceback))


class Turns:
    """The claims on the threads of one backend. A claim is a saved state that expires by itself."""

    def __init__(self, backend: Backend) -> None:
        self._states = backend.state_store
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, key: MemoryKey, wait_s: float | None) -> AsyncGenerator[None]:
        """Hold the claim of a thread within this context; raises `EditConflict` after `wait_s` seconds."""
        name, token = f"{RESERVED_PREFIX}{key.composite()}:langgraph-turn", secrets.token_hex(12)
        until = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        # One run of this process asks the datastore at a time; the others wait in order.
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout_at(until):
                await lock.acquire()
        except TimeoutError:
            raise _busy() from None
        ended, renewing = asyncio.Event(), None
        try:
            await self._claim(name, token, until)
            renewing = asyncio.create_task(self._renew(name, token, key, ended), name="stm-langgraph-turn")
            yield
        finally:
            ended.set()
            try:
                await to_its_end(self._release(name, token, renewing))
            finally:
                lock.release()

    async def _claim(self, name: str, token: str, until: float | None) -> None:
        """Take a claim, trying at least once; raises `EditConflict` at `until`, by the loop's clock."""
        tries, now = 0, asyncio.get_running_loop().time
        # A write that is cut short might take effect when nobody holds the claim.
        while not await to_its_end(self._states.save_if(name, {"by": token}, expect=None, ttl=LEASE_S)):
            tries += 1
            wait = pause(0.02, tries, 0.5)
            if until is not None:
                wait = min(wait, until - now())
            if wait <= 0:
                raise _busy()
            await asyncio.sleep(wait)

    async def _renew(self, name: str, token: str, key: MemoryKey, ended: asyncio.Event) -> None:
        """Renew a claim until `ended` is set. If the claim is lost, the saver refuses one of the two runs."""
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / 3):
                    await ended.wait()
                    return
            try:
                state, version = await self._states.load_versioned(name)
                if state is not None and version is not None and state.get("by") == token:
                    await self._states.save_if(name, state, expect=version, ttl=LEASE_S)
            except StorageError as error:
                logger.warning(
                    "could not renew the claim of a run: %s (conversation %s)",
                    type(error).__name__,
                    conversation(key.composite()),
                )

    async def _release(self, name: str, token: str, renewing: asyncio.Task[None] | None) -> None:
        """Release a claim. One that cannot be released expires."""
        if renewing is not None:
            await asyncio.wait({renewing})
        with suppress(StorageError):
            state, version = await self._states.load_versioned(name)
            if state is not None and version is not None and state.get("by") == token:
                await self._states.delete_if(name, expect=version)


def _busy() -> EditConflict:
    return EditConflict("another run of this thread did not end in time; this run has not begun")
