"""A session in a conversation of a backend: several processes use it at once and end it at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from stm_backends import MemoryKey, Sealing, StaticKeys
from stm_backends.backend import Backend
from stm_backends.drivers.contract import KEEP
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    Unavailable,
)
from stm_backends.records import keys
from stm_backends.records.body import Body
from stm_backends.telemetry.observer import Observer
from stm_backends.testing import FakeClock
from stm_backends.tiers import (
    BackendGraph,
    MemoryEntry,
    MemoryManager,
    MemoryTier,
    SharedShortTermMemory,
    relevance,
    session,
    shared_session,
    short_term,
)
from stm_backends.tiers.session import Session
from stm_backends.tiers.shared_session import ConversationJournal
from stm_backends.types import ConversationTurn, MemoryHealth, ShortTermMemoryConfig
from tests.support.interrupted import Interrupted

KEY = MemoryKey("acme", "u1", "chat")
CONVERSATION = MemoryKey("acme", "u1", "chat#short-term")
OWNER = ("acme", "u1")
LONG = MemoryTier.LONG_TERM


class Counting(Observer):
    """Adds up the events of the tiers."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def memories(self, event: str, tier: str, count: int) -> None:
        self.counts[event, tier] = self.counts.get((event, tier), 0) + count


class Pods:
    """Any number of pods on one datastore, each with a backend and a manager of its own."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.stack = AsyncExitStack()
        self.drivers: list[Interrupted] = []
        self.counting = Counting()

    async def add(self, model: Any = None, **options: Any) -> MemoryManager:
        driver = Interrupted(MemoryDriver(self.store))
        self.drivers.append(driver)
        backend = await self.stack.enter_async_context(Backend(driver, observer=self.counting))
        clock = {name: options[name] for name in ("clock",) if name in options}
        return MemoryManager(
            llm_provider=model,
            backend=backend,
            owner=OWNER,
            short_term=SharedShortTermMemory(backend, KEY, **clock),
            **options,
        )

    async def __aenter__(self) -> Pods:
        await self.stack.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stack.__aexit__(*error)


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    async with Pods() as pods:
        yield pods


def answering(text: str) -> Callable[[Any], str]:
    return lambda messages: text


async def fill(memory: MemoryManager) -> None:
    await memory.remember("important", "the key fact", importance=0.9)
    for number in range(12):
        await memory.remember(f"k{number}", f"fact {number}", importance=0.1)
    for _ in range(3):
        await memory.recall("fact 11", tiers=[MemoryTier.SHORT_TERM])


async def test_pods_see_the_entries_of_each_other(pods: Pods) -> None:
    one, other = await pods.add(), await pods.add()
    await one.remember("k", {"a": [1, "zwei"]}, tags=["x"], importance=0.7, source_agent="researcher")
    (found,) = await other.recall("zwei")
    assert (found.key, found.content, found.tags, found.importance, found.source_agent) == (
        "k",
        {"a": [1, "zwei"]},
        ["x"],
        0.7,
        "researcher",
    )
    assert other.short_term.size == 1
    await other.forget("k")
    assert await one.recall("") == []


async def test_accesses_of_three_pods_at_once_add_up(pods: Pods) -> None:
    managers = [await pods.add() for _ in range(3)]
    await managers[0].remember("k", "v", importance=0.1)
    await asyncio.gather(*(one.recall("v") for one in managers for _ in range(5)))
    (entry,) = await managers[1].short_term.listed()
    assert entry.access_count == 15


async def test_folds_of_the_conversation_carry_the_session_on(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_session, "FOLD_AT", 5)
    one, other = await pods.add(), await pods.add()
    for number in range(40):
        await (one, other)[number % 2].remember(f"k{number}", f"fact {number}")
        await asyncio.sleep(0)
    async with asyncio.timeout(20), Backend(MemoryDriver(pods.store)) as backend:
        while not (await backend.sessions.export(CONVERSATION))["body"].get("summary"):  # noqa: ASYNC110 -- no event says so
            await asyncio.sleep(0.01)
    for reader in (one, other, await pods.add()):
        assert [entry.key for entry in await reader.short_term.listed()] == [f"k{n}" for n in range(40)]


async def test_entries_pruned_from_a_shared_session_are_reported_once(pods: Pods) -> None:
    one, other = await pods.add(), await pods.add()
    for memory in (one, other):
        memory.short_term.max_entries = 3
    for number in range(12):
        await (one, other)[number % 2].remember(f"k{number}", f"fact {number}")
    for memory in (one, other):
        journal = memory.short_term.journal
        assert isinstance(journal, ConversationJournal)
        await journal.conversation.flush()
    async with asyncio.timeout(20):
        while not pods.counting.counts:  # noqa: ASYNC110 -- no event says so
            await asyncio.sleep(0.01)
    assert len(await one.short_term.listed()) == 3
    assert pods.counting.counts == {("pruned", "short_term"): 9}


# The end of a session


PROMOTED = {"important": "the key fact", "k11": "fact 11"}


async def require_ended_once(pods: Pods) -> None:
    """Long-term memory has each entry that is due once, with its accesses, and one summary."""
    reader = await pods.add()
    found = {one.key: one for one in await reader.long_term.listed()}
    assert reader.short_term.summary_key is None
    entries = [one.key for one in await reader.short_term.listed()]
    assert reader.short_term.summary_key in found
    summary = found.pop(reader.short_term.summary_key)
    assert summary.content in ("of the first", "of the second")
    assert {key: one.content for key, one in found.items()} == PROMOTED
    assert {key: one.access_count for key, one in found.items()} == {"important": 0, "k11": 3}
    assert entries == ["__summary__", *(f"k{number}" for number in range(2, 12))]
    assert pods.counting.counts["promoted", "long_term"] == 3


async def end_at_once(at: int, *, late: bool) -> bool:
    """End a session in one pod at the `at`-th operation of its end in another; `False` if there is none."""
    async with Pods() as pods:
        one, other = await pods.add(answering("of the first")), await pods.add(answering("of the second"))
        await fill(one)
        pods.drivers[0].arm(at, other.gc.on_session_end, late=late)
        await one.gc.on_session_end()
        if pods.drivers[0].done < at:
            return False
        await require_ended_once(pods)
        return True


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_two_pods_that_end_a_session_at_once_promote_once(late: bool) -> None:
    at = 1
    while await end_at_once(at, late=late):
        at += 1
    assert at > 20


async def test_an_end_that_dies_anywhere_is_completed_by_another_pod() -> None:
    async def die() -> None:
        raise Unavailable("killed")

    at, died = 1, True
    while died:
        async with Pods() as pods:
            one, other = await pods.add(answering("of the first")), await pods.add(answering("of the second"))
            await fill(one)
            pods.drivers[0].arm(at, die)
            died = False
            with suppress(StorageError):
                await one.gc.on_session_end()
            died = pods.drivers[0].done >= at
            await other.gc.on_session_end()
            pods.counting.counts["promoted", "long_term"] = 3
            await require_ended_once(pods)
        at += 1
    assert at > 20


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["cancelled", "answer lost"])
async def test_an_end_interrupted_anywhere_and_repeated_is_done_once(how: str, late: bool) -> None:
    at, interrupted = 1, True
    while interrupted:
        async with Pods() as pods:
            one, other = await pods.add(answering("of the first")), await pods.add(answering("of the second"))
            await fill(one)
            task = asyncio.create_task(one.gc.on_session_end())

            async def interrupt(task: asyncio.Task[None] = task) -> None:
                if how == "cancelled":
                    task.cancel()
                    await asyncio.sleep(0)
                else:
                    raise OutcomeUnknown("the answer was lost", backend="test", operation="append")

            pods.drivers[0].arm(at, interrupt, late=late)
            with suppress(asyncio.CancelledError, StorageError):
                await task
            interrupted = pods.drivers[0].done >= at
            pods.drivers[0].arm(0)
            await one.gc.on_session_end()
            await other.gc.on_session_end()
            pods.counting.counts["promoted", "long_term"] = 3
            await require_ended_once(pods)
        at += 1
    assert at > 20


async def test_an_outage_hides_no_cancellation_of_an_end() -> None:
    at, cancelled = 1, True
    while cancelled:
        async with Pods() as pods:
            one = await pods.add(answering("of the first"))
            await fill(one)
            task, driver = asyncio.create_task(one.gc.on_session_end()), pods.drivers[0]

            async def cancel(task: asyncio.Task[None] = task, driver: Interrupted = driver) -> None:
                task.cancel()
                driver.down = True

            driver.arm(at, cancel)
            await asyncio.wait([task])
            cancelled = driver.done >= at
            driver.arm(0)
            assert task.cancelled() == cancelled
        at += 1
    assert at > 20


def doubled(known: Any, entry: Any, origin: str, *, again: bool = False) -> Any:
    """Promote as `relevance.promoted` does, and count accesses again."""
    fields = promoted(known, entry, origin, again=again)
    if fields is not None and known is not None:
        fields["access_count"] = known["access_count"] + entry["access_count"]
    return fields


def unconditional(one: Session, do: dict[str, Any]) -> bool | None:
    """Store a summary whatever has happened since it was requested."""
    covered = [[key, at] for key, at in do["covered"] if one.has(key, at)]
    previous = one.entries.get("__summary__")
    return summarize(one, {**do, "covered": covered, "previous": previous.content_at if previous else 0})


def named_apart(one: session.Held, name: str) -> str:
    """Give each promotion of a summary a key of its own."""
    return f"{one.entry.key}:{name}:{id(one)}"


async def unnoted(self: Any, done: Any) -> None:
    """Promote and tell the session nothing."""


promoted, summarize = relevance.promoted, session.EFFECTS["summarize"]


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "counts accesses twice": lambda patch: patch.setattr(relevance, "promoted", doubled),
    "stores both summaries": lambda patch: patch.setitem(
        session.EFFECTS,
        "summarize",
        unconditional,
    ),
    "names each summary by its process": lambda patch: patch.setattr(
        session.Held, "long_term_key", named_apart
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_an_end_that_promotes_twice_is_detected(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012 -- at which operation is the mutant's business
        for at in range(1, 200):
            await end_at_once(at, late=True)


async def test_what_long_term_memory_removed_is_not_promoted_again(manager: Any) -> None:
    memory: MemoryManager = manager()
    await memory.remember("a", "one two three four", importance=0.9)
    await memory.remember("b", "four three two one", importance=0.6)
    await memory.remember("c", "something else", importance=0.6)
    await memory.gc.on_session_end()
    assert await memory.long_term.consolidate() == 1
    await memory.forget("c", LONG)
    await memory.recall("o", tiers=[MemoryTier.SHORT_TERM])
    await memory.gc.on_session_end()
    left = await memory.long_term.listed()
    assert [(one.key, one.access_count) for one in left] == [("a", 1)]
    await memory.remember("c", "something else", importance=0.6)
    await memory.gc.on_session_end()
    assert {one.key for one in await memory.long_term.listed()} == {"a", "c"}


async def test_an_end_that_notes_nothing_brings_removed_entries_back(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_term.ShortTermMemory, "was_promoted", unnoted)
    with pytest.raises(AssertionError):
        await test_what_long_term_memory_removed_is_not_promoted_again(manager)


# What a session keeps


async def test_a_late_end_does_not_end_the_session_after_it(pods: Pods) -> None:
    one, other = await pods.add(answering("of the first")), await pods.add(answering("of the second"))
    await fill(one)
    await one.gc.on_session_end()
    await one.gc.on_session_end()
    await other.remember("next", "session", importance=0.1)
    await other.gc.on_session_end()
    found = {entry.key: entry.content for entry in await one.long_term.listed()}
    last = other.short_term.summary_key
    assert last is not None
    assert found[last.removesuffix(":1")] == "of the first"
    assert found[last] == "of the second"


async def test_summaries_before_and_after_the_session_expired_both_survive() -> None:
    clock = FakeClock()
    async with Backend(MemoryDriver(clock=clock)) as backend:
        long_term = MemoryManager(backend=backend, owner=OWNER).long_term
        for text in ("of the first", "of the second"):
            session = SharedShortTermMemory(backend, KEY, session_ttl_s=60)
            memory = MemoryManager(
                llm_provider=answering(text), backend=backend, owner=OWNER, short_term=session
            )
            await fill(memory)
            await memory.gc.on_session_end()
            shown = [one.content for one in await memory.get_context_window(1000)]
            assert len(shown) == len(set(map(str, shown)))
            await clock.pass_time(120)
        found = [entry for entry in await long_term.listed() if entry.key.startswith("__summary__")]
        assert sorted(str(one.content) for one in found) == ["of the first", "of the second"]


async def erase_user(pods: Pods) -> None:
    async with Backend(MemoryDriver(pods.store)) as backend:
        await backend.sessions.erase_user(*OWNER)


async def conversations(pods: Pods) -> list[MemoryKey]:
    async with Backend(MemoryDriver(pods.store)) as backend:
        return [key async for key in backend.sessions.list(*OWNER)]


async def test_a_summary_of_a_session_that_was_erased_is_not_stored(pods: Pods, model: Any) -> None:
    memory = await pods.add(model)
    await fill(memory)
    model.during = lambda: erase_user(pods)
    await memory.gc.on_session_end()
    assert len(model.prompts) == 1
    assert await conversations(pods) == []
    assert await memory.long_term.listed() == []


async def test_a_promotion_of_an_erased_session_is_not_noted_in_it(pods: Pods) -> None:
    memory = await pods.add()
    await fill(memory)
    due = await memory.short_term.promotable()
    assert due
    await erase_user(pods)
    await memory.short_term.was_promoted(due)
    assert await conversations(pods) == []


async def test_an_update_by_a_pod_whose_clock_is_behind_is_promoted(pods: Pods, clock: Any) -> None:
    ahead, behind = await pods.add(), await pods.add(clock=clock)
    clock.pass_days(-20_000)
    await ahead.remember("k", "old", importance=0.9)
    await ahead.gc.on_session_end()
    await behind.remember("k", "new", importance=0.9)
    await behind.gc.on_session_end()
    (found,) = await ahead.long_term.listed()
    assert found.content == "new"


async def test_an_operation_on_a_session_erased_since_has_no_effect(pods: Pods) -> None:
    one, other = await pods.add(), await pods.add()
    await one.remember("k", "old")
    (judged,) = await one.short_term.listed()

    async def begin_again() -> None:
        async with Backend(MemoryDriver(pods.store)) as backend:
            await backend.sessions.erase_user(*OWNER)
        await other.remember("k", "new")

    pods.drivers[0].arm(2, begin_again)
    assert not await one.short_term.discard(judged)
    assert [entry.content for entry in await other.short_term.listed()] == ["new"]


async def test_a_pod_that_was_stopped_does_not_repeat_an_operation(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost, and by now the session may have been ended, or started again."""
    one, other = await pods.add(), await pods.add()
    await one.remember("k", "old")
    (judged,) = await one.short_term.listed()
    loop = asyncio.get_running_loop()
    right, stopped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: right() + stopped)

    async def stop() -> None:
        nonlocal stopped
        stopped = 1_000.0
        raise OutcomeUnknown("the connection was cut")

    pods.drivers[0].arm(2, stop, late=True)
    with pytest.raises(OutcomeUnknown):
        await one.short_term.discard(judged)
    conversation = await pods.drivers[1].load(keys.memory_key(CONVERSATION))
    assert conversation is not None
    assert len(conversation.tail) == 2, "the entry, and its removal once"
    assert await other.short_term.listed() == []


