"""Describes the backend `mariadb`; imports no client library."""

from typing import Any

from stm_backends.drivers import BackendPlugin, Driver, hookimpl
from stm_backends_mariadb.settings import MariadbSettings
from stm_backends_mariadb.statements import SCHEMA


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return the driver of the database that a URL or the options name."""
    from stm_backends_mariadb.driver import MariadbDriver

    return MariadbDriver(MariadbSettings.from_url(url, **options), create=create)


def schema(url: str | None, **options: Any) -> str:
    """Return the SQL that `create=True` runs; it is the same for every database."""
    return "\n".join(f"{statement};" for statement in SCHEMA)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the description of the backend `mariadb`."""
    return BackendPlugin(
        name="mariadb",
        url_schemes=MariadbSettings.url_schemes,
        requires=("asyncmy",),
        open=open_driver,
        schema=schema,
        contract=1,
    )
