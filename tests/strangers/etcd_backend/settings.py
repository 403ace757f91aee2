"""The settings of the backend `etcd`; imports no client library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import SplitResult

from stm_backends import ConfigurationError
from stm_backends.drivers import Settings, setting
from stm_backends.drivers.checks import require_count

MIB = 1024 * 1024

LONGEST_PREFIX = 100


@dataclass(frozen=True, kw_only=True)
class EtcdSettings(Settings):
    """Where a server is, how many connections to open, and what stands before each key.

    A commit holds the largest record that is permitted, so a record has at most two thirds of the 1.5 MiB
    that a server admits as one request.
    """

    backend: ClassVar = "etcd"
    url_schemes: ClassVar = ("etcd",)
    largest_entry: ClassVar = MIB

    host: str = setting("localhost", query=False)
    port: int = setting(2379, query=False)
    prefix: str = "stm"
    pool_size: int = 20
    max_entry_bytes: int = MIB // 4
    max_record_bytes: int = MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("pool_size", self.pool_size)
        require_count("max_record_bytes", self.max_record_bytes, most=MIB)
        if "\0" in self.prefix or not 0 < len(self.prefix.encode()) <= LONGEST_PREFIX:
            raise ConfigurationError(
                f"prefix must be text of 1 to {LONGEST_PREFIX} bytes of UTF-8 and without NUL"
            )

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        if parts.username is not None or parts.password is not None:
            raise ConfigurationError("this driver knows no users: etcd://host:2379")
        if parts.path.strip("/"):
            raise ConfigurationError("an etcd URL has no path: etcd://host:2379?prefix=stm")
        try:
            given = {"host": parts.hostname, "port": parts.port}
        except ValueError:
            raise ConfigurationError("the port in the URL is not a number between 1 and 65535") from None
        return {name: value for name, value in given.items() if value}
