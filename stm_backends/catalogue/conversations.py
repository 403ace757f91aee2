"""`backend.conversations`: the conversations of a user as a list, latest first, with what it shows."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from stm_backends.catalogue.card import SLOT_S, Card, Content, card_of, checked_changes, usage_of
from stm_backends.catalogue.index import Catalogue, Place
from stm_backends.drivers.checks import require_count
from stm_backends.drivers.contract import MAX_KEY_BYTES, Driver, Key
from stm_backends.errors import ConfigurationError, SessionNotFound
from stm_backends.plain_json import require_json
from stm_backends.records import keys, operations
from stm_backends.records.usage import DAYS, Sums, Usage, total
from stm_backends.types import MemoryKey

PAGE: Final = 200
"""How many cards `all` reads at a time."""


class Cards(NamedTuple):
    """A page of cards. `after` is for the next page; `None` if this is the last one."""

    cards: tuple[Card, ...]
    after: str | None


class Conversations:
    """The catalogue of every user's conversations on one backend."""

    def __init__(self, driver: Driver, catalogue: Catalogue) -> None:
        self._driver = driver
        self._catalogue = catalogue

    async def list(self, tenant: str, user: str, *, after: str | None = None, limit: int = 50) -> Cards:
        """Return a page of a user's conversations, the one with the latest activity first.

        Waits for the datastore twice, however many conversations there are. Give the `after` of a page to get
        the next one. A conversation that becomes active meanwhile moves to the first page. The last activity,
        the preview and the number of turns may be a minute behind. A conversation whose card is damaged is
        left out, with a warning. Raises `ConfigurationError` for an `after` that no page had.
        """
        require_count("limit", limit)
        place = None if after is None else _place_of(after)
        found, last = await self._catalogue.page(tenant, user, after=place, limit=limit)
        cards = tuple(card_of(where, content) for where, content in found)
        return Cards(cards, None if last is None else _text_of(last))

    async def all(self, tenant: str, user: str) -> AsyncIterator[Card]:
        """Yield all cards of a user, latest first, a page at a time."""
        after, first = None, True
        while first or after is not None:
            page = await self.list(tenant, user, after=after, limit=PAGE)
            for card in page.cards:
                yield card
            after, first = page.after, False

    async def get(self, key: MemoryKey) -> Card:
        """Return the card of one conversation.

        One without a card, such as of an older version of this library, gets it. Raises `SessionNotFound`.
        """
        keys.require_key(key)
        return self._card(key, await self._catalogue.load(key) or await self._catalogue.touch(key, None))

    async def update(
        self,
        key: MemoryKey,
        *,
        title: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
        archived: bool | None = None,
    ) -> Card:
        """Set what is given, and return the card. The conversation keeps its place in the list.

        `metadata` replaces the metadata, and an empty title brings back that of the summarizer, or the
        beginning of the first message. A title that is set stays, whatever a summarizer says.
        Raises `InvalidState` for a title of more than 500 characters, or for metadata that is no JSON object
        or takes more than 4,096 bytes, and for NaN, infinities and lone surrogates in either;
        `SessionNotFound`.
        """
        keys.require_key(key)
        changes = checked_changes(title=title, metadata=metadata, pinned=pinned, archived=archived)
        for name, value in changes.items():
            # Browsers are sent cards. An import keeps what was stored without this check.
            require_json(value, name, strict=True)
        return self._card(key, await self._catalogue.update(key, changes))

    async def usage(self, tenant: str, user: str, *, days: int | None = 31) -> Usage:
        """Sum what the answers in a user's conversations took on the last `days` days in UTC, with today.

        Reads the cards of those that were active since, a page at a time, and no conversation; all cards for
        `None`. At most 62 days. The last minute may be missing, as in a list, and conversations that were
        erased, or have expired, are. `Conversation.usage` is of one conversation, and of this moment.
        """
        now, since, start = self._catalogue.clock(), None, -math.inf
        if days is not None:
            require_count("days", days, most=DAYS)
            since = datetime.fromtimestamp(now, UTC).date() - timedelta(days - 1)
            start = datetime(since.year, since.month, since.day, tzinfo=UTC).timestamp()
        found = dict[Key, Sums]()
        if await self._read_usage(tenant, user, start, found):
            # Those that became active meanwhile have moved to the front, past the pages that were read last.
            await self._read_usage(tenant, user, max(start, now - SLOT_S), found)
        return total(found.values(), since=since)

    async def _read_usage(self, tenant: str, user: str, start: float, found: dict[Key, Sums]) -> bool:
        """Read the sums of those that were active since a time; returns whether that took several pages."""
        after, pages = None, 0
        while True:
            page, after = await self._catalogue.page(tenant, user, after=after, limit=PAGE)
            pages += 1
            found |= {where: usage_of(content) for where, content in page if content["at"] >= start}
            if after is None or page[-1][1]["at"] < start:
                return pages > 1

    async def rebuild(self, tenant: str, user: str) -> int:
        """Make the card of each conversation of a user say what is stored; returns how many were changed.

        Needed for what an older version of this library has stored, or a process that was killed within a
        minute of its last turn, where the list shall be right before the next turn. Reads each conversation.
        The card of one that had none leaves the list with its conversation.
        """
        kinds: tuple[keys.Kind, ...] = ("memory", *keys.LOG_KINDS)
        changed = 0
        for kind in kinds:

            async def rebuilt(name: str) -> None:
                nonlocal changed
                key = MemoryKey(tenant, user, keys.unname(name))
                if keys.is_dialogue(key):
                    before = await self._catalogue.load(key)
                    after = await self._catalogue.touch(key)
                    changed += after is not None and after != before

            await operations.each(operations.names(self._driver, keys.scope(tenant, user, kind)), rebuilt)
        return changed

    def _card(self, key: MemoryKey, content: Content | None) -> Card:
        if content is None:
            raise SessionNotFound("there is no conversation under this key: one begins with its first turn")
        return card_of(keys.card_key(key), content)


def _text_of(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode("ascii")


_SLOT: Final = re.compile("[0-9a-f]{8}")

_LONGEST: Final = 16 * MAX_KEY_BYTES
"""More characters than any place has: JSON and base64 make at most eight of a byte of a name."""


def _place_of(text: object) -> Place:
    """Return the place that a page gave to a caller, who may have got this text from anyone."""
    try:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ValueError("not a place")
        slot, before, name = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        if not (
            (isinstance(slot, str) and _SLOT.fullmatch(slot))
            and (isinstance(before, float) and math.isfinite(before))
            and isinstance(name, str)
        ):
            raise ValueError("not a place")
    except (ValueError, TypeError, RecursionError):
        raise ConfigurationError("after is not what a page of conversations had as `after`") from None
    return Place(slot, before, name)
