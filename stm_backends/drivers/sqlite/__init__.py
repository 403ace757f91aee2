"""The SQLite driver: conversations of one host in one file, without a server."""

from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.plugin import open_driver
from stm_backends.drivers.sqlite.settings import SqliteSettings

__all__ = ["SqliteDriver", "SqliteSettings", "open_driver"]
