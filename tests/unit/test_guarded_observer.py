"""An observer that raises does not affect the work that it observes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    Denied,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer

KEY = MemoryKey("acme", "ada", "trip")
CONFIG = ShortTermMemoryConfig("truncation")
EVENTS = [name for name in vars(Observer) if not name.startswith("_") and name != "driver"]


def failing(*given: object) -> Any:
    raise RuntimeError("ids of acme")


def broken() -> Observer:
    """An observer of which every method fails."""
    return type("Broken", (Observer,), dict.fromkeys(EVENTS, failing))()


class AtTheEnd(Observer):
    """Its context managers fail when they are left."""

    def call(self, name: str) -> AbstractContextManager[object]:
        return self._around()

    background = property(lambda self: self._around)  # type: ignore[assignment]

    @contextmanager
    def _around(self) -> Generator[None]:
        try:
            yield
        finally:
            failing()


@pytest.fixture(params=[broken, AtTheEnd], ids=["each method", "leaving"])
def observer(request: pytest.FixtureRequest) -> Observer:
    return request.param()


async def test_the_work_is_done_although_the_observer_fails(
    observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_backend("memory://", observer=observer) as backend:
        memory = backend.memory(KEY, CONFIG)
        await memory.add_turn(ConversationTurn("a", "b"))
        assert await memory.get_llm_context()
        document = await backend.sessions.export(KEY)
        await backend.sessions.import_(document, on_conflict="replace")
        receipt = await backend.sessions.erase_with_receipt("acme")
        assert (receipt.records, receipt.complete) == (1, True)
    local = DefaultShortTermMemory(config=CONFIG, observer=observer)
    await local.add_turn(ConversationTurn("a", "b"))
    await local.flush()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("the observer failed in call" in one and "RuntimeError" in one for one in messages)
    assert "acme" not in caplog.text


def test_every_event_is_passed_on_and_none_raises() -> None:
    failed: list[str] = []
    observer = guarded(broken(), lambda method, error: failed.append(method))
    with observer.call("x"), observer.background():
        pass
    for name in EVENTS:
        if name not in ("call", "background"):
            count = vars(Observer)[name].__code__.co_argcount - 1
            getattr(observer, name)(*[None] * count)
    assert sorted(failed) == sorted(EVENTS)
    assert guarded(observer) is observer
    assert guarded(SILENT) is SILENT


def test_a_method_that_is_async_by_mistake_fails_and_leaves_no_coroutine() -> None:
    made, failed = list[Any](), list[str]()

    async def told(*given: object) -> None: ...

    class Mistaken(Observer):
        def turns(self, event: Any, count: int) -> Any:
            made.append(told(event, count))
            return made[-1]

    guarded(Mistaken(), lambda method, error: failed.append(f"{method}: {error}")).turns("appended", 1)
    assert failed == ["turns: it returned a coroutine, not None"]
    assert [inspect.getcoroutinestate(one) for one in made] == [inspect.CORO_CLOSED]


def test_the_error_of_the_block_passes_and_no_other() -> None:
    observer = guarded(AtTheEnd(), lambda method, error: None)
    with pytest.raises(Denied, match="of the block"), observer.call("x"):
        raise Denied("of the block")


def test_refusals_reach_only_an_observer_that_counts_them() -> None:
    plain, counting = (
        open_backend("memory://", observer=Observer()),
        open_backend("memory://", observer=broken()),
    )
    layers = [type(one.driver.inner).__name__ for one in (plain, counting)]
    assert layers == ["MemoryDriver", "_ReportingDriver"]
