"""Describes the backend `nats`; imports no client library."""

from typing import Any

from stm_backends.drivers import BackendPlugin, Driver, hookimpl
from stm_backends_nats.settings import NatsSettings


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver, not yet open, for the server and the stream in the URL or the options."""
    from stm_backends_nats.driver import NatsDriver

    settings = NatsSettings.from_url(url, **options)
    return NatsDriver(settings, create=create, client=options.get("client"))


def schema(url: str | None, **options: Any) -> str:
    """Return the configuration of the stream that `create=True` makes, as JSON."""
    import json

    from stm_backends_nats.stream import configuration

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
