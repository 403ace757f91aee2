"""Calls that a type checker accepts, with pyright and with `mypy --strict`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, assert_type

from stm_backends import (
    Backend,
    BackendOptions,
    ConfigLike,
    DefaultShortTermMemory,
    DistributedShortTermMemory,
    Limits,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    Summarizer,
    open_backend,
    open_memory,
    open_sqlite,
    sync,
)
from stm_backends_dynamo import open_dynamo
from stm_backends_mongo import open_mongo
from stm_backends_postgres import open_postgres
from stm_backends_redis import RedisOptions, open_redis

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(total_max_tokens=3_000))


async def of_a_dict(request: dict[str, Any]) -> dict[str, Any]:
    return {"summary": request["previous_summary"]}


async def of_a_mapping(request: Mapping[str, Any]) -> Mapping[str, str]:
    return {"summary": str(request["previous_summary"])}


def plain(request: dict[str, Any]) -> dict[str, str]:
    return {"summary": str(request["previous_summary"])}


class Model:
    """A summarizer with a state."""

    async def __call__(self, request: dict[str, Any], /) -> dict[str, str]:
        return {"summary": str(request["previous_summary"])}


class TheirBudget:
    """A budget as another library has it."""

    full_zone_turns: int = 5
    total_max_tokens: int = 3_000


class TheirConfig:
    """A configuration as another library has it."""

    def __init__(self) -> None:
        self.strategy: Literal["rolling_summary", "truncation", "none"] = "truncation"
        self.budget = TheirBudget()


def summarizers(backend: Backend, blocking: sync.Backend) -> None:
    each: list[Summarizer] = [of_a_dict, of_a_mapping, Model()]
    for summarizer in each:
        assert_type(backend.memory(KEY, CONFIG, summarizer=summarizer), DistributedShortTermMemory)
    backend.memory(KEY, CONFIG, summarizer=of_a_dict)
    backend.conversation("acme", "u1", "chat", summarizer=Model())
    backend.router(CONFIG, summarizer=of_a_mapping)
    DefaultShortTermMemory(config=CONFIG, summarizer=of_a_dict)
    blocking.memory(KEY, CONFIG, summarizer=plain)
    blocking.memory(KEY, CONFIG, summarizer=of_a_dict)


def configurations(backend: Backend) -> None:
    each: list[ConfigLike] = [CONFIG, TheirConfig()]
    for config in each:
        backend.memory(KEY, config)
    backend.memory(KEY)
    backend.memory(KEY, None)
    backend.conversation("acme", "u1", "chat", CONFIG)
    backend.router(TheirConfig())


def options(client: object) -> None:
    assert_type(open_memory(name="shared"), Backend)
    assert_type(open_sqlite(path=Path("chats.db"), synchronous="full"), Backend)
    assert_type(open_redis("redis://localhost:6379/0", pool_size=3, limits=Limits(state_bytes=1)), Backend)
    assert_type(open_redis(client=client, key_prefix="mine:"), Backend)
    assert_type(open_postgres(client=client, schema="memory"), Backend)
    assert_type(open_postgres(dsn="postgresql://localhost/chats", password=lambda: "secret"), Backend)
    assert_type(open_mongo("mongodb://localhost/chats", durability="majority", maxPoolSize=5), Backend)
    assert_type(open_dynamo(table="chats", region="eu-west-1", create=True), Backend)
    # The general way takes any option: it may be one of another package's driver.
    assert_type(open_backend("acme://host", knobs=3), Backend)
    assert_type(sync.Backend(open_redis(pool_size=3)), sync.Backend)


def passed_on(url: str, given: RedisOptions) -> Backend:
    return open_redis(url, **given)


class AcmeOptions(BackendOptions, total=False):
    """The options of another package's driver."""

    knobs: int
