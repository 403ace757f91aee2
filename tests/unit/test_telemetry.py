"""What OpenTelemetry hears of the memories: each operation, the counts, and never what was talked about."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    TrajectoryDigest,
    Unavailable,
    open_backend,
    sync,
)
from stm_backends.agents import KeyResolver, resolve_memory_key
from stm_backends.backend import Backend
from stm_backends.drivers import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records.large.driver import LargeEntries
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.testing.workbench.spy import SpyDriver

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from stm_backends.telemetry.opentelemetry import SECONDS
from tests.support.telemetry import Ear, use_every_instrument

MARK = "MARKER"
KEY = MemoryKey(f"{MARK}-tenant", f"{MARK}-user", f"{MARK}-session")
BUDGET = MemoryBudget(full_zone_turns=1)
ROLLING = ShortTermMemoryConfig(strategy="rolling_summary", budget=BUDGET)
TABLE = Path(__file__).parents[2] / "docs" / "how-to" / "telemetry.md"


def turn(text: str = MARK) -> ConversationTurn:
    digest = TrajectoryDigest([f"{MARK}-tool"], f"{MARK}-seen", f"{MARK}-why", [f"{MARK}-ref"])
    return ConversationTurn(text, MARK, digest, {MARK: MARK}, [MARK])


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"summary": f"{MARK}: {len(request['turns'])}"}


async def fail(request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise LookupError(f"cannot summarize {request}")


class Slow:
    """A summarizer that waits until it may go on."""

    def __init__(self) -> None:
        self.called, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.called.set()
        await self.go.wait()
        return await summarize(request)


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
async def backend(ear: Ear) -> AsyncIterator[Backend]:
    async with open_backend("memory://", observer=ear.telemetry) as backend:
        yield backend


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- no event says so
            await asyncio.sleep(0.01)


# Operations


async def test_each_operation_is_a_span_and_a_duration_as_the_conventions_say(
    ear: Ear, backend: Backend
) -> None:
    memory = backend.memory(KEY, ROLLING, summarizer=summarize)
    await memory.add_turn(turn())
    await memory.get_llm_context()
    await backend.sessions.erase(KEY)
    [_ async for _ in backend.sessions.list(KEY.tenant_id, KEY.user_id)]
    await until(lambda: not memory.busy)
    operations = {"load", "append", "replace", "delete", "scan"}
    for name in operations:
        for span in ear.named(name):
            assert span.kind is SpanKind.CLIENT
            assert span.attributes == {"db.system.name": "memory", "db.operation.name": name}
            assert span.status.status_code is StatusCode.UNSET
    points = ear.points()["db.client.operation.duration"]
    assert {attributes["db.operation.name"] for attributes, _ in points} == operations
    for attributes, count in points:
        assert count == len(ear.named(attributes["db.operation.name"]))
    (metric,) = (one for one in ear.metrics() if one.name == "db.client.operation.duration")
    assert metric.unit == "s"
    assert tuple(metric.data.data_points[0].explicit_bounds) == SECONDS


async def test_an_operation_that_fails_says_of_its_error_the_class_and_no_more(ear: Ear) -> None:
    class Broken(MemoryDriver):
        async def load(self, key: Key) -> None:
            raise Unavailable(f"{MARK}: {key}")

    async with Backend(Broken(), observer=ear.telemetry) as backend:
        with pytest.raises(Unavailable, match=MARK):
            await backend.memory(KEY, ROLLING, summarizer=summarize).get_llm_context()
    for span in (*ear.named("load"), *ear.named("stm.get_llm_context")):
        assert span.attributes is not None
        assert span.attributes["error.type"] == "Unavailable"
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description is None
        assert not span.events
    ((attributes, count),) = ear.points()["db.client.operation.duration"]
    assert (attributes["error.type"], count) == ("Unavailable", 1)


async def test_a_call_that_is_cancelled_has_ended_and_not_failed(ear: Ear) -> None:
    class Slow(MemoryDriver):
        async def load(self, key: Key) -> None:
            await asyncio.sleep(20)

    async with Backend(Slow(), observer=ear.telemetry) as backend:
        call = asyncio.ensure_future(backend.ping())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
    (span,) = ear.named("load")
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CancelledError"
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("driver", "system"),
    [
        ("sqlite", "sqlite"),
        ("redis", "redis"),
        ("postgres", "postgresql"),
        ("mongo", "mongodb"),
        ("dynamo", "aws.dynamodb"),
        ("of-our-own", "of-our-own"),
    ],
)
async def test_a_datastore_has_its_name_in_the_conventions(ear: Ear, driver: str, system: str) -> None:
    class Named(MemoryDriver):
        name = driver

    async with Backend(Named(), observer=ear.telemetry) as backend:
        await backend.ping()
    (span,) = ear.named("load")
    assert span.attributes is not None
    assert span.attributes["db.system.name"] == system


# Traces


async def test_operations_hang_under_the_call_of_the_memory_and_that_under_the_callers_span(
    ear: Ear, backend: Backend
) -> None:
    tracer = ear.tracers.get_tracer("a program")
    with tracer.start_as_current_span("request") as request:
        await backend.memory(KEY, ROLLING, summarizer=summarize).add_turn(turn())
    (call,), (append,) = ear.named("stm.add_turn"), ear.named("append")
    assert call.parent is not None
    assert append.parent is not None
    assert call.context is not None
    assert call.parent.span_id == request.get_span_context().span_id
    assert append.parent.span_id == call.context.span_id


async def test_the_background_has_a_trace_of_its_own_that_is_linked_to_the_call_that_started_it(
    ear: Ear, backend: Backend
) -> None:
    within: list[Any] = []

    async def note(request: Mapping[str, Any]) -> Mapping[str, Any]:
        within.append(trace.get_current_span().get_span_context())
        return await summarize(request)

    memory = backend.memory(KEY, ROLLING, summarizer=note)
    await memory.add_turn(turn())
    await memory.add_turn(turn())
    await until(lambda: not memory.busy)
    call, (summary,) = ear.named("stm.add_turn")[1], ear.named("stm.summarize")
    assert summary.parent is not None
    # The catalogue's is another one.
    (background,) = (
        span
        for span in ear.named("stm.background")
        if span.context is not None and span.context.span_id == summary.parent.span_id
    )
    assert background.parent is None
    assert background.context is not None
    assert call.context is not None
    assert summary.context is not None
    assert background.context.trace_id != call.context.trace_id
    assert [link.context.span_id for link in background.links] == [call.context.span_id]
    assert summary.parent is not None
    assert summary.parent.span_id == background.context.span_id
    assert [one.span_id for one in within] == [summary.context.span_id]
    folding = [span for span in ear.named("replace") if span.parent and span.context]
    assert background.context.trace_id in {span.context.trace_id for span in folding if span.context}


async def test_a_lease_that_another_process_holds_is_no_error(ear: Ear) -> None:
    store, slow = MemoryStore(), Slow()
    async with (
        Backend(MemoryDriver(store)) as one,
        Backend(MemoryDriver(store), observer=ear.telemetry) as two,
    ):
        await one.memory(KEY, ROLLING, summarizer=slow).add_turn(turn())
        first, second = (place.memory(KEY, ROLLING, summarizer=slow) for place in (one, two))
        await first.add_turn(turn())
        await until(lambda: first.stats.summarizer_calls)
        await second.get_llm_context()
        await until(lambda: len(ear.named("stm.background")) > 1)
        slow.go.set()
        await second.flush()
    assert {span.status.status_code for span in ear.named("stm.background")} == {StatusCode.UNSET}


def test_a_span_of_the_caller_reaches_through_the_thread_of_the_facade(ear: Ear) -> None:
    with (
        sync.open_backend("memory://", observer=ear.telemetry) as backend,
        ear.tracers.get_tracer("a program").start_as_current_span("request") as request,
    ):
        backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation")).add_turn(turn())
    (call,) = ear.named("stm.add_turn")
    assert call.parent is not None
    assert call.parent.span_id == request.get_span_context().span_id


# Counts

Make = Callable[..., Any]


@pytest.fixture(params=["shared", "in this process"])
async def make(request: pytest.FixtureRequest, ear: Ear, backend: Backend) -> Make:
    """How a memory of either kind is made."""
    if request.param == "shared":
        return lambda config, summarizer: backend.memory(KEY, config, summarizer=summarizer)
    return lambda config, summarizer: DefaultShortTermMemory(
        config=config, summarizer=summarizer, observer=ear.telemetry
    )


async def test_turns_are_counted_as_they_come_and_are_folded(ear: Ear, make: Make) -> None:
    memory = make(ROLLING, summarize)
    for _ in range(3):
        await memory.add_turn(turn())
    await memory.flush()
    context = await memory.get_llm_context()
    points = ear.points()
    assert points["stm.turns.appended"] == [({}, 3)]
    assert points["stm.turns.folded"] == [({}, 2)]
    assert points["stm.context.tokens"] == [({}, memory.estimate_tokens())]
    assert context
    await memory.close()


async def test_failures_drops_and_changes_of_health_are_counted(ear: Ear, make: Make) -> None:
    broken = True

    async def at_first(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await (fail if broken else summarize)(request)

    config = ShortTermMemoryConfig(
        strategy="rolling_summary",
        budget=BUDGET,
        recovery_backlog_limit=1,
        retry_attempts=1,
        retry_backoff_base_s=0,
        degraded_retry_interval_s=0.05,
    )
    memory = make(config, at_first)
    for _ in range(5):
        await memory.add_turn(turn())
    await until(lambda: "stm.turns.dropped" in ear.points())
    broken = False
    await until(lambda: memory.health is MemoryHealth.HEALTHY)
    await memory.close()
    points = ear.points()
    ((attributes, errors),) = points["stm.summarizer.errors"]
    assert attributes == {"error.type": "LookupError"}
    assert errors >= 2
    assert sum(count for _, count in points["stm.turns.dropped"]) >= 1
    changes = {
        (one["stm.health.from"], one["stm.health.to"]): count
        for one, count in points["stm.health.transitions"]
    }
    assert changes[("healthy", "retry")] == 1
    assert changes[("retry", "degraded")] == 1
    assert changes[("degraded", "recovering")] >= 1
    assert changes[("recovering", "healthy")] == 1


async def test_turns_in_pages_are_counted_as_they_wait_and_are_caught_up(ear: Ear, backend: Backend) -> None:
    broken = True

    async def at_first(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await (fail if broken else summarize)(request)

    config = replace(
        ROLLING,
        recovery_backlog_limit=1,
        retry_attempts=0,
        degraded_retry_interval_s=0.05,
        transcript=True,
    )
    memory = backend.memory(KEY, config, summarizer=at_first)
    for _ in range(6):
        await memory.add_turn(turn())
    await until(lambda: memory.waiting == 4)
    assert ear.points()["stm.turns.moved"] == [({}, 4)]
    assert "stm.turns.caught_up" not in ear.points()
    broken = False
    await until(lambda: ear.points().get("stm.turns.folded") == [({}, 5)])
    assert memory.waiting == 0
    await memory.transcript(before=3)
    points = ear.points()
    assert points["stm.turns.caught_up"] == [({}, 4)]
    assert "stm.turns.dropped" not in points
    assert points["stm.pages.written"][0][1] >= 2
    read = points["stm.pages.read"][0][1]
    await memory.transcript(before=3)
    assert ear.points()["stm.pages.read"] == [({}, read + 1)]


async def test_turns_wait_no_more_where_nothing_is_summarized_any_more(ear: Ear, backend: Backend) -> None:
    config = replace(ROLLING, recovery_backlog_limit=1, retry_attempts=0, transcript=True)
    memory = backend.memory(KEY, config, summarizer=fail)
    for _ in range(6):
        await memory.add_turn(turn())
    await until(lambda: memory.waiting == 4)
    later = backend.memory(KEY, ShortTermMemoryConfig("truncation", MemoryBudget(1), transcript=True))
    await later.add_turn(turn())
    await until(lambda: memory.waiting == 0)
    points = ear.points()
    assert points["stm.turns.moved"] == points["stm.turns.caught_up"] == [({}, 4)]


async def test_turns_that_waited_in_a_page_that_is_gone_are_counted_as_dropped(
    ear: Ear, backend: Backend
) -> None:
    broken = True

    async def at_first(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await (fail if broken else summarize)(request)

    config = replace(
        ROLLING, recovery_backlog_limit=1, retry_attempts=0, degraded_retry_interval_s=0.05, transcript=True
    )
    memory = backend.memory(KEY, config, summarizer=at_first)
    for _ in range(6):
        await memory.add_turn(turn())
    await until(lambda: memory.waiting == 4)
    scope = f"{KEY.tenant_id}:{KEY.user_id}:page"
    for name in (await backend.driver.scan(scope, limit=10)).names:
        await backend.driver.delete(Key(scope, name))
    broken = False
    await until(lambda: memory.waiting == 0)
    points = ear.points()
    assert points["stm.turns.caught_up"] == points["stm.turns.dropped"] == [({}, 4)]


async def test_what_the_catalogue_is_told_and_not_told_is_counted(ear: Ear) -> None:
    spy = SpyDriver(MemoryDriver())
    async with Backend(spy, observer=ear.telemetry) as opened:
        memory = opened.memory(KEY, ShortTermMemoryConfig("truncation"))
        await memory.add_turn(turn())
        await until(lambda: "stm.catalogue.written" in ear.points())
        assert ear.points()["stm.catalogue.written"] == [({}, 1)]
        await memory.add_turn(turn())
        down = spy.call

        async def refuse(operation: Any, key: Any, send: Any) -> Any:
            if isinstance(key, Key) and key.scope.endswith(":card"):
                raise Unavailable("down", backend="memory", operation=operation)
            return await down(operation, key, send)

        spy.call = refuse
    assert ear.points()["stm.catalogue.lost"] == [({}, 1)]


async def test_a_touch_that_closing_left_no_time_for_is_counted_as_lost(ear: Ear) -> None:
    spy = SpyDriver(MemoryDriver())
    async with Backend(spy, observer=ear.telemetry, close_timeout_s=0.0) as opened:
        await opened.memory(KEY, ShortTermMemoryConfig("truncation")).add_turn(turn())
        passed = spy.call

        async def hang(operation: Any, key: Any, send: Any) -> Any:
            if isinstance(key, Key) and key.scope.endswith(":card"):
                await asyncio.Event().wait()
            return await passed(operation, key, send)

        spy.call = hang
    assert ear.points()["stm.catalogue.lost"] == [({}, 1)]


async def test_a_summary_that_comes_too_late_is_a_lost_race(ear: Ear, backend: Backend) -> None:
    slow = Slow()
    memory = backend.memory(KEY, ROLLING, summarizer=slow)
    await memory.add_turn(turn())
    await memory.add_turn(turn())
    await slow.called.wait()
    await backend.sessions.erase(KEY)
    slow.go.set()
    await until(lambda: not memory.busy)
    assert ear.points()["stm.summary.lost_races"] == [({}, 1)]


async def test_a_summary_that_another_process_forestalled_is_a_lost_race_in_process_too(ear: Ear) -> None:
    slow = Slow()
    async with open_backend("memory://") as backend:
        other = DefaultShortTermMemory(config=ROLLING, summarizer=summarize)
        memory = DefaultShortTermMemory(config=ROLLING, summarizer=slow, observer=ear.telemetry)
        for _ in range(2):
            await memory.add_turn(turn())
        await slow.called.wait()
        await memory.persist(backend.state_store, "k")
        await other.hydrate(backend.state_store, "k")
        await other.flush()
        await other.persist(backend.state_store, "k")
        await memory.hydrate(backend.state_store, "k")
        slow.go.set()
        await until(lambda: not memory.busy)
    assert ear.points()["stm.summary.lost_races"] == [({}, 1)]
    assert {"stm.persist", "stm.hydrate"} <= {span.name for span in ear.spans}


def test_a_call_without_a_usable_id_is_counted_by_the_part_that_is_missing(ear: Ear) -> None:
    resolver = KeyResolver(observer=ear.telemetry)
    for context in ({"session_id": " "}, {"tenant_id": " "}, {"user_id": [MARK]}, {"session_id": MARK}):
        resolver.resolve(context)
    resolve_memory_key({"tenant_id": MARK}, observer=ear.telemetry)
    points = ear.points()["stm.key_resolution.failures"]
    assert {one["stm.key.part"]: count for one, count in points} == {"session": 2, "tenant": 1, "user": 1}


async def test_an_estimator_that_raises_fails_no_call_because_somebody_listens(
    ear: Ear, backend: Backend
) -> None:
    def estimate(text: str) -> int:
        raise LookupError(text)

    budget = MemoryBudget(total_max_tokens=0)
    config = ShortTermMemoryConfig(strategy="truncation", budget=budget, token_estimator=estimate)
    memory = backend.memory(KEY, config)
    await memory.add_turn(turn())
    assert await memory.get_llm_context()
    ((attributes, errors),) = ear.points()["stm.functions.errors"]
    assert attributes == {"stm.function": "token_estimator", "error.type": "LookupError"}
    assert errors > 0


# Privacy


async def test_no_text_no_id_and_no_message_of_an_error_gets_out(
    ear: Ear, make: Make, backend: Backend
) -> None:
    config = ShortTermMemoryConfig(
        strategy="rolling_summary", budget=BUDGET, retry_backoff_base_s=0, degraded_retry_interval_s=0
    )
    for summarizer in (fail, summarize):
        memory = make(config, summarizer)
        for number in range(3):
            await memory.add_turn(turn(), turn_id=f"{MARK}-{number}-{summarizer.__name__}")
        await until(lambda memory=memory: memory.health is not MemoryHealth.HEALTHY or not memory.busy)
        await memory.get_llm_context()
        await memory.turns()
        await memory.close()
    await backend.state_store.save_memory_state(f"{MARK}:a:b", {MARK: MARK})
    await backend.state_store.save_planner_state(MARK, {"tool_context": {"tenant_id": MARK, "user_id": MARK}})
    with pytest.raises(Exception, match="turn"):
        await memory.add_turn(ConversationTurn(MARK, MARK, artifacts_shown={MARK: object()}), turn_id=MARK)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: backend.sessions.export(KEY),
        lambda: backend.sessions.erase_user(KEY.tenant_id, KEY.user_id),
        lambda: backend.sessions.erase_tenant(KEY.tenant_id),
    ]
    for call in calls:
        await asyncio.gather(call(), return_exceptions=True)
    exported = ear.exported()
    assert {"stm.add_turn", "stm.summarize", "append"} <= {span.name for span in ear.spans} | {"append"}
    assert "error.type" in exported
    assert MARK not in exported
    assert '"exception' not in exported


# What is printed, and what is not there


def test_the_page_has_every_instrument_with_its_kind_unit_and_attributes(ear: Ear) -> None:
    use_every_instrument(ear.telemetry)
    rows = re.findall(
        r"^\| `([\w.]+)` \| (\w+) \| `([^`]+)` \|([^|]*)\|", TABLE.read_text("utf-8"), re.MULTILINE
    )
    printed = {
        name: (kind, unit, set(re.findall(r"`([\w.]+)`", attributes)))
        for name, kind, unit, attributes in rows
    }
    kinds = {"Histogram": "histogram", "Sum": "counter", "Gauge": "gauge"}
    assert printed == {
        metric.name: (
            kinds[type(metric.data).__name__],
            metric.unit,
            {name for point in metric.data.data_points for name in point.attributes or ()},
        )
        for metric in ear.metrics()
    }


def test_an_observer_of_ones_own_hears_what_it_overrides_and_silence_is_the_default() -> None:
    class Count(Observer):
        heard = 0

        def turns(self, event: str, count: int) -> None:
            self.heard += count

    async def talk(observer: Observer) -> None:
        async with open_backend("memory://", observer=observer) as backend:
            assert isinstance(backend.driver, LargeEntries)
            assert isinstance(backend.driver.inner, MemoryDriver)
            await backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation")).add_turn(turn())

    count = Count()
    for observer in (count, SILENT):
        asyncio.run(talk(observer))
    assert count.heard == 1


@pytest.mark.parametrize("observer", [SILENT, Observer()])
async def test_a_method_is_a_coroutine_function_with_its_signature(observer: Observer) -> None:
    async with open_backend("memory://", observer=observer) as backend:
        memories = (
            backend.memory(KEY, ROLLING, summarizer=summarize),
            DefaultShortTermMemory(config=ROLLING, summarizer=summarize, observer=observer),
        )
        for memory in memories:
            assert inspect.iscoroutinefunction(memory.flush)
            assert inspect.signature(memory.flush) == inspect.signature(type(memory).flush.__get__(memory))
            assert (memory.flush.__func__ is type(memory).flush) == (observer is SILENT)
            await memory.flush()


def test_without_the_api_the_line_that_installs_it_is_named() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
import stm_backends
try:
    import stm_backends.telemetry.opentelemetry
except stm_backends.MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "stm-backends[otel], which is not installed" in done.stdout, done.stderr
    assert 'pip install "opentelemetry-api>=' in done.stdout


def test_a_module_that_the_api_itself_lacks_is_no_matter_of_the_extra() -> None:
    program = """
import sys
sys.modules["typing_extensions"] = None
import stm_backends.telemetry.opentelemetry
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: import of typing_extensions")
