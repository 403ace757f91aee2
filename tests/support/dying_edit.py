"""Edits in a separate process, which is killed at its n-th operation on the datastore.

    python -m tests.support.dying_edit URL EVERY [sealed]

Makes each kind of edit once, and then again in processes that are killed before their first operation, before
the one that is `EVERY` later, and so on. Prints a line for each conversation that was edited: the kind, and
its id.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from stm_backends import Backend
from stm_backends.drivers import plugins
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.messages import Message
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.dying_session import DyingDriver, forked
from tests.support.sealed import sealed

OWNER: Final = ("acme", "u1")
SETTINGS: Final = config(zone=2, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)
NEW: Final[Message] = {"role": "user", "content": "unew"}


class Edit(NamedTuple):
    """What is done to a conversation of this id, and what it says afterwards; of a copy, what that says."""

    make: Callable[[Conversation, str], Awaitable[Any]]
    after: Callable[[list[Message]], list[Message]]


EDITS: Final = {
    "continue-in-a-page": Edit(lambda chat, _: chat.rewind(5), lambda said: said[:6]),
    "continue-in-the-record": Edit(lambda chat, _: chat.rewind(13), lambda said: said[:14]),
    "replace-in-a-page": Edit(lambda chat, _: chat.replace(4, NEW), lambda said: [*said[:4], NEW, *said[5:]]),
    "replace-in-the-record": Edit(
        lambda chat, _: chat.replace(14, NEW), lambda said: [*said[:14], NEW, *said[15:]]
    ),
    "remove": Edit(lambda chat, _: chat.remove(4, 5), lambda said: [*said[:4], *said[6:]]),
    "copy": Edit(lambda chat, name: chat.fork(copy_of(name), to=9), lambda said: said[:10]),
}
"""The kinds of edits. The record holds the messages from the twelfth on, and a page those before."""


def exchanges(*numbers: int) -> list[tuple[Message, Message]]:
    """Return questions and their answers."""
    return [
        ({"role": "user", "content": f"u{number}"}, {"role": "assistant", "content": f"a{number}"})
        for number in numbers
    ]


SAID: Final = [message for both in exchanges(*range(8)) for message in both]


def copy_of(conversation: str) -> str:
    """Return the id of the copy that the edit `copy` makes."""
    return f"{conversation}-copied"


def backend_at(url: str, *, is_sealed: bool, at: int = 0) -> tuple[Backend, DyingDriver]:
    """Return a backend that kills this process before the `at`-th operation, and what counts them."""
    driver = DyingDriver(plugins.open_driver(url), at)
    return Backend(sealed(driver) if is_sealed else driver, close_timeout_s=0.2), driver


def chat_of(backend: Backend, conversation: str) -> Conversation:
    return backend.conversation(*OWNER, conversation, SETTINGS, summarizer=LedgerSummarizer())


async def talked(chat: Conversation, *numbers: int) -> list[Message]:
    """Add questions and answers, and have them summarized; returns them."""
    for both in exchanges(*numbers):
        await chat.add(*both)
    await chat.flush()
    return [message for both in exchanges(*numbers) for message in both]


async def run(url: str, kind: str, conversation: str, at: int, *, is_sealed: bool) -> int:
    """Begin a conversation, and edit it on a backend that kills this process; returns the operations."""
    backend, _ = backend_at(url, is_sealed=is_sealed)
    async with backend:
        await talked(chat_of(backend, conversation), *range(8))
    backend, driver = backend_at(url, is_sealed=is_sealed)
    async with backend:
        driver.at, driver.done = at, 0
        await EDITS[kind].make(chat_of(backend, conversation), conversation)
        done, driver.at = driver.done, 0
    return done


def main(url: str, every: int, *, is_sealed: bool) -> None:
    for kind in EDITS:
        at, operations = 0, 1
        while at <= operations:
            name = f"{kind}-{at}"
            sys.stdout.write(f"{kind} {name}\n")
            sys.stdout.flush()
            status, done = forked(
                lambda kind=kind, name=name, at=at: asyncio.run(run(url, kind, name, at, is_sealed=is_sealed))
            )
            # Concurrent steps may take fewer operations than in the first run.
            assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
            at, operations = (1, done) if at == 0 else (at + every, operations)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), is_sealed="sealed" in sys.argv)
