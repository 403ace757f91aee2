"""A record as an item of DynamoDB, there and back, and how much of an item it takes up."""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

from stm_backends.checks import LONGEST_S
from stm_backends.driver import Key, Record

Item: TypeAlias = dict[str, dict[str, Any]]
"""Attributes by their names, each as its type and value: `{"version": {"S": "..."}}`."""

_NOTHING: Final = {"NULL": True}
_EMPTY: Final[dict[str, Any]] = {"L": []}
"""What stands for no bytes: servers older than May 2020 refuse an empty binary."""


def text(value: str) -> dict[str, Any]:
    """Return a string as an attribute."""
    return {"S": value}


def number(value: float) -> dict[str, Any]:
    """Return a number as an attribute; what is no integer, to a microsecond."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def attribute(value: bytes | None) -> dict[str, Any]:
    """Return bytes, or the absence of a body, as an attribute."""
    if value is None:
        return _NOTHING
    return {"B": value} if value else _EMPTY


def key_of(key: Key) -> Item:
    """Return the primary key of a record's item."""
    return {"pk": text(key.scope), "sk": text(key.name)}


def life(ttl: float | None, now: float) -> Item:
    """Return the attributes that end a record after so many seconds; none for one that lasts."""
    if ttl is None:
        return {}
    expires = now + min(ttl, LONGEST_S)
    return {"expires": number(expires), "reap_at": number(math.ceil(expires))}


def item_of(record: Record, *, ttl: float | None, now: float) -> Item:
    """Return a record as an item, but for its key.

    A body is always there, if only to say that there is none, and the entries are counted: what is
    missing is missed.
    """
    return {
        "version": text(record.version),
        "body": attribute(record.body),
        "tail": {"L": [attribute(entry) for entry in record.tail]},
        "entries": number(len(record.tail)),
        **life(ttl, now),
    }


def record_of(item: Item) -> Record:
    """Return the record of an item. Raises `ValueError` for one that is not whole."""
    try:
        version: str = item["version"]["S"]
        body = None if item["body"] == _NOTHING else _bytes_of(item["body"])
        tail = tuple(_bytes_of(one) for one in item["tail"]["L"])
        entries = int(item["entries"]["N"])
    except (KeyError, TypeError) as error:
        raise ValueError("an attribute is missing or of another type") from error
    if len(tail) != entries:
        raise ValueError("entries are missing")
    return Record(version, body, tail)


def is_alive(item: Item, now: float) -> bool:
    """Return whether the time of an item has not come. Raises `ValueError` for one that is not whole."""
    try:
        return "expires" not in item or float(item["expires"]["N"]) > now
    except (KeyError, TypeError) as error:
        raise ValueError("the end is of another type") from error


def size_of(item: Item) -> int:
    """Return how many bytes an item takes up, by the rules that DynamoDB bills and limits by."""
    return sum(len(name.encode()) + _size_of(value) for name, value in item.items())


def _bytes_of(value: dict[str, Any]) -> bytes:
    return b"" if value == _EMPTY else value["B"]


def _size_of(value: dict[str, Any]) -> int:
    ((kind, content),) = value.items()
    match kind:
        case "S":
            return len(content.encode())
        case "N":
            return len(content) // 2 + 1
        case "B":
            return len(content)
        case "L":
            return 3 + sum(1 + _size_of(one) for one in content)
        case _:
            return 1
