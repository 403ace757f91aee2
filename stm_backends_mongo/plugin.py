"""How the backend `mongo` is found by name and URL."""

from __future__ import annotations

import json
from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.errors import ConfigurationError
from stm_backends_mongo import statements
from stm_backends_mongo.settings import MongoSettings


def open_driver(url: str | None, *, create: bool = False, **options: Any) -> Driver:
    """Return a driver on the servers that a URL names, or on a client of the caller's.

    `options` are the fields of `MongoSettings` and MongoDB's own connection options; or `client`, and those
    fields that do not say how to connect.
    """
    from stm_backends_mongo.driver import MongoDriver  # noqa: PLC0415 -- brings the client library

    settings, client = _settings(url, options)
    return MongoDriver(settings, client=client, create=create)


def schema(url: str | None, *, create: bool = False, **options: Any) -> str:
    """Return what `create=True` sends, as text for mongosh."""
    del create  # this is the text of it
    settings, _ = _settings(url, options)
    database = json.dumps(settings.database)
    commands = (json.dumps(command, indent=2) for command in statements.setup(settings.collection))
    return "\n".join(f"db.getSiblingDB({database}).runCommand({command});" for command in commands)


def _settings(url: str | None, options: dict[str, Any]) -> tuple[MongoSettings, Any]:
    """Return the settings and the client handed in, if there is one."""
    client = options.pop("client", None)
    settings = MongoSettings.from_url(url, **options) if url else MongoSettings.from_options(**options)
    if client is not None and (url or settings.client_options):
        raise ConfigurationError(
            "a client handed in is connected already; beside client=... leave out the URL and the options of "
            "the connection, and name the database by database=..."
        )
    return settings, client


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `mongo`."""
    return BackendPlugin(
        name="mongo",
        url_schemes=("mongodb", "mongodb+srv"),
        requires=("pymongo", "bson"),
        open=open_driver,
        schema=schema,
    )
