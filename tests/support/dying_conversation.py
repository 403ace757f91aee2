"""A conversation of Pydantic AI in a process of its own, which is killed at its n-th operation.

    python -m tests.support.dying_conversation URL EVERY

Saves, forks and deletes once for the user `whole`, and then for the users `u1`, `u1 + EVERY`, ... in
processes that are killed before that operation. Prints a line for each step that was acknowledged, the user
and the step, and last how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from pydantic_ai import Conversation
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.integrations.pydantic_ai import StmConversationStore
from tests.support.dying_session import DyingDriver, forked

TENANT = "acme"
TURNS = 4
FORKED_AT = 5


def turn(number: int) -> list[ModelMessage]:
    return [
        ModelRequest(parts=[UserPromptPart(f"{number}?")]),
        ModelResponse(parts=[TextPart(f"{number}!")]),
    ]


async def say(store: StmConversationStore, number: int) -> None:
    """Save one turn more."""
    conversation = await store.load("chat") or Conversation(conversation_id="chat")
    conversation.messages += turn(number)
    await store.save(conversation)


async def converse(backend: Backend, user: str) -> None:
    def done(step: str) -> None:
        os.write(1, f"{user} {step}\n".encode())

    store = StmConversationStore(backend, TENANT, user)
    for number in range(TURNS):
        await say(store, number)
        done(str(number))
    await store.fork("chat", at=FORKED_AT, new_conversation_id="fork")
    done("fork")
    await store.delete("chat")
    done("delete")


async def run(url: str, user: str, at: int) -> int:
    """Converse on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        await converse(backend, user)
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
