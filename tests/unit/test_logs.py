"""What is logged: not too often, by a hash instead of an id, and no text unless it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    DefaultShortTermMemory,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    Unavailable,
    logs,
    open_backend,
)
from stm_backends.drivers import Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records import keys

ADA, BOB = MemoryKey("acme", "ada", "a:b"), MemoryKey("acme", "bob", "trip")
HASH_KEY = bytes(range(16))
CONFIG = ShortTermMemoryConfig(
    "rolling_summary", MemoryBudget(full_zone_turns=1), retry_attempts=1, retry_backoff_base_s=0.01
)
logger = logging.getLogger("stm_backends")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def passed(limit: logs.RateLimit, text: str, *args: object, level: int = logging.WARNING) -> str | None:
    """Return what is logged of a message."""
    record = logging.LogRecord("stm_backends", level, "", 0, text, args, None)
    return record.getMessage() if limit.filter(record) else None


# How often


def test_a_repeated_message_is_logged_once_in_an_interval_and_counted() -> None:
    clock = Clock()
    limit = logs.RateLimit(60.0, clock=clock)
    assert passed(limit, "turn %d failed", 1) == "turn 1 failed"
    assert [passed(limit, "turn %d failed", number) for number in range(2, 5)] == [None] * 3
    assert passed(limit, "another kind") == "another kind"
    clock.now += 60
    assert passed(limit, "turn %d failed", 5) == "turn 5 failed (3 similar messages left out)"
    clock.now += 60
    assert passed(limit, "turn %d failed", 6) == "turn 6 failed"


def test_an_error_of_another_class_is_another_kind() -> None:
    limit = logs.RateLimit(60.0)
    assert passed(limit, "failed: %s", Unavailable("x"))
    assert passed(limit, "failed: %s", OSError("x"))
    assert passed(limit, "failed: %s", Unavailable("y")) is None


def test_messages_of_the_level_debug_are_not_limited() -> None:
    limit = logs.RateLimit(60.0)
    assert [passed(limit, "step", level=logging.DEBUG) for _ in range(3)] == ["step"] * 3


async def test_an_outage_of_many_conversations_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen(MemoryDriver):
        frozen = False
        failed = 0

        async def replace(self, *args: Any, **options: Any) -> bool:
            if self.frozen:
                self.failed += 1
                raise Unavailable("no answer")
            return await super().replace(*args, **options)

    driver = Frozen()
    async with Backend(driver) as backend:
        config = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=1))
        memories = [backend.memory(MemoryKey("acme", "ada", f"{n}"), config) for n in range(100)]
        await asyncio.gather(*(memory.add_turn(ConversationTurn("a", "b")) for memory in memories))
        driver.frozen = True
        for _ in range(3):
            await asyncio.gather(*(memory.add_turn(ConversationTurn("a", "b")) for memory in memories))
        async with asyncio.timeout(20):
            while driver.failed < 100:  # noqa: ASYNC110 -- no event says so
                await asyncio.sleep(0.01)
        driver.frozen = False
    lines = [
        record for record in caplog.records if "background work on a memory failed" in record.getMessage()
    ]
    assert len(lines) == 1


# How a conversation is named


async def fail(request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise LookupError(f"cannot summarize {request}")


@pytest.fixture(params=["shared", "in this process"])
def failing(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """How a conversation of either kind of memory fails until it is degraded; returns what was logged."""

    async def degrade(key: MemoryKey) -> list[str]:
        before = len(caplog.records)
        async with open_backend("memory://") as backend:
            if request.param == "shared":
                memory: Any = backend.memory(key, CONFIG, summarizer=fail)
            else:
                memory = DefaultShortTermMemory(config=CONFIG, summarizer=fail)
                await memory.hydrate(backend.state_store, key)
            for _ in range(3):
                await memory.add_turn(ConversationTurn("my SECRET", "noted"))
            await memory.flush()
            await memory.close()
        return [record.getMessage() + (record.exc_text or "") for record in caplog.records[before:]]

    return degrade


async def test_two_warnings_of_a_conversation_have_the_same_hash(failing: Callable[..., Any]) -> None:
    logs.configure(hash_key=HASH_KEY, every_s=0)
    name = logs.conversation(ADA.composite())
    first, second = (line for line in await failing(ADA) if "summarizing" in line)
    assert first == f"summarizing failed (LookupError), attempt 1 will be retried (conversation {name})"
    assert second.startswith("summarizing is unavailable (LookupError)")
    assert second.endswith(f"(conversation {name})")
    assert "ada" not in first + second
    assert name not in "".join(await failing(BOB))


def test_every_record_of_a_conversation_has_the_name_of_the_conversation() -> None:
    logs.configure(hash_key=HASH_KEY)
    name = logs.conversation(ADA.composite())
    blob = keys.blob_key(ADA.composite())
    for key in (keys.memory_key(ADA), keys.log_key(ADA, "langchain"), blob):
        assert keys.log_name(key) == name
    assert keys.log_name(Key(keys.PAUSED_RUNS, "token")) != name


def test_a_process_has_a_random_key_unless_it_is_given_one() -> None:
    logs.configure()
    before = logs.conversation("a:b:c")
    assert before == logs.conversation("a:b:c")
    logs.configure()
    assert before != logs.conversation("a:b:c")
    for _ in range(2):
        logs.configure(hash_key=HASH_KEY)
        assert logs.conversation("a:b:c") == "e472d68d0cf5"


# What is quoted


@pytest.mark.parametrize("show_errors", [False, True])
async def test_text_and_traceback_of_an_error_are_logged_only_if_asked_for(
    failing: Callable[..., Any], caplog: pytest.LogCaptureFixture, show_errors: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    logs.configure(show_errors=show_errors)
    await failing(ADA)
    assert ("SECRET" in caplog.text) is show_errors
    assert ("Traceback" in caplog.text) is show_errors
    assert "LookupError" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"hash_key": b"short"}, {"hash_key": "text"}, {"every_s": -1}, {"every_s": float("nan")}]
)
def test_a_setting_of_another_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        logs.configure(**wrong)
