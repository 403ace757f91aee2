"""Memories and states that the tests of memories share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.protocols import ShortTermMemory
from stm_backends.testing.memory_contract import config, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer

_Memory = TypeVar("_Memory", bound=ShortTermMemory)

KEY, OTHER = "acme:u1:chat", "acme:u2:chat"


def memory(summarizer: Any = None, settings: Any = None, **given: Any) -> DefaultShortTermMemory:
    return DefaultShortTermMemory(
        config=settings or config(zone=2), summarizer=summarizer or LedgerSummarizer(), **given
    )


def never(settings: Any = None) -> DefaultShortTermMemory:
    """A memory whose summarizer is not called for fewer than a thousand turns."""
    return memory(settings=settings or config(zone=2, fold_batch_turns=1000))


async def added(target: _Memory, *numbers: int | str) -> _Memory:
    """Add these turns, and return the memory."""
    for number in numbers:
        await target.add_turn(turn(number))
    return target


def users(state: Mapping[str, Any]) -> list[str]:
    """Return the user messages of all turns in a state, in order."""
    return [item["user_message"] for part in ("backlog", "pending", "turns") for item in state[part]]


def penguiflow_state(*numbers: int | str, summary: str = "", **fields: Any) -> dict[str, Any]:
    """Return a state as PenguiFlow writes it: no ids, nothing of ours."""
    turns = [
        {
            "user_message": f"u{number}",
            "assistant_response": "fine",
            "trajectory_digest": None,
            "artifacts_shown": {},
            "artifacts_hidden_refs": [],
            "ts": 1.0,
        }
        for number in numbers
    ]
    state = {
        "version": 1,
        "health": "healthy",
        "summary": summary,
        "turns": turns,
        "pending": [],
        "backlog": [],
    }
    return {**state, "config_snapshot": {}, **fields}
