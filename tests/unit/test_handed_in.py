"""What a function that was handed in does wrong fails its own call, is named, and shows nothing."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stm_backends import logs
from stm_backends.backend import Backend, open_backend
from stm_backends.errors import Corrupt, InvalidKey, Unavailable
from stm_backends.handed_in import Misbehaved, WrongType, call, described, kind_of
from stm_backends.integrations.whose import key_from
from stm_backends.memory.estimating import guarded_estimator
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.memory.tasks import CALLBACK_S, Background
from stm_backends.telemetry.observer import Observer
from stm_backends.testing.memory_contract import config, shown, until
from stm_backends.tiers import MemoryManager, MemoryTier
from stm_backends.tokens import default_token_estimator
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support import clock
from tests.support.default_memory import added

QUOTED = "pin 4711"


class PanicException(BaseException):
    """As an extension in Rust raises it."""


class Counting(Observer):
    """Keeps what failed, and the class of the error."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []

    def function_failed(self, function: str, error: BaseException) -> None:
        self.failed.append((function, kind_of(error)))

    def summarizer_failed(self, error: Exception) -> None:
        self.failed.append(("summarizer", kind_of(error)))


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise error(QUOTED)

    return function


async def a_coroutine(*_: object) -> Any:
    return QUOTED


async def hangs(*_: object) -> Any:
    await asyncio.sleep(1e6)


async def cancels_itself(*_: object) -> Any:
    raise asyncio.CancelledError(QUOTED)


async def panics_later(*_: object) -> Any:
    await asyncio.sleep(0)
    raise PanicException(QUOTED)


def of_another_loop(*_: object) -> Any:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    return future


def exits(*_: object) -> Any:
    raise SystemExit(QUOTED)


@pytest.fixture(autouse=True)
def every_message(caplog: pytest.LogCaptureFixture) -> Any:
    """Log everything, and find no secret in it: neither in the library's messages nor in asyncio's."""
    logs.configure(every_s=0)
    yield
    logs.configure()
    gc.collect()
    assert QUOTED not in caplog.text


# The call


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (raises(LookupError), LookupError, QUOTED),
        (raises(PanicException), Misbehaved, "raised PanicException"),
        (panics_later, Misbehaved, "raised PanicException"),
        (raises(GeneratorExit), Misbehaved, "raised GeneratorExit"),
        (raises(StopIteration), RuntimeError, "StopIteration"),
        (cancels_itself, Misbehaved, "cancelled from within"),
        (hangs, TimeoutError, "no answer within 0.01 s"),
        (of_another_loop, RuntimeError, "different loop"),
    ],
)
async def test_a_call_ends_with_an_exception_whatever_is_raised(
    function: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await call(function, within=0.01 if function is hangs else 5)


async def test_a_task_that_cannot_be_made_leaves_no_coroutine() -> None:
    left = list[Coroutine[Any, Any, Any]]()

    def refuses(work: Coroutine[Any, Any, Any]) -> Any:
        left.append(work)
        raise RuntimeError("Event loop is closed")

    with pytest.raises(RuntimeError, match="is closed"):
        await call(hangs, within=5, start=refuses)
    assert [inspect.getcoroutinestate(work) for work in left] == [inspect.CORO_CLOSED]


def test_a_call_without_an_event_loop_leaves_no_coroutine() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="no running event loop"):
            call(hangs, within=5).send(None)
        gc.collect()
    assert not warned


def test_a_function_of_keys_that_is_async_by_mistake_is_named_and_leaves_no_coroutine() -> None:
    made = list[Any]()

    def key_of(session: str) -> Any:
        made.append(a_coroutine(session))
        return made[-1]

    with pytest.raises(InvalidKey, match="`key_of` returned a coroutine, not a MemoryKey"):
        key_from("key_of", key_of, "chat")
    assert [inspect.getcoroutinestate(one) for one in made] == [inspect.CORO_CLOSED]


def test_an_exit_ends_the_program() -> None:
    async def main() -> None:
        await call(exits, within=5)

    with pytest.raises(SystemExit):
        asyncio.run(main())


def test_a_description_quotes_the_library_alone() -> None:
    assert described(LookupError(QUOTED)) == "LookupError"
    assert described(WrongType("it", QUOTED, "a number")) == "WrongType: it returned str, not a number"
    error = Misbehaved("the function raised PanicException")
    error.__cause__ = PanicException(QUOTED)
    assert (kind_of(error), kind_of(LookupError())) == ("PanicException", "LookupError")


# The token estimator

