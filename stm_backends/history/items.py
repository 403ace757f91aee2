"""A log of items, as pure functions: its entries, and the items that result from them.

```
entry  {"id": ..., "add": [item, ...], "at": 1760000000.0}   the items of one call, all or none; their time
entry  {"id": ..., "pop": 1760000000.0}                      remove the last item; the time of the removal
after  {"id": ..., "add": [...], "at": ..., "after": [life, position]}       only if nothing came in between
       {"id": ..., "set": [...], "at": ..., "after": ...}    the same; these items instead of all before it
       {"id": ..., "end": 1760000000.0, "after": ...}        the same; the log is no more
named  {..., "named": true}                                  the caller gave the id, and may give it again
body   {"items": [...], "forgotten": ..., "popped": {id: [when, item or null], ...}, "place": {...}}
paged  {"items": [], ..., "transcript": {"epoch", "base", "last", "rev", "first"}}
page   {..., "turns": [{"turn_id": "ENTRY.PLACE", "item": {...}, "at": 1760000000.0}, ...]}
```

Entries are ordered, so the position of a pop determines which item it removes, and all readers agree. Two
concurrent pops remove two items. An item is any JSON object.

The items of a long log are in pages (`records.pages`), except for those of the entries that are left. While
the body says `base`, an item has the same number for every process: the items before it are those that were
before it when it was added. If a pop removes an item that is in a page, the next item gets its number. So
`rev` counts the pops that left the record, and an item in a page has the number of pops before it as its
`rev`: of two items with one number, the one with the higher `rev` was added later. The body with a transcript
is of a format that versions without pages refuse: they would show, and remove, only the items that are left.

The position of an entry is the number of entries before it in the life of the record, folded or not. A
conditional entry names a position, and takes effect if no entry from there up to it has. Repeats take none,
nor do conditional entries that were refused. So all readers decide alike, and the body keeps what they need
once entries are folded: the number of entries that have gone, and the position up to which one took effect
(`place`). A life is named by the version that the record began with, so that no entry of an earlier life is
accepted. Older versions of this library refuse conditional entries: they would show refused ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends.drivers.contract import Record, first_of
from stm_backends.errors import ConfigurationError, Corrupt
from stm_backends.plain_json import encode_json
from stm_backends.records.body import Forgotten, Transcript
from stm_backends.records.codec import Codec, dump_forgotten, dump_transcript, load_forgotten, load_transcript
from stm_backends.records.pages import Leaving

Item: TypeAlias = dict[str, Any]

MARGIN: Final = 32
"""Number of entries that are read before the one with the oldest requested item; see `Log.newest`."""


class Tip(NamedTuple):
    """A place in a log: after `position` entries of a life. A log that does not exist has the life `""`."""

    life: str
    position: int

    @property
    def text(self) -> str:
        """The place as a token; `""` for a log that does not exist."""
        return f"{self.position}:{self.life}" if self.life else ""

    @staticmethod
    def of(text: object) -> Tip:
        """Return the place that a token names. Raises `ConfigurationError` for an invalid token."""
        if text == "":
            return NOWHERE
        position, _, life = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (position.isascii() and position.isdigit() and life) or len(position) > _DIGITS:
            raise ConfigurationError("tip was not returned by a read of this log, or by an addition to it")
        return Tip(life, int(position))


NOWHERE: Final = Tip("", 0)
"""The place before a log that does not exist."""

_DIGITS: Final = 18
"""Greater than any position."""


class Place(NamedTuple):
    """The progress of a life of a log after its first `gone` entries.

    The last of them that took effect is the one before the position `settled`. `exists` is true if the log
    does: an entry has taken effect since it began, or was ended.
    """

    life: str = ""
    gone: int = 0
    settled: int = 0
    exists: bool = False

    def allows(self, tip: Tip) -> bool:
        """Say whether nothing has taken effect since a place."""
        if tip == NOWHERE:
            return not self.exists
        return tip.life == self.life and self.settled <= tip.position


NO_PLACE: Final = Place()
"""The place of a record without a body."""


class Add(NamedTuple):
    """An entry that adds items at the end; `at` is in epoch seconds, by the clock of its writer, or 0.

    With `after`, it takes effect only if nothing has since this place. With `instead`, which needs that, its
    items replace all before it. A `named` one has an id of the caller, who may give it again at any
    time: it may be a repeat of any entry before it.
    """

    id: str
    items: Sequence[Item]
    at: float = 0.0
    after: Tip | None = None
    instead: bool = False
    named: bool = False


class Pop(NamedTuple):
    """An entry that removes the last item; `at` is in epoch seconds, by the clock of its writer."""

    id: str
    at: float


class End(NamedTuple):
    """An entry that ends the log if nothing has taken effect since a place; another log begins after it."""

    id: str
    at: float
    after: Tip


Entry: TypeAlias = Add | Pop | End


class Removal(NamedTuple):
    """The result of a pop: an item, the one with a `number` in a page, or `None` if the log was empty."""

    at: float
    item: Item | None
    number: int | None = None

    def resolved(self, paged: Mapping[int, Item], *, now: float) -> Removal | None:
        """Return the removal with its item, taken from those of pages if needed; `None` if these lack it.

        A clock that is ahead of `now` must not keep it for longer.
        """
        if self.number is not None and self.number not in paged:
            return None
        item = self.item if self.number is None else paged[self.number]
        return Removal(min(self.at, now), item)


class Placed(NamedTuple):
    """An item that is not in a page, and its addition: as the `nth` of an entry, at a time or 0.

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

    `forgotten` has the ids of the folded entries, so that repeating one has no effect. `popped` has the items
    that recent pops among them removed, because their writers may not have read them yet. `transcript` tells
    the place of items that have left the record; `None` if none have. `extra` holds fields of a newer version
    of this library, which survive a rewrite. `place` is the place after the folded entries; without a life,
    it is that of the record's version.
    """

    items: Sequence[Item] = ()
    forgotten: Forgotten = Forgotten()
    popped: Mapping[str, Removal] = field(default_factory=dict[str, Removal])
    transcript: Transcript | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: Place = NO_PLACE


class Log:
    """A log at one instant. `version` is `None` if no record exists.

    `held` are the remaining items that no page has, oldest first, and `items` the same without their places.
    Those in pages are the numbers from `first` to `low - 1`. `popped` maps the id of each pop to the removed
    item. `rev` counts all pops. `waste` is the number of the `length` entries without a remaining item.
    `folded` is the body, `entries` are those of the tail, and `added` has the time of each. `ids` has the
    place before each entry that took effect, by its id, and `place` is the one after all. `wipes` is the
    number of entries that are void because of one that replaced all before it, or that ended the log and is
    void, too. If older entries were `skipped`, only `newest` and `follows` are right and, for an entry that
    follows its place, `taken`.
    """

    def __init__(
        self, version: str | None, folded: Folded, entries: Sequence[Entry], skipped: int = 0
    ) -> None:
        self.version = version
        self.folded = folded
        self.entries = entries
        self.skipped = skipped
        paged = folded.transcript
        self.first, self.low, self.rev = (0, 0, 0) if paged is None else (paged.first, paged.base, paged.rev)
        held = [Placed(item, -1, "", nth, 0.0, self.rev) for nth, item in enumerate(folded.items)]
        held = [] if skipped else held
        self.popped = dict(folded.popped)
        self.forgotten = folded.forgotten
        self.ids: dict[str, Place] = {}
        self.wipes: list[int] = []
        place = folded.place
        self._start = place.gone + skipped
        self.life = place.life or first_of(version or "")
        settled, exists = place.settled, place.exists
        for index, entry in enumerate(entries):
            if entry.id in self.ids or entry.id in self.forgotten:
                continue
            before = Place(self.life, self._start + index, settled, exists)
            if not isinstance(entry, Pop) and entry.after is not None and not before.allows(entry.after):
                continue
            if isinstance(entry, End) or (isinstance(entry, Add) and entry.instead):
                # As if nothing had been in a page: those of the items before are removed with these entries.
                held, self.first, self.low, self.rev = [], 0, 0, 0
                self.wipes.append(index + isinstance(entry, End))
            if isinstance(entry, End):
                self.ids, self.popped, self.forgotten = {}, {}, Forgotten()
            self.ids[entry.id] = before
            if isinstance(entry, Pop):
                self.rev += 1
                number, removes = None, bool(held) or self.low > self.first
                if not held and removes:
                    self.low = number = self.low - 1
                self.popped[entry.id] = Removal(entry.at, held.pop().item if held else None, number)
                if not removes:
                    continue
            elif isinstance(entry, Add):
                held += [
                    Placed(item, index, entry.id, nth, entry.at, self.rev)
                    for nth, item in enumerate(entry.items)
                ]
            settled, exists = before.gone + 1, not isinstance(entry, End)
        self.place = Place(self.life, self._start + len(entries), settled, exists)
        self.held = held
        self.items = [one.item for one in held]
        self.added = [entry.at for entry in entries]
        self.length = len(entries)
        self.waste = self.length - len({one.place for one in held if one.place >= 0})

    @property
    def count(self) -> int:
        """The number of items, in pages or not."""
        return self.low - self.first + len(self.items)

    @property
    def tip(self) -> Tip:
        """The place after all entries."""
        return Tip(self.life, self.place.gone) if self.place.exists else NOWHERE

    def wipe_within(self, most: int) -> int | None:
        """Return how many of the oldest `most` entries are void; `None` for nothing at all.

        An entry may have replaced only folded items.
        """
        wiped = max((index for index in self.wipes if index <= most), default=-1)
        is_stored = wiped > 0 or len(self.folded.items) > 0 or self.folded.transcript is not None
        return wiped if wiped >= 0 and is_stored else None

    def has(self, entry_id: str) -> bool:
        """Say whether an entry is in the tail, or took effect and was folded in."""
        return entry_id in self.forgotten or any(entry.id == entry_id for entry in self.entries)

    def follows(self, entry_id: str, tip: Tip) -> bool:
        """Say whether an entry is the first one after a place."""
        at = tip.position - self._start
        if tip.life not in ("", self.life) or not 0 <= at < self.length:
            return False
        entry = self.entries[at]
        return entry.id == entry_id and not isinstance(entry, Pop) and (entry.after or NOWHERE) == tip

    def taken(self, entry_id: str, tip: Tip) -> Tip | None:
        """Return the place after an entry that took effect; `None` if it did not, or is forgotten.

        If others may have taken effect between the `tip` and the entry, nothing is accepted after the place.
        """
        before = self.ids.get(entry_id)
        if before is not None and before.allows(tip):
            return Tip(self.life, max(before.gone + 1, tip.position))
        if before is None and entry_id not in self.forgotten:
            return None
        return Tip(tip.life or self.life, tip.position)

    def newest(self, count: int) -> list[Item] | None:
        """Return the newest `count` items, oldest first; `None` if skipped entries may matter.

        If none were skipped, items in pages are left out.

        Skipped entries matter if too many of these entries are pops, or if one of these repeats a skipped
        one, as a named one may. The writer of any other entry has sent a repeat soon, so few entries before
        it are not older than it is. `MARGIN` of them tell, even if clocks differ: an entry that is older than
        most of these may be a repeat. Skipped entries may also decide whether a conditional entry takes
        effect that is not the first one after its place.
        """
        start = max(0, len(self.items) - count)
        if self.skipped and count:
            # From the entry that is replaced last, or that ended the log, on.
            after = max([0, *(void - 1 for void in self.wipes)])
            first = self.held[start].place if len(self.items) >= count else after
            if first < MARGIN:
                return None
            times = sorted(entry.at for entry in self.entries[:MARGIN])
            usual = times[(len(times) - 1) // 2]  # the lower median
            for position, entry in enumerate(self.entries[first:], self._start + first):
                tip = None if isinstance(entry, Pop) else entry.after
                is_named = isinstance(entry, Add) and entry.named
                if is_named or entry.at < usual or (tip is not None and tip.position != position):
                    return None
        return self.items[start:]

    def has_folded(self, entry_id: str) -> bool:
        """Say whether an entry was folded in, as far as this is remembered."""
        return entry_id in self.folded.forgotten

    def with_pops_until(self, at: float) -> int | None:
        """Return the number of oldest entries to fold so that no item popped by a time stays.

        `None` if no such pop exists.
        """
        until = [place for place, one in enumerate(self.entries, 1) if isinstance(one, Pop) and one.at <= at]
        if until:
            return until[-1]
        return 0 if any(removal.at <= at for removal in self.folded.popped.values()) else None

    def head(self, count: int) -> Log:
        """Return the log as it was with only the oldest `count` entries."""
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

        It remembers the ids, and with `removals` the items that pops removed, for `keep_for` seconds. `now`
        is in epoch seconds. With a `transcript`, their items are in pages; `paged` has, by number, the items
        that pops removed there. If the entries are void, they leave no item behind.
        """
        head = self.head(count)
        is_void = self.wipe_within(count) == count
        young = {
            entry_id: found
            for entry_id, removal in head.popped.items()
            if removals
            and removal.at > now - keep_for
            and (found := removal.resolved(paged or {}, now=now)) is not None
        }
        # Otherwise a repeat that stays would take effect, and decide on those after it.
        left = {entry.id for entry in self.entries[count:]}
        forgotten = head.forgotten.adding(list(head.ids), now=now, keep_for=keep_for, copies=left)
        items = () if is_void or transcript is not None else head.items
        return Folded(items, forgotten, young, transcript, self.folded.extra, head.place)

    def emptied(self, count: int, extra: Mapping[str, Any]) -> Folded:
        """Return the body of a log that has ended, once the oldest `count` entries are dropped.

        Those that stay take effect as they do now.
        """
        return Folded(extra=extra, place=self.head(count).place._replace(exists=False))

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
    entries = [
        _load_after(codec.open("items-after", entry))
        if codec.is_of("items-after", entry)
        else _load_entry(codec.open("items", entry))
        for entry in record.tail
    ]
    return Log(record.version, folded_in(record, codec), entries, record.skipped)


