"""Shortening a transcript: its oldest turns are removed.

The body of the record says first that they are gone, in `first`; then their pages are removed. An
interruption leaves pages that no reader asks for, and the next shortening removes them. A page that is below
`first` as a whole cannot grow. One that still can is never deleted: the entries that go are dropped from it.

Turns that no summary covers yet stay, so that the next summary covers them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple, TypeAlias

from stm_backends.drivers.contract import Driver, Key, Record, version_after
from stm_backends.errors import located
from stm_backends.records import keys, ledger, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.pages import Copy, Pages

MayGo: TypeAlias = Callable[[Mapping[int, Copy]], bool]
"""Says whether the remaining turns of one page, by number, may be removed."""


class Bodies(NamedTuple):
    """Two functions for a kind of record: one reads the transcript in a body, one puts another into it."""

    transcript_of: Callable[[bytes | None], Transcript | None]
    with_transcript: Callable[[bytes | None, Transcript], bytes]


class Shortening:
    """Shortens the transcripts of a backend. With `dry_run`, only counts and writes nothing."""

    def __init__(self, driver: Driver, codec: Codec, *, dry_run: bool = False) -> None:
        self._driver = driver
        self._codec = codec
        self._pages = Pages(driver, codec)
        self._dry_run = dry_run

    async def by_page(self, key: Key, bodies: Bodies, transcript: Transcript, may_go: MayGo) -> int:
        """Remove pages from the oldest one on, while `may_go` says so; returns how many."""
        first, end = transcript.first, transcript.summarized
        async for page, _ in self._stored(key, transcript.epoch):
            start, stop = page * pages.TURNS, min((page + 1) * pages.TURNS, end)
            if stop <= first:
                continue
            if start >= end or not may_go(
                await self._pages.between(key, transcript, max(start, first), stop)
            ):
                break
            first = stop
        return await self.to(key, bodies, transcript, first)

    async def to(self, key: Key, bodies: Bodies, transcript: Transcript, first: int) -> int:
        """Remove all turns below a number, unless no summary covers them; returns how many pages had some.

        Does nothing if the record has another transcript meanwhile.
        """
        first = max(transcript.first, min(first, transcript.summarized))
        if not self._dry_run and not await self._raise(key, bodies, transcript, first):
            return 0
        return await self.removed_below(key, transcript.epoch, first)

    async def removed_below(self, key: Key, epoch: str, first: int) -> int:
        """Remove the turns of pages below the first number of the record; returns the same as `to`."""
        count = 0
        async for page, name in self._stored(key, epoch):
            if page * pages.TURNS >= first:
                break
            where = Key(keys.pages_of(key).scope, name)
            if self._dry_run:
                count += 1
            elif (page + 1) * pages.TURNS <= first:
                count += await ledger.erase(self._driver, where)
            else:
                count += await self._empty(where, first)
        return count

    async def _stored(self, key: Key, epoch: str) -> AsyncIterator[tuple[int, str]]:
        """Yield the stored pages of an epoch and their names; one that has spilled comes repeatedly."""
        scope, prefix = keys.pages_of_epoch(key, epoch)
        async for name in operations.names_of(self._driver, scope, prefix):
            yield keys.page_number(name), name

    async def _raise(self, key: Key, bodies: Bodies, transcript: Transcript, first: int) -> bool:
        """Say in the body of the record that turns below a number are gone; whether it says so now."""

        async def raised(record: Record | None) -> tuple[ledger.Change | None, bool]:
            body = None if record is None else record.body
            with located(self._driver.name, "shorten"):
                found = bodies.transcript_of(body)
            # Removals from a log may have taken it below the number since this was decided.
            if record is None or found is None or found.epoch != transcript.epoch or found.summarized < first:
                return None, False
            if found.first >= first:
                return None, True
            shorter = dataclasses.replace(found, first=first)
            version = version_after(record.version)
            return ledger.Change(bodies.with_transcript(body, shorter), version=version), True

        return bool(await ledger.update(self._driver, key, raised))

    async def _empty(self, where: Key, first: int) -> bool:
        """Drop the entries of a page that may grow whose turns are all below a number; whether any were."""

        async def emptied(record: Record | None) -> tuple[ledger.Change | None, bool]:
            if record is None:
                return None, False
            body, *tail = self._pages.opened(
                record if record.body else dataclasses.replace(record, body=nothing)
            )
            below = [one["first"] + len(one["turns"]) <= first for one in tail]
            drop = below.index(False) if False in below else len(below)
            if not drop or body["turns"]:
                return None, False
            return ledger.Change(nothing, drop=min(drop, self._driver.traits.max_drop)), True

        nothing = self._pages.nothing()
        unchanged = ledger.unchanged_by(lambda _: nothing)
        done = False
        while await ledger.update(self._driver, where, emptied, unchanged=unchanged):
            done = True
        return done
