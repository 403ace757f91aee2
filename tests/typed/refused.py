"""Calls that a type checker refuses, with pyright and with `mypy --strict`.

Each line that is refused has an ignore comment. Both report a comment that is not needed, so a mistake that
they accept fails the check.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any

from stm_backends import (
    Backend,
    DefaultShortTermMemory,
    MemoryBudget,
    MemoryKey,
    open_memory,
    open_sqlite,
    sync,
)
from stm_backends_dynamo import open_dynamo
from stm_backends_mongo import open_mongo
from stm_backends_postgres import open_postgres
from stm_backends_redis import open_redis

KEY = MemoryKey("acme", "u1", "chat")


async def of_a_text(request: str) -> dict[str, Any]:
    return {"summary": request}


async def a_text(request: dict[str, Any]) -> str:
    return str(request)


def summarizers(backend: Backend) -> None:
    backend.memory(KEY, summarizer=of_a_text)  # type: ignore[arg-type]
    backend.memory(KEY, summarizer=a_text)  # type: ignore[arg-type]
    backend.memory(KEY, summarizer="a model")  # type: ignore[arg-type]


def configurations(backend: Backend, blocking: sync.Backend) -> None:
    backend.memory(KEY, {"strategy": "truncation"})  # type: ignore[arg-type]
    backend.memory(KEY, MemoryBudget())  # type: ignore[arg-type]
    backend.memory(KEY, "truncation")  # type: ignore[arg-type]
    backend.conversation("acme", "u1", "chat", {"strategy": "truncation"})  # type: ignore[arg-type]
    backend.router({"strategy": "truncation"})  # type: ignore[arg-type]
    blocking.memory(KEY, {"strategy": "truncation"})  # type: ignore[arg-type]
    DefaultShortTermMemory(config={"strategy": "truncation"})  # type: ignore[arg-type]


def options() -> None:
    open_redis(pool_sise=3)  # type: ignore[call-arg]
    open_redis(pool_size="3")  # type: ignore[arg-type]
    open_redis(max_sumaries=3)  # type: ignore[call-arg]
    open_postgres(pool_sise=3)  # type: ignore[call-arg]
    open_postgres(synchronous_commit="never")  # type: ignore[arg-type]
    open_mongo(maxPoolsize=3)  # type: ignore[call-arg]
    open_mongo(durability="most")  # type: ignore[arg-type]
    open_dynamo(tabel="chats")  # type: ignore[call-arg]
    open_sqlite(synchronous="off")  # type: ignore[arg-type]
    open_sqlite(pool_size=3)  # type: ignore[call-arg]
    open_memory(path="chats.db")  # type: ignore[call-arg]
