"""What the model is shown, as pure functions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.testing.memory_contract import config, turn
from stm_backends.types import MemoryHealth, StoredTurn, default_token_estimator
from stm_backends.view import View, cut_summary, is_blank, render, summary_within_budget

HEALTHY, DEGRADED = MemoryHealth.HEALTHY, MemoryHealth.DEGRADED


def turns(count: int, text: str = "fine") -> list[StoredTurn]:
    return [StoredTurn(f"id-{number}", turn(number, text)) for number in range(count)]


def tokens(view: View) -> int:
    payload = view.patch()["conversation_memory"]
    return len(json.dumps(payload, ensure_ascii=False, sort_keys=True)) // 4 + 1


def shown(view: View) -> tuple[list[str], list[str], str]:
    payload = view.patch().get("conversation_memory", {})
    users = [[item["user"] for item in payload.get(part, [])] for part in ("pending_turns", "recent_turns")]
    return users[0], users[1], payload.get("summary", "")


def rendered(settings: Any, *, pending: int = 0, recent: int = 0, summary: str = "", **given: Any) -> View:
    stored = turns(pending + recent, given.pop("text", "fine"))
    health = given.pop("health", HEALTHY)
    return render(settings, health=health, summary=summary, pending=stored[:pending], recent=stored[pending:])


# The whole


def test_everything_is_shown_if_there_is_room() -> None:
    view = rendered(config(total_max_tokens=0), pending=2, recent=2, summary="S")
    assert shown(view) == (["u0", "u1"], ["u2", "u3"], "S")
    assert (view.trimmed, view.kept, view.tokens) == (False, 4, tokens(view))


def test_degraded_shows_recent_turns_only() -> None:
    assert shown(rendered(config(), pending=2, recent=2, summary="S", health=DEGRADED)) == (
        [],
        ["u2", "u3"],
        "",
    )
    recovering = rendered(config(), pending=2, recent=2, summary="S", health=MemoryHealth.RECOVERING)
    assert shown(recovering) == (["u0", "u1"], ["u2", "u3"], "S")


SIZES = st.integers(0, 12)


@given(
    st.sampled_from(["truncate_oldest", "truncate_summary", "error"]),
    st.sampled_from(["truncation", "rolling_summary"]),
    st.integers(0, 300),
    st.integers(0, 300),
    SIZES,
    SIZES,
    st.text('ab \n<>/"\u00e4\ud800', max_size=120),
    st.text('ab "\\', max_size=60),
)
@settings(deadline=None, max_examples=300)
def test_what_is_shown_is_within_the_budget_and_the_newest_there_is(
    policy: Any, strategy: Any, total: int, most: int, pending: int, recent: int, summary: str, text: str
) -> None:
    settings = config(
        strategy,
        total_max_tokens=total,
        summary_max_tokens=min(most, total) if total else most,
        overflow_policy=policy,
    )
    view = rendered(settings, pending=pending, recent=recent, summary=summary, text=text)
    if not view.patch():
        assert total
        assert view.trimmed
        return
    assert not total or tokens(view) <= total
    assert view.tokens == tokens(view)
    names = [f"u{number}" for number in range(pending + recent)]
    left, right, said = shown(view)
    assert [*left, *right] == (names[-view.kept :] if view.kept else [])
    assert len(right) == min(view.kept, recent)
    assert not said or default_token_estimator(said) <= settings.budget.summary_max_tokens
    if policy != "truncate_summary" and strategy == "rolling_summary" and said == "" and view.kept:
        assert summary_within_budget(summary, settings) == ""


def test_the_oldest_turns_go_first_and_the_summary_last() -> None:
    whole = rendered(config(total_max_tokens=0), pending=2, recent=2, summary="S" * 40)
    budget = {"summary_max_tokens": 20, "overflow_policy": "truncate_oldest"}
    one_less = rendered(
        config(total_max_tokens=whole.tokens - 1, **budget), pending=2, recent=2, summary="S" * 40
    )
    assert shown(one_less) == (["u1"], ["u2", "u3"], "S" * 40)
    tight = rendered(config(total_max_tokens=20, **budget), pending=2, recent=2, summary="S" * 40)
    assert shown(tight) == ([], [], "S" * 40)


def test_truncate_summary_cuts_the_summary_before_any_turn_goes() -> None:
    whole = rendered(config(total_max_tokens=0), pending=2, recent=2, summary="S" * 400)
    settings = config(
        total_max_tokens=whole.tokens - 40, summary_max_tokens=101, overflow_policy="truncate_summary"
    )
    left, right, said = shown(rendered(settings, pending=2, recent=2, summary="S" * 400))
    assert (left, right) == (["u0", "u1"], ["u2", "u3"])
    assert 150 < len(said) < 400


def test_a_summary_too_long_to_stand_alone_is_cut_by_truncate_summary_and_else_goes() -> None:
    budget = {"total_max_tokens": 30, "summary_max_tokens": 30}
    cut = rendered(config(overflow_policy="truncate_summary", **budget), summary="S" * 119)
    assert 50 < len(shown(cut)[2]) < 119
    gone = rendered(config(overflow_policy="truncate_oldest", **budget), summary="S" * 119)
    assert gone.patch() == {"conversation_memory": {"recent_turns": []}}
    assert cut.trimmed
    assert gone.trimmed


@pytest.mark.parametrize(
    ("chosen", "trimmed"),
    [(config("none"), False), (config(total_max_tokens=1, summary_max_tokens=1), True)],
    ids=["no strategy", "no room"],
)
def test_nothing_at_all_is_shown_without_a_strategy_or_any_room(chosen: Any, trimmed: bool) -> None:
    view = rendered(chosen, recent=2, summary="S")
    assert (view.patch(), view.tokens, view.trimmed) == ({}, 1, trimmed)


@pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])
def test_ten_thousand_turns_are_trimmed_in_well_under_a_second(policy: Any) -> None:
    settings = config(zone=5000, total_max_tokens=10_000, overflow_policy=policy)
    stored = turns(10_000, "x" * 200)
    started = time.perf_counter()
    view = render(settings, health=HEALTHY, summary="S " * 3000, pending=stored[:5000], recent=stored[5000:])
    assert time.perf_counter() - started < 1.0
    assert view.tokens <= 10_000


def test_an_estimator_that_is_not_monotonous_still_ends() -> None:
    settings = config(
        total_max_tokens=50, summary_max_tokens=10, token_estimator=lambda text: hash(text) % 100
    )
    view = rendered(settings, pending=50, recent=50, summary="S " * 100)
    assert view.tokens <= 100


def test_there_is_no_room_once_the_budget_leaves_a_turn_out_and_the_refusal_quotes_nobody() -> None:
    settings = config(total_max_tokens=50, summary_max_tokens=9, overflow_policy="error")
    rendered(settings, recent=1, summary="word " * 500).require_room()
    with pytest.raises(MemoryBudgetExceeded) as caught:
        rendered(settings, recent=5, text="x" * 500).require_room()
    assert "xxx" not in str(caught.value)


# Summaries


@pytest.mark.parametrize(
    ("text", "blank"), [("<a></a>", True), (" \n", True), ("<a>x</a>", False), ("<", False)]
)
def test_tags_alone_say_nothing(text: str, blank: bool) -> None:
    assert is_blank(text) is blank


@given(st.text(max_size=200), st.integers(0, 240), st.booleans())
def test_a_cut_summary_fits_says_something_and_keeps_its_closing_tag(
    text: str, limit: int, tagged: bool
) -> None:
    summary = f"<session_summary>{text}</session_summary>" if tagged else text
    cut = cut_summary(summary, lambda candidate: len(candidate) <= limit)
    assert len(cut) <= limit
    assert cut in (summary, "") or not is_blank(cut)
    assert not (tagged and cut) or cut.endswith("</session_summary>")


def test_a_summary_is_cut_no_more_than_it_must_be() -> None:
    assert summary_within_budget("x" * 100, config(summary_max_tokens=10)) == "x" * 39
    assert summary_within_budget("x" * 39, config(summary_max_tokens=10)) == "x" * 39


def test_no_summary_tokens_leave_no_summary_whatever_the_estimator_says() -> None:
    settings = config(summary_max_tokens=0, token_estimator=lambda text: 0)
    assert summary_within_budget("S", settings) == ""
