"""What the model is shown, as pure functions."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stm_backends.cutting import cut_summary, is_blank
from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.memory.view import (
    View,
    render,
    shown_text,
    shown_weight,
    summary_within_budget,
)
from stm_backends.testing.memory_contract import config, turn
from stm_backends.tokens import weigh
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    StoredTurn,
    TrajectoryDigest,
    default_token_estimator,
)

HEALTHY, DEGRADED = MemoryHealth.HEALTHY, MemoryHealth.DEGRADED


def turns(count: int, text: str = "fine") -> list[StoredTurn]:
    return [StoredTurn(f"id-{number}", turn(number, text)) for number in range(count)]


def tokens(view: View) -> int:
    payload = view.patch()["conversation_memory"]
    return default_token_estimator(json.dumps(payload, ensure_ascii=False, sort_keys=True))


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


ESCAPED: Final = "\x00" * 1_000
"""A text that takes six times its length as JSON."""

NUMBERS: Final[Any] = list(range(1_000))

LONG_IN_JSON: Final = {
    "the summary": ([], ESCAPED),
    "a turn": ([ConversationTurn(ESCAPED, "")], ""),
    "many turns": ([ConversationTurn("", "")] * 300, ""),
    "tools": ([ConversationTurn("", "", TrajectoryDigest([ESCAPED], ""))], ""),
    "many tools": ([ConversationTurn("", "", TrajectoryDigest([""] * 1_000, ""))], ""),
    "tools that are no texts": ([ConversationTurn("", "", TrajectoryDigest(NUMBERS, ""))], ""),
    "observations": ([ConversationTurn("", "", TrajectoryDigest([], ESCAPED, ESCAPED))], ""),
}


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(("shown", "summary"), LONG_IN_JSON.values(), ids=LONG_IN_JSON.keys())
def test_nothing_is_shown_for_its_length_that_is_too_long_as_json(
    shown: list[ConversationTurn], summary: str, measured: bool
) -> None:
    stored = [StoredTurn(str(number), one) for number, one in enumerate(shown)]
    weight = sum(map(shown_weight, shown)) if measured else None

    def show(total: int) -> View:
        budget = config(total_max_tokens=total, summary_max_tokens=260)
        return render(budget, health=HEALTHY, summary=summary, pending=[], recent=stored, weight=weight)

    whole = show(0)
    assert not whole.trimmed
    assert not show(whole.tokens).trimmed
    assert show(whole.tokens - 1).trimmed


def test_a_turn_is_cut_in_its_middle() -> None:
    view = render(
        config(total_max_tokens=60, summary_max_tokens=0),
        health=HEALTHY,
        summary="",
        pending=[],
        recent=[StoredTurn("id", ConversationTurn("a" * 400 + "b" * 400, ""))],
    )
    (item,) = view.patch()["conversation_memory"]["recent_turns"]
    head, tail = (
        len(item["user"]) - len(part) for part in (item["user"].lstrip("a"), item["user"].rstrip("b"))
    )
    assert head > 10
    assert 0 <= head - tail <= 1


def test_degraded_with_nothing_pending_shows_its_summary() -> None:
    assert shown(rendered(config(), recent=2, summary="S", health=DEGRADED)) == ([], ["u0", "u1"], "S")


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
    whole = summary_within_budget(summary, settings)
    if policy != "truncate_summary" and strategy == "rolling_summary" and said == "" and view.kept and whole:
        alone = json.dumps({"recent_turns": [], "summary": whole}, ensure_ascii=False)
        assert default_token_estimator(alone) > total, "the summary goes last, and only if it must"


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


def test_a_cut_summary_takes_all_the_room_that_turns_leave() -> None:
    settings = config(
        total_max_tokens=500,
        summary_max_tokens=400,
        overflow_policy="truncate_summary",
        token_estimator=len,
    )
    view = rendered(settings, recent=4, summary="S" * 400)
    assert (view.kept, view.tokens) == (4, 500)


def test_an_oversized_summary_is_cut_by_truncate_summary_else_dropped() -> None:
    budget = {"total_max_tokens": 30, "summary_max_tokens": 30}
    cut = rendered(config(overflow_policy="truncate_summary", **budget), summary="S" * 119)
    assert 50 < len(shown(cut)[2]) < 119
    gone = rendered(config(overflow_policy="truncate_oldest", **budget), summary="S" * 119)
    assert gone.patch() == {"conversation_memory": {"recent_turns": []}}
    assert cut.trimmed
    assert gone.trimmed


@pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])
def test_turns_are_shown_again_once_the_summary_has_given_way(policy: Any) -> None:
    """Its budget is the whole budget, and JSON takes some of that: it can never be shown beside a turn."""
    settings = config(total_max_tokens=50, summary_max_tokens=50, overflow_policy=policy)
    left, right, said = shown(rendered(settings, pending=1, recent=1, summary="S" * 199))
    assert (left, right) == (["u0"], ["u1"])
    assert (said != "") is (policy == "truncate_summary")


@pytest.mark.parametrize(
    ("chosen", "trimmed"),
    [(config("none"), False), (config(total_max_tokens=1, summary_max_tokens=1), True)],
    ids=["no strategy", "no room"],
)
def test_nothing_at_all_is_shown_without_a_strategy_or_any_room(chosen: Any, trimmed: bool) -> None:
    view = rendered(chosen, recent=2, summary="S")
    assert (view.patch(), view.tokens, view.trimmed, view.kept) == ({}, 1, trimmed, 0)


@pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])
def test_to_trim_ten_thousand_turns_is_to_read_a_few_of_them(policy: Any) -> None:
    read: list[int] = []

    def estimate(text: str) -> int:
        read.append(len(text))
        return default_token_estimator(text)

    settings = config(total_max_tokens=10_000, overflow_policy=policy, token_estimator=estimate)
    stored = turns(10_000, "x" * 200)
    view = render(settings, health=HEALTHY, summary="S " * 3000, pending=stored[:5000], recent=stored[5000:])
    assert sum(read) < 1_000_000, "they have 2.3 million characters, of which 40,000 are shown"
    assert 9_000 < view.tokens <= 10_000


def test_an_estimator_that_is_not_monotonous_still_ends() -> None:
    settings = config(
        total_max_tokens=50, summary_max_tokens=10, token_estimator=lambda text: hash(text) % 100
    )
    view = rendered(settings, pending=50, recent=50, summary="S " * 100)
    assert view.tokens <= 100


def test_a_turn_over_budget_is_refused_without_quoting_it() -> None:
    settings = config(total_max_tokens=50, summary_max_tokens=9, overflow_policy="error")
    rendered(settings, recent=1, summary="word " * 500).require_room()
    with pytest.raises(MemoryBudgetExceeded) as caught:
        rendered(settings, recent=5, text="x" * 500).require_room()
    assert "xxx" not in str(caught.value)


# What is measured


@pytest.mark.parametrize("text", ["fine", 'a "quoted"\n\u00e4\ud800', ESCAPED])
@pytest.mark.parametrize("digest", [None, TrajectoryDigest(["t"], "o", None, ["r"])])
def test_the_weight_of_a_turn_is_known_without_a_configuration(
    text: str, digest: TrajectoryDigest | None
) -> None:
    one = ConversationTurn(text, text, digest)
    assert shown_weight(one) == weigh(shown_text(one, config()))
    assert shown_weight(one) >= weigh(shown_text(one, config(include_trajectory_digest=False)))


@pytest.mark.parametrize("total", [0, 400])
def test_the_estimator_is_given_the_very_json_that_is_shown(total: int) -> None:
    texts: list[str] = []

    def estimate(text: str) -> int:
        texts.append(text)
        return len(text)

    settings = config(zone=2, total_max_tokens=total, summary_max_tokens=total, token_estimator=estimate)
    large = stored(1, "u" * 300, "a", TrajectoryDigest(["t"], "o", None, ["r"]))
    view = render(
        settings,
        health=HEALTHY,
        summary="S",
        pending=[stored(0, "Hello", "Hi"), large],
        recent=[
            stored(2, "Why?", "Because", TrajectoryDigest(["t"], "o", None, ["r"])),
            stored(3, "Thanks", "Welcome"),
        ],
    )
    assert (view.tokens > 0, view.kept) == (True, 3 if total else 4)
    shown = json.dumps(view.patch()["conversation_memory"], ensure_ascii=False, sort_keys=True)
    assert shown in texts


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
    assert summary_within_budget("x" * 100, config(summary_max_tokens=10)) == f"{'x' * 17}\n…\n{'x' * 16}"
    assert summary_within_budget("x" * 39, config(summary_max_tokens=10)) == "x" * 39


NEWEST = (
    "<tools_used>\n- Reserve: confirmed\n</tools_used>\n<pending>\n- Under which name?\n</pending>\n"
    "</session_summary>"
)


def test_a_cut_summary_keeps_its_head_and_its_newest_end() -> None:
    facts = "\n".join(f"- fact {number}" for number in range(500))
    summary = f"<session_summary>\nA trip to Rome.\n<key_facts>\n{facts}\n</key_facts>\n{NEWEST}"
    cut = cut_summary(summary, lambda text: len(text) <= 400)
    assert 395 <= len(cut) <= 400
    assert cut.startswith("<session_summary>\nA trip to Rome.\n<key_facts>\n- fact 0\n")
    assert cut.endswith(f"- fact 499\n</key_facts>\n{NEWEST}")
    assert cut.count("<key_facts>") == cut.count("</key_facts>") == 1


def test_a_section_of_which_only_the_end_is_kept_is_opened_again() -> None:
    facts = "\n".join(f"- fact {number}" for number in range(100))
    summary = f"<session_summary>\n{'word ' * 500}\n<key_facts>\n{facts}\n</key_facts>\n</session_summary>"
    cut = cut_summary(summary, lambda text: len(text) <= 300)
    head, _, end = cut.partition("\n…\n")
    assert head.endswith("word word w")
    assert end.startswith("<key_facts>\n")
    assert end.endswith("- fact 99\n</key_facts>\n\n</session_summary>".replace("\n\n", "\n"))


@pytest.mark.parametrize("size", range(150, 420))
def test_a_cut_at_any_place_breaks_no_tag(size: int) -> None:
    lines = "\n".join(f"- {number}" for number in range(20))
    inner = "".join(f"<{tag}>\n{lines}\n</{tag}>\n" for tag in ("key_facts", "tools_used", "pending"))
    cut = cut_summary(f"<session_summary>\n{inner}</session_summary>", lambda text: len(text) <= size)
    assert len(cut) <= size
    opened = re.findall(r"<(\w+)>", cut)
    assert sorted(opened) == sorted(re.findall(r"</(\w+)>", cut))
    assert not re.search(r"<[^>]*$|^[^<]*>", re.sub(r"</?\w+>", "", cut))


def test_an_odd_estimator_never_doubles_the_closing_tag() -> None:
    summary = "<session_summary>x</session_summary>"
    assert cut_summary(summary, lambda text: text != summary).count("</session_summary>") == 1


def test_no_summary_tokens_leave_no_summary_with_any_estimator() -> None:
    settings = config(summary_max_tokens=0, token_estimator=lambda text: 0)
    assert summary_within_budget("S", settings) == ""


# A turn larger than the whole budget


MARK = re.compile(r"\[\.\.\. ([\d,]+) characters omitted \.\.\.\]")
POLICIES = pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])


def stored(number: int, user: str, answer: str, digest: TrajectoryDigest | None = None) -> StoredTurn:
    return StoredTurn(f"id-{number}", ConversationTurn(user, answer, digest))


def of_recent(settings: Any, recent: list[StoredTurn], summary: str = "") -> View:
    """Return what a healthy memory shows with nothing pending."""
    return render(settings, health=HEALTHY, summary=summary, pending=(), recent=recent)


def only(view: View) -> dict[str, Any]:
    (turn,) = view.patch()["conversation_memory"]["recent_turns"]
    return turn


def whole_length(cut: str) -> int:
    """Return how long a text was, by what is left of it and by what the mark says is missing."""
    return len(MARK.sub("", cut)) + sum(int(count.replace(",", "")) for count in MARK.findall(cut))


@POLICIES
@pytest.mark.parametrize("strategy", ["truncation", "rolling_summary"])
def test_a_turn_larger_than_the_budget_is_cut_in_its_middle(policy: Any, strategy: Any) -> None:
    settings = config(strategy, total_max_tokens=100, summary_max_tokens=10, overflow_policy=policy)
    huge = stored(1, "Why?", "begin " + "x" * 12_000 + " end")
    view = of_recent(settings, [*turns(1), huge])
    turn = only(view)
    assert turn["user"] == "Why?"
    assert turn["assistant"].startswith("begin xxx")
    assert turn["assistant"].endswith("xxx end")
    assert whole_length(turn["assistant"]) == len(huge.turn.assistant_response)
    assert (view.kept, view.trimmed) == (1, True)
    assert tokens(view) == view.tokens == 100, "as much is shown as there is room for"


@POLICIES
def test_both_texts_of_a_turn_are_cut_if_both_are_large(policy: Any) -> None:
    settings = config(total_max_tokens=100, summary_max_tokens=10, overflow_policy=policy)
    turn = only(of_recent(settings, [stored(1, "u" * 9000, "a" * 999)]))
    assert [len(MARK.sub("", turn[who])) for who in ("user", "assistant")] == [142, 142]
    assert [whole_length(turn[who]) for who in ("user", "assistant")] == [9000, 999]


@POLICIES
def test_newer_turns_are_shown_whole_and_the_large_one_before_them_cut(policy: Any) -> None:
    settings = config(zone=5, total_max_tokens=100, summary_max_tokens=10, overflow_policy=policy)
    recent = [*turns(2), stored(2, "Why?", "x" * 1000), stored(3, "Thanks", "Welcome")]
    view = of_recent(settings, recent)
    cut, last = view.patch()["conversation_memory"]["recent_turns"]
    assert (cut["user"], last) == ("Why?", {"user": "Thanks", "assistant": "Welcome"})
    assert whole_length(cut["assistant"]) == 1000
    assert (view.kept, tokens(view)) == (2, 100)


def test_a_large_turn_that_is_pending_is_cut_too() -> None:
    settings = config(total_max_tokens=60, summary_max_tokens=10)
    view = render(
        settings, health=HEALTHY, summary="", pending=[stored(0, "Why?", "x" * 999)], recent=turns(1)
    )
    memory = view.patch()["conversation_memory"]
    assert [turn["user"] for turn in memory["pending_turns"]] == ["Why?"]
    assert [turn["user"] for turn in memory["recent_turns"]] == ["u0"]


def test_a_turn_that_fits_the_budget_is_shown_whole_or_not_at_all() -> None:
    settings = config(total_max_tokens=100, summary_max_tokens=10)
    recent = [stored(1, "before", "x" * 200), stored(2, "after", "y" * 200)]
    assert only(of_recent(settings, recent))["assistant"] == "y" * 200


def length_shown(*shown: dict[str, Any]) -> int:
    """Return how many characters of JSON these recent turns take."""
    return len(json.dumps({"recent_turns": shown}, sort_keys=True))


def test_a_turn_that_fits_the_budget_exactly_is_not_cut() -> None:
    older = length_shown({"user": "before", "assistant": "x" * 300})
    for total, kept in ((older, 1), (older - 1, 2)):
        settings = config(total_max_tokens=total, summary_max_tokens=0, token_estimator=len)
        recent = [stored(1, "before", "x" * 300), stored(2, "after", "y" * 20)]
        assert of_recent(settings, recent).kept == kept


def test_a_turn_is_not_shown_with_fewer_than_eight_characters_of_a_text() -> None:
    least = {"user": "uuuu[... 992 characters omitted ...]uuuu", "assistant": ""}
    for total, shown in ((length_shown(least), [least]), (length_shown(least) - 1, [])):
        settings = config(total_max_tokens=total, summary_max_tokens=0, token_estimator=len)
        view = of_recent(settings, [stored(1, "u" * 1000, "")])
        assert view.patch() == {"conversation_memory": {"recent_turns": shown}}


def test_a_text_that_its_mark_would_not_shorten_is_shown_whole() -> None:
    cut = {"user": "u" * 51, "assistant": "a" * 10 + "[... 9,980 characters omitted ...]" + "a" * 10}
    settings = config(total_max_tokens=length_shown(cut), summary_max_tokens=0, token_estimator=len)
    assert only(of_recent(settings, [stored(1, "u" * 51, "a" * 10_000)])) == cut


def test_a_cut_list_keeps_what_fits_whole_and_counts_what_is_omitted() -> None:
    cut = {
        "user": "uuuu[... 992 characters omitted ...]uuuu",
        "assistant": "",
        "trajectory_digest": {
            "tools_invoked": ["aaaa", "bbbb"],
            "observations_summary": "",
            "reasoning_summary": None,
            "artifacts_refs": ["cccc", "[... 2 more omitted ...]"],
        },
    }
    settings = config(total_max_tokens=length_shown(cut), summary_max_tokens=0, token_estimator=len)
    digest = TrajectoryDigest(["aaaa", "bbbb"], "", None, ["cccc", "ddddd", "e" * 40])
    assert only(of_recent(settings, [stored(1, "u" * 1000, "", digest)])) == cut


def test_the_newest_turn_is_cut_to_what_the_summary_leaves() -> None:
    settings = config(total_max_tokens=100, summary_max_tokens=50)
    view = of_recent(settings, [stored(1, "Why?", "x" * 350)], "S" * 150)
    assert view.patch()["conversation_memory"]["summary"] == "S" * 150
    assert whole_length(only(view)["assistant"]) == 350


DIGEST = TrajectoryDigest(["search"] * 500, "seen " * 500, "thought " * 500, ["ref"] * 500)


@POLICIES
@pytest.mark.parametrize("total", [50, 150, 400, 1000])
def test_a_digest_larger_than_the_budget_leaves_the_turn_to_be_seen(policy: Any, total: int) -> None:
    settings = config(total_max_tokens=total, summary_max_tokens=10, overflow_policy=policy)
    huge = stored(1, "Why?", "Because.", DIGEST)
    view = of_recent(settings, [huge])
    turn = only(view)
    assert (turn["user"], turn["assistant"]) == ("Why?", "Because.")
    assert tokens(view) <= total
    if total >= 400:
        digest = turn["trajectory_digest"]
        assert whole_length(digest["observations_summary"]) == 2500
        assert digest["tools_invoked"][-1].endswith("more omitted ...]")


TEXTS = st.one_of(
    st.text('a "\\\n\u00e4\ud800', max_size=30),
    st.builds(lambda text, times: text * times, st.text('a "\n\u00e4', max_size=9), st.integers(0, 400)),
)
LISTS = st.lists(st.text("ab", max_size=9), max_size=40)
TURNS = st.builds(
    ConversationTurn,
    TEXTS,
    TEXTS,
    st.none() | st.builds(TrajectoryDigest, LISTS, TEXTS, st.none() | TEXTS, LISTS),
)
ROOM: Final = len(
    '{"recent_turns": [{"assistant": "", "user": ""}]}'
    + 2 * "[... 123,456 characters omitted ...]"
    + 2 * 8 * " "
)
"""What two marks take with eight characters each, none of which JSON escapes."""


@example(
    policy="truncate_oldest",
    strategy="truncation",
    estimator=len,
    total=169,
    most=0,
    said=[ConversationTurn("", "", TrajectoryDigest([], "", None, []))],
    pending=0,
    summary="",
)
@given(
    st.sampled_from(["truncate_oldest", "truncate_summary", "error"]),
    st.sampled_from(["truncation", "rolling_summary"]),
    st.sampled_from([None, len, lambda text: len(text.encode("utf-8", "surrogatepass")) + 7]),
    st.integers(1, 900),
    st.integers(0, 900),
    st.lists(TURNS, max_size=6),
    st.integers(0, 6),
    TEXTS,
)
@settings(deadline=None, max_examples=400)
def test_large_turns_fit_the_budget_and_something_is_always_shown(
    policy: Any,
    strategy: Any,
    estimator: Any,
    total: int,
    most: int,
    said: list[ConversationTurn],
    pending: int,
    summary: str,
) -> None:
    chosen = config(
        strategy,
        total_max_tokens=total,
        summary_max_tokens=min(total, most),
        overflow_policy=policy,
        token_estimator=estimator,
    )
    all_turns = [StoredTurn(str(index), turn) for index, turn in enumerate(said)]
    view = render(
        chosen, health=HEALTHY, summary=summary, pending=all_turns[:pending], recent=all_turns[pending:]
    )
    payload = view.patch().get("conversation_memory")
    if payload is not None:
        text = json.dumps(payload, ensure_ascii=False, sort_keys=True)
        assert view.tokens == chosen.estimate(text) <= total
        left = [*payload.get("pending_turns", ()), *payload["recent_turns"]]
        if view.kept:
            newest = all_turns[len(all_turns) - view.kept :]
            if strategy == "truncation":
                newest = all_turns[len(all_turns) - len(left) :]
            for one, (_, turn, *_) in zip(left, newest, strict=True):
                assert whole_length(one["user"]) == len(turn.user_message)
                assert whole_length(one["assistant"]) == len(turn.assistant_response)
    # JSON makes at most two characters of one of these, and the estimator four bytes of one.
    if chosen.estimate("x" * ROOM + "\ud800" * 32) <= total and (
        all_turns[pending:] or (all_turns and strategy == "rolling_summary")
    ):
        assert payload is not None
        assert view.kept or payload.get("summary")


def test_cutting_a_huge_turn_costs_a_few_reads_of_it() -> None:
    lengths: list[int] = []

    def estimate(text: str) -> int:
        lengths.append(len(text))
        return len(text)

    settings = config(total_max_tokens=4000, summary_max_tokens=10, token_estimator=estimate)
    huge = stored(1, "u" * 2_000_000, "a" * 2_000_000)
    view = of_recent(settings, [*turns(3), huge])
    assert view.kept == 1
    assert 3990 <= view.tokens <= 4000
    assert sum(length > 1_000_000 for length in lengths) <= 4
    assert sum(length for length in lengths if length <= 1_000_000) <= 40 * 4000
