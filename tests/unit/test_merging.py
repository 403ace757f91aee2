"""The merge of two states of one conversation, as a pure function of them and of what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory.local.merge import is_unrelated, merge
from stm_backends.memory.local.state import FORGET_BY_COUNT, State
from stm_backends.records.body import REMEMBERED_IDS, Body, Forgotten
from stm_backends.testing.memory_contract import config, turn
from stm_backends.types import MemoryHealth, StoredTurn

NOW = 1_000_000.0
HEALTHY, RETRY, DEGRADED = MemoryHealth.HEALTHY, MemoryHealth.RETRY, MemoryHealth.DEGRADED


def turns(names: Iterable[str]) -> tuple[StoredTurn, ...]:
    return tuple(StoredTurn(name, turn(name)) for name in names)


def state(
    recent: str = "", *, pending: str = "", covered: Iterable[str] = "", gone: int | None = None, **body: Any
) -> State:
    """Return a state; `covered` has the ids it remembers, and `gone` may count more."""
    ids = list(covered)
    forgotten = Forgotten().adding(ids, now=NOW, keep_for=FORGET_BY_COUNT)
    return State(
        Body(**body, forgotten=forgotten),
        turns(pending),
        turns(recent),
        gone=len(ids) if gone is None else gone,
    )


def merged(
    stored: State, local: State, base: State, *, covered: str = "", exact: bool = False, zone: int = 99
) -> State:
    return merge(config(zone=zone), stored, local, base, turns(covered), exact=exact, now=NOW)


def names(found: State) -> str:
    return "".join(stored.id for stored in found.turns)


# Turns


def test_turns_of_both_sides_are_kept_and_the_stored_ones_come_first() -> None:
    assert names(merged(state("axy"), state("abc"), state("a"))) == "axybc"


def test_each_turn_goes_before_the_one_that_follows_it_here() -> None:
    assert names(merged(state("adx"), state("bacde"), state("ad"))) == "bacdxe"


def test_what_was_pending_in_the_store_stays_pending_in_a_larger_zone() -> None:
    found = merged(state("c", pending="ab"), state("cd", pending="aeb"), state("c", pending="ab"))
    assert [stored.id for stored in found.pending] == ["a", "e", "b"]
    assert [stored.id for stored in found.recent] == ["c", "d"]


def test_more_turns_than_the_zone_holds_are_pending() -> None:
    found = merged(state("ab"), state("acd"), state("a"), zone=2)
    assert [stored.id for stored in found.pending] == ["a", "b"]
    assert not merged(state("ab"), state("acd"), state("a"), zone=4).pending


def test_a_turn_that_the_store_remembers_is_not_put_back() -> None:
    stored = state("b", covered="a", summary="S")
    assert names(merged(stored, state("abc"), state("ab"))) == "bc"


def test_a_turn_that_another_overwrote_is_put_back_however_long_the_past() -> None:
    assert names(merged(state("b", gone=301), state("ab", gone=300), state("ab", gone=300))) == "ab"


def test_a_turn_that_penguiflow_removed_is_not_put_back() -> None:
    stored = replace(state("b"), ours=False)
    assert names(merged(stored, state("abc"), state("ab"))) == "bc"


def test_a_turn_is_not_put_back_into_a_state_that_is_itself_a_merge() -> None:
    assert names(merged(state("b"), state("abc"), state("ab"), exact=True)) == "bc"


@pytest.mark.parametrize(("more", "left"), [(REMEMBERED_IDS - 1, "ab"), (REMEMBERED_IDS, "b")])
def test_a_turn_that_the_store_may_have_forgotten_is_not_put_back(more: int, left: str) -> None:
    base = state("ab", gone=7)
    assert names(merged(state("b", gone=7 + more), base, base)) == left


@pytest.mark.parametrize(("more", "left"), [(REMEMBERED_IDS - 101, "ab"), (REMEMBERED_IDS - 100, "b")])
def test_what_was_forgotten_after_a_covered_turn_counts_too(more: int, left: str) -> None:
    base = state("b", covered=["a", *map(str, range(100))], summary="S")
    stored = state("b", gone=101 + more, summary="T")
    assert names(merged(stored, base, base, covered="a")) == left


# Summaries


def test_a_summary_made_here_is_kept_with_what_was_stored_meanwhile() -> None:
    found = merged(state("abcx"), state("c", covered="ab", summary="S"), state("abc"), covered="ab")
    assert (found.body.summary, names(found)) == ("S", "cx")
    assert sorted(one for one in "abcx" if one in found.body.forgotten) == ["a", "b"]


def test_covered_turns_leave_even_if_the_answer_to_their_save_was_lost() -> None:
    assert names(merged(state("ab"), state("b", covered="a", summary="S"), State())) == "b"


def test_a_stored_summary_that_grew_from_the_same_wins() -> None:
    stored = state("c", covered="a", summary="T")
    local = state("c", covered="ab", summary="S")
    found = merged(stored, local, state("ac"), covered="ab")
    assert (found.body, found.gone, names(found)) == (stored.body, 1, "bc")


def test_a_state_that_was_never_stored_brings_its_summary_along() -> None:
    found = merged(state("x"), state("b", covered="a", summary="S"), State())
    assert (found.body.summary, names(found)) == ("S", "xb")
    assert merged(state("x", summary="T"), state("b", summary="S"), State()).body.summary == "T"


@pytest.mark.parametrize(("here", "kept"), [("ab", "S"), ("abc", "S"), ("ac", "T")])
def test_a_store_that_went_back_gets_our_summary_if_it_covers_as_much(here: str, kept: str) -> None:
    local = state("z", covered=here, gone=4, summary="S")
    stored = state("z", covered="ab", summary="T")
    assert merged(stored, local, local).body.summary == kept
    assert merged(stored, local, local, exact=True).body.summary == "T"


def test_a_store_that_did_not_go_back_keeps_its_summary() -> None:
    local = state("z", covered="ab", summary="S")
    assert merged(state("z", covered="ab", summary="T"), local, local).body.summary == "T"
    penguiflows = replace(state("z", summary="T"), ours=False)
    assert merged(penguiflows, local, local).body.summary == "T"


# Counts and health


@pytest.mark.parametrize(("stored", "total"), [(12, 19), (10, 17), (1, 17)])
def test_what_either_side_counted_since_is_added_up(stored: int, total: int) -> None:
    """A store that went back counts less than before; that is made up for."""
    before, here = state("z", gone=10, folded=10, dropped=10), state("z", gone=17, folded=17, dropped=17)
    found = merged(state("z", gone=stored, folded=stored, dropped=stored), here, before)
    assert (found.gone, found.body.folded, found.body.dropped) == (total, total, total)


def test_the_stored_health_is_taken_over_where_nothing_was_tried() -> None:
    stored = state("z", health=RETRY, attempts=2, next_attempt_at=NOW + 3)
    found = merged(stored, state("z"), state("z")).body
    assert (found.health, found.attempts, found.next_attempt_at) == (RETRY, 2, NOW + 3)


def test_an_attempt_made_here_decides_the_health() -> None:
    stored, failed = state("z", health=RETRY, attempts=1), state("z", health=RETRY, attempts=2)
    assert merged(stored, failed, stored).body.attempts == 2
    folded = state("z", covered="a", summary="S")
    assert merged(state("az", health=RETRY, attempts=1), folded, state("az")).body.health is HEALTHY


@pytest.mark.parametrize(("stored", "local"), [(False, False), (True, False), (False, True)])
def test_a_recovery_goes_on_while_the_conversation_is_degraded(stored: bool, local: bool) -> None:
    ill = state("z", health=DEGRADED, attempts=9)
    found = merged(replace(ill, recovering=stored), replace(ill, recovering=local), ill)
    assert found.recovering is (stored or local)
    healed = state("z", covered="a", summary="S")
    assert not merged(replace(ill, recovering=stored), replace(healed, recovering=local), ill).recovering


# Whether a stored state descends from another


@pytest.mark.parametrize(
    ("stored", "unrelated"),
    [
        (None, True),
        (state("ab", gone=9), True),
        (state("ab", gone=10), False),
        (state("b", gone=10), True),
        (state("b", covered="a", gone=11), False),
        (state("b", gone=10 + REMEMBERED_IDS - 1), True),
        (state("b", gone=10 + REMEMBERED_IDS), False),
        (replace(state("b"), ours=False), False),
    ],
    ids=["none", "went back", "same", "lacks a turn", "folded", "nearly forgot", "forgot", "PenguiFlow's"],
)
def test_a_state_that_lacks_what_was_stored_replaces_an_erased_one(
    stored: State | None, unrelated: bool
) -> None:
    assert is_unrelated(stored, state("ab", gone=10), config()) is unrelated


def test_a_truncated_state_that_lacks_turns_replaces_nothing_erased() -> None:
    assert is_unrelated(state("b", gone=10), state("ab", gone=10), config("truncation")) is False
