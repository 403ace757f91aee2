"""The entry point that finds the backend `postgres` by name and URL."""

from __future__ import annotations

from typing import Any

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import setup


def open_driver(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> Driver:
    """Return a driver on the server of a URL, or on an `asyncpg.Pool`, which is never closed.

    `options` are the fields of `PostgresSettings`; with a client, those that do not configure a connection.
    Without a URL and a client, the environment determines the server, as for libpq. `create=True` sets the
    tables up, or brings them up to date.
    """
    settings = PostgresSettings.from_url(url, client=client, **options)
    from stm_backends_postgres.driver import PostgresDriver  # noqa: PLC0415 -- it imports the client library

    return PostgresDriver(settings, client=client, create=create)


def schema(url: str | None, **options: Any) -> str:
    """Return the SQL that `create=True` runs, as one transaction. Takes the arguments of `open_driver`."""
    settings = PostgresSettings.from_url(url, **options)
    return f"BEGIN;\n{setup(settings.schema, settings.row_security)}COMMIT;\n"


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the plugin for the backend `postgres`."""
    return BackendPlugin(
        name="postgres",
        url_schemes=PostgresSettings.url_schemes,
        requires=("asyncpg",),
        open=open_driver,
        schema=schema,
        contract=CONTRACT,
    )
