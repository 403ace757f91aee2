"""Sessions of the Claude Agent SDK: what the SDK expects of a store, and what ours does beyond that."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import (
    InMemorySessionStore,
    SessionStore,
    delete_session_via_store,
    fold_session_summary,
    fork_session_via_store,
    get_session_messages_from_store,
    get_subagent_messages_from_store,
    import_session_to_store,
    list_sessions_from_store,
    list_subagents_from_store,
    project_key_for_directory,
    rename_session_via_store,
    tag_session_via_store,
)
from typer.testing import CliRunner

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    LimitReached,
    Limits,
    MemoryKey,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
    open_backend,
)
from stm_backends.cli.app import app
from stm_backends.drivers import Key, WrapperDriver
from stm_backends.drivers.contract import Driver, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.plugins import open_driver
from stm_backends.drivers.wrapper import Operation
from stm_backends.history import log as item_log
from stm_backends.history.log import ItemLog
from stm_backends.integrations import claude_agent_sdk
from stm_backends.integrations.claude_agent_sdk import StmSessionStore, session_key
from stm_backends.memory.touches import Touches
from stm_backends.records import keys, operations, pages
from tests.support.sealed import SEALING

PROJECT = "-srv-app"
KEY: Any = {"project_key": PROJECT, "session_id": "11111111-1111-4111-8111-111111111111"}
AGENT: Any = {**KEY, "subpath": "subagents/agent-a1"}

Entry = dict[str, Any]

_uuids = itertools.count(1)


def said(text: str, **more: Any) -> Any:
    """Return an entry of the transcript, with an id that no other has."""
    number = next(_uuids)
    return {
        "type": "user",
        "uuid": f"00000000-0000-4000-8000-{number:012}",
        "timestamp": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.000Z",
        "message": {"role": "user", "content": text},
        **more,
    }


def titled(title: str) -> Any:
    """Return an entry without an id."""
    return {"type": "custom-title", "customTitle": title}


def of_user(tenant: str, user: str) -> Callable[[str, str], MemoryKey]:
    return lambda project, session: MemoryKey(tenant, user, f"{project}/{session}")


async def texts(store: SessionStore, key: Any = KEY) -> list[str]:
    return [one["message"]["content"] for one in await store.load(key) or [] if "message" in one]  # type: ignore[typeddict-item]


async def summary_of(store: SessionStore, key: Any = KEY) -> Any:
    """Return the summary of a session, which must be that of all entries that can be loaded."""
    by_id = {one["session_id"]: one for one in await store.list_session_summaries(key["project_key"])}
    listed = {one["session_id"]: one["mtime"] for one in await store.list_sessions(key["project_key"])}
    assert {name: one["mtime"] for name, one in by_id.items()} == listed
    summary = by_id[key["session_id"]]
    assert summary["data"] == fold_session_summary(None, key, await store.load(key) or [])["data"]
    return summary


@pytest.fixture
def store(backend: Backend) -> StmSessionStore:
    return StmSessionStore(backend)


@pytest.fixture(params=["memory", "sqlite", "sealed", "the SDK's own"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], SessionStore]]:
    """Makes stores on one place. What ours are expected to do, the SDK's own has to do as well."""
    if request.param == "the SDK's own":
        own = InMemorySessionStore()
        yield lambda: own
        return
    url = f"sqlite:///{tmp_path}/stm.db" if request.param == "sqlite" else "memory://"
    sealing = SEALING if request.param == "sealed" else None
    async with open_backend(url, sealing=sealing) as backend:
        yield lambda: StmSessionStore(backend)


