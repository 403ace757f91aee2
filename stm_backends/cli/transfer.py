"""Conversations in and out of JSON Lines, and out of the datastore."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from stm_backends.backend import Backend
from stm_backends.cli.conversations import BadFile
from stm_backends.errors import InvalidKey, InvalidState, SessionExists
from stm_backends.keys import parse_composite
from stm_backends.sessions import OnConflict
from stm_backends.types import MemoryKey

_ANY = "-"


def owner(text: str) -> tuple[str, str | None]:
    """Return the tenant, and the user if there is one, that `TENANT` or `TENANT:USER` names."""
    match text.count(":"):
        case 0:
            return parse_composite(f"{text}:{_ANY}:{_ANY}").tenant_id, None
        case 1:
            key = parse_composite(f"{text}:{_ANY}")
            return key.tenant_id, key.user_id
        case _:
            raise InvalidKey("this names a conversation; a user is written TENANT:USER, a tenant TENANT")


def user_composite(tenant: str, user: str) -> str:
    """Return `TENANT:USER`, written so that `owner` reads it."""
    return MemoryKey(tenant, user, _ANY).composite().removesuffix(f":{_ANY}")


async def write_export(backend: Backend, keys: AsyncIterator[MemoryKey], out: TextIO) -> int:
    """Write conversations, one a line; returns how many."""
    count = 0
    async for key in keys:
        document = await backend.sessions.export(key)
        # ASCII, so that lone surrogates survive any encoding of the file.
        out.write(f"{json.dumps(document, separators=(',', ':'))}\n")
        count += 1
    return count


async def read_import(
    backend: Backend, path: Path, lines: Iterable[str], *, on_conflict: OnConflict, done: Callable[[], None]
) -> None:
    """Store exported conversations. Raises `BadFile` and `SessionExists` with the file and the line."""
    for number, document in _documents(path, lines):
        try:
            await backend.sessions.import_(document, on_conflict=on_conflict)
        except (InvalidState, InvalidKey) as error:
            raise BadFile(f"{path}:{number}: {error}") from error
        except SessionExists as error:
            raise SessionExists(f"{path}:{number}: {error}") from error
        done()


def check(what: str) -> None:
    """Raise `InvalidKey` unless this names a conversation, a user or a tenant."""
    if what.count(":") > 1:
        parse_composite(what)
    else:
        owner(what)


async def erase(backend: Backend, what: str) -> int:
    """Erase a conversation, a user or a tenant; returns how many records there were."""
    if what.count(":") > 1:
        return int(await backend.sessions.erase(parse_composite(what)))
    tenant, user = owner(what)
    if user is None:
        return await backend.sessions.erase_tenant(tenant)
    return await backend.sessions.erase_user(tenant, user)


def _documents(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadFile(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(document, dict):
            raise BadFile(f"{path}:{number}: the line is not a JSON object")
        yield number, document
