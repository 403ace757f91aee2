"""A clock, a model, graphs and sessions that tests of the tiers control."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stm_backends import MemoryKey
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.tiers import (
    BackendGraph,
    InProcessGraph,
    MemoryManager,
    SharedGraph,
    SharedShortTermMemory,
    ShortTermMemory,
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


class Model:
    """A provider that answers `answer`, and awaits `during` before that, once."""

    def __init__(self) -> None:
        self.answer: str | Exception = "a summary"
        self.during: Callable[[], Awaitable[object]] | None = None
        self.prompts: list[str] = []

    async def generate(self, *, messages: list[dict[str, str]]) -> str:
        self.prompts.append(messages[0]["content"])
        during, self.during = self.during, None
        if during is not None:
            await during()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(params=["in this process", "on a backend"])
async def new_graph(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], SharedGraph]]:
    """What returns another empty graph, in this process or on a backend."""
    users = itertools.count()
    async with Backend(MemoryDriver()) as backend:

        def make() -> SharedGraph:
            if request.param == "in this process":
                return InProcessGraph()
            return BackendGraph(backend, ("acme", f"u{next(users)}"))

        yield make


@pytest.fixture(params=["in this process", "in a conversation"])
async def short_term(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., ShortTermMemory]]:
    """What returns a short-term memory; in a conversation, those of one `session_id` are shared."""
    async with Backend(MemoryDriver()) as backend:

        def make(*, session_id: str | None = None, **settings: Any) -> ShortTermMemory:
            if request.param == "in this process":
                return ShortTermMemory(session_id=session_id, **settings)
            key = MemoryKey("acme", "u0", session_id or uuid.uuid4().hex)
            return SharedShortTermMemory(backend, key, **settings)

        yield make


@pytest.fixture
def manager(
    new_graph: Callable[[], SharedGraph], short_term: Callable[..., ShortTermMemory]
) -> Callable[..., MemoryManager]:
    """What returns a manager, on a graph of its own unless one is given, with a session of its own."""

    def make(graph_backend: Any = None, session_id: str | None = None, **settings: Any) -> MemoryManager:
        graph = new_graph() if graph_backend is None else graph_backend
        own = {name: settings[name] for name in ("embedder", "clock") if name in settings}
        session = short_term(session_id=session_id, **own)
        # The tests give each graph and each session a user of its own.
        session.owner = None
        return MemoryManager(graph, short_term=session, **settings)

    return make


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model() -> Model:
    return Model()
