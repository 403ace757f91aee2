"""What several pods make of one conversation, with every step of theirs under control."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import (
    Corrupt,
    InvalidKey,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
)
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.records import keys
from stm_backends.records.body import Body, Lease, Overdue
from stm_backends.records.codec import Codec
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    StoredTurn,
    TrajectoryDigest,
)
from tests.support import leases
from tests.support.default_memory import added
from tests.support.replicated import FailingOver, FailsOver, StillAnswersLoads

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)


class Pods:
    """Several pods on one datastore, with a common clock that only moves when told to."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now = 1_000.0
        self.memories: list[DistributedShortTermMemory] = []
        self.drivers: list[SpyDriver] = []

    async def pod(
        self,
        settings: object | None = None,
        summarizer: Any = None,
        *,
        key: MemoryKey = KEY,
        clock_error: float = 0.0,
        **limits: Any,
    ) -> tuple[DistributedShortTermMemory, SpyDriver]:
        driver = SpyDriver(MemoryDriver(self.store, clock=lambda: self.now, **limits))
        await driver.open()
        memory = DistributedShortTermMemory(
            driver,
            key,
            config() if settings is None else settings,
            summarizer=summarizer or LedgerSummarizer(),
        )
        self.memories.append(memory)
        self.drivers.append(driver)
        return memory, driver

    async def close(self) -> None:
        for memory in self.memories:
            await memory.close()


@pytest.fixture
async def pods() -> Any:
    made = Pods()
    yield made
    await made.close()