class Cut(WrapperDriver):
    """Refuses what a test says; the `lost` are done, and their answer is lost."""

    def __init__(self, url: str) -> None:
        super().__init__(open_driver(url))
        self.refused = self.lost = ""
        self.done: list[str] = []

    async def call(self, operation: Any, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        name = f"{operation} {key if isinstance(key, str) else key.name}"
        is_log = not isinstance(key, str) and key.scope.endswith(":claude-agent-sdk")
        if is_log:
            self.done.append(operation)
        if is_log and self.refused and name.endswith(self.refused) and operation != "load":
            raise Unavailable("refused")
        answer = await send()
        if is_log and self.lost and name.endswith(self.lost) and operation != "load":
            self.lost = ""
            raise OutcomeUnknown("lost")
        return answer


@pytest.fixture
async def cut(tmp_path: Path) -> AsyncIterator[tuple[Backend, Cut]]:
    """A backend whose driver can be cut."""
    driver = Cut(f"sqlite:///{tmp_path}/stm.db")
    async with Backend(driver) as backend:
        yield backend, driver


SUMMARY = "+beside/summary"
SESSION = KEY["session_id"]


# What the SDK expects of a store


async def test_random_calls_are_answered_as_by_the_sdks_own_store(store: StmSessionStore) -> None:
    own, chance = InMemorySessionStore(), random.Random(1)
    projects, sessions = ["-a", "-a-b"], ["s", "s2", "t"]
    subpaths = [None, None, "subagents/agent-1", "subagents/workflows/r/agent-1", "other"]
    kinds = [
        said,
        titled,
        lambda text: {"type": "tag", "tag": text[:2]},
        lambda text: {"type": "x", "n": text},
    ]

    async def check() -> None:
        for project in projects:
            for method in ("list_session_summaries", "list_sessions"):
                mine, theirs = [
                    sorted(await getattr(one, method)(project), key=lambda found: found["session_id"])
                    for one in (store, own)
                ]
                assert all(one["mtime"] > 1e12 for one in mine)
                assert [{**one, "mtime": 0} for one in mine] == [{**one, "mtime": 0} for one in theirs]
            for session in sessions:
                of: Any = {"project_key": project, "session_id": session}
                assert sorted(await store.list_subkeys(of)) == sorted(await own.list_subkeys(of))
                for subpath in subpaths:
                    key = of if subpath is None else {**of, "subpath": subpath}
                    assert await store.load(key) == await own.load(key), key

    for step in range(300):
        key: Any = {"project_key": chance.choice(projects), "session_id": chance.choice(sessions)}
        if subpath := chance.choice(subpaths):
            key["subpath"] = subpath
        if chance.random() < 0.1:
            await asyncio.gather(store.delete(key), own.delete(key))
        else:
            count = chance.choice([0, 1, 2, 5])
            batch = [chance.choice(kinds)(f"{step} {number}") for number in range(count)]
            if batch:  # of nothing, the SDK's own makes an empty session
                await asyncio.gather(store.append(key, batch), own.append(key, batch))
        if step % 25 == 0:
            await check()
    await check()


async def test_a_session_is_newer_with_each_append(stores: Callable[[], SessionStore]) -> None:
    store, times = stores(), list[int]()
    for number in range(5):
        await store.append(KEY, [said(str(number))])
        times.append((await summary_of(store))["mtime"])
    assert times == sorted(set(times))
    assert abs(times[-1] / 1000 - time.time()) < 60


async def test_the_functions_of_the_sdk_work_on_the_store(
    stores: Callable[[], SessionStore], tmp_path: Path
) -> None:
    store, folder = stores(), str(tmp_path)
    project, session = project_key_for_directory(folder), str(uuid.uuid4())
    key: Any = {"project_key": project, "session_id": session}
    await store.append(key, [said("Book a table", parentUuid=None, sessionId=session, cwd=folder)])
    agent: Any = {**key, "subpath": "subagents/agent-a1"}
    await store.append(agent, [said("Look for tables", isSidechain=True, parentUuid=None, sessionId=session)])
    await rename_session_via_store(store, session, "Dinner", folder)
    await tag_session_via_store(store, session, "food", folder)
    (listed,) = await list_sessions_from_store(store, folder)
    assert (listed.session_id, listed.summary, listed.tag) == (session, "Dinner", "food")
    assert listed.first_prompt == "Book a table"
    (message,) = await get_session_messages_from_store(store, session, folder)
    assert message.message["content"] == "Book a table"
    assert await list_subagents_from_store(store, session, folder) == ["a1"]
    (message,) = await get_subagent_messages_from_store(store, session, "a1", folder)
    assert message.message["content"] == "Look for tables"
    forked = await fork_session_via_store(store, session, folder)
    assert len(await list_sessions_from_store(store, folder)) == 2
    await delete_session_via_store(store, session, folder)
    (listed,) = await list_sessions_from_store(store, folder)
    assert listed.session_id == forked.session_id
    assert await list_subagents_from_store(store, session, folder) == []


async def test_what_was_handed_out_is_the_callers_to_change(store: StmSessionStore) -> None:
    added = [said("1")]
    await store.append(KEY, added)
    added[0]["message"]["content"] = "changed"
    (loaded,) = await store.load(KEY) or []
    loaded["message"]["content"] = "changed"  # type: ignore[typeddict-item]
    (await summary_of(store))["data"]["first_prompt"] = "changed"
    assert await texts(store) == ["1"]
    assert (await summary_of(store))["data"]["first_prompt"] == "1"


# What is sent again


async def test_a_batch_that_is_sent_again_is_stored_once(backend: Backend) -> None:
    first, second = [said("1"), titled("A"), said("2")], [said("3"), said("4")]
    for store in (StmSessionStore(backend), StmSessionStore(backend)):
        for batch in (first, first, second, first):
            await store.append(KEY, batch)
    assert await StmSessionStore(backend).load(KEY) == first + second
    stored = [
        kind async for kind in backend.item_log(session_key(*KEY.values()), "claude-agent-sdk").each_item()
    ]
    assert [one.item for one in stored] == first + second
    await summary_of(StmSessionStore(backend))
    own = InMemorySessionStore()
    for batch in (first, second, first):
        await own.append(KEY, batch)
    assert len(await own.load(KEY) or []) == 8


async def test_an_old_batch_that_is_sent_again_changes_no_summary(store: StmSessionStore) -> None:
    batches = [[said(f"{number}"), titled(f"title {number}")] for number in range(12)]
    for batch in batches:
        await store.append(KEY, batch)
    # This store made the last append, and knows the state of the session.
    await store.append(KEY, batches[2])
    assert (await summary_of(store))["data"]["custom_title"] == "title 11"
    await store.append(KEY, [said("more")])
    assert (await summary_of(store))["data"]["custom_title"] == "title 11"
    assert len(await store.load(KEY) or []) == 25


async def test_batches_that_overlap_are_loaded_as_if_they_did_not(store: StmSessionStore) -> None:
    entries = [said(str(number)) for number in range(6)]
    for start, end in ((0, 3), (2, 5), (0, 6)):
        await store.append(KEY, entries[start:end])
    assert await store.load(KEY) == entries


async def test_entries_without_an_id_may_come_twice(stores: Callable[[], SessionStore]) -> None:
    store, entry = stores(), titled("A")
    for batch in ([entry], [titled("B")], [entry], [entry, entry]):
        await store.append(KEY, batch)
    assert await store.load(KEY) == [entry, titled("B"), entry, entry, entry]


async def test_entries_without_an_id_that_are_added_at_once_are_both_stored(store: StmSessionStore) -> None:
    await store.append(KEY, [said("1")])
    await asyncio.gather(*(store.append(KEY, [titled("A")]) for _ in range(3)))
    assert (await store.load(KEY) or [])[1:] == [titled("A")] * 3


async def test_entries_without_an_id_are_stored_once_after_an_error(cut: tuple[Backend, Cut]) -> None:
    backend, driver = cut
    store = StmSessionStore(backend)
    await store.append(KEY, [said("1")])
    for title in ("A", "B"):
        # Each attempt of the driver's caller loses its answer, as in an outage.
        driver.lost = SESSION
        await store.append(KEY, [titled(title)])
        assert not driver.lost
    driver.refused = SESSION
    with pytest.raises(Unavailable):
        await store.append(KEY, [titled("C")])
    driver.refused = ""
    await store.append(KEY, [titled("C")])
    loaded = await store.load(KEY) or []
    assert [one.get("customTitle") for one in loaded] == [None, "A", "B", "C"]


async def test_a_local_transcript_can_be_imported_twice(
    store: StmSessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
    entries = [said(str(number)) for number in range(1_200)]
    file = tmp_path / "projects" / PROJECT / f"{SESSION}.jsonl"
    (file.with_suffix("") / "subagents").mkdir(parents=True)
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries[:1_000]))
    (file.with_suffix("") / "subagents" / "agent-a1.jsonl").write_text(json.dumps(said("sub")) + "\n")
    await import_session_to_store(SESSION, store)
    # As after messages that could not be mirrored.
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    await import_session_to_store(SESSION, store, batch_size=300)
    assert await store.load(KEY) == entries
    assert await store.list_subkeys(KEY) == ["subagents/agent-a1"]
    assert await texts(store, AGENT) == ["sub"]
    await summary_of(store)


