"""What an embedder may be, and how one of another form is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends.handed_in import kind_of
from stm_backends.telemetry.observer import Observer
from stm_backends.tiers import MemoryManager, MemoryTier
from tests.support import clock


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [[1.0], [1.0]],
        [1.0],
        [{"embedding": [1.0]}],
        ["text"],
        [[float("nan")]],
        [[None]],
        [[10**400]],
    ],
    ids=lambda answer: str(answer)[:20],
)
async def test_an_answer_that_is_no_list_of_vectors_is_refused(answer: Any) -> None:
    async def embedder(texts: list[str]) -> Any:
        return answer

    memory = MemoryManager(embedder=embedder)
    with pytest.raises(ConfigurationError, match="one vector of finite numbers for each text"):
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)
    assert await memory.long_term.listed() == []


async def test_an_embedder_that_is_not_asynchronous_is_refused_by_name() -> None:
    def embedder(texts: list[str]) -> Any:
        return [[1.0] for _ in texts]

    memory = MemoryManager(embedder=embedder)
    with pytest.raises(ConfigurationError, match=r"the embedder returned list, not .* an async function"):
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)


class PanicException(BaseException):
    """As an extension in Rust raises it."""


class Counting(Observer):
    """Keeps what failed, and the class of the error."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []

    def function_failed(self, function: str, error: BaseException) -> None:
        self.failed.append((function, kind_of(error)))


async def hangs(_: object) -> Any:
    await asyncio.sleep(1e6)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    async def function(_: object) -> Any:
        raise error("the endpoint refused the text")

    return function


def answering(answer: object) -> Callable[..., Any]:
    async def function(_: object) -> Any:
        return answer

    return function


FAILURES = pytest.mark.parametrize(
    ("function", "named", "kind"),
    [
        (raising(ValueError), "ValueError", "ValueError"),
        (raising(PanicException), "raised PanicException", "PanicException"),
        (raising(asyncio.CancelledError), "cancelled from within", "Misbehaved"),
        (hangs, "TimeoutError", "TimeoutError"),
    ],
    ids=["raises", "panics", "is cancelled", "hangs"],
)


@FAILURES
@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM])
@clock.virtually
async def test_an_embedder_that_fails_is_unavailable_and_counted(
    function: Any, named: str, kind: str, tier: MemoryTier
) -> None:
    observer = Counting()
    memory = MemoryManager(embedder=function, observer=observer)
    if tier is MemoryTier.SHORT_TERM:
        await memory.remember("k", "a text", tier=tier)
        work = memory.recall("meant", tiers=[tier])
    else:
        work = memory.remember("k", "a text", tier=tier)
    with pytest.raises(Unavailable, match=f"the embedder failed .*{named}") as raised:
        await work
    assert "refused" not in str(raised.value)
    assert observer.failed == [("embedder", kind)]


@FAILURES
@clock.virtually
async def test_a_model_that_fails_is_unavailable_and_counted(function: Any, named: str, kind: str) -> None:
    observer = Counting()
    memory = MemoryManager(llm_provider=function, observer=observer)
    await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)
    with pytest.raises(Unavailable, match=f"the model failed .*{named}") as raised:
        await memory.gc.improve_memory(MemoryTier.LONG_TERM)
    assert "refused" not in str(raised.value)
    assert observer.failed == [("llm_provider", kind)]


@FAILURES
@clock.virtually
async def test_a_summary_of_a_model_that_fails_is_counted(
    function: Any, named: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Counting()
    memory = MemoryManager(observer=observer)
    for number in range(12):
        await memory.remember(f"k{number}", f"v{number}", tier=MemoryTier.SHORT_TERM)
    summary = await memory.short_term.summarize(function)
    assert summary is not None
    assert "v0" in summary.content
    assert observer.failed == [("llm_provider", kind)]
    assert caplog.text.count("the model failed") == 1
    assert named in caplog.text
    assert "refused" not in caplog.text


@pytest.mark.parametrize("answer", [42, None, [[1.0], [1.0]], "text"])
async def test_a_wrong_answer_of_an_embedder_is_named_and_counted(answer: object) -> None:
    observer = Counting()
    memory = MemoryManager(embedder=answering(answer), observer=observer)
    with pytest.raises(ConfigurationError, match=f"the embedder returned {type(answer).__name__}, not"):
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)
    assert observer.failed == [("embedder", "WrongType")]


async def test_vectors_of_one_answer_have_one_length() -> None:
    memory = MemoryManager(embedder=answering([[1.0], [1.0, 2.0]]))
    await memory.remember("one", "a", tier=MemoryTier.SHORT_TERM)
    await memory.remember("two", "b", tier=MemoryTier.SHORT_TERM)
    with pytest.raises(ConfigurationError, match="vectors of one length"):
        await memory.recall("meant")


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM])
async def test_a_model_of_another_dimension_finds_by_words(
    tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    """Until they are stored again; logged and counted once for each query."""
    observer, length = Counting(), 2

    async def embedder(texts: list[str]) -> list[list[float]]:
        return [[1.0] * length for _ in texts]

    memory = MemoryManager(embedder=embedder, observer=observer)
    for key in ("tea", "coffee"):
        await memory.remember(key, "a drink", tier=tier)
    assert len(await memory.recall("meant", tiers=[tier])) == 2
    length = 3
    assert await memory.recall("meant", tiers=[tier]) == []
    assert [one.key for one in await memory.recall("tea", tiers=[tier])] == ["tea"]
    assert observer.failed == [("embedder", "Misbehaved")] * 2
    assert caplog.text.count("the embedder has changed") == 1
    await memory.remember("tea", "a hot drink", tier=tier)
    assert [one.key for one in await memory.recall("meant", tiers=[tier])] == ["tea"]
