"""What people ask of conversations while pods work on them; each answer says whether anything was there."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Final, Protocol

from stm_backends import Backend, SessionExists, SessionNotFound
from tests.chaos import turns


class Call(Protocol):
    """Does one thing to a conversation; `found` in what it returns says whether there was something."""

    def __call__(self, backend: Backend, conversation: str, /) -> Awaitable[dict[str, Any]]: ...


async def _export(backend: Backend, conversation: str) -> dict[str, Any]:
    try:
        await backend.sessions.export(turns.key_of(conversation))
    except SessionNotFound:
        return {"found": False}
    return {"found": True}


async def _merge(backend: Backend, conversation: str) -> dict[str, Any]:
    sessions = backend.sessions
    try:
        await sessions.import_(await sessions.export(turns.key_of(conversation)), on_conflict="merge")
    except SessionNotFound:
        return {"found": False}
    return {"found": True}


async def _copy(backend: Backend, conversation: str) -> dict[str, Any]:
    """Copy a conversation within its datastore, and erase the copy."""
    copied, found = turns.key_of(f"{conversation}-copy"), True
    try:
        await backend.sessions.copy(turns.key_of(conversation), backend.sessions, under=copied)
    except SessionNotFound:
        found = False
    except SessionExists:
        # A copy of before is left, of which the erasure did not come about.
        pass
    await backend.sessions.erase(copied)
    return {"found": found}


async def _purge(backend: Backend, conversation: str) -> dict[str, Any]:
    purged = await backend.sessions.purge(turns.TENANT)
    return {"found": True, "removed": purged.expired + purged.parts}


async def _stats(backend: Backend, conversation: str) -> dict[str, Any]:
    found = await backend.stats.of_user(turns.TENANT, turns.key_of(conversation).user_id)
    return {"found": found.users > 0}


CALLS: Final[Mapping[str, Call]] = {
    "export": _export,
    "import": _merge,
    "copy": _copy,
    "purge": _purge,
    "stats": _stats,
}
