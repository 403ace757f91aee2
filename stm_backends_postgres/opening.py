"""`open_postgres`: the backend with typed options, for editors and type checkers."""

from __future__ import annotations

import ssl as tls
from typing import Any, Unpack

from stm_backends.backend import Backend, open_backend
from stm_backends.opening import BackendOptions
from stm_backends_postgres.settings import Password, SynchronousCommit
from stm_backends_postgres.statements import RowSecurity


class PostgresOptions(BackendOptions, total=False):
    """The options of `open_postgres`: those of every backend, and the settings in `PostgresSettings`."""

    client: Any
    deadline_s: float
    max_entry_bytes: int
    dsn: str
    password: Password | None
    ssl: tls.SSLContext | None
    pool_size: int
    connect_timeout_s: float | None
    schema: str
    synchronous_commit: SynchronousCommit | None
    pgbouncer: bool
    row_security: RowSecurity
    tenant: str | None
    max_record_bytes: int


def open_postgres(url: str | None = None, **options: Unpack[PostgresOptions]) -> Backend:
    """Return a backend on PostgreSQL, as `open_backend("postgres", url=url, ...)` does.

    `client` is an `asyncpg.Pool`, which stays open. With one, settings of a connection are refused.
    """
    return open_backend("postgres", url=url, **options)
