"""The verification of a replay finds each kind of error and rejects no correct run."""

import io
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from stm_backends.cli import render
from stm_backends.cli.replay import ledger
from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.dispatch import Dispatch
from stm_backends.cli.replay.ledger import FOREIGN, LedgerSummarizer
from stm_backends.cli.replay.report import Latency, Report, percentile
from stm_backends.cli.replay.verify import Findings, compare
from stm_backends.memory.view import shown_turn
from stm_backends.types import (
    ConversationTurn,
    ShortTermMemoryConfig,
    TrajectoryDigest,
    default_token_estimator,
)

CONFIG = ShortTermMemoryConfig()


def shown(place: int, session: str = "s", turn: ConversationTurn | None = None) -> dict[str, Any]:
    return shown_turn(ledger.marked(turn or ConversationTurn("u", "a"), session, place), CONFIG)


# Comparing


def test_a_history_that_is_whole_has_nothing_wrong():
    assert not compare(range(9), acknowledged=9)


@pytest.mark.parametrize(
    ("held", "wrong"),
    [
        ([0, 1, 2], Findings(lost=1)),
        ([], Findings(lost=4)),
        ([0, 1, 1, 2, 3], Findings(doubled=1)),
        ([0, 1, 2, 3, 0], Findings(doubled=1)),
        ([0, 2, 1, 3], Findings(out_of_order=1)),
        ([3, 0, 1, 2], Findings(out_of_order=3)),
        ([0, 1, 2, 3, 4], Findings(foreign=1)),
        ([0, FOREIGN, 2, 3], Findings(lost=1, foreign=1)),
        ([2, 1, 1], Findings(lost=2, doubled=1, out_of_order=1)),
    ],
)
def test_a_history_that_was_tampered_with_is_found_out(held: list[int], wrong: Findings):
    assert compare(held, acknowledged=4) == wrong


@pytest.mark.parametrize(
    ("held", "wrong"),
    [
        ([7, 8, 9], Findings()),
        ([4, 5, 6, 7, 8, 9], Findings()),
        ([8, 9], Findings(lost=1)),
        ([7, 8], Findings(lost=1)),
        ([4, 6, 7, 8, 9], Findings(lost=1)),
        ([7, 9, 8], Findings(out_of_order=1)),
    ],
)
def test_of_a_truncated_history_the_newest_must_be_there_without_a_gap(held: list[int], wrong: Findings):
    assert compare(held, acknowledged=10, newest=3) == wrong


def test_a_turn_that_was_handed_out_may_be_there_or_not():
    assert not compare([0, 1], acknowledged=2, added=3)
    assert not compare([0, 1, 2], acknowledged=2, added=3)
    assert compare([0, 1, 2], acknowledged=2) == Findings(foreign=1)
    assert compare([0, 2], acknowledged=2, added=3) == Findings(lost=1)
    assert not compare([1, 2], acknowledged=2, added=3, newest=2)
    assert compare([0, 2], acknowledged=2, added=3, newest=2) == Findings(lost=1)


@settings(deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(-1, 30), max_size=40))
def test_only_the_history_itself_has_nothing_wrong(count: int, held: list[int]):
    assert bool(compare(held, acknowledged=count)) == (held != list(range(count)))


# The ledger


@settings(deadline=None)
@given(st.lists(st.integers(-1, 40)))
@example([FOREIGN, 0])
def test_what_a_ledger_says_is_read_back(places: list[int]):
    text = f"{ledger.write(places)}\n<session_summary>\nx\n</session_summary>"

    assert ledger.split(text) == (places, "<session_summary>\nx\n</session_summary>")


def test_a_ledger_of_a_whole_history_is_short():
    assert ledger.write(range(10_000)) == "[turns 0-9999]"
    assert ledger.write([*range(18), 19]) == "[turns 0-17,19]"


def test_a_summary_without_a_ledger_covers_nothing():
    assert ledger.split("They met.") == ([], "They met.")
    assert ledger.split("[turns 0-") == ([], "[turns 0-")