ESTIMATORS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "raises": (raises(ValueError), "ValueError"),
    "panics": (raises(PanicException), "PanicException"),
    "is cancelled": (raises(asyncio.CancelledError), "CancelledError"),
    "stops": (raises(StopIteration), "StopIteration"),
    "nothing": (lambda text: None, "WrongType"),
    "text": (lambda text: text, "WrongType"),
    "coroutine": (a_coroutine, "WrongType"),
    "true": (lambda text: True, "WrongType"),
    "nan": (lambda text: math.nan, "Misbehaved"),
    "infinite": (lambda text: math.inf, "Misbehaved"),
    "negative": (lambda text: -1, "Misbehaved"),
    "huge": (lambda text: 10**400, "OverflowError"),
    "too many": (lambda text: 10**30, "Misbehaved"),
}
estimators = pytest.mark.parametrize(("estimator", "kind"), ESTIMATORS.values(), ids=ESTIMATORS.keys())


@estimators
def test_the_default_estimate_stands_in_for_an_estimator_that_fails(
    estimator: Callable[[str], Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[tuple[str, str]] = []
    guarded = guarded_estimator(estimator, lambda name, error: failed.append((name, kind_of(error))))
    assert guarded("four" * 5) == 6
    assert failed == [("token_estimator", kind)]
    assert "the token estimator failed" in caplog.text


def test_a_fraction_of_a_token_is_rounded_up() -> None:
    assert guarded_estimator(lambda text: 1.2, lambda *_: None)("text") == 2


@estimators
@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
async def test_a_conversation_survives_an_estimator_that_fails(
    estimator: Callable[[str], Any], kind: str, shared: bool
) -> None:
    observer = Counting()
    settings = config(zone=1, token_estimator=estimator)
    async with open_backend("memory://", observer=observer) as backend:
        memory = _memory(backend if shared else None, settings, ExtractiveSummarizer(), observer)
        await added(memory, *range(3))
        await memory.flush()
        view = (await memory.get_llm_context())["conversation_memory"]
        assert [one["user"] for one in view["recent_turns"]] == ["u2"]
        assert "u0" in view["summary"]
        assert memory.health is MemoryHealth.HEALTHY
        assert memory.estimate_tokens() > 0
        assert set(observer.failed) == {("token_estimator", kind)}
        await memory.close()


async def test_an_estimator_that_fails_for_one_text_counts_the_others() -> None:
    def like_tiktoken(text: str) -> int:
        if "<|endoftext|>" in text:
            raise ValueError(text)
        return 1

    guarded = guarded_estimator(like_tiktoken, lambda *_: None)
    assert guarded("x" * 400) == 1
    assert guarded("<|endoftext|>") == default_token_estimator("<|endoftext|>")


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
async def test_an_estimator_of_a_summarizer_that_fails_is_counted(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Counting()
    summarizer = ExtractiveSummarizer(token_estimator=raises(PanicException))
    async with open_backend("memory://", observer=observer) as backend:
        memory = _memory(backend if shared else None, config(zone=1), summarizer, observer)
        await added(memory, *range(3))
        await memory.flush()
        assert "u0" in (await memory.get_llm_context())["conversation_memory"]["summary"]
        assert set(observer.failed) == {("token_estimator", "PanicException")}
        assert "the token estimator failed" in caplog.text
        await memory.close()


async def test_a_summarizer_survives_its_estimator_without_a_memory() -> None:
    summarize = ExtractiveSummarizer(token_estimator=raises(PanicException))
    answer = await summarize({"previous_summary": "", "turns": [{"user": "Book 2 seats", "assistant": "Ok"}]})
    assert "Book 2 seats" in answer["summary"]


# The summarizer

SUMMARIZERS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises(ValueError), "ValueError"),
    "panics": (raises(PanicException), "PanicException"),
    "panics later": (panics_later, "PanicException"),
    "is cancelled": (cancels_itself, "Misbehaved"),
    "hangs": (hangs, "TimeoutError"),
    "another loop": (of_another_loop, "RuntimeError"),
    "text": (lambda request: QUOTED, "WrongType"),
    "nothing": (lambda request: None, "WrongType"),
    "async text": (a_coroutine, "WrongType"),
    "coroutine in coroutine": (lambda request: _nested(), "WrongType"),
    "blank": (lambda request: {"summary": " "}, "BadSummary"),
    "no summary": (lambda request: {"text": QUOTED}, "BadSummary"),
}


async def _nested() -> Any:
    return a_coroutine()


def _memory(backend: Backend | None, settings: Any, summarizer: Any, observer: Observer) -> Any:
    if backend is None:
        return DefaultShortTermMemory(config=settings, summarizer=summarizer, observer=observer)
    return backend.memory(MemoryKey("acme", "ada", "trip"), settings, summarizer=summarizer)


@pytest.mark.parametrize(("summarizer", "kind"), SUMMARIZERS.values(), ids=SUMMARIZERS.keys())
@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
@clock.virtually
async def test_a_summarizer_that_fails_in_any_way_backs_off(
    summarizer: Any, kind: str, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[float] = []

    def counted(request: Any) -> Any:
        calls.append(clock.now())
        return summarizer(request)

    observer = Counting()
    settings = config(zone=1, retry_attempts=1, retry_backoff_base_s=2.0, degraded_retry_interval_s=30.0)
    async with open_backend("memory://", observer=observer) as backend:
        memory = _memory(backend if shared else None, settings, counted, observer)
        began = clock.now()
        await added(memory, *range(3))
        await until(lambda: memory.health is MemoryHealth.RETRY, within=100)
        await until(lambda: memory.health is MemoryHealth.DEGRADED, within=200)
        took = 60.0 if kind == "TimeoutError" else 0.0
        assert len(calls) == 2
        assert 1.9 < calls[1] - calls[0] - took < 2.1
        assert clock.now() - began < 2.5 + 2 * took
        assert observer.failed == [("summarizer", kind)] * 2
        assert (await shown(memory))["recent"] == ["u2"]
        messages = [one.getMessage() for one in caplog.records if one.name == "asyncio"]
        assert not messages
        await memory.close()


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
@clock.virtually
async def test_a_flush_does_not_wait_for_retries_of_a_wrong_type(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def summarize(request: Any) -> Any:
        return QUOTED

    async with open_backend("memory://") as backend:
        settings = config(zone=1, retry_backoff_base_s=2.0)
        memory = _memory(backend if shared else None, settings, summarize, Observer())
        began = clock.now()
        await added(memory, *range(3))
        await memory.flush()
        await memory.flush()
        assert clock.now() - began < 1
        assert memory.health is MemoryHealth.RETRY
        assert "WrongType: the summarizer returned str, not {'summary': TEXT}" in caplog.text
        await memory.close()


@clock.virtually
async def test_a_flush_waits_for_a_summarizer_that_replaces_one_of_a_wrong_type() -> None:
    async def mended(request: Any) -> Any:
        return {"summary": "so far"}

    async with open_backend("memory://") as backend:
        settings = config(zone=1, retry_backoff_base_s=2.0)
        memory = _memory(backend, settings, a_coroutine, Observer())
        await added(memory, *range(3))
        await memory.flush()
        memory = _memory(backend, settings, mended, Observer())
        await memory.flush()
        assert memory.health is MemoryHealth.HEALTHY


# Callbacks

CALLBACKS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises(ValueError), "ValueError"),
    "panics": (raises(PanicException), "PanicException"),
    "panics later": (panics_later, "PanicException"),
    "is cancelled": (cancels_itself, "Misbehaved"),
    "hangs": (hangs, "TimeoutError"),
    "another loop": (of_another_loop, "RuntimeError"),
}


@pytest.mark.parametrize(("callback", "kind"), CALLBACKS.values(), ids=CALLBACKS.keys())
@clock.virtually
async def test_a_callback_that_fails_in_any_way_is_logged_and_counted(
    callback: Callable[..., Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Counting()
    background = Background(failed=observer.function_failed)
    with caplog.at_level(logging.WARNING):
        background.call_back(callback, QUOTED)
        await asyncio.sleep(CALLBACK_S + 1)
    assert not background
    assert observer.failed == [("callback", kind)]
    assert "a callback of the memory failed" in caplog.text


async def test_both_memories_count_callbacks_that_fail() -> None:
    observer = Counting()
    settings = config("truncation", on_turn_added=raises(PanicException))
    async with open_backend("memory://", observer=observer) as backend:
        for one in (None, backend):
            await added(_memory(one, settings, None, observer), 1)
        await until(lambda: observer.failed == [("callback", "PanicException")] * 2)


def test_a_callback_that_fails_on_a_later_event_loop_is_counted() -> None:
    observer = Counting()
    backend = open_backend("memory://", observer=observer)
    memories = list[Any]()

    async def use() -> None:
        async with backend:
            if not memories:
                settings = config("truncation", on_turn_added=raises(ValueError))
                memories.append(backend.memory(MemoryKey("acme", "u", "s"), settings))
            await added(memories[0], 1)

    for _ in range(2):
        asyncio.run(use())
    assert observer.failed == [("callback", "ValueError")] * 2


# Clocks

CLOCKS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises(ValueError), "ValueError"),
    "panics": (raises(PanicException), "PanicException"),
    "is cancelled": (raises(asyncio.CancelledError), "CancelledError"),
    "nothing": (lambda: None, "WrongType"),
    "text": (lambda: QUOTED, "WrongType"),
    "coroutine": (a_coroutine, "WrongType"),
    "true": (lambda: True, "WrongType"),
    "nan": (lambda: math.nan, "Misbehaved"),
}
clocks = pytest.mark.parametrize(("broken", "kind"), CLOCKS.values(), ids=CLOCKS.keys())


@clocks
async def test_the_systems_clock_stands_in_for_one_that_fails(
    broken: Callable[[], Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Counting()
    memory = DefaultShortTermMemory(
        config=config(zone=1), summarizer=ExtractiveSummarizer(), time_source=broken, observer=observer
    )
    await added(memory, *range(3))
    await memory.flush()
    assert "u0" in (await memory.get_llm_context())["conversation_memory"]["summary"]
    assert set(observer.failed) == {("clock", kind)}
    assert "the clock failed" in caplog.text
    await memory.close()


@pytest.mark.parametrize(
    ("broken", "kind"),
    [*(one for one in CLOCKS.values() if one[1] != "Misbehaved"), (lambda: 1.0, "WrongType")],
)
async def test_a_clock_of_the_tiers_that_fails_is_counted(broken: Any, kind: str) -> None:
    observer = Counting()
    before = datetime.now(UTC)
    for tier in MemoryTier:
        memory = MemoryManager(clock=broken, observer=observer)
        await memory.remember("k", "v", tier=tier)
        [found] = await memory.recall("k")
        assert found.created_at >= before
    assert set(observer.failed) == {("clock", kind)}


@clocks
@pytest.mark.parametrize("name", ["memory", "sqlite"])
async def test_a_drivers_clock_that_fails_fails_its_operation(
    broken: Callable[[], Any], kind: str, name: str, tmp_path: Path
) -> None:
    """None stands in for it: by a clock of another epoch, records would expire."""
    now: Callable[[], Any] = clock_of_one

    def told() -> Any:
        return now()

    options = {} if name == "memory" else {"path": tmp_path / "m.db"}
    async with open_backend(name, clock=told, **options) as backend:
        await backend.state_store.save_memory_state("k", {"a": 1})
        now = broken
        with pytest.raises(Unavailable, match="the function `clock` failed") as raised:
            await backend.state_store.save_memory_state("k", {"a": 2})
        assert kind_of(raised.value.__cause__ or raised.value) == kind
        with pytest.raises(Unavailable, match="the function `clock` failed"):
            await backend.state_store.load_memory_state("k")
        now = clock_of_one
        assert await backend.state_store.load_memory_state("k") == {"a": 1}


def clock_of_one() -> float:
    return 1.0


# Transforms


class Transforming:
    """A transform that does what it is told to."""

    name = "mine"

    def __init__(self) -> None:
        self.encode: Callable[[bytes], Any] = lambda data: data[::-1]
        self.decode: Callable[[bytes, int], Any] = lambda data, limit: data[::-1]


TRANSFORMS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises(ValueError), "ValueError"),
    "panics": (raises(PanicException), "PanicException"),
    "is cancelled": (raises(asyncio.CancelledError), "CancelledError"),
    "text": (lambda *_: QUOTED, "WrongType"),
    "coroutine": (a_coroutine, "WrongType"),
}
transforms = pytest.mark.parametrize(("broken", "kind"), TRANSFORMS.values(), ids=TRANSFORMS.keys())


@transforms
async def test_a_transform_that_fails_to_encode_writes_nothing(broken: Any, kind: str) -> None:
    observer, transform = Counting(), Transforming()
    async with open_backend("memory://", transforms=[transform], observer=observer) as backend:
        memory = _memory(backend, config("truncation"), None, observer)
        await added(memory, 1)
        transform.encode = broken
        with pytest.raises(Unavailable, match=r"the transform 'mine' failed .*; nothing was written"):
            await added(memory, 2)
        assert observer.failed == [("transform", kind)]
        assert (await shown(memory))["recent"] == ["u1"]


@transforms
async def test_a_transform_that_fails_to_decode_changes_nothing(broken: Any, kind: str) -> None:
    observer, transform = Counting(), Transforming()
    right = transform.decode
    async with open_backend("memory://", transforms=[transform], observer=observer) as backend:
        await backend.state_store.save_memory_state("k", {"a": 1})
        transform.decode = broken
        with pytest.raises(Corrupt, match="the transform 'mine' could not read the stored bytes"):
            await backend.state_store.load_memory_state("k")
        assert ("transform", kind) in observer.failed
        transform.decode = right
        assert await backend.state_store.load_memory_state("k") == {"a": 1}
