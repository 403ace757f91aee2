"""The stores that keep states: what is saved, loaded, merged, and never erased."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stm_backends.errors import InvalidKey, InvalidState, Unavailable
from stm_backends.records import steps
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.types import MemoryHealth, MemoryKey
from tests.support.default_memory import KEY, OTHER, added, memory, never, penguiflow_state, users
from tests.support.stores import ConditionalStore, Gate, PlainStore


@pytest.fixture(params=[PlainStore, ConditionalStore])
def store(request: pytest.FixtureRequest) -> PlainStore:
    return request.param()


async def reaching(gate: Gate, operation: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start work, and return it once it waits in an operation of the store."""
    gate.close(operation)
    working = asyncio.create_task(work)
    await gate.reached.wait()
    return working


# Saving and loading


async def test_a_conversation_goes_on_in_another_process(store: PlainStore) -> None:
    one = await added(memory(), 1, 2, 3)
    await one.flush()
    await one.persist(store, KEY)
    two = memory()
    await two.hydrate(store, KEY)
    await added(two, 4)
    await two.flush()
    await two.persist(store, KEY)
    await one.hydrate(store, KEY)
    for each in (one, two):
        assert await shown(each) == {"summary": ["u1", "u2"], "pending": [], "recent": ["u3", "u4"]}


async def test_two_processes_that_persist_keep_both_their_turns(store: PlainStore) -> None:
    one, two = await added(never(), 1), await added(never(), 2)
    await one.persist(store, KEY)
    await two.persist(store, KEY)
    assert users(store.state(KEY)) == ["u1", "u2"]
    await added(one, 3)
    await one.persist(store, KEY)
    assert users(store.state(KEY)) == ["u1", "u2", "u3"]
    await two.hydrate(store, KEY)
    assert users(two.to_dict()) == ["u1", "u2", "u3"]


async def test_hydrate_keeps_what_is_not_saved_yet(store: PlainStore) -> None:
    one = await added(never(), 1)
    await one.persist(store, KEY)
    two = await added(never(), 2)
    await two.hydrate(store, KEY)
    await two.hydrate(store, KEY)
    assert users(two.to_dict()) == ["u1", "u2"]


async def test_a_turn_goes_before_the_stored_turn_that_follows_it_here(store: PlainStore) -> None:
    one = never(config(zone=9))
    for name in "ac":
        await one.add_turn(turn(name), turn_id=name)
    await one.persist(store, KEY)
    two = never(config(zone=9))
    for name in "bcd":
        await two.add_turn(turn(name), turn_id=name)
    await two.persist(store, KEY)
    assert users(store.state(KEY)) == ["ua", "ub", "uc", "ud"]


async def test_a_turn_added_while_saving_is_not_taken_for_saved() -> None:
    gate = Gate()
    one = await added(never(), 1)
    saving = await reaching(gate, "save", one.persist(gate, KEY))
    await added(one, 2)
    gate.open()
    await saving
    assert users(gate.state(KEY)) == ["u1"]
    assert users(one.to_dict()) == ["u1", "u2"]
    await one.persist(gate, KEY)
    assert users(gate.state(KEY)) == ["u1", "u2"]


async def test_a_turn_added_while_loading_is_kept() -> None:
    gate = Gate()
    await (await added(never(), 1)).persist(gate, KEY)
    one = never()
    loading = await reaching(gate, "load", one.hydrate(gate, KEY))
    await added(one, 2)
    gate.open()
    await loading
    assert users(one.to_dict()) == ["u1", "u2"]


async def test_a_summary_finished_while_saving_is_kept_and_saved_next(held: LedgerSummarizer) -> None:
    gate = Gate()
    one = await added(memory(held), 1, 2, 3)
    await held.called.wait()
    saving = await reaching(gate, "saved", one.persist(gate, KEY))
    held.release()
    await one.flush()
    gate.open()
    await saving
    assert await shown(one) == {"summary": ["u1"], "pending": [], "recent": ["u2", "u3"]}
    await one.persist(gate, KEY)
    state = gate.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1"], ["u2", "u3"])


