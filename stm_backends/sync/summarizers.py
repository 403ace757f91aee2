"""A plain function as a summarizer."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from stm_backends.protocols import Summarizer


class PlainSummarizer(Protocol):
    """A `Summarizer` that is a plain function: called with the same request, it returns the same answer."""

    def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]: ...


def in_threads(summarizer: Callable[..., object]) -> Summarizer:
    """Return a summarizer that calls another in a thread of its own, each time.

    What that returns to be awaited is awaited on the loop. A call that nobody waits for any more goes on
    until it returns by itself, in a daemon thread that keeps no program from ending.
    """

    async def summarize(request: Mapping[str, Any], /) -> Mapping[str, Any]:
        called: Future[tuple[Any, BaseException | None]] = Future()
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(_call, summarizer, request, called),
            name="stm-summarizer",
            daemon=True,
        ).start()
        answer, error = await asyncio.wrap_future(called)
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
