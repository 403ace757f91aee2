"""Checks before the first operation of the server, the role, the tables and their layout."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from stm_backends.drivers.layouts import Layout, is_outdated, require_usable
from stm_backends.errors import ConfigurationError, Denied, Unavailable
from stm_backends_postgres.client import Connection, Row
from stm_backends_postgres.errors import MISSING
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import COLUMNS, LOOK, OLDEST, OURS, SAMPLES, Statements, setup

logger = logging.getLogger("stm_backends")

T = TypeVar("T")

_ISOLATION: Final = ("read committed", "read uncommitted")
"""Isolation levels at which a statement sees the rows it waited for; PostgreSQL treats the two alike."""


class Send(Protocol):
    """Calls a function with a connection."""

    async def __call__(self, use: Callable[[Connection], Awaitable[T]], /) -> T: ...


async def make_ready(send: Send, settings: PostgresSettings, statements: Statements, *, create: bool) -> bool:
    """Check that the server, the role and the tables can be used; `create` sets tables up, or migrates them.

    Returns whether records have the column `due`. Raises `Unavailable` if the tables do not exist or the
    server is a standby, and `ConfigurationError` for anything that must be changed first.
    """
    found, layout = await _look(send, statements)
    if create and (layout is None or is_outdated(layout, OURS)):
        script = setup(settings.schema, settings.row_security)
        try:
            await send(lambda connection: connection.execute(script))
        except (Denied, Unavailable) as error:
            if layout is None or layout.version < OLDEST:
                raise _with_hint(error, settings.schema) from error.__cause__
            logger.warning(
                "postgres: the tables stay at layout %d, which this version supports; run the output of "
                "`stm-backends schema` as their owner (%s)",
                layout.version,
                error,
            )
        found, layout = await _look(send, statements)
    if layout is None:
        raise Unavailable(MISSING)
    is_outdated(layout, OURS)
    require_usable(layout, OURS, oldest=OLDEST)
    _require_security(found, settings)
    return "due" in found["columns"].split()


def _with_hint(error: Denied | Unavailable, schema: str) -> Denied | Unavailable:
    """Return a setup's error, with a hint on how to let the role create tables if that was denied."""
    if not isinstance(error, Denied):
        return error
    return Denied(
        f"the role may not set tables up in the schema {schema}; since PostgreSQL 15, only the owner of a "
        "database may in public; name another schema (schema=...), GRANT CREATE on this one, or let its "
        "owner run what `stm-backends schema --url URL` prints"
    )


async def _look(send: Send, statements: Statements) -> tuple[Row, Layout | None]:
    """Return the state of the database, and the layout of the tables if they exist."""
    names = statements.record, statements.layout, statements.entry
    (found,) = await send(lambda connection: connection.fetch(LOOK, *names))
    _require_codecs(found)
    _require_server(found)
    if not found["there"]:
        return found, None
    if not set(found["columns"].split()) >= COLUMNS:
        raise ConfigurationError("the table stm_record was not set up by this library; it was not changed")
    numbers = await send(lambda connection: connection.fetch(statements.numbers)) if found["numbered"] else []
    # Layout 1 did not have this table.
    return found, Layout(*numbers[0]) if numbers else Layout(1, 1)


def _require_codecs(found: Row) -> None:
    """Raise `ConfigurationError` if a passed-in pool has custom codecs."""
    for kind, value in SAMPLES.items():
        if found[kind] != value or type(found[kind]) is not type(value):
            raise ConfigurationError(
                f"the connections of this pool have a custom codec for {kind} (set_type_codec); pass a pool "
                "without it"
            )


def _require_server(found: Row) -> None:
    if found["standby"]:
        raise Unavailable(
            "this server is a standby: it accepts no writes, and its data lags behind; name the primary, or "
            "several hosts with target_session_attrs=primary"
        )
    if found["encoding"] != "UTF8":
        raise ConfigurationError(
            f"the database must store text as UTF8, not {found['encoding']}: names would sort differently"
        )
    if found["isolation"] not in _ISOLATION:
        raise ConfigurationError(
            f"transactions are {found['isolation']} by default, so concurrent writers would fail instead of "
            "waiting; set default_transaction_isolation to 'read committed' for the pool (server_settings), "
            "or for the role (ALTER ROLE)"
        )


def _require_security(found: Row, settings: PostgresSettings) -> None:
    """Raise `ConfigurationError` if row security differs from the settings, or does not bind the role."""
    if found["entries_secured"] is not None and found["entries_secured"] != found["secured"]:
        raise ConfigurationError(
            "only one of the tables stm_record and stm_entry has row security, so the other one shows the "
            "data of all tenants; enable and force it on both, with the policies that `stm-backends schema` "
            "prints"
        )
    if found["secured"] and not found["active"]:
        raise ConfigurationError(
            "the tables have row security, but it does not bind this role (a superuser, or BYPASSRLS): the "
            "role would see the records of all tenants; connect as another role"
        )
    if settings.row_security != "off" and not found["secured"]:
        raise ConfigurationError(
            "the tables were set up without row security; it cannot be added to them, so name another "
            "schema, or leave out row_security"
        )
    if settings.row_security == "setting" and not found["tenant"]:
        raise ConfigurationError(
            "row_security='setting' needs a tenant: tenant=..., or on a passed-in pool "
            "server_settings={'stm.tenant': ...}"
        )