async def test_a_summary_outlives_a_hydrate_of_what_it_grew_from(store: PlainStore) -> None:
    one = await added(memory(), 1, 2, 3)
    await one.persist(store, KEY)
    await one.flush()
    await one.hydrate(store, KEY)
    assert (await shown(one))["summary"] == ["u1"]
    await one.persist(store, KEY)
    assert covered(store.state(KEY)["summary"]) == ["u1"]


async def test_the_stored_summary_wins_and_turns_only_ours_covers_return(
    store: PlainStore,
) -> None:
    first = await added(never(), 1, 2, 3)
    await first.persist(store, KEY)
    ours, theirs = memory(), memory()
    await ours.hydrate(store, KEY)
    await theirs.hydrate(store, KEY)
    await added(ours, 4, 5)
    await ours.flush()
    await theirs.flush()
    await theirs.persist(store, KEY)
    assert (await shown(ours))["summary"] == ["u1", "u2", "u3"]
    await ours.persist(store, KEY)
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1"], ["u2", "u3", "u4", "u5"])
    assert await shown(ours) == {"summary": ["u1"], "pending": ["u2", "u3"], "recent": ["u4", "u5"]}
    await ours.flush()
    await ours.persist(store, KEY)
    assert covered(store.state(KEY)["summary"]) == ["u1", "u2", "u3"]


async def test_turns_never_saved_come_back_when_their_summary_is_replaced(store: PlainStore) -> None:
    first = memory()
    ours = memory()
    await ours.hydrate(store, KEY)
    await added(ours, 7, 8, 9)
    await ours.flush()
    await added(first, 1, 2, 3)
    await first.flush()
    await first.persist(store, KEY)
    await ours.persist(store, KEY)
    state = store.state(KEY)
    assert covered(state["summary"]) == ["u1"]
    assert users(state) == ["u2", "u3", "u7", "u8", "u9"]


async def test_a_call_in_flight_for_a_summary_that_was_replaced_is_discarded(
    store: PlainStore, held: LedgerSummarizer
) -> None:
    ours = await added(memory(held), 1, 2, 3)
    await ours.persist(store, KEY)
    theirs = memory()
    await theirs.hydrate(store, KEY)
    await theirs.flush()
    await theirs.persist(store, KEY)
    await ours.hydrate(store, KEY)
    held.release()
    await ours.flush()
    assert await shown(ours) == {"summary": ["u1"], "pending": [], "recent": ["u2", "u3"]}
    assert ours.health is MemoryHealth.HEALTHY


async def test_an_overwritten_turn_is_put_back_by_the_next_persist() -> None:
    plain = PlainStore()
    one, two = never(), never()
    await one.hydrate(plain, KEY)
    await two.hydrate(plain, KEY)
    await added(two, 2)
    stale = two.to_dict()
    await added(one, 1)
    await one.persist(plain, KEY)
    await plain.save_memory_state(KEY, stale)
    assert users(plain.state(KEY)) == ["u2"]
    await one.persist(plain, KEY)
    assert sorted(users(plain.state(KEY))) == ["u1", "u2"]


async def test_an_overwritten_confirmed_summary_is_put_back_by_its_writer() -> None:
    plain = PlainStore()
    author = await added(memory(), 1, 2, 3)
    await author.persist(plain, KEY)
    stale = plain.state(KEY)
    await added(author, 4, 5)
    await author.flush()
    await author.persist(plain, KEY)
    reader = memory()
    await reader.hydrate(plain, KEY)
    await plain.save_memory_state(KEY, stale)
    await reader.persist(plain, KEY)
    state = plain.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1", "u2", "u3"], ["u4", "u5"])


async def test_turns_of_a_confirmed_summary_that_another_one_replaced_come_back() -> None:
    plain = PlainStore()
    author, rival = memory(), memory()
    await author.hydrate(plain, KEY)
    await added(rival, 7, 8, 9)
    await rival.flush()
    await added(author, 1, 2, 3)
    await author.flush()
    await author.persist(plain, KEY)
    await plain.save_memory_state(KEY, rival.to_dict())
    await author.persist(plain, KEY)
    state = plain.state(KEY)
    assert covered(state["summary"]) == ["u7"]
    assert sorted(users(state)) == ["u1", "u2", "u3", "u8", "u9"]


