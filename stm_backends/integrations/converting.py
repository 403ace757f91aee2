"""Conversion to JSON of Python values that programs attach to a message, such as times and bytes."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, cast
from uuid import UUID

GONE: Final = object()
"""The marker of a value that is left out."""

_CONVERTED: Final[tuple[tuple[tuple[type, ...], Callable[[Any], object]], ...]] = (
    ((bytes, bytearray, memoryview), lambda value: base64.b64encode(value).decode("ascii")),
    ((date, time), lambda value: value.isoformat()),
    ((timedelta,), timedelta.total_seconds),
    ((Decimal, UUID), str),
    ((Enum,), lambda value: value.value),
    ((os.PathLike,), os.fspath),
    ((BaseException,), lambda value: f"{type(value).__name__}: {value}"),
)
"""The conversion of each type. A result that is again of one of these types is converted once more."""


class Converter:
    """Converts values to JSON; `left_out` has the types of those that are left out.

    Sets become lists, and numeric keys become strings. A value is left out if it is nested too deeply,
    contains itself, or raises when it is read.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, None] = {}
        self._within: set[int] = set()

    def plain(self, value: object, deepest: int) -> object:
        """Return a value as JSON, with lists and objects at most `deepest` levels deep, or `GONE`."""
        if value is None or isinstance(value, (bool, str, float)):
            return value
        with suppress(Exception):  # a value may raise anything when its attributes are read
            if isinstance(value, int):
                str(value)  # raises for an integer with more digits than Python prints
                return value
            if isinstance(value, (Mapping, list, tuple, AbstractSet)):
                return self._inner(cast("object", value), deepest - 1)
            for types, convert in _CONVERTED:
                if isinstance(value, types):
                    return self.plain(convert(value), deepest)
        return self._gone(cast("object", value))

    def _inner(self, value: object, deepest: int) -> object:
        if deepest < 0 or id(value) in self._within:
            return self._gone(value)
        self._within.add(id(value))
        try:
            return self._each(value, deepest)
        finally:
            self._within.discard(id(value))

    def _each(self, value: object, deepest: int) -> object:
        if not isinstance(value, Mapping):
            items = [self.plain(one, deepest) for one in cast("Iterable[object]", value)]
            return [one for one in items if one is not GONE]
        found: dict[str, object] = {}
        for key, one in cast("Mapping[object, object]", value).items():
            name = self.plain(key, 0) if isinstance(key, (str, int, float)) else self._gone(key)
            plain = GONE if name is GONE else self.plain(one, deepest)
            if plain is not GONE:
                found[str(name)] = plain
        return found

    def _gone(self, value: object) -> object:
        self.left_out[type(value).__name__] = None
        return GONE
