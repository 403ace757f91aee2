"""A clock and a model that tests of the tiers control, and memories of both kinds of session."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stm_backends import MemoryKey, open_backend
from stm_backends.backend import Backend
from stm_backends.tiers import MemoryManager, SharedShortTermMemory, ShortTermMemory


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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with open_backend("memory://") as backend:
        yield backend


@pytest.fixture(params=["in this process", "in a conversation"])
def short_term(request: pytest.FixtureRequest, backend: Backend) -> Callable[..., ShortTermMemory]:
    """Makes a short-term memory of each kind; those with the same `session_id` are shared, if they can be."""

    def make(*, session_id: str | None = None, **settings: Any) -> ShortTermMemory:
        if request.param == "in this process":
            return ShortTermMemory(session_id=session_id, **settings)
        key = MemoryKey("acme", "u1", session_id or uuid.uuid4().hex)
        return SharedShortTermMemory(backend, key, **settings)

    return make


@pytest.fixture
def manager(short_term: Callable[..., ShortTermMemory]) -> Callable[..., MemoryManager]:
    """Makes a manager whose session is of each kind."""

    def make(*arguments: Any, session_id: str | None = None, **settings: Any) -> MemoryManager:
        own = {name: settings[name] for name in ("embedder", "clock") if name in settings}
        return MemoryManager(*arguments, short_term=short_term(session_id=session_id, **own), **settings)

    return make
