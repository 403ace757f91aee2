"""The settings of the backend `nats`; imports no client library."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote

from stm_backends import ConfigurationError
from stm_backends.drivers import Settings, setting

MIB = 1024 * 1024

OVERHEAD = 8
"""Bytes that each value takes in the head of a message: up to seven digits of its size, and a comma."""

HEAD = 1024
"""Bytes that a message may have beside its values: the head of the record, and the headers of NATS."""


@dataclass(frozen=True, kw_only=True)
class NatsSettings(Settings):
    """Where the server is, and the stream; `deadline_s` is inherited.

    `pool_size` limits the operations that are under way at once; they share one connection. A record is one
    message, so `max_record_bytes` and `HEAD` together are at most the `max_payload` of the server, which is
    1 MiB unless it is configured.
    """

    backend: ClassVar = "nats"
    url_schemes: ClassVar = ("nats",)
    largest_entry: ClassVar = 8 * MIB

    hosts: str = setting("localhost:4222", query=False, connection=True)
    user: str | None = setting(None, query=False, connection=True)
    password: str | None = setting(None, query=False, connection=True, secret=True)
    token: str | None = setting(None, query=False, connection=True, secret=True)
    tls: ssl.SSLContext | None = setting(None, query=False, connection=True)  # noqa: RUF009 -- returns a field
    stream: str = setting("STM", query=False)
    replicas: int = 1
    pool_size: int = 256
    max_entry_bytes: int = 256 * 1024
    max_record_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.stream):
            raise ConfigurationError("the name of the stream has 1 to 64 letters, digits, '-' and '_'")
        if not 1 <= self.replicas <= 5:
            raise ConfigurationError("replicas must be between 1 and 5")
        if not 1 <= self.pool_size <= 10_000:
            raise ConfigurationError("pool_size must be between 1 and 10,000")
        if not self.max_entry_bytes + OVERHEAD <= self.max_record_bytes <= 8 * MIB:
            raise ConfigurationError(
                f"max_record_bytes must be at most {8 * MIB:,}, and at least max_entry_bytes and {OVERHEAD}"
            )

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        login, _, hosts = parts.netloc.rpartition("@")
        user, colon, password = login.partition(":")
        stream = unquote(parts.path.strip("/"))
        given = {
            "hosts": hosts,
            "user": unquote(user),
            "password": unquote(password) if colon else "",
            "stream": stream,
        }
        return {name: value for name, value in given.items() if value}

    @property
    def servers(self) -> list[str]:
        """The addresses as the client takes them."""
        return [f"nats://{host}" for host in self.hosts.split(",")]
