"""Synchronous functions from users, each with a substitute: a failure costs only accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar, cast

from stm_backends import logs
from stm_backends.handed_in import Report, WrongType, call_now, number

T = TypeVar("T")


class Guarded(Generic[T]):
    """A function that never raises: if the user's function fails, its substitute answers.

    `read` converts an answer, and raises for a wrong one. For each failure, `warning` is logged and `failed`
    is called.
    """

    def __init__(
        self,
        function: Callable[..., object],
        substitute: Callable[..., T],
        read: Callable[[object], T],
        *,
        name: str,
        warning: str,
        failed: Report,
    ) -> None:
        given: Any = function
        self.function: Final[Callable[..., object]] = given.function if isinstance(given, Guarded) else given
        self._substitute: Final = substitute
        self._read: Final = read
        self._name: Final = name
        self._warning: Final = warning
        self._failed: Final = failed

    def __call__(self, *args: object) -> T:
        try:
            return self._read(call_now(self.function, *args))
        except Exception as error:  # noqa: BLE001 -- a user's function may raise anything
            logs.failed(self._warning, error)
            self._failed(self._name, error)
            return self._substitute(*args)


def utc_now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def guarded_clock(clock: Callable[[], float], failed: Report) -> Callable[[], float]:
    """Return a clock of seconds since the epoch that never raises; the system's clock is the substitute."""
    return clock if clock is time.time else Guarded(clock, time.time, _seconds, failed=failed, **_CLOCK)


def guarded_utc_clock(clock: Callable[[], datetime], failed: Report) -> Callable[[], datetime]:
    """Return a clock that never raises; a guarded clock is returned as it is."""
    if clock is utc_now or isinstance(cast("object", clock), Guarded):
        return clock
    return Guarded(clock, utc_now, _date, failed=failed, **_CLOCK)


_CLOCK: Final = {"name": "clock", "warning": "the clock failed (%s); the system's is used"}


def _seconds(answer: object) -> float:
    return number("the clock", answer)


def _date(answer: object) -> datetime:
    if not isinstance(answer, datetime):
        raise WrongType("the clock", answer, "a datetime")
    return answer.replace(tzinfo=UTC) if answer.tzinfo is None else answer  # as `datetime.utcnow` returns it
