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
"""Number of abandoned calls still running at which a backend makes no further ones."""


class PlainSummarizer(Protocol):
    """A `Summarizer` as a plain function: it takes the same request and returns the same answer."""

    def __call__(self, request: dict[str, Any], /) -> Mapping[str, Any]: ...


def in_threads(summarizer: Callable[..., object], given_up: WeakSet[threading.Thread]) -> Summarizer:
    """Return a summarizer that runs each call of another one in a new thread.

    If the call returns an awaitable, that is awaited on the loop. A call that is abandoned after a timeout
    runs until it returns, in a daemon thread, so it does not keep the program from ending. `given_up` holds
    the threads of abandoned calls, of all summarizers that share it on one loop. While `GIVEN_UP_AT_MOST` of
    them are running, further calls fail: a function that never returns must not use up a thread per attempt.
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
            # `SystemExit` would end the loop, and with it all other calls.
            raise RuntimeError(f"the summarizer raised {type(error).__name__}") from error
        return await answer if inspect.isawaitable(answer) else answer

    return summarize


def _call(
    summarizer: Callable[..., object],
    request: Mapping[str, Any],
    called: Future[tuple[Any, BaseException | None]],
) -> None:
    # From here on the call cannot be cancelled, only abandoned.
    if called.set_running_or_notify_cancel():
        try:
            answer = summarizer(request)
        except BaseException as error:  # noqa: BLE001 -- the waiting caller raises it
            called.set_result((None, error))
        else:
            called.set_result((answer, None))
