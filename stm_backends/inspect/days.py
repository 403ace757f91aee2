"""Turns, tokens and bytes of a tenant or user by day, and what answers took."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_count
from stm_backends.inspect.listing import users_of
from stm_backends.inspect.reading import shared_of
from stm_backends.memory.shared.reading import read_units_page
from stm_backends.memory.units import unit_content
from stm_backends.memory.view import shown_text
from stm_backends.plain_json import encode_json
from stm_backends.records.usage import DAYS
from stm_backends.tokens import default_token_estimator
from stm_backends.types import MemoryKey, ShortTermMemoryConfig, StoredTurn

MOST: Final = 1_000
"""How many conversations are read."""

_AT_ONCE: Final = 500
_SHOWN: Final = ShortTermMemoryConfig()


@dataclass(slots=True)
class _Day:
    """The sums of one day in UTC. `usage` is what `add(..., usage=)` was given, by name."""

    turns: int = 0
    tokens: int = 0
    bytes: int = 0
    usage: dict[str, float] = field(default_factory=dict[str, float])


async def days_of(backend: Backend, tenant: str, user: str | None, *, days: int = 31) -> dict[str, Any]:
    """Return sums for each of the last `days` days with today, the oldest first.

    Turns and messages count on the day of their time. Tokens are the default estimate, and bytes those of the
    JSON that is stored, before sealing. Reads the conversations that were active since, at most `MOST`, and
    of each what was said since. `more` says that there are more conversations.
    """
    require_count("days", days, most=DAYS)
    today = datetime.now(UTC).date()
    sums = {today - timedelta(back): _Day() for back in reversed(range(days))}
    since, read, more = datetime.combine(min(sums), datetime.min.time(), UTC).timestamp(), 0, False
    async for whose in users_of(backend, tenant, user):
        used = await backend.conversations.usage(tenant, whose, days=days)
        for day, amounts in used.days.items():
            for name, amount in amounts.items() if day in sums else ():
                sums[day].usage[name] = sums[day].usage.get(name, 0) + amount
        async for card in backend.conversations.all(tenant, whose):
            if card.updated < since:
                break
            if read == MOST:
                more = True
                break
            if "memory" in card.kinds:
                read += 1
                await _add(backend, card.key, sums, since)
        if more:
            break
    return {
        "days": [
            {"day": day.isoformat(), "turns": one.turns, "tokens": one.tokens, "bytes": one.bytes}
            | {"usage": one.usage}
            for day, one in sums.items()
        ],
        "conversations": read,
        "more": more,
    }


async def _add(backend: Backend, key: MemoryKey, sums: dict[date, _Day], since: float) -> None:
    """Add what was said in one conversation since a time, from the newest page backwards."""
    shared, before = shared_of(backend, key), None
    while True:
        page = await read_units_page(shared, before=before, after=None, at=None, limit=_AT_ONCE)
        for one in reversed(page.units):
            if one.stored.turn.ts and one.stored.turn.ts < since:
                return
            _count(one.stored, sums)
        numbers = [*(one.number for one in page.units), *page.missing]
        before = min(numbers, default=page.oldest)
        if before <= page.oldest:
            return


def _count(stored: StoredTurn, sums: dict[date, _Day]) -> None:
    ts = stored.turn.ts
    day = sums.get(datetime.fromtimestamp(ts, UTC).date()) if ts else None
    if day is None or stored.removed:
        return
    day.turns += 1
    day.bytes += len(encode_json(unit_content(stored)))
    day.tokens += default_token_estimator(shown_text(stored.turn, _SHOWN))
