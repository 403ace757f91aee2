"""Similarity, duplicates and merges; the section "Management Categories" of the specification."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.records.steps import run_now
from stm_backends.tiers import relevance
from stm_backends.tiers.relevance import Candidate


def found(*candidates: Candidate, threshold: float = 0.7) -> list[tuple[str, str]]:
    return sorted(run_now(relevance.duplicates(candidates, threshold)))


def test_jaccard_similarity_is_that_of_the_document() -> None:
    assert relevance.jaccard("The quick fox", "the QUICK dog") == 2 / 4
    assert relevance.jaccard("a b", "a b") == 1
    assert relevance.jaccard("a", "b") == 0
    assert relevance.jaccard("", "") == 0


def test_the_less_relevant_of_two_duplicates_is_removed() -> None:
    assert found(Candidate("a", "one two three", 0.2), Candidate("b", "three two one", 0.9)) == [("a", "b")]


@pytest.mark.parametrize("content", [42, 1.5, True, None, "Alice", ""])
def test_equal_scalars_under_different_keys_are_no_duplicates(content: object) -> None:
    assert found(Candidate("a", content, 0.2), Candidate("b", content, 0.9)) == []


def test_a_chain_removes_only_what_a_survivor_duplicates() -> None:
    first, middle, last = "a b c d", "b c d e", "c d e f"
    assert relevance.jaccard(first, middle) == relevance.jaccard(middle, last) == 0.6
    assert relevance.jaccard(first, last) < 0.6
    chain = [Candidate("1", first, 0.9), Candidate("2", middle, 0.8), Candidate("3", last, 0.7)]
    assert found(*chain, threshold=0.6) == [("2", "1")]
    ends = [Candidate("1", first, 0.7), Candidate("2", middle, 0.9), Candidate("3", last, 0.8)]
    assert found(*ends, threshold=0.6) == [("1", "2"), ("3", "2")]


words = st.lists(st.sampled_from("abcdef"), max_size=6).map(" ".join)


@given(
    contents=st.lists(st.tuples(words, st.floats(0, 1)), max_size=12),
    threshold=st.sampled_from([0.3, 0.5, 0.6, 0.7, 1.0]),
)
def test_duplicates_are_those_of_comparing_each_pair(
    contents: list[tuple[str, float]], threshold: float
) -> None:
    candidates = [Candidate(str(n), text, score) for n, (text, score) in enumerate(contents)]
    kept: list[Candidate] = []
    removed: list[tuple[str, str]] = []
    for one in sorted(candidates, key=lambda one: (-one.score, one.key)):
        if not relevance.can_be_duplicate(one.content):
            continue
        similar = [other for other in kept if relevance.jaccard(one.content, other.content) >= threshold]
        if similar:
            removed.append((one.key, similar[0].key))
        else:
            kept.append(one)
    assert found(*candidates, threshold=threshold) == sorted(removed)


def test_vectors_find_duplicates_that_share_no_word() -> None:
    one = Candidate("a", "green tea", 0.9, [1.0, 0.0])
    other = Candidate("b", "hot drink", 0.5, [0.9, 0.1])
    assert found(one, other) == [("b", "a")]
    close = other._replace(vector=[0.8, 0.6])
    # Models place texts that only share a subject this close.
    assert found(one, close) == []
    assert run_now(relevance.duplicates([one, close], 0.7, 0.8)) == [("b", "a")]
    assert found(one, other._replace(vector=[0.0, 1.0])) == []
    assert found(one, other._replace(vector=None)) == []


def test_cosine_is_zero_where_it_is_undefined() -> None:
    assert relevance.cosine([1, 1], [2, 2]) == pytest.approx(1)
    assert relevance.cosine([1, 0], [0, 1]) == 0
    assert relevance.cosine([1], [1, 1]) == relevance.cosine([0, 0], [1, 1]) == 0
    assert math.isclose(relevance.cosine([1, 0], [-1, 0]), -1)


@given(st.text(max_size=400), st.lists(st.text(min_size=1, max_size=400), max_size=4), st.integers(300, 400))
def test_a_truncated_text_keeps_some_of_each_line(previous: str, newer: list[str], most: int) -> None:
    text = relevance.truncated(previous, newer, most)
    assert len(text) <= most
    assert text.startswith(previous[: most // 2])
    for line in newer:
        assert line[: min(len(line), most // 2 // len(newer) - 1)] in text


@pytest.mark.parametrize("count", [80, 600, 3000])
def test_a_text_and_very_many_lines_keep_the_newest_lines(count: int) -> None:
    newer = [f"[key {number}] what was said in line {number}" for number in range(count)]
    text = relevance.truncated("p" * 2000, newer, 2000)
    assert 1900 < len(text) <= 2000
    assert text.startswith("p" * 1000)
    kept = text.splitlines()[1:]
    assert len(kept) >= 28
    assert all(line.startswith(one) for line, one in zip(newer[-len(kept) :], kept, strict=True))
    assert min(map(len, kept)) >= 32


def test_lines_that_fit_are_all_kept() -> None:
    newer = [f"[k{number}] x" for number in range(80)]
    assert relevance.truncated("p" * 2000, newer, 2000).splitlines()[1:] == newer


def test_a_text_that_fits_is_not_truncated() -> None:
    assert relevance.truncated("abc", ["d", "efgh"], 10) == "abc\nd\nefgh"
    assert relevance.truncated("abc", ["d", "efgh"], 9) == "abc\nefgh"
