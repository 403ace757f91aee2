"""Describes the backend `etcd`; imports no client library."""

from __future__ import annotations

from typing import Any

from stm_backends.drivers import BackendPlugin, Driver, hookimpl
from tests.strangers.etcd_backend.settings import EtcdSettings


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver, not yet open, for the server in the URL or in the options."""
    from tests.strangers.etcd_backend.driver import EtcdDriver  # noqa: PLC0415 -- it imports the client

    del create  # etcd has nothing to set up
    return EtcdDriver(EtcdSettings.from_url(url, **options))


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the description of the backend `etcd`."""
    return BackendPlugin(
        name="etcd",
        url_schemes=EtcdSettings.url_schemes,
        requires=("httpx",),
        open=open_driver,
        contract=1,
    )
