"""The MongoDB driver: one document for each record, and one document touched by each operation.

Importing this package imports no client library; its names are loaded on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stm_backends_mongo.driver import MongoDriver
    from stm_backends_mongo.memory import MongoShortTermMemory, MongoStateStore
    from stm_backends_mongo.opening import MongoOptions, open_mongo
    from stm_backends_mongo.plugin import open_driver
    from stm_backends_mongo.settings import MongoSettings

__all__ = [
    "MongoDriver",
    "MongoOptions",
    "MongoSettings",
    "MongoShortTermMemory",
    "MongoStateStore",
    "open_driver",
    "open_mongo",
]

_HOMES: Final = {
    "MongoDriver": "driver",
    "MongoOptions": "opening",
    "MongoSettings": "settings",
    "MongoShortTermMemory": "memory",
    "MongoStateStore": "memory",
    "open_driver": "plugin",
    "open_mongo": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
