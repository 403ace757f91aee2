"""Workers in a separate process, which is killed at its n-th operation on the datastore.

    python -m tests.support.dying_worker URL EVERY

Adds turns to a conversation and has a worker summarize it, once for the tenant `whole`, and then for the
tenants `t1`, `t1 + EVERY`, ... in workers that are killed before that operation. Prints how many operations
the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Final

from stm_backends import ConversationTurn, MemoryKey
from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from tests.support.dying_session import DyingDriver, forked
from tests.support.short_lived import CONFIG, summarize

TURNS: Final = 8


def key_of(tenant: str) -> MemoryKey:
    return MemoryKey(tenant, "u", "s")


async def prepared(url: str, *tenants: str) -> int:
    async with Backend(plugins.open_driver(url), summaries="worker") as backend:
        for tenant in tenants:
            memory = backend.memory(key_of(tenant), CONFIG)
            for turn in range(TURNS):
                await memory.add_turn(ConversationTurn(f"u{turn}", "fine"), turn_id=f"t{turn}")
    return 0


async def work(url: str, tenant: str, at: int) -> int:
    """Work for a tenant on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), 0)
    async with Backend(driver) as backend:
        driver.at, driver.done = at, 0
        await backend.worker(summarizer=summarize, tenants=[tenant]).run(until_empty=True)
        done, driver.at = driver.done, 0
    return done


def main(url: str, every: int) -> None:
    assert forked(lambda: asyncio.run(prepared(url, "whole")))[0] == 0
    status, operations = forked(lambda: asyncio.run(work(url, "whole", 0)))
    assert status == 0, status
    each = range(1, operations + 1, every)
    for at in each:
        assert forked(lambda at=at: asyncio.run(prepared(url, f"t{at}")))[0] == 0
        status, _ = forked(lambda at=at: asyncio.run(work(url, f"t{at}", at)))
        # How often a worker looks before it ends depends on the clock.
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdout.write(f"{operations}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
