"""The background of the memory in one process: when it summarizes, retries, recovers, and lets go."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from stm_backends import logs
from stm_backends.memory.local.conversation import Conversation
from stm_backends.memory.local.memory import AT_ONCE, DefaultShortTermMemory
from stm_backends.testing.memory_contract import config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered, summary_of
from stm_backends.types import MemoryHealth
from tests.support import clock
from tests.support.default_memory import KEY, OTHER, added
from tests.support.stores import ConditionalStore


class Timed:
    """A ledger's summarizer that notes when it is called, takes its time, and fails as often as told."""

    def __init__(self, *, fails: int = 0, takes: float = 0.0) -> None:
        self.fails = fails
        self.takes = takes
        self.times: list[float] = []
        self.asked: list[list[str]] = []

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.times.append(clock.now())
        users = [item["user"] for item in request["turns"]]
        self.asked.append(users)
        await asyncio.sleep(self.takes)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("told to fail: u0")
        return {"summary": summary_of(covered(request["previous_summary"]) + users)}

    @property
    def gaps(self) -> list[float]:
        return [round(later - earlier, 3) for earlier, later in zip(self.times, self.times[1:], strict=False)]


def memory(summarizer: Any, **settings: Any) -> DefaultShortTermMemory:
    settings = {"zone": 1, "retry_backoff_base_s": 2.0, "degraded_retry_interval_s": 30.0, **settings}
    return DefaultShortTermMemory(config=config(**settings), summarizer=summarizer, time_source=clock.now)


@clock.virtually
async def test_degraded_keeps_trying_on_its_interval_and_recovers_with_one_batch() -> None:
    summarizer = Timed(fails=6)
    one = memory(summarizer)
    await added(one, 0, 1)
    await asyncio.sleep(20)
    assert one.health is MemoryHealth.DEGRADED
    await added(one, 2, 3)
    await asyncio.sleep(100)
    assert summarizer.gaps == [2, 4, 8, 30, 30, 30]
    assert summarizer.asked[-1] == ["u0", "u1", "u2"]
    assert one.health is MemoryHealth.HEALTHY


@pytest.mark.parametrize(("base", "interval"), [(0.0, 0.0), (0.0, 30.0), (1e9, 0.0)])
@clock.virtually
async def test_no_interval_makes_the_background_spin(base: float, interval: float) -> None:
    summarizer = Timed(fails=10**9)
    one = memory(summarizer, retry_backoff_base_s=base, degraded_retry_interval_s=interval)
    await added(one, 0, 1)
    await asyncio.sleep(10)
    assert len(summarizer.times) <= 201
    await one.close()


@clock.virtually
async def test_a_stopped_clock_does_not_prevent_retries() -> None:
    summarizer = Timed(fails=5)
    one = DefaultShortTermMemory(
        config=config(zone=1, retry_backoff_base_s=2.0, degraded_retry_interval_s=30.0),
        summarizer=summarizer,
        time_source=lambda: 5.0,
    )
    await added(one, 0, 1)
    await asyncio.sleep(600)
    assert summarizer.gaps == [2, 4, 8, 30, 30]
    assert one.health is MemoryHealth.HEALTHY


@clock.virtually
async def test_there_is_never_more_than_one_summarizer_call_at_a_time() -> None:
    summarizer = LedgerSummarizer()
    one = memory(summarizer)
    summarizer.hold()
    await added(one, 0, 1)
    await summarizer.called.wait()
    flushes = [asyncio.create_task(one.flush(timeout=5)) for _ in range(3)]
    await added(one, *range(2, 50))
    for _ in range(10):
        await one.get_llm_context()
        await asyncio.sleep(0.1)
    summarizer.release()
    await asyncio.gather(*flushes)
    assert summarizer.most_running == 1
    assert (await shown(one))["summary"] == [f"u{number}" for number in range(49)]


