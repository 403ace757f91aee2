"""The SQLite driver: conversations of one host in one file, with nothing to install."""

from stm_backends.sqlite.driver import SqliteDriver
from stm_backends.sqlite.plugin import open_driver
from stm_backends.sqlite.settings import SqliteSettings

__all__ = ["SqliteDriver", "SqliteSettings", "open_driver"]
