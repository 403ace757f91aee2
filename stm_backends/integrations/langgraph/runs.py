"""Finds which checkpoints continue the one that a run has read, so that two runs cannot continue the same.

LangGraph lets two runs read the same latest checkpoint, and store two checkpoints that continue it. The later
one then becomes the latest, and the other run's turn is lost without an error. So a run that began with the
latest checkpoint may continue only the latest one. A run that was asked to begin with another checkpoint, by
its id, makes a branch: LangGraph's time travel works like this.

LangGraph tells a saver neither. But it reads the checkpoint that a run begins with in the run's context, and
the run's later calls have a copy of that context.
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
    """The checkpoints that the runs of one process have read; `thread` is the thread's id."""

    def __init__(self) -> None:
        # For a run whose context was lost, as in a generator that several tasks continue.
        self._latest: Bounded[tuple[str, str], bool] = Bounded(_MOST_IDS)

    def has_read(self, thread: str, asked: str | None, found: str | None) -> None:
        """Note in this context that a checkpoint was read by its id or, without one, as the latest."""
        known = dict(_asked.get())
        by_id = known.pop((self, thread), frozenset[str]())
        if asked is None:
            # Reading the latest checkpoint by its id, and then the latest, does not make a branch.
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
        """Return whether a checkpoint may be stored only if its parent is still the latest one."""
        if _copying.get():
            return False
        by_id = _asked.get().get((self, thread))
        return (thread, parent or "") in self._latest if by_id is None else parent not in by_id


@contextmanager
def copying() -> Generator[None]:
    """Within this context, a checkpoint may continue any other, as in another thread."""
    token = _copying.set(True)
    try:
        yield
    finally:
        _copying.reset(token)
