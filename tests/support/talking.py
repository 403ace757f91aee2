"""Conversations with transcripts in separate processes: killed at a moment of a fold, or in a hurry.

    python -m tests.support.talking killed URL MOMENT ...
    python -m tests.support.talking hurrying URL NAME TURNS AT_ONCE

`killed` runs a process for each moment, in the session of its name, and prints how it ended and what it had
acknowledged. `hurrying` adds turns to the session `shared` as fast as the datastore acknowledges them; its
model never answers. Prints each turn that is acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.testing.memory_contract import config, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey

SETTINGS: Final = config(
    transcript=True, total_max_tokens=0, summary_max_tokens=1_000_000, summarizer_timeout_s=0.5
)
HURRIED: Final = config(
    transcript=True, total_max_tokens=0, summary_max_tokens=1_000_000, summarizer_timeout_s=300.0
)
FOLD_AT: Final = 10
"""After how many turns a process that is to be killed waits for its fold. The seventh is of two pages."""

T = TypeVar("T")


class Moment(NamedTuple):
    """The `number`-th write of a kind in a process: its beginning or, if `done`, its end."""

    operation: Operation
    kind: str
    number: int
    done: bool


MOMENTS: Final = {
    "before-the-append": Moment("append", "page", 2, done=False),
    "between-append-and-replace": Moment("append", "page", 2, done=True),
    "after-the-replace": Moment("replace", "fold", 2, done=True),
    "between-two-appends-at-a-border": Moment("append", "page", 7, done=True),
    "before-the-replace-at-a-border": Moment("replace", "fold", 7, done=False),
    "before-the-seal": Moment("replace", "page", 1, done=False),
    "after-the-seal": Moment("replace", "page", 1, done=True),
}


def key_of(session: str) -> MemoryKey:
    return MemoryKey("acme", "u1", session)


class DyingDriver(WrapperDriver):
    """Kills its process at a moment."""

    def __init__(self, inner: Driver, moment: Moment) -> None:
        super().__init__(inner)
        self._moment = moment
        self._left = moment.number
        self._folds = False

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        self._folds = options.get("drop", 0) > 0 and key.scope.endswith(":memory")
        return await super().replace(key, body, **options)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        kind = (key if isinstance(key, str) else key.scope).rpartition(":")[2]
        if operation == "replace" and kind == "memory" and self._folds:
            kind = "fold"
        if (operation, kind) != self._moment[:2]:
            return await send()
        self._left -= 1
        if self._left == 0 and not self._moment.done:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await send()
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


async def talk(url: str, session: str) -> None:
    """Add turns, one after another, until this process is killed."""
    driver = DyingDriver(plugins.open_driver(url), MOMENTS[session])
    async with Backend(driver) as backend:
        memory = backend.memory(key_of(session), SETTINGS, summarizer=LedgerSummarizer())
        for number in range(10 * FOLD_AT):
            await memory.add_turn(turn(number), turn_id=f"t{number}")
            acknowledged(session, f"t{number}")
            if (number + 1) % FOLD_AT == 0:
                await memory.flush()


async def hurry(url: str, name: str, turns: int, at_once: int) -> None:
    """Add turns as fast as they are acknowledged, several at once, while no model answers."""
    model = LedgerSummarizer()
    model.hold()
    async with Backend(plugins.open_driver(url), close_timeout_s=0.1) as backend:
        memory = backend.memory(key_of("shared"), HURRIED, summarizer=model)

        async def write(writer: int) -> None:
            for number in range(turns // at_once):
                said = f"{name}-{writer}-{number}"
                await memory.add_turn(turn(said))
                acknowledged("shared", said)

        await asyncio.gather(*(write(writer) for writer in range(at_once)))


def acknowledged(session: str, what: str) -> None:
    sys.stdout.write(f"{session} {what}\n")
    sys.stdout.flush()


def killed(url: str, session: str) -> int:
    """Run a process until it is killed; returns by which signal."""
    child = os.fork()
    if not child:
        try:
            asyncio.run(talk(url, session))
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def main(what: str, url: str, *given: str) -> None:
    if what == "hurrying":
        asyncio.run(hurry(url, given[0], int(given[1]), int(given[2])))
        return
    for session in given:
        assert killed(url, session) == signal.SIGKILL, session


if __name__ == "__main__":
    main(*sys.argv[1:])
