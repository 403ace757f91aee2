"""Where an error comes from: the line of the author's code, and tracebacks without what is between."""

from __future__ import annotations

import itertools
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import TracebackType
from typing import Any, ClassVar, Final, cast

LONGEST_TRACEBACK: Final = 24
"""How many frames of a traceback are kept. One of endless recursion has a thousand, each alike."""

_LONGEST_LINE: Final = 120
_LONGEST_MESSAGE: Final = 2_000
_NOT_THE_AUTHORS: Final = re.compile(r"stm_backends\.testing\.|_?pytest\.|hypothesis|pluggy\.|\.")
"""Modules of this suite and of what runs it; hypothesis makes some, of names of its own."""


_DRIVES: Final = frozenset({"asyncio", "concurrent", "contextlib"})
"""Modules of the standard library that call coroutines, threads and contexts for a driver or the suite."""


class Met(AssertionError):
    """A failure that several checks may meet, for the one `cause`."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class Untidy(Met):
    """What tidying up after a check met that had passed; a driver may meet it after any check."""

    heading: ClassVar = "tidying up after a check fails"
    _how: ClassVar = "tidying up after it failed"

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the check itself has passed, and {self._how}: {told(error)}", cause(error) or told(error)
        )
        self.error = error


class Overheard(Untidy):
    """What was said during a check that has passed, and names a key or shows stored bytes."""

    heading: ClassVar = "a message says too much (clause driver.logs)"
    _how: ClassVar = "a message during it says too much"


def origin(error: BaseException) -> str:
    """Return the innermost line of the author's code that an error went through, or `""`.

    The author's code is the first package on the way that is neither this suite, the standard library nor
    what runs tests. What it calls in turn, such as a client library, is not the author's.
    """
    frames = [(_module(trace), trace) for trace in _traces(first_of(error).__traceback__)]
    frames = [(name, trace) for name, trace in frames if not _NOT_THE_AUTHORS.match(f"{name}.")]
    frames = [
        (name, trace) for name, trace in frames if name.partition(".")[0] not in sys.stdlib_module_names
    ]
    if not frames:
        return ""
    # A driver may be built on one of ours, and a memory of ours on a driver.
    names = {name.partition(".")[0]: None for name, _ in frames}
    author = next((name for name in names if name != "stm_backends"), "stm_backends")
    module, trace = next(frame for frame in reversed(frames) if frame[0].partition(".")[0] == author)
    code = trace.tb_frame.f_code
    path = "/".join(PurePath(code.co_filename).parts[-len(module.split(".")) :])
    line = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
    return f"{path}:{trace.tb_lineno} in {code.co_name}{': ' if line else ''}{cut(line, _LONGEST_LINE)}"


def told(error: BaseException) -> str:
    """Return the class and the message of an error; of a group, of the first in it."""
    error = first_of(error)
    message = cut(str(error), _LONGEST_MESSAGE)
    if isinstance(error, AssertionError) and type(error).__module__.startswith("stm_backends.testing."):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a group, and any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def alone(error: BaseException) -> BaseException:
    """Return the only error of a group, and any other error itself."""
    found: BaseException = error
    if isinstance(error, BaseExceptionGroup):
        inner = list(cast("BaseExceptionGroup[BaseException]", error).exceptions)
        if len(inner) == 1:
            return alone(inner[0])
    return found


def cause(error: BaseException) -> str:
    """Return what failures have in common if they are the same one, or `""` if this one may stand alone.

    That is an error at one line of the author's code, or what the suite says alike wherever it finds it. What
    was found in answers has each time a meaning of its own.
    """
    error = first_of(error)
    if isinstance(error, Met):
        return error.cause
    where = origin(error)
    if not where:
        return ""
    # What differs are the keys, which are random words of the checks, and figures.
    return re.sub(r"\b[0-9a-f]{32}\b|\d+", "#", f"{told(error)} {where}")


def shorten(error: BaseException) -> None:
    """Take what drives coroutines out of the tracebacks of an error, of those in it and of its causes.

    Of long ones, take out the middle as well.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traces = list(_traces(each.__traceback__))
        kept = [trace for trace in traces if _module(trace).partition(".")[0] not in _DRIVES]
        if kept:
            each.__traceback__ = kept[0]
            for trace, after in itertools.pairwise(kept):
                trace.tb_next = after
            kept[-1].tb_next = None
            traces = kept
        if len(traces) > LONGEST_TRACEBACK:
            traces[LONGEST_TRACEBACK // 2].tb_next = traces[-LONGEST_TRACEBACK // 2]
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", each).exceptions


def cut(text: str, length: int) -> str:
    """Return the beginning of a text that is too long."""
    return text if len(text) <= length else f"{text[:length]}..."


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _module(trace: TracebackType) -> str:
    names: dict[str, Any] = trace.tb_frame.f_globals
    return str(names.get("__name__", ""))
