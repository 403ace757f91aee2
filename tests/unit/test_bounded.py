"""The mapping that forgets what was not used for the longest time."""

from __future__ import annotations

from stm_backends.drivers.bounded import Bounded


def test_the_entry_that_was_not_used_for_the_longest_time_goes() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept["a"], kept["b"] = 1, 2
    assert kept.use("a") == 1
    kept["c"] = 3
    assert [*kept] == ["a", "c"]
    assert kept.get("b") is kept.use("b") is kept.pop("b") is None


def test_looking_at_an_entry_is_no_use_of_it() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept["a"], kept["b"] = 1, 2
    assert kept.get("a") == 1
    assert "a" in kept
    kept["c"] = 3
    assert [*kept.values()] == [2, 3]


def test_sizes_are_counted_and_what_is_too_large_is_not_kept() -> None:
    gone: list[str] = []
    kept: Bounded[str, bytes] = Bounded(10, size_of=len, forgotten=lambda key, _: gone.append(key))
    kept["a"], kept["b"] = b"1234", b"12345"
    kept["a"] = b"12"
    assert kept.size == 7
    kept["c"] = b"x" * 50
    assert gone == ["b", "a", "c"]
    assert (len(kept), kept.size) == (0, 0)
    kept["d"] = b"1"
    assert kept.pop("d") == b"1"
    assert kept.size == 0


def test_nothing_is_kept_within_a_bound_of_zero() -> None:
    kept: Bounded[str, int] = Bounded(0)
    kept["a"] = 1
    assert not [*kept]


def test_clearing_empties_the_mapping_and_calls_nothing() -> None:
    gone: list[str] = []
    kept: Bounded[str, bytes] = Bounded(4, size_of=len, forgotten=lambda key, _: gone.append(key))
    kept["a"], kept["b"] = b"12", b"34"
    kept.clear()
    assert (len(kept), kept.size, gone) == (0, 0, [])
    kept["c"] = b"1234"
    assert [*kept] == ["c"]
