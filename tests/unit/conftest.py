"""What the unit tests of everything above a driver share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import OutcomeUnknown
from stm_backends.testing.workbench.summarizers import LedgerSummarizer

# How long an example takes says how busy the machine is.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


class Lose(Protocol):
    def __call__(
        self,
        operation: str,
        *,
        done: bool,
        times: int = 1,
        then: Callable[[], Awaitable[Any]] | None = None,
    ) -> None: ...


@pytest.fixture(params=["memory", "sqlite"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Driver]:
    """An open driver on a datastore of its own, of either kind that comes with the library."""
    driver = open_driver({"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/stm.db"}[request.param])
    await driver.open()
    yield driver
    await driver.close()


@pytest.fixture
def lose(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Lose the answer to the next calls of an operation, done or not, and let something happen then."""

    def lose(
        operation: str,
        *,
        done: bool,
        times: int = 1,
        then: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        left = times
        call = getattr(driver, operation)

        async def losing(*args: Any, **options: Any) -> Any:
            nonlocal left
            if not left:
                return await call(*args, **options)
            left -= 1
            if done:
                await call(*args, **options)
            if then is not None:
                await then()
            raise OutcomeUnknown("the answer was lost", backend=driver.name, operation=operation)

        monkeypatch.setattr(driver, operation, losing)

    return lose


@pytest.fixture
def calls(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of the driver, as they are called."""
    made: list[str] = []

    def counted(operation: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(driver, operation)

        def counting(*args: Any, **options: Any) -> Awaitable[Any]:
            made.append(operation)
            return call(*args, **options)

        return counting

    for operation in ("load", "append", "replace", "delete", "scan"):
        monkeypatch.setattr(driver, operation, counted(operation))
    return made


@pytest.fixture
def held() -> LedgerSummarizer:
    """A summarizer that answers once it is released."""
    summarizer = LedgerSummarizer()
    summarizer.hold()
    return summarizer
