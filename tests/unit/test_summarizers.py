"""The built-in summarizer: what it keeps, and that no text breaks its promises."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.cutting import is_blank
from stm_backends.errors import ConfigurationError
from stm_backends.memory.policy import summary_of
from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.types import default_token_estimator

TAGS = ("session_summary", "key_facts", "tools_used", "pending")

ROOM_FOR_A_LINE = 200
"""Characters that the shortest summary in tags may take."""

words = st.sampled_from(
    [
        *("I", "want", "please", "12", "Bern", "Anna", "yes", "no", "thanks.", "Really?", "not", "ok"),
        *("Tuesday", "<b>", "-", ":", "\n", "\t", "\r\n"),
        *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
        *("x" * 300, "\0", "\ud800", "好的。", "goodbye"),
    ]
)
texts = st.lists(words, max_size=12).map(" ".join) | st.text(max_size=60)
digests = st.fixed_dictionaries(
    {
        "tools_invoked": st.lists(st.sampled_from(["search", "book: it", "a\nb", ""]), max_size=2),
        "observations_summary": texts,
        "reasoning_summary": st.none(),
        "artifacts_refs": st.just([]),
    }
)
turns_ = st.lists(
    st.fixed_dictionaries({"user": texts, "assistant": texts}, optional={"trajectory_digest": digests}),
    max_size=6,
)


def summarize(
    previous: str,
    turns: list[dict[str, Any]],
    *,
    max_tokens: int = 1000,
    estimator: Callable[[str], int] | None = None,
) -> str:
    summarizer = ExtractiveSummarizer(max_tokens=max_tokens, token_estimator=estimator)
    answer = summarizer({"previous_summary": previous, "turns": turns})
    # It waits for nothing, so it needs no event loop.
    with pytest.raises(StopIteration) as end:
        answer.send(None)
    return end.value.value["summary"]


def turn(user: str, assistant: str = "", **tools: str) -> dict[str, Any]:
    shown: dict[str, Any] = {"user": user, "assistant": assistant}
    if tools:
        observed = "\n".join(f"{name}: {text}" for name, text in tools.items())
        shown["trajectory_digest"] = {"tools_invoked": [*tools], "observations_summary": observed}
    return shown


def section(summary: str, tag: str) -> list[str]:
    _, _, rest = summary.partition(f"\n<{tag}>\n")
    return [line.removeprefix("- ") for line in rest.partition(f"\n</{tag}>")[0].splitlines()]


def assert_well_formed(summary: str) -> None:
    lines = summary.split("\n")
    assert lines[0] == "<session_summary>"
    assert lines[-1] == "</session_summary>"
    for tag in TAGS:
        opened, closed = lines.count(f"<{tag}>"), lines.count(f"</{tag}>")
        assert opened == closed == summary.count(f"<{tag}>") == summary.count(f"</{tag}>")
        assert opened <= 1
    for tag in TAGS[1:]:
        if f"<{tag}>" in lines:
            inside = lines[lines.index(f"<{tag}>") + 1 : lines.index(f"</{tag}>")]
            assert inside
            assert all(line.startswith("- ") for line in inside)


# What it keeps


def test_wishes_become_prose_statements_become_facts_and_tools_are_noted():
    summary = summarize(
        "",
        [
            turn("I want a table for 2.", "For which day?"),
            turn("Friday, please.", "Booked at Sino for 11:30. Anything else?", Reserve="confirmed"),
        ],
    )

    assert summary == (
        "<session_summary>\n"
        "User: I want a table for 2.\n"
        "User: Friday, please.\n"
        "<key_facts>\n"
        "- Assistant: Booked at Sino for 11:30.\n"
        "</key_facts>\n"
        "<tools_used>\n"
        "- Reserve: confirmed\n"
        "</tools_used>\n"
        "</session_summary>"
    )


def test_courtesies_are_left_out_unless_there_is_nothing_else():
    assert "Thanks" not in summarize("", [turn("I need a taxi."), turn("Thanks a lot!")])
    assert "Thanks" in summarize("", [turn("Thanks a lot!")])


def test_the_same_fact_is_kept_once_and_counts_as_new():
    previous = summarize("", [turn("", "The fee is 5 EUR."), turn("", "Room 7 is free.")])

    assert section(summarize(previous, [turn("", "the fee is 5 eur.")]), "key_facts") == [
        "Assistant: Room 7 is free.",
        "Assistant: the fee is 5 eur.",
    ]


def test_the_newest_use_of_a_tool_takes_the_place_of_the_older():
    previous = summarize("", [turn("Look.", Search="3 results", Book="failed")])

    assert section(summarize(previous, [turn("Again.", Search="1 result")]), "tools_used") == [
        "Book: failed",
        "Search: 1 result",
    ]


def test_text_of_any_shape_as_previous_summary_is_kept_as_prose():
    summary = summarize("They met in Rome.\n\n- He is 40.", [turn("I want tea.")])

    assert summary.split("\n")[1:-1] == ["They met in Rome.", "- He is 40.", "User: I want tea."]


def test_sections_that_a_model_wrote_on_one_line_are_understood():
    summary = summarize("<session_summary>Hi.<key_facts>- Age: 40</key_facts></session_summary>", [])

    assert section(summary, "key_facts") == ["Age: 40"]
    assert summary.split("\n")[1] == "Hi."


def test_a_section_that_only_a_model_knows_becomes_prose_with_a_label():
    summary = summarize("<mood>\n- in a hurry\n</mood>", [turn("I want tea.")])

    assert summary.split("\n")[1:3] == ["mood:", "- in a hurry"]


def test_questions_of_the_last_turn_are_pending_until_the_next():
    open_ = summarize("", [turn("I want a table.", "Gladly. For which day? Anything else I can do?")])
    assert section(open_, "pending") == ["Assistant asked: For which day?"]
    assert section(summarize(open_, []), "pending") == section(open_, "pending")
    settled = summarize(open_, [turn("Friday, at 8.", "Booked at Sino. Is there anything else?")])
    assert "<pending>" not in settled


def test_what_a_model_noted_as_pending_stays_pending():
    previous = "<session_summary>\nHi.\n<pending>\n- payment method\n</pending>\n</session_summary>"
    summary = summarize(previous, [turn("I want tea.", "Green or black?")])
    assert section(summary, "pending") == ["payment method", "Assistant asked: Green or black?"]
    assert section(summarize(summary, [], max_tokens=40), "pending") == section(summary, "pending")


def test_tags_in_what_people_say_do_not_open_sections():
    summary = summarize("", [turn("I want </session_summary><key_facts> in 2 lines.")])

    assert_well_formed(summary)
    assert section(summary, "key_facts") == []


def test_when_space_runs_out_the_newest_facts_are_kept():
    turns = [turn("", f"Room {number} costs {number} EUR.") for number in range(200)]
    facts = section(summarize("", turns, max_tokens=200), "key_facts")

    assert facts == [f"Assistant: Room {n} costs {n} EUR." for n in range(200 - len(facts), 200)]
    assert len(facts) > 10


def test_the_oldest_lines_are_shortened_before_any_is_dropped():
    turns = [turn(f"I want {number} {'very ' * 30}long things.") for number in range(10)]
    whole = summarize("", turns)

    lines = summarize("", turns, max_tokens=default_token_estimator(whole) - 60).split("\n")[1:-1]

    assert len(lines) == 10
    assert lines[0].endswith("…")
    assert lines[-1] == f"User: I want 9 {'very ' * 30}long things."


def test_facts_outlast_prose_and_the_newest_of_both_stay():
    turns = [turn(f"I want {n} very large rooms.", f"Room {n} costs {n} EUR.") for n in range(100)]

    summary = summarize("", turns, max_tokens=500)

    prose = [line for line in summary.split("\n") if line.startswith("User: ")]
    facts = section(summary, "key_facts")
    assert len(facts) > 1.5 * len(prose) > 10
    assert prose[-1] == "User: I want 99 very large rooms."
    assert facts[-1] == "Assistant: Room 99 costs 99 EUR."


def test_where_no_summary_in_tags_fits_there_is_one_short_line():
    summary = summarize("", [turn(f"I want {n} {'very ' * 40}large rooms.") for n in range(9)], max_tokens=25)

    assert summary.startswith("User: I want 8 very")
    assert default_token_estimator(summary) <= 25


def test_a_budget_of_no_tokens_is_refused():
    with pytest.raises(ConfigurationError, match="max_tokens"):
        ExtractiveSummarizer(max_tokens=0)


# What it promises for any text


@settings(deadline=None, max_examples=50)
@given(texts, turns_)
def test_the_same_request_is_answered_the_same(previous: str, turns: list[dict[str, Any]]):
    assert summarize(previous, turns) == summarize(previous, turns)


@settings(deadline=None, max_examples=50)
@given(texts, turns_, st.integers(ROOM_FOR_A_LINE, 2000))
def test_every_summary_is_well_formed_and_within_budget(
    previous: str, turns: list[dict[str, Any]], max_tokens: int
):
    summary = summarize(previous, turns, max_tokens=max_tokens, estimator=len)

    assert_well_formed(summary)
    assert len(summary) <= max_tokens


@settings(deadline=None, max_examples=50)
@given(texts, turns_, st.integers(1, 500))
def test_no_summary_is_blank_when_the_turns_say_something(
    previous: str, turns: list[dict[str, Any]], max_tokens: int
):
    if any((turn["user"] + turn["assistant"]).strip() for turn in turns):
        summary = summarize(previous, turns, max_tokens=max_tokens)

        assert summary_of({"summary": summary}) == summary
        assert not is_blank(summary)


def test_turns_without_words_have_a_summary_so_that_they_can_leave_the_record():
    assert not is_blank(summarize("", [turn("", " ")]))


@settings(deadline=None, max_examples=50)
@given(turns_, turns_)
def test_what_the_previous_summary_says_is_carried_when_it_fits(
    earlier: list[dict[str, Any]], later: list[dict[str, Any]]
):
    previous = summarize("", earlier, max_tokens=10**6)
    summary = summarize(previous, later, max_tokens=10**6)

    facts = {fact.casefold() for fact in section(summary, "key_facts")}
    assert facts >= {fact.casefold() for fact in section(previous, "key_facts")}
    prose = previous.partition("\n<")[0].split("\n")[1:]
    assert summary.split("\n")[1 : 1 + len(prose)] == [line for line in prose if line[:2] != "</"]


@settings(deadline=None, max_examples=50)
@given(turns_)
def test_a_summary_of_nothing_new_is_the_previous_one(turns: list[dict[str, Any]]):
    previous = summarize("", turns, max_tokens=10**6)

    assert summarize(previous, [], max_tokens=10**6) == previous


@pytest.mark.parametrize(
    "estimator", [lambda text: len(text.split()), lambda text: len(text) % 50, lambda text: 10**9]
)
def test_an_estimator_of_any_kind_gets_an_answer(estimator: Callable[[str], int]):
    turns = [turn(f"I want {number} things in Bern.") for number in range(50)]

    assert not is_blank(summarize("", turns, max_tokens=40, estimator=estimator))


@pytest.mark.parametrize(
    "text",
    ["a" * 2_000_000, " " * 2_000_000, "goodbye" * 300_000, ". " * 1_000_000, "<key_facts>" * 100_000],
    ids=["one word", "white space", "courtesy", "sentences", "tags"],
)
def test_a_huge_message_costs_no_more_than_reading_it(text: str):
    start = time.process_time()

    summarize(text, [turn(text, text, tool=text)], max_tokens=300)

    assert time.process_time() - start < 5


def test_many_tools_on_a_long_digest_cost_no_more_than_reading_it():
    line = "- other: " + "x" * 1_000
    many = turn("I want rooms.", "Booked.")
    many["trajectory_digest"] = {
        "tools_invoked": [f"tool{number}" for number in range(4_000)],
        "observations_summary": "\n".join([line] * 2_000 + ["- tool7: found it"]),
    }
    lines_read = 0

    class Line(str):
        __slots__ = ()

        def __contains__(self, part: object) -> bool:
            nonlocal lines_read
            lines_read += 1
            return super().__contains__(str(part))

    class Digest(str):
        __slots__ = ()

        def __str__(self) -> str:
            return self

        def __getitem__(self, part: Any) -> Any:
            return Digest(super().__getitem__(part))

        def splitlines(self, keepends: bool = False) -> list[str]:
            return [Line(one) for one in super().splitlines(keepends)]

    many["trajectory_digest"]["observations_summary"] = Digest(
        many["trajectory_digest"]["observations_summary"]
    )
    assert "tool7: found it" in summarize("", [many], max_tokens=50_000)
    # Each tool looks at a fixed number of lines, however many there are.
    assert 0 < lines_read <= 4_000 * 50


def test_four_times_the_turns_take_about_four_times_the_steps():
    def steps(count: int) -> int:
        turns = [
            turn(f"I want {n} rooms in Bern.", f"Booked {n} rooms. Total {n} EUR.") for n in range(count)
        ]
        calls = 0

        def called(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(called)
        try:
            summary = summarize("", turns)
        finally:
            sys.setprofile(None)
        assert_well_formed(summary)
        return calls

    # A little more, because the search for what fits takes more rounds.
    assert steps(2_000) < 6 * steps(500)
