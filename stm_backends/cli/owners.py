"""The tenants and users that a command is about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from stm_backends.admin.stats import Damaged
from stm_backends.backend import Backend
from stm_backends.cli import transfer
from stm_backends.cli.render import plain
from stm_backends.types import MemoryKey


class Owner(NamedTuple):
    """A user or, without a user, a tenant; without either, all tenants."""

    tenant: str | None = None
    user: str | None = None

    @staticmethod
    def of(text: str | None) -> Owner:
        """Return the owner that `TENANT`, `TENANT:USER` or no text names."""
        return Owner() if text is None else Owner(*transfer.owner(text))

    def __str__(self) -> str:
        """Return the owner in the form that commands accept."""
        if self.tenant is None:
            return "all tenants"
        if self.user is None:
            return transfer.tenant_composite(self.tenant)
        return transfer.user_composite(self.tenant, self.user)


async def tenants_of(backend: Backend, owner: Owner) -> AsyncIterator[str]:
    """Yield the tenant, or all tenants that the datastore has."""
    if owner.tenant is not None:
        yield owner.tenant
        return
    async for tenant in backend.sessions.tenants():
        yield tenant


async def users_of(backend: Backend, owner: Owner) -> AsyncIterator[tuple[str, str]]:
    """Yield the tenant and user of all users that the owner comprises."""
    async for tenant in tenants_of(backend, owner):
        if owner.user is not None:
            yield tenant, owner.user
            return
        async for user in backend.sessions.users(tenant):
            yield tenant, user


def damaged_as(found: Damaged) -> str:
    """Return the name of an unreadable record for messages."""
    match found.kind:
        case "memory":
            return transfer.named(MemoryKey(found.tenant, found.user, found.name))
        case "blob":
            return f"the state saved under {plain(found.name)!r}"
        case "graph":
            return f"a record of the graph of {Owner(found.tenant, found.user)}"
        case "page":
            return f"a page of a transcript of {Owner(found.tenant, found.user)}"
        case "card":
            return f"a card in the catalogue of {Owner(found.tenant, found.user)}"
        case _:
            return f"the {found.kind} log {plain(found.name)!r} of {Owner(found.tenant, found.user)}"
