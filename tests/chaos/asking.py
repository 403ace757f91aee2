"""What people ask of conversations while pods work on them; each answer says whether anything was there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from stm_backends import Backend, SessionExists, SessionNotFound
from tests.chaos import turns


class Call(Protocol):
    """Does one thing to a conversation; `found` in what it returns says whether there was something."""

    def __call__(self, backend: Backend, folder: Path, conversation: str, /) -> Awaitable[dict[str, Any]]: ...


def kept(folder: Path, conversation: str) -> Path:
    """Return where an export of a conversation is kept; whoever erases the conversation removes it."""
    return folder / "exports" / f"{conversation}.json"


async def _export(backend: Backend, folder: Path, conversation: str) -> dict[str, Any]:
    """Export a conversation, and keep the first export of it."""
    try:
        document = await backend.sessions.export(turns.key_of(conversation))
    except SessionNotFound:
        return {"found": False}
    _keep(document, kept(folder, conversation))
    return {"found": True}


async def _merge(backend: Backend, folder: Path, conversation: str) -> dict[str, Any]:
    """Import an earlier export of a conversation, and its present one, into it and into a copy of it."""
    sessions, file = backend.sessions, kept(folder, conversation)
    try:
        present = await sessions.export(turns.key_of(conversation))
    except SessionNotFound:
        return {"found": False}
    earlier = _earlier(file) or present
    for document in (earlier, present):
        await sessions.import_(document, on_conflict="merge")
    _keep(present, file)
    if earlier is present:
        return {"found": True, "older": False}
    copied = turns.key_of(f"{conversation}-merged")
    await sessions.erase(copied)
    for document in (earlier, present):
        named = {**document, "key": {**document["key"], "session_id": copied.session_id}}
        await sessions.import_(named, on_conflict="merge")
    wrong = differences(earlier, present, await sessions.export(copied), conversation)
    await sessions.erase(copied)
    return {"found": True, "older": True, **wrong}


def _keep(document: Mapping[str, Any], file: Path) -> None:
    # A pod may have no file descriptor left, or be killed at any moment.
    with contextlib.suppress(OSError):
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            whole = file.with_suffix(".part")
            whole.write_text(json.dumps(document), encoding="utf-8")
            whole.rename(file)


def _earlier(file: Path) -> Any:
    """Return the export that is kept, or `None`."""
    with contextlib.suppress(OSError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def differences(
    earlier: Mapping[str, Any], present: Mapping[str, Any], merged: Mapping[str, Any], conversation: str
) -> dict[str, list[str]]:
    """Return what is `missing` or `foreign` in what two exports of one conversation were merged to.

    What only the summary of the later one covers is left out if the earlier one has a summary, which stays.
    """
    before, after, has = (_ids(document, conversation) for document in (earlier, present, merged))
    named = {str(turn["turn_id"]) for turn in present["turns"]}
    found = {"missing": sorted((before | named) - has), "foreign": sorted(has - before - after)}
    return {name: ids for name, ids in found.items() if ids}


def _ids(document: Mapping[str, Any], conversation: str) -> set[str]:
    covered = turns.covered_by(document["body"]["summary"], conversation)
    return {*(one or "?" for one in covered), *(str(turn["turn_id"]) for turn in document["turns"])}


async def _copy(backend: Backend, folder: Path, conversation: str) -> dict[str, Any]:
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


async def _purge(backend: Backend, folder: Path, conversation: str) -> dict[str, Any]:
    purged = await backend.sessions.purge(turns.TENANT)
    return {"found": True, "removed": purged.expired + purged.parts}


async def _stats(backend: Backend, folder: Path, conversation: str) -> dict[str, Any]:
    found = await backend.stats.of_user(turns.TENANT, turns.key_of(conversation).user_id)
    return {"found": found.users > 0}


CALLS: Final[Mapping[str, Call]] = {
    "export": _export,
    "import": _merge,
    "copy": _copy,
    "purge": _purge,
    "stats": _stats,
}
