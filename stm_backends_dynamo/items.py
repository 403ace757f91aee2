"""Conversion between a record and its DynamoDB items: a head, and possibly parts.

A small record consists of its head alone. Large values are in parts: items that are written once and never
changed, each a list of values. The head then holds references in their place, and it alone decides which
parts belong to the record.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from stm_backends.drivers.checks import LONGEST_S, skipped_of
from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Corrupt

T = TypeVar("T")

Item: TypeAlias = dict[str, dict[str, Any]]
"""Attributes by their names, each with its type and value: `{"version": {"S": "..."}}`."""

LAYOUT: Final = 2
"""The layout of a record with parts. A record without parts has layout 1, a single item, and does not say so.

`readable_since` in a head is the oldest layout whose code can still use the record, as in `layouts.py`.
"""

MAX_PLACES: Final = 100
"""Maximum number of places that a rewrite sets; each is named in an expression of at most 4,096 bytes."""

_NOTHING: Final = {"NULL": True}
_EMPTY: Final[dict[str, Any]] = {"L": []}
"""Represents empty bytes: servers older than May 2020 reject an empty binary."""

_GRACE_S: Final = 7 * 86_400.0
"""Minimum time for which a part is kept after its record expires, so that it is rarely prolonged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes in bytes by which a record is divided. They affect cost, but no answer.

    A value of more than `large` bytes immediately gets its own part. Smaller entries are in the head. Each
    time another `loose` bytes of them have been added, those still in the head move into a part of at most
    `part` bytes and `places` entries. `record` is the maximum size of body and tail together.
    """

    large: int = 2 * 1024
    loose: int = 4 * 1024
    part: int = 256 * 1024
    places: int = 200
    run: int = 64
    crowd: int = 128
    record: int = 16 * 1024 * 1024


class Reference(NamedTuple):
    """A slice of a part: offset, count, and total bytes."""

    part: str
    first: int
    length: int
    size: int


Element: TypeAlias = bytes | Reference
"""An element of a head's tail: an entry, or a reference to several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The item that defines a record.

    `entries` counts those in parts, too. `life` is a token of a record with parts, and the other fields are
    about its parts: `seals` counts how often entries of the tail moved into one, `beside` is the size of
    their contents in bytes, and `kept` is the time until which DynamoDB's reaper leaves them; `None` means
    forever.
    """

    version: str
    body: Element | None
    tail: tuple[Element, ...]
    entries: int
    expires: float | None
    life: str | None
    seals: int
    beside: int
    kept: float | None

    @classmethod
    def of_body(cls, version: str, body: Element) -> Head:
        """Return the head of a record with a body but no tail."""
        return cls(
            version=version,
            body=body,
            tail=(),
            entries=0,
            expires=None,
            life=None,
            seals=0,
            beside=0,
            kept=None,
        )

    @property
    def parts(self) -> set[str]:
        """The names of the record's parts."""
        return {one.part for one in (self.body, *self.tail) if isinstance(one, Reference)}

    @property
    def in_parts(self) -> int:
        """The size of the record's values in parts, in bytes."""
        return sum(one.size for one in (self.body, *self.tail) if isinstance(one, Reference))

    @property
    def size(self) -> int:
        """The size of body and tail together, in bytes."""
        return sum(size_of(one) for one in (self.body or b"", *self.tail))


class Cut(NamedTuple):
    """The effect of a fold on a tail: the number of places removed, and `rest`, what remains of the last one.

    `left` is the tail afterwards.
    """

    places: int
    rest: Reference | None
    left: tuple[Element, ...]


def text(value: str) -> dict[str, Any]:
    """Return a string as an attribute."""
    return {"S": value}


def number(value: float) -> dict[str, Any]:
    """Return a number as an attribute. Other numbers than integers are rounded to six decimals."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def attribute(value: Element | None) -> dict[str, Any]:
    """Return bytes, a reference, or the absence of a body, as an attribute."""
    if value is None:
        return _NOTHING
    if isinstance(value, Reference):
        return text(":".join(map(str, value)))
    return {"B": value} if value else _EMPTY


def key_of(key: Key) -> Item:
    """Return the primary key of a record's head."""
    return {"pk": text(key.scope), "sk": text(key.name)}


def owner_of(item: Item) -> Key:
    """Return the key of the record whose head this is."""
    return Key(item["pk"]["S"], item["sk"]["S"])


def partition_of(key: Key) -> dict[str, Any]:
    """Return the partition key of a record's parts. No two records share it, and no scope equals it.

    It begins with the scope, and so with the tenant. No scope and no name contains NUL.
    """
    return text(f"{key.scope}\0{key.name}")


