"""The default strategy stores nothing, which is said once in a process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.memory import log
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer

TURN = ConversationTurn("A table for two", "Done.")
KEY = MemoryKey("acme", "u1", "chat")


@pytest.fixture(autouse=True)
def _a_new_process() -> Iterator[None]:
    log.keeps_nothing.cache_clear()
    yield
    log.keeps_nothing.cache_clear()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_turns_added_to_a_memory_without_a_strategy_are_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_backend("memory") as backend:
        memories = [
            DefaultShortTermMemory(config=ShortTermMemoryConfig()),
            backend.memory(KEY, ShortTermMemoryConfig()),
            backend.memory(KEY, ShortTermMemoryConfig()),
        ]
        for memory in memories:
            assert await memory.get_llm_context() == {}
        assert warnings(caplog) == []
        for memory in memories * 2:
            await memory.add_turn(TURN)
        (warning,) = warnings(caplog)
    assert 'strategy="none"' in warning
    assert '"rolling_summary" or "truncation"' in warning
    assert "table" not in warning


async def test_the_distributed_memory_warns_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with open_backend("memory") as backend:
        await backend.memory(KEY, ShortTermMemoryConfig()).add_turn(TURN)
    assert len(warnings(caplog)) == 1


async def test_a_strategy_that_keeps_turns_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    config = ShortTermMemoryConfig("truncation")
    await DefaultShortTermMemory(config=config).add_turn(TURN)
    async with open_backend("memory") as backend:
        await backend.memory(KEY, config).add_turn(TURN)
    assert warnings(caplog) == []


async def test_a_memory_without_a_configuration_keeps_everything(caplog: pytest.LogCaptureFixture) -> None:
    async with open_backend("memory") as backend:
        memory = backend.memory(KEY)
        for number in range(40):
            await memory.add_turn(ConversationTurn(f"Table {number} for Sunday", "Booked."))
        await memory.flush()
        view = (await memory.get_llm_context())["conversation_memory"]
        assert "Table 30" in view["summary"]
        assert len(view["recent_turns"]) == 5
        assert len([turn async for turn in memory.each_turn()]) == 40
        assert memory.estimate_tokens() <= 3_000
        router = backend.router()
        with router.bound(KEY):
            assert await router.get_llm_context() == {"conversation_memory": view}
    assert warnings(caplog) == []


async def test_a_summarizer_alone_is_used() -> None:
    async def summarize(request: object) -> dict[str, str]:
        return {"summary": "by a model"}

    async with open_backend("memory") as backend:
        memory = backend.memory(KEY, summarizer=summarize)
        for _ in range(12):
            await memory.add_turn(TURN)
        await memory.flush()
        assert "by a model" in (await memory.get_llm_context())["conversation_memory"]["summary"]


@pytest.mark.parametrize("reader", ["memory", "router"])
async def test_defaults_do_not_replace_what_was_given(reader: str) -> None:
    settings = config(transcript=False)
    async with open_backend("memory") as backend:
        memory = backend.memory(KEY, settings, summarizer=LedgerSummarizer())
        if reader == "memory":
            await backend.memory(KEY).turns()
            backend.memory(KEY, summarizer=LedgerSummarizer())
        else:
            with (router := backend.router()).bound(KEY):
                await router.get_llm_context()
        for number in range(9):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert (await shown(memory))["summary"] == [f"u{number}" for number in range(7)]
        assert (await memory.transcript()).oldest == 7, "what was summarized is in no page"
        assert len((await memory.transcript()).turns) == 2


async def test_a_default_does_not_replace_a_summarizer_that_was_given() -> None:
    async with open_backend("memory") as backend:
        memory = backend.memory(KEY, summarizer=LedgerSummarizer())
        backend.memory(KEY)
        for number in range(12):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert (await shown(memory))["summary"] == [f"u{number}" for number in range(7)]


async def test_what_is_given_replaces_a_default() -> None:
    async with open_backend("memory") as backend:
        backend.memory(KEY)
        memory = backend.memory(KEY, config(), summarizer=LedgerSummarizer())
        for number in range(9):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert (await shown(memory))["summary"] == [f"u{number}" for number in range(7)]
