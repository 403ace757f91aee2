"""One record as one operation meets it: its head, its parts, and what moves between the two.

Whatever is done here on the side of an operation (moving entries into a part, deleting parts that no head
names any more) changes no record, and may end halfway: what is left behind is parts that no head names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, TypeVar

from stm_backends.drivers.contract import KEEP, KeepType, Key, Record, new_version
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
    number,
    record_of,
    runs_of,
    text,
    values_of,
)

T = TypeVar("T")

ROUNDS: Final = 32
"""How often a record may change between two requests of one operation."""

_PAUSE_S: Final = 0.1
"""How long to wait before DynamoDB is asked again for deletes that it has put off, or for missing parts."""

_AT_ONCE: Final = 16
"""How many requests about parts one operation has under way at once."""


class Stored:
    """What an operation does to one record, judged at one instant, within the operation's deadline."""

    def __init__(self, requests: Requests, key: Key, *, now: float, sizes: Sizes) -> None:
        self.requests = requests
        self.key = key
        self.now = now
        self._sizes = sizes
        self.littered = False
        """Whether there may be parts that the head does not name."""
        self.has_parts = False
        """Whether the record has parts, as far as was seen."""

    async def item(self) -> Item:
        """Return the head's item as it is now, of an expired record too; `{}` if there is none."""
        return (await self.requests.send(statements.load(self.key))).get("Item", {})

    async def look(self, found: Item | None = None) -> Head | None:
        """Return the head of the living record, as it was just found or else as it is now."""
        item = found or await self.item()
        self.has_parts = "life" in item
        return head_of(item) if item and is_alive(item, self.now) else None

    async def load(self) -> Record | None:
        """Return the record. The head that is read first decides what it is; parts never change.

        A part that is missing was folded away, and then the head names it no more; or a transaction has just
        put it, which two reads may see one before and one after, and then it is there a moment later.
        """
        parts: dict[str, Item] = {}
        missed: set[str] = set()
        head = await self.look()
        for _ in range(ROUNDS):
            if head is None:
                return None
            if head.parts - parts.keys():
                parts |= {item["sk"]["S"]: item for item in await self._pages(names_only=False)}
            missing = head.parts - parts.keys()
            if not missing:
                self.littered = bool(parts.keys() - head.parts)
                return record_of(head, {name: values_of(parts[name]) for name in head.parts})
            if missing & missed:
                raise Corrupt("the record is not whole: a part is missing")
            head = await self.look()
            missed = missing & head.parts if head else set()
            if missed:
                await asyncio.sleep(_PAUSE_S)
        raise self.unsettled()

    async def admit(self, head: Head, size: int, ttl: float | None | KeepType) -> bool:
        """Make a record ready for a write that adds so many bytes and lets it live so long.

        Returns whether it was ready; if not, the head has to be read again. Raises `TooLarge`.
        """
        if size > 0 and head.size + size > self._sizes.record:
            raise TooLarge("record", size=head.size + size, limit=self._sizes.record)
        if self.keeps(head, ttl):
            return True
        kept = self.kept_of(None, ttl)
        for some in _batches(head.parts, _AT_ONCE):
            keeping = (statements.keep_part(self.key, part, kept=kept) for part in some)
            await asyncio.gather(*map(self.requests.attempt, keeping))
        await self.requests.attempt(statements.prolong(self.key, head=head, kept=kept))
        return False

    def keeps(self, head: Head, ttl: float | None | KeepType) -> bool:
        """Return whether the parts of a record are kept for as long as it will live."""
        if ttl is KEEP or head.kept is None:
            return True
        expires = end_of(ttl, self.now)
        return expires is not None and head.kept >= expires

    def of_parts(self, life: str, beside: int, kept: float | None) -> Item:
        """Return what the head of a record says that gets its first part."""
        return {
            "life": text(life),
            "seals": number(0),
            "beside": number(beside),
            **({} if kept is None else {"kept": number(kept)}),
            "readable_since": number(LAYOUT),
        }

    def kept_of(self, head: Head | None, ttl: float | None | KeepType) -> float | None:
        """Return until when a new part is kept: as the others, or as long as its record may live."""
        if head and head.life:
            return head.kept
        expires = end_of(ttl, self.now) if ttl is not KEEP else head.expires if head else None
        return kept_until(expires, self.now)

    async def write(
        self,
        part: str,
        values: Sequence[bytes],
        statement: statements.Statement,
        *,
        head: Head | None,
        kept: float | None,
    ) -> Answer:
        """Put a part, and write the head that names it; in one step if the record has no parts so far."""
        putting = statements.put_part(self.key, part, values, kept=kept)
        if head is None or not head.life:
            return await self.requests.attempt(statements.together(putting, statement))
        await self.requests.send(putting)
        answer = await self.requests.attempt(statement)
        if not answer.done:
            # A client may have sent it twice, and the head name the part; in another life only if it did so
            # before that began.
            self.littered = True
            found = await self.item()
            if found.get("life") != text(head.life) and not (found and part in head_of(found).parts):
                await self.aside(self._delete([part]))
        return answer

    async def mark(self, head: Head) -> None:
        """Say of a record without parts that it may have some; then its head has to be read again."""
        marks = self.of_parts(new_version(), 0, self.kept_of(head, KEEP))
        await self.requests.attempt(statements.mark(self.key, head=head, of_parts=marks))

    async def cut(self, head: Head, drop: int) -> Cut | None:
        """Return what a fold of so many entries does to a head's tail; `None` if that has moved on."""
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
        """Return whether a tail of so many places is to be looked at, by one of all who add to it."""
        crowd = self._sizes.crowd
        return places >= crowd and places % (crowd // 4) == 0

    async def seal(self, *, least: int) -> None:
        """Move the entries that stand in the head into parts, while they weigh at least so much.

        And small parts that are many into larger ones, so that the references do not become a load.
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
            if (await self.write(part, values, sealing, head=head, kept=kept)).done:
                await self.discard(head, after)

    async def finish_erasing(self, found: Item) -> None:
        """Delete the parts of a record that was erased, and then its head, which says so."""
        parts = await self._names()
        head = await self.item()
        # Another record may stand in its place by now, and parts may be its own.
        if "erased" in head and head.get("life") == found["life"]:
            await self._delete(parts)
            await self.requests.attempt(statements.bury(self.key, life=found["life"]))

    async def sweep(self) -> None:
        """Delete all parts that the record does not name, whoever has left them behind."""
        parts = await self._names()
        head = await self.item()
        named: set[str] = set()
        if "life" in head:
            # A part that was put already, and is not named yet, cannot become named after this.
            fenced = await self.requests.attempt(
                statements.fence(self.key, life=head["life"], new=new_version())
            )
            if not fenced.done:
                return
            named = head_of(fenced.content["Attributes"]).parts
        # Without a life, nothing that was listed before can become named: a first part comes with its head.
        await self._delete(set(parts) - named)

    async def replaced(self, before: Item) -> None:
        """Delete the parts of a head that has been replaced by one without parts."""
        if "life" in before:
            await self.aside(self.sweep())

    async def discard(self, before: Head, after: Head) -> None:
        """Delete the parts that a head named, and that the one in its place does not."""
        if gone := before.parts - after.parts:
            await self.aside(self._delete(gone))

    async def aside(self, work: Awaitable[None]) -> None:
        """Do what tidies up after a write that was done; that it fails is no failure of the write."""
        try:
            async with asyncio.timeout(self.requests.left_s / 2):
                await work
        except Exception as error:
            if not isinstance(error, (StorageError, TimeoutError)) and meaning(error) is None:
                raise

    def unsettled(self) -> Unavailable:
        """Return the error of an operation that the record changed under, again and again."""
        return Unavailable("the record changed between one request and the next, again and again")

    async def _some_parts(self, names: set[str]) -> dict[str, Sequence[bytes]] | None:
        """Return these parts; `None` if one is missing."""
        parts: dict[str, Sequence[bytes]] = {}
        for some in _batches(names, _AT_ONCE):
            loading = (self.requests.send(statements.load_part(self.key, name)) for name in some)
            for name, found in zip(some, await asyncio.gather(*loading), strict=True):
                if "Item" not in found:
                    return None
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
            await asyncio.gather(*map(self._delete_batch, some))

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
