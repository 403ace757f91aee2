"""What is kept beside messages as JSON: what stays, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pytest

from stm_backends.integrations.converting import GONE, Converter


def converted(value: object, deepest: int = 9) -> tuple[object, list[str]]:
    """Return what becomes of a value, and the types of what is left out."""
    converter = Converter()
    return converter.plain(value, deepest), [*converter.left_out]


class Failing(Mapping[str, Any]):
    """An object that cannot be read."""

    def __getitem__(self, name: str) -> Any:
        raise OSError("gone")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (True, True), (None, None), (1.5, 1.5), ("x", "x"), (Decimal("1.5"), "1.5")],
)
def test_what_is_at_the_deepest_level_stays(value: object, expected: object) -> None:
    assert converted([{"a": value}], 2) == ([{"a": expected}], [])


def test_what_is_nested_too_deeply_is_left_out() -> None:
    assert converted([{"a": [1], "b": 2}], 2) == ([{"b": 2}], ["list"])
    assert converted([], 0) == (GONE, ["list"])


def test_what_cannot_be_read_is_left_out() -> None:
    assert converted({"a": Failing(), "b": [Failing(), 1]}) == ({"b": [1]}, ["Failing"])


def test_keys_that_json_does_not_have_become_texts_or_are_left_out() -> None:
    assert converted({1: "a", False: "b", 2.5: "c", None: "d", 10**5_000: "e"}) == (
        {"1": "a", "False": "b", "2.5": "c"},
        ["NoneType", "int"],
    )


def test_what_contains_itself_is_left_out_within_itself_alone() -> None:
    once: list[Any] = [1]
    cyclic: dict[str, Any] = {"a": once, "b": once}
    cyclic["self"] = [cyclic]
    assert converted(cyclic) == ({"a": [1], "b": [1], "self": []}, ["dict"])
