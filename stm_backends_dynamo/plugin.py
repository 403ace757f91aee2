"""The entry point that finds the backend `dynamo` by name and URL."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends_dynamo.settings import DynamoSettings
from stm_backends_dynamo.statements import commands


def open_driver(
    url: str | None,
    *,
    create: bool = False,
    client: Any = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> Driver:
    """Return a driver on the table named by a URL or by the option `table`.

    `client` is from boto3 or aiobotocore, and is never closed. `options` are the fields of `DynamoSettings`;
    with a client, those that do not configure a connection. `create=True` creates the table and its time to
    live if they are missing.
    """
    settings = DynamoSettings.from_url(url, client=client, **options)
    from stm_backends_dynamo.driver import DynamoDriver  # noqa: PLC0415 -- it imports the client library

    return DynamoDriver(settings, client=client, create=create, clock=clock)


def schema(url: str | None, **options: Any) -> str:
    """Return commands that do the same setup as `create=True`. Takes the arguments of `open_driver`."""
    options.pop("clock", None)
    return commands(DynamoSettings.from_url(url, **options))


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the plugin for the backend `dynamo`."""
    return BackendPlugin(
        name="dynamo",
        url_schemes=DynamoSettings.url_schemes,
        requires=("aiobotocore", "botocore"),
        open=open_driver,
        schema=schema,
        contract=CONTRACT,
    )
