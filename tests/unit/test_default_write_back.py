"""A summary that is finished after `persist` reaches the store by itself."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.telemetry.observer import Observer, TurnEvent
from stm_backends.testing.memory_contract import config, shown, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from tests.support.default_memory import KEY, OTHER, added, memory, users
from tests.support.stores import ConditionalStore, Gate, PlainStore


@pytest.fixture(params=[PlainStore, ConditionalStore])
def store(request: pytest.FixtureRequest) -> PlainStore:
    return request.param()


async def persisted(
    store: Any, *numbers: int, **given: Any
) -> tuple[DefaultShortTermMemory, LedgerSummarizer]:
    """Return a memory that has persisted these turns while its first summary waits to be released."""
    summarizer = LedgerSummarizer()
    summarizer.hold()
    one = DefaultShortTermMemory(config=config(zone=2), summarizer=summarizer, **given)
    await added(one, *numbers)
    await one.persist(store, KEY)
    return one, summarizer


async def test_another_process_sees_a_summary_that_was_finished_after_persist(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3, 4)
    summarizer.release()
    await one.flush()
    two = memory()
    await two.hydrate(store, KEY)
    assert await shown(two) == {"summary": ["u1", "u2"], "pending": [], "recent": ["u3", "u4"]}
    saves = store.saves
    await one.persist(store, KEY)
    assert users(store.state(KEY)) == ["u3", "u4"]
    assert store.saves == saves + 1


async def test_a_setting_leaves_it_to_the_next_persist(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3, write_back_summaries=False)
    summarizer.release()
    await one.flush()
    assert (one.busy, store.state(KEY)["summary"]) == (False, "")
    await one.persist(store, KEY)
    assert covered(store.state(KEY)["summary"]) == ["u1"]


async def test_a_concurrent_save_of_another_process_is_kept(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3)
    two = memory(settings=config(zone=2, fold_batch_turns=100))
    await two.hydrate(store, KEY)
    await (await added(two, 9)).persist(store, KEY)
    summarizer.release()
    await one.flush()
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1", "u2"], ["u3", "u9"])


async def test_a_race_that_is_lost_is_merged_and_saved_again() -> None:
    gate = Gate()
    one, summarizer = await persisted(gate, 1, 2, 3)
    gate.close("load")
    summarizer.release()
    await gate.reached.wait()
    two = memory(settings=config(zone=2, fold_batch_turns=100))
    two.from_dict(gate.state(KEY))
    await added(two, 9)
    await gate.save_if(KEY, two.to_dict(), expect=str(gate.saves))
    gate.open()
    await one.flush()
    state = gate.state(KEY)
    assert (gate.races, covered(state["summary"]), users(state)) == (1, ["u1", "u2"], ["u3", "u9"])


async def test_another_summary_that_was_stored_in_between_stays(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3)
    two = memory(settings=config(zone=1))
    await two.hydrate(store, KEY)
    await two.flush()
    await two.persist(store, KEY)
    summarizer.release()
    await one.flush()
    assert covered(store.state(KEY)["summary"]) == ["u1", "u2"]


async def test_no_turn_is_saved_that_was_never_persisted(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3)
    await added(one, 4)
    summarizer.release()
    await one.flush()
    # The summary of u1 was of saved turns alone; the next one covers u2 as well, which was saved too.
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1", "u2"], ["u3"])
    await added(one, 5, 6)
    await one.flush()
    assert covered(one.to_dict()["summary"]) == ["u1", "u2", "u3", "u4"]
    assert store.state(KEY) == state, "this summary covers u4, which was never persisted"
    await one.persist(store, KEY)
    state = store.state(KEY)
    assert (covered(state["summary"]), users(state)) == (["u1", "u2", "u3", "u4"], ["u5", "u6"])


async def test_a_conversation_erased_in_between_is_not_created_again(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3)
    store.texts.clear()
    summarizer.release()
    await one.flush()
    assert store.texts == {}


async def test_what_was_erased_and_begun_by_another_is_left_alone() -> None:
    store, begun = ConditionalStore(), ConditionalStore()
    one, summarizer = await persisted(store, 1, 2, 3)
    await (await added(memory(), 9)).persist(begun, KEY)
    store.texts[KEY] = begun.texts[KEY]
    summarizer.release()
    await one.flush()
    assert store.texts == begun.texts


async def test_nothing_of_it_reaches_another_conversation() -> None:
    gate = Gate()
    one, summarizer = await persisted(gate, 1, 2, 3)
    gate.close("load")
    summarizer.release()
    await gate.reached.wait()
    hydrating = asyncio.create_task(one.hydrate(gate, OTHER))
    await asyncio.sleep(0)
    gate.open()
    await hydrating
    await added(one, 7)
    await one.flush()
    assert [*gate.texts] == [KEY]
    assert (covered(gate.state(KEY)["summary"]), users(gate.state(KEY))) == (["u1"], ["u2", "u3"])
    assert users(one.to_dict()) == ["u7"]


async def test_a_loaded_state_is_saved_by_persist_alone(store: PlainStore) -> None:
    one, summarizer = await persisted(store, 1, 2, 3)
    before = store.texts[KEY]
    two = await added(memory(settings=config(zone=2, fold_batch_turns=100)), 6, 7, 8)
    one.from_dict(two.to_dict())
    summarizer.release()
    await one.flush()
    assert covered(one.to_dict()["summary"]) == ["u6"]
    assert store.texts == {KEY: before}


async def test_a_store_that_fails_is_in_the_log_and_the_next_persist_saves_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(ConditionalStore):
        fails = False

        async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
            if self.fails:
                raise RuntimeError("secret: u1")
            return await super().load_versioned(key)

    store = Failing()
    one, summarizer = await persisted(store, 1, 2, 3)
    store.fails = True
    summarizer.release()
    await one.flush()
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "RuntimeError" in record.message
    assert "secret" not in caplog.text
    store.fails = False
    await one.persist(store, KEY)
    assert covered(store.state(KEY)["summary"]) == ["u1"]


async def test_a_store_that_panics_is_in_the_log_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class PanicException(BaseException):
        """As an extension in Rust raises it."""

    class Panicking(ConditionalStore):
        async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
            if expect is not None:
                raise PanicException("secret: u1")
            return await super().save_if(key, state, expect=expect)

    one, summarizer = await persisted(Panicking(), 1, 2, 3)
    summarizer.release()
    await one.flush()
    gc.collect()  # asyncio reports an error of a task that nobody asked for when the task goes
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "PanicException" in record.message
    assert "secret" not in caplog.text


async def test_closing_lets_a_write_that_is_under_way_end() -> None:
    gate = Gate()
    one, summarizer = await persisted(gate, 1, 2, 3)
    gate.close("save")
    summarizer.release()
    await gate.reached.wait()
    closing = asyncio.create_task(one.close())
    await asyncio.sleep(0)
    gate.open()
    await closing
    assert covered(gate.state(KEY)["summary"]) == ["u1"]


async def test_a_conversation_that_is_hydrated_just_as_a_summary_ends_is_kept() -> None:
    store = ConditionalStore()
    await (await added(memory(), 11, 12)).persist(store, OTHER)
    hydrating: list[asyncio.Task[None]] = []

    class Hydrating(Observer):
        def turns(self, event: TurnEvent, count: int) -> None:
            if event == "folded":
                hydrating.append(asyncio.create_task(one.hydrate(store, OTHER)))

    one, summarizer = await persisted(store, 1, 2, 3, observer=Hydrating())
    summarizer.release()
    await until(lambda: bool(hydrating))
    await asyncio.gather(*hydrating)
    await one.flush()
    assert await shown(one) == {"summary": [], "pending": [], "recent": ["u11", "u12"]}
