"""The next step for a shared conversation, as a pure function of its snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.memory.policy import Fold, Recover, Trim, Wait
from stm_backends.memory.shared.due import REPEATS_KEPT, Compact, Due, Held, Move, next_step, unless_held
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import messages_of
from stm_backends.messages import Message
from stm_backends.records.body import Body, Forgotten, Transcript
from stm_backends.testing.memory_contract import config, turn
from stm_backends.types import MemoryHealth, StoredTurn

NOW = 1_000_000.0
SIZE = 10
FAILED = Body(health=MemoryHealth.RETRY, attempts=1, next_attempt_at=NOW + 5.0)


def snapshot(*names: str, body: Body = Body()) -> Snapshot:
    """Return a snapshot of entries of `SIZE` bytes, each of which holds the turn of its name."""
    turns = tuple(StoredTurn(name, turn(name)) for name in names)
    return Snapshot("v", body).plus_entries(tuple(bytes(SIZE) for _ in turns), turns)


def due(
    found: Snapshot,
    *,
    zone: int = 0,
    max_drop: int = 100,
    now: float = NOW,
    batch: int | None = None,
    known_for: float = 0.0,
    room: int = 0,
    **settings: Any,
) -> Due:
    used = config(zone=zone, **{"retry_backoff_base_s": 5.0, **settings})
    traits = replace(MemoryDriver().traits, max_drop=max_drop)
    return next_step(used, found, now=now, traits=traits, room=room, batch=batch, known_for=known_for)


def folded(step: Due) -> list[str]:
    assert isinstance(step, Fold)
    return [stored.id for stored in step.turns]


def test_a_fold_has_no_more_turns_than_one_write_can_drop_with_their_repeats() -> None:
    assert folded(due(snapshot("a", "b", "c"), max_drop=2)) == ["a", "b"]
    assert folded(due(snapshot("a", "a", "b", "c"), max_drop=3)) == ["a", "b"]


def test_a_fold_has_one_turn_even_if_its_repeats_are_too_many_for_a_write() -> None:
    assert folded(due(snapshot("a", "a", "a", "b"), max_drop=2)) == ["a"]


def test_a_trim_has_no_more_turns_than_one_write_can_drop() -> None:
    found = snapshot(*"abcdef")
    assert due(found, zone=1, strategy="truncation") == Trim(5, lost=False)
    assert due(found, zone=1, strategy="truncation", max_drop=3) == Trim(3, lost=False)
    repeated = snapshot("a", "a", "a", "b", "c")
    assert due(repeated, zone=1, strategy="truncation", max_drop=2) == Trim(1, lost=False)


def test_repeats_are_removed_once_they_justify_a_write_and_nothing_else_is_due() -> None:
    for count, step in ((REPEATS_KEPT - 1, None), (REPEATS_KEPT, Compact(REPEATS_KEPT))):
        assert due(snapshot(*["a"] * (count + 1)), zone=1) == step
    assert folded(due(snapshot(*["a"] * 20), zone=0)) == ["a"]


def test_repeats_are_removed_while_a_retry_is_waited_for() -> None:
    repeated = snapshot(*["a"] * 20, body=FAILED)
    assert due(repeated) == Compact(19)
    assert due(snapshot("a", body=FAILED)) == Wait(5.0)


def test_no_more_repeats_are_removed_than_one_write_can_drop() -> None:
    assert due(snapshot(*["a"] * 40), zone=1, max_drop=20) == Compact(20)
    # Too few at a time are not worth a write.
    assert due(snapshot(*["a"] * 40), zone=1, max_drop=REPEATS_KEPT - 1) is None


def test_repeats_that_do_not_lead_stay() -> None:
    assert due(snapshot("a", *["b"] * 20), zone=2) is None


def test_a_full_record_gives_up_a_single_repeat_before_a_turn() -> None:
    assert due(snapshot("a", "a", "b"), zone=2, room=1) == Compact(1)


def test_a_full_record_gives_up_what_precedes_its_first_turn_before_that_turn() -> None:
    gone = replace(FAILED, forgotten=Forgotten().adding(["gone"], now=NOW, keep_for=9.0))
    assert due(snapshot("gone", "a", body=gone), room=1) == Compact(1)


def test_a_full_record_folds_without_waiting_for_a_batch() -> None:
    assert due(snapshot("a", "b"), zone=1, fold_batch_turns=5) is None
    assert folded(due(snapshot("a", "b"), zone=1, fold_batch_turns=5, room=1)) == ["a"]


@pytest.mark.parametrize(("room", "count"), [(1, 1), (SIZE, 1), (SIZE + 1, 2), (3 * SIZE, 3), (9 * SIZE, 4)])
def test_a_full_record_loses_as_many_turns_as_an_append_needs_between_attempts(room: int, count: int) -> None:
    assert due(snapshot(*"abcd", body=FAILED), room=room) == Trim(count, lost=True)


def test_a_full_record_gives_up_recent_turns_before_repeats_that_follow_them() -> None:
    found = snapshot("a", "b", "b")
    assert due(found, zone=2, room=1) == Fold("", (found.turns[0], found.turns[1]))


def test_a_full_record_without_repeats_keeps_its_recent_turns() -> None:
    assert due(snapshot("a", "b"), zone=2, room=1) is None


def test_the_settings_of_the_policy_are_passed_on() -> None:
    failed = snapshot("a", body=FAILED)
    assert due(failed, now=NOW + 2.0) == Wait(3.0)
    assert due(failed, known_for=1.0) == Wait(4.0)
    assert due(snapshot("a"), fold_batch_turns=3) is None
    assert folded(due(snapshot("a"), fold_batch_turns=3, batch=1)) == ["a"]


@pytest.mark.parametrize("step", [None, Wait(1.0)])
def test_what_does_not_write_needs_no_lease(step: Due) -> None:
    assert unless_held(step, Move(1), 5.0) is step


@pytest.mark.parametrize("step", [Recover(), Compact(1), Trim(1, lost=False), Fold("", ())])
def test_what_writes_waits_for_the_lease_of_another(step: Due) -> None:
    assert unless_held(step, None, 0.5) == Held(0.5)
    assert unless_held(step, Move(1), 0.0) is step
    assert unless_held(step, Move(1), -1.0) is step


# Messages


def told(*entries: str, max_drop: int = 100, **options: Any) -> Due:
    """Say what is due of messages: `u` is a user's, `c` a call, `r` its result, `a` an answer."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    known: dict[str, Message] = {
        "u": {"role": "user", "content": "?"},
        "c": {"role": "assistant", "content": None, "tool_calls": [call]},
        "r": {"role": "tool", "tool_call_id": "c", "content": "!"},
        "a": {"role": "assistant", "content": "."},
    }
    opened = [
        messages_of(f"e{place}", [known[letter] for letter in entry], at=1.0)
        for place, entry in enumerate(entries)
    ]
    found = Snapshot("v", options.pop("body", Body())).plus_entries(
        tuple(bytes(SIZE) for _ in opened), opened
    )
    return due(found, max_drop=max_drop, transcript=True, total_max_tokens=0, **options)


