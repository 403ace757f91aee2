"""Concurrent work that ends as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Return the result of work that a cancellation of the caller does not interrupt.

    The cancellation is raised once the work has ended, whatever its result.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    _errors_of((task,))  # so that asyncio does not log that it was never retrieved
    raise cancelled


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """Do all at once; returns the results in order. The first error cancels the others and is raised.

    All tasks have ended when this returns or raises, regardless of how often the caller is cancelled. Before
    Python 3.13, a `TaskGroup` and `asyncio.gather` lose a cancellation of the caller that arrives while one
    of their tasks fails, and the caller would continue.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    errors: list[BaseException] = []
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors_of(tasks)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    # Also those that are not raised, else asyncio logs that they were never retrieved.
    all_errors = _errors_of(tasks)
    if cancelled is not None:
        raise cancelled
    if all_errors:
        raise (errors or all_errors)[0]
    return [task.result() for task in tasks]


def _errors_of(tasks: Sequence[asyncio.Future[T]]) -> list[BaseException]:
    ended = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in ended if (error := task.exception())]
