"""The plugin of the backend `sqlite`, for its name and URLs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.sqlite import statements
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings


def open_driver(
    url: str | None, *, create: bool = False, clock: Callable[[], float] = time.time, **options: Any
) -> Driver:
    """Return a driver on the file that a URL, or the option `path`, names.

    `options` are the fields of `SqliteSettings`.
    """
    del create  # the tables are created when they are missing
    return SqliteDriver(SqliteSettings.from_url(url, **options), clock=clock)


def schema(url: str | None, **options: Any) -> str:
    """Return the SQL that sets up a new file, the same for every file."""
    if url or options:
        open_driver(url, **options)  # opens nothing, and raises what opening would raise
    return statements.script()


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `sqlite`."""
    return BackendPlugin(
        name="sqlite",
        url_schemes=SqliteSettings.url_schemes,
        open=open_driver,
        schema=schema,
        contract=CONTRACT,
    )