# Writers at once, and writers that are gone


async def test_four_writers_lose_nothing_and_the_summary_has_all(pods: tuple[Backend, Backend]) -> None:
    writers = [StmSessionStore(backend) for backend in pods for _ in range(2)]

    async def write(name: int) -> None:
        for number in range(20):
            await writers[name].append(KEY, [said(f"{name} {number}", gitBranch=f"{name}-{number}")])

    await asyncio.gather(*map(write, range(4)))
    found = await texts(writers[0])
    for name in range(4):
        own = [text for text in found if text.startswith(f"{name} ")]
        assert own == [f"{name} {number}" for number in range(20)]
    assert len(found) == 80
    for store in writers:
        await summary_of(store)
        await store.append(KEY, [titled("the end")])
        assert (await summary_of(store))["data"]["custom_title"] == "the end"


async def test_a_summary_that_could_not_be_stored_is_completed(
    cut: tuple[Backend, Cut], caplog: pytest.LogCaptureFixture
) -> None:
    backend, driver = cut
    store = StmSessionStore(backend)
    await store.append(KEY, [said("1"), titled("old")])
    driver.refused = SUMMARY
    with caplog.at_level(logging.WARNING, "stm_backends"):
        # What a killed process leaves: the entries, and no summary of them.
        await store.append(KEY, [titled("new")])
        await store.append({**KEY, "session_id": "begun"}, [titled("first")])
    assert "the next append has to store the summary" in caplog.text
    assert SESSION not in caplog.text
    for other in (store, StmSessionStore(backend)):
        # A listing writes nothing, and needs nothing to be written.
        assert (await summary_of(other))["data"]["custom_title"] == "new"
        assert (await summary_of(other, {**KEY, "session_id": "begun"}))["data"]["custom_title"] == "first"
    driver.refused = ""
    await StmSessionStore(backend).append(KEY, [said("2")])
    summaries = backend.item_log(session_key(*KEY.values()), "claude-agent-sdk").beside("summary")
    (newest,) = await summaries.items(1)
    assert (newest["covered"], newest["data"]["custom_title"]) == (4, "new")
    await summary_of(store)


