"""Checks that every driver makes before it talks to its datastore."""

from __future__ import annotations

import asyncio
import difflib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, cast

from stm_backends.drivers.contract import AbsentType, AnyType, Expect, KeepType, Traits, Ttl
from stm_backends.errors import ConfigurationError, InvalidState, StmError, TooLarge, Unavailable
from stm_backends.handed_in import call_now, described, number

LONGEST_S: Final = 1e11
"""About three thousand years. Longer is a mistake, and beyond the calendars of some datastores."""


def require_ttl(ttl: float | None | KeepType) -> None:
    """Raise `ValueError` unless a time to live is a positive number of seconds, `None` or `KEEP`."""
    if not (ttl is None or isinstance(ttl, Ttl) or (ttl > 0 and math.isfinite(ttl))):
        raise ValueError(f"ttl must be a positive number of seconds, or None (never expires), not {ttl!r}")


def require_drop(drop: int, expect: str | AbsentType | AnyType) -> None:
    """Raise `ValueError` unless `drop` counts entries of a record whose version `expect` names."""
    if drop < 0:
        raise ValueError(f"drop must be a number of entries, at least 0, not {drop}")
    if drop and isinstance(expect, Expect):
        raise ValueError("drop needs expect=<version>: only a caller that has read the tail can drop from it")


def require_rewrite(
    rewrite: Sequence[bytes], drop: int, expect: str | AbsentType | AnyType, traits: Traits, *, backend: str
) -> None:
    """Raise `ValueError` unless `rewrite` may replace the oldest entries, and `TooLarge` for a large entry.

    Call it only if `rewrite` is not empty.
    """
    if isinstance(expect, Expect):
        raise ValueError(
            "rewrite needs expect=<version>: only a caller that has read the tail can rewrite it"
        )
    if drop:
        raise ValueError("one replace either drops entries or rewrites them: drop must be 0 with rewrite")
    if len(rewrite) > traits.max_drop:
        raise ValueError(f"one replace rewrites at most {traits.max_drop} entries, not {len(rewrite)}")
    size = max(map(len, rewrite))
    require_fits("entry", size, traits.max_entry, backend=backend, operation="replace")


def require_append(entry: bytes, ttl: float | None, traits: Traits, *, backend: str) -> None:
    """Raise `ValueError` for an invalid time to live, and `TooLarge` for an entry beyond `max_entry`.

    A driver asks this before anything else, as it asks `require_replace`. So the answer is the same whether
    it is open, is being closed or was never opened.
    """
    require_ttl(ttl)
    require_fits("entry", len(entry), traits.max_entry, backend=backend, operation="append")


def require_replace(
    body: bytes,
    rewrite: Sequence[bytes],
    drop: int,
    expect: str | AbsentType | AnyType,
    ttl: float | None | KeepType,
    traits: Traits,
    *,
    backend: str,
) -> None:
    """Raise `ValueError` for arguments that make no sense, and `TooLarge` for a value beyond `max_entry`."""
    require_ttl(ttl)
    require_drop(drop, expect)
    if rewrite:
        require_rewrite(rewrite, drop, expect, traits, backend=backend)
    require_fits("entry", len(body), traits.max_entry, backend=backend, operation="replace")


def skipped_of(length: int, last: int | None) -> int:
    """Return how many of `length` entries a load with `last` skips. Raises `ValueError` if it is negative."""
    require_last(last)
    return 0 if last is None else max(0, length - last)


def require_last(last: int | None) -> None:
    """Raise `ValueError` unless `last` is `None` or a number of entries."""
    if last is not None and last < 0:
        raise ValueError(f"last must be a number of entries, at least 0, or None (all), not {last}")


def require_limit(limit: int) -> None:
    """Raise `ValueError` unless `limit` is at least 1."""
    if limit < 1:
        raise ValueError(f"limit must be a number of names, at least 1, not {limit}")


def require_fits(
    what: Literal["entry", "record"], size: int, limit: int, *, backend: str = "", operation: str = ""
) -> None:
    """Raise `TooLarge` if `size` bytes are more than `limit`.

    `backend` and `operation` may be left out where `errors.located` or `Edge.run` adds them.
    """
    if size > limit:
        raise TooLarge(what, size=size, limit=limit, backend=backend, operation=operation)


