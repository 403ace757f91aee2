"""A conversation that is taken over by a process of its own, which is killed at its n-th operation.

    python -m tests.support.dying_adoption URL

Takes over a conversation of the user `u0`, and then those of `u1`, `u2`, ... in processes that are killed
before that operation. Prints how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.types import MemoryKey
from tests.support.dying_session import DyingDriver, forked

TENANT = "acme"
SUMMARY = "what was said before"
SAID = ["one", "two", "three"]


def key_of(at: int) -> MemoryKey:
    return MemoryKey(TENANT, f"u{at}", "chat")


class OldStore:
    """A store that has the same state for every conversation."""

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        del key
        pending, *turns = [{"user_message": text, "assistant_response": "a"} for text in SAID]
        state = {"version": 1, "health": "healthy", "summary": SUMMARY, "turns": turns, "pending": [pending]}
        return {**state, "backlog": [], "revision": "r"}


async def run(url: str, at: int) -> int:
    """Take a conversation over on a backend that kills this process; returns how many operations it took."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        assert await backend.sessions.adopt(key_of(at), OldStore())
    return driver.done


def main(url: str) -> None:
    status, operations = forked(lambda: asyncio.run(run(url, 0)))
    assert status == 0, status
    for at in range(1, operations + 1):
        status, _ = forked(lambda at=at: asyncio.run(run(url, at)))
        # Concurrent steps may take fewer operations than in the first run.
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdout.write(f"{operations}\n")


if __name__ == "__main__":
    main(sys.argv[1])