def folded_in(record: Record, codec: Codec) -> Folded:
    """Return the body of a log, with the life that it has, for a record of another version."""
    folded = open_folded(record.body, codec)
    life = folded.place.life or first_of(record.version)
    return replace(folded, place=folded.place._replace(life=life))


def seal_entry(entry: Entry, codec: Codec) -> bytes:
    """Return the bytes of an entry whose items `require_json` has accepted."""
    content: dict[str, Any] = {"end" if isinstance(entry, End) else "pop": entry.at}
    if isinstance(entry, Add):
        content = {"set" if entry.instead else "add": list(entry.items)}
        content |= {"at": entry.at} if entry.at else {}
        content |= {"named": True} if entry.named else {}
    if isinstance(entry, Pop) or entry.after is None:
        return codec.seal("items", {"id": entry.id, **content})
    return codec.seal("items-after", {"id": entry.id, **content, "after": list(entry.after)})


def seal_folded(folded: Folded, codec: Codec) -> bytes:
    """Return the bytes of a log's body, including fields of a newer version."""
    content = {
        **folded.extra,
        "items": list(folded.items),
        "forgotten": dump_forgotten(folded.forgotten),
        "popped": {entry_id: [removal.at, removal.item] for entry_id, removal in folded.popped.items()},
        **({"place": _dump_place(folded)} if folded.place.life else {}),
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
            at = at if isinstance(at, float) else 0.0
            return Add(entry_id, _load_items(cast("object", added)), at, named=content.get("named") is True)
        if isinstance(popped, (int, float)):
            with suppress(OverflowError):
                return Pop(entry_id, float(popped))
    raise Corrupt("an entry of the log is of a kind that this version of the library does not know")


def _load_after(content: Mapping[str, Any]) -> Entry:
    entry_id, added, items, ended = (content.get(name) for name in ("id", "add", "set", "end"))
    tip, at = content.get("after"), content.get("at", 0.0)
    match tip:
        case [str(life), int(position)] if isinstance(entry_id, str):
            after = Tip(life, position)
            if isinstance(ended, float):
                return End(entry_id, ended, after)
            if isinstance(at, float) and (added is None) != (items is None):
                added, instead = (items, True) if added is None else (added, False)
                named = content.get("named") is True
                return Add(entry_id, _load_items(added), at, after, instead=instead, named=named)
        case _:
            pass
    raise Corrupt("an entry of the log is of a kind that this version of the library does not know")


_FOLDED_FIELDS = ("items", "forgotten", "popped", "transcript", "place")


def _load_folded(content: Mapping[str, Any]) -> Folded:
    try:
        forgotten = load_forgotten(content["forgotten"])
        return Folded(
            _load_items(content["items"]),
            forgotten,
            {entry_id: _load_removal(value) for entry_id, value in content["popped"].items()},
            load_transcript(content.get("transcript")),
            {name: value for name, value in content.items() if name not in _FOLDED_FIELDS},
            _load_place(content.get("place"), forgotten),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        # The cause may quote an item.
        raise Corrupt("the stored log lacks a field, or a field has the wrong type") from None


def _dump_place(folded: Folded) -> dict[str, Any]:
    life, gone, settled, exists = folded.place
    return {
        "life": life,
        "gone": gone,
        "settled": settled,
        "newest": folded.forgotten.newest,
        **({} if exists else {"ended": True}),
    }


def _load_place(content: Any, forgotten: Forgotten) -> Place:
    """Return the place in a body. A body without one, of an older version, counts as one entry."""
    if content is None:
        return Place("", 1, 1, exists=True)
    life, gone, newest = str(content["life"]), int(content["gone"]), str(content["newest"])
    if newest == forgotten.newest:
        return Place(life, gone, int(content["settled"]), exists=content.get("ended") is not True)
    # An older version has folded since, which preserves unknown fields. All that it folds takes effect.
    ids = forgotten.each()[::-1]
    gone += ids.index(newest) if newest in ids else len(ids)
    return Place(life, gone, gone, exists=True)


def _load_items(items: object) -> list[Item]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast("list[object]", items)):
        raise Corrupt("the stored log holds an item that is not a JSON object")
    return cast("list[Item]", items)


def _load_removal(value: Any) -> Removal:
    at, item = value
    if item is not None and not isinstance(item, dict):
        raise ValueError("the removed item is not a JSON object")
    return Removal(float(at), cast("Item | None", item))
