"""The entry point that finds the backend `redis` by name and URL."""

from __future__ import annotations

from typing import Any

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends_redis.settings import RedisSettings

SETUP = "Redis needs no setup: keys are created when they are written."


def open_driver(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> Driver:
    """Return a driver on the servers of a URL, or on a client of `redis.asyncio`, which is not closed.

    `options` are the fields of `RedisSettings`; with a client, those that do not configure a connection.
    """
    del create  # Redis has nothing to create
    settings = RedisSettings.from_url(url, client=client, **options)
    from stm_backends_redis.driver import RedisDriver  # noqa: PLC0415 -- it imports the client library

    return RedisDriver(settings, client=client)


def schema(url: str | None, **options: Any) -> str:
    """Return a sentence saying that Redis needs no setup. Takes the arguments of `open_driver`."""
    RedisSettings.from_url(url, **options)
    return SETUP


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the plugin for the backend `redis`."""
    return BackendPlugin(
        name="redis",
        url_schemes=RedisSettings.url_schemes,
        requires=("redis",),
        open=open_driver,
        schema=schema,
        contract=CONTRACT,
    )
