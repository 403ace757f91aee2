"""The entry point that finds the backend `mongo` by name and URL."""

from __future__ import annotations

import json
from typing import Any

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends_mongo import statements
from stm_backends_mongo.settings import MongoSettings


def open_driver(url: str | None, *, create: bool = False, client: Any = None, **options: Any) -> Driver:
    """Return a driver on the servers of a URL, or on a client of PyMongo or Motor, which is never closed.

    `options` are the fields of `MongoSettings` and MongoDB's own connection options; with a client, those
    that do not configure a connection. `create=True` sets the collection up if it is missing.
    """
    settings = MongoSettings.from_url(url, client=client, **options)
    from stm_backends_mongo.driver import MongoDriver  # noqa: PLC0415 -- it imports the client library

    return MongoDriver(settings, client=client, create=create)


def schema(url: str | None, **options: Any) -> str:
    """Return the commands that `create=True` sends, as text for mongosh. Takes `open_driver`'s arguments."""
    settings = MongoSettings.from_url(url, **options)
    database = json.dumps(settings.database)
    commands = (json.dumps(command, indent=2) for command in statements.setup(settings.collection))
    return "\n".join(f"db.getSiblingDB({database}).runCommand({command});" for command in commands)


@hookimpl
def stm_backend() -> BackendPlugin:
    """Return the plugin for the backend `mongo`."""
    return BackendPlugin(
        name="mongo",
        url_schemes=MongoSettings.url_schemes,
        requires=("pymongo", "bson"),
        open=open_driver,
        schema=schema,
        contract=CONTRACT,
    )