def part_key_of(key: Key, part: str) -> Item:
    """Return the primary key of one of a record's parts."""
    return {"pk": partition_of(key), "sk": text(part)}


def new_part() -> str:
    """Return a new, unique name for a part."""
    return secrets.token_urlsafe(9)


def end_of(ttl: float | None, now: float) -> float | None:
    """Return the time at which a record with this time to live expires; `None` means never."""
    return None if ttl is None else now + min(ttl, LONGEST_S)


def life(ttl: float | None, now: float) -> Item:
    """Return the attributes for the expiry of a record; none for one that never expires."""
    expires = end_of(ttl, now)
    if expires is None:
        return {}
    return {"expires": number(expires), "reap_at": number(math.ceil(expires))}


def kept_until(expires: float | None, now: float) -> float | None:
    """Return the time until which the parts of a record are kept; `None` means forever."""
    return None if expires is None else math.ceil(expires + max(expires - now, _GRACE_S))


def item_of(
    version: str, body: Element | None, tail: Sequence[Element], *, ttl: float | None, now: float
) -> Item:
    """Return a new record's head, without its key and the attributes about parts.

    The body is always present, even as a mark that there is none, and the entries are counted, so missing
    data are noticed.
    """
    return {
        "version": text(version),
        "body": attribute(body),
        "tail": {"L": [attribute(element) for element in tail]},
        "entries": number(sum(count_of(element) for element in tail)),
        **life(ttl, now),
    }


def part_of(values: Iterable[bytes], kept: float | None) -> Item:
    """Return a part without its key."""
    ends = {} if kept is None else {"reap_at": number(math.ceil(kept))}
    return {"values": {"L": [attribute(value) for value in values]}, **ends}


def head_of(item: Item) -> Head:
    """Return the head of a record. Raises `Corrupt` for an incomplete one, or one of a newer layout."""
    try:
        if int(item.get("readable_since", {"N": "1"})["N"]) > LAYOUT:
            raise Corrupt("the record was written by a newer version of the library; upgrade stm-backends")
        head = Head(
            version=_typed(item["version"]["S"], str),
            body=None if item["body"] == _NOTHING else _element_of(item["body"]),
            tail=tuple(_element_of(one) for one in item["tail"]["L"]),
            entries=int(item["entries"]["N"]),
            expires=float(item["expires"]["N"]) if "expires" in item else None,
            life=item["life"]["S"] if "life" in item else None,
            seals=int(item["seals"]["N"]) if "life" in item else 0,
            beside=int(item["beside"]["N"]) if "life" in item else 0,
            kept=float(item["kept"]["N"]) if "kept" in item else None,
        )
    except (KeyError, TypeError, ValueError):
        raise _not_whole("an attribute is missing or has another type") from None
    if sum(count_of(element) for element in head.tail) != head.entries:
        raise _not_whole("entries are missing")
    return head


def values_of(item: Item) -> tuple[bytes, ...]:
    """Return the values of a part. Raises `Corrupt` for an incomplete one."""
    try:
        return tuple(_bytes_of(one) for one in item["values"]["L"])
    except (KeyError, TypeError):
        raise _not_whole("a part lacks an attribute, or has one of another type") from None


def record_of(head: Head, parts: Mapping[str, Sequence[bytes]], last: int | None = None) -> Record:
    """Return the record of a head and its parts. Raises `Corrupt` if they do not match."""
    body = None if head.body is None else entries_of([head.body], parts)[0]
    tail, skipped = entries_of(head.tail, parts), skipped_of(head.entries, last)
    # The first part may also have older entries.
    return Record(head.version, body, tuple(tail[len(tail) - head.entries + skipped :]), skipped)


def newest_of(head: Head, last: int) -> Head:
    """Return the head without the places of its tail that have none of the newest `last` entries."""
    skipped = skipped_of(head.entries, last)
    for place, element in enumerate(head.tail):
        if skipped < count_of(element):
            return replace(head, tail=head.tail[place:])
        skipped -= count_of(element)
    return replace(head, tail=())


def entries_of(elements: Iterable[Element], parts: Mapping[str, Sequence[bytes]]) -> list[bytes]:
    """Return the entries at some places of a tail. Raises `Corrupt` if a part lacks them."""
    entries: list[bytes] = []
    for element in elements:
        if isinstance(element, Reference):
            found = parts[element.part][element.first : element.first + element.length]
            if len(found) != element.length or sum(map(len, found)) != element.size:
                raise _not_whole("a part does not have the expected contents")
            entries += found
        else:
            entries.append(element)
    return entries


