"""Catalogues that are broken: each is the correct one with one promise taken away."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from stm_backends.catalogue.card import Content, hour_of, slot_of
from stm_backends.catalogue.index import Catalogue
from stm_backends.drivers.contract import Key
from stm_backends.memory.touches import Touches
from stm_backends.records import keys


class WritesTheCardFirst(Catalogue):
    """Puts the new name when the card is written and the old name is gone."""

    async def _write(self, where: Key, *args: Any, **options: Any) -> Any:
        self.later: list[Any] = []
        written = await super()._write(where, *args, **options)
        for put in self.later:
            await super()._put(*put)
        return written

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        self.later.append((where, before, after, ttl))
        return after


class DeletesTheOldNameFirst(Catalogue):
    """Deletes the old name before the new one is put."""

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        if before is not None and before["slot"] != after["slot"]:
            await self._driver.delete(
                keys.recent_key(*keys.owner_of(where.scope), before["slot"], where.name)
            )
        return await super()._put(where, before, after, ttl)


class WritesTheCardLast(Catalogue):
    """Writes the card once the old name is deleted."""

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        after = await super()._put(where, before, after, ttl)
        if before is not None and before["slot"] != after["slot"]:
            await self._driver.delete(
                keys.recent_key(*keys.owner_of(where.scope), before["slot"], where.name)
            )
        return after


class PutsNamesByTheClock(Catalogue):
    """Decides a name by the time of the touch, and not by the card."""

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        put = await super()._put(where, before, {**after, "slot": slot_of(self.clock())}, ttl)
        return {**put, "slot": after["slot"]}


class KeepsANameForAnHour(Catalogue):
    """Leaves a name that says up to which moment the last activity is, also after a later one."""

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        if before is not None and hour_of(before["slot"]) == hour_of(after["slot"]):
            after = {**after, "slot": before["slot"]}
        return await super()._put(where, before, after, ttl)


class BelievesNames(Catalogue):
    """Lists a card at the place of its name, even if the card has another place."""

    async def _cards_of(self, cards: str, names: Any) -> dict[str, Content]:
        found: dict[str, Content] = {}
        for slot, card in map(keys.slot_and_card, names):
            record = await self._driver.load(Key(cards, card))
            if record is not None:
                found[card] = {**self._open(record), "slot": slot}
        return found


class DoesNotLookForTheName(Catalogue):
    """Does not look for the name that it has put once the card is written."""

    async def _look_for(self, where: Key, after: Content, ttl: float | None) -> None:
        del where, after, ttl


class DeletesAnyName(Catalogue):
    """Deletes a name of what is gone, whether or not it was put again."""

    async def _delete_name(self, where: Key, slot: str) -> None:
        await self._driver.delete(keys.recent_key(*keys.owner_of(where.scope), slot, where.name))


class KeepsOldNames(Catalogue):
    """Removes no name that is behind its card."""

    async def _delete_name(self, where: Key, slot: str) -> None:
        del where, slot


class RemovesNamesThatAreAhead(Catalogue):
    """Takes the name of a card that is being written for a left-over one."""

    async def _cards_of(self, cards: str, names: Any) -> dict[str, Content]:
        found = await super()._cards_of(cards, names)
        for slot, card in map(keys.slot_and_card, names):
            if card not in found or found[card]["slot"] > slot:
                await self._delete_name(Key(cards, card), slot)
        return found


class WritesCardsOfWhatWasErased(Catalogue):
    """Does not look whether a conversation is still there once its first card is written."""

    async def _remove(self, where: Key, content: Content, *, version: str) -> None:
        del where, content, version


class LosesTheLastTouch(Touches):
    """Leaves out a touch that comes too early."""

    def _arm(self, noted: Any) -> None:
        if noted.due <= asyncio.get_running_loop().time():
            super()._arm(noted)


CATALOGUES: Final[dict[type[Catalogue], str]] = {
    WritesTheCardFirst: "a_kill_within_a_touch_leaves_each_conversation_once",
    DeletesTheOldNameFirst: "a_kill_within_a_touch_leaves_each_conversation_once",
    WritesTheCardLast: "a_kill_within_a_touch_leaves_each_conversation_once",
    KeepsANameForAnHour: "a_conversation_that_goes_on_in_a_crowded_hour_is_first",
    BelievesNames: "a_left_over_name_is_removed",
    RemovesNamesThatAreAhead: "a_list_during_a_touch_loses_nothing",
    DoesNotLookForTheName: "a_conversation_that_begins_again_while_it_is_erased_is_listed",
    DeletesAnyName: "a_conversation_that_begins_again_while_its_card_is_removed_is_listed",
    KeepsOldNames: "a_left_over_name_is_removed",
    WritesCardsOfWhatWasErased: "an_erasure_during_a_first_touch_leaves_no_card",
}
"""The mutants, and the check that each must fail."""

UNDER_FAULTS: Final[tuple[type[Catalogue], ...]] = (
    DeletesTheOldNameFirst,
    WritesTheCardLast,
    PutsNamesByTheClock,
)
"""The mutants that the simulation must notice."""
