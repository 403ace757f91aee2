"""One conversation as it was read: the raw entries of the record as turns, each turn once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from stm_backends.drivers.contract import Record
from stm_backends.memory import policy
from stm_backends.memory.policy import Split
from stm_backends.memory.view import View, render
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A conversation at one instant. `version` is `None` if there is no record.

    `turns` are the distinct turns that no summary covers, oldest first; `starts` has the position of each
    turn's first entry in the tail. `entries` has the turn's id and the size in bytes of each raw entry.
    Repeats of a turn, and late copies of a turn that was folded or trimmed before, are entries but not turns.
    `ids` are the ids of the turns. `opened` maps each raw entry to its turn, or to the id alone for a late
    copy, so that the next snapshot need not decode it again.
    """

    version: str | None = None
    body: Body = Body()
    turns: tuple[StoredTurn, ...] = ()
    starts: tuple[int, ...] = ()
    entries: tuple[tuple[str, int], ...] = ()
    ids: Set[str] = frozenset[str]()
    opened: Mapping[bytes, StoredTurn | str] = field(default_factory=dict[bytes, StoredTurn | str])
    _splits: dict[int, Split] = field(default_factory=dict[int, Split], init=False, repr=False, compare=False)

    @staticmethod
    def of(record: Record | None, codec: Codec, *, last: Snapshot | None = None) -> Snapshot:
        """Read a record. Raises `Corrupt` if any part of it cannot be read.

        Reuses from `last` the body, if the version is the same, and the entries that it has too. A version
        identifies one body.
        """
        if record is None:
            return Snapshot()
        known: Mapping[bytes, StoredTurn | str] = {}
        if last is not None and last.version == record.version:
            body, known = last.body, last.opened
        else:
            body = codec.open_body(record.body)
        opened: dict[bytes, StoredTurn | str] = {}
        turns: dict[str, StoredTurn] = {}
        starts: list[int] = []
        entries: list[tuple[str, int]] = []
        for position, entry in enumerate(record.tail):
            stored = known.get(entry)
            if stored is None:
                found = codec.open_turn(entry)
                stored = found.id if found.id in body.forgotten else found
            opened[entry] = stored
            if isinstance(stored, str):
                entries.append((stored, len(entry)))
                continue
            entries.append((stored.id, len(entry)))
            if stored.id not in turns:
                turns[stored.id] = stored
                starts.append(position)
        return Snapshot(
            record.version,
            body,
            tuple(turns.values()),
            tuple(starts),
            tuple(entries),
            ids=turns.keys(),
            opened=opened,
        )

    def split(self, config: ShortTermMemoryConfig) -> Split:
        """Return the pending and the recent turns, computed once for each `full_zone_turns`."""
        zone = config.budget.full_zone_turns
        found = self._splits.get(zone)
        if found is None:
            found = self._splits[zone] = policy.split(self.turns, config)
        return found

    def view(self, config: ShortTermMemoryConfig, *, recovering: bool = False) -> View:
        """Return what the model is shown, by default with the stored health."""
        health = MemoryHealth.RECOVERING if recovering else self.body.health
        pending, recent = self.split(config)
        return render(config, health=health, summary=self.body.summary, pending=pending, recent=recent)

    def plus(self, *turns: StoredTurn) -> Snapshot:
        """Return the snapshot with more turns at the end, which have no entries."""
        return replace(self, turns=(*self.turns, *turns))

    @property
    def repeats(self) -> int:
        """How many raw entries are not turns."""
        return max(0, len(self.entries) - len(self.turns))

    def entries_of(self, count: int) -> int:
        """Return how many raw entries are dropped with the oldest `count` turns, repeats included.

        That is every entry before the next turn that stays.
        """
        return self.starts[count] if count < len(self.starts) else len(self.entries)

    def within(self, turns: Sequence[StoredTurn], max_drop: int) -> int:
        """Return how many of these oldest turns one `replace` of at most `max_drop` entries can drop."""
        count = len(turns)
        while count and self.entries_of(count) > max_drop:
            count -= 1
        return count

    def turns_of(self, size: int) -> int:
        """Return how many of the oldest turns take `size` bytes together, with their repeats."""
        taken = 0
        for position, (_, length) in enumerate(self.entries):
            taken += length
            if taken >= size:
                return sum(start <= position for start in self.starts)
        return len(self.turns)

    def copies(self, drop: int) -> frozenset[str]:
        """Return the ids of entries that become late copies when the oldest `drop` entries go."""
        going = {identity for identity, _ in self.entries[:drop]} | {
            stored for stored in self.opened.values() if isinstance(stored, str)
        }
        return frozenset(identity for identity, _ in self.entries[drop:] if identity in going)

    def leading_repeats(self) -> int:
        """Return how many of the oldest entries can be dropped without changing the turns or their order.

        An entry can be dropped if a repeat of its turn comes before the next other turn.
        """
        if not self.repeats:
            return 0
        if not self.turns:
            return len(self.entries)
        order, first = [stored.id for stored in self.turns], dict[str, int]()
        for position in range(len(self.entries) - 1, -1, -1):
            identity = self.entries[position][0]
            if identity in self.ids:
                first[identity] = position
            if identity == order[0] and len(first) == len(order):
                places = [first[one] for one in order]
                if all(one < other for one, other in itertools.pairwise(places)):
                    return position
        return self.starts[0]

    def holds(self, turn_id: str) -> bool:
        """Say whether a turn is in the record, or left it recently enough to be remembered."""
        return turn_id in self.ids or turn_id in self.body.forgotten
