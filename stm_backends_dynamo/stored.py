"""One record during one operation: its head, its parts, and the moves between them.

Maintenance after an operation (moving entries into a part, deleting parts that no head names) changes no
record. It may be interrupted, which leaves only parts that no head names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, TypeVar

from stm_backends.drivers.contract import KEEP, KeepType, Key, Record, new_version
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import Corrupt, StorageError, TooLarge, Unavailable
from stm_backends_dynamo import statements
from stm_backends_dynamo.client import Answer, Requests
from stm_backends_dynamo.errors import meaning
from stm_backends_dynamo.items import (
    LAYOUT,
    Cut,
    Head,
    Item,
    Reference,
    Sizes,
    crowd_of,
    cut_of,
    end_of,
    entries_of,
    head_of,
    is_alive,
    kept_until,
    new_part,
    newest_of,
    number,
    record_of,
    runs_of,
    text,
    values_of,
)
from stm_backends_dynamo.parts import Parts

T = TypeVar("T")

ROUNDS: Final = 32
"""Maximum number of rounds of an operation if the record changes between two requests."""

_PAUSE_S: Final = 0.1
"""Pause before retrying unprocessed deletes or reads of missing parts, in seconds."""

_AT_ONCE: Final = 16
"""Maximum number of concurrent requests for parts in one operation."""


class Stored:
    """The requests of one operation on one record, with expiry decided at one point in time."""

    def __init__(self, requests: Requests, key: Key, *, now: float, sizes: Sizes, parts: Parts) -> None:
        self.requests = requests
        self.key = key
        self.now = now
        self._sizes = sizes
        self._parts = parts
        self.littered = False
        """True if parts may exist that the head does not name."""
        self.has_parts = False
        """True if the last look at the record found parts."""

    async def item(self) -> Item:
        """Return the head's current item, even if it has expired; `{}` if it does not exist."""
        return (await self.requests.send(statements.load(self.key))).get("Item", {})

    async def look(self, found: Item | None = None) -> Head | None:
        """Return the head of the live record, from the given item, or else read now."""
        item = found or await self.item()
        self.has_parts = "life" in item
        return head_of(item) if item and is_alive(item, self.now) else None

    async def load(self, item: Item, last: int | None = None) -> Record | None:
        """Return the record of a head that was just read. The head decides its content; parts never change.

        A part is missing if it was folded away, in which case the head no longer names it, or if a
        transaction put it between the two reads, in which case it is visible a moment later. With `last`,
        reads only the parts with that many of the newest entries, one by one.
        """
        listed: set[str] = set()
        missed: set[str] = set()
        head = await self.look(item) if item else None
        for _ in range(ROUNDS):
            if head is None:
                return None
            wanted = head if last is None else newest_of(head, last)
            parts = self._parts.of(self.key, wanted.parts)
            if last is not None:
                parts |= await self._read(wanted.parts - parts.keys())
                self._parts.keep(self.key, parts)
            elif head.parts - parts.keys():
                items = {item["sk"]["S"]: item for item in await self._pages(names_only=False)}
                listed |= items.keys()
                parts |= {name: values_of(items[name]) for name in head.parts & items.keys()}
                self._parts.keep(self.key, parts)
            missing = wanted.parts - parts.keys()
            if not missing:
                self.littered = bool(listed - head.parts)
                return record_of(wanted, parts, last)
            if missing & missed:
                raise Corrupt("the record is incomplete: a part is missing")
            head = await self.look()
            missed = missing & head.parts if head else set()
            if missed:
                await asyncio.sleep(_PAUSE_S)
        raise self.unsettled()

    async def admit(self, head: Head, size: int, ttl: float | None | KeepType) -> bool:
        """Prepare a record for a write that adds `size` bytes and sets its time to live to `ttl`.

        Returns whether the record was ready; otherwise the head must be read again. Raises `TooLarge`.
        """
        if size > 0 and head.size + size > self._sizes.record:
            raise TooLarge("record", size=head.size + size, limit=self._sizes.record)
        if self.keeps(head, ttl):
            return True
        kept = self.kept_of(None, ttl)
        for some in _batches(head.parts, _AT_ONCE):
            keeping = (statements.keep_part(self.key, part, kept=kept) for part in some)
            await all_of(map(self.requests.attempt, keeping))
        await self.requests.attempt(statements.prolong(self.key, head=head, kept=kept))
        return False

    def keeps(self, head: Head, ttl: float | None | KeepType) -> bool:
        """Return whether the parts of a record are kept until it expires."""
        if ttl is KEEP or head.kept is None:
            return True
        expires = end_of(ttl, self.now)
        return expires is not None and head.kept >= expires

    def of_parts(self, life: str, beside: int, kept: float | None) -> Item:
        """Return the attributes for the head of a record that gets its first part."""
        return {
            "life": text(life),
            "seals": number(0),
            "beside": number(beside),
            **({} if kept is None else {"kept": number(kept)}),
            "readable_since": number(LAYOUT),
        }

    def kept_of(self, head: Head | None, ttl: float | None | KeepType) -> float | None:
        """Return the time until which a new part is kept: that of the other parts, or the record's expiry."""
        if head and head.life:
            return head.kept
        expires = end_of(ttl, self.now) if ttl is not KEEP else head.expires if head else None
        return kept_until(expires, self.now)

    async def write(
        self,
        parts: Mapping[str, Sequence[bytes]],
        statement: statements.Statement,
        *,
        head: Head | None,
        kept: float | None,
    ) -> Answer:
        """Put parts, and write the head that names them; for a first part, in one transaction."""
        puts = [statements.put_part(self.key, part, values, kept=kept) for part, values in parts.items()]
        if head is None or not head.life:
            answer = await self.requests.attempt(statements.together(*puts, statement))
        else:
            for some in _batches(puts, _AT_ONCE):
                await all_of(map(self.requests.send, some))
            answer = await self.requests.attempt(statement)
        if answer.done:
            self._parts.keep(self.key, {part: tuple(values) for part, values in parts.items()})
        elif head is not None and head.life:
            # The client may have sent it twice, so that the head already names the parts.
            self.littered = True
            found = await self.item()
            if found.get("life") != text(head.life):
                named = head_of(found).parts if found else set[str]()
                await self.aside(self._delete(parts.keys() - named))
        return answer

    async def mark(self, head: Head) -> None:
        """Mark the head of a record without parts before the first one. It must then be read again."""
        marks = self.of_parts(new_version(), 0, self.kept_of(head, KEEP))
        await self.requests.attempt(statements.mark(self.key, head=head, of_parts=marks))

    async def cut(self, head: Head, drop: int) -> Cut | None:
        """Return the effect of a fold of `drop` entries on a head's tail; `None` if the tail has changed."""
        cut = cut_of(head, drop)
        if cut.rest is None:
            return cut
        parts = await self._some_parts({cut.rest.part})
        if parts is None:
            return None
        entries = parts[cut.rest.part][cut.rest.first : cut.rest.first + cut.rest.length]
        rest = cut.rest._replace(size=sum(map(len, entries)))
        return Cut(cut.places, rest, (rest, *cut.left[1:]))

    def is_crowded(self, places: int) -> bool:
        """Return whether this append, one of many, should compact a tail of this many places."""
        crowd = self._sizes.crowd
        return places >= crowd and places % (crowd // 4) == 0

    async def seal(self, *, least: int) -> None:
        """Move entries from the head into parts while they weigh at least `least`.

        Many small parts are merged into larger ones, to keep the references small.
        """
        for _ in range(ROUNDS):
            head = await self.look()
            if head is None:
                return
            runs = crowd_of(head, self._sizes) or runs_of(head, self._sizes, least=least)
            if not runs:
                return
            part = new_part()
            values: list[bytes] = []
            sealed: dict[int, Reference] = {}
            emptied: set[int] = set()
            parts = await self._some_parts(
                {one.part for _, run in runs for one in run if isinstance(one, Reference)}
            )
            if parts is None:
                continue
            for place, run in runs:
                found = entries_of(run, parts)
                sealed[place] = Reference(part, len(values), len(found), sum(map(len, found)))
                emptied |= {*range(place + 1, place + len(run))}
                values += found
            tail = [sealed.get(place, one) for place, one in enumerate(head.tail) if place not in emptied]
            after = replace(head, tail=tuple(tail))
            kept = self.kept_of(head, KEEP)
            sealing = statements.seal(
                self.key,
                after,
                head=head,
                sealed=sealed,
                emptied=sorted(emptied),
                of_parts=self.of_parts(new_version(), after.in_parts, kept),
            )
            if (await self.write({part: values}, sealing, head=head, kept=kept)).done:
                await self.discard(head, after)

    async def finish_erasing(self, found: Item) -> None:
        """Delete the parts of an erased record, and then its head, which is marked as erased."""
        parts = await self._names()
        head = await self.item()
        # By now the key may have a new record, with its own parts.
        if "erased" in head and head.get("life") == found["life"]:
            await self._delete(parts)
            await self.requests.attempt(statements.bury(self.key, life=found["life"]))

    async def sweep(self) -> None:
        """Delete all parts that the record does not name."""
        parts = await self._names()
        head = await self.item()
        named: set[str] = set()
        if "life" in head:
            # A part that was already put but is not named yet cannot become named after this.
            fenced = await self.requests.attempt(
                statements.fence(self.key, life=head["life"], new=new_version())
            )
            if not fenced.done:
                return
            named = head_of(fenced.content["Attributes"]).parts
        # Without `life`, no listed part can become named: a first part is put together with its head.
        await self._delete(set(parts) - named)

    async def replaced(self, before: Item) -> None:
        """Delete the parts of a head that was replaced by one without parts."""
        if "life" in before:
            await self.aside(self.sweep())

    async def discard(self, before: Head, after: Head) -> None:
        """Delete the parts that the old head named and the new one does not."""
        if gone := before.parts - after.parts:
            await self.aside(self._delete(gone))

    async def aside(self, work: Awaitable[None]) -> None:
        """Clean up after a write that was done; a failure here does not make the write fail."""
        try:
            async with asyncio.timeout(self.requests.left_s / 2):
                await work
        except Exception as error:
            if not isinstance(error, (StorageError, TimeoutError)) and meaning(error) is None:
                raise

    def unsettled(self) -> Unavailable:
        """Return the error of an operation whose record kept changing between its requests."""
        return Unavailable("the record kept changing between the requests of the operation")

    async def _some_parts(self, names: set[str]) -> dict[str, Sequence[bytes]] | None:
        """Return the named parts; `None` if one is missing."""
        parts = self._parts.of(self.key, names)
        parts |= await self._read(names - parts.keys())
        return parts if parts.keys() == names else None

    async def _read(self, names: set[str]) -> dict[str, Sequence[bytes]]:
        """Return the existing ones of the named parts."""
        parts: dict[str, Sequence[bytes]] = {}
        for some in _batches(names, _AT_ONCE):
            loading = (self.requests.send(statements.load_part(self.key, name)) for name in some)
            for name, found in zip(some, await all_of(loading), strict=True):
                if "Item" in found:
                    parts[name] = values_of(found["Item"])
        return parts

    async def _names(self) -> list[str]:
        return [item["sk"]["S"] for item in await self._pages(names_only=True)]

    async def _pages(self, *, names_only: bool) -> list[Item]:
        items: list[Item] = []
        after: Item | None = None
        while True:
            query = statements.load_parts(self.key, after=after, names_only=names_only)
            page = await self.requests.send(query)
            items += page["Items"]
            after = page.get("LastEvaluatedKey")
            if after is None:
                return items

    async def _delete(self, parts: Iterable[str]) -> None:
        batches = [statements.delete_parts(self.key, some) for some in _batches(parts, statements.MAX_BATCH)]
        for some in _batches(batches, _AT_ONCE):
            await all_of(map(self._delete_batch, some))

    async def _delete_batch(self, batch: statements.Statement) -> None:
        while batch.arguments["requests"]:
            unprocessed: dict[str, list[Item]] = (await self.requests.send(batch)).get("UnprocessedItems", {})
            left = [request for requests in unprocessed.values() for request in requests]
            batch = statements.Statement("batch_write_item", {"requests": left})
            if left:
                await asyncio.sleep(_PAUSE_S)


def _batches(them: Iterable[T], count: int) -> Iterator[list[T]]:
    rest = iter(them)
    while batch := list(islice(rest, count)):
        yield batch
