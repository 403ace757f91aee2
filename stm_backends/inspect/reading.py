"""One conversation as the page reads it: its state, its history in pages, and what is found in it.

Everything is read by loads and scans. No memory object is made, so no background begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt, InvalidKey, SessionNotFound, located
from stm_backends.history.log import LogPage
from stm_backends.inspect.happened import happened_in
from stm_backends.inspect.lines import as_json, item_as_json, whole_lines_of
from stm_backends.inspect.shown import assumed, shown_of, transcript_of
from stm_backends.memory.shared.reading import Numbered, UnitsPage, read_units_page
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys
from stm_backends.records.keys import LogKind
from stm_backends.records.usage import total
from stm_backends.types import ConversationTurn, MemoryKey, ShortTermMemoryConfig

PAGE: Final = 50
"""How many turns or messages one page has."""

_SEARCHED: Final = 2_000
"""How many turns or messages one search reads."""

_FOUND: Final = 50
_AT_ONCE: Final = 500
_AROUND: Final = 60
"""How many characters of a match stand on either side of it."""

Clean: TypeAlias = Callable[[ConversationTurn], ConversationTurn]
"""Returns a turn as it is to be shown."""


def unchanged(turn: ConversationTurn) -> ConversationTurn:
    """Return the turn itself."""
    return turn


def shared_of(backend: Backend, key: MemoryKey) -> SharedConversation:
    """Return the record of a conversation, to be read only. Raises `InvalidKey`."""
    keys.require_key(key)
    return SharedConversation(
        backend.driver, keys.memory_key(key), backend.codec, time.time, lambda conversation: None
    )


async def snapshot_of(backend: Backend, shared: SharedConversation) -> Snapshot:
    """Return a conversation as it is now, its turns numbered. Raises `SessionNotFound` and `Corrupt`."""
    record = await backend.driver.load(shared.key)
    if record is None:
        raise SessionNotFound("there is no conversation under this key")
    with located(backend.name, "inspect"):
        return Snapshot.of(record, backend.codec).transcribed()


async def mark_of(backend: Backend, where: Key) -> str:
    """Return a text that changes with the record; `""` if there is no record. Reads no turn."""
    record = await backend.driver.load(where, last=0)
    return "" if record is None else f"{record.version}:{record.length}"


async def state_of(
    backend: Backend, key: MemoryKey, config: ShortTermMemoryConfig | None = None, *, seen: str | None = None
) -> dict[str, Any]:
    """Return all that the page shows of a conversation but its history; `{"same": True}` for a mark `seen`.

    `config` is that of its memory; `None` is the default. Without a record, `logs` names the logs of agent
    frameworks. Raises `SessionNotFound` if there are none either.
    """
    shared = shared_of(backend, key)
    mark = await mark_of(backend, shared.key)
    if seen is not None and mark == seen:
        return {"same": True, "now": time.time()}
    common: dict[str, Any] = {"key": [*key_parts(key)], "mark": mark, "now": time.time()}
    if not mark:
        logs = await logs_of(backend, key)
        if not logs:
            raise SessionNotFound("there is no conversation under this key")
        return {**common, "exists": False, "logs": logs}
    snapshot = await snapshot_of(backend, shared)
    return {**common, **described(snapshot, config)}


def described(snapshot: Snapshot, given: ShortTermMemoryConfig | None) -> dict[str, Any]:
    """Return what a snapshot says: what the model is shown, what happened, and what answers took."""
    config = assumed(snapshot.body, given)
    used = total([snapshot.usage])
    return {
        "exists": True,
        "logs": [],
        "what": "messages" if snapshot.body.messages else "turns",
        "config": config_as_json(config, given=given is not None),
        "shown": shown_of(snapshot, config).as_json(),
        "recent_from": transcript_of(snapshot.body).base + len(snapshot.split(config).pending),
        "happened": happened_in(snapshot),
        "usage": {**used.total},
    }


def config_as_json(config: ShortTermMemoryConfig, *, given: bool) -> dict[str, Any]:
    """Return the settings that decide what is shown. `given` says that a user gave them."""
    budget = config.budget
    return {
        "strategy": config.strategy,
        "full_zone_turns": budget.full_zone_turns,
        "summary_max_tokens": budget.summary_max_tokens,
        "total_max_tokens": budget.total_max_tokens,
        "overflow_policy": budget.overflow_policy,
        "given": given,
    }


def key_parts(key: MemoryKey) -> tuple[str, str, str]:
    """Return the three ids."""
    return key.tenant_id, key.user_id, key.session_id


async def logs_of(backend: Backend, key: MemoryKey) -> list[LogKind]:
    """Return the frameworks that keep a log of a conversation. One that cannot be read is there."""
    return [kind for kind in keys.LOG_KINDS if await _has_log(backend, key, kind)]


async def _has_log(backend: Backend, key: MemoryKey, kind: LogKind) -> bool:
    try:
        return (await backend.item_log(key, kind).newest(0)).exists
    except (Corrupt, InvalidKey):
        return True


async def history_of(
    backend: Backend,
    key: MemoryKey,
    *,
    before: int | None = None,
    after: int | None = None,
    at: int | None = None,
    revision: int | None = None,
    log: LogKind | None = None,
    limit: int = PAGE,
) -> dict[str, Any]:
    """Return a page of the history, by default the newest; of a framework's log with `log`."""
    if log is not None:
        page = await backend.item_log(key, log).transcript(before=before, after=after, at=at, limit=limit)
        return _page(page, [item_as_json(one) for one in page.items])
    found = await read_units_page(
        shared_of(backend, key), before=before, after=after, at=at, limit=limit, revision=revision
    )
    return _page(found, [unit_as_json(one) for one in found.units])


