"""How the backend `postgres` is found by name and URL; imports no client library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.errors import ConfigurationError
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import setup

if TYPE_CHECKING:
    from stm_backends_postgres.driver import PostgresDriver

_OF_OUR_POOL = ("dsn", "password", "ssl", "pool_size", "synchronous_commit", "pgbouncer", "tenant")


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> PostgresDriver:
    """Return a driver on the server that a URL names, or on a pool of the caller's, `client`.

    `options` are the fields of `PostgresSettings`. Without a URL and a client, the environment says where
    the server is, as it does for libpq.
    """
    from stm_backends_postgres.driver import PostgresDriver  # noqa: PLC0415 -- it brings the client library

    client = options.pop("client", None)
    settings = _settings(url, client, options)
    return PostgresDriver(settings, client=client, create=create)


def schema(url: str | None = None, *, create: bool = True, **options: Any) -> str:
    """Return the SQL that sets up the tables: what `create=True` would do, as one transaction."""
    del create
    settings = _settings(url, options.pop("client", None), options)
    return f"BEGIN;\n{setup(settings.schema, settings.row_security)}COMMIT;\n"


def _settings(url: str | None, client: object | None, options: dict[str, Any]) -> PostgresSettings:
    if client is None:
        return PostgresSettings.from_url(url, **options) if url else PostgresSettings.from_options(**options)
    settings = PostgresSettings.from_options(**options)
    ours = [name for name in _OF_OUR_POOL if name in options]
    if url or ours:
        raise ConfigurationError(
            f"a client that is handed in is connected already; leave out {', '.join(ours) or 'the URL'}"
        )
    return settings


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `postgres`."""
    return BackendPlugin(
        name="postgres",
        url_schemes=("postgresql", "postgres"),
        requires=("asyncpg",),
        open=open_driver,
        schema=schema,
    )
