"""The backends of this library, found by name or URL without reading what else is installed.

The table repeats the entry points and the URL schemes of the shipped plugins, so that opening one of them
imports its module alone. Reading the entry points of an environment takes longer than opening a backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_DISTRIBUTION: Final = "stm-backends"


@dataclass(frozen=True)
class Shipped:
    """A backend of this library. Has what `plugins` reads of an entry point, and the backend's schemes."""

    name: str
    value: str
    schemes: tuple[str, ...]

    @property
    def dist(self) -> Distribution | None:
        """This library as it is installed; `None` if it is used without being installed."""
        from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 -- slow

        try:
            return distribution(_DISTRIBUTION)
        except PackageNotFoundError:
            return None

    def load(self) -> Any:
        """Import the backend's plugin module."""
        return importlib.import_module(self.value)


_BACKENDS: Final = (
    Shipped("memory", "stm_backends.drivers.in_memory", ("memory",)),
    Shipped("sqlite", "stm_backends.drivers.sqlite.plugin", ("sqlite",)),
    Shipped(
        "redis",
        "stm_backends_redis.plugin",
        ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"),
    ),
    Shipped("dynamo", "stm_backends_dynamo.plugin", ("dynamodb",)),
    Shipped("mongo", "stm_backends_mongo.plugin", ("mongodb", "mongodb+srv")),
    Shipped("postgres", "stm_backends_postgres.plugin", ("postgresql", "postgres")),
)

SHIPPED: Final[Mapping[str, Shipped]] = {one.name: one for one in _BACKENDS}
"""The shipped backends by name. No other package can take one of these names."""

BY_SCHEME: Final[Mapping[str, Shipped]] = {scheme: one for one in _BACKENDS for scheme in one.schemes}
"""The shipped backends by URL scheme. No other package can take one of these schemes."""
