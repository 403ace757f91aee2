"""`open_redis`: the backend with typed options, for editors and type checkers."""

from __future__ import annotations

from typing import Any, Unpack

from stm_backends.backend import Backend, open_backend
from stm_backends.opening import BackendOptions
from stm_backends_redis.settings import Address, Mode


class RedisOptions(BackendOptions, total=False):
    """The options of `open_redis`: those of every backend, and the settings in `RedisSettings`."""

    client: Any
    deadline_s: float
    max_entry_bytes: int
    mode: Mode
    hosts: tuple[Address, ...]
    service: str
    db: int
    username: str
    password: str
    sentinel_username: str
    sentinel_password: str
    tls: bool
    tls_ca_file: str
    tls_cert_file: str
    tls_key_file: str
    tls_check_hostname: bool
    pool_size: int
    connect_timeout_s: float
    key_prefix: str
    wait_replicas: int
    wait_fsync: bool
    max_record_bytes: int


def open_redis(url: str | None = None, **options: Unpack[RedisOptions]) -> Backend:
    """Return a backend on Redis or Valkey, as `open_backend("redis", url=url, ...)` does.

    `client` is one of `redis.asyncio`, which stays open. With one, settings of a connection are refused.
    """
    return open_backend("redis", url=url, **options)