def require_known(given: Iterable[str], known: Iterable[str], *, backend: str, shown: bool = True) -> None:
    """Raise `ConfigurationError` for an unknown setting, with the most similar name of a known one.

    `shown=False` keeps the unknown name out of the message. In a URL it may be the end of a password.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            longer = [one for one in names if len(name) > 2 and one.startswith(name)]
            near = difflib.get_close_matches(name, names, n=1) or longer
            hint = f"did you mean {near[0]!r}? " if near else ""
            what = f"setting {name!r}" if shown else "such setting in a URL (write '?' in a password as %3F)"
            raise ConfigurationError(f"backend {backend!r} has no {what}; {hint}it has: {', '.join(names)}")


def require_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Raise `ConfigurationError` unless a setting is a finite number of seconds, positive or at least 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (value > 0 or (zero and value == 0))
        or value > LONGEST_S
    ):
        least = "a number of seconds, at least 0" if zero else "a positive number of seconds"
        raise ConfigurationError(f"{name} must be {least}{_not(value)}")


def require_count(name: str, value: object, *, most: int | None = None) -> None:
    """Raise `ConfigurationError` unless a setting is an integer of at least 1, and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
        allowed = f"an integer between 1 and {most:,}" if most else "an integer of at least 1"
        raise ConfigurationError(f"{name} must be {allowed}{_not(value)}")


def require_backend(backend: object) -> None:
    """Raise `ConfigurationError` for anything but an asynchronous backend."""
    if not hasattr(backend, "driver"):
        hint = "; give its `asynchronous`" if hasattr(backend, "asynchronous") else ""
        raise ConfigurationError(f"backend must come from open_backend(...){_not(backend)}{hint}")


def require_items(name: str, items: object) -> None:
    """Raise `InvalidState` unless the items that a framework adds come one by one, as in a list."""
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping)):
        raise InvalidState(f"{name} must be a list{_not(cast('object', items))}")


def require_integer(name: str, value: object, *, least: int | None = None) -> None:
    """Raise `ConfigurationError` unless a value is an integer, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        allowed = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigurationError(f"{name} must be {allowed}{_not(value)}")


def checked_clock(clock: object) -> Callable[[], float]:
    """Return a clock that raises `Unavailable` where the given one raises, or returns no finite number.

    Raises `ConfigurationError` unless a clock is a function. No other clock replaces it, because a clock with
    another epoch would let records expire.
    """
    if isinstance(clock, type) or not callable(clock):
        raise ConfigurationError(f"clock must be a function that returns seconds{_not(clock)}")
    if clock in (time.time, time.monotonic):
        return cast("Callable[[], float]", clock)

    def checked() -> float:
        try:
            return number("it", call_now(clock))
        except Exception as error:
            raise Unavailable(f"the function `clock` failed ({described(error)})") from error

    return checked


def require_event_loop(otherwise: str) -> None:
    """Raise `ConfigurationError` with this message unless an event loop of asyncio runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(otherwise) from None


def not_open(*, opened: bool = True, backend: str = "", operation: str = "") -> StmError:
    """Return the error of a driver that is not open; its message says what to do.

    It is `Unavailable` for one that is closed or could not be opened, and `ConfigurationError` for one that
    was never `opened`, which is a mistake in the program: a retry does not help.
    """
    if not opened:
        where = ".".join(part for part in (backend, operation) if part)
        return ConfigurationError(f"{where}: the backend was never opened; {_USE}".removeprefix(": "))
    return Unavailable(f"the backend is not open; {_USE}", backend=backend, operation=operation)


_USE: Final = (
    "use `async with open_backend(...) as backend:` (`with` in stm_backends.sync), and use the backend, its "
    "driver and its memories within that block"
)


def _not(value: object) -> str:
    """Describe a value of the wrong type. Never shows the value, which may be a secret."""
    return "" if type(value) in (int, float) else f", not {type(value).__name__}"