@clock.virtually
async def test_turns_added_during_a_recovery_are_not_trimmed_under_it() -> None:
    summarizer = Timed(fails=1, takes=5)
    one = memory(summarizer, retry_attempts=0, recovery_backlog_limit=2)
    await added(one, 0, 1, 2)
    await asyncio.sleep(36)
    assert one.health is MemoryHealth.RECOVERING
    await added(one, 3, 4, 5, 6)
    await asyncio.sleep(20)
    assert await shown(one) == {
        "summary": ["u0", "u1", "u2", "u3", "u4", "u5"],
        "pending": [],
        "recent": ["u6"],
    }
    assert one.to_dict()["stm"]["dropped"] == 0


def test_dropped_turns_are_counted_and_logged_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    logs.configure(every_s=0)

    async def main() -> None:
        one = memory(Timed(fails=10**6), retry_attempts=0, recovery_backlog_limit=3)
        await added(one, 0, 1)
        await asyncio.sleep(1)
        await added(one, *range(2, 10))
        state = one.to_dict()
        assert [item["user_message"] for item in state["backlog"]] == ["u6", "u7", "u8"]
        assert (state["pending"], state["stm"]["dropped"]) == ([], 6)
        await one.close()

    with caplog.at_level(logging.DEBUG, logger="stm_backends"):
        clock.run(main())
    assert caplog.text.count("1 turns beyond recovery_backlog_limit were dropped") == 6
    assert "u0" not in caplog.text


def test_failures_degradation_and_recovery_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        one = memory(Timed(fails=4), retry_attempts=1)
        await added(one, 0, 1)
        await asyncio.sleep(200)
        await one.close()

    with caplog.at_level(logging.INFO, logger="stm_backends"):
        clock.run(main())
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert "attempt 1" in caplog.records[0].message


@clock.virtually
async def test_a_summarizer_that_hangs_counts_as_failed_and_ends_a_flush() -> None:
    summarizer = Timed(takes=10**6)
    one = memory(summarizer, summarizer_timeout_s=10.0, retry_attempts=1)
    await added(one, 0, 1)
    started = clock.now()
    await one.flush()
    assert clock.now() - started == 22
    assert one.health is MemoryHealth.DEGRADED
    assert summarizer.gaps == [12]
    summarizer.takes = 0
    await asyncio.sleep(60)
    assert (await shown(one))["summary"] == ["u0"]


@clock.virtually
async def test_a_summarizer_that_cancels_itself_has_failed() -> None:
    calls: list[int] = []

    async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise asyncio.CancelledError
        return {"summary": "S"}

    one = memory(summarize)
    await added(one, 0, 1)
    await asyncio.sleep(1)
    assert one.health is MemoryHealth.RETRY
    await asyncio.sleep(5)
    assert one.health is MemoryHealth.HEALTHY


@clock.virtually
async def test_a_summarizer_may_keep_and_change_what_it_was_given() -> None:
    async def summarize(request: Any) -> Mapping[str, Any]:
        request["turns"].clear()
        request["previous_summary"] = None
        return {"summary": "S"}

    one = memory(summarize)
    await added(one, 0, 1)
    await one.flush()
    assert (await one.get_llm_context())["conversation_memory"]["summary"] == "S"


@clock.virtually
async def test_flush_waits_for_retries() -> None:
    one = memory(Timed(fails=3))
    await added(one, 0, 1)
    started = clock.now()
    await one.flush()
    assert (clock.now() - started, (await shown(one))["summary"]) == (14, ["u0"])


@pytest.mark.parametrize("retries", [0, 1])
@clock.virtually
async def test_flush_returns_at_once_when_the_memory_becomes_degraded(retries: int) -> None:
    one = memory(Timed(fails=10**9), retry_attempts=retries)
    await added(one, 0, 1)
    started = clock.now()
    await one.flush(timeout=1000)
    assert one.health is MemoryHealth.DEGRADED
    assert clock.now() - started == pytest.approx(2.0 * retries)
    await one.close()


