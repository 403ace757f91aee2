"""Conversations with transcripts, for tests of what administers them."""

from __future__ import annotations

from collections.abc import Callable

from stm_backends import (
    Backend,
    ConversationTurn,
    DistributedShortTermMemory,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.drivers.contract import Driver, Key
from stm_backends.records import keys, operations

KEPT = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=2), transcript=True)


async def converse(
    backend: Backend,
    key: MemoryKey,
    numbers: range,
    *,
    ts: Callable[[int], float] = lambda number: 0.0,
    config: ShortTermMemoryConfig = KEPT,
) -> None:
    """Add turns by number, which the summary or the pages then have, but for a few."""
    memory = backend.memory(key, config, summarizer=ExtractiveSummarizer())
    for number in numbers:
        turn = ConversationTurn(f"question {number}", f"answer {number}", ts=ts(number))
        await memory.add_turn(turn, turn_id=f"t{number}")
    await memory.flush()
    await memory.close()


def reading(backend: Backend, key: MemoryKey) -> DistributedShortTermMemory:
    """Return the memory of a conversation with a transcript."""
    return backend.memory(key, KEPT, summarizer=ExtractiveSummarizer())


async def told(backend: Backend, key: MemoryKey) -> list[tuple[int, str]]:
    """Return the whole conversation as it can be read: numbers and ids."""
    return [(turn.number, turn.id) async for turn in reading(backend, key).each_turn()]


def numbered(numbers: range) -> list[tuple[int, str]]:
    """Return what `told` returns of turns that `converse` has added to a new conversation."""
    return [(number, f"t{number}") for number in numbers]


async def pages_of(driver: Driver, key: MemoryKey) -> list[str]:
    """Return the names of the pages of a conversation."""
    scope, prefix = keys.pages_of(keys.memory_key(key))
    return [name async for name in operations.names_of(driver, scope, prefix)]


async def pages_in(driver: Driver, key: MemoryKey) -> dict[Key, object]:
    """Return the pages of a conversation as they are stored."""
    scope = keys.pages_of(keys.memory_key(key)).scope
    return {(where := Key(scope, name)): await driver.load(where) for name in await pages_of(driver, key)}
