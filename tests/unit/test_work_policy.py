"""The decisions of the queue of work: what is noted, who takes what, and which notes go. No event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from stm_backends import (
    ConversationTurn,
    Corrupt,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.memory import policy as memory_policy
from stm_backends.records.body import Body
from stm_backends.types import StoredTurn
from stm_backends.work import notes
from stm_backends.work.notes import VOID, Note, config_of, dump_note, load_note, settings_of, shard_of
from stm_backends.work.policy import (
    LEASE_S,
    MOST_DONE,
    Held,
    Job,
    Noted,
    State,
    dump_state,
    in_the_way,
    jobs_of,
    lag_of,
    lease_ended,
    load_state,
    pick,
    said,
)

NOW = 1_000.0
A, B, C = (MemoryKey("acme", "u", name) for name in "abc")
ROLLING = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=2), fold_batch_turns=3)


def note(key: MemoryKey = A, name: str = "", at: float = NOW, **more: Any) -> Note:
    return Note(key, at, **more, **({"id": name} if name else {}))


def jobs(
    listed: Collection[Noted],
    state: State | None = None,
    *,
    mine: Collection[str] = (),
    alive: Collection[str] = ("other",),
) -> list[Job]:
    def ended(worker: str, held: Held) -> bool:
        del held
        return worker not in alive

    return jobs_of("0", state or State(), [*listed], worker="me", mine=mine, ended=ended)


def say(
    state: State, listed: Collection[Noted], *, holds: Collection[str] = (), done: Collection[str] = ()
) -> tuple[State, int]:
    return said(state, [*listed], worker="me", now=NOW, holds=holds, done=done, max_drop=100)


# Notes


@pytest.mark.parametrize(
    "one",
    [
        note(),
        note(due=NOW + 5, everything=True, tries=3),
        note(settings={"strategy": "truncation", "budget": {"full_zone_turns": 9}}),
        note(MemoryKey("a:b", "%", "\ud800")),
        VOID,
    ],
)
def test_a_note_comes_back_as_it_was_written(one: Note) -> None:
    assert load_note(dump_note(one)) == one


@pytest.mark.parametrize(
    "changed",
    [
        {"id": 1},
        {"key": ["a", "b"]},
        {"key": ["a", "b", " "]},
        {"at": "now"},
        {"due": True},
        {"settings": []},
    ],
)
def test_what_is_no_note_is_corrupt(changed: Mapping[str, Any]) -> None:
    with pytest.raises(Corrupt):
        load_note({**dump_note(note()), **changed})


def test_a_note_has_the_settings_that_differ_and_no_functions() -> None:
    config = replace(ROLLING, token_estimator=len, transcript=True, summaries="worker")
    settings = settings_of(config)
    assert settings == {
        "strategy": "rolling_summary",
        "fold_batch_turns": 3,
        "transcript": True,
        "budget": {"full_zone_turns": 2},
    }
    assert config_of(settings) == replace(config, token_estimator=None, summaries="process")
    assert config_of({**settings, "of_a_later_version": 1}).fold_batch_turns == 3
    assert settings_of(ShortTermMemoryConfig()) == {}


def test_settings_that_are_not_valid_are_corrupt() -> None:
    for settings in ({"fold_batch_turns": 0}, {"strategy": 7}, {"budget": {"full_zone_turns": "5"}}):
        with pytest.raises(Corrupt):
            config_of(settings)


def test_all_notes_of_a_conversation_meet_in_one_shard() -> None:
    keys = [MemoryKey("acme", "u", f"s{number}") for number in range(400)]
    assert [shard_of(key) for key in keys] == [shard_of(key) for key in keys]
    counts = Counter(map(shard_of, keys))
    assert counts.keys() == {*notes.shards()}
    assert min(counts.values()) > 20


# Jobs


def test_notes_of_one_conversation_are_one_job() -> None:
    first = note(A, "1", NOW - 9)
    second = note(A, "2", NOW - 4, everything=True, settings={"transcript": True})
    (job,) = jobs([first, note(A, "3", due=NOW + 60), second])
    assert job.ids == {"1", "2", "3"}
    assert (job.since, job.due) == (NOW - 9, 0.0)
    assert job.note.everything
    assert job.note.settings == {"transcript": True}


def test_done_erased_and_unreadable_notes_are_no_jobs() -> None:
    state = State(done=frozenset({"1"}))
    assert [job.note.key for job in jobs([note(A, "1"), VOID, None, note(B, "2")], state)] == [B]


def test_a_conversation_that_a_worker_holds_is_left_to_it() -> None:
    listed = [note(A, "1"), note(A, "2"), note(B, "3")]
    held = State(held={"other": Held(frozenset({"1"}), NOW)})
    assert [job.held for job in jobs(listed, held)] == [True, False]
    assert [job.held for job in jobs(listed, held, alive=())] == [False, False]
    assert [job.held for job in jobs(listed, mine={"3"})] == [False, True]


def test_what_a_lost_answer_gave_to_this_worker_is_free() -> None:
    listed, held = [note(A, "1")], State(held={"me": Held(frozenset({"1"}), NOW)})
    assert not jobs(listed, held)[0].held
    assert jobs(listed, held, mine={"1"})[0].held


def test_a_lease_ends_once_it_was_seen_long_enough_or_is_long_over() -> None:
    assert not lease_ended(NOW, now=NOW + LEASE_S, known_for=LEASE_S - 1)
    assert lease_ended(NOW, now=NOW, known_for=LEASE_S)
    assert lease_ended(NOW, now=NOW + 2 * LEASE_S, known_for=0.0)
    # The clock of its holder is ahead.
    assert lease_ended(NOW + 3_600, now=NOW, known_for=LEASE_S)


def test_the_lag_is_that_of_the_oldest_job_that_is_due() -> None:
    assert lag_of(jobs([note(A, "1", NOW - 5), note(B, "2", NOW - 9, due=NOW + 1)]), now=NOW) == 5
    assert lag_of(jobs([note(A, "1", NOW - 50, due=NOW - 2)]), now=NOW) == 2
    assert lag_of(jobs([note(A, "1", NOW + 5)]), now=NOW) == 0
    assert lag_of([], now=NOW) == 0


# Who is next


def of(tenant: str, count: int, at: float = NOW - 100) -> list[Note]:
    ids = [f"{number}" for number in range(count)]
    return [note(MemoryKey(tenant, "u", one), f"{tenant}{one}", at + int(one)) for one in ids]


def picked(listed: Collection[Noted], places: int = 8, **at_work: int) -> list[str]:
    return [job.tenant for job in pick(jobs(listed), now=NOW, places=places, at_work=at_work)]


def test_a_tenant_leaves_a_quarter_of_the_places_to_others() -> None:
    assert picked(of("big", 50)) == ["big"] * 6
    assert picked(of("big", 50), big=6) == []
    assert picked([*of("big", 50), *of("small", 1)], big=6) == ["small"]


def test_places_go_to_the_tenant_with_the_fewest_and_there_to_the_oldest() -> None:
    flood, others = of("big", 1_000, NOW - 5_000), [*of("one", 3), *of("two", 3)]
    # Two places of eight wait for tenants without any.
    assert Counter(picked([*flood, *others])) == {"big": 2, "one": 2, "two": 2}
    old = note(MemoryKey("one", "u", "old"), "old", 0.0)
    first = pick(jobs([*of("one", 3), old]), now=NOW, places=1, at_work={})
    assert [job.ids for job in first] == [{"old"}]


def test_what_waits_and_what_is_held_is_not_taken() -> None:
    listed = [note(A, "1", due=NOW + 0.1), note(B, "2"), note(C, "3")]
    found = jobs(listed, State(held={"other": Held(frozenset({"2"}), NOW)}))
    assert [job.note.key for job in pick(found, now=NOW, places=8, at_work={})] == [C]
    assert len(pick(found, now=NOW + 1, places=8, at_work={})) == 2
    assert pick(found, now=NOW, places=8, at_work={"acme": 8}) == []


# What a worker says


def test_done_notes_go_from_the_oldest_end_and_others_are_remembered() -> None:
    listed = [note(A, "1"), note(B, "2"), note(C, "3")]
    state, drop = say(State(), listed, holds={"1"}, done={"2"})
    assert (drop, state.done, state.held["me"]) == (0, {"2"}, Held(frozenset({"1"}), NOW))
    state, drop = say(state, listed, done={"1"})
    assert (drop, state) == (2, State())


def test_an_unreadable_note_stays_and_one_that_was_erased_goes() -> None:
    assert say(State(), [VOID, VOID, note(A, "1")])[1] == 2
    assert say(State(), [None, note(A, "1")], done={"1"}) == (State(done=frozenset({"1"})), 0)


def test_no_more_notes_go_than_one_write_drops() -> None:
    listed = [note(A, str(number)) for number in range(5)]
    state, drop = said(State(), listed, worker="me", now=NOW, holds=(), done="01234", max_drop=2)
    assert drop == 2
    assert state.done == {"2", "3", "4"}


def test_what_is_taken_over_is_taken_from_the_other() -> None:
    listed = [note(A, "1"), note(B, "2")]
    before = State(held={"dead": Held(frozenset({"1"}), 0.0), "gone": Held(frozenset({"9"}), 0.0)})
    state, _ = say(before, listed, holds={"1", "2"})
    assert state.held == {"me": Held(frozenset({"1", "2"}), NOW)}
    # What another still holds stays with it.
    state, _ = say(before, listed, holds={"2"})
    assert state.held["dead"] == before.held["dead"]


def test_a_note_that_arrives_while_its_conversation_is_worked_on_stays() -> None:
    listed = [note(A, "1"), note(A, "2")]
    state, drop = say(State(held={"me": Held(frozenset({"1"}), NOW)}), listed, done={"1"})
    assert drop == 1
    assert [job.ids for job in jobs(listed[drop:], state)] == [{"2"}]


def test_the_same_note_twice_is_done_with_one_mark() -> None:
    assert say(State(), [note(A, "1"), note(A, "1")], done={"1"}) == (State(), 2)


def test_a_note_that_waits_moves_away_once_many_done_ones_stand_behind() -> None:
    waiting = note(A, "wait", due=NOW + 60)
    done = frozenset(str(number) for number in range(MOST_DONE + 1))
    listed = [waiting, *(note(B, one) for one in done)]
    assert in_the_way(State(done), listed, now=NOW, busy=()) == [waiting]
    assert in_the_way(State(done), listed, now=NOW + 60, busy=()) == []
    assert in_the_way(State(done), listed, now=NOW, busy={"wait"}) == []
    assert in_the_way(State(frozenset("12")), listed, now=NOW, busy=()) == []


def test_a_state_comes_back_as_it_was_written() -> None:
    state = State(frozenset({"1", "2"}), {"w": Held(frozenset({"3"}), NOW)})
    assert load_state(dump_state(state)) == state


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"done": [], "held": []},
        {"done": [1], "held": {}},
        {"done": [], "held": {"w": {"ids": []}}},
    ],
)
def test_what_is_no_state_is_corrupt(content: Mapping[str, Any]) -> None:
    with pytest.raises(Corrupt):
        load_state(content)


# What a memory notes


def noted(config: ShortTermMemoryConfig, most: int) -> list[int]:
    return [after for after in range(1, most) if memory_policy.falls_due(config, after - 1, after)]


def test_a_note_is_written_for_each_batch_of_pending_turns() -> None:
    assert noted(ROLLING, 11) == [3, 6, 9]
    assert noted(replace(ROLLING, budget=MemoryBudget(summary_max_tokens=0)), 4) == [1, 2, 3]
    assert noted(ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=4)), 11) == [5, 10]
    assert noted(ShortTermMemoryConfig(), 11) == []
    # An entry of several messages.
    assert memory_policy.falls_due(ROLLING, 2, 8)
    assert not memory_policy.falls_due(ROLLING, -3, 2)


def turns(*times: float) -> list[StoredTurn]:
    return [StoredTurn(f"t{at}", ConversationTurn("Q?", "A.", ts=at)) for at in times]


def since(body: Body, *times: float, config: ShortTermMemoryConfig = ROLLING) -> float | None:
    return memory_policy.due_since(config, body, turns(*times), now=NOW)


def test_work_is_due_since_the_turn_that_made_it_due() -> None:
    assert since(Body(), 10.0, 20.0) is None
    assert since(Body(), 10.0, 20.0, 30.0, 40.0) == 30.0
    assert since(Body(), 10.0, 20.0, 30.0, config=ShortTermMemoryConfig()) is None


def test_a_retry_is_due_at_the_time_that_the_record_carries() -> None:
    failed = Body(health=MemoryHealth.DEGRADED, attempts=4, next_attempt_at=NOW + 5)
    assert since(failed, 10.0) is None
    assert since(replace(failed, next_attempt_at=NOW - 5), 10.0) == NOW - 5
