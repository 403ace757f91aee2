"""Edits of a conversation: what was said leaves the view, and each edit is one conditional write at its end.

What leaves the view is first put into pages, where it has its numbers under the revision that ends. Then one
`replace` of the record says what stays, and raises `rev`: of two copies with one number in a page, that of
the higher `rev` was said later. So a process that ends before that write has changed nothing, and readers see
the conversation as it was before or as it is after.

Entries cannot be dropped at the end of a record. One that goes is rewritten as a short one that holds
nothing, whose id is remembered as that of an entry that has left; it goes with the next fold. So an append
that comes meanwhile stays, as what is said next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from stm_backends import races
from stm_backends.drivers.contract import Key
from stm_backends.errors import EditConflict, MessageNotFound, Unavailable
from stm_backends.memory import speech
from stm_backends.memory.shared.maintenance import Maintenance
from stm_backends.memory.shared.reading import bounds_of
from stm_backends.memory.shared.snapshot import Snapshot, id_of
from stm_backends.memory.units import seal_nothing, seal_units, stored_unit
from stm_backends.races import Lost
from stm_backends.records import pages
from stm_backends.records.body import Branch, Transcript, digest
from stm_backends.records.codec import Codec
from stm_backends.records.pages import Copy, Pages
from stm_backends.types import ShortTermMemoryConfig, StoredTurn, as_turn_id

_PAGES_READ: Final = (2, 16)
"""How many pages before a place are read to continue there, and how many if these hold too few turns."""


class Tail(NamedTuple):
    """What takes the place of the oldest entries of a record, and the ids of those that hold nothing then."""

    rewrite: Sequence[bytes]
    gone: Sequence[str]


class Restored(NamedTuple):
    """What a record holds again of a conversation that goes on at an earlier place.

    `units` have numbers from `first` on, and `last` is the short hash of the id before. `summary` covers what
    is before `upto`, and `asked` is the question of a turn that goes on in them.
    """

    first: int
    units: Sequence[StoredTurn]
    last: str = ""
    summary: str = ""
    upto: int = 0
    asked: Mapping[str, Any] | None = None


def within_tail(snapshot: Snapshot, count: int, codec: Codec, *, most: int) -> Tail | None:
    """Return the tail in which only the oldest `count` units are left, with up to `most` entries rewritten.

    `None` if more would have to be.
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
    """Return the tail that holds these units alone, with up to `most` entries rewritten.

    As far as there are so many entries, each turn has one, so that it can leave by itself.
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
                raise MessageNotFound("the conversation has no message of this number")
            if to == end - 1:
                return False
            most = self._shared.driver.traits.max_drop
            stays = snapshot.turns[: max(0, to + 1 - transcript.base)]
            tail, restored = None, None
            if transcript.base == oldest or any(unit.begins for unit in stays):
                tail = within_tail(snapshot, len(stays), self._shared.codec, most=most)
                restored = Restored(transcript.base, stays)
            if tail is None or restored is None:
                restored = await self._restored(snapshot, transcript, to, stays)
                tail = of_units(snapshot, restored.units, self._shared.codec, most=most)
            return await self._rewound(snapshot, restored, tail, to)

        await self._edit("rewind", attempt, at=to, revision=revision)

    async def _edit(
        self,
        operation: str,
        attempt: Callable[[Snapshot, Transcript], Awaitable[bool | Lost]],
        *,
        at: int,
        revision: int | None,
    ) -> None:
        """Load the conversation and make an attempt, again while others add to it or summarize it.

        Raises `EditConflict` if another edit has come first, or if what has the number `at` is another.
        """
        seen: tuple[str | None, int, str] | None = None

        async def edited() -> bool | Lost:
            nonlocal seen
            found = await self._shared.load(operation)
            snapshot = found.transcribed().unleased()
            transcript = snapshot.body.transcript or Transcript("")
            place = at - transcript.base
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

        done = await races.contend(edited)
        if done is None:
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self._shared.driver.name,
                operation=operation,
            )
        if done:
            self._maintenance.touch()
            self._maintenance.notice(self._shared.seen)

    async def _rewound(self, snapshot: Snapshot, restored: Restored, tail: Tail, to: int) -> bool | Lost:
        """Put what follows into pages, and store what is left; `Lost` if the record has changed."""
        shared = self._shared
        confirmed = await self._maintenance.confirmed(snapshot, len(tail.rewrite))
        transcript = confirmed and confirmed.body.transcript
        if confirmed is None or transcript is None:
            return Lost(snapshot.version)
        body, end = confirmed.body, transcript.base + len(snapshot.turns)
        following = max(to + 1, transcript.base)
        await shared.archive.put_after(confirmed, following - transcript.base)
        newest = digest(snapshot.turns[-1].id) if snapshot.turns else transcript.last
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

    async def _restored(
        self, snapshot: Snapshot, transcript: Transcript, to: int, stays: Sequence[StoredTurn]
    ) -> Restored:
        """Return what the record holds again, once it goes on after `to`: what a fold would leave there."""
        end = min(to + 1, transcript.base)
        copies: Mapping[int, Copy] = {}
        found: Sequence[StoredTurn] = ()
        for count in _PAGES_READ if snapshot.tail else ():
            start = max(transcript.first, (end // pages.TURNS - count) * pages.TURNS)
            copies = await self._pages.between(self._key, transcript, start, end)
            missing = [number for number in range(start, end) if number not in copies]
            low = max([start - 1, *missing]) + 1
            if low == end > transcript.first:
                raise MessageNotFound("the message of this number is not stored any more")
            found = [*(stored_unit(copies[number].turn) for number in range(low, end)), *stays]
            if low > start or start == transcript.first or speech.split(found, self._config).pending:
                break
        # What the record has now stays there: no page has it yet.
        pending = min(len(speech.split(found, self._config).pending), len(found) - len(stays))
        first = to + 1 - len(found) + pending
        goes_on = pending < len(found) and not found[pending].begins
        begun = next((unit for unit in reversed(found[:pending]) if unit.begins), None)
        asked = begun.said.message if goes_on and begun is not None and begun.said is not None else None
        last = copies[first].prev if first in copies else ""
        if first not in copies and first > transcript.first:
            before = await self._pages.between(self._key, transcript, first - 1, first)
            last = digest(before[first - 1].turn["turn_id"]) if before else ""
        summary, upto = await self._checkpoint(snapshot, transcript, first, copies)
        return Restored(first, found[pending:], last, summary, upto, asked)

    async def _checkpoint(
        self, snapshot: Snapshot, transcript: Transcript, first: int, copies: Mapping[int, Copy]
    ) -> tuple[str, int]:
        """Return a summary of what is before a number, and the first number that it does not cover."""
        if transcript.summarized <= first:
            return snapshot.body.summary, transcript.summarized
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
