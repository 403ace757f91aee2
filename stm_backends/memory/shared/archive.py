"""The pages for turns that leave the record of one conversation; see `records.pages`.

`SharedConversation.replace` calls this around every write that drops turns, so that none leaves the record
before a page has it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, StorageError
from stm_backends.memory import log
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import page_json, read_units
from stm_backends.records import confirming, keys, pages
from stm_backends.records.body import Body, Patch, Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.pages import Leaving, Pages
from stm_backends.records.shortening import Shortening
from stm_backends.types import StoredTurn

logger = logging.getLogger("stm_backends")

AGAIN_AFTER: Final = 0.5
"""Fraction of their time to live after which turns still in the record are put into pages again."""


class _Put(NamedTuple):
    """Turns that were put into pages, from `at` on, and are not known to have left the record.

    `digests` are those of the turns, which would take far more memory.
    """

    before: Transcript
    digests: Sequence[bytes]
    at: float


def _digest(one: Leaving) -> bytes:
    return hashlib.blake2b(one.data, digest_size=16).digest()


class Archive:
    """The pages of one conversation as this process writes them. `ttl` is the time to live of pages.

    `clock` is in epoch seconds. `filled` is called with the numbers of pages that have all their turns now.
    """

    __slots__ = ("_clock", "_codec", "_driver", "_key", "_open", "filled", "pages", "ttl")

    def __init__(
        self, driver: Driver, key: Key, codec: Codec, pages: Pages, clock: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._key = key
        self._codec = codec
        self._clock = clock
        self._open: _Put | None = None
        self.pages = pages
        self.ttl: float | None = None
        self.filled: Callable[[range], None] | None = None

    def leaving(self, snapshot: Snapshot, body: Body) -> Sequence[Leaving]:
        """Return the turns that leave a record when a body is stored there, if it keeps a transcript."""
        before, after = snapshot.body.transcript, body.transcript
        count = 0 if before is None or after is None else after.base - before.base
        return self._of(snapshot, slice(count))

    def _of(self, snapshot: Snapshot, some: slice) -> Sequence[Leaving]:
        entries = (snapshot.tail[start] for start in snapshot.starts[some])
        return [
            Leaving(stored.id, page_json(self._codec, stored, entry))
            for stored, entry in zip(snapshot.turns[some], entries, strict=True)
        ]

    async def put_after(self, snapshot: Snapshot, count: int) -> None:
        """Store all but the oldest `count` turns of a record, which an edit is about to take out of view."""
        before, leaving = snapshot.body.transcript, self._of(snapshot, slice(count, None))
        if before is not None and leaving:
            self._open = _Put(before, (), self._clock())
            rest = before.moved([one.id for one in snapshot.turns[:count]], summarized=False)
            await self.pages.put(self._key, rest, leaving, summary=None, ttl=self.ttl)

    async def put(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        """Store turns that are about to leave the record that was read."""
        before = snapshot.body.transcript
        if before is None or not leaving:
            return
        digests, put = [*map(_digest, leaving)], self._open
        known = self._known(before, digests)
        at = put.at if put is not None and known else self._clock()
        self._open = _Put(before, digests[:known], at)
        rest = before.moved([one.id for one in leaving[:known]], summarized=False)
        await self.pages.put(self._key, rest, leaving[known:], summary=snapshot.body.summary, ttl=self.ttl)
        self._open = _Put(before, digests, at)

    def _known(self, before: Transcript, digests: Sequence[bytes]) -> int:
        """Return how many of these turns this process has already put there under the same numbers."""
        put = self._open
        if put is None or (put.before.epoch, put.before.rev, put.before.base) != (
            before.epoch,
            before.rev,
            before.base,
        ):
            return 0
        # Others may have renewed the record, and not the pages. By a clock that was set, too.
        if self.ttl is not None and not 0 <= self._clock() - put.at < AGAIN_AFTER * self.ttl:
            return 0
        pairs = zip(put.digests, digests, strict=False)
        return next(
            (count for count, (one, other) in enumerate(pairs) if one != other),
            min(len(put.digests), len(digests)),
        )

    def within_limit(self, body: Body) -> Body:
        """Return a body that marks turns beyond the limit, if there is one, as gone."""
        shorter = body.transcript and body.transcript.keeping(self.pages.most)
        return body if shorter is body.transcript else replace(body, transcript=shorter)

    async def left(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        """Note that the turns have left the record, and rewrite the pages that are full now."""
        before = snapshot.body.transcript
        self.settled()
        if before is not None:
            full = await self.pages.complete(self._key, before, leaving)
            if full and self.filled is not None:
                self.filled(full)

    async def mend(self, transcript: Transcript) -> object:
        """Apply edits to units in pages, and remove the former content of these units.

        Returns the argument for `settled`, which is due once the record is written.
        """
        self._open = put = _Put(transcript, (), self._clock())
        await self.pages.put_patches(self._key, transcript, ttl=self.ttl)
        await self.pages.scrub(self._key, transcript.epoch, transcript.patches)
        return put

    def settled(self, put: object = None) -> None:
        """Note that the record now tells where the turns are, except those that were put since `put`."""
        if put is None or put is self._open:
            self._open = None

    async def shortened(self, snapshot: Snapshot, body: Body) -> None:
        """Remove the pages that are gone as a whole, according to a body that replaced another.

        A failure is only logged: these pages go with the next ones.
        """
        before, after = snapshot.body.transcript, body.transcript
        if before is None or after is None or after.first // pages.TURNS <= before.first // pages.TURNS:
            return
        try:
            await Shortening(self._driver, self._codec).removed_below(self._key, after.epoch, after.first)
        except StorageError as error:
            logger.warning(
                "could not remove the oldest pages of a transcript; they are removed with the next ones: "
                "%s (conversation %s)",
                error,
                keys.log_name(self._key),
            )

    async def read_confirmed(self, transcript: Transcript, first: int, end: int) -> Mapping[int, StoredTurn]:
        """Return the turns from `first` to `end - 1` by number; turns that are missing are in no page.

        Turns of a damaged page are missing, too: it stays, and does not keep others from being summarized.
        """
        found = await read_units(self.pages, self._key, transcript, first, end, damaged=self._noted)
        if len(found) < end - first and self._driver.traits.shows_unconfirmed:
            # A server that others have replaced may not show them.
            await confirming.confirm(self._driver, (keys.pages_of(self._key).scope,))
            found = await read_units(self.pages, self._key, transcript, first, end, damaged=self._noted)
        return found

    def _noted(self, error: Corrupt) -> None:
        """Log that a part of a page is left out, unless this process lacks the key that opens it."""
        if isinstance(error, KeyMismatch | SealMismatch):
            raise error
        log.damaged(keys.log_name(self._key), error)

    async def tidy(self, snapshot: Snapshot, load: Callable[[], Awaitable[Snapshot]]) -> None:
        """Remove the turns that this process has put into pages of a record that no longer exists.

        An erasure removes the record and then the pages; it may have come between the pages and the write of
        the record that did not find it. Pages that a record may refer to stay: what they have is a copy.
        """
        put = self._open
        if put is None:
            return
        if pages.may_refer(*_mark_of(snapshot), put.before.epoch):
            await self._tidy_edited(snapshot, put)
            return

        async def mark() -> tuple[str | None, Transcript | None]:
            return _mark_of(await load())

        is_dead = await pages.erase_dead(self._driver, self._key, mark, epoch=put.before.epoch)
        if is_dead and self._open is put:
            # Not before: an erasure that failed is done again.
            self._open = None

    async def _tidy_edited(self, snapshot: Snapshot, put: _Put) -> None:
        """Remove copies from before an edit that this process has put into pages, where the edit missed them.

        These are all copies that are older than the one that counts.
        """
        transcript, first = snapshot.body.transcript, put.before.base
        if transcript is None or transcript.rev == put.before.rev:
            return
        found = await self.pages.between(self._key, transcript, first, transcript.base)
        count = {number: Patch(copy.rev, number, copy.turn) for number, copy in found.items()}
        for number, unit in enumerate(snapshot.turns, transcript.base):
            count[number] = Patch(transcript.rev, number, {"turn_id": unit.id})
        # A checkpoint may tell what is on any earlier page.
        least = Patch(transcript.rev, -1, {"turn_id": ""})
        await self.pages.scrub(self._key, transcript.epoch, [least, *count.values()], first=first)
        if self._open is put:
            self._open = None


def _mark_of(snapshot: Snapshot) -> tuple[str | None, Transcript | None]:
    return snapshot.version, snapshot.body.transcript
