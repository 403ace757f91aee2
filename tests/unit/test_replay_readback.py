"""Turns that wait in pages for a summary are not lost: they are summarized at the end, or counted apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryBudget, ShortTermMemoryConfig, open_backend
from stm_backends.cli.replay import ledger, readback
from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.pods import Setup
from stm_backends.cli.replay.verify import Findings, compare
from stm_backends.errors import Unavailable
from stm_backends.memory.shared.memory import DistributedShortTermMemory

TURNS = 30
SAID = Conversation("s", tuple(ConversationTurn(f"u{place}", f"a{place}") for place in range(TURNS)))
"""More turns than a record holds whose summarizer does not answer."""

CONFIG = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(2, 1000, total_max_tokens=0),
    fold_max_turns=2,
    recovery_backlog_limit=8,
    transcript=True,
)


async def no_answer(self: ledger.LedgerSummarizer, request: Mapping[str, Any], /) -> Mapping[str, Any]:
    await asyncio.Event().wait()
    return request


@pytest.fixture
async def setup(tmp_path: Path) -> Setup:
    """A conversation that was replayed while no summarizer answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger.LedgerSummarizer, "__call__", no_answer)
        return await replayed(tmp_path)


async def replayed(tmp_path: Path) -> Setup:
    setup = Setup(backend=f"sqlite:///{tmp_path}/x.db", url=None, tenant="t", user="u", config=CONFIG)
    # Closing waits no longer than that for the summarizer.
    async with open_backend(setup.backend, close_timeout_s=0.1) as backend:
        memory = setup.memory(backend, "s")
        for place, turn in enumerate(SAID.turns):
            await memory.add_turn(ledger.marked(turn, "s", place), turn_id=f"s#{place}")
        while memory.waiting < TURNS // 2:
            await asyncio.sleep(0.01)
            await memory.get_llm_context()
        shown = (await memory.get_llm_context())["conversation_memory"]
        assert compare(ledger.places_in(shown, "s", waiting=0), acknowledged=TURNS).lost == memory.waiting
        assert not compare(ledger.places_in(shown, "s", waiting=memory.waiting), acknowledged=TURNS)
    return setup


async def test_turns_that_waited_are_summarized_however_many_summaries_that_takes(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, took = DistributedShortTermMemory.flush, list[float]()

    async def interrupted(self: DistributedShortTermMemory, timeout: float | None = None) -> None:
        took.append(timeout or 0)
        if len(took) == 2:
            raise Unavailable("slow", backend="sqlite", operation="load")
        summaries, flushing = self.stats.summaries, asyncio.create_task(flush(self, timeout))
        while self.stats.summaries == summaries and not flushing.done():
            await asyncio.wait({flushing}, timeout=0.001)
        flushing.cancel()

    monkeypatch.setattr(DistributedShortTermMemory, "flush", interrupted)

    read = await readback.read_back(setup, [SAID])

    assert not read.findings
    assert (read.summarized, read.in_full, read.pending, read.waiting) == (TURNS - 2, 2, 0, 0)
    assert (read.transcript, read.in_transcript) == (Findings(), TURNS)
    assert len(took) >= 3


async def test_turns_that_wait_at_the_end_are_counted_and_not_called_lost(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger.LedgerSummarizer, "__call__", no_answer)
    monkeypatch.setattr(readback, "FLUSH_S", 0.2)

    read = await readback.read_back(setup, [SAID])

    assert read.waiting >= TURNS // 2
    assert read.waiting + read.in_full == TURNS
    assert not read.findings
    assert not read.transcript