async def test_a_summary_of_a_session_that_was_erased_meanwhile_does_not_count(backend: Backend) -> None:
    one, other = StmSessionStore(backend), StmSessionStore(backend)
    await one.append(KEY, [said("1"), titled("old"), said("2")])
    log = backend.item_log(session_key(*KEY.values()), "claude-agent-sdk")
    # As if the process that erased it was killed in between.
    await log.clear()
    assert await other.list_session_summaries(PROJECT) == []
    await one.append(KEY, [said("3")])
    assert (await summary_of(other))["data"]["first_prompt"] == "3"
    assert "custom_title" not in (await summary_of(one))["data"]
    await other.delete(KEY)
    await one.append(KEY, [said("4")])
    assert (await summary_of(other))["data"]["first_prompt"] == "4"


async def test_a_summary_of_an_earlier_session_counts_for_no_longer_one(backend: Backend) -> None:
    one, other = StmSessionStore(backend), StmSessionStore(backend)
    await one.append(KEY, [said("old"), titled("old")])
    # As if the process that erased it was killed in between.
    await backend.item_log(session_key(*KEY.values()), "claude-agent-sdk").clear()
    await other.append(KEY, [said(str(number)) for number in range(3)])
    for store in (one, other, StmSessionStore(backend)):
        summary = await summary_of(store)
        assert summary["data"]["first_prompt"] == "0"
        assert "custom_title" not in summary["data"]


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_session_is_listed_until_all_of_it_is_deleted(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A process is killed within a deletion, and whoever finds the session in the list deletes it again."""
    store, clear, left = StmSessionStore(backend), ItemLog.clear, at
    await store.append(KEY, [said("1")])
    await store.append(AGENT, [said("1")])

    async def killed(log: ItemLog) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise asyncio.CancelledError
        await clear(log)

    monkeypatch.setattr(ItemLog, "clear", killed)
    with pytest.raises(asyncio.CancelledError):
        await store.delete(KEY)
    assert [one["session_id"] for one in await StmSessionStore(backend).list_sessions(PROJECT)] == [SESSION]
    await store.delete(KEY)
    assert await store.list_sessions(PROJECT) == []
    assert [key async for _, key in backend.sessions.logs("default", "anonymous")] == []


async def test_a_cancelled_append_is_stored_once_when_it_is_repeated(backend: Backend) -> None:
    store, batches = StmSessionStore(backend), [[said(f"{n}"), titled(f"{n}")] for n in range(40)]
    for number, batch in enumerate(batches):
        call = asyncio.create_task(store.append(KEY, batch))
        for _ in range(number):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await store.append(KEY, batch)
    assert await store.load(KEY) == [entry for batch in batches for entry in batch]
    await summary_of(store)


async def test_an_append_takes_three_round_trips_and_one_for_a_subagent(
    cut: tuple[Backend, Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A touch of the catalogue reads the log, at a moment of its own.
    monkeypatch.setattr(Touches, "note", lambda *_, **__: None)
    backend, driver = cut
    store = StmSessionStore(backend)
    await store.append(KEY, [said("1")])
    await store.append(AGENT, [said("1")])
    driver.done.clear()
    await store.append(KEY, [said("2")])
    assert driver.done == ["append", "load", "append"]
    driver.done.clear()
    await store.append(AGENT, [said("2")])
    assert driver.done == ["append"]


async def test_old_summaries_do_not_pile_up(store: StmSessionStore, backend: Backend) -> None:
    for number in range(3 * claude_agent_sdk.REWRITTEN):
        await store.append(KEY, [said(str(number))])
    summaries = backend.item_log(session_key(*KEY.values()), "claude-agent-sdk").beside("summary")
    assert (await summaries.read(0)).count <= claude_agent_sdk.REWRITTEN
    await summary_of(store)


async def test_an_outage_is_an_error_and_never_an_empty_session(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        store = StmSessionStore(backend)
        await store.append(KEY, [said("1")])
    for call in (
        store.append(KEY, [said("2")]),
        store.load(KEY),
        store.list_sessions(PROJECT),
        store.list_session_summaries(PROJECT),
        store.list_subkeys(KEY),
        store.delete(KEY),
    ):
        with pytest.raises(Unavailable):
            await call


# What it costs


class Counting(WrapperDriver):
    """Notes each operation on sessions, and the entries and bytes that loads return."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.clear()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        scope = key if isinstance(key, str) else key.scope
        if scope.endswith(f":{claude_agent_sdk.KIND}"):
            self.calls.append(operation)
        answer = await send()
        if isinstance(answer, Record):
            self.entries += len(answer.tail)
            self.bytes += sum(map(len, answer.tail))
        return answer

    def clear(self) -> None:
        self.calls, self.entries, self.bytes = list[str](), 0, 0


async def test_an_append_reads_few_entries_however_long_the_session_is() -> None:
    driver = Counting(MemoryDriver(MemoryStore()))
    async with Backend(driver) as backend:
        for more in (99, 0):
            store = StmSessionStore(backend)
            # A store that has added nothing yet reads what is there, to tell repeats.
            await store.append(KEY, [said("x" * 1_000)])
            for _ in range(more):
                await store.append(KEY, [said("x" * 1_000)])
            driver.clear()
            for _ in range(5):
                await store.append(KEY, [said("x" * 1_000)])
            assert driver.calls == ["append", "load", "append"] * 5
            assert driver.entries == 4 * 5
            assert driver.bytes < 4 * 5 * 2_000


async def test_a_session_of_large_entries_leaves_few_of_them_in_its_record() -> None:
    """What one store adds counts as a whole, and not each call alone."""
    driver = MemoryDriver(MemoryStore())
    async with Backend(driver) as backend:
        store = StmSessionStore(backend)
        for _ in range(100):
            await store.append(KEY, [said("x" * 100_000)])
        record = await driver.load(keys.log_key(session_key(PROJECT, SESSION), claude_agent_sdk.KIND))
        assert record is not None
        assert sum(map(len, record.tail)) <= item_log.LARGE + item_log.KEPT_BYTES
        assert len(await store.load(KEY) or []) == 100


# What is large, and what is odd


def image(size: int) -> Any:
    return said("", message={"role": "user", "content": [{"type": "image", "source": {"data": "x" * size}}]})


async def test_entries_larger_than_a_record_are_stored(store: StmSessionStore) -> None:
    entries = [said("look"), image(9_000_000), said("and"), image(3_000_000), said("?")]
    await store.append(KEY, entries)
    await store.append(KEY, entries[:2])
    for number in range(200):
        await store.append(KEY, [said(str(number))])
    loaded = await store.load(KEY) or []
    assert loaded[:5] == entries
    assert len(loaded) == 205


async def test_a_batch_too_large_for_one_write_is_added_in_several(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        store, entries = StmSessionStore(backend), [said("x" * 100) for _ in range(40)]
        await store.append(KEY, entries)
        await store.append(KEY, entries)
        await store.append(AGENT, entries)
        assert await store.load(KEY) == await store.load(AGENT) == entries
        await summary_of(store)
        with pytest.raises(TooLarge):
            await store.append(KEY, [said("small"), said("x" * 5_000)])
        assert await texts(store) == ["x" * 100] * 40 + ["small"]
        await store.append(KEY, [said("after")])
        await summary_of(store)


@pytest.mark.full
async def test_a_transcript_of_200_mib_is_stored_and_loaded(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        store, images = StmSessionStore(backend), 100
        for number in range(images):
            await store.append(
                KEY, [said(f"before {number}"), image(2 * 1024 * 1024), said(f"after {number}")]
            )
        (summary,) = await StmSessionStore(backend).list_session_summaries(PROJECT)
        assert summary["data"]["first_prompt"] == "before 0"
        loaded = await store.load(KEY) or []
        assert len(loaded) == 3 * images
        assert sum(len(json.dumps(entry)) for entry in loaded) > 200 * 1024 * 1024


async def test_an_entry_that_the_sdk_cannot_summarize_is_stored_all_the_same(
    store: StmSessionStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fold(before: Any, key: Any, entries: list[Any]) -> Any:
        if any(entry["type"] == "odd" for entry in entries):
            raise OverflowError("SECRET")
        return fold_session_summary(before, key, entries)

    monkeypatch.setattr(claude_agent_sdk, "fold_session_summary", fold)
    await store.append(KEY, [{"type": "odd"}])
    await store.append(KEY, [said("1"), {"type": "odd"}, titled("A")])
    assert len(await store.load(KEY) or []) == 4
    (summary,) = await store.list_session_summaries(PROJECT)
    assert (summary["data"]["first_prompt"], summary["data"]["custom_title"]) == ("1", "A")
    assert "cannot summarize an entry (OverflowError)" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, "entries must be a list"),
        ("text", "entries must be a list"),
        ([said("1"), "text"], r"entries\[1\] is str, not an object"),
        ([{"type": "x", "at": object()}], r"entries\[0\]\.at is object"),
        ([said("1", n={1: 2})], r"entries\[0\]\.n has a key that is not a string"),
    ],
)
async def test_what_is_no_entry_is_refused_with_its_path(
    store: StmSessionStore, entries: Any, message: str
) -> None:
    with pytest.raises(InvalidState, match=message):
        await store.append(KEY, entries)
    assert await store.load(KEY) is None


# Keys


async def test_sessions_of_all_names_stay_apart(store: StmSessionStore) -> None:
    names = ["a", "a/b", "a%2Fb", "a:b", "a+beside/summary", "é", "\0"]
    for project in names:
        for session in names:
            await store.append(
                {"project_key": project, "session_id": session}, [said(f"{project} {session}")]
            )
    for project in names:
        listed = await store.list_sessions(project)
        assert sorted(one["session_id"] for one in listed) == sorted(names), project
        for session in names:
            key: Any = {"project_key": project, "session_id": session}
            assert await texts(store, key) == [f"{project} {session}"]
            assert await store.list_subkeys(key) == []


async def test_a_function_says_whose_a_session_is(backend: Backend) -> None:
    mine, theirs = (StmSessionStore(backend, of_user("acme", user)) for user in ("u1", "u2"))
    by_default = StmSessionStore(backend)
    for number, store in enumerate((mine, theirs, by_default)):
        await store.append(KEY, [said(str(number))])
    for number, store in enumerate((mine, theirs, by_default)):
        assert await texts(store) == [str(number)]
        assert len(await store.list_sessions(PROJECT)) == 1
    assert await backend.sessions.has("default", "anonymous")


async def test_a_function_may_ignore_the_project_or_change_the_session(backend: Backend) -> None:
    sessions = StmSessionStore(backend, lambda project, session: MemoryKey("acme", "u1", session))
    await sessions.append(KEY, [said("1")])
    assert [one["session_id"] for one in await sessions.list_sessions(PROJECT)] == [SESSION]
    swapped = StmSessionStore(
        backend, lambda project, session: MemoryKey("acme", "u2", f"{project}|{session[::-1]}")
    )
    await swapped.append(KEY, [said("1")])
    assert [one["session_id"] for one in await swapped.list_sessions(PROJECT)] == [SESSION]
    assert await swapped.list_sessions(PROJECT[:-1]) == []


async def test_a_function_that_fails_is_named_and_not_quoted(backend: Backend) -> None:
    def failing(project: str, session: str) -> MemoryKey:
        raise KeyError(f"SECRET {project} {session}")

    async def by_mistake(project: str, session: str) -> MemoryKey:
        return MemoryKey("acme", "u1", session)

    given: Any
    for given, message in (
        (failing, r"`key_of` failed \(KeyError\)"),
        (lambda project, session: f"acme:u1:{session}", "`key_of` returned str, not a MemoryKey"),
        (by_mistake, "`key_of` returned a coroutine, not a MemoryKey"),
        (lambda project: project, r"`key_of` failed \(TypeError\)"),
    ):
        store = StmSessionStore(backend, given)
        for call in (store.append(KEY, [said("1")]), store.load(KEY), store.list_sessions(PROJECT)):
            with pytest.raises(ConfigurationError, match=message) as refused:
                await call
            assert "SECRET" not in str(refused.value)
    with pytest.raises(InvalidKey, match="part of a conversation"):
        await StmSessionStore(backend, lambda *_: MemoryKey("a", "u", "s+beside/x")).append(KEY, [said("1")])
    with pytest.raises(InvalidKey, match="user_id"):
        await StmSessionStore(backend, lambda *_: MemoryKey("a", " ", "s")).append(KEY, [said("1")])


async def test_a_key_without_a_session_is_refused(backend: Backend, store: StmSessionStore) -> None:
    given: Any
    for given in (
        {"project_key": PROJECT},
        {"project_key": "", "session_id": "s"},
        {"session_id": "s"},
        {**KEY, "session_id": 5},
        {**KEY, "subpath": ""},
    ):
        for call in (store.append(given, [said("1")]), store.load(given), store.delete(given)):
            with pytest.raises(InvalidKey):
                await call
    with pytest.raises(InvalidKey, match="project_key"):
        await store.list_sessions("")
    assert [user async for user in backend.sessions.users("default")] == []


async def test_what_is_no_backend_function_or_time_is_refused(backend: Backend) -> None:
    given: Any
    for given, options in (("sqlite:///x.db", {}), (backend, {"key_of": "x"}), (backend, {"ttl_s": 0})):
        with pytest.raises(ConfigurationError):
            StmSessionStore(given, **options)


# All that a user of this library expects


async def filled(backend: Backend, user: str = "u1", session: str = SESSION) -> StmSessionStore:
    """Return a store with a session that has subagents, one of them in pages and parts."""
    store, key = StmSessionStore(backend, of_user("acme", user)), {**KEY, "session_id": session}
    await store.append(key, [said("Book a table"), titled("Dinner")])
    await store.append({**key, "subpath": "subagents/agent-a1"}, [image(3_000_000)])
    for number in range(150):
        await store.append({**key, "subpath": "subagents/agent-a2"}, [said(str(number))])
    return store


async def test_deleting_a_session_deletes_all_that_is_of_it(backend: Backend) -> None:
    store = await filled(backend)
    await store.delete(AGENT)
    assert await store.list_subkeys(KEY) == ["subagents/agent-a2"]
    await store.delete(KEY)
    await backend.close()
    await backend.open()
    assert [key async for _, key in backend.sessions.logs("acme", "u1")] == []
    receipt = await backend.sessions.erase_with_receipt("acme")
    assert receipt.records == 0
    assert receipt.erased.get("pages", 0) + receipt.erased.get("parts", 0) == 0


@pytest.mark.parametrize("what", ["session", "user", "tenant"])
async def test_erasing_erases_sessions_with_their_subagents(backend: Backend, what: str) -> None:
    store, other = await filled(backend), await filled(backend, "u2")
    await filled(backend, session="other")
    whose = {"session": ("u1", f"{PROJECT}/{SESSION}"), "user": ("u1",), "tenant": ()}[what]
    receipt = await backend.sessions.erase_with_receipt("acme", *whose)
    assert receipt.complete
    # Each with a summary and two subagents.
    assert receipt.erased["logs"] == {"session": 4, "user": 8, "tenant": 12}[what]
    assert await store.load(KEY) is None
    assert await store.load(AGENT) is None
    assert await store.list_subkeys(KEY) == []
    assert len(await store.list_sessions(PROJECT)) == (what == "session")
    assert (await other.load(AGENT) is None) == (what == "tenant")


async def test_a_list_of_conversations_has_sessions_and_no_subagents(backend: Backend) -> None:
    await filled(backend)
    await backend.close()
    await backend.open()
    (card,) = (await backend.conversations.list("acme", "u1")).cards
    assert (card.title, card.kinds) == ("Book a table", ("claude-agent-sdk",))
    assert card.key == MemoryKey("acme", "u1", f"{PROJECT}/{SESSION}")


async def test_a_session_expires_after_the_last_append(backend: Backend) -> None:
    brief, kept = StmSessionStore(backend, ttl_s=0.3), StmSessionStore(backend)
    await brief.append(KEY, [said("1")])
    await brief.append(AGENT, [said("1")])
    await kept.append({**KEY, "session_id": "kept"}, [said("1")])
    await asyncio.sleep(0.6)
    assert await brief.load(KEY) is None
    assert await brief.load(AGENT) is None
    assert [one["session_id"] for one in await brief.list_sessions(PROJECT)] == ["kept"]
    await brief.append(KEY, [said("2")])
    assert (await summary_of(brief))["data"]["first_prompt"] == "2"


async def test_a_session_whose_oldest_entries_have_expired_is_listed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are gone, and so is its summary, such as after an import."""
    monkeypatch.setattr(item_log, "LONG", 4)
    monkeypatch.setattr(item_log, "KEPT", 2)
    monkeypatch.setattr(pages, "TURNS", 4)
    store = StmSessionStore(backend)
    for number in range(40):
        await store.append(KEY, [said(str(number))])
    log = backend.item_log(session_key(*KEY.values()), "claude-agent-sdk")
    scope, prefix = keys.pages_of(keys.log_key(session_key(*KEY.values()), "claude-agent-sdk"))
    names = [name async for name in operations.names_of(backend.driver, scope, prefix)]
    for name in names[:3]:
        await backend.driver.delete(Key(scope, name))
    for lacks in ("nothing", "its summary"):
        if lacks == "its summary":
            await log.beside("summary").clear()
        fresh = StmSessionStore(backend)
        assert [one["session_id"] for one in await fresh.list_sessions(PROJECT)] == [SESSION]
        await fresh.append(KEY, [said(f"without {lacks}")])
    assert 20 < len(await texts(store)) < 40
    assert (await summary_of(store))["data"]["first_prompt"] == (await texts(store))[0]


async def test_a_session_whose_oldest_pages_were_purged_gets_a_summary_of_the_rest(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer entries than its summary has covered, and more again later."""
    monkeypatch.setattr(item_log, "LONG", 4)
    monkeypatch.setattr(item_log, "KEPT", 2)
    monkeypatch.setattr(pages, "TURNS", 4)
    store = StmSessionStore(backend)
    for number in range(40):
        await store.append(KEY, [said(str(number))])
    await asyncio.sleep(0.2)
    assert (await backend.sessions.purge("default", transcripts_older_than=0.1)).pages > 5
    log = backend.item_log(session_key(*KEY.values()), "claude-agent-sdk")
    # Appends of a process that was killed each time before it stored the summary.
    await log.add([said("title"), titled("new")])
    await log.add([said(str(number)) for number in range(50)])
    assert (await summary_of(StmSessionStore(backend)))["data"]["custom_title"] == "new"
    await StmSessionStore(backend).append(KEY, [said("end")])
    assert (await summary_of(store))["data"]["custom_title"] == "new"


async def test_a_purged_session_is_listed_no_more(backend: Backend) -> None:
    store = await filled(backend)
    await asyncio.sleep(0.2)
    purged = await backend.sessions.purge("acme", older_than=0.1)
    assert purged.logs == 4
    assert await store.load(KEY) is None
    assert await store.load(AGENT) is None
    assert await store.list_sessions(PROJECT) == []
    await store.append(KEY, [said("again")])
    assert (await summary_of(store))["data"]["first_prompt"] == "again"


async def test_limits_refuse_what_is_too_much(tmp_path: Path) -> None:
    limits = Limits(turn_characters=2_000, user_conversations=1)
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", limits=limits) as backend:
        store = StmSessionStore(backend)
        with pytest.raises(LimitReached, match="turn_characters"):
            await store.append(KEY, [said("small"), said("x" * 3_000)])
        await store.append(KEY, [said("1")])
        for number in range(3):
            await store.append({**KEY, "subpath": f"subagents/agent-{number}"}, [said("1")])
        with pytest.raises(LimitReached, match="user_conversations"):
            await store.append({**KEY, "session_id": "another"}, [said("1")])
        assert await texts(store) == ["1"]


async def test_nothing_of_a_sealed_session_is_readable_in_the_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url, sealing=SEALING) as backend:
        store = StmSessionStore(backend)
        await store.append(KEY, [said("SECRET"), titled("SECRET")])
        await store.append(AGENT, [said("SECRET")])
    assert not any(b"SECRET" in file.read_bytes() for file in [*tmp_path.iterdir()])  # noqa: ASYNC240 -- a test
    async with open_backend(url) as backend:
        store = StmSessionStore(backend)
        for call in (store.load(KEY), store.list_sessions(PROJECT), store.append(KEY, [said("clear")])):
            with pytest.raises(Corrupt):
                await call


