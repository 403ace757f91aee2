"""One conversation as it was read: the record's raw entries made into turns, each exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from stm_backends.codec import Codec
from stm_backends.driver import Record
from stm_backends.policy import Body
from stm_backends.types import StoredTurn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A conversation at one instant. `version` is `None` if there is no record.

    `turns` are the distinct turns that no summary covers, oldest first; `starts` is where the first
    entry of each stands among the `length` raw entries of the tail. Repeats of a turn, and late copies
    of one that was folded or trimmed before, are entries without being turns. `ids` are those of the
    turns. `opened` is what each raw
    entry holds, `None` for such a late copy, so that the next snapshot need not open it again.
    """

    version: str | None = None
    body: Body = Body()
    turns: tuple[StoredTurn, ...] = ()
    starts: tuple[int, ...] = ()
    length: int = 0
    ids: Set[str] = frozenset[str]()
    opened: Mapping[bytes, StoredTurn | None] = field(default_factory=dict[bytes, StoredTurn | None])

    @staticmethod
    def of(record: Record | None, codec: Codec, *, last: Snapshot | None = None) -> Snapshot:
        """Read a record. Raises `Corrupt` rather than leave out what cannot be read.

        A body of the version that `last` has, and entries that stand there too, are not opened again;
        a version never stands for two bodies.
        """
        if record is None:
            return Snapshot()
        known: Mapping[bytes, StoredTurn | None] = {}
        if last is not None and last.version == record.version:
            body, known = last.body, last.opened
        else:
            body = codec.open_body(record.body)
        opened: dict[bytes, StoredTurn | None] = {}
        turns: dict[str, StoredTurn] = {}
        starts: list[int] = []
        for position, entry in enumerate(record.tail):
            if entry in known:
                stored = known[entry]
            else:
                found = codec.open_turn(entry)
                stored = None if found.id in body.forgotten else found
            opened[entry] = stored
            if stored is not None and stored.id not in turns:
                turns[stored.id] = stored
                starts.append(position)
        return Snapshot(
            record.version,
            body,
            tuple(turns.values()),
            tuple(starts),
            len(record.tail),
            ids=turns.keys(),
            opened=opened,
        )

    def entries(self, count: int) -> int:
        """Return how many raw entries go when the oldest `count` turns do, repeats included.

        Nothing up to the next turn that stays is left behind, so a repeat is dropped with its like.
        """
        return self.starts[count] if count < len(self.starts) else self.length

    def within(self, turns: Sequence[StoredTurn], max_drop: int) -> int:
        """Return how many of these oldest turns can go in one `replace` of at most `max_drop` entries."""
        count = len(turns)
        while count and self.entries(count) > max_drop:
            count -= 1
        return count

    def holds(self, turn_id: str) -> bool:
        """Say whether a turn stands here, or did within the remembered past."""
        return turn_id in self.ids or turn_id in self.body.forgotten