async def test_a_turn_that_another_process_folded_is_not_put_back(store: PlainStore) -> None:
    one = await added(never(), 1, 2, 3)
    await one.persist(store, KEY)
    two = memory()
    await two.hydrate(store, KEY)
    await two.flush()
    await two.persist(store, KEY)
    await one.persist(store, KEY)
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1"], ["u2", "u3"])


async def test_turns_folded_long_ago_are_not_restored_when_forgotten(store: PlainStore) -> None:
    sleeper = await added(never(), 1, 2, 3)
    await sleeper.persist(store, KEY)
    busy = memory(settings=config(zone=2, total_max_tokens=0, summary_max_tokens=0))
    await busy.hydrate(store, KEY)
    await added(busy, *range(10, 400))
    await busy.persist(store, KEY)
    await sleeper.persist(store, KEY)
    assert users(store.state(KEY)) == ["u398", "u399"]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 300), (200, 100), (250, 250)])
async def test_an_old_summary_is_kept_when_its_turns_are_forgotten(
    store: PlainStore, ours: int, theirs: int
) -> None:
    settings = config(zone=0, summary_max_tokens=100_000, total_max_tokens=0)
    author, busy = memory(settings=settings), memory(settings=settings)
    await added(author, *range(ours))
    await author.flush()
    await author.persist(store, KEY)
    await busy.hydrate(store, KEY)
    await added(busy, *range(1_000, 1_000 + theirs))
    await busy.flush()
    await busy.persist(store, KEY)
    await author.persist(store, KEY)
    state = store.state(KEY)
    assert users(state) == []
    assert covered(state["summary"]) == [f"u{n}" for n in (*range(ours), *range(1_000, 1_000 + theirs))]


async def test_a_save_whose_answer_was_lost_doubles_nothing(store: PlainStore) -> None:
    class Forgetful:
        def __init__(self) -> None:
            self.lose = True

        async def load_memory_state(self, key: str) -> dict[str, Any] | None:
            return await store.load_memory_state(key)

        async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
            await store.save_memory_state(key, state)
            if self.lose:
                raise ConnectionError("no answer")

    forgetful = Forgetful()
    one = await added(memory(), 1, 2, 3)
    with pytest.raises(ConnectionError):
        await one.persist(forgetful, KEY)
    other = memory()
    await other.hydrate(store, KEY)
    await other.flush()
    await added(other, 4)
    await other.flush()
    await other.persist(store, KEY)
    await one.flush()
    await one.persist(store, KEY)
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1", "u2"], ["u3", "u4"])


async def test_what_penguiflow_removed_stays_removed(store: PlainStore) -> None:
    one = await added(never(), 1, 2)
    await one.persist(store, KEY)
    await store.save_memory_state(KEY, penguiflow_state(2, 3, summary="S"))
    await added(one, 4)
    await one.persist(store, KEY)
    assert (users(store.state(KEY)), store.state(KEY)["summary"]) == (["u2", "u3", "u4"], "S")
    assert users(one.to_dict()) == ["u2", "u3", "u4"]


async def test_truncation_keeps_the_last_turns_of_both(store: PlainStore) -> None:
    settings = config("truncation", zone=3)
    one, two = await added(never(settings), 1, 2, 3), await added(never(settings), 4, 5)
    await one.persist(store, KEY)
    await two.persist(store, KEY)
    assert users(store.state(KEY)) == ["u3", "u4", "u5"]
    await one.persist(store, KEY)
    assert users(store.state(KEY)) == ["u3", "u4", "u5"]


async def test_the_health_of_another_process_is_taken_over(store: PlainStore) -> None:
    failing = LedgerSummarizer()
    failing.fail = 100
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=60.0)
    one = await added(memory(failing, settings), 1, 2)
    await until(lambda: one.health is MemoryHealth.DEGRADED)
    await one.persist(store, KEY)
    asked = LedgerSummarizer()
    two = memory(asked, settings)
    await two.hydrate(store, KEY)
    assert two.health is MemoryHealth.DEGRADED
    assert asked.requests == []
    await asyncio.gather(one.close(), two.close())


