"""A forked process that uses open objects of a check's process, as one of `multiprocessing` may."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.testing.workbench.failures import told

CAN_FORK: Final = hasattr(os, "fork")

_MOST_BYTES: Final = 65_536


async def in_a_forked_process(work: Callable[[], Awaitable[None]], *, within: float) -> str:
    """Do work on a new event loop of a forked process, and return its error, or `""`.

    The caller's event loop continues. A process that does not end `within` this many seconds is killed.
    """
    return await asyncio.to_thread(_forked, work, within)


def _forked(work: Callable[[], Awaitable[None]], within: float) -> str:
    reading, writing = os.pipe()
    # A coverage tool or a debugger may take a lock as a function begins. If another thread holds it during
    # the fork, nobody releases it in the child. `fork` itself calls functions there.
    tracing = sys.gettrace()
    sys.settrace(None)
    with warnings.catch_warnings():
        # Programs fork with several threads by accident.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        threading.settrace(None)
        _work_and_exit(work, writing)
    sys.settrace(tracing)
    os.close(writing)
    try:
        return _read_all(reading, until=time.monotonic() + within)
    finally:
        os.kill(process, signal.SIGKILL)  # a process that has ended was not waited for yet
        os.waitpid(process, 0)
        os.close(reading)


def _read_all(reading: int, *, until: float) -> str:
    """Return the output of the other process once it ends."""
    said = b""
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(reading, _MOST_BYTES)
        if not part:
            return said.decode()
        said += part
    return "the forked process did not end in time"


def _work_and_exit(work: Callable[[], Awaitable[None]], writing: int) -> None:
    """Never return: the code after the fork belongs to the parent."""
    said = ""
    try:
        warnings.simplefilter("ignore")
        asyncio.run(_awaited(work))
    except BaseException as error:  # noqa: BLE001 -- the parent raises it
        said = told(error)
    finally:
        os.write(writing, said.encode(errors="replace")[:_MOST_BYTES])
        os._exit(0)


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()
