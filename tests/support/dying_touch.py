"""Touches in a separate process, which is killed at its n-th operation on the datastore.

    python -m tests.support.dying_touch URL EVERY

Touches conversations once for the user `whole`, and then for the users `u1`, `u1 + EVERY`, ... in processes
that are killed before that operation. Prints how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Final

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.admin.describing import catalogue_on
from stm_backends.backend import Backend
from stm_backends.catalogue.card import SLOT_S, Activity
from stm_backends.catalogue.index import Catalogue
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver
from stm_backends.memory.touches import Touches
from stm_backends.records.directory import Directory
from tests.support.dying_session import DyingDriver, forked

TENANT: Final = "acme"
NOW: Final = 1_790_000_000.0
OLD: Final = ("first", "second", "third")
NEW: Final = "new"


def key_of(user: str, session: str) -> MemoryKey:
    return MemoryKey(TENANT, user, session)


def catalogue_of(backend: Backend, driver: Driver, now: float) -> Catalogue:
    return catalogue_on(driver, backend.codec, Directory(driver, backend.codec), clock=lambda: now)


async def prepare(backend: Backend, user: str) -> None:
    """Store conversations: the old ones are in the list, an hour apart, the new one is not."""
    config = ShortTermMemoryConfig("truncation")
    for age, session in enumerate((NEW, *reversed(OLD))):
        at = NOW - age * SLOT_S
        key = key_of(user, session)
        await backend.memory(key, config).add_turn(ConversationTurn("Hello", "Hi", ts=at))
        if session != NEW:
            await catalogue_of(backend, backend.driver, NOW).touch(key, ttl=None)


async def touch(url: str, user: str, at: int) -> int:
    """Do each kind of touch on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), 0)
    async with Backend(driver) as backend:
        catalogue = catalogue_of(backend, backend.driver, NOW)
        driver.at, driver.done = at, 0
        seen = Activity({"memory": 2}, NOW, "later")
        assert await catalogue.touch(key_of(user, "first"), seen, kind="memory", ttl=None)
        assert await catalogue.update(key_of(user, "second"), {"title": "Lisbon"})
        assert await catalogue.touch(key_of(user, NEW), kind="memory", ttl=None)
        done, driver.at = driver.done, 0
    return done


def main(url: str, every: int) -> None:
    # Only the touches above are made.
    Touches.note = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]

    async def prepared(*users: str) -> int:
        async with Backend(plugins.open_driver(url)) as backend:
            for user in users:
                await prepare(backend, user)
        return 0

    assert forked(lambda: asyncio.run(prepared("whole")))[0] == 0
    status, operations = forked(lambda: asyncio.run(touch(url, "whole", 0)))
    assert status == 0, status
    each = range(1, operations + 1, every)
    assert forked(lambda: asyncio.run(prepared(*(f"u{at}" for at in each))))[0] == 0
    for at in each:
        status, _ = forked(lambda at=at: asyncio.run(touch(url, f"u{at}", at)))
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdout.write(f"{operations}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