async def test_a_content_that_is_not_json_is_refused_and_not_stored(pods: Pods) -> None:
    memory = await pods.add()
    with pytest.raises(InvalidState):
        await memory.remember("k", {1, 2})
    await memory.remember("k", "text")
    (entry,) = await memory.short_term.listed()
    with pytest.raises(InvalidState):
        await memory.short_term.rewrite(entry, {1, 2})
    assert [one.content for one in await memory.short_term.listed()] == ["text"]


async def test_an_outage_is_an_error_and_not_an_empty_session(pods: Pods) -> None:
    memory = await pods.add()
    await memory.remember("k", "v")

    async def fail() -> None:
        raise Unavailable("down")

    for call in (
        lambda: memory.remember("l", "w"),
        lambda: memory.short_term.recall("v"),
        memory.short_term.listed,
    ):
        pods.drivers[0].arm(1, fail)
        with pytest.raises(Unavailable):
            await call()
    assert [one.key for one in await memory.short_term.listed()] == ["k"]


async def test_a_session_too_large_for_a_fold_is_not_cut(pods: Pods) -> None:
    memory = await pods.add()
    await memory.remember("k", "x" * 1000)
    journal = memory.short_term.journal
    assert isinstance(journal, ConversationJournal)
    journal.largest = 1000
    (turn,) = await journal.conversation.turns()
    with pytest.raises(TooLarge):
        await journal.fold({"previous_summary": "", "turns": [{"assistant": turn.assistant_response}]})


