"""Tenants, users and conversations, as lists of the page."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any, Final, Literal, TypeAlias, get_args

from stm_backends.admin.stats import ConversationStats, Damaged
from stm_backends.backend import Backend
from stm_backends.catalogue.card import Card
from stm_backends.errors import ConfigurationError
from stm_backends.inspect.reading import key_parts
from stm_backends.types import MemoryHealth

PAGE: Final = 50
MOST: Final = 500
"""How many tenants or users one list has, and how many conversations the answer to a filter has."""

Filter: TypeAlias = Literal["degraded", "over", "largest", "waiting"]
"""Which conversations are listed: degraded ones, those beyond a budget, all by size, those that wait."""


async def tenants(backend: Backend, *, like: str = "") -> dict[str, Any]:
    """Return the tenants whose id contains a text, or why the datastore cannot list them."""
    try:
        return await _some("tenants", backend.sessions.tenants(), like)
    except ConfigurationError as error:
        return {"tenants": [], "more": False, "says": str(error)}


async def users(backend: Backend, tenant: str, *, like: str = "") -> dict[str, Any]:
    """Return the users of a tenant whose id contains a text, and whether keys are missing."""
    found = await _some("users", backend.sessions.users(tenant), like)
    return found | {"seal": await backend.sessions.other_seal(tenant)}


async def _some(name: str, each: AsyncIterator[str], like: str) -> dict[str, Any]:
    found = list[str]()
    async for one in each:
        if like.casefold() in one.casefold():
            if len(found) == MOST:
                return {name: found, "more": True}
            found.append(one)
    return {name: found, "more": False}


async def conversations(
    backend: Backend, tenant: str, user: str, *, after: str | None = None
) -> dict[str, Any]:
    """Return a page of a user's conversations by last activity, as the catalogue has them."""
    page = await backend.conversations.list(tenant, user, after=after, limit=PAGE)
    return {"conversations": [_card(card) for card in page.cards], "after": page.after}


def _card(card: Card) -> dict[str, Any]:
    return {
        "key": [*key_parts(card.key)],
        "title": card.title,
        "preview": card.preview,
        "turns": card.turns,
        "updated": card.updated,
        "kinds": [*card.kinds],
    }


def as_filter(name: str) -> Filter:
    """Return a filter. Raises `ConfigurationError` for any other text."""
    for one in get_args(Filter):
        if one == name:
            return one
    raise ConfigurationError(f"by is one of: {', '.join(get_args(Filter))}")


async def filtered(
    backend: Backend, tenant: str, user: str | None, by: Filter, *, budget: int
) -> dict[str, Any]:
    """Return the conversations of a user or tenant that a filter is for, the most urgent first.

    Reads each conversation. `budget` is how many tokens `over` allows for. Those that wait for a summary come
    in the order of their last activity, the oldest first. `read` counts all, and `damaged` those that cannot
    be read.
    """
    found, read, damaged = list[ConversationStats](), 0, 0
    async for whose in users_of(backend, tenant, user):
        async for one in backend.stats.conversations(tenant, whose):
            read += 1
            if isinstance(one, Damaged):
                damaged += 1
            elif _is_wanted(one, by, budget):
                found.append(one)
                if len(found) >= 2 * MOST:
                    found = sorted(found, key=lambda one: _urgency(one, by))[:MOST]
    found.sort(key=lambda one: _urgency(one, by))
    return {
        "conversations": [_stats(one) for one in found[:MOST]],
        "more": len(found) > MOST,
        "read": read,
        "damaged": damaged,
    }


async def users_of(backend: Backend, tenant: str, user: str | None) -> AsyncIterator[str]:
    """Yield the user, or all users of the tenant."""
    if user is not None:
        yield user
        return
    async for one in backend.sessions.users(tenant):
        yield one


def _is_wanted(one: ConversationStats, by: Filter, budget: int) -> bool:
    match by:
        case "degraded":
            return one.health is MemoryHealth.DEGRADED
        case "over":
            return one.tokens > budget
        case "waiting":
            return one.waiting > 0 or one.health is not MemoryHealth.HEALTHY
        case "largest":
            return True


def _urgency(one: ConversationStats, by: Filter) -> tuple[float, tuple[str, str, str]]:
    """Return what a list is sorted by."""
    if by in ("degraded", "waiting"):
        return math.inf if one.last_activity is None else one.last_activity, key_parts(one.key)
    return -float(one.tokens if by == "over" else one.bytes), key_parts(one.key)


def _stats(one: ConversationStats) -> dict[str, Any]:
    return {
        "key": [*key_parts(one.key)],
        "turns": one.turns + one.archived,
        "tokens": one.tokens,
        "bytes": one.bytes,
        "health": one.health.value,
        "waiting": one.waiting,
        "updated": one.last_activity,
    }
