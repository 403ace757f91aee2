"""The observer around a user's observer that keeps its errors from the work."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from stm_backends import logs
from stm_backends.handed_in import PASSED, WrongType
from stm_backends.telemetry.observer import (
    SILENT,
    KeyPart,
    MemoryEvent,
    Observer,
    Subject,
    TouchEvent,
    TurnEvent,
    WorkEvent,
)

if TYPE_CHECKING:
    from stm_backends.drivers.contract import Driver
    from stm_backends.records.pages import PageEvent
    from stm_backends.types import MemoryHealth

logger = logging.getLogger("stm_backends")

OnFailure = Callable[[str, BaseException], None]
"""Receives the name of a method of an observer, and the error that it raised."""


def guarded(observer: Observer, on_failure: OnFailure | None = None) -> Observer:
    """Return an observer that passes all events on, and raises nothing.

    An error of `observer` is logged without its message, which may contain ids, or given to `on_failure`.
    A silent or guarded observer is returned as it is. An error of `Observer.driver` is raised, because a
    backend cannot be opened without a driver.
    """
    if observer is SILENT or isinstance(observer, GuardedObserver):
        return observer
    return GuardedObserver(observer, on_failure or _log)


def _log(method: str, error: BaseException) -> None:
    logger.error(
        "the observer failed in %s, so its reports are incomplete: %s",
        method,
        type(error).__name__,
        exc_info=logs.shown(error),
    )


class GuardedObserver(Observer):
    """Passes all events on to `inner`; see `guarded`."""

    def __init__(self, inner: Observer, on_failure: OnFailure) -> None:
        self.inner: Final = inner
        self._on_failure: Final = on_failure

    def driver(self, driver: Driver) -> Driver:
        return self.inner.driver(driver)

    def call(self, name: str) -> AbstractContextManager[object]:
        return self._around("call", lambda: self.inner.call(name))

    def background(self) -> AbstractContextManager[object]:
        return self._around("background", self.inner.background)

    def turns(self, event: TurnEvent, count: int) -> None:
        self._tell("turns", event, count)

    def pages(self, event: PageEvent, count: int) -> None:
        self._tell("pages", event, count)

    def touches(self, event: TouchEvent, count: int) -> None:
        self._tell("touches", event, count)

    def work(self, event: WorkEvent, count: int) -> None:
        self._tell("work", event, count)

    def work_waits(self, count: int, lag: float) -> None:
        self._tell("work_waits", count, lag)

    def race_lost(self) -> None:
        self._tell("race_lost")

    def summarizer_failed(self, error: Exception) -> None:
        self._tell("summarizer_failed", error)

    def function_failed(self, function: str, error: BaseException) -> None:
        self._tell("function_failed", function, error)

    def health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        self._tell("health_changed", old, new)

    def context_shown(self, tokens: Callable[[], int]) -> None:
        self._tell("context_shown", tokens)

    def clear_text_met(self) -> None:
        self._tell("clear_text_met")

    def key_unresolved(self, part: KeyPart) -> None:
        self._tell("key_unresolved", part)

    def memories(self, event: MemoryEvent, tier: str, count: int) -> None:
        self._tell("memories", event, tier, count)

    def erased(self, subject: Subject, records: int) -> None:
        self._tell("erased", subject, records)

    def purged(self, subject: Subject, records: int) -> None:
        self._tell("purged", subject, records)

    def exported(self, subject: Subject) -> None:
        self._tell("exported", subject)

    def imported(self, subject: Subject) -> None:
        self._tell("imported", subject)

    def copied(self, subject: Subject, records: int) -> None:
        self._tell("copied", subject, records)

    def denied(self, subject: Subject, operation: str) -> None:
        self._tell("denied", subject, operation)

    def limit_reached(self, subject: Subject, limit: str) -> None:
        self._tell("limit_reached", subject, limit)

    def _tell(self, method: str, *arguments: Any) -> None:
        try:
            answer = getattr(self.inner, method)(*arguments)
            if inspect.iscoroutine(answer):
                raise WrongType("it", answer, "None")
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001 -- a user's observer may raise anything
            self._on_failure(method, error)

    def _around(
        self, method: str, make: Callable[[], AbstractContextManager[object]]
    ) -> AbstractContextManager[object]:
        return _Around(make, lambda error: self._on_failure(method, error))


class _Around(AbstractContextManager[None]):
    """Enters and leaves a context manager of the observer, and reports its errors, not those of the block."""

    __slots__ = ("_failed", "_leave", "_make")

    def __init__(
        self, make: Callable[[], AbstractContextManager[object]], failed: Callable[[BaseException], None]
    ) -> None:
        self._make = make
        self._failed = failed
        self._leave: Callable[..., object] | None = None

    def __enter__(self) -> None:
        try:
            manager = self._make()
            manager.__enter__()
            self._leave = manager.__exit__
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001 -- a user's observer may raise anything
            self._failed(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave is None:
            return
        try:
            self._leave(kind, error, trace)
        except BaseException as failure:
            if isinstance(failure, PASSED):
                raise
            if failure is not error:
                self._failed(failure)
