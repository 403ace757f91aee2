"""The sections "The MemoryEntry" and "Relevance Scoring" of the specification."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.errors import ConfigurationError, InvalidState
from stm_backends.tiers import MemoryEntry, MemoryTier, relevance

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def entry(*, days: float = 0, count: int = 0, importance: float = 0.5) -> MemoryEntry:
    then = NOW - timedelta(days=days)
    return MemoryEntry(
        "k", "c", MemoryTier.LONG_TERM, then, then, access_count=count, importance=importance, tags=["t"]
    )


def test_the_memory_entry_has_the_fields_and_defaults_of_the_document() -> None:
    before = datetime.now(UTC)
    one = MemoryEntry(key="k", content={"a": 1}, tier=MemoryTier.SHORT_TERM)
    assert before <= one.created_at <= one.last_accessed <= datetime.now(UTC)
    assert (one.access_count, one.importance, one.source_agent, one.source_run_id) == (0, 0.5, "", "")
    assert (one.tags, one.superseded_by) == ([], None)
    assert [tier.value for tier in MemoryTier] == ["fleeting", "short_term", "long_term"]


def test_serialization_restores_the_memory_entry() -> None:
    one = MemoryEntry(
        "k",
        {"a": [1, None, "x"]},
        MemoryTier.LONG_TERM,
        NOW,
        NOW + timedelta(microseconds=1),
        3,
        0.7,
        "agent",
        "run",
        ["a", "b"],
        "other",
    )
    assert MemoryEntry.from_dict(one.to_dict()) == one
    assert MemoryEntry.from_json(one.to_json()) == one
    assert json.loads(one.to_json()) == one.to_dict()
    assert one.to_dict()["tier"] == "long_term"


def test_serialization_copies_the_content() -> None:
    one = MemoryEntry("k", {"a": [1]}, MemoryTier.LONG_TERM)
    data = one.to_dict()
    data["content"]["a"].append(2)
    again = MemoryEntry.from_dict(data)
    data["content"]["a"].append(3)
    assert one.content == {"a": [1]}
    assert again.content == {"a": [1, 2]}


def test_from_dict_gives_missing_fields_their_defaults() -> None:
    one = MemoryEntry.from_dict({"key": "k", "content": 1, "tier": "fleeting", "unknown": 1})
    assert (one.key, one.tier, one.importance, one.tags) == ("k", MemoryTier.FLEETING, 0.5, [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object, not list"),
        ({}, "must have: key, content, tier"),
        ({"key": "k", "tier": "fleeting"}, "must have: content"),
        ({"key": "k", "content": 1, "tier": "longterm"}, "fleeting, short_term, long_term"),
        ({"key": 1, "content": 1, "tier": "fleeting"}, "key must be"),
        ({"key": "k", "content": 1, "tier": "fleeting", "created_at": "secret"}, "created_at must be"),
        ({"key": "k", "content": 1, "tier": "fleeting", "created_at": 3}, "created_at must be"),
        ({"key": "k", "content": 1, "tier": "fleeting", "tags": "secret"}, "tags must be"),
        ({"key": "k", "content": 1, "tier": "fleeting", "superseded_by": 3}, "superseded_by must be"),
    ],
)
def test_data_of_another_form_is_refused_without_its_text(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        MemoryEntry.from_dict(data)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=message):
        MemoryEntry.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["no JSON", "", None])
def test_a_text_that_is_no_json_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="JSON of an entry"):
        MemoryEntry.from_json(text)


def test_the_representation_of_an_entry_has_no_text_and_no_ids() -> None:
    one = MemoryEntry(
        "secret key",
        "secret",
        MemoryTier.LONG_TERM,
        NOW,
        NOW,
        3,
        0.7,
        "secret",
        "secret",
        ["secret"],
        "secret",
    )
    assert "secret" not in repr(one)
    assert "importance=0.7" in repr(one)


def test_a_time_beyond_the_calendar_is_refused() -> None:
    early = datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))
    with pytest.raises(ConfigurationError, match="created_at"):
        MemoryEntry("k", "c", MemoryTier.LONG_TERM, early)


def test_the_relevance_at_a_naive_time_is_that_of_utc() -> None:
    one = entry(days=3, count=2)
    assert one.relevance_at(NOW.replace(tzinfo=None)) == one.relevance_at(NOW)


def test_content_that_is_not_json_is_refused_when_serialized() -> None:
    with pytest.raises(InvalidState):
        MemoryEntry("k", {1, 2}, MemoryTier.LONG_TERM).to_dict()


@pytest.mark.parametrize("importance", [-0.01, 1.01, math.nan, math.inf, True, "0.5"])
def test_importance_outside_zero_to_one_is_refused(importance: float) -> None:
    with pytest.raises(ConfigurationError, match="importance"):
        MemoryEntry("k", "c", MemoryTier.SHORT_TERM, importance=importance)


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_an_access_count_that_is_no_count_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="access_count"):
        MemoryEntry("k", "c", MemoryTier.SHORT_TERM, access_count=count)


def test_naive_timestamps_are_utc_and_others_are_converted() -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 -- the case at hand
    other = datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    one = MemoryEntry("k", "c", MemoryTier.LONG_TERM, naive, other)
    assert one.created_at == one.last_accessed == NOW
    assert one.created_at.tzinfo is one.last_accessed.tzinfo is UTC
    stored = {**one.to_dict(), "created_at": "2030-01-01T00:00:00"}
    assert MemoryEntry.from_dict(stored).created_at == NOW


# The document prints components rounded to two digits, and 0.1 for a decay of 0.95 to the power of 1.
@pytest.mark.parametrize(
    ("days", "count", "importance", "total"),
    [(0, 0, 0.8, 0.72), (1, 5, 0.5, 0.55), (7, 10, 1.0, 0.71), (30, 1, 0.2, 0.13), (60, 0, 0.1, 0.05)],
)
def test_score_examples_of_the_document(days: float, count: int, importance: float, total: float) -> None:
    assert entry(days=days, count=count, importance=importance).relevance_at(NOW) == pytest.approx(
        total, abs=0.006
    )


def test_the_component_breakdown_is_the_formula_of_the_document() -> None:
    one = MemoryEntry(
        "k",
        "c",
        MemoryTier.LONG_TERM,
        NOW - timedelta(days=4),
        NOW - timedelta(days=2),
        access_count=3,
        importance=0.25,
    )
    expected = 1 / (1 + 2) * 0.3 + 3 / 10 * 0.2 + 0.25 * 0.4 + 0.95**4 * 0.1
    assert one.relevance_at(NOW) == pytest.approx(expected, rel=1e-12)
    assert entry(count=1000).relevance_at(NOW) == entry(count=10).relevance_at(NOW)
    fresh = MemoryEntry("k", "c", MemoryTier.LONG_TERM, importance=1.0)
    assert fresh.relevance_score == pytest.approx(0.8, abs=1e-3)


@given(
    created=st.floats(-1e5, 1e5),
    accessed=st.floats(-1e5, 1e5),
    count=st.integers(0, 10**9),
    importance=st.floats(0, 1),
)
def test_clock_skew_keeps_scores_within_zero_and_one(
    created: float, accessed: float, count: int, importance: float
) -> None:
    score = relevance.relevance(
        importance=importance,
        access_count=count,
        created_at=NOW + timedelta(days=created),
        last_accessed=NOW + timedelta(days=accessed),
        now=NOW,
    )
    assert 0 <= score <= 1
    assert 0 <= relevance.decayed(score, NOW + timedelta(days=accessed), NOW) <= score
