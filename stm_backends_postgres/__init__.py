"""The PostgreSQL driver: each operation is one statement on the tables of one schema.

Importing this package imports no client library; its names are loaded on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stm_backends_postgres.driver import PostgresDriver
    from stm_backends_postgres.memory import PostgresShortTermMemory, PostgresStateStore
    from stm_backends_postgres.opening import PostgresOptions, open_postgres
    from stm_backends_postgres.plugin import open_driver
    from stm_backends_postgres.settings import PostgresSettings

__all__ = [
    "PostgresDriver",
    "PostgresOptions",
    "PostgresSettings",
    "PostgresShortTermMemory",
    "PostgresStateStore",
    "open_driver",
    "open_postgres",
]

_HOMES: Final = {
    "PostgresDriver": "driver",
    "PostgresOptions": "opening",
    "PostgresSettings": "settings",
    "PostgresShortTermMemory": "memory",
    "PostgresStateStore": "memory",
    "open_driver": "plugin",
    "open_postgres": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
