"""What a model is asked for a summary, and what is made of its answer."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.cutting import is_blank
from stm_backends.integrations.summary_prompt import messages_for, summary_in, title_in
from stm_backends.memory.policy import BadSummary, summary_of

GOOD = "<session_summary>\nThey booked a table.\n</session_summary>"
TEXT = "They booked a table."


def asked(request: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Return the system's message and the JSON of the user's."""
    given = {"max_tokens": 500, "max_input_tokens": 10_000, **options}
    system, user = messages_for(request, **given)
    assert (system["role"], user["role"]) == ("system", "user")
    beginning, end = "<conversation_json>\n", "\n</conversation_json>"
    assert user["content"].startswith(beginning)
    assert user["content"].endswith(end)
    return system["content"], user["content"].removeprefix(beginning).removesuffix(end)


# What is asked


def test_the_prompt_has_the_previous_summary_the_turns_and_the_limit() -> None:
    request = {"previous_summary": GOOD, "turns": [{"user": "é", "assistant": "b"}]}
    system, shown = asked(request)
    assert json.loads(shown) == request
    assert "at most 500 tokens" in system
    assert '{"summary": "<session_summary>...</session_summary>"}' in system
    # Endpoints refuse to answer in JSON unless the word stands in a message.
    assert "JSON" in system


def test_a_title_is_asked_for_and_the_old_one_given_if_titles_are_wanted() -> None:
    request = {"title": "</conversation_json> Tea", "turns": []}
    system, text = asked(request, titles=True)
    assert '{"title": "...", "summary"' in system
    assert "at most six words" in system
    assert json.loads(text)["title"] == "</conversation_json> Tea"
    assert [*json.loads(asked({"turns": []}, titles=True)[1])] == ["previous_summary", "turns"]
    system, text = asked(request)
    assert "title" not in system + text


@pytest.mark.parametrize(
    ("answer", "title"),
    [
        ('{"title": "Tea", "summary": "x"}', "Tea"),
        ('{"title": "Draft", "summary": "x"} {"summary": "y", "title": "Tea"}', "Tea"),
        ('{"title": 7, "summary": "x"}', ""),
        ('{"title": "Tea"}', ""),
        ("<session_summary>x</session_summary>", ""),
    ],
)
def test_the_title_is_that_beside_the_summary(answer: str, title: str) -> None:
    assert title_in(answer) == title


HOSTILE = st.one_of(
    st.text(),
    st.sampled_from(["</conversation_json>", "</session_summary>", '"}]}', "\ud800", "<|im_end|>", "{{}}"]),
)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_can_end_what_it_stands_in_or_reach_the_instructions(
    summary: str, user: str, assistant: str
) -> None:
    request = {"previous_summary": summary, "turns": [{"user": user, "assistant": assistant}]}
    system, shown = asked(request)
    assert system == asked({"previous_summary": "", "turns": []})[0]
    assert "<" not in shown
    assert json.loads(shown) == request
    shown.encode()


def test_long_texts_are_shortened_to_what_the_model_may_be_given() -> None:
    turns = [{"user": "short", "assistant": "x" * 100_000}, {"user": "y" * 3_000, "assistant": "short"}]
    _, shown = asked({"previous_summary": GOOD, "turns": turns}, max_input_tokens=4_000)
    assert len(shown) <= 16_000
    known = json.loads(shown)
    assert known["previous_summary"] == GOOD
    assert known["turns"][0]["user"] == "short"
    assert known["turns"][0]["assistant"].endswith("x…")
    assert known["turns"][1]["user"] == "y" * 3_000


def test_a_limit_that_nothing_fits_leaves_one_short_turn() -> None:
    turns = [{"user": f"{number}" + "x" * 500, "assistant": ["y" * 500]} for number in range(50)]
    _, shown = asked({"previous_summary": "", "turns": turns}, max_input_tokens=1)
    (turn,) = json.loads(shown)["turns"]
    assert turn["user"].startswith("49x")
    assert len(turn["user"]) == 64


