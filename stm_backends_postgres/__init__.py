"""Conversation memory in PostgreSQL, by asyncpg; importing this imports no client library."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stm_backends_postgres.plugin import open_driver
from stm_backends_postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from stm_backends_postgres.driver import PostgresDriver
    from stm_backends_postgres.memory import PostgresShortTermMemory, PostgresStateStore

__all__ = [
    "PostgresDriver",
    "PostgresSettings",
    "PostgresShortTermMemory",
    "PostgresStateStore",
    "open_driver",
]

_MODULES = {
    "PostgresDriver": "driver",
    "PostgresShortTermMemory": "memory",
    "PostgresStateStore": "memory",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
