"""Completion of tenants, users and conversations in a shell, from the datastore of the command.

It never prints anything and never takes longer than `PATIENCE_S`: without an answer, nothing is completed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

import typer

from stm_backends.backend import Backend
from stm_backends.cli import datastores, transfer
from stm_backends.cli.options import URL_VARIABLE
from stm_backends.errors import InvalidKey
from stm_backends.types import MemoryKey

_SAFE: Final = re.compile(r"[\w@%+=:,./][\w@%+=:,./-]*")
"""The keys that are offered. Shells evaluate completions, so an id must not have characters that a shell
interprets: zsh runs the command in `x\\$(command)`."""

PATIENCE_S: Final = 2.0
MOST: Final = 100
"""Maximum number of completions offered."""


def owners(context: typer.Context, incomplete: str) -> list[str]:
    """Return tenants or, once there is a colon, the users of the tenant."""
    return _completed(context, incomplete, _users if ":" in incomplete else _tenants)


def conversations(context: typer.Context, incomplete: str) -> list[str]:
    """Return tenants, users of the tenant, or conversations of the user."""
    listings = (_tenants, _users, _conversations)
    return _completed(context, incomplete, listings[min(incomplete.count(":"), 2)])


def _completed(
    context: typer.Context, incomplete: str, listing: Callable[[Backend, str], AsyncIterator[str]]
) -> list[str]:
    found: list[str] = []

    async def work() -> None:
        url = context.params.get("url") or os.environ.get(URL_VARIABLE)
        async with (
            asyncio.timeout(PATIENCE_S),
            datastores.chosen(context.params.get("backend"), url) as opened,
        ):
            async for key in listing(opened, incomplete):
                if key.startswith(incomplete) and _SAFE.fullmatch(key):
                    found.append(key)
                    if len(found) == MOST:
                        return

    logging.disable()
    try:
        asyncio.run(work())
    except Exception:  # noqa: BLE001, S110 -- a shell would print it amid the command that is typed
        pass
    finally:
        logging.disable(logging.NOTSET)
    return found


async def _tenants(backend: Backend, incomplete: str) -> AsyncIterator[str]:
    del incomplete
    async for tenant in backend.sessions.tenants():
        yield transfer.tenant_composite(tenant)


async def _users(backend: Backend, incomplete: str) -> AsyncIterator[str]:
    tenant, _ = transfer.owner(incomplete.partition(":")[0])
    async for user in backend.sessions.users(tenant):
        yield transfer.user_composite(tenant, user)


async def _conversations(backend: Backend, incomplete: str) -> AsyncIterator[str]:
    tenant, user = transfer.owner(incomplete.rpartition(":")[0])
    async for key in backend.sessions.list(tenant, user or ""):
        try:
            yield transfer.escaped(MemoryKey(key.tenant_id, key.user_id, key.session_id).composite())
        except InvalidKey:
            continue
