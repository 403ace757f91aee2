"""The DynamoDB driver: conversations in one table.

Importing this package imports no client library; its names are loaded on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stm_backends_dynamo.driver import DynamoDriver
    from stm_backends_dynamo.memory import DynamoShortTermMemory, DynamoStateStore
    from stm_backends_dynamo.opening import DynamoOptions, open_dynamo
    from stm_backends_dynamo.plugin import open_driver
    from stm_backends_dynamo.settings import DynamoSettings

__all__ = [
    "DynamoDriver",
    "DynamoOptions",
    "DynamoSettings",
    "DynamoShortTermMemory",
    "DynamoStateStore",
    "open_driver",
    "open_dynamo",
]

_HOMES: Final = {
    "DynamoDriver": "driver",
    "DynamoOptions": "opening",
    "DynamoSettings": "settings",
    "DynamoShortTermMemory": "memory",
    "DynamoStateStore": "memory",
    "open_driver": "plugin",
    "open_dynamo": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