def test_a_marked_turn_tells_its_place_and_is_otherwise_the_same():
    digest = TrajectoryDigest(["find"], "found", artifacts_refs=["doc-1"])
    for turn in (ConversationTurn("u", "a"), ConversationTurn("u", "a", digest)):
        assert ledger.place_of(shown(7, turn=turn), "s") == 7
        assert ledger.unmarked(shown(7, turn=turn)) == shown_turn(turn, CONFIG)


def test_a_turn_of_another_conversation_and_an_unmarked_one_are_foreign():
    assert ledger.place_of(shown(7, "other"), "s") == FOREIGN
    assert ledger.place_of(shown(7, "s#1"), "s") == FOREIGN
    assert ledger.place_of({"user": "u", "assistant": "a"}, "s") == FOREIGN


def test_what_the_model_is_shown_lists_summary_pending_and_recent():
    memory = {
        "summary": "[turns 0-1]\ntext",
        "pending_turns": [shown(2)],
        "recent_turns": [shown(3), shown(9, "other")],
    }

    assert ledger.places_in(memory, "s", waiting=0) == [0, 1, 2, 3, FOREIGN]
    assert ledger.places_in({}, "s", waiting=0) == []
    plain = {"user": "u", "assistant": "a"}
    assert ledger.without_ledger(memory) == {
        "summary": "text",
        "pending_turns": [plain],
        "recent_turns": [plain, plain],
    }


async def test_the_wrapped_summarizer_sees_no_marks_and_gets_the_ledger_added():
    seen: list[Mapping[str, Any]] = []

    async def summarizer(request: Mapping[str, Any], /) -> Mapping[str, Any]:
        seen.append(request)
        return {"summary": "new"}

    spent: Counter[str] = Counter()
    wrapped = LedgerSummarizer(summarizer, "s", spent=spent)
    answer = await wrapped({"previous_summary": "[turns 0-1]\nold", "turns": [shown(2), shown(4)]})

    assert answer == {"summary": "[turns 0-2,4]\nnew"}
    assert spent == {
        "tokens_read": default_token_estimator("old")
        + 2 * ledger.estimate_turns([{"user": "u", "assistant": "a"}]),
        "tokens_written": default_token_estimator("new"),
    }
    assert seen == [{"previous_summary": "old", "turns": [{"user": "u", "assistant": "a"}] * 2}]


# Handing out


def conversations(count: int, turns: int) -> list[Conversation]:
    return [
        Conversation(f"c{n}", tuple(ConversationTurn(f"{i}", "") for i in range(turns))) for n in range(count)
    ]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers())
def test_turns_are_handed_out_once_each_in_order_whatever_becomes_of_pods(
    count: int, turns: int, pods: int, at_once: int, seed: int
):
    chance = random.Random(seed)
    dispatch = Dispatch(conversations(count, turns), pods=pods, at_once=at_once)
    under_way: list[str] = []
    acknowledged: Counter[str] = Counter()
    while not dispatch.finished:
        work = dispatch.take(chance.randrange(pods))
        if work is not None:
            assert work.session not in under_way
            assert work.place == acknowledged[work.session]
            assert ledger.place_of(shown_turn(work.turn, CONFIG), work.session) == work.place
            under_way.append(work.session)
            assert len(under_way) <= at_once
        if under_way and (work is None or chance.random() < 0.5):
            session = under_way.pop(chance.randrange(len(under_way)))
            if chance.random() < 0.2:
                dispatch.unanswered(session)
            else:
                dispatch.acknowledged(session)
                acknowledged[session] += 1
    assert acknowledged == {f"c{n}": turns for n in range(count)}
    assert dispatch.take(0) is None


def test_every_conversation_wanders_over_all_pods():
    served: dict[str, set[int]] = {}
    dispatch = Dispatch(conversations(40, 8), pods=4, at_once=40)
    pod = 0
    while not dispatch.finished:
        work = dispatch.take(pod)
        assert work is not None
        served.setdefault(work.session, set()).add(pod)
        dispatch.acknowledged(work.session)
        pod = (pod + 1) % 4

    assert set(map(len, served.values())) == {4}


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.integers())
def test_each_pod_gets_one_turn_of_a_conversation_per_round(count: int, pods: int, turns: int, seed: int):
    chance = random.Random(seed)
    # The first asks far more often than the last.
    eagerness = [4**-pod for pod in range(pods)]
    served: dict[str, Counter[int]] = {f"c{n}": Counter() for n in range(count)}
    dispatch = Dispatch(conversations(count, turns), pods=pods, at_once=count)
    while not dispatch.finished:
        (pod,) = chance.choices(range(pods), eagerness)
        if work := dispatch.take(pod):
            served[work.session][pod] += 1
            dispatch.acknowledged(work.session)

    for by in served.values():
        counts = [by[pod] for pod in range(pods)]
        assert max(counts) - min(counts) <= 1


