"""Where the turns of one conversation go that leave its record; see `records.pages`.

`SharedConversation.replace` calls this around every write that drops turns, so that none leaves the record
before a page has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from stm_backends.drivers.contract import Driver, Key
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import pages
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.pages import Leaving, Pages


class _Put(NamedTuple):
    """What was put into pages and is not known to have left the record."""

    before: Transcript
    leaving: Sequence[Leaving]


class Archive:
    """The pages of one conversation as this process writes them. `ttl` is the time to live of pages."""

    __slots__ = ("_codec", "_driver", "_key", "_open", "pages", "ttl")

    def __init__(self, driver: Driver, key: Key, codec: Codec, pages: Pages) -> None:
        self._driver = driver
        self._key = key
        self._codec = codec
        self._open: _Put | None = None
        self.pages = pages
        self.ttl: float | None = None

    def leaving(self, snapshot: Snapshot, body: Body) -> Sequence[Leaving]:
        """Return the turns that leave a record as a body is stored there, if it keeps a transcript."""
        before, after = snapshot.body.transcript, body.transcript
        count = 0 if before is None or after is None else after.base - before.base
        entries = (snapshot.tail[start] for start in snapshot.starts[:count])
        return [
            Leaving(stored.id, self._codec.open_encoded("turn", entry))
            for stored, entry in zip(snapshot.turns[:count], entries, strict=True)
        ]

    async def put(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        """Store turns that are about to leave the record that was read."""
        before = snapshot.body.transcript
        if before is None or not leaving:
            return
        known = self._known(before, leaving)
        self._open = _Put(before, leaving[:known])
        rest = before.moved([one.id for one in leaving[:known]], summarized=True)
        await self.pages.put(self._key, rest, leaving[known:], summary=snapshot.body.summary, ttl=self.ttl)
        self._open = _Put(before, leaving)

    def _known(self, before: Transcript, leaving: Sequence[Leaving]) -> int:
        """Return how many of these turns this process has put there under the same numbers."""
        put = self._open
        if put is None or (put.before.epoch, put.before.rev, put.before.base) != (
            before.epoch,
            before.rev,
            before.base,
        ):
            return 0
        pairs = zip(put.leaving, leaving, strict=False)
        return next(
            (count for count, (one, other) in enumerate(pairs) if one != other),
            min(len(put.leaving), len(leaving)),
        )

    async def left(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        """Note that the turns have left the record, and rewrite the pages that are full now."""
        before = snapshot.body.transcript
        self._open = None
        if before is not None:
            await self.pages.complete(self._key, before, leaving)

    async def tidy(self, snapshot: Snapshot, load: Callable[[], Awaitable[Snapshot]]) -> None:
        """Remove what this process has put into pages of a record that is not there any more.

        An erasure removes the record and then the pages; it may have come between the pages and the write of
        the record that did not find it. Pages that a record may refer to stay: what they have is a copy.
        """
        put = self._open
        if put is None or _may_refer(snapshot, put.before.epoch):
            return

        async def refers() -> bool:
            return _may_refer(await load(), put.before.epoch)

        if await pages.erase_dead(self._driver, self._key, put.before.epoch, refers):
            self._open = None


def _may_refer(snapshot: Snapshot, epoch: str) -> bool:
    return pages.may_refer(snapshot.version, snapshot.body.transcript, epoch)
