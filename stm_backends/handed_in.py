"""Calls of functions that users hand in: a failing function fails only its own call.

Such a function may raise anything, hang, be cancelled from within, or return a value of another type. A
`BaseException`, such as the panic of an extension in Rust, is a failure like any other; `SystemExit` and
`KeyboardInterrupt` end the program. No message quotes what a function raised or returned, which may contain a
conversation or a secret. A function that blocks its thread cannot be interrupted, and delays all other work.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from numbers import Real
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

Report: TypeAlias = Callable[[str, BaseException], object]
"""Receives the name of a function that failed, and its error."""

Start: TypeAlias = Callable[[Coroutine[Any, Any, object]], "asyncio.Task[object]"]

_report: ContextVar[Report] = ContextVar("stm_report")

PASSED: Final = (KeyboardInterrupt, SystemExit)
"""Exceptions that are never a function's failure."""


class Misbehaved(Exception):
    """A function failed without raising an `Exception`. The message quotes nothing of it."""


class WrongType(Misbehaved):
    """A function returned a value of a wrong type; the next call is unlikely to differ."""

    def __init__(self, function: str, returned: object, expected: str) -> None:
        super().__init__(f"{function} returned {_kind(returned)}, not {expected}")
        if inspect.iscoroutine(returned):
            returned.close()  # else it warns that nothing has awaited it


async def call(
    function: Callable[..., object],
    *args: object,
    within: float,
    start: Start | None = None,
    report: Report | None = None,
) -> object:
    """Call a function and return its result, awaited if it is awaitable.

    Raises the function's `Exception`, `TimeoutError` after `within` seconds even if the function ignores its
    cancellation, and `Misbehaved` for any other exception, such as a cancellation that is not the caller's.
    `start` creates the task that runs the function. `report` receives failures of functions that it calls
    itself, see `report`.
    """
    work = _run(function, args, report)
    try:
        task = (start or _start)(work)
    except BaseException:
        work.close()  # nothing will await it
        raise
    try:
        done, _ = await asyncio.wait({task}, timeout=within)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise TimeoutError(f"no answer within {within:g} s")
    if task.cancelled():
        raise Misbehaved("the function was cancelled from within")
    return call_now(task.result)


def call_now(function: Callable[..., T], *args: object) -> T:
    """Call a function that is not awaited; its result is not checked.

    Raises the function's `Exception`, and `Misbehaved` for any other exception except `PASSED`.
    """
    try:
        return function(*args)
    except (Exception, *PASSED):
        raise
    except BaseException as error:
        raise Misbehaved(f"the function raised {type(error).__name__}") from error


def kind_of(error: BaseException) -> str:
    """Return the class name of an error that a function raised."""
    cause = error.__cause__
    return type(cause if type(error) is Misbehaved and cause is not None else error).__name__


def described(error: BaseException) -> str:
    """Return the class of an error, and its message if that quotes no data."""
    kind = type(error).__name__
    return f"{kind}: {error}" if isinstance(error, Misbehaved) else kind


def ignore(function: str, error: BaseException) -> None:
    """Report a failure to no one."""
    del function, error


def report(function: str, error: BaseException) -> None:
    """Report a failure to the caller of the running function, if it has one.

    A built-in summarizer has no observer; the memory that calls it has one.
    """
    _report.get(ignore)(function, error)


def number(function: str, answer: object) -> float:
    """Return an answer that must be a finite number. Raises `Misbehaved`."""
    if isinstance(answer, bool) or not isinstance(answer, Real):
        raise WrongType(function, answer, "a number")
    if not math.isfinite(found := float(answer)):
        raise Misbehaved(f"{function} returned no finite number")
    return found


async def _run(function: Callable[..., object], args: tuple[object, ...], report: Report | None) -> object:
    if report is not None:
        _report.set(report)  # for this task, which has its own context
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


def _start(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    return asyncio.create_task(work, name="stm-call")


def _abandon(task: asyncio.Task[object]) -> None:
    """Cancel a task whose result is not needed."""
    task.cancel()
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()


def _kind(value: object) -> str:
    return "a coroutine" if inspect.iscoroutine(value) else type(value).__name__
