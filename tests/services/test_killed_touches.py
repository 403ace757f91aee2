"""The list of conversations after processes were killed within a touch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from stm_backends import Backend, open_backend
from stm_backends.catalogue.card import hour_of, slot_of
from stm_backends.records import keys, operations
from tests.support.dying_touch import NEW, NOW, OLD, TENANT, key_of
from tests.support.places import Place


async def listed(backend: Backend, user: str, limit: int) -> list[str]:
    """Return the sessions of all pages."""
    found, after = list[str](), None
    while True:
        page = await backend.conversations.list(TENANT, user, after=after, limit=limit)
        found += [card.key.session_id for card in page.cards]
        if (after := page.after) is None:
            return found


@pytest.mark.parametrize("datastore", ["sqlite", "redis"])
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
async def test_a_touch_killed_anywhere_leaves_each_conversation_once(
    place_on: Callable[[str], Place], datastore: str, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_touch", place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    count = int(ran.stdout)
    assert count > 15
    orders = set[str]()
    async with open_backend(place.url) as backend:
        for user in ("whole", *(f"u{at}" for at in range(1, count + 1, every))):
            shown = await listed(backend, user, 50)
            orders.add(" ".join(shown))
            for limit in (1, 2):
                assert await listed(backend, user, limit) == shown, user
            assert sorted({*shown, NEW}) == sorted([*OLD, NEW]), user
            assert len(shown) == len({*shown}), user
            cards = {one: await backend.conversations.get(key_of(user, one)) for one in shown}
            times = [cards[one].updated for one in shown]
            assert times == sorted(times, reverse=True), user
            assert cards["second"].title in ("Hello", "Lisbon"), user
            # What a touch has left is gone once the list was read; a name that is ahead of its card may stay.
            names = operations.names(backend.driver, keys.scope(TENANT, user, "recent"))
            read = [keys.slot_and_card(name) async for name in names]
            found = {(hour_of(slot), one) for slot, one in read}
            due = {(slot_of(card.updated), one) for one, card in cards.items()}
            assert due <= found <= due | {(slot_of(NOW), "first"), (slot_of(NOW), NEW)}, user
            # And the conversation whose first touch was killed.
            await backend.conversations.rebuild(TENANT, user)
            assert sorted(await listed(backend, user, 2)) == sorted([*OLD, NEW]), user
    assert len(orders) > 1