def test_a_fold_of_messages_ends_where_a_turn_and_an_entry_begin() -> None:
    assert folded(told("u", "cra", "u", "a", zone=1)) == ["e0.0", "e1.0", "e1.1", "e1.2"]
    assert folded(told("u", "c", "r", "a", "u", "a", "u", zone=1, fold_max_turns=5)) == [
        *("e0.0", "e1.0", "e2.0", "e3.0")
    ]
    # Nothing divides an entry.
    assert told("uaua", zone=1) is None
    assert folded(told("uau", "a", "u", zone=1)) == ["e0.0", "e0.1", "e0.2", "e1.0"]


def test_a_turn_of_more_messages_than_a_portion_is_folded_whole() -> None:
    assert len(folded(told("u", "c", "r", "a", "u", zone=1, fold_max_turns=2))) == 4


def test_an_entry_of_many_turns_moves_to_pages_first() -> None:
    kept = Body(transcript=Transcript("e"))
    assert told("ua" * 9, "u", zone=1, fold_max_turns=4, body=kept) == Trim(18, lost=True)


def test_the_last_turn_stays_whatever_the_zone() -> None:
    assert told("u", "cra", zone=0) is None
    assert len(folded(told("u", "a", "u", zone=0))) == 2


def test_a_turn_of_more_entries_than_a_write_drops_is_divided() -> None:
    assert len(folded(told("u", "c", "r", "c", "r", "a", "u", zone=1, max_drop=3))) == 3
