"""The Redis driver: conversations of many machines in Redis or Valkey, one server or a cluster.

Importing this package imports no client library; using its drivers does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from stm_backends_redis.plugin import open_driver
from stm_backends_redis.settings import RedisSettings

if TYPE_CHECKING:
    from stm_backends_redis.driver import RedisDriver
    from stm_backends_redis.memory import RedisShortTermMemory, RedisStateStore

__all__ = ["RedisDriver", "RedisSettings", "RedisShortTermMemory", "RedisStateStore", "open_driver"]

_LATE: Final = {
    "RedisDriver": "driver",
    "RedisShortTermMemory": "memory",
    "RedisStateStore": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
