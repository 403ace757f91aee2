"""The origin of an error: the line of the author's code, and tracebacks without the frames in between."""

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
"""Maximum number of traceback frames kept. Endless recursion produces a thousand identical ones."""

_LONGEST_LINE: Final = 120
_LONGEST_MESSAGE: Final = 2_000
_NOT_THE_AUTHORS: Final = re.compile(r"stm_backends\.testing\.|_?pytest\.|hypothesis|pluggy\.|\.")
"""Modules of this suite and of the tools that run it; hypothesis generates some with its own names."""


_DRIVES: Final = frozenset({"asyncio", "concurrent", "contextlib"})
"""Modules of the standard library that call coroutines, threads and contexts for a driver or the suite."""


class Met(AssertionError):
    """A failure that several checks may meet for one `cause`."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class Untidy(Met):
    """A problem while tidying up after a check that had passed; it may occur after any check."""

    heading: ClassVar = "tidying up after a check fails"
    _how: ClassVar = "tidying up after it failed"

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the check itself has passed, and {self._how}: {told(error)}", cause(error) or told(error)
        )
        self.error = error


class Overheard(Untidy):
    """A message during a check that has passed, which names a key or shows stored bytes."""

    heading: ClassVar = "a message says too much (clause driver.logs)"
    _how: ClassVar = "a message during it says too much"


def origin(error: BaseException) -> str:
    """Return the innermost line of the author's code that an error went through, or `""`.

    The author's code is the first package on the way that is neither this suite, the standard library nor the
    test tools. Packages that it calls in turn, such as a client library, do not count.
    """
    frames = [(_module(trace), trace) for trace in _traces(first_of(error).__traceback__)]
    frames = [(name, trace) for name, trace in frames if not _NOT_THE_AUTHORS.match(f"{name}.")]
    frames = [
        (name, trace) for name, trace in frames if name.partition(".")[0] not in sys.stdlib_module_names
    ]
    if not frames:
        return ""
    # A driver may be built on one of this library's, and this library's memory on a driver.
    names = {name.partition(".")[0]: None for name, _ in frames}
    author = next((name for name in names if name != "stm_backends"), "stm_backends")
    module, trace = next(frame for frame in reversed(frames) if frame[0].partition(".")[0] == author)
    code = trace.tb_frame.f_code
    path = "/".join(PurePath(code.co_filename).parts[-len(module.split(".")) :])
    line = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
    return f"{path}:{trace.tb_lineno} in {code.co_name}{': ' if line else ''}{cut(line, _LONGEST_LINE)}"


def told(error: BaseException) -> str:
    """Return the class and the message of an error, or of the first error in a group."""
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
    """Return the common property of failures that are the same one, or `""` if this one stands alone.

    That is an error at one line of the author's code, or a message of the suite that is the same wherever it
    occurs. Findings in answers have a separate meaning each time.
    """
    error = first_of(error)
    if isinstance(error, Met):
        return error.cause
    where = origin(error)
    if not where:
        return ""
    # Only the keys, which are random words of the checks, and numbers differ.
    return re.sub(r"\b[0-9a-f]{32}\b|\d+", "#", f"{told(error)} {where}")


def shorten(error: BaseException) -> None:
    """Remove the frames that drive coroutines from the tracebacks of an error, its causes and its members.

    Also removes the middle of long ones.
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
    """Return a text, or the beginning of one that is too long."""
    return text if len(text) <= length else f"{text[:length]}..."


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _module(trace: TracebackType) -> str:
    names: dict[str, Any] = trace.tb_frame.f_globals
    return str(names.get("__name__", ""))
