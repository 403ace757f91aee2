"""One conversation as it was read: the raw entries of the record as turns, each turn once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from stm_backends.drivers.contract import Record
from stm_backends.memory import policy, speech
from stm_backends.memory.policy import Split
from stm_backends.memory.units import Entry, Messages, open_entry, units_of
from stm_backends.memory.view import View, render, shown_weight
from stm_backends.records import usage
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.usage import Stated, Sums
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn

Opened: TypeAlias = Entry | str
"""The content of an entry: a turn, the messages of a call, or only the id for a late copy of an entry that
has left the record."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A conversation at one instant. `version` is `None` if no record exists.

    `turns` are the distinct turns that no summary covers, oldest first; `starts` has the position of each
    turn's first entry in the tail, and `ids` the ids of the entries with turns. `tail` has the raw entries,
    `size` is their number of bytes, and `opened` the content of each. Repeats of an entry and late
    copies are entries without turns. `weight` is at least that of the turns as they are shown.

    In a conversation of messages, each message is one of the `turns`, and an entry may have several.
    """

    version: str | None = None
    body: Body = Body()
    turns: tuple[StoredTurn, ...] = ()
    starts: tuple[int, ...] = ()
    tail: tuple[bytes, ...] = ()
    opened: tuple[Opened, ...] = ()
    ids: Set[str] = frozenset[str]()
    size: int = 0
    weight: int = 0

    @staticmethod
    def of(record: Record | None, codec: Codec, *, last: Snapshot | None = None) -> Snapshot:
        """Read a record. Raises `Corrupt` if any part of it cannot be read.

        Decodes only what `last` does not have: a version identifies one body, and the entries are compared.
        So the result is the same for any `last`.
        """
        if record is None:
            return Snapshot()
        if last is None:
            last = Snapshot()
        version, tail, count = record.version, record.tail, len(last.tail)
        body = last.body if last.version == version else codec.open_body(record.body)
        is_same = body.forgotten == last.body.forgotten and body.fork == last.body.fork
        if is_same and tail[:count] == last.tail:
            if last.version != version:
                body = body if body.messages else _with_messages(body, last.opened)
                last = replace(last, version=version, body=body)
            return last.plus_entries(tail[count:], (open_entry(codec, entry) for entry in tail[count:]))
        found = dict(zip(last.tail, last.opened, strict=True))
        opened = (
            open_entry(codec, entry) if isinstance(known := found.get(entry, ""), str) else known
            for entry in tail
        )
        return Snapshot(version, body).plus_entries(tail, opened)

    def plus_entries(self, entries: tuple[bytes, ...], opened: Iterable[Opened]) -> Snapshot:
        """Return the snapshot with more entries at the end, and their content."""
        if not entries:
            return self
        forgotten, weight, ids = self.body.forgotten, self.weight, {*self.ids}
        turns, starts, held = list[StoredTurn](), list[int](), list[Opened]()
        kept = len(self.turns)
        last = self.opened[self.starts[-1]] if self.starts else ""
        for position, entry in enumerate(opened, len(self.opened)):
            if isinstance(entry, str) or entry.id in forgotten:
                held.append(entry if isinstance(entry, str) else entry.id)
                continue
            held.append(entry)
            if entry.id in ids:
                continue
            if isinstance(entry, Messages):
                if entry.forks and (self.body.fork is None or self.body.fork.entry != entry.id):
                    continue
                if entry.cut and (entry.cut in ids or entry.cut in forgotten):
                    continue  # a checkpoint that arrives after the whole answer
                if isinstance(last, Messages) and last.cut == entry.answer:
                    going = len(last.units)
                    weight -= sum(shown_weight(stored.turn) for stored in last.units)
                    kept -= 0 if turns else going
                    del turns[-going:], starts[-going:]
            last = entry
            ids.add(entry.id)
            for stored in units_of(entry):
                turns.append(stored)
                starts.append(position)
                weight += shown_weight(stored.turn)
        return Snapshot(
            self.version,
            self.body if self.body.messages else _with_messages(self.body, held),
            (*self.turns[:kept], *turns),
            (*self.starts[:kept], *starts),
            self.tail + entries,
            (*self.opened, *held),
            ids,
            self.size + sum(map(len, entries)),
            weight,
        )

    def after(self, version: str, body: Body, drop: int) -> Snapshot:
        """Return the snapshot after a `replace` of this process; it has the first entries that are left.

        That is all of them unless an entry is a late copy by the old body and may not be one by the new.
        """
        if not drop and body.forgotten == self.body.forgotten:
            return replace(self, version=version, body=body)
        left = [
            *itertools.takewhile(
                lambda stored: not isinstance(stored, str) or stored in body.forgotten, self.opened[drop:]
            )
        ]
        return Snapshot(version, body).plus_entries(self.tail[drop : drop + len(left)], left)

    def unleased(self) -> Snapshot:
        """Return the snapshot without the lease in its body."""
        body = self.body.unleased()
        return self if body is self.body else replace(self, body=body)

    def transcribed(self) -> Snapshot:
        """Return the snapshot with a transcript in its body, which begins now if there was none."""
        body = self.body
        if self.version is None or body.transcript is not None:
            return self
        return replace(self, body=replace(body, transcript=Transcript.begun(self.version, body)))

    def untranscribed(self) -> Snapshot:
        """Return the snapshot without a transcript that `transcribed` has begun, as the record has it."""
        transcript = self.body.transcript
        if transcript is None or transcript.epoch != self.version:
            return self
        return replace(self, body=replace(self.body, transcript=None))

    def split(self, config: ShortTermMemoryConfig) -> Split:
        """Return the pending and the recent turns."""
        return (speech if self.body.messages else policy).split(self.turns, config)

    def view(self, config: ShortTermMemoryConfig, *, recovering: bool = False) -> View:
        """Return the model's view, by default with the stored health."""
        health = MemoryHealth.RECOVERING if recovering else self.body.health
        pending, recent = self.split(config)
        return render(
            config,
            health=health,
            summary=self.body.summary,
            pending=speech.as_turns(pending),
            recent=speech.as_turns(recent),
            weight=None if self.body.messages else self.weight,
        )

    def plus(self, *turns: StoredTurn) -> Snapshot:
        """Return the snapshot with more turns at the end, which have no entries."""
        weight = self.weight + sum(shown_weight(stored.turn) for stored in turns)
        return replace(self, turns=(*self.turns, *turns), weight=weight) if turns else self

    @property
    def repeats(self) -> int:
        """Number of raw entries without turns."""
        # A checkpoint of an answer has no turns either.
        return len(self.tail) - len({*self.starts} if self.body.messages else self.ids)

    def entries_of(self, count: int) -> int:
        """Return the number of raw entries that are dropped with the oldest `count` turns, repeats included.

        These are all entries before the next turn that stays. The turns of an entry leave together or not at
        all: see `cut`.
        """
        return self.starts[count] if count < len(self.starts) else len(self.tail)

    def within(self, turns: Sequence[StoredTurn], max_drop: int) -> int:
        """Return how many of these oldest turns one `replace` of at most `max_drop` entries can drop."""
        count = len(turns)
        while count and self.entries_of(count) > max_drop:
            count -= 1
        return count

    def turns_of(self, size: int, *, room: Callable[[int], int]) -> int:
        """Return how many of the oldest turns take `size` bytes together, with their repeats.

        `room` returns how many bytes of the record a value of this size takes.
        """
        taken = 0
        for position, entry in enumerate(self.tail):
            taken += room(len(entry))
            if taken >= size:
                return sum(start <= position for start in self.starts)
        return len(self.turns)

    def cut(self, count: int, most: int, *, max_drop: int) -> int:
        """Return how many of the oldest turns can leave the record together: `count`, or fewer.

        If fewer cannot, the least that can, up to `most`; 0 if none can. The rest begins with an entry, and
        with a turn of the conversation, so that no call of a tool leaves without its result. Only a turn of
        more than `max_drop` entries is divided.
        """
        if not self.body.messages:
            return count
        entries = [
            place
            for place in range(1, most + 1)
            if place == len(self.turns) or self.starts[place] != self.starts[place - 1]
        ]
        entries = [place for place in entries if self.entries_of(place) <= max_drop]
        turns = [place for place in entries if place == most or self.turns[place].begins]
        if not turns and self.entries_of(most) > max_drop:
            turns = entries[-1:]
        return max((place for place in turns if place <= count), default=min(turns, default=0))

    def told(self, body: Body, count: int) -> Body:
        """Return the body after the oldest `count` turns have left, with what is kept of them.

        Otherwise it is the body of this record.
        """
        if not body.messages or not count:
            return body
        transcript = self.body.transcript
        first = not (self.body.left if transcript is None else transcript.base)
        gone, goes_on = self.turns[:count], count < len(self.turns) and not self.turns[count].begins
        asked = next((one.said and one.said.message for one in reversed(gone) if one.begins), body.asked)
        lead = speech.instructions(gone) if first else body.lead
        body = replace(body, lead=lead, asked=asked if goes_on else None)
        return with_usage_of(gone, body)

    @property
    def usage(self) -> Sums:
        """The usage of all answers, including those that have left the record."""
        return usage.stated(self.body.usage, _usages(self.turns))

    def copies(self, drop: int) -> frozenset[str]:
        """Return the ids of entries that become late copies when the oldest `drop` entries go."""
        if not self.repeats:
            return frozenset()
        going = {*map(id_of, self.opened[:drop])} | {one for one in self.opened if isinstance(one, str)}
        return frozenset(identity for identity in map(id_of, self.opened[drop:]) if identity in going)

    def replaced(self, drop: int, count: int = 0) -> list[str]:
        """Return the ids of checkpoints, among the oldest `drop` entries, in whose place is another entry.

        Then those of entries that the oldest `count` turns were copied to. They are remembered like those of
        turns: a late copy may come when all of the answer has left.
        """
        if not self.body.messages:
            return []
        moved = {id_of(self.opened[start]): None for start in self.starts[:count]}
        for unit in self.turns[:count]:
            moved.pop(unit.entry, None)
        if not self.repeats:
            return [*moved]
        there = {id_of(self.opened[start]) for start in self.starts}
        parts = [one.id for one in self.opened[:drop] if isinstance(one, Messages) and one.cut]
        return [*(part for part in dict.fromkeys(parts) if part not in there), *moved]

    def leading_repeats(self) -> int:
        """Return how many of the oldest entries can be dropped without changing the turns or their order.

        An entry can be dropped if a repeat of it comes before the next other one.
        """
        if not self.repeats:
            return 0
        if not self.turns:
            return len(self.tail)
        # Not by the entries that brought the turns: an edit may have put them into others.
        names = (id_of(self.opened[start]) for start in self.starts)
        place = {name: index for index, name in enumerate(dict.fromkeys(names))}
        # Which entries occur at or after the position, and which of them first do so before their successor.
        # One that is met is the first of all, so it is before its successor, and after its predecessor.
        met = [False] * len(place)
        ordered = [False] * len(place)
        count = 0
        for position in range(len(self.tail) - 1, -1, -1):
            index = place.get(id_of(self.opened[position]))
            if index is None:
                continue
            met[index] = True
            for one, is_so in (index - 1, False), (index, index + 1 == len(place) or met[index + 1]):
                if one >= 0:
                    count += is_so - ordered[one]
                    ordered[one] = is_so
            if index == 0 and count == len(place):
                return position
        return self.starts[0]

    def entry_of(self, entry_id: str) -> tuple[Entry, bytes] | None:
        """Return the content of an entry of the record, and its bytes; `None` if it does not exist."""
        for entry, data in zip(self.opened, self.tail, strict=True):
            if not isinstance(entry, str) and entry.id == entry_id:
                return entry, data
        return None

    def holds(self, entry_id: str) -> bool:
        """Say whether an entry is in the record, or left it recently enough to be remembered."""
        return entry_id in self.ids or entry_id in self.body.forgotten


def _with_messages(body: Body, opened: Iterable[Opened]) -> Body:
    """Return a body that marks the record as having messages, if the entries hold some."""
    return replace(body, messages=True) if any(isinstance(one, Messages) for one in opened) else body


def with_usage_of(gone: Iterable[StoredTurn], body: Body) -> Body:
    """Return a body whose sums include the usage of these units, which the record no longer holds."""
    return replace(body, usage=usage.stated(body.usage, _usages(gone)))


def _usages(units: Iterable[StoredTurn]) -> Iterator[Stated]:
    """Yield the usage of answers that end with these units."""
    return ((one.turn.ts, one.extra["usage"]) for one in units if one.said and "usage" in one.extra)


def id_of(opened: Opened) -> str:
    """Return the id of an entry."""
    return opened if isinstance(opened, str) else opened.id
