"""The long-term memory of a user in an export: one vertex of its graph per line, after the conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO, cast

from stm_backends.admin.importing import OnConflict
from stm_backends.backend import Backend
from stm_backends.cli.outcome import fail
from stm_backends.errors import Corrupt, InvalidState, StmError
from stm_backends.tiers import exports
from stm_backends.tiers.backend_graph import BackendGraph

NOUN: Final[tuple[str, str]] = ("graph vertex", "graph vertices")


def counted(count: int) -> str:
    """Return a count with its noun."""
    return f"{count:,} {NOUN[count != 1]}"


class Unread:
    """Counts the vertices that could not be exported; the same error of several is printed once."""

    def __init__(self, what: str, told: set[str]) -> None:
        self.count = 0
        self._what = what
        self._told = told

    def failed(self, error: StmError) -> None:
        """Count a vertex. No line names it, so a second one of the same text would say nothing."""
        self.count += 1
        if str(error) not in self._told:
            self._told.add(str(error))
            fail(error, what=self._what, told=self._told)


async def write(
    backend: Backend,
    owner: tuple[str, str],
    out: TextIO,
    *,
    failed: Callable[[Corrupt], None],
    on_written: Callable[[], None],
) -> None:
    """Write the vertices of a user's graph; `on_written` is called after each of them.

    `failed` is called for each one that cannot be read.
    """
    async for document in BackendGraph(backend, owner).export(failed=failed):
        # ASCII, so that lone surrogates survive any encoding of the file.
        out.write(f"{json.dumps(document, separators=(',', ':'))}\n")
        on_written()


def is_vertex(document: Mapping[str, Any]) -> bool:
    """Say whether a line is a vertex; any other line must be a conversation."""
    return document.get("format") == exports.FORMAT


def owner_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tenant and the user of a vertex. Raises `InvalidState` if they are not named."""
    key = document.get("key")
    parts = cast("dict[str, object]", key) if isinstance(key, dict) else {}
    tenant, user = parts.get("tenant_id"), parts.get("user_id")
    if not isinstance(tenant, str) or not isinstance(user, str):
        raise InvalidState("key does not name a tenant and a user")
    return tenant, user


def id_of(document: Mapping[str, Any]) -> str:
    """Return the id of a vertex."""
    return exports.parse(document).id


async def exists(backend: Backend, document: Mapping[str, Any]) -> bool:
    """Say whether the graph of the user has a vertex with this id."""
    return await BackendGraph(backend, owner_of(document)).query_vertex(id_of(document)) is not None


async def import_(backend: Backend, document: Mapping[str, Any], on_conflict: OnConflict) -> bool:
    """Import a vertex into the graph of its user; returns whether that changed anything."""
    return await BackendGraph(backend, owner_of(document)).import_(document, on_conflict=on_conflict)
