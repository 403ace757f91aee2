"""How the backend `redis` is found by name and URL."""

from __future__ import annotations

from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.errors import ConfigurationError
from stm_backends_redis.settings import URL_SCHEMES, RedisSettings

SETUP = "Redis needs no setting up: keys come into being when they are written."


def open_driver(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> Driver:
    """Return a driver on the servers that a URL names, or on a client of `redis.asyncio`, never closed by us.

    `options` are the fields of `RedisSettings`; beside a client, those that are not the client's own.
    """
    del create  # there is nothing to create
    settings = _settings(url, has_client=client is not None, **options)
    from stm_backends_redis.driver import RedisDriver  # noqa: PLC0415 -- it imports the client library

    return RedisDriver(settings, client=client)


def schema(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> str:
    """Return what there is to set up: nothing."""
    del create
    _settings(url, has_client=client is not None, **options)
    return SETUP


def _settings(url: str | None, *, has_client: bool, **options: Any) -> RedisSettings:
    if has_client and url:
        raise ConfigurationError("give a client or a URL: a client is connected to its own server")
    if has_client:
        return RedisSettings.beside_client(**options)
    return RedisSettings.from_url(url, **options) if url else RedisSettings.from_options(**options)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `redis`."""
    return BackendPlugin(
        name="redis", url_schemes=URL_SCHEMES, requires=("redis",), open=open_driver, schema=schema
    )
