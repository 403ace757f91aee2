"""A session that ends in a process of its own, which is killed at its n-th operation on the datastore.

    python -m tests.support.dying_session URL EVERY

Runs the end of the session once for the user `whole`, and then for the users `u1`, `u1 + EVERY`, ... in
processes that are killed before that operation. Prints how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.tiers import MemoryManager

TENANT = "acme"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


class DyingDriver(WrapperDriver):
    """Kills its process before the `at`-th operation. Counts operations."""

    def __init__(self, inner: Driver, at: int) -> None:
        super().__init__(inner)
        self.at = at
        self.done = 0

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        del operation, key
        self.done += 1
        if self.done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return await send()


def gist(messages: list[dict[str, str]]) -> str:
    """Answer for the model."""
    del messages
    return "the gist of it"


async def end_session(backend: Backend, user: str) -> MemoryManager:
    """Fill a session, always the same, and end it; then merge what is similar."""
    memory = MemoryManager(
        backend=backend,
        owner=(TENANT, user),
        llm_provider=gist,
        session_id="s",
        clock=lambda: NOW,
    )
    await memory.remember("strong", "the customer wants a red bike", importance=0.9, tags=["bike"])
    await memory.remember("weak", "the customer wants a red bike soon", importance=0.6, tags=["soon"])
    await memory.remember("used", "often asked", importance=0.1)
    await memory.remember("minor", "forget this", importance=0.1)
    for number in range(10):
        await memory.remember(f"filler_{number}", f"smalltalk {number}", importance=0.1)
    for query in ("often", "often", "often", "bike soon"):
        await memory.short_term.recall(query)
    await memory.gc.on_session_end()
    await memory.long_term.consolidate()
    return memory


async def run(url: str, user: str, at: int) -> int:
    """End the session on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        await end_session(backend, user)
    return driver.done


def forked(work: Callable[[], int]) -> tuple[int, int]:
    """Run something in a process of its own; returns how that ended, and what it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(writing, b"%d" % work())
            status = 0
        except Exception:  # noqa: BLE001 -- it is said here, because the child ends below
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    return os.waitpid(child, 0)[1], int(text or b"0")


def main(url: str, every: int) -> None:
    status, operations = forked(lambda: asyncio.run(run(url, "whole", 0)))
    assert status == 0, status
    for at in range(1, operations + 1, every):
        status, _ = forked(lambda at=at: asyncio.run(run(url, f"u{at}", at)))
        # Concurrent steps may take fewer operations than in the first run.
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdout.write(f"{operations}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