def _page(page: UnitsPage | LogPage, units: list[dict[str, Any]]) -> dict[str, Any]:
    return {"units": units, "oldest": page.oldest, "newest": page.newest, "missing": [*page.missing]}


def unit_as_json(one: Numbered, clean: Clean = unchanged) -> dict[str, Any]:
    """Return a turn or a message for the page."""
    return as_json(one, one.stored._replace(turn=clean(one.stored.turn)))


async def found_in(
    backend: Backend, key: MemoryKey, words: str, *, before: int | None = None
) -> dict[str, Any]:
    """Return where a text is in a conversation, the newest first, in capitals or not.

    `before` is where the next call goes on; `None` if all has been read.
    """
    shared, text = shared_of(backend, key), words.casefold()
    found, read = list[dict[str, Any]](), 0
    while text.strip() and read < _SEARCHED:
        page = await read_units_page(shared, before=before, after=None, at=None, limit=_AT_ONCE)
        for one in reversed(page.units):
            if snippet := _snippet([line.text for line in whole_lines_of(one.stored)], text):
                found.append({"number": one.number, "snippet": snippet})
            if len(found) == _FOUND:
                return {"found": found, "before": one.number if one.number > page.oldest else None}
        numbers = [*(one.number for one in page.units), *page.missing]
        before, read = min(numbers, default=page.oldest), read + len(numbers)
        if before <= page.oldest:
            return {"found": found, "before": None}
    return {"found": found, "before": before}


def _snippet(texts: Sequence[str], words: str) -> str:
    """Return the text around the first place of `words`; `""` if they are nowhere."""
    for text in texts:
        # A character may have another length in small letters, so the place is near, and not exact.
        place = text.casefold().find(words)
        if place >= 0:
            start, end = max(0, place - _AROUND), place + len(words) + _AROUND
            return f"{'…' * (start > 0)}{text[start:end]}{'…' * (end < len(text))}"
    return ""


def log_kind(name: str) -> LogKind | None:
    """Return the framework of a name; `None` for any other text."""
    return name if name in keys.LOG_KINDS else None
