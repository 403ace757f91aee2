"""The ids of a conversation's owner in a tool context."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, cast

DEFAULT_TENANT: Final = "default"
DEFAULT_USER: Final = "anonymous"


def part_of(context: Mapping[str, object], path: str, *, missing: str) -> str:
    """Return the text at a dotted path; `missing` if nothing is there, blank for an invalid id."""
    value: object = context
    for step in path.split("."):
        value = _found(value, step)
    return missing if value is None else _text(value)


def _found(value: object, step: str) -> object:
    return cast("Mapping[str, object]", value).get(step) if isinstance(value, Mapping) else None


def _text(value: object) -> str:
    """Return the text of an id; blank for values that cannot be one.

    A path that is too short ends at a collection, which may contain secrets. The default `repr` of an object
    contains its address, which another user's object can have later.
    """
    kind = type(value)
    nameless = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    collection = issubclass(kind, Collection) and not issubclass(kind, str)
    return "" if collection or nameless or callable(value) else str(value)
