"""A plain function as a summarizer."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, Protocol
from weakref import WeakSet

from stm_backends.protocols import Summarizer

GIVEN_UP_AT_MOST: Final = 32
"""How many calls that nobody waits for any more a backend lets run on before it makes no other."""


class PlainSummarizer(Protocol):
    """A `Summarizer` that is a plain function: called with the same request, it returns the same answer."""

    def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]: ...


def in_threads(summarizer: Callable[..., object], given_up: WeakSet[threading.Thread]) -> Summarizer:
    """Return a summarizer that calls another in a thread of its own, each time.

    What that returns to be awaited is awaited on the loop. A call that nobody waits for any more goes on
    until it returns by itself, in a daemon thread that keeps no program from ending. `given_up` are the
    threads of such calls, of all the summarizers that share it on one loop. While `GIVEN_UP_AT_MOST` of
    them run, calling fails: one that never returns must not take a thread more with each attempt.
    """

    async def summarize(request: Mapping[str, Any], /) -> Mapping[str, Any]:
        if sum(thread.is_alive() for thread in given_up) >= GIVEN_UP_AT_MOST:
            raise RuntimeError("too many summarizer calls have not returned: give yours a timeout")
        called: Future[tuple[Any, BaseException | None]] = Future()
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_call, summarizer, request, called),
            name="stm-summarizer",
            daemon=True,
        )
        thread.start()
        try:
            answer, error = await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            given_up.add(thread)
            raise
        if isinstance(error, Exception):
            raise error
        if error is not None:
            # `SystemExit` would end the loop, and with it everybody's calls.
            raise RuntimeError(f"the summarizer raised {type(error).__name__}") from error
        return await answer if inspect.isawaitable(answer) else answer

    return summarize


def _call(
    summarizer: Callable[..., object],
    request: Mapping[str, Any],
    called: Future[tuple[Any, BaseException | None]],
) -> None:
    # From here on nobody can cancel it, only stop waiting for it.
    if called.set_running_or_notify_cancel():
        try:
            answer = summarizer(request)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is for whoever waits
            called.set_result((None, error))
        else:
            called.set_result((answer, None))
