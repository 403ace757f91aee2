"""Refuse to write, or to erase, where the data is sealed and the command has no keys, or the reverse."""

from __future__ import annotations

from typing import Final

from stm_backends.backend import Backend
from stm_backends.errors import ConfigurationError
from stm_backends.sealing.naming import KEYS_VARIABLE

_GIVE_KEYS: Final = f"--sealing MODULE:OBJECT or {KEYS_VARIABLE}"


async def require_same_seal(backend: Backend, tenant: str, user: str) -> None:
    """Raise `ConfigurationError` if a command would write clear text next to sealed data, or the reverse.

    Examines the data of the user and, because the user may be new, of the first user of the tenant.
    """
    for whose in (user, None):
        match await backend.sessions.other_seal(tenant, whose):
            case "sealed":
                raise ConfigurationError(
                    "the data of this tenant is sealed, and no keys were given; nothing was written; give "
                    f"{_GIVE_KEYS}"
                )
            case "clear":
                raise ConfigurationError(
                    "the data of this tenant is in clear text; nothing was written; leave out the keys, or "
                    "give --sealing with a Sealing(keys, accept_clear=True), and reseal the tenant"
                )
            case None:
                pass


async def lacks_keys(backend: Backend, tenant: str, user: str | None) -> bool:
    """Say whether the data of a tenant or user is sealed, and the command has no keys."""
    return await backend.sessions.other_seal(tenant, user) == "sealed"


async def require_keys(backend: Backend, tenant: str, user: str | None) -> None:
    """Raise `ConfigurationError` if the data of a tenant or user is sealed, and the command has no keys."""
    if await lacks_keys(backend, tenant, user):
        raise ConfigurationError(
            f"the data is sealed, and no keys were given; nothing was erased; give {_GIVE_KEYS}, so that "
            "data keys are erased too, or --keep-keys to erase the records only"
        )