async def degraded_state() -> dict[str, Any]:
    """Return the state of a degraded memory, whose next attempt is due in half a minute."""
    one = memory(Timed(fails=10**9), retry_attempts=0)
    await added(one, 0, 1)
    await one.flush()
    await one.close()
    return one.to_dict()


@clock.virtually
async def test_a_flush_of_a_degraded_memory_makes_the_attempt_that_is_due() -> None:
    state = await degraded_state()
    await asyncio.sleep(30)
    one = memory(Timed(takes=1.0))
    one.from_dict(state)
    await one.flush()
    assert await shown(one) == {"summary": ["u0"], "pending": [], "recent": ["u1"]}


@clock.virtually
async def test_a_flush_of_a_degraded_memory_waits_for_no_later_attempt() -> None:
    one = memory(summarizer := Timed())
    one.from_dict(await degraded_state())
    began = clock.now()
    await one.flush(timeout=1000)
    assert (clock.now() - began, summarizer.times) == (0.0, [])
    await one.close()


@clock.virtually
async def test_a_flush_makes_one_attempt_while_the_model_is_down() -> None:
    state = await degraded_state()
    await asyncio.sleep(30)
    one = memory(summarizer := Timed(fails=10**9, takes=5.0), degraded_retry_interval_s=0.0)
    one.from_dict(state)
    began = clock.now()
    await one.flush(timeout=1000)
    assert (clock.now() - began, len(summarizer.times)) == (5.0, 1)
    await one.close()


@clock.virtually
async def test_a_flush_waits_for_an_attempt_that_is_under_way() -> None:
    state = await degraded_state()
    await asyncio.sleep(30)
    one = memory(summarizer := Timed(takes=5.0))
    one.from_dict(state)
    await asyncio.sleep(1)
    assert one.health is MemoryHealth.RECOVERING
    await one.flush()
    assert (one.health, len(summarizer.times)) == (MemoryHealth.HEALTHY, 1)


@clock.virtually
async def test_a_clock_that_leaps_makes_the_next_attempt_due_at_once() -> None:
    """As after a machine has slept: the timer of the event loop has not moved."""
    leapt = 0.0
    settings = config(zone=1, retry_attempts=0, degraded_retry_interval_s=3600.0)
    one = DefaultShortTermMemory(
        config=settings, summarizer=Timed(fails=1), time_source=lambda: clock.now() + leapt
    )
    await added(one, 0, 1)
    await one.flush()
    assert one.health is MemoryHealth.DEGRADED
    leapt, began = 3601.0, clock.now()
    await one.flush()
    assert (one.health, clock.now()) == (MemoryHealth.HEALTHY, began)


