"""What an embedder may be, and how one of another form is refused."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends.tiers import MemoryManager, MemoryTier


@pytest.mark.parametrize(
    "answer",
    [None, [], [[1.0], [1.0]], [1.0], [{"embedding": [1.0]}], ["text"], [[float("nan")]], [[None]]],
    ids=str,
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


async def test_an_error_of_an_embedder_is_raised_unchanged() -> None:
    async def embedder(texts: list[str]) -> Any:
        raise ValueError("the endpoint refused the text")

    memory = MemoryManager(embedder=embedder)
    with pytest.raises(ValueError, match="the endpoint refused the text") as raised:
        await memory.remember("k", "a text", tier=MemoryTier.LONG_TERM)
    assert type(raised.value) is ValueError
