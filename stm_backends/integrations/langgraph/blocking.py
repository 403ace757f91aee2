"""LangGraph without an event loop: on the loop of a backend, in another thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

from stm_backends.errors import ConfigurationError

_T = TypeVar("_T")


class Waits(Protocol):
    """Runs a coroutine on the event loop that the backend was opened on, and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, _T], /) -> _T: ...


def refuse(method: str) -> NoReturn:
    """Raise the error of a blocking method without `run`."""
    raise ConfigurationError(
        f"{method} blocks and needs an event loop in another thread: use a{method} (graph.ainvoke instead of "
        "graph.invoke), or pass run=..., a function that runs a coroutine on the loop that the backend was "
        "opened on"
    )
