"""Runs of one thread, one after another in all processes: a claim that its holder renews."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final
from weakref import WeakValueDictionary

from stm_backends.backend import Backend
from stm_backends.drivers.tasks import to_its_end
from stm_backends.errors import EditConflict, StorageError
from stm_backends.logs import conversation
from stm_backends.races import pause
from stm_backends.records.keys import RESERVED_PREFIX
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

LEASE_S: Final = 15.0
"""For how long a claim holds that its process does not renew. It is renewed three times within it."""


class Turns:
    """Who may run which thread, on one backend. A claim is a saved state that expires by itself."""

    def __init__(self, backend: Backend) -> None:
        self._states = backend.state_store
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, key: MemoryKey, wait_s: float | None) -> AsyncGenerator[None]:
        """Hold the claim of a thread within this context; raises `EditConflict` after `wait_s` seconds."""
        name, token = f"{RESERVED_PREFIX}{key.composite()}:langgraph-turn", secrets.token_hex(12)
        # One run of this process asks the datastore at a time; the others wait in their order.
        lock = self._locks.get(name)
        if lock is None:
            self._locks[name] = lock = asyncio.Lock()
        try:
            async with asyncio.timeout(wait_s):
                await lock.acquire()
        except TimeoutError:
            raise _busy() from None
        renewing: asyncio.Task[None] | None = None
        try:
            await self._claim(name, token, wait_s)
            renewing = asyncio.create_task(self._renew(name, token, key), name="stm-langgraph-turn")
            yield
        finally:
            try:
                await to_its_end(self._release(name, token, renewing))
            finally:
                lock.release()

    async def _claim(self, name: str, token: str, wait_s: float | None) -> None:
        tries = 0
        try:
            async with asyncio.timeout(wait_s):
                while not await self._states.save_if(name, {"by": token}, expect=None, ttl=LEASE_S):
                    tries += 1
                    await asyncio.sleep(pause(0.02, tries, 0.5))
        except TimeoutError:
            raise _busy() from None

    async def _renew(self, name: str, token: str, key: MemoryKey) -> None:
        """Renew a claim until this is cancelled. If it is lost, the saver refuses one of the two runs."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
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
        """Give up a claim; one that cannot be given up expires."""
        if renewing is not None:
            renewing.cancel()
            await asyncio.wait({renewing})
        with suppress(StorageError):
            state, version = await self._states.load_versioned(name)
            if state is not None and version is not None and state.get("by") == token:
                await self._states.delete_if(name, expect=version)


def _busy() -> EditConflict:
    return EditConflict("another run of this thread has not ended in time; this one has not begun")