def elements_of(
    entries: Sequence[bytes], sizes: Sizes
) -> tuple[tuple[Element, ...], dict[str, Sequence[bytes]]]:
    """Return the head's elements for rewritten entries, and the new parts that they refer to.

    A few small entries stay in the head; otherwise all of them are in parts.
    """
    weights = [weight_of(entry) for entry in entries]
    few = len(entries) <= MAX_PLACES and sum(weights) <= sizes.loose
    if few and all(len(entry) <= sizes.large for entry in entries):
        return tuple(entries), {}
    groups: list[list[bytes]] = []
    room = 0
    for entry, weight in zip(entries, weights, strict=True):
        if weight > room or len(groups[-1]) == sizes.places:
            groups.append([])
            room = sizes.part
        groups[-1].append(entry)
        room -= weight
    parts: dict[str, Sequence[bytes]] = {new_part(): group for group in groups}
    return tuple(Reference(name, 0, len(of), sum(map(len, of))) for name, of in parts.items()), parts


def cut_of(head: Head, drop: int) -> Cut:
    """Return the effect of a fold of `drop` entries on a head's tail, which has at least that many.

    The size of a part's remainder is not known here, so it has the size of the whole.
    """
    for place, element in enumerate(head.tail):
        if not drop:
            return Cut(place, None, head.tail[place:])
        count = count_of(element)
        if isinstance(element, Reference) and count > drop:
            rest = element._replace(first=element.first + drop, length=count - drop)
            return Cut(place + 1, rest, (rest, *head.tail[place + 1 :]))
        drop -= count
    return Cut(len(head.tail), None, ())


def runs_of(head: Head, sizes: Sizes, *, least: int) -> list[tuple[int, list[Element]]]:
    """Return runs of adjacent entries in a head, with their first places.

    A run has as many as fit into a part and an expression. Returns none if all weigh less than `least`.
    """
    runs: list[tuple[int, list[Element]]] = []
    weight = count = 0
    for place, element in enumerate(head.tail):
        if isinstance(element, Reference):
            continue
        weight, count = weight + weight_of(element), count + 1
        if count > sizes.places or (weight > sizes.part and count > 1):
            break
        if runs and runs[-1][0] + len(runs[-1][1]) == place:
            runs[-1][1].append(element)
        else:
            runs.append((place, [element]))
    large = [(place, run) for place, run in runs if _weight_of_all(run) >= sizes.run]
    return large if sum(_weight_of_all(run) for _, run in large) >= least else []


def crowd_of(head: Head, sizes: Sizes) -> list[tuple[int, list[Element]]]:
    """Return the first adjacent small parts, and the entries between them, if there are many."""
    if len(head.tail) < sizes.crowd:
        return []
    start, size, run = 0, 0, list[Element]()
    for place, element in enumerate(head.tail):
        if (
            size_of(element) > sizes.part // 8
            or size + size_of(element) > sizes.part
            or len(run) == sizes.places
        ):
            if len(run) >= sizes.crowd // 4:
                break
            start, size, run = place + 1, 0, []
            continue
        size += size_of(element)
        run.append(element)
    return [(start, run)] if len(run) >= sizes.crowd // 4 else []


def is_alive(item: Item, now: float) -> bool:
    """Return whether a head has not expired. Raises `Corrupt` for a malformed expiry."""
    try:
        return "expires" not in item or float(item["expires"]["N"]) > now
    except (KeyError, TypeError, ValueError):
        raise _not_whole("the expiry has another type") from None


def count_of(element: Element) -> int:
    """Return the number of entries at a place of the tail."""
    return element.length if isinstance(element, Reference) else 1


def size_of(element: Element) -> int:
    """Return the bytes at a place of the tail, or of the body."""
    return element.size if isinstance(element, Reference) else len(element)


def _weight_of_all(run: Iterable[Element]) -> int:
    return sum(weight_of(one) for one in run if not isinstance(one, Reference))


def weight_of(entry: bytes) -> int:
    """Return the weight of an entry in the head towards `Sizes.loose`; an empty one counts, too."""
    return len(entry) + 16


def _element_of(value: dict[str, Any]) -> Element:
    if "S" not in value:
        return _bytes_of(value)
    part, first, count, size = value["S"].split(":")
    return Reference(part, int(first), int(count), int(size))


def _bytes_of(value: dict[str, Any]) -> bytes:
    return b"" if value == _EMPTY else _typed(value["B"], bytes)


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _not_whole(reason: str) -> Corrupt:
    return Corrupt(f"the record is incomplete: {reason}")
