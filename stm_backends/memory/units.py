"""The content of a conversation's entries and pages: turns, and messages as item logs store them.

```
entry  stm/1 turn   {"turn_id": ..., "user_message": ..., ...}                     one turn
entry  stm/1 items  {"id": ..., "add": [message, ...], "at": 1760000000.0}         the messages of one call
page   {"turn_id": ..., "user_message": ..., ...}                                  one turn
page   {"turn_id": "ENTRY.PLACE", "item": message, "at": 1760000000.0}             one message
```

A *unit* is an item with a number: a turn that was stored as one, or one message. An entry of messages may
also have `begins`, the places of messages that begin a turn, if the caller names them; `cut`, the id of the
answer that ends with them too early; and `usage`. Its units have these in pages, too: `begins` as true or
false, the others at the last unit. A unit that an edit has put back into a record whose sums include its
usage has `counted` instead of `usage`.

An answer that is stored while it is written has an entry for each checkpoint, with `cut`, and the last one
has its id. Right before another entry of the same answer, a checkpoint adds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt
from stm_backends.memory.speech import shown, weight_of
from stm_backends.plain_json import encode_json
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec, dump_turn, stored_turn
from stm_backends.records.pages import Damaged, Pages, refused
from stm_backends.types import Said, StoredTurn, seconds_of

_ITEMS: Final = b"stm/1 items"


class Messages(NamedTuple):
    """The content of an entry of messages. Its id makes adding them twice harmless.

    `cut` is the id of the answer that ends with them too early, and otherwise "". One that `forks` holds
    nothing unless the body names it.
    """

    id: str
    units: tuple[StoredTurn, ...]
    cut: str = ""
    forks: bool = False

    @property
    def answer(self) -> str:
        """The id of the answer that this is, or is a checkpoint of."""
        return self.cut or self.id


Entry: TypeAlias = StoredTurn | Messages
"""The content of one entry: a turn, or the messages of one call."""


def units_of(entry: Entry) -> tuple[StoredTurn, ...]:
    """Return the units that an entry adds to a conversation, in order."""
    return (entry,) if isinstance(entry, StoredTurn) else entry.units


def messages_of(
    entry_id: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    at: float,
    begins: Collection[int] | None = None,
    cut: str = "",
    usage: Mapping[str, Any] | None = None,
) -> Messages:
    """Return an entry of messages. `begins` has the places of those that begin a turn, if that is known."""
    last: dict[str, Any] = {**({"cut": cut} if cut else {}), **({"usage": usage} if usage else {})}
    units = [
        _message(
            f"{entry_id}.{place}",
            entry_id,
            message,
            at,
            {
                **({} if begins is None else {"begins": place in begins}),
                **(last if place == len(messages) - 1 else {}),
            },
        )
        for place, message in enumerate(messages)
    ]
    return Messages(entry_id, tuple(units), cut)


def seal_messages(codec: Codec, entry: Messages) -> bytes:
    """Return the bytes of an entry whose messages `require_json` has accepted."""
    first, last = entry.units[0], entry.units[-1]
    begins = [place for place, unit in enumerate(entry.units) if unit.extra.get("begins")]
    content = {
        "id": entry.id,
        "add": [dict(unit.said.message) for unit in entry.units if unit.said is not None],
        **({"at": first.turn.ts} if first.turn.ts else {}),
        **({"begins": begins} if "begins" in first.extra else {}),
        **{name: last.extra[name] for name in ("cut", "usage") if name in last.extra},
    }
    return codec.seal("items", content)


def seal_units(codec: Codec, entry_id: str, units: Iterable[StoredTurn], *, forks: bool = False) -> bytes:
    """Return the bytes of an entry that holds units of other entries, as pages have them.

    One that `forks` holds nothing until the body names it.
    """
    contents = [*map(unit_content, units)]
    return codec.seal("items", {"id": entry_id, "units": contents, **({"forks": True} if forks else {})})


def seal_nothing(codec: Codec, entry_id: str) -> bytes:
    """Return the bytes of an empty entry, which replaces one whose content is gone.

    Its id must be remembered as that of an entry that has left the record.
    """
    return codec.seal("items", {"id": entry_id, "add": [{}]})


def open_entry(codec: Codec, entry: bytes) -> Entry:
    """Return the content of an entry. Raises `Corrupt` if it cannot be read."""
    if not _is_items(entry):
        return codec.open_turn(entry)
    content = codec.open("items", entry)
    entry_id, added, moved = content.get("id"), content.get("add"), content.get("units")
    if isinstance(entry_id, str) and isinstance(moved, list):
        units = tuple(map(stored_unit, cast("list[Mapping[str, Any]]", moved)))
        return Messages(entry_id, units, forks=content.get("forks") is True)
    if not isinstance(entry_id, str) or not isinstance(added, list) or not added:
        raise Corrupt("an entry of messages is of a kind that this version of the library does not know")
    for message in cast("list[object]", added):
        if not isinstance(message, dict):
            raise Corrupt("an entry holds a message that is not a JSON object")
    begins, cut, usage = (cast("object", content.get(name)) for name in ("begins", "cut", "usage"))
    return messages_of(
        entry_id,
        cast("list[Mapping[str, Any]]", added),
        at=_time_in(content),
        begins=cast("list[int]", begins) if isinstance(begins, list) else None,
        cut=cut if isinstance(cut, str) else "",
        usage=cast("dict[str, Any]", usage) if isinstance(usage, dict) else None,
    )


def stored_unit(content: Mapping[str, Any]) -> StoredTurn:
    """Return the unit that a page has under one number. Raises `Corrupt` if it cannot be read."""
    if "item" not in content:
        return stored_turn(content)
    unit_id, message = content.get("turn_id"), content["item"]
    if not isinstance(unit_id, str) or not isinstance(message, dict):
        raise Corrupt("a page holds a message that is not a JSON object")
    extra = {name: value for name, value in content.items() if name not in _OWN}
    entry_id = str(content.get("entry", unit_id.rpartition(".")[0]))
    return _message(unit_id, entry_id, cast("Mapping[str, Any]", message), _time_in(content), extra)


def unit_content(unit: StoredTurn) -> dict[str, Any]:
    """Return a unit as a page and an export have it."""
    if unit.said is None:
        return dump_turn(unit)
    at, entry = unit.turn.ts, unit.entry
    return {
        **unit.extra,
        "turn_id": unit.id,
        "item": unit.said.message,
        **({"at": at} if at else {}),
        **({} if entry == unit.id.rpartition(".")[0] else {"entry": entry}),
    }


def removed(unit: StoredTurn) -> StoredTurn:
    """Return the remains of a removed unit: its number, and the usage of its answer."""
    extra = {name: unit.extra[name] for name in ("usage", "counted") if name in unit.extra}
    return _message(unit.id, unit.entry, {}, unit.turn.ts, extra)


def replaced(unit: StoredTurn, message: Mapping[str, Any], *, begins: bool | None) -> StoredTurn:
    """Return a unit with another message. `begins` is that of an entry, if it is known."""
    extra = {name: value for name, value in unit.extra.items() if name != "begins"}
    extra |= {} if begins is None else {"begins": begins}
    return _message(unit.id, unit.entry, message, unit.turn.ts, extra)


def counted(unit: StoredTurn) -> StoredTurn:
    """Return the same unit, whose usage is already in sums."""
    extra = dict(unit.extra)
    if unit.said is None or "usage" not in extra:
        return unit
    extra["counted"] = extra.pop("usage")
    return unit._replace(extra=extra)


def usage_of(unit: StoredTurn) -> Mapping[str, Any] | None:
    """Return the usage that the caller gave for the answer that ends with a message."""
    return None if unit.said is None else unit.extra.get("usage", unit.extra.get("counted"))


async def read_units(
    pages: Pages,
    key: Key,
    transcript: Transcript,
    first: int,
    end: int,
    *,
    damaged: Damaged = refused,
) -> dict[int, StoredTurn]:
    """Return the units that pages have under the numbers from `first` to `end - 1`; see `Pages.between`."""
    found: dict[int, StoredTurn] = {}
    for number, copy in (await pages.between(key, transcript, first, end, damaged=damaged)).items():
        try:
            found[number] = stored_unit(copy.turn)
        except Corrupt as error:
            damaged(error)
    return found


def page_json(codec: Codec, unit: StoredTurn, entry: bytes) -> bytes:
    """Return a unit of an entry as the JSON that a page has of it."""
    if unit.said is None and not _is_items(entry):
        return codec.open_encoded("turn", entry)
    return encode_json(unit_content(unit))


def page_content(codec: Codec, unit: StoredTurn, entry: bytes) -> dict[str, Any]:
    """Return what `page_json` encodes."""
    if unit.said is None and not _is_items(entry):
        return codec.open("turn", entry)
    return unit_content(unit)


def _is_items(entry: bytes) -> bool:
    return entry.startswith(_ITEMS)


def entries_of(units: Iterable[StoredTurn]) -> Iterator[Messages]:
    """Yield the entries that brought these messages, or one for each message of an incomplete entry."""
    for entry_id, group in itertools.groupby(units, lambda unit: unit.entry):
        some = [*group]
        if [unit.id for unit in some] == [f"{entry_id}.{place}" for place in range(len(some))]:
            yield _entry_of(entry_id, some)
        else:
            yield from (_entry_of(unit.id, [unit]) for unit in some)


def _entry_of(entry_id: str, units: Sequence[StoredTurn]) -> Messages:
    told = any("begins" in unit.extra for unit in units)
    entry = messages_of(
        entry_id,
        [unit.said.message for unit in units if unit.said is not None],
        at=units[0].turn.ts,
        begins=[place for place, unit in enumerate(units) if unit.begins] if told else None,
        cut=str(units[-1].extra.get("cut", "")),
        usage=usage_of(units[-1]),
    )
    if "counted" not in units[-1].extra:
        return entry
    return entry._replace(units=(*entry.units[:-1], counted(entry.units[-1])))


_OWN: Final = frozenset(("turn_id", "item", "at", "entry"))


def _time_in(content: Mapping[str, Any]) -> float:
    at = content.get("at")
    return seconds_of(at) if isinstance(at, float | int) and abs(at) < 2**63 else 0.0


def _message(
    unit_id: str, entry_id: str, message: Mapping[str, Any], at: float, extra: Mapping[str, Any]
) -> StoredTurn:
    told, (turn, begins) = extra.get("begins"), shown(message, at)
    begins = told if isinstance(told, bool) else begins
    return StoredTurn(unit_id, turn, extra, Said(entry_id, message, begins, weight_of(message)))
