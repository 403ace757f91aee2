"""Which checkpoints continue what a run has read, so that two runs of a thread do not both.

LangGraph lets two runs read the same latest checkpoint and store two that continue it. The later one is the
latest from then on, and the other run's turn is lost without an error. So a run that began with the latest
checkpoint may only continue the latest one. A run that was asked to begin with another, by its id, makes a
branch: that is how LangGraph travels in time.

LangGraph tells a saver neither. But it reads the checkpoint that a run begins with in the run's context,
which its later calls have a copy of.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

from stm_backends.drivers.bounded import Bounded

_NONE: Final[Mapping[tuple[object, str], frozenset[str]]] = MappingProxyType({})
_asked: ContextVar[Mapping[tuple[object, str], frozenset[str]]] = ContextVar(
    "stm_langgraph_runs", default=_NONE
)
_copying: ContextVar[bool] = ContextVar("stm_langgraph_copying", default=False)

_MOST_THREADS: Final = 64
_MOST_IDS: Final = 10_000


class Runs:
    """What the runs of one process have read; `thread` is its id."""

    def __init__(self) -> None:
        # Of a run whose context was lost, as in a generator that several tasks continue.
        self._latest: Bounded[tuple[str, str], bool] = Bounded(_MOST_IDS)

    def has_read(self, thread: str, asked: str | None, found: str | None) -> None:
        """Note in this context that the checkpoint of an id was read or, without one, the latest."""
        known = dict(_asked.get())
        by_id = known.pop((self, thread), frozenset[str]())
        if asked is None:
            # Who asks for the latest one by its id, and then for the latest, means no branch.
            by_id -= {found or ""}
        else:
            by_id |= {asked}
        known[self, thread] = by_id
        for oldest in [*known][:-_MOST_THREADS]:
            del known[oldest]
        _asked.set(known)

    def is_latest(self, thread: str, checkpoint_id: str | None) -> None:
        """Note that a run was given this checkpoint as the latest, or stored it, and will continue it."""
        self._latest[thread, checkpoint_id or ""] = True

    def must_be_latest(self, thread: str, parent: str | None) -> bool:
        """Say whether a checkpoint may only be stored if its parent is still the latest one."""
        if _copying.get():
            return False
        by_id = _asked.get().get((self, thread))
        return (thread, parent or "") in self._latest if by_id is None else parent not in by_id


@contextmanager
def copying() -> Generator[None]:
    """Within this context, checkpoints are stored after any other, as they are in another thread."""
    token = _copying.set(True)
    try:
        yield
    finally:
        _copying.reset(token)
