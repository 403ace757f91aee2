"""A clock and a model that tests of the tiers control."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest


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
