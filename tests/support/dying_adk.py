"""Sessions of Google ADK in processes that are killed at their n-th operation on the datastore.

    python -m tests.support.dying_adk URL EVERY

Appends events of one session, once for the app `whole`, and then for the apps `a1`, `a1 + EVERY`, ... in
processes that are killed before that operation. Prints how many events each app was told are stored, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Final

from google.adk.events import Event, EventActions

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.integrations.google_adk import StmSessionService
from tests.support.dying_session import DyingDriver

USER: Final = "u1"
EVENTS: Final = 3


def event(number: int) -> Event:
    """Return an event that sets a key of its own in each part of the state."""
    delta = {f"{scope}k{number}": number for scope in ("", "user:", "app:")}
    return Event(author="agent", actions=EventActions(state_delta=delta))


async def run(url: str, app: str, at: int, acknowledge: Callable[[], None]) -> int:
    """Fill a session on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        service = StmSessionService(backend)
        session = await service.create_session(app_name=app, user_id=USER, session_id="s1")
        for number in range(EVENTS):
            await service.append_event(session, event(number))
            acknowledge()
        return driver.done


def forked(url: str, app: str, at: int) -> tuple[int, int, int]:
    """Do so in a process of its own; returns how that ended, what it acknowledged, and the operations."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            done = asyncio.run(run(url, app, at, lambda: os.write(writing, b".") and None))
            os.write(writing, b"%d" % done)
            status = 0
        except Exception:  # noqa: BLE001 -- it is said here, because the child ends below
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    return os.waitpid(child, 0)[1], text.count(b"."), int(text.strip(b".") or b"0")


def main(url: str, every: int) -> None:
    status, stored, operations = forked(url, "whole", 0)
    assert (status, stored) == (0, EVENTS)
    acknowledged = {"whole": stored}
    for at in range(1, operations + 1, every):
        status, acknowledged[f"a{at}"], _ = forked(url, f"a{at}", at)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdout.write(json.dumps(acknowledged))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
