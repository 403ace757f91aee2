"""The index of a graph in a datastore; see `postings` for its records, and why it is never behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.errors import StorageError, located
from stm_backends.records import keys, ledger, operations, postings
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory

logger = logging.getLogger("stm_backends")


class Index:
    """The vertices of one owner's graph by their terms."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, owner: tuple[str, str]) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._owner = owner

    async def add(self, stamp: str, vertex_id: str, terms: frozenset[str]) -> None:
        """Add the terms of a vertex under a stamp."""
        await self._append(terms, lambda some: postings.seal_added(stamp, vertex_id, some, self._codec))

    async def drop(self, stamps: Mapping[str, frozenset[str]], *, fold: bool = False) -> None:
        """Remove the terms of stamps. A failure is only logged, because searches ignore leftovers.

        With `fold`, removes them from the tails of their buckets, too.
        """
        try:
            for stamp, terms in stamps.items():
                await self._append(terms, lambda _, stamp=stamp: postings.seal_dropped(stamp, self._codec))
                if fold:
                    await operations.together(list(postings.by_bucket(terms)), self._fold)
        except StorageError as error:
            logger.warning("could not remove words from the index of a graph: %s", error)

    async def ids(self, terms: frozenset[str]) -> list[str]:
        """Return the ids of the vertices with all of the terms, last indexed first.

        Some of the vertices may no longer be stored, or no longer have these terms.
        """

        async def of(bucket: tuple[int, list[str]]) -> list[dict[str, str]]:
            number, some = bucket
            found = (await self._read(number)).terms
            return [found.get(term, {}) for term in some]

        pages = await operations.together(list(postings.by_bucket(terms).items()), of)
        return postings.with_all([found for page in pages for found in page])

    async def counts(self) -> Counter[str]:
        """Return the number of terms of each stamp."""
        found: Counter[str] = Counter()
        for number in range(postings.BUCKETS):
            for stamps in (await self._read(number)).terms.values():
                found.update(stamps.keys())
        return found

    async def drop_unless(self, is_used: Callable[[str], bool]) -> None:
        """Remove the stamps for which `is_used` is false, and leftovers of stamps removed before."""
        for number in range(postings.BUCKETS):
            unused = {
                stamp: frozenset([term])
                for term, stamps in (await self._read(number)).terms.items()
                for stamp in stamps
                if not is_used(stamp)
            }
            await self.drop(unused)
            # Until then, the words of removed vertices are in the tail.
            await self._fold(number)

    async def _fold(self, number: int) -> None:
        await ledger.fold_tail(self._driver, self._at(number), self._body_of)

    def _body_of(self, record: Record) -> bytes:
        return postings.seal(postings.read(record, self._codec), self._codec)

    def _at(self, number: int) -> Key:
        return keys.postings_key(*self._owner, number)

    async def _read(self, number: int) -> postings.Bucket:
        record = await self._driver.load(self._at(number))
        with located(self._driver.name, "search"):
            return postings.read(record, self._codec)

    async def _append(self, terms: frozenset[str], seal: Callable[[list[str]], bytes]) -> None:
        async def add(bucket: tuple[int, list[str]]) -> bool:
            number, some = bucket
            where, entry = self._at(number), seal(some)
            appended = await ledger.append_and_fold(self._driver, where, entry, self._body_of)
            return appended.created

        async with self._directory.listed(self._owner) as listing:
            listing.created = any(await operations.together(list(postings.by_bucket(terms).items()), add))
