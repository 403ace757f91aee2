"""A log of items, as pure functions: its entries, and the items that result from them.

```
entry  {"id": ..., "add": [item, ...], "at": 1760000000.0}   the items of one call, all or none; their time
entry  {"id": ..., "pop": 1760000000.0}                      remove the last item; the time of the removal
body   {"items": [...], "forgotten": ..., "popped": {id: [when, item or null], ...}}
paged  {"items": [], ..., "transcript": {"epoch", "base", "last", "rev", "first"}}
page   {..., "turns": [{"turn_id": "ENTRY.PLACE", "item": {...}, "at": 1760000000.0}, ...]}
```

Entries are ordered, so the position of a pop determines which item it removes, and all readers agree. Two
concurrent pops remove two items. An item is any JSON object.

The items of a long log are in pages (`records.pages`), except for those of the entries that are left. While
the body says `base`, an item has the same number for every process: the items that stand before it are those
that stood there when it was added. If a pop removes one that is in a page, the next item gets its number. So
`rev` counts the pops that left the record, and an item in a page has the number of pops before it as its own
`rev`: of two items with one number, that of the higher `rev` was added later. The body with a transcript is
of a format that versions without pages refuse: they would show, and remove, the items that are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends.drivers.contract import Record
from stm_backends.errors import Corrupt
from stm_backends.plain_json import encode_json
from stm_backends.records.body import Forgotten, Transcript
from stm_backends.records.codec import Codec, dump_forgotten, dump_transcript, load_forgotten, load_transcript
from stm_backends.records.pages import Leaving

Item: TypeAlias = dict[str, Any]

MARGIN: Final = 32
"""How many entries are read before the one with the oldest item that is asked for, see `Log.newest`."""


class Add(NamedTuple):
    """An entry that adds items at the end; `at` is in epoch seconds, by the clock of its writer, or 0."""

    id: str
    items: Sequence[Item]
    at: float = 0.0


class Pop(NamedTuple):
    """An entry that removes the last item; `at` is in epoch seconds, by the clock of its writer."""

    id: str
    at: float


Entry: TypeAlias = Add | Pop


class Removal(NamedTuple):
    """The result of a pop: an item, the one with a `number` in a page, or `None` if the log was empty."""

    at: float
    item: Item | None
    number: int | None = None

    def resolved(self, paged: Mapping[int, Item], *, now: float) -> Removal | None:
        """Return the removal with its item, if need be from those of pages; `None` if these lack it.

        A clock that is ahead of `now` must not keep it for longer.
        """
        if self.number is not None and self.number not in paged:
            return None
        item = self.item if self.number is None else paged[self.number]
        return Removal(min(self.at, now), item)


class Placed(NamedTuple):
    """An item that is not in a page, and where it was added: as the `nth` of an entry, at a time or 0.

    `place` is that of the entry in the tail; it is -1 in the body, where the item has no entry. `rev` is its
    revision in a page.
    """

    item: Item
    place: int
    entry: str
    nth: int
    at: float
    rev: int


@dataclass(frozen=True, slots=True)
class Folded:
    """The body of a log.

    `forgotten` has the ids of the folded entries, so that repeating one has no effect. `popped` has what
    recent pops among them removed, because their writers may not have read it yet. `transcript` says where
    items are that have left the record; `None` if none have. `extra` holds fields of a newer version of this
    library, which survive a rewrite.
    """

    items: Sequence[Item] = ()
    forgotten: Forgotten = Forgotten()
    popped: Mapping[str, Removal] = field(default_factory=dict[str, Removal])
    transcript: Transcript | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Log:
    """A log at one instant. `version` is `None` if there is no record.

    `held` are the remaining items that no page has, oldest first, and `items` the same without their places.
    Those in pages are the numbers from `first` to `low - 1`. `popped` maps the id of each pop to what it
    removed. `rev` counts all pops. `waste` is how many of the `length` entries hold no remaining item.
    `folded` is the body, `entries` are those of the tail, and `added` has the time of each. If older entries
    were `skipped`, only `newest` is right.
    """

    def __init__(
        self, version: str | None, folded: Folded, entries: Sequence[Entry], skipped: int = 0
    ) -> None:
        self.version = version
        self.folded = folded
        self.entries = entries
        self._skipped = skipped
        paged = folded.transcript
        self.first, self.low, self.rev = (0, 0, 0) if paged is None else (paged.first, paged.base, paged.rev)
        held = [Placed(item, -1, "", nth, 0.0, self.rev) for nth, item in enumerate(folded.items)]
        held = [] if skipped else held
        self.popped = dict(folded.popped)
        self.ids: dict[str, None] = {}
        for place, entry in enumerate(entries):
            if entry.id in self.ids or entry.id in folded.forgotten:
                continue
            self.ids[entry.id] = None
            if isinstance(entry, Add):
                held += [
                    Placed(item, place, entry.id, nth, entry.at, self.rev)
                    for nth, item in enumerate(entry.items)
                ]
                continue
            self.rev += 1
            if held:
                self.popped[entry.id] = Removal(entry.at, held.pop().item)
            elif self.low > self.first:
                self.low -= 1
                self.popped[entry.id] = Removal(entry.at, None, self.low)
            else:
                self.popped[entry.id] = Removal(entry.at, None)
        self.held = held
        self.items = [one.item for one in held]
        self.added = [entry.at for entry in entries]
        self.length = len(entries)
        self.waste = self.length - len({one.place for one in held if one.place >= 0})

    @property
    def count(self) -> int:
        """The number of items, in pages or not."""
        return self.low - self.first + len(self.items)

    def newest(self, count: int) -> list[Item] | None:
        """Return the newest `count` items, oldest first; `None` if the entries that were skipped may matter.

        If none were, those in pages are left out.

        They matter if too many of these entries are pops, and if one of these repeats a skipped one. Its
        writer has sent a repeat soon, so few entries stand before it that are not older than it is. `MARGIN`
        of them tell, also if clocks differ: what is older than most of these may be a repeat.
        """
        start = max(0, len(self.items) - count)
        if self._skipped and count:
            first = self.held[start].place if len(self.items) >= count else 0
            if first < MARGIN:
                return None
            usual = median_low(entry.at for entry in self.entries[:MARGIN])
            if any(entry.at < usual for entry in self.entries[first:]):
                return None
        return self.items[start:]

    def with_entry(self, entry: Entry) -> Log:
        """Return the log with one more entry."""
        return Log(self.version, self.folded, [*self.entries, entry])

    def has_folded(self, entry_id: str) -> bool:
        """Say whether an entry was folded in, as far as that is remembered."""
        return entry_id in self.folded.forgotten

    def head(self, count: int) -> Log:
        """Return the log as it was with the oldest `count` entries alone."""
        return self if count == self.length else Log(self.version, self.folded, self.entries[:count])

    def fold(
        self,
        count: int,
        *,
        now: float,
        keep_for: float,
        removals: bool = True,
        transcript: Transcript | None = None,
        paged: Mapping[int, Item] | None = None,
    ) -> Folded:
        """Return the body after the oldest `count` entries are folded in.

        It remembers the ids, and with `removals` what pops removed, for `keep_for` seconds. `now` is in epoch
        seconds. With a `transcript`, their items are in pages; `paged` has by number what pops removed there.
        """
        head = self.head(count)
        young = {
            entry_id: found
            for entry_id, removal in head.popped.items()
            if removals
            and removal.at > now - keep_for
            and (found := removal.resolved(paged or {}, now=now)) is not None
        }
        forgotten = self.folded.forgotten.adding(list(head.ids), now=now, keep_for=keep_for)
        items = head.items if transcript is None else ()
        return Folded(items, forgotten, young, transcript, self.folded.extra)

    def leaving(self, epoch: str) -> list[Leaving]:
        """Return the remaining items that no page has, for pages of this epoch."""
        return [
            Leaving(
                f"{one.entry or epoch}.{one.nth}",
                encode_json(
                    {
                        "turn_id": f"{one.entry or epoch}.{one.nth}",
                        "item": one.item,
                        **({"at": one.at} if one.at else {}),
                    }
                ),
                one.rev,
            )
            for one in self.held
        ]


def read(record: Record | None, codec: Codec) -> Log:
    """Return the log in a record. Raises `Corrupt` if any part of it cannot be read."""
    if record is None:
        return Log(None, Folded(), ())
    folded = open_folded(record.body, codec)
    entries = [_load_entry(codec.open("items", entry)) for entry in record.tail]
    return Log(record.version, folded, entries, record.skipped)


def seal_entry(entry: Entry, codec: Codec) -> bytes:
    """Return the bytes of an entry whose items `require_json` has accepted."""
    content: dict[str, Any] = {"pop": entry.at}
    if isinstance(entry, Add):
        content = {"add": list(entry.items), **({"at": entry.at} if entry.at else {})}
    return codec.seal("items", {"id": entry.id, **content})


def seal_folded(folded: Folded, codec: Codec) -> bytes:
    """Return the bytes of a log's body, including fields of a newer version."""
    content = {
        **folded.extra,
        "items": list(folded.items),
        "forgotten": dump_forgotten(folded.forgotten),
        "popped": {entry_id: [removal.at, removal.item] for entry_id, removal in folded.popped.items()},
    }
    if folded.transcript is None:
        return codec.seal("log", content)
    return codec.seal("paged-log", {**content, "transcript": dump_transcript(folded.transcript)})


