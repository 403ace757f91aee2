"""What a type checker sees of the public API. `nox -s types` checks this file, and the tests run it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, assert_type

from stm_backends import (
    Backend,
    ConversationTurn,
    DefaultShortTermMemory,
    DistributedShortTermMemory,
    ExtractiveSummarizer,
    ItemLog,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    MemoryRouter,
    OutcomeUnknown,
    Sessions,
    ShortTermMemory,
    ShortTermMemoryArtifacts,
    ShortTermMemoryConfig,
    ShortTermMemoryPersistence,
    ShortTermMemorySerializable,
    StateStore,
    StorageError,
    Strategy,
    Summarizer,
    SupportsMemoryState,
    TokenEstimator,
    Transform,
    default_token_estimator,
    open_backend,
)
from stm_backends.drivers import (
    ABSENT,
    ANY,
    KEEP,
    BackendPlugin,
    Driver,
    Key,
    Page,
    Record,
    Traits,
    new_version,
)
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.in_memory import stm_backend as memory_plugin
from stm_backends.messages import (
    AnthropicMessage,
    Call,
    ChatMessage,
    Message,
    Result,
    Role,
    checked,
    shape_of,
    window,
)

KEY = MemoryKey("acme", "u", "chat")
TRUNCATION = ShortTermMemoryConfig(strategy="truncation")


async def summarize(request: Mapping[str, Any]) -> dict[str, str]:
    return {"summary": str(request["previous_summary"])}


class Reversed:
    """A transform, as a user writes one."""

    name = "reversed"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes, limit: int) -> bytes:
        return data[:limit][::-1]


async def test_a_backend_has_typed_parts() -> None:
    transforms: Sequence[Transform] = [Reversed()]
    backend = open_backend("memory:", transforms=transforms)
    assert_type(backend, Backend)
    async with backend as entered:
        assert_type(entered, Backend)
        assert_type(entered.name, str)
        assert_type(entered.traits, Traits)
        assert_type(entered.state_store, StateStore)
        assert_type(entered.sessions, Sessions)
        assert_type(entered.router(TRUNCATION), MemoryRouter)
        assert_type(entered.item_log(KEY, "langchain"), ItemLog)
        assert_type(await entered.ping(), float)


async def test_a_shared_memory_has_typed_methods() -> None:
    async with open_backend("memory:") as backend:
        memory = backend.memory(KEY, TRUNCATION)
        assert_type(memory, DistributedShortTermMemory)
        assert_type(await memory.add_turn(ConversationTurn("q", "a"), turn_id="1"), None)
        assert_type(await memory.get_llm_context(), dict[str, Any])
        assert_type(await memory.turns(), list[ConversationTurn])
        assert_type(await memory.flush(timeout=1.0), None)
        assert_type(memory.estimate_tokens(), int)
        assert_type(memory.health, MemoryHealth)


async def test_a_local_memory_is_saved_in_a_typed_store() -> None:
    memory = DefaultShortTermMemory(config=TRUNCATION)
    async with open_backend("memory:") as backend:
        store: SupportsMemoryState = backend.state_store
        assert_type(await memory.persist(store, KEY), None)
        assert_type(await store.load_memory_state(KEY.composite()), dict[str, Any] | None)
        assert_type(await backend.state_store.load_versioned("k"), tuple[dict[str, Any] | None, str | None])
        assert_type(await backend.state_store.save_if("k", {}, expect=None), bool)
    assert_type(memory.to_dict(), dict[str, Any])


async def test_each_memory_satisfies_its_protocols() -> None:
    local = DefaultShortTermMemory(config=TRUNCATION)
    async with open_backend("memory:") as backend:
        router = backend.router(TRUNCATION)
        memories: list[ShortTermMemory] = [local, backend.memory(KEY, TRUNCATION), router]
        saved: list[ShortTermMemoryPersistence] = [local, router]
        assert all(isinstance(memory, ShortTermMemory) for memory in memories)
        assert all(isinstance(memory, ShortTermMemoryPersistence) for memory in saved)
    serializable: ShortTermMemorySerializable = local
    artifacts: ShortTermMemoryArtifacts = local
    assert_type(artifacts.get_artifact("ref"), Any | None)
    assert isinstance(serializable, ShortTermMemorySerializable)


async def test_functions_and_objects_are_summarizers() -> None:
    summarizers: list[Summarizer] = [summarize, ExtractiveSummarizer()]
    for summarizer in summarizers:
        answer = await summarizer({"previous_summary": "so far", "turns": []})
        assert_type(answer, Mapping[str, Any])


async def test_sessions_have_typed_answers() -> None:
    async with open_backend("memory:") as backend:
        sessions = backend.sessions
        await backend.memory(KEY, TRUNCATION).add_turn(ConversationTurn("q", "a"))
        assert_type(sessions.list("acme", "u"), AsyncIterator[MemoryKey])
        assert_type(sessions.users("acme"), AsyncIterator[str])
        document = await sessions.export(KEY)
        assert_type(document, dict[str, Any])
        assert_type(await sessions.import_(document, on_conflict="merge"), MemoryKey)
        assert_type(await sessions.erase(KEY), bool)
        assert_type(await sessions.erase_tenant("acme"), int)


def test_settings_have_narrow_types() -> None:
    config = ShortTermMemoryConfig()
    assert_type(config.strategy, Strategy)
    assert_type(config.budget, MemoryBudget)
    assert_type(config.session_ttl_s, float | None)
    estimator: TokenEstimator = default_token_estimator
    assert_type(estimator("text"), int)


def test_messages_are_typed_dicts_or_any_json() -> None:
    said: list[ChatMessage] = [{"role": "user", "content": "Hello"}]
    kept: list[AnthropicMessage] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for messages in (said, kept):
        assert_type(window("", messages, max_tokens=100, estimate=default_token_estimator), list[Message])
    message: Message = said[0]
    assert_type(checked(message), Message)
    shape = shape_of(message)
    assert_type(shape.role(message), Role)
    assert_type(shape.calls(message), list[Call])
    assert_type(shape.results(message), list[Result])


def test_an_error_says_where_it_happened() -> None:
    error: StorageError = OutcomeUnknown("no answer", backend="redis", operation="append")
    assert_type(error.backend, str)
    assert_type(error.operation, str)


async def test_a_driver_has_typed_operations() -> None:
    driver: Driver = MemoryDriver()
    key = Key("scope", "name")
    await driver.open()
    assert_type(await driver.append(key, b"entry", initial_version=new_version(), ttl=None), int)
    assert_type(await driver.load(key), Record | None)
    assert_type(await driver.replace(key, b"", version=new_version(), expect=ANY, ttl=KEEP), bool)
    assert_type(await driver.replace(key, b"", version=new_version(), expect=ABSENT, ttl=1.0), bool)
    assert_type(await driver.scan("scope", limit=1), Page)
    assert_type(await driver.delete(key), bool)
    await driver.close()


def test_an_entry_point_returns_a_typed_plugin() -> None:
    assert_type(memory_plugin(), BackendPlugin)
