"""A conversation of LlamaIndex in a process of its own, which is killed at its n-th operation.

    python -m tests.support.dying_chat URL EVERY

Adds, removes, replaces and erases once for the user `whole`, and then for the users `u1`, `u1 + EVERY`, ...
in processes that are killed before that operation. Prints a line for each step that was acknowledged, the
user and the number of the step, and last how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from llama_index.core.llms import ChatMessage

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.integrations.llama_index import StmChatStore
from tests.support.dying_session import DyingDriver, forked

TENANT, KEY = "acme", "chat"


def add(text: str) -> Callable[[StmChatStore], Awaitable[object]]:
    return lambda store: store.async_add_message(KEY, ChatMessage(text))


STEPS: tuple[tuple[Callable[[StmChatStore], Awaitable[object]], list[str]], ...] = (
    (add("0"), ["0"]),
    (add("1"), ["0", "1"]),
    (add("2"), ["0", "1", "2"]),
    (lambda store: store.adelete_message(KEY, 1), ["0", "2"]),
    (add("3"), ["0", "2", "3"]),
    (lambda store: store.adelete_last_message(KEY), ["0", "2"]),
    (lambda store: store.async_add_message(KEY, ChatMessage("4"), 0), ["4", "0", "2"]),
    (lambda store: store.aset_messages(KEY, [ChatMessage("5"), ChatMessage("6")]), ["5", "6"]),
    (lambda store: store.adelete_messages(KEY), []),
    (add("7"), ["7"]),
)
"""What is done, one after another, and what stands there after each."""


async def run(url: str, user: str, at: int) -> int:
    """Do all on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        store = StmChatStore(backend, TENANT, user)
        for number, (step, _) in enumerate(STEPS):
            await step(store)
            os.write(1, f"{user} {number}\n".encode())
    return driver.done


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
