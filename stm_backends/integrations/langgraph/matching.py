"""The matching of LangGraph's stores, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, Final, TypeAlias, cast

from langgraph.store.base import MatchCondition

from stm_backends.errors import ConfigurationError

Namespace: TypeAlias = tuple[str, ...]


def without_wildcards(path: Sequence[str]) -> Namespace:
    """Return the beginning of a path, up to the first wildcard."""
    return tuple(path[: path.index("*")] if "*" in path else path)


def is_match(condition: MatchCondition, namespace: Namespace) -> bool:
    """Return whether a namespace begins or ends with a path that may contain wildcards."""
    path = condition.path
    part = (
        namespace[: len(path)]
        if condition.match_type == "prefix"
        else namespace[len(namespace) - len(path) :]
    )
    return len(namespace) >= len(path) and all(
        wanted in ("*", label) for wanted, label in zip(path, part, strict=True)
    )


def matches(value: object, wanted: object) -> bool:
    """Return whether a value matches a filter, as in LangGraph's own stores."""
    if isinstance(wanted, Mapping):
        conditions = cast("Mapping[str, Any]", wanted)
        if any(name.startswith("$") for name in conditions):
            return all(_compares(value, name, other) for name, other in conditions.items())
        if not isinstance(value, Mapping):
            return False
        values = cast("Mapping[str, Any]", value)
        return all(matches(values.get(name), other) for name, other in conditions.items())
    if isinstance(wanted, (list, tuple)):
        parts = cast("Sequence[object]", wanted)
        if not isinstance(value, (list, tuple)):
            return False
        own = cast("Sequence[object]", value)
        return len(own) == len(parts) and all(map(matches, own, parts))
    return value == wanted


def _compares(value: Any, operator: str, other: Any) -> bool:
    if operator == "$eq":
        return bool(value == other)
    if operator == "$ne":
        return bool(value != other)
    if operator not in _ORDERS:
        raise ConfigurationError(f"a filter operator must be one of $eq, $ne, {', '.join(_ORDERS)}")
    try:
        return _ORDERS[operator](float(value), float(other))
    except (TypeError, ValueError):
        return False  # the item has no such number


_ORDERS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "$gt": lambda one, other: one > other,
    "$gte": lambda one, other: one >= other,
    "$lt": lambda one, other: one < other,
    "$lte": lambda one, other: one <= other,
}


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one has length 0."""
    lengths = sqrt(sum(x * x for x in one)) * sqrt(sum(y * y for y in other))
    return sum(x * y for x, y in zip(one, other, strict=False)) / lengths if lengths else 0.0
