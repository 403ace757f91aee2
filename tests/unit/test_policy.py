"""The decisions of a memory, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.errors import ConfigurationError
from stm_backends.handed_in import WrongType
from stm_backends.memory.policy import (
    SHORTEST_DELAY_S,
    BadSummary,
    Fold,
    Recover,
    Trim,
    Wait,
    after_failure,
    after_fold,
    after_recovery,
    after_trim,
    delay_after,
    is_overdue,
    lease_left,
    lease_s,
    next_step,
    oldest_for_fold,
    patience,
    room_step,
    split,
    summarizer_for,
    summary_of,
)
from stm_backends.memory.view import shown_text
from stm_backends.records.body import REMEMBERED_IDS, Body, Forgotten, Lease, Overdue
from stm_backends.testing.memory_contract import config, turn
from stm_backends.tokens import PER_TOKEN
from stm_backends.types import ConversationTurn, MemoryHealth, StoredTurn, TrajectoryDigest

NOW = 1_000_000.0
FIVE_MINUTES = 300.0
HEALTHY, RETRY, DEGRADED = MemoryHealth.HEALTHY, MemoryHealth.RETRY, MemoryHealth.DEGRADED


def turns(count: int) -> list[StoredTurn]:
    return [StoredTurn(f"id-{number}", turn(number)) for number in range(count)]


# What is done next


@pytest.mark.parametrize("zone", [0, 1, 3, 9])
def test_the_last_turns_are_recent_and_the_ones_before_pending(zone: int) -> None:
    stored = turns(5)
    pending, recent = split(stored, config(zone=zone))
    assert [*pending, *recent] == stored
    assert len(recent) == min(zone, 5)


def test_no_step_is_due_without_pending_turns() -> None:
    for strategy in ("none", "truncation", "rolling_summary"):
        assert next_step(config(strategy), Body(), [], now=NOW) is None


def test_none_never_does_anything() -> None:
    assert next_step(config("none"), Body(), turns(9), now=NOW) is None


def test_a_healthy_memory_folds_all_that_is_pending() -> None:
    assert next_step(config(), Body(summary="S"), turns(3), now=NOW) == Fold("S", tuple(turns(3)))


def test_a_fold_waits_for_its_batch_by_default() -> None:
    settings = config(fold_batch_turns=4)
    assert next_step(settings, Body(), turns(3), now=NOW) is None
    assert isinstance(next_step(settings, Body(), turns(4), now=NOW), Fold)
    assert isinstance(next_step(settings, Body(), turns(1), now=NOW, batch=1), Fold)


def test_a_retry_does_not_wait_for_a_batch() -> None:
    body = Body(health=RETRY, attempts=1, next_attempt_at=NOW)
    assert isinstance(next_step(config(fold_batch_turns=4), body, turns(1), now=NOW), Fold)


def test_a_failed_attempt_is_followed_by_a_wait() -> None:
    settings = config(retry_backoff_base_s=2.0)
    body = after_failure(settings, Body(), now=NOW)
    assert next_step(settings, body, turns(1), now=NOW + 0.5) == Wait(1.5)
    assert isinstance(next_step(settings, body, turns(1), now=NOW + 2), Fold)


def test_a_clock_wrong_by_years_delays_an_attempt_by_one_backoff_only() -> None:
    settings = config(retry_backoff_base_s=2.0)
    body = after_failure(settings, Body(), now=NOW + 1e9)
    assert next_step(settings, body, turns(1), now=NOW) == Wait(2.0)


def test_the_backlog_is_trimmed_only_while_degraded_between_attempts() -> None:
    settings = config(recovery_backlog_limit=3, degraded_retry_interval_s=30.0)
    waiting = Body(health=DEGRADED, attempts=4, next_attempt_at=NOW + 10)
    assert next_step(settings, waiting, turns(5), now=NOW) == Trim(2, lost=True)
    assert next_step(settings, waiting, turns(3), now=NOW) == Wait(10)
    # A due attempt may save what is past the limit.
    assert isinstance(next_step(settings, waiting, turns(5), now=NOW + 10), Fold)
    assert isinstance(next_step(settings, Body(), turns(5), now=NOW), Fold)
    retrying = replace(waiting, health=RETRY, attempts=1)
    assert isinstance(
        next_step(replace(settings, retry_backoff_base_s=30.0), retrying, turns(5), now=NOW), Wait
    )


def test_after_the_whole_delay_a_clock_that_is_behind_is_not_used() -> None:
    settings = config(degraded_retry_interval_s=30.0)
    body = Body(health=DEGRADED, attempts=4, next_attempt_at=NOW + 1e6)
    assert next_step(settings, body, turns(1), now=NOW, known_for=10.0) == Wait(20.0)
    assert isinstance(next_step(settings, body, turns(1), now=NOW, known_for=30.0), Fold)


@pytest.mark.parametrize("health", [RETRY, DEGRADED])
def test_with_nothing_left_to_summarize_a_memory_is_healthy_again(health: MemoryHealth) -> None:
    body = Body("old", health, attempts=5, next_attempt_at=NOW + 5, folded=2)
    assert next_step(config(), body, [], now=NOW) == Recover()
    assert next_step(config("truncation"), body, [], now=NOW) is None
    assert after_recovery(body) == Body("old", HEALTHY, folded=2)


def test_a_fold_is_bounded_and_halved_per_failure_and_starts_over() -> None:
    settings = config(fold_max_turns=20, retry_attempts=0)
    body, sizes = Body(), list[int]()
    for _ in range(7):
        step = next_step(settings, body, turns(50), now=NOW, known_for=1.0)
        assert isinstance(step, Fold)
        assert list(step.turns) == turns(50)[: len(step.turns)]
        sizes.append(len(step.turns))
        body = after_failure(settings, body, now=NOW)
    assert sizes == [20, 10, 5, 2, 1, 20, 10]


def test_a_fold_is_bounded_in_tokens_and_covers_one_turn_at_least() -> None:
    long = [StoredTurn(f"id-{number}", turn(number, "x" * 400)) for number in range(5)]
    one = config().estimate(shown_text(long[0].turn, config()))
    for tokens, covered in ((1, 1), (one, 1), (2 * one - 1, 1), (2 * one, 2), (4 * one, 4), (10**6, 5)):
        step = next_step(config(fold_max_tokens=tokens), Body(), long, now=NOW)
        assert isinstance(step, Fold)
        assert len(step.turns) == covered
    halved = next_step(
        config(fold_max_tokens=4 * one), Body(health=RETRY, attempts=1), long, now=NOW, known_for=9.0
    )
    assert isinstance(halved, Fold)
    assert len(halved.turns) == 2


def test_a_full_record_loses_turns_only_where_no_attempt_is_due() -> None:
    rolling, pending = config(), turns(5)
    fold = Fold("", tuple(pending))
    assert room_step(rolling, fold, pending, count=2) is fold
    assert room_step(rolling, Wait(3), pending, count=2) == Trim(2, lost=True)
    assert room_step(rolling, Wait(3), pending, count=9) == Trim(5, lost=True)
    assert room_step(rolling, None, [], count=1) is None
    assert room_step(config("truncation"), None, pending, count=1) == Trim(5, lost=False)


def test_a_summary_of_which_the_budget_leaves_nothing_is_none() -> None:
    settings = config(summary_max_tokens=1)
    with pytest.raises(BadSummary):
        after_fold(
            settings,
            Body("old"),
            Fold("old", ()),
            "<session_summary>x</session_summary>",
            now=NOW,
            keep_for=0,
        )


def test_truncation_trims_at_twice_its_zone() -> None:
    settings = config("truncation", zone=3)
    assert next_step(settings, Body(), turns(3), now=NOW) is None
    assert next_step(settings, Body(), turns(4), now=NOW) == Trim(4, lost=False)


def test_without_summary_tokens_turns_are_trimmed_without_a_call() -> None:
    assert next_step(config(summary_max_tokens=0), Body(), turns(2), now=NOW) == Trim(2, lost=False)


@given(st.integers(0, 10**9), st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 100))
def test_every_delay_is_long_enough_not_to_spin_and_finite(
    attempts: int, base: float, interval: float, retries: int
) -> None:
    settings = config(retry_attempts=retries, retry_backoff_base_s=base, degraded_retry_interval_s=interval)
    assert SHORTEST_DELAY_S <= delay_after(settings, attempts) < math.inf


def test_retries_back_off_twofold_and_then_go_on_at_the_interval() -> None:
    settings = config(retry_attempts=3, retry_backoff_base_s=2.0, degraded_retry_interval_s=30.0)
    body, seen = Body(), list[tuple[str, float]]()
    for _ in range(6):
        body = after_failure(settings, body, now=NOW)
        seen.append((body.health.value, body.next_attempt_at - NOW))
    assert seen == [("retry", 2), ("retry", 4), ("retry", 8)] + [("degraded", 30)] * 3


# What the body is then


def test_a_flush_waits_for_one_call_and_all_its_retries() -> None:
    settings = config(retry_attempts=3, retry_backoff_base_s=2.0, summarizer_timeout_s=10.0)
    assert patience(settings) == (2 + 4 + 8) + 4 * 10
    assert patience(replace(settings, retry_attempts=0)) == 10


def test_a_flush_waits_for_ten_retries_at_most() -> None:
    settings = config(retry_attempts=10, retry_backoff_base_s=1.0, summarizer_timeout_s=10.0)
    assert patience(settings) == (2**10 - 1) + 11 * 10
    assert patience(replace(settings, retry_attempts=11)) == patience(settings)


def test_the_pause_between_two_retries_grows_to_an_hour_at_most() -> None:
    settings = config(retry_attempts=5_000, retry_backoff_base_s=1.0)
    assert [delay_after(settings, attempts) for attempts in (12, 13, 5_000)] == [2048, 3600, 3600]


def test_a_limit_of_no_backlog_keeps_one_turn_to_leave_degraded_with() -> None:
    settings = config(recovery_backlog_limit=0)
    degraded = Body(health=DEGRADED, attempts=9, next_attempt_at=NOW + 30)
    assert next_step(settings, degraded, turns(3), now=NOW) == Trim(2, lost=True)
    assert isinstance(next_step(settings, degraded, turns(1), now=NOW), Wait)


def test_turns_that_fit_for_certain_are_folded_without_an_estimate_of_each() -> None:
    settings = config(fold_max_turns=3, fold_max_tokens=13)
    pending = [StoredTurn(str(number), ConversationTurn("x" * 400, "")) for number in range(3)]
    # By their weight they seem to fit: 10 tokens, and one for each turn.
    assert len(oldest_for_fold(settings, Body(), pending, 10 * PER_TOKEN)) == 3
    assert len(oldest_for_fold(settings, Body(), pending, 11 * PER_TOKEN)) == 1


def test_a_class_of_summarizers_is_none() -> None:
    class Model:
        def __init__(self, request: object = None) -> None:
            pass

    with pytest.raises(ConfigurationError, match=r"the class Model; give an instance: Model"):
        summarizer_for(config(), Model)


def test_what_cannot_be_called_is_no_summarizer_for_any_strategy() -> None:
    for strategy in ("none", "truncation", "rolling_summary"):
        with pytest.raises(ConfigurationError, match=r"an async function .* not str"):
            summarizer_for(config(strategy), "gpt-5")


def test_summaries_need_a_summarizer_and_truncation_needs_none() -> None:
    with pytest.raises(ConfigurationError, match="needs a summarizer"):
        summarizer_for(config("rolling_summary"), None)
    assert callable(summarizer_for(config("truncation"), None))


def test_a_memory_without_a_summarizer_never_calls_one() -> None:
    with pytest.raises(BadSummary):
        summarizer_for(config("truncation"), None)({})


def test_a_fold_makes_the_memory_healthy_and_remembers_what_it_covers() -> None:
    before = Body("old", DEGRADED, 7, NOW + 5, folded=2, dropped=1, extra={"new": 1})
    after = after_fold(config(), before, Fold("old", tuple(turns(3))), "new", now=NOW, keep_for=0)
    assert after == replace(
        before,
        summary="new",
        health=HEALTHY,
        attempts=0,
        next_attempt_at=0,
        folded=5,
        forgotten=after.forgotten,
    )
    assert all(f"id-{number}" in after.forgotten for number in range(3))
    assert "id-3" not in after.forgotten


@pytest.mark.parametrize(("lost", "dropped"), [(True, 3), (False, 1)])
def test_only_unintentionally_lost_turns_count_as_dropped(lost: bool, dropped: int) -> None:
    after = after_trim(Body(dropped=1), Trim(2, lost=lost), turns(2), now=NOW, keep_for=0)
    assert after.dropped == dropped
    assert "id-1" in after.forgotten


def test_a_fold_applies_while_its_summary_and_oldest_turns_are_unchanged() -> None:
    fold = Fold("S", tuple(turns(3)))
    assert fold.still_applies(Body(summary="S"), turns(3))
    assert fold.still_applies(Body(summary="S"), turns(5))
    assert not fold.still_applies(Body(summary="other"), turns(3))
    assert not fold.still_applies(Body(summary="S"), turns(2))
    assert not fold.still_applies(Body(summary="S"), turns(4)[1:])


def test_a_request_is_what_the_summarizer_expects_and_its_to_change() -> None:
    digest = TrajectoryDigest(["t"], "o", None, ["r"])
    stored = StoredTurn("x", ConversationTurn("u", "a", digest))
    request = Fold("S", (stored,)).request(config())
    assert request == {
        "previous_summary": "S",
        "turns": [
            {
                "user": "u",
                "assistant": "a",
                "trajectory_digest": {
                    "tools_invoked": ["t"],
                    "observations_summary": "o",
                    "reasoning_summary": None,
                    "artifacts_refs": ["r"],
                },
            }
        ],
    }
    request["turns"][0]["trajectory_digest"]["tools_invoked"].append("x")
    assert digest.tools_invoked == ["t"]


# Remembered ids


def _after(rounds: Sequence[int], *, keep_for: float) -> Forgotten:
    forgotten, number = Forgotten(), 0
    for when, count in enumerate(rounds):
        ids = [f"id-{number + offset}" for offset in range(count)]
        forgotten, number = forgotten.adding(ids, now=NOW + when, keep_for=keep_for), number + count
    return forgotten


@given(st.lists(st.integers(0, 60), max_size=20))
@settings(deadline=None)
def test_exactly_the_last_ids_are_remembered_once_they_are_old(rounds: list[int]) -> None:
    total, forgotten = sum(rounds), _after(rounds, keep_for=-math.inf)
    known = [number for number in range(total) if f"id-{number}" in forgotten]
    assert known == [*range(max(0, total - REMEMBERED_IDS), total)]
    assert len(forgotten.each()) == sum(count for _, count in forgotten.ages) == len(known)


def test_young_ids_are_remembered_however_many_they_are() -> None:
    forgotten = _after([200, 200, 200], keep_for=10.0)
    assert all(f"id-{number}" in forgotten for number in range(600))
    assert "id-0" not in _after([200, 200, 200], keep_for=0.5)


def test_ids_with_a_copy_in_the_record_are_remembered_at_any_age() -> None:
    forgotten = Forgotten()
    for number in range(600):
        copies = {"id-7"} if number < 590 else set[str]()
        forgotten = forgotten.adding([f"id-{number}"], now=NOW + number, keep_for=0.5, copies=copies)
        assert ("id-7" in forgotten) == (7 <= number < 590)
        assert len(forgotten.each()) == sum(count for _, count in forgotten.ages) <= REMEMBERED_IDS + 1
    assert "id-343" not in forgotten
    assert "id-344" in forgotten


def test_nothing_is_remembered_of_nothing() -> None:
    assert "" not in Forgotten()
    assert Forgotten().adding([], now=NOW, keep_for=0) == Forgotten()
    assert Forgotten().each() == []


def test_a_lease_is_as_long_as_a_call_and_one_deadline() -> None:
    assert lease_s(config(summarizer_timeout_s=60.0), 5.0) == 65


def test_a_lease_ends_after_its_time_on_the_clock_of_the_process_that_saw_it() -> None:
    lease = Lease(at=NOW, ttl=60.0)
    assert lease_left(None, now=NOW, known_for=0.0, clocks_apart=600.0) == 0
    assert lease_left(lease, now=NOW, known_for=10.0, clocks_apart=600.0) == 50
    for wrong in (-FIVE_MINUTES, FIVE_MINUTES, 1e9):
        assert lease_left(lease, now=NOW + wrong, known_for=60.0, clocks_apart=600.0) <= 0
    for wrong in (-1e9, -FIVE_MINUTES, FIVE_MINUTES):
        assert lease_left(lease, now=NOW + wrong, known_for=0.0, clocks_apart=600.0) == 60


def test_a_lease_that_is_old_by_any_clock_has_ended() -> None:
    lease = Lease(at=NOW, ttl=60.0)
    assert lease_left(lease, now=NOW + 60 + 600, known_for=0.0, clocks_apart=600.0) == 0
    assert lease_left(lease, now=NOW + 60 + 600, known_for=0.0, clocks_apart=86_400.0) == 60


def test_a_lease_is_overdue_once_it_has_ended_by_some_clock_and_nobody_has_noted_it() -> None:
    lease, noted = Lease(at=NOW, ttl=60.0), Overdue(NOW, NOW + 70)
    assert not is_overdue(lease, None, now=NOW + 59.0)
    assert is_overdue(lease, None, now=NOW + 60.0)
    assert not is_overdue(lease, noted, now=NOW + 70)
    assert is_overdue(lease, noted, now=NOW + 69), "by a clock that is ahead"
    assert is_overdue(lease, Overdue(NOW - 100, NOW - 30), now=NOW + 60.0), "an earlier lease"


def test_a_lease_ends_its_duration_after_it_was_noted_as_overdue() -> None:
    def left(overdue: Overdue, *, now: float, known_for: float = 0.0) -> float:
        lease = Lease(at=NOW, ttl=60.0)
        return lease_left(lease, now=now, known_for=known_for, clocks_apart=600.0, overdue=overdue)

    noted = Overdue(NOW, NOW + 70)
    assert left(noted, now=NOW + 70) == 60
    assert left(noted, now=NOW + 130) == 0
    assert left(noted, now=NOW + 80, known_for=59.0) == 1, "it puts off no other end"
    assert left(noted, now=NOW + 69) == 60, "by a clock that is ahead"
    assert left(Overdue(NOW - 100, NOW - 30), now=NOW + 60) == 60, "an earlier lease"


def test_a_union_has_the_ids_of_both_once_each() -> None:
    one = Forgotten().adding(["a", "b"], now=NOW, keep_for=0)
    two = Forgotten().adding(["b", "c"], now=NOW + 1, keep_for=0)
    both = one.union(two, now=NOW + 2, keep_for=0)
    assert both.each() == [*one.each(), two.each()[1]]
    assert one.union(Forgotten(), now=NOW, keep_for=0) == one
    assert Forgotten().union(one, now=NOW, keep_for=0).each() == one.each()


# Summaries


@pytest.mark.parametrize(
    "answer",
    [None, "text", 7, [], {}, {"summary": None}, {"summary": b"x"}, {"summary": " \n"}, {"Summary": "x"}],
)
def test_anything_but_a_mapping_with_a_nonblank_summary_is_rejected(answer: object) -> None:
    with pytest.raises((BadSummary, WrongType)):
        summary_of(answer)


def test_a_summary_is_taken_as_it_is() -> None:
    assert summary_of({"summary": " <session_summary>x</session_summary> ", "more": 1}).strip().endswith(">")
