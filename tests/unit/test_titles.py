"""Titles that a summarizer gives: shown in a list, and never in place of the user's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from stm_backends import Backend, ConversationTurn, MemoryKey
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.catalogue import touched

KEY = MemoryKey("acme", "u1", "chat")
SETTINGS = config(zone=1, transcript=True, summary_max_tokens=9_000, total_max_tokens=0)


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(driver) as opened:
        yield opened


class Naming(LedgerSummarizer):
    """Gives its answers a title."""

    def __init__(self, *titles: Any) -> None:
        super().__init__()
        self._titles = [*titles]

    async def __call__(self, request: Any, /) -> Any:
        return {**await super().__call__(request), "title": self._titles.pop(0)}


async def said(backend: Backend, summarizer: LedgerSummarizer, *words: str) -> None:
    memory = backend.memory(KEY, SETTINGS, summarizer=summarizer)
    for word in words:
        await memory.add_turn(ConversationTurn(word, "ok"))
        await memory.flush()
    await touched(backend, KEY)


async def title(backend: Backend) -> str:
    await backend.conversations.rebuild("acme", "u1")
    return (await backend.conversations.get(KEY)).title


async def test_a_summarizer_names_a_conversation_and_names_it_again(backend: Backend) -> None:
    naming = Naming("Tea", "Tea and cake")
    await said(backend, naming, "one", "two")
    assert await title(backend) == "Tea"
    await said(backend, naming, "three")
    assert await title(backend) == "Tea and cake"
    assert [request.get("title") for request in naming.requests] == [None, "Tea"]


@pytest.mark.parametrize("none", [None, "", " \n", 7, ["Tea"], "\ud800"])
async def test_a_title_that_is_none_changes_nothing(backend: Backend, none: Any) -> None:
    naming = Naming(none, "Tea", none)
    await said(backend, naming, "one", "two")
    assert await title(backend) == "one"
    await said(backend, naming, "three", "four")
    assert await title(backend) == "Tea"
    # Nor does it make the attempt fail.
    assert backend.memory(KEY).stats.summarizer_failures == 0


async def test_without_a_title_a_summarizer_is_asked_as_ever(backend: Backend) -> None:
    summarizer = LedgerSummarizer()
    await said(backend, summarizer, "one", "two", "three")
    assert {*summarizer.requests[-1]} == {"previous_summary", "turns"}
    assert await title(backend) == "one"


async def test_a_long_title_is_one_short_line(backend: Backend) -> None:
    await said(backend, Naming(f"Tea\nand {'x' * 9_999}"), "one", "two")
    found = await title(backend)
    assert found.startswith("Tea and xxx")
    assert len(found) == 120


async def test_a_title_that_the_user_set_is_never_replaced(backend: Backend) -> None:
    naming = Naming("Tea", "Cake", "Milk")
    await said(backend, naming, "one", "two")
    await backend.conversations.update(KEY, title="Mine")
    await said(backend, naming, "three")
    assert await title(backend) == "Mine"
    await backend.conversations.update(KEY, title="")
    assert await title(backend) == "Cake"
    await said(backend, naming, "four")
    assert await title(backend) == "Milk"


async def test_an_export_takes_the_title_along(backend: Backend) -> None:
    await said(backend, Naming("Tea"), "one", "two")
    async with Backend(MemoryDriver()) as other:
        await other.sessions.import_(await backend.sessions.export(KEY))
        assert await title(other) == "Tea"