def test_a_turn_that_a_pod_took_with_it_goes_to_another():
    dispatch = Dispatch(conversations(1, 2), pods=2, at_once=1)
    assert dispatch.take(0)
    assert dispatch.take(1) is None

    dispatch.unanswered("c0")

    assert dispatch.take(0) is None
    again = dispatch.take(1)
    assert again is not None
    assert again.place == 0


# What is shown of it


def latency(pod: str, *, killed: bool = False) -> Latency:
    return Latency(pod, killed, 1, 1.0, 1.0, 1.0, 1.0)


def shown_report(**changes: Any) -> str:
    result = Report(
        **{
            "backend": "sqlite",
            "strategy": "rolling_summary",
            "newest": None,
            "pods": 4,
            "conversations": 3,
            "turns": 30,
            "found": Findings(),
            "transcript": Findings(),
            "in_transcript": 30,
            "bad_reads": 0,
            "waiting_reads": 0,
            "kill_every": None,
            "killed": 0,
            "sent_again": 0,
            "summaries": 5,
            "lost_races": 0,
            "summarizer_calls": 5,
            "summarized": 20,
            "in_full": 10,
            "pending": 0,
            "waiting": 0,
            "tokens_with": 100,
            "tokens_without": 300,
            "summarizer_tokens_read": 71,
            "summarizer_tokens_written": 37,
            "seconds": 1.5,
            "seconds_in_all": 18.5,
            "latencies": [latency("all"), latency("1")],
            "killed_together": latency("killed (0)"),
            **changes,
        }
    )
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["turns"] == 30
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render.report(result))
    return " ".join(console.export_text().split())


def test_the_verdict_claims_what_the_strategy_promises_and_no_more():
    assert "Every acknowledged turn is stored" in shown_report()

    truncated = shown_report(strategy="truncation", newest=5, in_full=18, summarized=0)
    assert "The newest turns (at least 5" in truncated
    assert "Every acknowledged turn" not in truncated
    assert "older than the newest 5) │ 12" in truncated

    assert "Verification failed" in shown_report(found=Findings(lost=1))
    wrong = shown_report(transcript=Findings(lost=1, foreign=1))
    assert "Verification failed" in wrong
    assert "altered in transcripts │ 2" in wrong


def test_a_report_shows_both_times_and_the_tokens_of_the_summarizer():
    shown = shown_report()
    assert "tokens read by the summarizer │ 71" in shown
    assert "tokens written by the summarizer │ 37" in shown
    assert "time for adding turns │ 1.5 s" in shown
    assert "reading back │ 18.5 s" in shown


def test_a_run_that_was_too_short_to_kill_anybody_says_so():
    assert "No pod was killed" in shown_report(kill_every=2.0)
    assert "No pod was killed" not in shown_report(kill_every=2.0, killed=1)
    assert "No pod was killed" not in shown_report()


def test_more_than_four_killed_pods_share_one_row():
    pods = [latency("all"), *(latency(f"{n}", killed=n <= 5) for n in range(1, 8))]
    together = latency("killed (5)")

    shown = shown_report(latencies=pods, killed=5, killed_together=together)
    assert "killed (5)" in shown
    assert "(killed)" not in shown
    assert shown_report(latencies=pods[1:5], killed=4).count("(killed)") == 4


def test_one_pod_is_not_called_pods():
    assert "rolling_summary, 1 pod " in shown_report(pods=1)


def test_milliseconds_have_the_digits_that_mean_something():
    assert [render.milliseconds(ms) for ms in (0.0812, 3.14159, 42.42, 1234.5)] == [
        "0.08",
        "3.14",
        "42.4",
        "1234",
    ]


def test_percentiles_are_values_that_occurred():
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([], 0.5) != percentile([], 0.5)