async def test_the_first_turn_lists_the_user_before_and_after_it_is_stored(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation"))
    await memory.add_turn(turn(0))
    await until(lambda: not memory.busy)
    assert driver.calls == [
        ("load", "users"),
        ("replace", "users"),
        ("append", "memory"),
        ("load", "users"),
    ]


async def test_a_fold_takes_two_requests(pods: Pods) -> None:
    memory, driver = await pods.pod()
    await added(memory, *range(2))
    await memory.get_llm_context()
    await until(lambda: not memory.busy)
    driver.calls.clear()
    await memory.add_turn(turn(2))
    await memory.get_llm_context()
    await until(lambda: memory.stats.summaries == 1 and not memory.busy)
    assert sorted(driver.calls) == [
        ("append", "memory"),
        ("load", "memory"),
        ("replace", "memory"),
        ("replace", "memory"),
    ]


async def test_a_fold_after_a_turn_of_another_pod_loads_first(pods: Pods) -> None:
    memory, driver = await pods.pod()
    other, _ = await pods.pod(config("truncation", zone=50))
    await memory.add_turn(turn(0))
    await memory.get_llm_context()
    await other.add_turn(turn(1))
    await until(lambda: not memory.busy)
    driver.calls.clear()
    await memory.add_turn(turn(2))
    await until(lambda: memory.stats.summaries == 1 and not memory.busy)
    assert [operation for operation, _ in driver.calls] == ["append", "load", "replace", "replace"]
    assert await shown(memory) == {"summary": ["u0"], "pending": [], "recent": ["u1", "u2"]}


async def test_a_trim_takes_one_request(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation", zone=1))
    await memory.add_turn(turn(0))
    await memory.get_llm_context()
    await memory.add_turn(turn(1))
    await until(lambda: not memory.busy)
    driver.calls.clear()
    await memory.add_turn(turn(2))
    await until(lambda: not memory.busy)
    assert driver.calls == [("append", "memory"), ("replace", "memory")]
    assert (await shown(memory))["recent"] == ["u2"]


async def test_a_pod_that_waited_for_the_lease_summarizes_no_turn_again(pods: Pods) -> None:
    summarizer = LedgerSummarizer()
    here, _ = await pods.pod(summarizer=summarizer)
    there, driver = await pods.pod(summarizer=summarizer)
    await added(here, *range(2))

    async def let_the_other_finish(_: Key | str) -> None:
        await here.flush()

    # There sees that a fold is due, and before it gets the lease the other pod has made it.
    await here.add_turn(turn(2))
    driver.after["load"] = [let_the_other_finish]
    await there.get_llm_context()
    await there.flush()
    assert len(summarizer.requests) == 1


async def test_a_fold_that_loses_its_race_keeps_a_summary_that_applies(pods: Pods) -> None:
    here, driver = await pods.pod(summarizer=(summarizer := LedgerSummarizer()))
    there, _ = await pods.pod()
    stored = await there_writes_new_version(pods)

    driver.before["replace"] = [nothing, stored]  # between taking the lease and the fold
    await added(here, *range(3))
    await here.flush()
    assert (await shown(there))["summary"] == ["u0"]
    assert here.stats.lost_races == 1
    assert len(summarizer.requests) == 1


async def nothing(_: Key | str) -> None:
    """A hook for an operation that nothing happens before."""


async def there_writes_new_version(pods: Pods) -> Any:
    """Return a hook that rewrites the body as it is, under another version."""
    other = MemoryDriver(pods.store, clock=lambda: pods.now)
    await other.open()

    async def rewrite(key: Key | str) -> None:
        assert isinstance(key, Key)
        record = await other.load(key)
        assert record is not None
        body = record.body or Codec().seal_body(Codec().open_body(None))
        assert await other.replace(key, body, version="theirs", expect=record.version, ttl=None)

    return rewrite


async def test_a_copy_that_arrives_while_its_turn_is_folded_never_comes_back(pods: Pods) -> None:
    """The pod that folds has the copy's bytes in hand as a turn, and must not take them for one again."""

    async def summarize(request: Mapping[str, Any]) -> dict[str, Any]:
        record = await driver.load(RECORD)
        assert record is not None
        await driver.append(RECORD, record.tail[0], initial_version="no", ttl=None)
        return {"summary": "said"}

    memory, driver = await pods.pod(summarizer=summarize)
    for number in range(3):
        await memory.add_turn(turn(number))
        await memory.get_llm_context()
    await until(lambda: memory.stats.summaries == 1 and not memory.busy)
    assert len((await driver.load(RECORD)).tail) == 3
    assert [stored.user_message for stored in await memory.turns()] == ["u1", "u2"]
    context = (await memory.get_llm_context())["conversation_memory"]
    assert [shown["user"] for shown in context["recent_turns"]] == ["u1", "u2"]
    assert "pending_turns" not in context


async def test_a_fold_that_loses_to_another_fold_is_discarded(pods: Pods) -> None:
    here, driver = await pods.pod(summarizer=(mine := LedgerSummarizer()))
    there, _ = await pods.pod(summarizer=(theirs := LedgerSummarizer()))

    async def lease_expires_and_the_other_folds(_: Key | str) -> None:
        await leases.release(driver.inner, RECORD)
        await there.flush()

    driver.before["replace"] = [nothing, lease_expires_and_the_other_folds]
    await added(here, *range(4))
    await here.flush()
    assert (await shown(here)) == {"summary": ["u0", "u1"], "pending": [], "recent": ["u2", "u3"]}
    assert here.stats.lost_races == 1
    assert (len(mine.requests), len(theirs.requests)) == (1, 1)


async def test_a_fold_never_removes_turns_of_another_pod(pods: Pods) -> None:
    here, driver = await pods.pod()
    there, _ = await pods.pod(config("truncation", zone=50))

    async def others_add(_: Key | str) -> None:
        for number in (10, 11, 12):
            await there.add_turn(turn(number))

    driver.before["replace"] = [others_add]
    await added(here, *range(3))
    await until(lambda: here.stats.summaries >= 1)
    await here.flush()
    assert await shown(here) == {
        "summary": ["u0", "u1", "u2", "u10"],
        "pending": [],
        "recent": ["u11", "u12"],
    }


async def test_a_pod_resumes_what_a_dead_one_left_when_it_reads(pods: Pods) -> None:
    dead, _ = await pods.pod(config("truncation", zone=50))
    await added(dead, *range(4))
    alive, _ = await pods.pod()
    await alive.get_llm_context()
    await until(lambda: alive.stats.summaries == 1)
    assert (await shown(alive))["summary"] == ["u0", "u1"]


async def test_closing_in_the_middle_of_a_summary_releases_the_lease(
    pods: Pods, held: LedgerSummarizer
) -> None:
    memory, driver = await pods.pod(summarizer=held)
    await added(memory, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    assert (await leases.stored_body(driver, RECORD)).lease is not None
    await memory.close(timeout=0.05)
    assert (await leases.stored_body(driver, RECORD)).lease is None
    assert not memory.busy
    assert (await shown(memory))["pending"] == ["u0"]


async def test_closing_lets_a_summary_finish_within_the_deadline(pods: Pods, held: LedgerSummarizer) -> None:
    memory, _ = await pods.pod(summarizer=held)
    await added(memory, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    closing = asyncio.create_task(memory.close(timeout=5))
    await asyncio.sleep(0.01)
    held.release()
    await asyncio.wait_for(closing, 2)
    assert (await shown(memory))["summary"] == ["u0"]


async def test_a_lease_of_another_holder_is_never_released(pods: Pods, held: LedgerSummarizer) -> None:
    memory, driver = await pods.pod(summarizer=held)
    await added(memory, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    # Ours has expired, and another process has taken the lease.
    await leases.take(driver.inner, RECORD)
    theirs = await leases.stored_body(driver, RECORD)
    await memory.close(timeout=0.05)
    assert await leases.stored_body(driver, RECORD) == theirs


async def test_a_failure_of_a_pod_that_was_stopped_is_not_stored_over_a_summary(
    pods: Pods, held: LedgerSummarizer
) -> None:
    """Its lease has expired while it was stopped, and another pod has summarized since."""
    stopped, driver = await pods.pod(config(retry_attempts=0), summarizer=held)
    other, _ = await pods.pod()
    held.fail = 1
    await added(stopped, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    await leases.release(driver.inner, RECORD)
    await other.flush()
    stored = await leases.stored_body(driver, RECORD)
    held.release()
    await until(lambda: not stopped.busy)
    assert await leases.stored_body(driver, RECORD) == stored
    assert (stored.health, stopped.stats.summarizer_calls) == (MemoryHealth.HEALTHY, 1)


async def test_a_summary_of_a_pod_that_was_stopped_is_not_applied_to_a_new_conversation(
    pods: Pods, held: LedgerSummarizer
) -> None:
    stopped, driver = await pods.pod(summarizer=held)
    other, _ = await pods.pod()
    await added(stopped, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    await driver.inner.delete(RECORD)
    await added(other, *range(10, 12))
    held.release()
    await until(lambda: not stopped.busy)
    assert await shown(other) == {"summary": [], "pending": [], "recent": ["u10", "u11"]}


async def test_a_fold_sent_again_after_a_stop_is_not_applied_twice(pods: Pods) -> None:
    """The answer to it was lost, and while its pod was stopped, another has folded what came next."""
    stopped, driver = await pods.pod()
    other, _ = await pods.pod()

    async def stop(_: Key | str) -> None:
        await added(other, 3, 4)
        await other.flush()
        raise OutcomeUnknown("the connection was cut")

    driver.after["replace"] = [nothing, stop]
    await added(stopped, *range(3))
    await until(lambda: not stopped.busy)
    expected = {"summary": ["u0", "u1", "u2"], "pending": [], "recent": ["u3", "u4"]}
    assert await shown(other) == await shown(stopped) == expected


async def test_a_lease_that_was_perhaps_taken_is_released(pods: Pods) -> None:
    memory, driver = await pods.pod(summarizer=(summarizer := LedgerSummarizer()))

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut")

    async def down(_: Key | str) -> None:
        raise Unavailable("no answer")

    driver.after["replace"], driver.before["replace"] = [lost], [nothing, down]
    await added(memory, *range(3))
    await until(lambda: driver.count("replace") == 3)
    await asyncio.sleep(0)
    assert (await leases.stored_body(driver, RECORD)).lease is None
    assert summarizer.requests == []


async def test_a_late_answer_does_not_forget_a_lease_that_was_taken_since(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation"))
    await memory.add_turn(turn(0))
    shared = SharedConversation(driver, RECORD, Codec(), lambda: pods.now, lambda _: None)
    stored, answered = asyncio.Event(), asyncio.Event()

    async def late(_: Key | str) -> None:
        stored.set()
        await answered.wait()

    driver.after["replace"] = [late]
    confirming = asyncio.create_task(shared.replace(await shared.load("test"), Body(), drop=0))
    await stored.wait()
    assert await shared.replace(await shared.load("test"), Body(lease=Lease(pods.now, 60.0)), drop=0)
    answered.set()
    assert await confirming
    await shared.release()
    assert (await leases.stored_body(driver, RECORD)).lease is None


async def test_a_lost_answer_to_an_append_never_doubles_the_turn(pods: Pods) -> None:
    memory, driver = await pods.pod()

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut", backend="memory", operation="append")

    for number in range(5):
        driver.after["append"] = [lost]
        await memory.add_turn(turn(number))
    await memory.flush()
    assert await shown(memory) == {"summary": ["u0", "u1", "u2"], "pending": [], "recent": ["u3", "u4"]}


async def test_an_unknown_outcome_stays_unknown_when_a_retry_is_refused(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation"))

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut", backend="memory", operation="append")

    async def down(_: Key | str) -> None:
        raise Unavailable("no answer", backend="memory", operation="append")

    async def fine(_: Key | str) -> None:
        pass

    driver.after["append"] = [lost]
    driver.before["append"] = [fine, down]
    with pytest.raises(OutcomeUnknown):
        await memory.add_turn(turn(1), turn_id="one")
    await memory.add_turn(turn(1), turn_id="one")
    assert (await shown(memory))["recent"] == ["u1"]


async def test_a_repeat_is_stored_where_writes_go_now() -> None:
    """Not only where the turn was seen; a version says nothing of entries, so both masters have one."""
    driver = FailingOver(MemoryDriver(MemoryStore()), MemoryDriver(MemoryStore()))
    for one in driver.writes_to:
        await one.open()
    memory = DistributedShortTermMemory(driver, KEY, config("truncation"))
    await memory.add_turn(turn(0))
    driver.writes_to = [driver.old]
    with pytest.raises(OutcomeUnknown):
        await memory.add_turn(turn(1), turn_id="one")
    driver.writes_to = [driver.new]
    await memory.add_turn(turn(1), turn_id="one")
    await memory.close()
    survivor = DistributedShortTermMemory(driver.new, KEY, config("truncation"))
    assert (await shown(survivor))["recent"] == ["u0", "u1"]
    await survivor.close()


def entry(number: int) -> bytes:
    return Codec().seal_turn(StoredTurn(f"id{number}", turn(number)))


@pytest.mark.parametrize(
    "seen",
    [pytest.param(range(41), id="a trim"), pytest.param([0] * 18, id="a compaction")],
)
@pytest.mark.parametrize("full", [False, True])
async def test_no_write_drops_a_turn_that_only_the_new_master_has(seen: Sequence[int], *, full: bool) -> None:
    only_there = [entry(number) for number in range(100, 130)]
    # Room for the entries, and not for a body.
    most = sum(map(len, [entry(0), *only_there])) + 1 if full else 10**6
    driver = FailsOver(MemoryDriver(max_record_bytes=most))
    await driver.open()
    for number in seen:
        await driver.append(RECORD, entry(number), initial_version="v", ttl=None)
    for one in (entry(0), *only_there):
        await driver.new.append(RECORD, one, initial_version="v", ttl=None)
    memory = DistributedShortTermMemory(driver, KEY, config("truncation", zone=20))
    await memory.get_llm_context()
    await until(lambda: driver.inner is driver.new)
    await memory.close()
    record = await driver.new.load(RECORD)
    assert record is not None
    assert {*only_there} <= {*record.tail}


@pytest.mark.parametrize("strategy", ["truncation", "rolling_summary"])
async def test_a_version_that_confirms_entries_is_stored_on_one_server_only(strategy: str) -> None:
    """Else the former master shows that version with its own entries, and the new one drops others."""
    driver = StillAnswersLoads()
    await driver.open()
    only_there = [entry(number) for number in range(100, 150)]
    for server, tail in (
        (driver.inner, map(entry, range(50))),
        (driver.new, (entry(0), *only_there)),
    ):
        for one in tail:
            await server.append(RECORD, one, initial_version="v", ttl=None)
    settings = config(strategy, zone=20)
    memory = DistributedShortTermMemory(driver, KEY, settings, summarizer=LedgerSummarizer())
    await memory.get_llm_context()
    await until(lambda: driver.is_replaced)
    await asyncio.sleep(0.5)  # as long as retries take
    await memory.close()
    record = await driver.new.load(RECORD)
    assert record is not None
    assert {*only_there} <= {*record.tail}


async def test_a_fold_that_lost_a_race_drops_only_what_was_there_under_its_lease() -> None:
    driver = FailingOver(MemoryDriver(MemoryStore()), MemoryDriver(MemoryStore()))
    for one in driver.writes_to:
        await one.open()
    for number in (0, 1):
        await driver.append(RECORD, entry(number), initial_version="v", ttl=None)

    async def meanwhile(request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have a repeat reach the old master, another turn the new one, and a note of the lease both."""
        if driver.writes_to == [driver.new]:
            return {"summary": "again"}
        await driver.old.append(RECORD, entry(1), initial_version="v", ttl=None)
        await driver.new.append(RECORD, entry(9), initial_version="v", ttl=None)
        record = await driver.old.load(RECORD)
        assert record is not None
        body = Codec().open_body(record.body)
        assert body.lease is not None
        noted = Codec().seal_body(replace(body, overdue=Overdue(body.lease.at, body.lease.at + 300)))
        assert await driver.replace(RECORD, noted, version="noted", expect=record.version, ttl=None)
        driver.writes_to = [driver.new]
        return {"summary": " ".join(item["user"] for item in request["turns"])}

    memory = DistributedShortTermMemory(driver, KEY, config(zone=0), summarizer=meanwhile)
    await memory.flush(timeout=0.5)
    await memory.close()
    record = await driver.new.load(RECORD)
    assert record is not None
    assert Codec().open_body(record.body).summary == "u0 u1"
    assert record.tail == (entry(9),)


async def test_a_directory_failure_after_an_add_does_not_fail_the_add(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, driver = await pods.pod(config("truncation"))
    load, calls = driver.load, 0

    async def second_fails(key: Key) -> Any:
        nonlocal calls
        calls += key.scope.endswith(":users")
        if calls > 1 and key.scope.endswith(":users"):
            raise Unavailable("no answer")
        return await load(key)

    monkeypatch.setattr(driver, "load", second_fails)
    await memory.add_turn(turn(1))
    await until(lambda: not memory.busy)
    assert (await shown(memory))["recent"] == ["u1"]
    assert calls == 2


async def test_many_turns_into_a_full_record_at_once_are_all_stored(pods: Pods) -> None:
    async def brief(request: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0.01)
        return {"summary": f"{len(request['turns'])} turns"}

    memory, _ = await pods.pod(config(zone=2), brief, max_record_bytes=4_000)
    await asyncio.gather(*(memory.add_turn(turn(number, "a" * 100)) for number in range(60)))
    await memory.flush()
    assert memory.stats.folded == 58
    assert len((await shown(memory))["recent"]) == 2


async def test_a_summary_that_the_datastore_cannot_take_is_cut(pods: Pods) -> None:
    summarizer = LedgerSummarizer()
    summarizer.answers = [{"summary": "word " * 2_000}]
    memory, _ = await pods.pod(
        config(summary_max_tokens=5_000), summarizer, max_entry_bytes=2_000, max_record_bytes=50_000
    )
    await added(memory, *range(3))
    await memory.flush()
    summary = (await memory.get_llm_context())["conversation_memory"]["summary"]
    assert 1_000 < len(summary) < 2_000
    assert len(summarizer.requests) == 1


async def test_callbacks_run_when_a_recovery_ends_without_a_summary(pods: Pods) -> None:
    changes: list[tuple[str, str]] = []

    async def note(old: MemoryHealth, new: MemoryHealth) -> None:
        changes.append((old.value, new.value))

    summarizer = LedgerSummarizer()
    summarizer.fail = 1
    settings = config(retry_attempts=0, degraded_retry_interval_s=0.1, on_health_changed=note)
    memory, driver = await pods.pod(settings, summarizer)
    await added(memory, *range(3))
    await until(lambda: memory.health is MemoryHealth.DEGRADED)
    summarizer.hold()
    await until(lambda: memory.health is MemoryHealth.RECOVERING)
    await driver.delete(RECORD)
    summarizer.release()
    await until(lambda: not memory.busy)
    assert changes == [("healthy", "degraded"), ("degraded", "recovering"), ("recovering", "healthy")]


async def test_an_attempt_to_recover_rejects_no_turn_that_fits_while_degraded(pods: Pods) -> None:
    release, calls = asyncio.Event(), 0

    async def summarize(_: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError
        await release.wait()
        return {"summary": "turns"}

    def count_turns(text: str) -> int:
        return text.count('"user"')

    # Three turns fit. A degraded conversation does not show the pending ones.
    settings = config(
        retry_attempts=0,
        total_max_tokens=3,
        summary_max_tokens=3,
        overflow_policy="error",
        token_estimator=count_turns,
    )
    here, _ = await pods.pod(settings, summarize)
    for number in range(3):
        await here.add_turn(turn(number))
    await until(lambda: here.health is MemoryHealth.RECOVERING)
    await here.add_turn(turn(3))
    assert here.health is MemoryHealth.RECOVERING
    release.set()
    await here.flush()
    assert (await shown(here))["recent"] == ["u2", "u3"]


async def test_a_memory_that_was_closed_and_is_used_again_summarizes_again(pods: Pods) -> None:
    memory, _ = await pods.pod()
    await memory.close()
    await added(memory, *range(3))
    await memory.flush()
    assert (await shown(memory))["summary"] == ["u0"]


@pytest.mark.parametrize("blank", ["", "  ", None, 0])
async def test_a_blank_session_id_raises(pods: Pods, blank: Any) -> None:
    with pytest.raises(InvalidKey, match="session_id"):
        await pods.pod(key=MemoryKey("acme", "u1", blank))


async def test_a_lost_answer_to_a_fold_is_settled_by_its_token(pods: Pods) -> None:
    memory, driver = await pods.pod(summarizer=(summarizer := LedgerSummarizer()))

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut")

    driver.after["replace"] = [lost]
    await added(memory, *range(3))
    await memory.flush()
    assert (await shown(memory))["summary"] == ["u0"]
    assert (memory.stats.summaries, memory.stats.lost_races, len(summarizer.requests)) == (1, 0, 1)


async def test_a_flush_raises_in_an_outage(pods: Pods) -> None:
    memory, driver = await pods.pod()
    await memory.add_turn(turn(0))

    async def down(_: Key | str) -> None:
        raise Unavailable("no answer", backend="memory", operation="any")

    driver.before["load"] = [down] * 10
    with pytest.raises(Unavailable):
        await memory.flush()


async def test_the_background_survives_a_short_outage(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, driver = await pods.pod()

    async def down(_: Key | str) -> None:
        raise Unavailable("no answer")

    await added(memory, *range(2))
    driver.before["replace"] = [down]
    await memory.add_turn(turn(2))
    await until(lambda: memory.stats.summaries == 1)
    assert (await shown(memory))["summary"] == ["u0"]


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe",
        b"stm/1 body\n{",
        b"stm/1 body\n[]",
        b"stm/1 turn\n{}",
        b"stm/2 body\n{}",
        b"stm/1 body rot13\n{}",
    ],
)
async def test_a_body_that_cannot_be_read_is_an_error_and_is_not_overwritten(
    pods: Pods, damage: bytes
) -> None:
    memory, driver = await pods.pod()
    await driver.replace(RECORD, damage, version="v", expect=ANY, ttl=None)
    with pytest.raises(Corrupt) as caught:
        await memory.get_llm_context()
    assert (caught.value.backend, caught.value.operation) == ("memory", "get_llm_context")
    assert "chat" not in str(caught.value)
    await added(memory, *range(5))
    await asyncio.sleep(0.05)
    record = await driver.load(RECORD)
    assert record is not None
    assert (record.body, len(record.tail)) == (damage, 5)


async def test_an_entry_that_cannot_be_read_is_an_error_and_stays(pods: Pods) -> None:
    memory, driver = await pods.pod()
    await memory.add_turn(turn(0))
    await driver.append(RECORD, b"stm/2 turn\n{}", initial_version="b", ttl=None)
    with pytest.raises(Corrupt, match="format"):
        await memory.turns()
    await added(memory, *range(5))
    await asyncio.sleep(0.05)
    record = await driver.load(RECORD)
    assert record is not None
    assert len(record.tail) == 7


async def test_a_body_of_an_older_version_is_read_and_extended(pods: Pods) -> None:
    memory, driver = await pods.pod()
    older = {"summary": "<session_summary>\n- u0\n</session_summary>", "health": "healthy"}
    body = b"stm/1 body\n" + json.dumps(older).encode()
    await driver.replace(RECORD, body, version="old", expect=ABSENT, ttl=None)
    await added(memory, *range(1, 4))
    await memory.flush()
    assert await shown(memory) == {"summary": ["u0", "u1"], "pending": [], "recent": ["u2", "u3"]}


async def test_fields_of_a_newer_version_survive_a_fold(pods: Pods) -> None:
    memory, driver = await pods.pod()
    newer = {"summary": "", "health": "healthy", "mood": {"deep": [1, 2]}}
    body = b"stm/1 body\n" + json.dumps(newer).encode()
    await driver.replace(RECORD, body, version="new", expect=ABSENT, ttl=None)
    await added(memory, *range(3))
    await memory.flush()
    record = await driver.load(RECORD)
    assert record is not None
    stored = Codec().open("body", record.body or b"")
    assert stored["mood"] == {"deep": [1, 2]}
    assert stored["folded"] == 1


async def test_old_and_new_pods_with_different_settings_share_a_conversation(pods: Pods) -> None:
    small, _ = await pods.pod(config(zone=1))
    large, _ = await pods.pod(config(zone=4))
    for number in range(8):
        await (small, large)[number % 2].add_turn(turn(number))
        await small.flush()
    view = await shown(large)
    assert view["summary"] + view["pending"] + view["recent"] == [f"u{number}" for number in range(8)]


async def test_the_background_never_lengthens_a_conversations_life(pods: Pods) -> None:
    memory, driver = await pods.pod(config(session_ttl_s=60.0))
    await added(memory, *range(3))
    pods.now += 59.0
    await memory.flush()
    assert (await shown(memory))["summary"] == ["u0"]
    pods.now += 1.0
    assert await driver.load(RECORD) is None
    assert await shown(memory) == {"summary": [], "pending": [], "recent": []}


async def test_adding_lengthens_a_conversations_life(pods: Pods) -> None:
    memory, _ = await pods.pod(config(session_ttl_s=60.0))
    for number in range(4):
        await memory.add_turn(turn(number))
        pods.now += 59.0
    await memory.flush()
    assert (await shown(memory))["recent"] == ["u2", "u3"]


async def test_a_summary_of_an_expired_conversation_never_enters_the_new_one(
    pods: Pods, held: LedgerSummarizer
) -> None:
    memory, _ = await pods.pod(config(session_ttl_s=60.0), held)
    await added(memory, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    pods.now += 60.0
    await memory.add_turn(turn("new"))
    held.release()
    await until(lambda: not memory.busy)
    assert await shown(memory) == {"summary": [], "pending": [], "recent": ["unew"]}


async def test_an_erased_conversation_is_not_brought_back_by_a_summary(
    pods: Pods, held: LedgerSummarizer
) -> None:
    memory, driver = await pods.pod(summarizer=held)
    await added(memory, *range(3))
    await asyncio.wait_for(held.called.wait(), 5)
    assert await driver.delete(RECORD)
    held.release()
    await until(lambda: not memory.busy)
    assert await driver.load(RECORD) is None


async def test_a_full_record_is_folded_at_once_and_the_turn_is_stored(pods: Pods) -> None:
    memory, _ = await pods.pod(config(zone=1, fold_batch_turns=100), max_record_bytes=6_000)
    for number in range(12):
        await memory.add_turn(turn(number, "x" * 800))
    view = await shown(memory)
    assert view["summary"] + view["pending"] + view["recent"] == [f"u{number}" for number in range(12)]
    assert memory.stats.summaries > 0


async def test_a_full_record_is_trimmed_at_once_under_truncation(pods: Pods) -> None:
    memory, _ = await pods.pod(config("truncation", zone=3), max_record_bytes=5_000)
    for number in range(12):
        await memory.add_turn(turn(number, "x" * 800))
    assert (await shown(memory))["recent"] == ["u9", "u10", "u11"]


async def test_a_turn_above_the_entry_limit_is_refused(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation"), max_entry_bytes=1_000)
    with pytest.raises(TooLarge) as caught:
        await memory.add_turn(turn(0, "x" * 2_000))
    assert caught.value.what == "entry"
    assert await driver.load(RECORD) is None


async def test_a_record_that_no_fold_can_relieve_says_that_it_is_full(pods: Pods) -> None:
    memory, _ = await pods.pod(config(zone=100), max_record_bytes=3_000)
    for number in range(3):
        await memory.add_turn(turn(number, "x" * 800))
    with pytest.raises(TooLarge) as caught:
        await memory.add_turn(turn(3, "x" * 800))
    assert caught.value.what == "record"
    assert not memory.busy


async def test_a_fold_drops_no_more_entries_than_the_driver_can(pods: Pods) -> None:
    memory, driver = await pods.pod(config(zone=1, fold_batch_turns=7))
    object.__setattr__(driver.inner.traits, "max_drop", 3)
    await added(memory, *range(8))
    await memory.flush()
    assert await shown(memory) == {
        "summary": [f"u{number}" for number in range(7)],
        "pending": [],
        "recent": ["u7"],
    }
    assert memory.stats.summaries == 3


async def test_a_degraded_conversation_is_recovered_by_a_pod_that_only_reads(pods: Pods) -> None:
    failing = LedgerSummarizer()
    failing.fail = 1
    settings = config(retry_attempts=0, degraded_retry_interval_s=0.2)
    dead, _ = await pods.pod(settings, failing)
    await added(dead, *range(3))
    await until(lambda: dead.health is MemoryHealth.DEGRADED)
    await dead.close()
    reader, _ = await pods.pod(settings)
    await reader.get_llm_context()
    await until(lambda: reader.health is MemoryHealth.HEALTHY and reader.stats.summaries == 1)
    assert (await shown(reader))["summary"] == ["u0"]


async def test_a_pod_whose_clock_is_wrong_waits_no_longer_than_the_backoff(pods: Pods) -> None:
    _, driver = await pods.pod()
    memory = DistributedShortTermMemory(
        driver, KEY, config(retry_backoff_base_s=0.1), summarizer=(summarizer := LedgerSummarizer()),
        clock=lambda: 0.0,
    )  # fmt: skip
    pods.memories.append(memory)
    behind = {"summary": "", "health": "retry", "attempts": 1, "next_attempt_at": 1e9}
    body = b"stm/1 body\n" + json.dumps(behind).encode()
    await driver.replace(RECORD, body, version="v", expect=ABSENT, ttl=None)
    await added(memory, *range(3))
    await until(lambda: len(summarizer.requests) == 1, within=2)


async def test_a_summarizer_that_ignores_its_cancellation_is_abandoned(pods: Pods) -> None:
    calls = 0

    async def stubborn(request: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            for _ in range(20):
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
        return {"summary": "done"}

    memory, _ = await pods.pod(config(summarizer_timeout_s=0.1), stubborn)
    await added(memory, *range(3))
    await until(lambda: memory.stats.summaries == 1, within=0.9)
    assert calls == 2


async def test_no_log_record_holds_text_of_a_conversation(
    pods: Pods, caplog: pytest.LogCaptureFixture
) -> None:
    async def indiscreet(request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ValueError(f"cannot summarize {request}")

    caplog.set_level(logging.INFO)
    memory, _ = await pods.pod(config(retry_attempts=1), indiscreet)
    for number in range(3):
        await memory.add_turn(turn(number, "the secret answer"))
    await until(lambda: memory.health is MemoryHealth.DEGRADED)
    assert "ValueError" in caplog.text
    for secret in ("secret", "u0", "chat", "acme"):
        assert secret not in caplog.text


async def test_the_cost_of_a_turn_does_not_grow_with_the_conversation(pods: Pods) -> None:
    memory, driver = await pods.pod(config(zone=5, fold_batch_turns=5))
    largest = 0
    for number in range(400):
        await memory.add_turn(turn(number), turn_id=str(number))
        if number % 20 == 19:
            await memory.flush()
            record = await driver.load(RECORD)
            assert record is not None
            largest = max(largest, len(record.tail))
            forgotten = Codec().open_body(record.body).forgotten
            assert forgotten.digests.count(",") <= 402
    assert largest <= 30


async def test_an_answer_that_comes_late_to_a_fold_costs_no_turn_of_another_pod(pods: Pods) -> None:
    memory, driver = await pods.pod(summarizer=(summarizer := LedgerSummarizer()))
    other, _ = await pods.pod(config("truncation", zone=50))
    answer = asyncio.Event()

    async def late(_: Key | str) -> None:
        await answer.wait()

    await added(memory, *range(2))
    await memory.get_llm_context()
    driver.after["replace"] = [nothing, late]
    await memory.add_turn(turn(2))
    await until(lambda: driver.after["replace"] == [])
    # The fold is stored, so the record is as long as before when the turns of this pod come.
    await added(other, "theirs")
    await added(memory, *range(3, 6))
    answer.set()
    await until(lambda: not memory.busy)
    await memory.flush()
    said = [item["user"] for request in summarizer.requests for item in request["turns"]]
    standing = [one.user_message for one in await memory.turns()]
    assert said + standing == ["u0", "u1", "u2", "utheirs", "u3", "u4", "u5"]


async def test_a_load_that_is_overtaken_by_a_turn_does_not_hide_it(pods: Pods) -> None:
    memory, driver = await pods.pod()
    answer = asyncio.Event()

    async def late(_: Key | str) -> None:
        await answer.wait()

    async def both_answers_come(_: Key | str) -> None:
        answer.set()

    await added(memory, *range(2))
    await memory.get_llm_context()
    await until(lambda: not memory.busy)
    driver.after["load"], driver.after["append"] = [late], [both_answers_come]
    reading = asyncio.create_task(memory.get_llm_context())
    await until(lambda: driver.after["load"] == [])
    await memory.add_turn(turn(2))
    await reading
    await until(lambda: memory.stats.summaries == 1)


async def test_what_was_erased_elsewhere_is_estimated_no_longer(pods: Pods) -> None:
    memory, driver = await pods.pod(config("truncation"))
    empty = memory.estimate_tokens()
    await added(memory, *range(2))
    await driver.inner.delete(RECORD)
    assert await memory.get_llm_context() == {"conversation_memory": {"recent_turns": []}}
    assert memory.estimate_tokens() == empty


async def test_a_list_that_the_caller_changes_later_is_shown_as_it_was_stored(pods: Pods) -> None:
    memory, _ = await pods.pod(config("truncation"))
    await memory.add_turn(turn(0))
    await memory.get_llm_context()
    tools = ["search"]
    digest = TrajectoryDigest(tools_invoked=tools, observations_summary="found")
    await memory.add_turn(ConversationTurn("u1", "a1", trajectory_digest=digest))
    tools.append("never stored")
    shown_turns = (await memory.get_llm_context())["conversation_memory"]["recent_turns"]
    assert shown_turns[1]["trajectory_digest"]["tools_invoked"] == ["search"]


async def test_a_turn_without_a_time_is_stored_with_the_current_one() -> None:
    def clock() -> float:
        return 1_900_000_000.0

    driver = MemoryDriver()
    await driver.open()
    backgrounds = Backgrounds(driver, Codec(), clock=clock)
    told: list[ConversationTurn] = []

    async def note(turn: ConversationTurn) -> None:
        told.append(turn)

    key, settings = MemoryKey("acme", "u1", "trip"), config(zone=3, on_turn_added=note)
    memory = DistributedShortTermMemory(
        driver, key, settings, summarizer=LedgerSummarizer(), backgrounds=backgrounds
    )
    given = ConversationTurn("first", "answer")
    await memory.add_turn(given)
    await memory.add_turn(ConversationTurn("second", "answer", ts=12.5))
    first, second = await memory.turns()
    assert (first.ts, second.ts) == (clock(), 12.5)
    await until(lambda: len(told) == 2)
    assert [turn.ts for turn in told] == [clock(), 12.5]
    assert given.ts == 0.0, "the turn of the caller is not changed"


async def test_a_repeat_reports_the_time_that_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1, 100))
    driver = MemoryDriver()
    await driver.open()
    told: list[ConversationTurn] = []

    async def note(turn: ConversationTurn) -> None:
        told.append(turn)

    memory = DistributedShortTermMemory(
        driver,
        MemoryKey("acme", "u1", "trip"),
        config("truncation", on_turn_added=note),
        backgrounds=Backgrounds(driver, Codec(), clock=lambda: 1_900_000_000.0 + next(ticks)),
    )
    append = driver.append

    async def unanswered(*given: Any, **options: Any) -> int:
        await append(*given, **options)
        raise OutcomeUnknown("the connection was cut")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "append", unanswered)
        with pytest.raises(OutcomeUnknown):
            await memory.add_turn(ConversationTurn("first", "answer"), turn_id="one")
    await memory.add_turn(ConversationTurn("first", "answer"), turn_id="one")
    await until(lambda: len(told) == 1)
    (stored,) = await memory.turns()
    assert told[0].ts == stored.ts