async def test_a_recovery_that_is_under_way_is_shown_throughout_a_persist(store: PlainStore) -> None:
    summarizer = LedgerSummarizer()
    summarizer.fail = 1
    one = memory(summarizer, config(zone=1, retry_attempts=0))
    await added(one, 1, 2)
    await until(lambda: one.health is MemoryHealth.DEGRADED)
    summarizer.hold()
    await one.persist(store, KEY)
    await summarizer.called.wait()
    for _ in range(2):
        await one.persist(store, KEY)
        await one.hydrate(store, KEY)
        assert one.health is MemoryHealth.RECOVERING
        assert store.state(KEY)["health"] == "degraded"
    summarizer.release()
    await until(lambda: one.health is MemoryHealth.HEALTHY)


async def test_a_stored_recovery_ends_the_wait_here(store: PlainStore) -> None:
    failing = LedgerSummarizer()
    failing.fail = 1
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=600.0)
    one = await added(memory(failing, settings), 1, 2)
    await until(lambda: one.health is MemoryHealth.DEGRADED)
    two = memory(settings=settings)
    two.from_dict({**one.to_dict(), "health": "healthy"})
    await two.flush()
    await two.persist(store, KEY)
    await one.hydrate(store, KEY)
    assert one.health is MemoryHealth.HEALTHY
    await added(one, 3)
    await one.flush(timeout=5)
    assert await shown(one) == {"summary": ["u1", "u2"], "pending": [], "recent": ["u3"]}


# Keys


async def test_another_key_shows_nothing_of_the_one_before(store: PlainStore) -> None:
    one = await added(never(), 1)
    await one.persist(store, KEY)
    await one.hydrate(store, OTHER)
    assert await one.turns() == []
    await added(one, 2)
    await one.persist(store, OTHER)
    assert users(store.state(OTHER)) == ["u2"]
    assert users(store.state(KEY)) == ["u1"]
    await one.hydrate(store, KEY)
    assert users(one.to_dict()) == ["u1"]


class _Broken:
    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        raise ConnectionError("down")

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is saved that was not loaded before")


async def test_a_failed_hydrate_of_another_key_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    one = await added(never(), 1)
    await one.persist(PlainStore(), KEY)
    await added(one, 2)
    with pytest.raises(ConnectionError), caplog.at_level(logging.WARNING, logger="stm_backends"):
        await one.hydrate(_Broken(), OTHER)
    assert await one.get_llm_context() == {"conversation_memory": {"recent_turns": []}}
    assert "1 turns that were not persisted" in caplog.text


async def test_a_hydrate_that_is_cancelled_shows_nothing_of_the_key_before() -> None:
    gate = Gate()
    one = await added(never(), 1)
    await one.persist(gate, KEY)
    hydrating = await reaching(gate, "load", one.hydrate(gate, OTHER))
    hydrating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hydrating
    assert await one.turns() == []
    gate.open()
    await added(one, 2)
    await one.persist(gate, OTHER)
    assert (users(gate.state(KEY)), users(gate.state(OTHER))) == (["u1"], ["u2"])


async def test_a_hydrate_overtaken_by_another_key_shows_nothing_of_its_own() -> None:
    gate = Gate()
    await (await added(never(), 1)).persist(gate, KEY)
    one = never()
    slow = await reaching(gate, "load", one.hydrate(gate, KEY))
    fast = asyncio.create_task(one.hydrate(gate, OTHER))
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(slow, fast)
    assert await one.turns() == []


async def test_a_store_without_the_methods_is_left_alone_and_still_unbinds() -> None:
    one = await added(never(), 1)
    await one.hydrate(object(), KEY)
    await one.persist(object(), KEY)
    assert users(one.to_dict()) == ["u1"]
    await one.hydrate(object(), OTHER)
    assert await one.turns() == []


