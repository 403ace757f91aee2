"""Describes the backend `nats`; imports no client library."""

from __future__ import annotations

import json
from typing import Any

from stm_backends.drivers import BackendPlugin, Driver, hookimpl
from tests.strangers.nats_backend.settings import NatsSettings


def open_driver(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> Driver:
    """Return a driver, not yet open, for the server and the stream in the URL or the options."""
    from tests.strangers.nats_backend.driver import NatsDriver  # noqa: PLC0415 -- it imports the client

    return NatsDriver(NatsSettings.from_url(url, client=client, **options), create=create, client=client)


def schema(url: str | None, **options: Any) -> str:
    """Return the configuration of the stream that `create=True` makes, as JSON."""
    from tests.strangers.nats_backend.stream import configuration  # noqa: PLC0415 -- as above

    return json.dumps(configuration(NatsSettings.from_url(url, **options)), indent=2)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the description of the backend `nats`."""
    return BackendPlugin(
        name="nats",
        url_schemes=NatsSettings.url_schemes,
        requires=("nats",),
        open=open_driver,
        schema=schema,
        contract=1,
    )
