"""The section "Tier 2: Short-Term Memory" of the specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends.tiers import MemoryEntry, MemoryTier, ShortTermMemory

ShortTerm = Callable[..., ShortTermMemory]


def entry(key: str, content: Any = "text", clock: Any = None, **fields: Any) -> MemoryEntry:
    times = {} if clock is None else {"created_at": clock(), "last_accessed": clock()}
    return MemoryEntry(key, content, MemoryTier.SHORT_TERM, **{**times, **fields})


def content(summary: MemoryEntry | None) -> str:
    assert summary is not None
    assert summary.key == "__summary__"
    return str(summary.content)


async def test_the_api_example_of_short_term_memory(short_term: ShortTerm, model: Any) -> None:
    stm = short_term(max_entries=50, relevance_threshold=0.15, refresh_interval=10)
    for number in range(12):
        await stm.remember(entry(f"k{number}", f"user prefs {number}"))
    assert len(await stm.recall("user prefs")) == 12
    assert [one.key for one in await stm.get_recent(5)] == ["k11", "k10", "k9", "k8", "k7"]
    await stm.forget("k11")
    summary = await stm.summarize(llm_provider=model)
    assert summary is not None
    assert (summary.key, summary.content, summary.importance) == ("__summary__", "a summary", 0.8)
    assert len(await stm.listed()) == 11


def test_the_defaults_are_those_of_the_configuration_reference() -> None:
    parameters = inspect.signature(ShortTermMemory).parameters
    assert {name: parameters[name].default for name in list(parameters)[:3]} == {
        "max_entries": 100,
        "relevance_threshold": 0.15,
        "refresh_interval": 10,
    }


@pytest.mark.parametrize(
    "setting", [{"max_entries": 0}, {"refresh_interval": 0}, {"relevance_threshold": 1.1}]
)
def test_settings_that_make_no_sense_are_refused(setting: Any) -> None:
    with pytest.raises(ConfigurationError):
        ShortTermMemory(**setting)


async def test_every_tenth_entry_prunes_those_below_the_threshold(short_term: ShortTerm, clock: Any) -> None:
    stm = short_term(clock=clock)
    await stm.remember(entry("old", clock=clock, importance=0.0))
    clock.pass_days(60)
    for number in range(8):
        await stm.remember(entry(f"k{number}", clock=clock))
    assert len(await stm.listed()) == 9
    await stm.remember(entry("tenth", clock=clock))
    assert len(await stm.listed()) == 9
    assert await stm.recall("old") == []


async def test_over_capacity_the_least_relevant_entries_are_dropped(
    short_term: ShortTerm, clock: Any
) -> None:
    stm = short_term(max_entries=3, refresh_interval=1000, clock=clock)
    for key, importance in [("a", 0.9), ("b", 0.1), ("c", 0.5), ("d", 0.4), ("e", 0.8)]:
        await stm.remember(entry(key, clock=clock, importance=importance))
    assert {one.key for one in await stm.listed()} == {"a", "c", "e"}


async def test_recall_counts_accesses_and_sorts_by_relevance(short_term: ShortTerm, clock: Any) -> None:
    stm = short_term(clock=clock)
    await stm.remember(entry("low", clock=clock, importance=0.1))
    await stm.remember(entry("high", clock=clock, importance=0.9, tags=["Tagged"]))
    clock.pass_days(1)
    assert [one.key for one in await stm.recall("text")] == ["high", "low"]
    [found] = await stm.recall("tagged")
    assert (found.access_count, found.last_accessed) == (2, clock())


async def test_the_most_recent_entries_are_the_ones_stored_last(short_term: ShortTerm) -> None:
    stm = short_term()
    for key in "abca":
        await stm.remember(entry(key))
    assert [one.key for one in await stm.get_recent(2)] == ["a", "c"]
    assert [one.key for one in await stm.get_recent(9)] == ["a", "c", "b"]
    assert await stm.get_recent(0) == []
    with pytest.raises(ConfigurationError):
        await stm.get_recent(-1)


async def test_a_summary_replaces_all_but_the_ten_most_recent(short_term: ShortTerm, model: Any) -> None:
    stm = short_term()
    for number in range(15):
        await stm.remember(entry(f"k{number}", f"fact {number}"))
    model.answer = " the gist "
    assert content(await stm.summarize(model)) == "the gist"
    keys = [one.key for one in await stm.listed()]
    assert keys == ["__summary__", *(f"k{number}" for number in range(5, 15))]
    [summary] = [one for one in await stm.listed() if one.key == "__summary__"]
    assert (summary.importance, summary.content) == (0.8, "the gist")
    assert "fact 4" in model.prompts[0]
    assert "fact 5" not in model.prompts[0]


async def test_a_summary_without_a_model_is_cut_to_two_thousand_characters(short_term: ShortTerm) -> None:
    stm = short_term()
    for number in range(15):
        await stm.remember(entry(f"k{number}", f"fact {number} " * 100))
    text = content(await stm.summarize())
    assert 1990 <= len(text) <= 2000
    assert all(f"fact {number}" in text for number in range(5))


async def test_ten_entries_need_no_summary(short_term: ShortTerm, model: Any) -> None:
    stm = short_term()
    for number in range(10):
        await stm.remember(entry(f"k{number}"))
    assert await stm.summarize(model) is None
    assert (len(await stm.listed()), model.prompts) == (10, [])


async def test_a_summary_covers_the_one_before(short_term: ShortTerm, model: Any) -> None:
    stm = short_term()
    for number in range(11):
        await stm.remember(entry(f"k{number}"))
    model.answer = "first gist"
    await stm.summarize(model)
    await stm.remember(entry("next"))
    model.answer = "second gist"
    await stm.summarize(model)
    assert "first gist" in model.prompts[1]
    assert [one.content for one in await stm.listed() if one.key == "__summary__"] == ["second gist"]


async def test_what_the_caller_changes_in_short_term_memory_is_not_stored(short_term: ShortTerm) -> None:
    stm = short_term()
    one = entry("k", {"list": [1]}, tags=["a"])
    await stm.remember(one)
    one.content["list"].append(2)
    one.tags.append("b")
    [found] = await stm.recall("k")
    found.content["list"].append(3)
    found.tags.append("c")
    for again in (*await stm.listed(), *await stm.get_recent(1)):
        assert (again.content, again.tags) == ({"list": [1]}, ["a"])
