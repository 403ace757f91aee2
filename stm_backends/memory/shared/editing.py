"""Edits of a conversation: messages leave the view, and each edit ends with one conditional write.

Messages that leave the view are first put into pages, where they keep their numbers under the revision that
ends. Then one `replace` of the record determines what stays, and raises `rev`: of two copies with one number
in a page, the one with the higher `rev` is newer. So a process that ends before that write has changed
nothing, and readers see the conversation either before or after the edit.

Entries cannot be dropped at the end of a record. An entry that goes is rewritten as a short empty one, whose
id is remembered like that of an entry that has left; the next fold drops it. So a concurrent append stays, as
the next message.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from stm_backends import races
from stm_backends.drivers.contract import Key
from stm_backends.errors import (
    EditConflict,
    MessageNotFound,
    OutcomeUnknown,
    SessionExists,
    StorageError,
    Unavailable,
)
from stm_backends.memory import policy, speech
from stm_backends.memory.policy import Trim
from stm_backends.memory.shared.maintenance import Maintenance
from stm_backends.memory.shared.reading import bounds_of
from stm_backends.memory.shared.snapshot import Snapshot, id_of, with_usage_of
from stm_backends.memory.units import (
    Messages,
    counted,
    read_units,
    seal_nothing,
    seal_units,
    stored_unit,
    unit_content,
)
from stm_backends.plain_json import encode_json
from stm_backends.races import Lost
from stm_backends.records import ledger, operations, pages
from stm_backends.records.body import REMEMBERED_IDS, Body, Branch, Forgotten, Fork, Patch, Transcript, digest
from stm_backends.records.codec import Codec
from stm_backends.records.large.pointers import new_id
from stm_backends.records.ledger import Creation
from stm_backends.records.pages import Copy, Leaving, Pages
from stm_backends.types import ShortTermMemoryConfig, StoredTurn, as_turn_id

logger = logging.getLogger("stm_backends")

_PAGES_READ: Final = (2, 16)
"""Pages before a place that are read to continue there, and their number if these have too few turns."""


_AT_ONCE: Final = 8
"""Number of pages that are copied at once."""


class Tail(NamedTuple):
    """The replacements of the oldest entries of a record, and the ids of those that are empty then."""

    rewrite: Sequence[bytes]
    gone: Sequence[str]


class Restored(NamedTuple):
    """The content of the record of a conversation that continues at an earlier place.

    `units` have numbers from `first` on, and `last` is the short hash of the id before. `summary` covers what
    is before `upto`, and `asked` is the question of a turn that continues in them. The usage of units from
    pages is `counted`.
    """

    first: int
    units: Sequence[StoredTurn]
    last: str = ""
    summary: str = ""
    upto: int = 0
    asked: Mapping[str, Any] | None = None


def within_tail(snapshot: Snapshot, count: int, codec: Codec, *, most: int) -> Tail | None:
    """Return the tail in which only the oldest `count` units are left, with up to `most` entries rewritten.

    `None` if more entries would have to be.
    """
    units: dict[int, list[tuple[bool, StoredTurn]]] = {}
    for place, (start, unit) in enumerate(zip(snapshot.starts, snapshot.turns, strict=True)):
        units.setdefault(start, []).append((place < count, unit))
    whole = (snapshot.opened[start] for start, some in units.items() if all(stays for stays, _ in some))
    ids = {*map(id_of, whole)}
    entries, gone, changed = list[bytes](), list[str](), 0
    for place, (entry, data) in enumerate(zip(snapshot.opened, snapshot.tail, strict=True)):
        if isinstance(entry, str) or entry.id in ids:
            entries.append(data)
            continue
        stays = [unit for is_left, unit in units.get(place, ()) if is_left]
        entries.append(seal_units(codec, as_turn_id(None), stays) if stays else seal_nothing(codec, entry.id))
        gone.append(entry.id)
        changed = place + 1
        if stays and changed > most:
            return None
    return Tail(entries[: min(changed, most)], gone)


def of_units(snapshot: Snapshot, units: Sequence[StoredTurn], codec: Codec, *, most: int) -> Tail:
    """Return the tail that holds only these units, with up to `most` entries rewritten.

    As far as there are enough entries, each turn has one, so that it can leave by itself.
    """
    places = min(len(snapshot.tail), most)
    turns: list[list[StoredTurn]] = []
    for unit in units:
        if not turns or (unit.begins and len(turns) < places):
            turns.append([])
        turns[-1].append(unit)
    gone = [*map(id_of, snapshot.opened)]
    entries = [seal_units(codec, as_turn_id(None), turn) for turn in turns]
    return Tail([*entries, *(seal_nothing(codec, one) for one in gone[len(entries) : places])], gone)


def with_changes(
    snapshot: Snapshot,
    base: int,
    after: Mapping[int, StoredTurn],
    gone: Iterable[StoredTurn],
    codec: Codec,
    *,
    most: int,
) -> Tail | None:
    """Return the tail, which begins at `base`, with other units, and without the content of the `gone` ones.

    It may also be in repeats and checkpoints. `None` if more than `most` entries would be rewritten.
    """
    units: dict[int, list[StoredTurn]] = {}
    changed = set[int]()
    for number, (start, unit) in enumerate(zip(snapshot.starts, snapshot.turns, strict=True), base):
        units.setdefault(start, []).append(after.get(number, unit))
        if number in after:
            changed.add(start)
    ids = {unit.entry for unit in gone}
    ids |= {one.answer for start in changed if isinstance(one := snapshot.opened[start], Messages)}
    entries, left, count = list[bytes](), list[str](), 0
    for place, (entry, data) in enumerate(zip(snapshot.opened, snapshot.tail, strict=True)):
        answer = entry.answer if isinstance(entry, Messages) else id_of(entry)
        if place not in changed and (place in units or ids.isdisjoint((answer, id_of(entry)))):
            entries.append(data)
            continue
        stays, count = units.get(place), place + 1
        entries.append(
            seal_units(codec, as_turn_id(None), stays) if stays else seal_nothing(codec, id_of(entry))
        )
        left.append(id_of(entry))
    return Tail(entries[:count], left) if count <= most else None


def _is_empty(snapshot: Snapshot) -> bool:
    """Say whether no conversation exists, or only the leftovers of an interrupted copy."""
    return not snapshot.turns and replace(snapshot.body, messages=False) == Body()


class Editing:
    """The edits of one conversation by this process; see `Conversation` for what each of them promises."""

    def __init__(self, maintenance: Maintenance) -> None:
        self._maintenance = maintenance
        self._shared = maintenance.shared
        self._pages: Pages = self._shared.archive.pages
        self._key: Key = self._shared.key

    async def rewind(self, to: int, *, revision: int | None) -> None:
        """Continue after the number `to`; see `Conversation.rewind`."""

        async def attempt(snapshot: Snapshot, transcript: Transcript) -> bool | Lost:
            oldest, end = bounds_of(snapshot)
            if not oldest - 1 <= to < end:
                raise MessageNotFound("the conversation has no message with this number")
            if to == end - 1:
                return False
            most = self._shared.driver.traits.max_drop
            restored, tail = await self._restored(snapshot, transcript, to), None
            if restored.first == transcript.base:
                tail = within_tail(snapshot, len(restored.units), self._shared.codec, most=most)
            if tail is None:
                tail = of_units(snapshot, restored.units, self._shared.codec, most=most)
            return await self._rewound(snapshot, restored, tail, to)

        await self._edit("rewind", attempt, at=to, revision=revision)

    async def change(
        self,
        first: int,
        end: int,
        change: Callable[[StoredTurn], StoredTurn],
        *,
        operation: str,
        revision: int | None,
    ) -> None:
        """Change the content of units; see `Conversation.replace` and `remove`.

        From the write of the record on, every process sees the change: a patch there replaces the content in
        a page. Then the pages are rewritten, and the patch is removed.
        """

        async def attempt(snapshot: Snapshot, transcript: Transcript) -> bool | Lost:
            oldest, stop = bounds_of(snapshot)
            if not oldest <= first < end <= stop:
                raise MessageNotFound("the conversation has no message with this number")
            base = transcript.base
            before = await read_units(self._pages, self._key, transcript, first, min(end, base))
            before |= {n: snapshot.turns[n - base] for n in range(max(first, base), end)}
            if len(before) < end - first:
                raise MessageNotFound("the message with this number is no longer stored")
            after = {number: change(unit) for number, unit in before.items()}
            after = {number: unit for number, unit in after.items() if unit != before[number]}
            if not after:
                return False
            most = self._shared.driver.traits.max_drop
            gone = [before[number] for number in after]
            tail = with_changes(snapshot, base, after, gone, self._shared.codec, most=most)
            if tail is None:
                # Others first: one write does not reach it.
                count = snapshot.cut(
                    snapshot.within(snapshot.turns, most), len(snapshot.turns), max_drop=most
                )
                await self._maintenance.trim(snapshot, Trim(count, lost=True))
                return Lost(snapshot.version)
            confirmed = await self._maintenance.confirmed(snapshot, len(tail.rewrite))
            transcript = (confirmed and confirmed.body.transcript) or transcript
            if confirmed is None:
                return Lost(snapshot.version)
            body = await self._changed(confirmed.body, transcript, before, after)
            forgotten = body.forgotten.adding(
                [one for one in dict.fromkeys(tail.gone) if one not in body.forgotten],
                now=self._shared.clock(),
                keep_for=self._maintenance.keep_ids_for,
                copies={*map(id_of, snapshot.opened)},
            )
            body = replace(body, forgotten=forgotten, messages=True)
            done = await self._shared.edit(confirmed, body, tail.rewrite)
            return True if done else Lost(confirmed.version)

        await self._edit(operation, attempt, at=first, revision=revision)

    async def _changed(
        self,
        body: Body,
        transcript: Transcript,
        before: Mapping[int, StoredTurn],
        after: Mapping[int, StoredTurn],
    ) -> Body:
        """Return the body after units were changed: a summary that may have their old content is removed."""
        rev, first = transcript.rev + 1, min(after)
        patches = [
            Patch(rev, number, unit_content(unit) if number < transcript.base else {"turn_id": unit.id})
            for number, unit in after.items()
        ]
        left = replace(transcript, rev=rev, patches=tuple(patches))
        body = replace(body, lead=await self._lead(body, transcript, before, after))
        if body.asked is not None:
            body = replace(body, asked=await self._asked(body.asked, transcript, before, after))
        if first < transcript.summarized and self._config.strategy == "rolling_summary":
            summary, upto = await self._checkpoint(left, first, {})
            left = left.caught_up(upto)
            folded, dropped = max(0, upto - body.dropped), min(body.dropped, upto)
            body = policy.after_recovery(
                replace(body, summary=summary, folded=folded, dropped=dropped, title="")
            )
        return replace(body, transcript=left)

    async def _lead(
        self,
        body: Body,
        transcript: Transcript,
        before: Mapping[int, StoredTurn],
        after: Mapping[int, StoredTurn],
    ) -> tuple[Mapping[str, Any], ...]:
        """Return the instructions that have left the record, as they are now."""
        lead = [*body.lead]
        for number, unit in after.items():
            old, new = before[number].said, unit.said
            if number >= transcript.base or old is None or new is None or old.message not in lead:
                continue
            earlier = await read_units(self._pages, self._key, transcript, transcript.first, number)
            if not any(one.begins for one in earlier.values()):
                place = lead.index(old.message)
                lead[place : place + 1] = [new.message] if new.message else []
        return tuple(lead)

    async def _asked(
        self,
        asked: Mapping[str, Any],
        transcript: Transcript,
        before: Mapping[int, StoredTurn],
        after: Mapping[int, StoredTurn],
    ) -> Mapping[str, Any] | None:
        """Return the question of the turn that continues in the record, as it is now."""
        for number, unit in after.items():
            old, new = before[number].said, unit.said
            if number >= transcript.base or old is None or new is None or old.message != asked:
                continue
            later = await read_units(self._pages, self._key, transcript, number + 1, transcript.base)
            if not any(one.begins for one in later.values()):
                return new.message or None
        return asked

    async def _edit(
        self,
        operation: str,
        attempt: Callable[[Snapshot, Transcript], Awaitable[bool | Lost]],
        *,
        at: int,
        revision: int | None,
    ) -> None:
        """Load the conversation and make an attempt, again while others add to it or summarize it.

        Raises `EditConflict` if another edit has come first, or if the number `at` has another unit.
        """
        seen: tuple[str | None, int, str] | None = None

        async def edited() -> bool | Lost:
            nonlocal seen
            found = await self._maintenance.mended(operation)
            snapshot = found.transcribed().unleased()
            transcript = snapshot.body.transcript or Transcript("")
            # Before the first message, that one is compared.
            place = max(at, transcript.first) - transcript.base
            unit = snapshot.turns[place].id if 0 <= place < len(snapshot.turns) else ""
            began = found.body.transcript and found.body.transcript.epoch
            before, seen = seen, (began, transcript.rev, unit)
            is_other = before is not None and (
                before[1] != transcript.rev
                or (before[0] is not None and before[0] != began)
                or (before[2] and unit and before[2] != unit)
            )
            if is_other or (revision is not None and revision != transcript.rev):
                raise EditConflict("another edit of the conversation came first; read it again")
            return await attempt(snapshot, transcript)

        try:
            done = await races.contend(edited)
        except OutcomeUnknown:
            self._maintenance.touch(reset=True)
            raise
        if done is None:
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self._shared.driver.name,
                operation=operation,
            )
        if done:
            # A list does not show messages that left the view.
            self._maintenance.touch(reset=True)
            await self._finish(operation)
            self._maintenance.notice(self._shared.seen)

    async def _finish(self, operation: str) -> None:
        """Finish an edit that others already see.

        This comes before a fold begins, because each would lose races to the other.
        """
        transcript = self._shared.seen.body.transcript
        if transcript is None or not transcript.patches:
            return
        try:
            await self._maintenance.mended(operation)
        except StorageError as error:
            logger.warning(
                "an edit is done, but the former content is not removed yet; the next process that looks "
                "removes it: %s (conversation %s)",
                error,
                self._shared.log_name,
            )

    async def _rewound(self, snapshot: Snapshot, restored: Restored, tail: Tail, to: int) -> bool | Lost:
        """Put later units into pages, and store the rest; `Lost` if the record has changed."""
        shared = self._shared
        confirmed = await self._maintenance.confirmed(snapshot, len(tail.rewrite))
        transcript = confirmed and confirmed.body.transcript
        if confirmed is None or transcript is None:
            return Lost(snapshot.version)
        body, end = confirmed.body, transcript.base + len(snapshot.turns)
        following = max(to + 1, transcript.base)
        await shared.archive.put_after(confirmed, following - transcript.base)
        newest = digest(snapshot.turns[-1].id) if snapshot.turns else transcript.last
        body = with_usage_of(snapshot.turns[following - transcript.base :], body)
        left = replace(
            transcript,
            rev=transcript.rev + 1,
            branches=(*transcript.branches, Branch(transcript.rev, to + 1, end, newest)),
        )
        if restored.first != transcript.base:
            gap = restored.upto if restored.upto < restored.first else None
            left = replace(left, base=restored.first, last=restored.last, gap=gap)
            body = replace(
                body,
                summary=restored.summary,
                folded=max(0, restored.upto - body.dropped),
                dropped=min(body.dropped, restored.upto),
                lead=body.lead if restored.first else (),
                asked=restored.asked,
                title=body.title if restored.summary else "",
            )
        forgotten = body.forgotten.adding(
            [one for one in dict.fromkeys(tail.gone) if one not in body.forgotten],
            now=shared.clock(),
            keep_for=self._maintenance.keep_ids_for,
            copies={*map(id_of, snapshot.opened)},
        )
        # Older versions count what they remember of a conversation of turns.
        body = replace(body, transcript=left, forgotten=forgotten, messages=True)
        done = await shared.edit(confirmed, body, tail.rewrite)
        return True if done else Lost(confirmed.version)

    async def summarize_again(self, since: int) -> None:
        """Write the summary again, from the number `since` on."""

        async def attempt(snapshot: Snapshot, transcript: Transcript) -> bool | Lost:
            if since >= transcript.summarized or self._config.strategy != "rolling_summary":
                return False
            summary, upto = "", transcript.first
            if since > transcript.first:
                summary, upto = await self._checkpoint(transcript, since, {})
            body = replace(
                policy.after_recovery(snapshot.body),
                summary=summary,
                folded=max(0, upto - snapshot.body.dropped),
                transcript=replace(transcript, gap=upto if upto < transcript.base else None),
            )
            return True if await self._shared.edit(snapshot, body, ()) else Lost(snapshot.version)

        await self._edit("summarize", attempt, at=since, revision=None)

    async def fork(
        self, into: Maintenance, to: int | None, *, of: str, listing: AbstractAsyncContextManager[Creation]
    ) -> None:
        """Copy the conversation up to the number `to` into another; see `Conversation.fork`.

        The record of the copy begins with an entry that holds nothing until the body names it.
        """
        snapshot = (await self._maintenance.mended("fork")).transcribed()
        transcript = snapshot.body.transcript or Transcript("")
        oldest, end = bounds_of(snapshot)
        to = end - 1 if to is None else to
        if not oldest <= to < end:
            raise MessageNotFound("the conversation has no message with this number")
        restored = await self._restored(snapshot, transcript, to)
        copy, ttl, entry_id = into.shared, into.config.record_ttl_s, as_turn_id(None)
        if not _is_empty(await copy.load("fork")):
            raise SessionExists("a conversation with this id already exists")
        # The sums of the original have the usage of its answers, and those of the copy begin at zero.
        data = seal_units(copy.codec, entry_id, map(counted, restored.units), forks=True)
        epoch = f"{pages.IMPORTED}{new_id(copy.clock())}"
        try:
            ids = await self._copy_pages(transcript, restored.first, copy.key, epoch, ttl)
            await ledger.append(copy.driver, copy.key, data, ttl=ttl, listing=listing)
            there = await copy.load("fork")
            if there.version is None or not _is_empty(there):
                raise SessionExists("a conversation with this id already exists")
        except Exception:
            # The original may be erased, and its owner relies on that.
            with suppress(StorageError):
                await pages.erase(copy.driver, copy.key, epoch)
            raise
        ids += [unit.entry for unit in restored.units]
        body = Body(
            summary=restored.summary,
            folded=restored.upto,
            forgotten=Forgotten().adding([*dict.fromkeys(ids)], now=copy.clock(), keep_for=into.keep_ids_for),
            transcript=Transcript(
                epoch,
                base=restored.first,
                last=restored.last,
                gap=restored.upto if restored.upto < restored.first else None,
                first=min(transcript.first, restored.first),
            ),
            messages=True,
            lead=snapshot.body.lead if restored.first else (),
            asked=restored.asked,
            title=snapshot.body.title if restored.summary else "",
            fork=Fork(of, to, entry_id),
        )
        change = ledger.Change(copy.codec.seal_body(body))
        if not await ledger.replace(copy.driver, copy.key, change, expect=there.version, repeatable=False):
            await pages.erase(copy.driver, copy.key, epoch)
            raise SessionExists("another process has begun a conversation with this id meanwhile")
        await copy.load("fork")
        into.touch(begins=True)

    async def _copy_pages(
        self, transcript: Transcript, end: int, into: Key, epoch: str, ttl: float | None
    ) -> list[str]:
        """Copy units below a number to the pages of another record; returns the newest ids."""
        newest: dict[int, str] = {}

        async def copied(page: int) -> None:
            low, high = max(page * pages.TURNS, transcript.first), min((page + 1) * pages.TURNS, end)
            found = await self._pages.between(self._key, transcript, low, high)
            if len(found) < high - low and not await self._is_still(transcript):
                raise Unavailable(
                    "the conversation was edited or erased while it was copied",
                    backend=self._shared.driver.name,
                    operation="fork",
                )
            for number in range(max(low, end - REMEMBERED_IDS), high):
                if number in found:
                    newest[number] = stored_unit(found[number].turn).entry
            for numbers in pages.runs(found):
                copies = [found[number] for number in numbers]
                notes, before = copies[0].notes, Transcript(epoch, base=numbers[0], last=copies[0].prev)
                before = replace(before, gap=min(notes.get("upto", numbers[0]), numbers[0]))
                leaving = [Leaving(one.turn["turn_id"], encode_json(one.turn)) for one in copies]
                await self._pages.put_new(into, before, leaving, summary=notes.get("summary"), ttl=ttl)

        for page in range(transcript.first // pages.TURNS, -(-end // pages.TURNS), _AT_ONCE):
            some = range(page, min(page + _AT_ONCE, -(-end // pages.TURNS)))
            await operations.together(some, copied)
        return [newest[number] for number in sorted(newest)]

    async def _is_still(self, transcript: Transcript) -> bool:
        """Say whether nothing has been taken out of the pages of a conversation since it was loaded."""
        found = (await self._shared.load("fork")).body.transcript
        return found is not None and replace(found, base=0, last="", gap=None, extra={}) == replace(
            transcript, base=0, last="", gap=None, extra={}
        )

    async def _restored(self, snapshot: Snapshot, transcript: Transcript, to: int) -> Restored:
        """Return the content of a record that continues after `to`: its own, or what a fold would leave."""
        stays = snapshot.turns[: max(0, to + 1 - transcript.base)]
        if transcript.base == transcript.first or any(unit.begins for unit in stays):
            body = snapshot.body
            return Restored(
                transcript.base, stays, transcript.last, body.summary, transcript.summarized, body.asked
            )
        end = min(to + 1, transcript.base)
        copies: Mapping[int, Copy] = {}
        found: Sequence[StoredTurn] = ()
        for count in _PAGES_READ if snapshot.tail else ():
            start = max(transcript.first, (end // pages.TURNS - count) * pages.TURNS)
            copies = await self._pages.between(self._key, transcript, start, end)
            missing = [number for number in range(start, end) if number not in copies]
            low = max([start - 1, *missing]) + 1
            if low == end > transcript.first:
                raise MessageNotFound("the message with this number is no longer stored")
            found = [*(counted(stored_unit(copies[number].turn)) for number in range(low, end)), *stays]
            if low > start or start == transcript.first or speech.split(found, self._config).pending:
                break
        # The present units of the record stay there: no page has it yet.
        pending = min(len(speech.split(found, self._config).pending), len(found) - len(stays))
        first = to + 1 - len(found) + pending
        goes_on = pending < len(found) and not found[pending].begins
        begun = next((unit for unit in reversed(found[:pending]) if unit.begins), None)
        asked = begun.said.message if goes_on and begun is not None and begun.said is not None else None
        last = copies[first].prev if first in copies else ""
        if first not in copies and first > transcript.first:
            before = await self._pages.between(self._key, transcript, first - 1, first)
            last = digest(before[first - 1].turn["turn_id"]) if before else ""
        summary, upto = snapshot.body.summary, transcript.summarized
        if upto > first:
            summary, upto = await self._checkpoint(transcript, first, copies)
        return Restored(first, found[pending:], last, summary, upto, asked)

    async def _checkpoint(
        self, transcript: Transcript, first: int, copies: Mapping[int, Copy]
    ) -> tuple[str, int]:
        """Return a summary in a page of the units before a number, and the first number not covered."""
        if self._config.strategy != "rolling_summary":
            return "", first
        for page in range(first // pages.TURNS, transcript.first // pages.TURNS - 1, -1):
            start = page * pages.TURNS
            copy = copies.get(start) or (
                await self._pages.between(self._key, transcript, start, start + 1)
            ).get(start)
            if copy is not None and "summary" in copy.notes:
                return copy.notes["summary"], min(copy.notes["upto"], first)
        return "", min(transcript.first, first)

    @property
    def _config(self) -> ShortTermMemoryConfig:
        return self._maintenance.config