async def test_a_damaged_session_hides_no_other(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    store = StmSessionStore(backend)
    await store.append(KEY, [said("1")])
    await store.append({**KEY, "session_id": "other"}, [said("1")])
    summary = Key("default:anonymous:claude-agent-sdk", f"{PROJECT}/{SESSION}{SUMMARY}")
    await backend.driver.append(summary, b"stm/1 items\nnothing", initial_version="v", ttl=None)
    assert [one["session_id"] for one in await store.list_sessions(PROJECT)] == ["other"]
    assert "a session is not listed" in caplog.text
    assert await texts(store) == ["1"]


def cli(*arguments: str) -> Any:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done


def test_the_command_line_shows_moves_and_erases_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    here, there, file = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", str(tmp_path / "f.jsonl")
    key = f"acme:u1:{PROJECT}/{SESSION}"

    async def fill() -> None:
        async with open_backend(here) as backend:
            await filled(backend)

    async def found(url: str) -> tuple[Any, ...]:
        async with open_backend(url) as backend:
            store = StmSessionStore(backend, of_user("acme", "u1"))
            keys = [KEY, AGENT, {**AGENT, "subpath": "subagents/agent-a2"}]
            summary = (await summary_of(store))["data"]
            return [await store.load(one) for one in keys], await store.list_subkeys(KEY), summary

    asyncio.run(fill())
    expected = asyncio.run(found(here))
    assert f"{key}+beside/agent/subagents/agent-a1" in cli("ls", "acme:u1", "--url", here).stdout
    assert "Book a table" in cli("show", key, "--url", here).stdout
    assert "Book a table" in cli("history", key, "--url", here).stdout
    cli("export", key, "--url", here, "--output", file)
    cli("import", file, "--url", there)
    assert asyncio.run(found(there)) == expected
    cli("erase", key, "--url", there, "--yes")
    cli("copy", here, there, "--tenant", "acme")
    assert asyncio.run(found(there)) == expected
    cli("stats", "acme:u1", "--url", there)
