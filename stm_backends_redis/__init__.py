"""The Redis driver: conversations shared by many machines in Redis or Valkey, on one server or a cluster.

Importing this package imports no client library; its names are loaded on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stm_backends_redis.driver import RedisDriver
    from stm_backends_redis.memory import RedisShortTermMemory, RedisStateStore
    from stm_backends_redis.opening import RedisOptions, open_redis
    from stm_backends_redis.plugin import open_driver
    from stm_backends_redis.settings import RedisSettings

__all__ = [
    "RedisDriver",
    "RedisOptions",
    "RedisSettings",
    "RedisShortTermMemory",
    "RedisStateStore",
    "open_driver",
    "open_redis",
]

_HOMES: Final = {
    "RedisDriver": "driver",
    "RedisOptions": "opening",
    "RedisSettings": "settings",
    "RedisShortTermMemory": "memory",
    "RedisStateStore": "memory",
    "open_driver": "plugin",
    "open_redis": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