def nested(depth: int) -> Any:
    return {"k": nested(depth - 1), "l": ["x" * 100]} if depth else "end"


@pytest.mark.parametrize(
    "turns",
    [
        [{"user": "u", "assistant": "a", "rows": [[number, "row"] for number in range(40_000)]}],
        [{"user": "u", "assistant": "a", "map": {f"{'k' * 200}{n}": n for n in range(10_000)}}],
        [{"user": "u" * 100, "assistant": "a" * 100}] * 5_000,
        [{"user": "u", "assistant": "a", "deep": nested(100)}],
    ],
    ids=["a long list", "long names", "many turns", "deep"],
)
def test_whatever_the_turns_hold_the_prompt_stays_within_the_limit(turns: Any) -> None:
    system, shown = asked({"previous_summary": GOOD, "turns": turns}, max_input_tokens=1_500)
    assert len(system) + len(shown) <= 6_000
    known = json.loads(shown)
    assert known["previous_summary"] == GOOD
    assert known["turns"][-1]["user"].startswith("u")


def test_a_previous_summary_of_any_length_leaves_room_for_turns() -> None:
    turns = [{"user": "u", "assistant": "a"}] * 3
    system, shown = asked({"previous_summary": "s" * 1_000_000, "turns": turns}, max_input_tokens=1_500)
    assert len(system) + len(shown) <= 6_000
    assert json.loads(shown)["turns"] == turns


# What is answered

USUAL_MISTAKES = {
    "nothing wrong": json.dumps({"summary": GOOD}),
    "a code fence": f"```json\n{json.dumps({'summary': GOOD})}\n```",
    "a code fence without a language": f"```\n{json.dumps({'summary': GOOD})}\n```",
    "text before it": f"Here is the summary:\n\n{json.dumps({'summary': GOOD})}",
    "text with braces around it": f"I {{will}}: {json.dumps({'summary': GOOD})} Anything {{else}}?",
    "thoughts before it": f'<think>Say {{"summary": "a draft"}}?</think>{json.dumps({"summary": GOOD})}',
    "more than was asked for": json.dumps({"thoughts": [{"summary": 1}], "summary": GOOD}),
    "no tags": json.dumps({"summary": TEXT}),
    "no closing tag": json.dumps({"summary": f"<session_summary>{TEXT}"}),
    "no opening tag": json.dumps({"summary": f"{TEXT}\n</session_summary>"}),
    "tags in capitals": json.dumps({"summary": f"<SESSION_SUMMARY>{TEXT}</Session_Summary>"}),
    "tags twice": json.dumps({"summary": f"<session_summary>{GOOD}</session_summary>"}),
    "text around the tags": json.dumps({"summary": f"Of course! {GOOD} I hope it helps."}),
    "line breaks that are not escaped": f'{{"summary": "{GOOD}"}}',
    "tags and no object": f"Sure:\n{GOOD}\nAnything else?",
    "an object in which nothing is found": f'{{"result": {json.dumps({"summary": GOOD})}}}',
    "an object that never ends": json.dumps({"summary": GOOD})[:-1],
    "a byte order mark": f"\ufeff{json.dumps({'summary': GOOD})}",
}


@pytest.mark.parametrize("answer", USUAL_MISTAKES.values(), ids=USUAL_MISTAKES)
def test_the_usual_mistakes_are_repaired(answer: str) -> None:
    assert summary_in(answer) == GOOD


def test_quotation_marks_that_are_not_escaped_are_repaired() -> None:
    text = r'\nShe said "tea", caf\u00e9 \ud83c\udf75, C:\q.\n'
    answer = f'{{"summary": "<session_summary>{text}</session_summary>"}}'
    said = '<session_summary>\nShe said "tea", café \U0001f375, C:\\q.\n</session_summary>'
    assert summary_in(answer) == said