async def test_a_session_whose_folds_fail_is_an_error_and_loses_nothing(pods: Pods) -> None:
    memory = await pods.add()
    await memory.remember("k", "v")
    async with Backend(MemoryDriver(pods.store)) as backend:
        place = keys.memory_key(CONVERSATION)
        record = await backend.driver.load(place)
        assert record is not None
        body = backend.codec.seal_body(Body(health=MemoryHealth.DEGRADED, attempts=4, next_attempt_at=1e12))
        assert await backend.driver.replace(place, body, version="1", expect=record.version, ttl=KEEP)
        with pytest.raises(Unavailable, match="folded"):
            await memory.short_term.listed()
        recovered = backend.codec.seal_body(Body())
        assert await backend.driver.replace(place, recovered, version="2", expect="1", ttl=KEEP)
    assert [one.content for one in await memory.short_term.listed()] == ["v"]


@pytest.mark.parametrize(
    "text", ['{"op": "unheard of"}', "{}", "[]", '{"op": "remember", "entry": 3}', "text"]
)
async def test_an_operation_that_cannot_be_read_is_an_error(pods: Pods, text: str) -> None:
    memory = await pods.add()
    async with Backend(MemoryDriver(pods.store)) as backend:
        config = ShortTermMemoryConfig("truncation")
        await backend.short_term_conversation(KEY, config).add_turn(ConversationTurn("remember", text))
    with pytest.raises(Corrupt):
        await memory.short_term.listed()


