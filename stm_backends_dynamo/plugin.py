"""How the backend `dynamo` is found by name and URL."""

from __future__ import annotations

import time
from typing import Any, Final

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.errors import ConfigurationError
from stm_backends_dynamo.settings import DynamoSettings
from stm_backends_dynamo.statements import commands

_OF_A_CLIENT: Final = frozenset(
    {
        "region",
        "endpoint_url",
        "profile",
        "access_key_id",
        "secret_access_key",
        "session_token",
        "pool_size",
    }
)
"""Settings that say how a client is made, and nothing to one that is there."""


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver on the table that a URL, or the option `table`, names.

    `options` are the fields of `DynamoSettings`; `client`, one of boto3 or aiobotocore that is the
    caller's own; and `clock`. `create=True` creates the table and its time to live if they are missing.
    """
    # Imports the client library, which this module must not do at its top.
    from stm_backends_dynamo.driver import DynamoDriver  # noqa: PLC0415

    client, clock = options.pop("client", None), options.pop("clock", time.time)
    settings = DynamoSettings.from_url(url, **options) if url else DynamoSettings.from_options(**options)
    if client is not None:
        for name in sorted(_OF_A_CLIENT):
            if getattr(settings, name) != getattr(DynamoSettings, name):
                raise ConfigurationError(f"the client given has a {name} of its own; leave that setting out")
    return DynamoDriver(settings, client=client, create=create, clock=clock)


def schema(url: str | None, *, create: bool = False, **options: Any) -> str:
    """Return the commands that set up what `create=True` would; with `open_driver`'s arguments."""
    del create
    own = {name: value for name, value in options.items() if name not in ("client", "clock")}
    return commands(DynamoSettings.from_url(url, **own) if url else DynamoSettings.from_options(**own))


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `dynamo`."""
    return BackendPlugin(
        name="dynamo",
        url_schemes=("dynamodb",),
        requires=("aiobotocore",),
        open=open_driver,
        schema=schema,
    )
