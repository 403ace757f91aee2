"""What a store of LangGraph looks for, as pure functions: as its own stores do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, Final, TypeAlias, cast

from langgraph.store.base import MatchCondition

from stm_backends.errors import ConfigurationError

Namespace: TypeAlias = tuple[str, ...]


def without_wildcards(path: Sequence[str]) -> Namespace:
    """Return the beginning of a path that names its labels."""
    return tuple(path[: path.index("*")] if "*" in path else path)


def is_match(condition: MatchCondition, namespace: Namespace) -> bool:
    """Say whether a namespace begins, or ends, as a path with wildcards does."""
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
    """Say whether a value is what a filter wants, as in LangGraph's own stores."""
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
        raise ConfigurationError(f"a filter has one of: $eq, $ne, {', '.join(_ORDERS)}")
    try:
        return _ORDERS[operator](float(value), float(other))
    except (TypeError, ValueError):
        return False  # an item without such a number


_ORDERS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "$gt": lambda one, other: one > other,
    "$gte": lambda one, other: one >= other,
    "$lt": lambda one, other: one < other,
    "$lte": lambda one, other: one <= other,
}


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one has no length."""
    lengths = sqrt(sum(x * x for x in one)) * sqrt(sum(y * y for y in other))
    return sum(x * y for x, y in zip(one, other, strict=False)) / lengths if lengths else 0.0
