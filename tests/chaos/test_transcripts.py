"""The judgement of transcripts: what a correct memory does not show is found, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import transcripts
from tests.chaos.test_checker import END, Story


def story(whole: str, later: str = "abcd", *, shown: str = "ab||cd", **more: Any) -> list[str]:
    """Return what is said of a conversation of four turns whose transcript was read twice."""
    told = Story().add("a", 0, 1).add("b", 2, 3).add("c", 4, 5)
    told.op("transcript", 6, 7, given={"ids": list(whole), "foreign": 0})
    told.add("d", 8, 9)
    summary, pending, recent = map(list, shown.split("|"))
    read = {"summary": summary, "pending": pending, "recent": recent, "health": "healthy", "foreign": 0}
    told.op("read", END + 1, END + 2, process="final", given=read)
    last = {"ids": list(later), "foreign": 0, **more}
    told.op("transcript", END + 3, END + 4, process="final", given=last)
    events = sorted(told.events, key=lambda event: event.t)
    return [one.sentence for one in transcripts.judged(events)[0]]


def test_a_transcript_of_every_turn_in_order_is_right() -> None:
    assert story("abc") == []


def test_a_turn_that_is_added_during_a_read_may_be_in_it() -> None:
    assert story("abcd") == []


@pytest.mark.parametrize("whole", ["ab", "ac", "bc"])
def test_an_acknowledged_turn_that_is_missing_is_found(whole: str) -> None:
    assert any("was acknowledged, and is missing" in one for one in story(whole))


@pytest.mark.parametrize("later", ["abdc", "bacd"])
def test_another_order_than_the_model_was_shown_is_found(later: str) -> None:
    assert any("other turns than the model was shown" in one for one in story("abc", later))


def test_a_turn_that_is_there_twice_is_found() -> None:
    assert "b is there twice" in story("abcb")


def test_two_reads_that_differ_are_found() -> None:
    assert "two reads show different turns" in story("bac")


def test_a_turn_that_is_altered_is_found() -> None:
    assert story("abc", foreign=1) == ["a turn is altered, or of another conversation"]


def test_a_conversation_that_was_erased_is_judged_by_itself_alone() -> None:
    told = Story().add("a", 0, 1).erase(2, 3).add("b", 4, 5)
    told.op("transcript", 6, 7, given={"ids": ["b", "b"], "foreign": 0})
    assert [one.sentence for one in transcripts.judged(told.events)[0]] == ["b is there twice"]


def test_a_read_that_a_deposed_master_may_have_answered_is_not_compared() -> None:
    told = Story().add("a", 0, 1)
    told.op("transcript", 6, 7, given={"ids": [], "foreign": 0}).info("doubt", 8, begin=5.0, end=6.5)
    assert transcripts.judged(told.events)[0] == []