async def test_a_session_is_listed_sealed_exported_and_erased_with_its_user() -> None:
    store = MemoryStore()
    sealing = Sealing(StaticKeys({"k1": b"1" * 32}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=sealing) as backend:
        memory = SharedShortTermMemory(backend, KEY)
        await memory.remember(MemoryEntry("k", "MARKER", MemoryTier.SHORT_TERM))
        assert [key async for key in backend.sessions.list(*OWNER)] == [CONVERSATION]
        document = await backend.sessions.export(CONVERSATION)
        assert "MARKER" in json.dumps(document)
        stored = MemoryDriver(store)
        await stored.open()
        assert "MARKER" not in repr(await stored.load(keys.memory_key(CONVERSATION)))
        await backend.sessions.erase_user(*OWNER)
        assert await memory.listed() == []
        await backend.sessions.import_(document)
        assert [one.content for one in await memory.listed()] == ["MARKER"]


async def test_no_conversation_has_the_record_of_a_shared_session(pods: Pods) -> None:
    memory = await pods.add()
    await memory.remember("k", "v")
    async with Backend(MemoryDriver(pods.store)) as backend:
        for session in ("chat#short-term", "#short-term"):
            with pytest.raises(InvalidKey, match="another id"):
                backend.memory(MemoryKey(*OWNER, session))
            with pytest.raises(InvalidKey, match="another id"):
                await backend.router().hydrate(None, MemoryKey(*OWNER, session).composite())
        # A session of that name has a shared session of its own.
        nested = SharedShortTermMemory(backend, CONVERSATION)
        await nested.remember(MemoryEntry("other", "w", MemoryTier.SHORT_TERM))
        assert [one.content for one in await memory.short_term.listed()] == ["v"]
        assert [one.content for one in await nested.listed()] == ["w"]


async def test_forgetting_and_ending_store_nothing_for_an_empty_session(pods: Pods) -> None:
    memory = await pods.add()
    await memory.forget("k")
    await memory.short_term.clear()
    await memory.gc.on_session_end()
    assert await memory.recall("k") == []
    async with Backend(MemoryDriver(pods.store)) as backend:
        assert [key async for key in backend.sessions.list(*OWNER)] == []


async def test_erasing_the_agents_conversation_erases_its_session(pods: Pods) -> None:
    memory = await pods.add()
    await memory.remember("k", "v")
    async with Backend(MemoryDriver(pods.store)) as backend:
        await SharedShortTermMemory(backend, MemoryKey("acme", "u1", "chat2")).remember(
            MemoryEntry("other", "w", MemoryTier.SHORT_TERM)
        )
        config = ShortTermMemoryConfig("truncation")
        await backend.memory(KEY, config).add_turn(ConversationTurn("Hello", "Hi"))
        receipt = await backend.sessions.erase_with_receipt("acme", "u1", "chat")
        assert (receipt.records, receipt.complete) == (2, True)
        assert [key.session_id async for key in backend.sessions.list(*OWNER)] == ["chat2#short-term"]
        # A session id of the greatest length has no session of the tiers.
        await backend.sessions.erase(MemoryKey("acme", "u1", "x" * 1000))
    assert await memory.short_term.listed() == []


async def test_a_session_and_a_graph_of_different_users_are_refused(pods: Pods) -> None:
    await pods.add()
    async with Backend(MemoryDriver(pods.store)) as backend:
        mine = SharedShortTermMemory(backend, KEY)
        with pytest.raises(ConfigurationError, match="different users"):
            MemoryManager(backend=backend, owner=("acme", "u2"), short_term=mine)
        with pytest.raises(ConfigurationError, match="different users"):
            MemoryManager(BackendGraph(backend, ("acme", "u2")), short_term=mine)
        with pytest.raises(ConfigurationError, match="session_id"):
            MemoryManager(short_term=mine, session_id="other")
        assert MemoryManager(short_term=mine).owner == OWNER