async def test_a_store_in_which_nothing_can_be_saved_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ReadOnly:
        async def load_memory_state(self, key: str) -> dict[str, Any] | None:
            return None

    for number in range(2):
        one = await added(never(), number)
        await one.hydrate(ReadOnly(), KEY)
        for _ in range(2):
            await one.persist(ReadOnly(), KEY)
    (record,) = caplog.records
    assert (record.levelno, "ReadOnly has no save_memory_state" in record.message) == (logging.WARNING, True)


async def test_a_key_may_be_given_for_its_composite(store: PlainStore) -> None:
    key = MemoryKey(*KEY.split(":"))
    await (await added(never(), 1)).persist(store, key)
    assert [*store.texts] == [KEY]
    one = never()
    await one.hydrate(store, key)
    assert users(one.to_dict()) == ["u1"]
    await one.persist(store, KEY)
    for bad in (None, 7, MemoryKey, object()):
        with pytest.raises(InvalidKey):
            await one.hydrate(store, bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidKey):
            await one.persist(store, bad)  # type: ignore[arg-type]


# What others have written beside it


def with_more(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a state with fields that this library does not know, in the state and in each turn."""
    more = {"artifacts": {"a1": {"kind": "chart", "rows": [1, 2]}}, **fields}
    turns = {
        part: [{**one, "mood": {"of": one["user_message"]}} for one in state[part]]
        for part in ("turns", "pending", "backlog")
    }
    return {**state, **more, **turns}


def moods(state: dict[str, Any]) -> list[Any]:
    return [one.get("mood") for part in ("backlog", "pending", "turns") for one in state[part]]


async def test_unknown_fields_survive_hydrate_and_persist(store: PlainStore) -> None:
    store.texts[KEY] = json.dumps(with_more(penguiflow_state(1, 2)))
    one = never()
    await one.hydrate(store, KEY)
    await (await added(one, 3)).persist(store, KEY)
    await one.persist(store, KEY)
    state = store.state(KEY)
    assert state["artifacts"] == {"a1": {"kind": "chart", "rows": [1, 2]}}
    assert moods(state) == [{"of": "u1"}, {"of": "u2"}, None]
    two = never()
    two.from_dict(state)
    del state["revision"]
    assert two.to_dict() == state
    state["artifacts"]["a1"]["rows"].append(3)
    state["turns"][-1]["mood"] = 0
    assert two.to_dict()["artifacts"] == {"a1": {"kind": "chart", "rows": [1, 2]}}, "ours alone"


async def test_unknown_fields_of_both_sides_survive_and_the_stored_ones_win(
    store: PlainStore,
) -> None:
    one, two = never(), never()
    one.from_dict(with_more(penguiflow_state(1), ours=1))
    await one.persist(store, KEY)
    two.from_dict(with_more(penguiflow_state(2), theirs=2, artifacts={}))
    await two.persist(store, KEY)
    state = store.state(KEY)
    assert {name: state[name] for name in ("artifacts", "ours", "theirs")} == {
        "artifacts": {"a1": {"kind": "chart", "rows": [1, 2]}},
        "ours": 1,
        "theirs": 2,
    }
    assert sorted(mood["of"] for mood in moods(state)) == ["u1", "u2"]


async def test_unknown_fields_of_another_conversation_are_discarded_with_it(store: PlainStore) -> None:
    store.texts[KEY] = json.dumps(with_more(penguiflow_state(1)))
    one = never()
    await one.hydrate(store, KEY)
    await one.hydrate(store, OTHER)
    assert "artifacts" not in one.to_dict()


async def test_a_field_that_is_not_json_is_refused_with_its_name() -> None:
    one = never()
    with pytest.raises(InvalidState, match="artifacts"):
        one.from_dict({**penguiflow_state(1), "artifacts": {1: 2}})
    with pytest.raises(InvalidState, match=r"turn\.mood"):
        one.from_dict({**penguiflow_state(), "turns": [{"user_message": "u", "mood": object()}]})


# Large states, in steps


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others go on after each step, as if each took long."""
    monkeypatch.setattr(steps, "SLICE_S", 0.0)


MANY = 10 * steps.STEP


async def turns_of_others(work: Coroutine[Any, Any, None]) -> int:
    """Return how often others have their turn while a piece of work goes on."""
    working, count = asyncio.ensure_future(work), 0
    while not working.done():
        await asyncio.sleep(0)
        count += 1
    await working
    return count


@pytest.mark.usefixtures("each_step")
async def test_saving_and_loading_many_turns_lets_others_go_on(store: PlainStore) -> None:
    one, two = await added(never(config(zone=MANY)), *range(MANY)), never(config(zone=MANY))
    assert await turns_of_others(one.persist(store, KEY)) >= 10
    assert await turns_of_others(one.persist(store, KEY)) >= 20
    assert await turns_of_others(two.hydrate(store, KEY)) >= 10
    saved = store.state(KEY)
    assert saved.pop("revision")
    assert two.to_dict() == one.to_dict() == saved


@pytest.mark.usefixtures("each_step")
async def test_a_turn_added_between_any_two_steps_is_kept_and_saved_next(store: PlainStore) -> None:
    one = never(config(zone=2 * MANY))
    await (await added(one, *range(MANY))).persist(store, KEY)
    number = MANY
    for work in (one.persist, one.hydrate):
        working = asyncio.ensure_future(work(store, KEY))
        while not working.done():
            await asyncio.sleep(0)
            await added(one, number)
            number += 1
        await working
    await one.persist(store, KEY)
    assert users(store.state(KEY)) == users(one.to_dict()) == [f"u{each}" for each in range(number)]


@pytest.mark.usefixtures("each_step")
async def test_binding_another_key_while_loading_shows_nothing_of_the_first(
    store: PlainStore,
) -> None:
    await (await added(never(config(zone=MANY)), *range(MANY))).persist(store, KEY)
    for patience in range(15):
        one = never(config(zone=MANY))
        loading = asyncio.ensure_future(one.hydrate(store, KEY))
        for _ in range(patience):
            await asyncio.sleep(0)
        await asyncio.gather(loading, one.hydrate(store, OTHER))
        assert await one.turns() == []


@pytest.mark.usefixtures("each_step")
async def test_what_a_store_changes_while_it_is_read_is_read_as_it_was() -> None:
    class Live:
        state: Any = None

        async def load_memory_state(self, key: str) -> dict[str, Any] | None:
            return self.state

    live = Live()
    live.state = (await added(never(config(zone=MANY)), *range(MANY))).to_dict()
    one = never(config(zone=MANY))
    loading = asyncio.ensure_future(one.hydrate(live, KEY))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    live.state["turns"].clear()
    live.state["more"] = 1
    await loading
    assert len(await one.turns()) == MANY


async def test_persisting_under_a_foreign_key_raises_and_saves_nothing(store: PlainStore) -> None:
    one = await added(never(), 1)
    await one.hydrate(store, KEY)
    with pytest.raises(InvalidKey):
        await one.persist(store, OTHER)
    assert store.texts == {}


async def test_a_persist_completes_even_if_another_key_is_bound() -> None:
    gate = Gate()
    one = await added(never(), 1)
    saving = await reaching(gate, "load", one.persist(gate, KEY))
    moving = asyncio.create_task(one.hydrate(gate, OTHER))
    await asyncio.sleep(0)
    await added(one, 2)
    gate.open()
    await asyncio.gather(saving, moving)
    assert users(gate.state(KEY)) == ["u1"]
    assert users(one.to_dict()) == ["u2"]


async def test_a_summary_in_flight_never_reaches_the_next_key(held: LedgerSummarizer) -> None:
    plain = PlainStore()
    one = await added(memory(held), 1, 2, 3)
    await one.persist(plain, KEY)
    await held.called.wait()
    await one.hydrate(plain, OTHER)
    held.release()
    await asyncio.sleep(0.02)
    assert await shown(one) == {"summary": [], "pending": [], "recent": []}


# What is stored is never harmed


async def test_a_failed_load_never_leads_to_a_save() -> None:
    one = await added(never(), 1)
    with pytest.raises(ConnectionError):
        await one.persist(_Broken(), KEY)
    assert users(one.to_dict()) == ["u1"]


@pytest.mark.parametrize(
    "stored",
    [
        {"version": 2, "turns": "who knows"},
        {"version": 1},
        {},
        [],
        "text",
        {**penguiflow_state(1), "turns": 3},
    ],
)
async def test_what_cannot_be_read_is_never_overwritten(store: PlainStore, stored: Any) -> None:
    text = store.texts[KEY] = json.dumps(stored)
    one = await added(never(), 1)
    with pytest.raises(ValueError, match=r"state|turns"):
        await one.hydrate(store, KEY)
    with pytest.raises(ValueError, match=r"state|turns"):
        await one.persist(store, KEY)
    assert store.texts[KEY] == text
    assert users(one.to_dict()) == ["u1"]


async def test_a_cancelled_persist_can_be_repeated() -> None:
    gate = Gate()
    one = await added(never(), 1)
    saving = await reaching(gate, "saved", one.persist(gate, KEY))
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    gate.open()
    await added(one, 2)
    await one.persist(gate, KEY)
    assert users(gate.state(KEY)) == ["u1", "u2"]


async def test_a_cancelled_waiter_does_not_delay_the_others() -> None:
    gate = Gate()
    one = await added(never(), 1)
    first = await reaching(gate, "load", one.persist(gate, KEY))
    second, third = (asyncio.create_task(one.persist(gate, KEY)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    gate.open()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert users(gate.state(KEY)) == ["u1"]


async def test_a_lost_race_is_merged_and_saved_again() -> None:
    gate = Gate()
    one, two = await added(never(), 1), await added(never(), 2)
    slow = await reaching(gate, "save", one.persist(gate, KEY))
    gate.closed = set()
    await two.persist(gate, KEY)
    await added(one, 3)
    gate.open()
    await slow
    assert gate.races == 1
    assert users(gate.state(KEY)) == ["u2", "u1", "u3"]


async def test_a_store_that_rejects_every_save_is_an_error_in_the_end() -> None:
    class No(ConditionalStore):
        async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
            return False

    one = await added(never(), 1)
    with pytest.raises(Unavailable):
        await one.persist(No(), KEY)
    assert users(one.to_dict()) == ["u1"]


async def test_a_state_loaded_while_saving_is_not_touched_by_what_was_saved() -> None:
    gate = Gate()
    one = await added(never(), 1)
    saving = await reaching(gate, "saved", one.persist(gate, KEY))
    one.from_dict(penguiflow_state(8))
    gate.open()
    await saving
    assert users(one.to_dict()) == ["u8"]


async def test_a_summary_that_grew_from_a_loaded_state_is_saved_over_that_state(store: PlainStore) -> None:
    one = await added(memory(), 1, 2, 3)
    await one.flush()
    await one.persist(store, KEY)
    two = memory()
    two.from_dict(store.state(KEY))
    await added(two, 4)
    await two.flush()
    await two.persist(store, KEY)
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state), state["stm"]["folded"]) == (
        ["u1", "u2"],
        ["u3", "u4"],
        2,
    )


async def test_the_summary_of_a_loaded_state_is_saved_where_there_is_none(store: PlainStore) -> None:
    await (await added(never(), 1)).persist(store, KEY)
    two = never()
    two.from_dict(penguiflow_state(8, summary="S"))
    await two.persist(store, KEY)
    assert (users(store.state(KEY)), store.state(KEY)["summary"]) == (["u1", "u8"], "S")


def test_a_memory_can_be_persisted_in_one_event_loop_after_another() -> None:
    plain = PlainStore()
    one = never()

    async def once(number: int) -> None:
        await one.hydrate(plain, KEY)
        await added(one, number)
        await asyncio.gather(one.persist(plain, KEY), one.persist(plain, KEY))

    for number in range(3):
        asyncio.run(once(number))
    assert users(plain.state(KEY)) == ["u0", "u1", "u2"]


async def test_a_store_that_can_only_be_written_to_is_written_to() -> None:
    class WriteOnly:
        saved: dict[str, Any] | None = None

        async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
            self.saved = state

    only = WriteOnly()
    await (await added(never(), 1)).persist(only, KEY)
    assert only.saved is not None
    assert users(only.saved) == ["u1"]


# What was erased stays erased


async def _erased(erase: Callable[[ConditionalStore], None], *, summarized: bool) -> list[str]:
    """Save u1 to u3 and add u4; return the final state if the first three are erased in between."""
    plain = ConditionalStore()
    one = await added(memory() if summarized else never(), 1, 2, 3)
    await one.flush(timeout=5 if summarized else 0)
    await one.persist(plain, KEY)
    await added(one, 4)
    await one.flush(timeout=5 if summarized else 0)
    erase(plain)
    await one.persist(plain, KEY)
    state = plain.state(KEY)
    assert (await shown(one))["summary"] == covered(state["summary"])
    return [*covered(state["summary"]), *users(state)]


@pytest.mark.parametrize("summarized", [False, True])
async def test_what_was_erased_elsewhere_is_not_saved_again(summarized: bool) -> None:
    assert await _erased(lambda plain: plain.texts.clear(), summarized=summarized) == ["u4"]


@pytest.mark.parametrize("summarized", [False, True])
async def test_erased_turns_stay_erased_when_the_conversation_restarts(
    summarized: bool,
) -> None:
    begun_anew = ConditionalStore()
    await (await added(never(), 9)).persist(begun_anew, KEY)
    again = begun_anew.texts[KEY]
    assert await _erased(lambda plain: plain.texts.update({KEY: again}), summarized=summarized) == [
        "u9",
        "u4",
    ]


async def test_what_was_erased_elsewhere_is_not_shown_after_a_hydrate() -> None:
    plain = ConditionalStore()
    await (await added(memory(), 1, 2, 3)).persist(plain, KEY)
    two = memory()
    await two.hydrate(plain, KEY)
    await two.flush()
    await added(two, 4)
    plain.texts.clear()
    await two.hydrate(plain, KEY)
    assert users(two.to_dict()) == ["u4"]
    assert two.to_dict()["summary"] == ""
    await two.persist(plain, KEY)
    assert users(plain.state(KEY)) == ["u4"]


async def test_unsaved_turns_return_from_a_summary_of_erased_turns() -> None:
    plain = ConditionalStore()
    one = await added(memory(), 1)
    await one.persist(plain, KEY)
    await added(one, 2, 3, 4)
    await one.flush()
    assert covered(one.to_dict()["summary"]) == ["u1", "u2"]
    plain.texts.clear()
    await one.persist(plain, KEY)
    assert (plain.state(KEY)["summary"], users(plain.state(KEY))) == ("", ["u2", "u3", "u4"])


async def test_a_summary_in_flight_of_what_was_erased_is_discarded() -> None:
    plain, held = ConditionalStore(), LedgerSummarizer()
    held.hold()
    one = await added(memory(held), 1, 2, 3)
    await one.persist(plain, KEY)
    await held.called.wait()
    plain.texts.clear()
    await one.hydrate(plain, KEY)
    held.release()
    await asyncio.sleep(0.02)
    assert await shown(one) == {"summary": [], "pending": [], "recent": []}


async def test_a_plain_store_that_returns_none_has_erased_nothing() -> None:
    plain = PlainStore()
    one = await added(never(), 1)
    await one.persist(plain, KEY)
    plain.texts.clear()
    await one.hydrate(plain, KEY)
    await one.persist(plain, KEY)
    assert users(plain.state(KEY)) == ["u1"]


async def test_a_conversation_moves_whole_to_a_store_that_has_never_held_it() -> None:
    old, new = ConditionalStore(), ConditionalStore()
    one = await added(never(), 1)
    await one.persist(old, KEY)
    await one.hydrate(new, KEY)
    await one.persist(new, KEY)
    assert users(new.state(KEY)) == ["u1"]


async def test_what_a_truncated_state_leaves_out_is_not_taken_for_erased() -> None:
    plain = ConditionalStore()
    one = never(config("truncation", zone=3, total_max_tokens=30, summary_max_tokens=1))
    for number in range(6):
        await added(one, number)
        await one.persist(plain, KEY)
        await one.hydrate(plain, KEY)
    kept = users(plain.state(KEY))
    assert kept == ["u4", "u5"][-len(kept) :]
    assert users(one.to_dict()) == kept
    assert one.to_dict()["stm"]["gone"] == 3
