"""Describes the backend `lmdb`; imports no client library."""

from typing import Any

from stm_backends.drivers import BackendPlugin, Driver, hookimpl
from stm_backends_lmdb.settings import LmdbSettings


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver, not yet open, for the folder in the URL or in the option `path`."""
    from stm_backends_lmdb.driver import LmdbDriver

    del create  # `open` creates the folder anyway
    return LmdbDriver(LmdbSettings.from_url(url, **options))


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the description of the backend `lmdb`."""
    return BackendPlugin(
        name="lmdb",
        url_schemes=LmdbSettings.url_schemes,
        requires=("lmdb",),
        open=open_driver,
        contract=1,
    )
