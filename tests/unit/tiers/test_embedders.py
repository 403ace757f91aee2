"""What an embedder may be, and how one of another form is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends.handed_in import Misbehaved
from stm_backends.tiers import MemoryManager, MemoryTier
from stm_backends.tiers.embedding import embed
from stm_backends.tiers.model import ask
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
    with pytest.raises(ConfigurationError, match="embedder must be an async function"):
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)


class PanicException(BaseException):
    """As an extension in Rust raises it."""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ValueError, "ValueError"),
        (PanicException, "raised PanicException"),
        (asyncio.CancelledError, "cancelled from within"),
    ],
)
async def test_an_embedder_that_fails_is_unavailable(error: type[BaseException], named: str) -> None:
    async def embedder(texts: list[str]) -> Any:
        raise error("the endpoint refused the text")

    memory = MemoryManager(embedder=embedder)
    with pytest.raises(Unavailable, match=f"the embedder failed .*{named}") as raised:
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)
    assert "refused" not in str(raised.value)


@clock.virtually
async def test_an_embedder_or_a_model_that_hangs_is_given_up() -> None:
    async def hangs(_: object) -> Any:
        await asyncio.sleep(1e6)

    with pytest.raises(Unavailable, match=r"the embedder failed .TimeoutError"):
        await embed(hangs, ["a text"])
    with pytest.raises(TimeoutError):
        await ask(hangs, "a prompt")


async def test_a_panic_of_a_model_is_an_exception() -> None:
    def panics(_: object) -> Any:
        raise PanicException

    with pytest.raises(Misbehaved, match="raised PanicException"):
        await ask(panics, "a prompt")


async def test_vectors_of_one_answer_have_one_length() -> None:
    async def embedder(texts: list[str]) -> Any:
        return [[1.0] * length for length, _ in enumerate(texts, 1)]

    with pytest.raises(ConfigurationError, match="vectors of one length"):
        await embed(embedder, ["one", "two"])
