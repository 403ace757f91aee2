"""`backend.conversations`: the conversations of a user as a list, latest first, and searches in them."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

from stm_backends.catalogue.card import SLOT_S, Card, Content, card_of, checked_changes, usage_of
from stm_backends.catalogue.index import Catalogue, Place
from stm_backends.catalogue.matching import Found, Match, Query
from stm_backends.catalogue.word_index import Indexed, is_settled
from stm_backends.drivers.checks import require_count
from stm_backends.drivers.contract import MAX_KEY_BYTES, Driver, Key
from stm_backends.errors import ConfigurationError, SessionNotFound
from stm_backends.plain_json import require_json
from stm_backends.records import keys, operations
from stm_backends.records.usage import DAYS, Sums, Usage, total
from stm_backends.types import MemoryKey

PAGE: Final = 200
"""Number of cards that `all` reads at a time."""

READ_MOST: Final = 200
"""Maximum number of conversations that one call of `search` reads."""

_READ_AT_ONCE: Final = 20
"""Number of conversations that a search reads concurrently: as many as it returns by default."""


class Reads(Protocol):
    """Reads the records of conversations for a search; see `admin.searching`."""

    async def known(self, owner: tuple[str, str], query: Query) -> Mapping[str, Sequence[Indexed]]:
        """Return the index entries of each conversation, by the name of its card."""
        ...

    async def look(self, key: MemoryKey, query: Query, known: Sequence[Indexed]) -> Sequence[Match]:
        """Return the matches in a conversation."""
        ...

    def later(self, key: MemoryKey, card: Content, *, is_known: bool) -> None:
        """Schedule the indexing of a conversation that was read; `is_known` if the index has a part of it."""
        ...

    async def titled(self, key: MemoryKey, title: str) -> None:
        """Index a title that is about to be set."""
        ...


class Cards(NamedTuple):
    """A page of cards. `after` is for the next page; `None` if this is the last one."""

    cards: tuple[Card, ...]
    after: str | None


class Results(NamedTuple):
    """The results of one call of `search`. `after` is for the next call; `None` if all has been searched."""

    found: tuple[Found, ...]
    after: str | None


class Conversations:
    """The catalogue of every user's conversations on one backend.

    Without `reads`, a search reads only titles.
    """

    def __init__(self, driver: Driver, catalogue: Catalogue, *, reads: Reads | None = None) -> None:
        self._driver = driver
        self._catalogue = catalogue
        self._reads = reads

    async def list(self, tenant: str, user: str, *, after: str | None = None, limit: int = 50) -> Cards:
        """Return a page of a user's conversations, the one with the latest activity first.

        Waits for the datastore twice, however many conversations there are. Pass the `after` of a page to get
        the next one. A conversation that becomes active meanwhile moves to the first page. The last activity,
        the preview and the number of turns may lag by a minute. A conversation whose card is damaged is left
        out, with a warning. Raises `ConfigurationError` for an invalid `after`.
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

    async def search(
        self, tenant: str, user: str, words: str, *, after: str | None = None, limit: int = 20
    ) -> Results:
        """Return a user's conversations that have all of the words, the one with the latest activity first.

        The search matches whole words, regardless of case, in the title, in the summary, and in the texts of
        the user and the assistant. All words must be in the title, in the summary, or in one turn or message.
        In scripts without spaces, such as Chinese, Japanese and Thai, it matches characters. Item logs are
        found by their titles. Without a word, nothing is found.

        One call reads up to 200 conversations, and returns its matches so far, perhaps none. Pass its `after`
        to continue, until that is `None`. Erased text is never found, and new text is found as far as the
        list shows the conversation. Damaged records are left out, with a warning. Raises `ConfigurationError`
        for an invalid `after`, and for words that are not a string.
        """
        require_count("limit", limit)
        if not isinstance(words, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(f"words is {type(words).__name__}, not a string")
        place, query = None if after is None else _place_of(after), Query.of(words)
        found, most = list[Found](), READ_MOST
        if not query.words:
            return Results((), None)
        known: Mapping[str, Sequence[Indexed]] = {}
        if self._reads is not None:
            known = await self._reads.known((tenant, user), query)

        def wanted(slot: str, card: str) -> bool:
            some = known.get(card, ())
            return any(one.bits for one in some) or not is_settled(slot, some)

        async def look_at(one: tuple[Key, Content]) -> Found:
            where, content = one
            card, some = card_of(where, content), known.get(where.name, ())
            matches = [*query.in_title(card)]
            if self._reads is not None:
                matches += await self._reads.look(card.key, query, some)
                if not is_settled(content["slot"], some):
                    self._reads.later(card.key, content, is_known=bool(some))
            return Found(card, tuple(matches))

        while most > 0:
            some, last = await self._catalogue.page(
                tenant, user, after=place, limit=min(most, _READ_AT_ONCE), wanted=wanted
            )
            most -= len(some)
            looked = await operations.together(some, look_at) if some else []
            for (where, content), one in zip(some, looked, strict=True):
                place = Place.of(where.name, content)
                found += [one] if one.matches else []
                if len(found) == limit:
                    return Results(tuple(found), _text_of(place))
            if last is None:
                return Results(tuple(found), None)
        return Results(tuple(found), _text_of(place) if place else None)

    async def get(self, key: MemoryKey) -> Card:
        """Return the card of one conversation.

        A conversation without a card, such as one of an older version of this library, gets one. Raises
        `SessionNotFound`.
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
        """Set the given fields, and return the card. The conversation keeps its place in the list.

        `metadata` replaces the metadata, and an empty title brings back that of the summarizer, or the
        beginning of the first message. A title that was set stays, whatever a summarizer gives.
        Raises `InvalidState` for a title of more than 500 characters, for metadata that is not a JSON object
        or takes more than 4,096 bytes, and for NaN, infinities and lone surrogates in either;
        `SessionNotFound`.
        """
        keys.require_key(key)
        changes = checked_changes(title=title, metadata=metadata, pinned=pinned, archived=archived)
        for name, value in changes.items():
            # Browsers are sent cards. An import keeps what was stored without this check.
            require_json(value, name, strict=True)
        if title is not None and self._reads is not None:
            await self._reads.titled(key, title)
        return self._card(key, await self._catalogue.update(key, changes))

    async def usage(self, tenant: str, user: str, *, days: int | None = 31) -> Usage:
        """Sum the usage of a user's answers on the last `days` days in UTC, including today.

        Reads the cards of conversations that were active since then, a page at a time, and no conversation;
        `None` reads all cards. At most 62 days. The last minute may be missing, as in a list. Conversations
        that were erased or have expired are missing. `Conversation.usage` is for one conversation, and exact.
        """
        now, since, start = self._catalogue.clock(), None, -math.inf
        if days is not None:
            require_count("days", days, most=DAYS)
            since = datetime.fromtimestamp(now, UTC).date() - timedelta(days - 1)
            start = datetime(since.year, since.month, since.day, tzinfo=UTC).timestamp()
        found = dict[Key, Sums]()
        if await self._read_usage(tenant, user, start, found):
            # Conversations that became active meanwhile have moved to the front, past the last pages read.
            await self._read_usage(tenant, user, max(start, now - SLOT_S), found)
        return total(found.values(), since=since)

    async def _read_usage(self, tenant: str, user: str, start: float, found: dict[Key, Sums]) -> bool:
        """Read the sums of conversations active since a time; returns whether that took several pages."""
        after, pages = None, 0
        while True:
            page, after = await self._catalogue.page(tenant, user, after=after, limit=PAGE)
            pages += 1
            found |= {where: usage_of(content) for where, content in page if content["at"] >= start}
            if after is None or page[-1][1]["at"] < start:
                return pages > 1

    async def rebuild(self, tenant: str, user: str) -> int:
        """Make the cards of a user's conversations match the stored records; returns how many were changed.

        This is needed after use of an older version of this library, or after a process was killed within a
        minute of its last turn, if the list must be right before the next turn. Reads each conversation. A
        card created here leaves the list with its conversation.
        """
        kinds: tuple[keys.Kind, ...] = ("memory", *keys.LOG_KINDS)
        changed = 0
        for kind in kinds:
            scope = keys.scope(tenant, user, kind)

            async def rebuilt(name: str, scope: str = scope) -> None:
                nonlocal changed
                key = MemoryKey(tenant, user, keys.unname(name))
                if keys.is_dialogue(key) and not keys.is_beside(Key(scope, name)):
                    before = await self._catalogue.load(key)
                    after = await self._catalogue.touch(key)
                    changed += after is not None and after != before

            await operations.each(operations.names(self._driver, scope), rebuilt)
        return changed

    def _card(self, key: MemoryKey, content: Content | None) -> Card:
        if content is None:
            raise SessionNotFound("there is no conversation under this key: one begins with its first turn")
        return card_of(keys.card_key(key), content)


def _text_of(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode("ascii")


_SLOT: Final = re.compile("[0-9a-f]{8}")

_LATEST: Final = 1e12
"""A time in epoch seconds that no activity has."""

_LONGEST: Final = 16 * MAX_KEY_BYTES
"""More characters than any place has: JSON and base64 make at most eight of a byte of a name."""


def _place_of(text: object) -> Place:
    """Return the place that a page gave to a caller, who may have received this text from anyone."""
    try:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ValueError("not a place")
        slot, before, name = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        if not (
            (isinstance(slot, str) and _SLOT.fullmatch(slot))
            and (isinstance(before, float) and abs(before) < _LATEST)
            and isinstance(name, str)
        ):
            raise ValueError("not a place")
    except (ValueError, TypeError, RecursionError):
        raise ConfigurationError("after was not returned by a page of conversations") from None
    return Place(slot, before, name)