def test_a_background_that_dies_ends_a_flush_and_the_next_one_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mistake of our own would do."""
    broken = asyncio.Event()
    asked: list[bool] = []
    right = Conversation.next_step

    def next_step(conversation: Conversation, **options: Any) -> Any:
        if broken.is_set() and asyncio.current_task().get_name() == "stm-memory":  # type: ignore[union-attr]
            asked.append(True)
            raise RuntimeError("secret: u0")
        return right(conversation, **options)

    monkeypatch.setattr(Conversation, "next_step", next_step)

    async def main() -> None:
        one = DefaultShortTermMemory(config=config(zone=1, fold_batch_turns=10), summarizer=Timed())
        await added(one, 0, 1)
        broken.set()
        await one.flush(timeout=1000)
        assert len(asked) == 1
        broken.clear()
        await one.flush(timeout=1000)
        assert (await shown(one))["summary"] == ["u0"]

    clock.run(main())
    assert caplog.text.count("the memory's background stopped: RuntimeError") == 1
    assert "secret" not in caplog.text


@clock.virtually
async def test_degraded_with_nothing_pending_recovers_and_shows_its_summary() -> None:
    """Another process has let its turns go, say; no attempt would ever be made again."""
    seen: list[tuple[str, str]] = []

    async def note(old: MemoryHealth, new: MemoryHealth) -> None:
        seen.append((old.value, new.value))

    one, other = memory(Timed(), on_health_changed=note), memory(Timed())
    await added(other, 0, 1)
    await other.flush()
    state = {**other.to_dict(), "health": "degraded"}
    one.from_dict(state)
    assert one.health is MemoryHealth.DEGRADED, "a state that is loaded is the state that was loaded"
    assert (await shown(one))["summary"] == ["u0"]
    await asyncio.sleep(0.1)
    assert one.health is MemoryHealth.HEALTHY
    assert seen == [("degraded", "healthy")]
    assert one.to_dict()["stm"]["attempts"] == 0
    await one.close()
    await other.close()


async def test_flush_has_nothing_to_wait_for_without_pending_turns() -> None:
    for strategy in ("none", "truncation", "rolling_summary"):
        one = DefaultShortTermMemory(config=config(strategy), summarizer=LedgerSummarizer())
        await one.add_turn(turn(1))
        async with asyncio.timeout(1):
            await one.flush()


@clock.virtually
async def test_a_flush_that_is_cancelled_cancels_no_summary() -> None:
    summarizer = Timed(takes=5)
    one = memory(summarizer, fold_batch_turns=2)
    await added(one, 0, 1)
    flush = asyncio.create_task(one.flush())
    await asyncio.sleep(1)
    flush.cancel()
    await asyncio.sleep(10)
    assert (await shown(one))["summary"] == ["u0"]
    await added(one, 2)
    await asyncio.sleep(10)
    assert (await shown(one))["pending"] == ["u1"]
    assert len(summarizer.times) == 1


@clock.virtually
async def test_a_caller_that_is_cancelled_cancels_no_summary() -> None:
    summarizer = Timed(takes=5)
    one = memory(summarizer)

    async def request() -> None:
        await added(one, 0, 1)
        await asyncio.sleep(60)

    task = asyncio.create_task(request())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(10)
    assert (await shown(one))["summary"] == ["u0"]


def test_the_next_loop_resumes_what_a_dead_one_left() -> None:
    summarizer = Timed(takes=100)
    one = memory(summarizer)

    async def first() -> None:
        await added(one, 0, 1)
        await asyncio.sleep(1)

    async def second() -> dict[str, Any]:
        summarizer.takes = 0
        await one.get_llm_context()
        await one.flush()
        return await shown(one)

    clock.run(first())
    assert clock.run(second()) == {"summary": ["u0"], "pending": [], "recent": ["u1"]}


def test_a_loop_that_was_closed_in_the_middle_of_a_recovery_is_forgotten() -> None:
    summarizer = Timed(fails=1, takes=10)
    one = memory(summarizer, retry_attempts=0)
    loop = clock.VirtualLoop()

    async def first() -> None:
        await added(one, 0, 1)
        await asyncio.sleep(45)
        assert one.health is MemoryHealth.RECOVERING

    loop.run_until_complete(first())
    loop.close()
    for task in asyncio.all_tasks(loop):
        # It cannot be cancelled on a loop that is closed, and need not be reported as lost.
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001 -- no setting

    async def second() -> None:
        await added(one, 2)
        await asyncio.sleep(120)
        assert one.health is MemoryHealth.HEALTHY
        assert (await shown(one))["summary"] == ["u0", "u1"]
        one.from_dict(one.to_dict())

    clock.run(second())
    gc.collect()


@clock.virtually
async def test_closing_ends_the_background_and_leaves_what_is_pending() -> None:
    summarizer = Timed(takes=100)
    one = memory(summarizer)
    await added(one, 0, 1)
    await asyncio.sleep(1)
    await one.close()
    await added(one, 2)
    await asyncio.sleep(500)
    assert await shown(one) == {"summary": [], "pending": ["u0", "u1"], "recent": ["u2"]}
    assert len(summarizer.times) == 1
    await one.flush()


Changes = list[tuple[MemoryHealth, MemoryHealth]]


async def recovering(changes: Changes) -> DefaultShortTermMemory:
    """Return a memory in the middle of an attempt to leave `DEGRADED`, which its listener knows."""

    async def listen(old: MemoryHealth, new: MemoryHealth) -> None:
        changes.append((old, new))

    one = memory(Timed(fails=1, takes=10), retry_attempts=0, on_health_changed=listen)
    await added(one, 0, 1)
    await asyncio.sleep(45)
    assert one.health is MemoryHealth.RECOVERING
    assert changes[-1] == (MemoryHealth.DEGRADED, MemoryHealth.RECOVERING)
    return one


@clock.virtually
async def test_a_listener_hears_that_closing_ended_a_recovery() -> None:
    changes: Changes = []
    one = await recovering(changes)
    await one.close()
    assert changes[-1] == (MemoryHealth.RECOVERING, MemoryHealth.DEGRADED)
    assert one.health is MemoryHealth.DEGRADED
    assert len(changes) == 3


@pytest.mark.parametrize("how", ["from_dict", "hydrate"])
@clock.virtually
async def test_a_listener_hears_that_another_state_ended_a_recovery(how: str) -> None:
    changes: Changes = []
    one, store = await recovering(changes), ConditionalStore()
    if how == "from_dict":
        one.from_dict(memory(Timed()).to_dict())
    else:
        await one.persist(store, KEY)
        assert len(changes) == 2
        await one.hydrate(store, OTHER)
    await asyncio.sleep(60)
    assert changes[-1] == (MemoryHealth.RECOVERING, MemoryHealth.HEALTHY)
    assert len(changes) == 3


@clock.virtually
async def test_a_listener_hears_that_another_process_ended_a_recovery() -> None:
    changes: Changes = []
    one, store = await recovering(changes), ConditionalStore()
    await one.persist(store, KEY)
    store.texts[KEY] = json.dumps({**store.state(KEY), "health": "healthy", "summary": "theirs"})
    await one.hydrate(store, KEY)
    await asyncio.sleep(0.5)
    assert changes[2:] == [(MemoryHealth.RECOVERING, MemoryHealth.HEALTHY)]
    await one.close()


@clock.virtually
async def test_a_conversation_that_waits_for_a_slow_model_has_no_task() -> None:
    released, calls = asyncio.Event(), 0

    async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        await released.wait()
        return {"summary": "so far"}

    memories = [memory(summarize) for _ in range(1000)]
    for one in memories:
        await added(one, 0, 1, 2, 3)
    await asyncio.sleep(0.1)
    assert calls == AT_ONCE
    # A step and its call for each place, and this test.
    assert len(asyncio.all_tasks()) <= 2 * AT_ONCE + 1
    assert all(one.busy for one in memories)
    released.set()
    await asyncio.gather(*(one.flush() for one in memories))
    assert calls == 1000
    for one in memories:
        assert (await one.get_llm_context())["conversation_memory"]["summary"] == "so far"


@clock.virtually
async def test_a_conversation_that_waits_for_its_retry_has_no_task() -> None:
    memories = [memory(Timed(fails=1), retry_backoff_base_s=60.0) for _ in range(100)]
    for one in memories:
        await added(one, 0, 1, 2, 3)
    await asyncio.sleep(1)
    assert {one.health for one in memories} == {MemoryHealth.RETRY}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asyncio.sleep(60)
    assert {one.health for one in memories} == {MemoryHealth.HEALTHY}


@clock.virtually
async def test_a_tenant_whose_model_hangs_leaves_places_to_others() -> None:
    async def hang(request: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(1e6)
        raise AssertionError

    store = ConditionalStore()
    for number in range(AT_ONCE):
        one = memory(hang)
        await one.hydrate(store, f"acme:u:{number}")
        await added(one, 0, 1, 2, 3)
    other = memory(Timed())
    await other.hydrate(store, "other:u:s")
    await added(other, 0, 1, 2, 3)
    await asyncio.sleep(0.1)
    assert (await shown(other))["summary"]