def test_sections_within_the_summary_stay() -> None:
    text = f"{TEXT}\n<key_facts>\n- Table: 7\n</key_facts>\n<pending>\n- the bill\n</pending>"
    assert summary_in(json.dumps({"summary": text})) == f"<session_summary>\n{text}\n</session_summary>"


NO_SUMMARIES = {
    "nothing": "",
    "white space": " \n",
    "prose": "I'm sorry, I can't help with that.",
    "an object without it": '{"answer": "They booked a table."}',
    "a number": '{"summary": 7}',
    "a list": '{"summary": ["They booked a table."]}',
    "an object": '{"summary": {"text": "They booked a table."}}',
    "null": '{"summary": null}',
    "empty": '{"summary": ""}',
    "tags alone": '{"summary": "<session_summary><key_facts></key_facts></session_summary>"}',
    "a list of objects without it": '[{"a": 1}]',
    "an object that was cut off": '{"summary": "<session_summary>They boo',
    "a tag that was cut off": "<session_summary>They boo",
    "a closing tag alone": "They booked</session_summary>",
}


@pytest.mark.parametrize("answer", NO_SUMMARIES.values(), ids=NO_SUMMARIES)
def test_what_is_no_summary_beyond_doubt_is_a_failed_attempt(answer: str) -> None:
    with pytest.raises(BadSummary):
        summary_in(answer)


def test_the_message_of_an_error_never_quotes_the_answer() -> None:
    for answer in ("prose with a secret", '{"summary": ["secret"]}', '{"summary": "<secret>"}'):
        with pytest.raises(BadSummary) as raised:
            summary_in(answer)
        assert "secret" not in str(raised.value)


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80).filter(
    lambda text: not is_blank(text) and not re.search(r"</?session_summary>", text, re.IGNORECASE)
)
FENCES = st.sampled_from(
    ["{}", "```json\n{}\n```", "```\n{}```", "Sure! Here it is:\n{}\n\nAnything else?", "\ufeff{}\n"]
)
TAGS = st.sampled_from(
    ["{}", "<session_summary>{}</session_summary>", "<session_summary>\n{}", "{}\n</session_summary>"]
)


@given(WORDS, TAGS, FENCES, st.booleans())
def test_whatever_of_this_a_model_does_the_summary_is_the_same(
    text: str, tags: str, fence: str, escaped: bool
) -> None:
    answer = json.dumps({"summary": tags.replace("{}", text)}, ensure_ascii=escaped)
    summary = summary_in(fence.replace("{}", answer))
    assert summary == f"<session_summary>\n{text.strip()}\n</session_summary>"
    # It is one to the memory, and one that is summarized again stays as it is.
    assert summary_of({"summary": summary}) == summary
    assert summary_in(json.dumps({"summary": summary})) == summary


PIECES = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from(
            [
                "{",
                "}",
                '"',
                "\\",
                '{"summary":',
                '"summary"',
                "<session_summary>",
                "</session_summary>",
                "[",
                ":",
            ]
        ),
    ),
    max_size=30,
).map("".join)


@given(PIECES)
def test_any_answer_is_a_well_formed_summary_or_a_failed_attempt(answer: str) -> None:
    try:
        summary = summary_in(answer)
    except BadSummary:
        return
    assert summary.startswith("<session_summary>\n")
    assert summary.endswith("\n</session_summary>")
    assert len(re.findall("session_summary>", summary, re.IGNORECASE)) == 2
    assert summary_of({"summary": summary}) == summary


@pytest.mark.parametrize(
    "piece", ["{", '{"a":', "[", "<session_summary>", "</session_summary>", '{"a":1}', "\\u00"]
)
def test_a_long_answer_of_nothing_is_read_in_no_time(piece: str) -> None:
    start = time.process_time()
    with pytest.raises(BadSummary):
        summary_in(piece * 100_000)
    assert time.process_time() - start < 5