def open_folded(body: bytes | None, codec: Codec) -> Folded:
    """Return the body of a log. Raises `Corrupt` if it cannot be read."""
    if not body:
        return Folded()
    return _load_folded(codec.open("paged-log" if codec.is_of("paged-log", body) else "log", body))


def item_in(content: Mapping[str, Any]) -> tuple[Item, float]:
    """Return the item of a turn of a page, and its time or 0. Raises `Corrupt` if there is none."""
    item, at = content.get("item"), content.get("at")
    if not isinstance(item, dict):
        raise Corrupt("a page of the log holds an item that is not a JSON object")
    return cast("Item", item), at if isinstance(at, float) else 0.0


def _load_entry(content: Mapping[str, Any]) -> Entry:
    entry_id, added, popped = (content.get(name) for name in ("id", "add", "pop"))
    if isinstance(entry_id, str) and (added is None) != (popped is None):
        if isinstance(added, list):
            at: object = content.get("at")
            return Add(entry_id, _load_items(cast("object", added)), at if isinstance(at, float) else 0.0)
        if isinstance(popped, (int, float)):
            with suppress(OverflowError):
                return Pop(entry_id, float(popped))
    raise Corrupt("an entry of the log is of a kind that this version of the library does not know")


_FOLDED_FIELDS = ("items", "forgotten", "popped", "transcript")


def _load_folded(content: Mapping[str, Any]) -> Folded:
    try:
        return Folded(
            _load_items(content["items"]),
            load_forgotten(content["forgotten"]),
            {entry_id: _load_removal(value) for entry_id, value in content["popped"].items()},
            load_transcript(content.get("transcript")),
            {name: value for name, value in content.items() if name not in _FOLDED_FIELDS},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        # The cause may quote an item.
        raise Corrupt("the stored log lacks a field, or a field has another type") from None


def _load_items(items: object) -> list[Item]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast("list[object]", items)):
        raise Corrupt("the stored log holds an item that is not a JSON object")
    return cast("list[Item]", items)


def _load_removal(value: Any) -> Removal:
    at, item = value
    if item is not None and not isinstance(item, dict):
        raise ValueError("the removed item is not a JSON object")
    return Removal(float(at), cast("Item | None", item))
