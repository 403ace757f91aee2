"""What leaves a conversation's record with a transcript: where it goes, and how it is read."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest

from stm_backends import DefaultShortTermMemory, TranscriptTurn, sync
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, KEEP, Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    KeyMismatch,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
)
from stm_backends.memory.shared import due
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import read_units
from stm_backends.records import keys, ledger, pages
from stm_backends.records.body import Body, Transcript, digest
from stm_backends.records.codec import Codec, encode_turn
from stm_backends.records.compression import Preset, Zlib
from stm_backends.records.limits import Guard, Limits
from stm_backends.records.pages import Leaving, Pages
from stm_backends.records.shortening import Shortening
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    StoredTurn,
)
from tests.support.catalogue import indexed, touched

T = TypeVar("T")

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)
KEPT = config(transcript=True, total_max_tokens=0, summary_max_tokens=100_000)

UNREADABLE = pytest.mark.parametrize(
    "options",
    [{"sealing": Sealing(StaticKeys({"k": bytes(32)}, primary="k"))}, {"transforms": [Zlib(threshold=1)]}],
    ids=["sealed", "compressed"],
)
"""Options of a backend that stores no text as it is."""


def stored_in_pages(store: MemoryStore) -> bytes:
    """Return all bytes of all pages."""
    return b"".join(
        value
        for scope, records in store.scopes.items()
        if scope.endswith(":page")
        for record in records.records.values()
        for value in (record.body or b"", *record.tail)
    )


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(MemoryDriver())) as opened:
        yield opened


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


def memory_of(backend: Backend, settings: object = KEPT, **options: Any) -> DistributedShortTermMemory:
    return backend.memory(KEY, settings, summarizer=options.pop("summarizer", LedgerSummarizer()))


async def talked(memory: DistributedShortTermMemory, turns: Sequence[int]) -> None:
    for number in turns:
        await memory.add_turn(turn(number), turn_id=f"t{number}")
    await memory.flush()


async def stored(backend: Backend) -> Body:
    record = await backend.driver.load(RECORD)
    assert record is not None
    return backend.codec.open_body(record.body)


async def mark(backend: Backend) -> Transcript:
    transcript = (await stored(backend)).transcript
    assert transcript is not None
    return transcript


async def all_of(memory: DistributedShortTermMemory) -> list[TranscriptTurn]:
    return [one async for one in memory.each_turn()]


async def names(backend: Backend) -> list[str]:
    return list((await backend.driver.scan("acme:u1:page", limit=100)).names)


async def at_most(memory: DistributedShortTermMemory, count: int) -> None:
    """Wait until the record has so few turns."""

    async def few() -> bool:
        return len(await memory.turns()) <= count

    await until(few)


def said(turns: Sequence[TranscriptTurn]) -> list[str]:
    return [one.turn.user_message for one in turns]


# Reading


async def test_the_whole_conversation_can_be_read_after_folds(backend: Backend, small_pages: None) -> None:
    memory = memory_of(backend)
    await talked(memory, range(21))
    found = await all_of(memory)
    assert said(found) == [f"u{number}" for number in range(21)]
    assert [one.number for one in found] == [*range(21)]
    assert [one.id for one in found] == [f"t{number}" for number in range(21)]
    assert [one.turn.ts for one in found] == [1.0] * 21
    assert [one.summarized for one in found] == [True] * 19 + [False] * 2
    assert [one.retained for one in found] == [False] * 19 + [True] * 2
    assert said(await all_of(memory)) == said(found)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({}, range(11, 21)),
        ({"before": 11}, range(1, 11)),
        ({"before": 1}, range(1)),
        ({"before": 0}, range(0)),
        ({"after": -1}, range(10)),
        ({"after": 9}, range(10, 20)),
        ({"after": 20}, range(0)),
        ({"at": 8}, range(3, 13)),
        ({"at": 0}, range(10)),
        ({"before": 99}, range(11, 21)),
        ({"after": 99}, range(0)),
    ],
)
async def test_a_page_of_turns_is_asked_for_by_number(
    asked: dict[str, int], numbers: range, backend: Backend, small_pages: None
) -> None:
    memory = memory_of(backend)
    await talked(memory, range(21))
    page = await memory.transcript(**asked, limit=10)
    assert [one.number for one in page.turns] == [*numbers]
    assert said(page.turns) == [f"u{number}" for number in numbers]
    assert (page.oldest, page.newest, page.missing) == (0, 20, ())


async def test_a_conversation_without_pages_has_what_is_retained(backend: Backend) -> None:
    memory = memory_of(backend, config("truncation"))
    assert (await memory.transcript()).newest == -1
    assert await all_of(memory) == []
    await talked(memory, range(3))
    assert said((await memory.transcript(limit=2)).turns) == ["u1", "u2"]


async def test_what_cannot_be_asked_for_is_refused(backend: Backend) -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"before": 1, "after": 1},
        {"limit": 0},
        {"limit": 1_001},
        {"before": "x"},
        {"before": -1},
        {"after": 1.5},
        {"at": True},
    )
    for asked in refused:
        with pytest.raises(ConfigurationError):
            await memory_of(backend).transcript(**asked)
    with pytest.raises(ConfigurationError, match="limit must be an integer between 1 and 1,000"):
        await memory_of(backend).transcript(limit=2.5)  # type: ignore[arg-type]


async def test_a_page_of_many_turns_takes_three_requests(backend: Backend) -> None:
    memory = memory_of(backend, replace(KEPT, fold_batch_turns=50))
    await talked(memory, range(400))
    await indexed(backend)
    spy: Any = backend.driver.inner
    spy.calls.clear()
    page = await memory.transcript(before=300, limit=50)
    assert said(page.turns) == [f"u{number}" for number in range(250, 300)]
    assert spy.calls == [("load", "memory"), ("load", "page"), ("load", "page")]


def test_the_facade_for_threads_reads_the_same() -> None:
    with sync.open_backend("memory://") as opened:
        memory = opened.memory(KEY, KEPT, summarizer=LedgerSummarizer())
        for number in range(9):
            memory.add_turn(turn(number))
        memory.flush()
        assert len([*memory.each_turn(after=None)]) == 9
        assert said([*memory.each_turn(after=2)]) == [f"u{number}" for number in range(3, 9)]
        assert said(memory.transcript(before=2).turns) == ["u0", "u1"]


@UNREADABLE
async def test_pages_are_sealed_and_transformed_as_all_else(
    options: dict[str, Any], small_pages: None
) -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store), **options) as opened:
        memory = memory_of(opened)
        await talked(memory, range(9))
        assert said(await all_of(memory)) == [f"u{number}" for number in range(9)]
    everything = stored_in_pages(store)
    assert everything
    assert b"u3" not in everything


# What is stored


async def test_the_body_says_in_few_bytes_what_pages_there_are(backend: Backend) -> None:
    memory = memory_of(backend)
    await memory.add_turn(turn(0), turn_id="t0")
    record = await backend.driver.load(RECORD)
    await talked(memory, range(1, 7))
    transcript = await mark(backend)
    assert record is not None
    assert transcript == Transcript(record.version, base=5, last=digest("t4"))
    without = Codec().seal_body(Body())
    assert len(Codec().seal_body(Body(transcript=transcript))) - len(without) < 90


async def test_a_complete_page_is_rewritten_as_one_body(backend: Backend, small_pages: None) -> None:
    await talked(memory_of(backend), range(9))
    epoch = (await mark(backend)).epoch
    full = await backend.driver.load(keys.page_key(RECORD, epoch, 0))
    growing = await backend.driver.load(keys.page_key(RECORD, epoch, 1))
    assert full is not None
    assert growing is not None
    assert full.body is not None
    assert full.tail == ()
    assert growing.body is None
    assert growing.tail
    content = Codec([Preset()]).open("page", full.body)
    assert (content["first"], content["summary"], content["upto"]) == (0, "", 0)
    assert [one["turn_id"] for one in content["turns"]] == ["t0", "t1", "t2", "t3"]
    first = Codec([Preset()]).open("page", growing.tail[0])
    assert (first["first"], first["prev"]) == (4, digest("t3"))
    assert first["upto"] == len(covered(first["summary"])) > 0


async def test_only_what_stays_is_compressed_as_small_as_possible(small_pages: None) -> None:
    driver = MemoryDriver()
    await driver.open()
    words = ["".join(random.Random(seed).choices("abcdefgh", k=6)) for seed in range(300)]
    said = [turn(number, " ".join(random.Random(number).choices(words, k=800))) for number in range(4)]
    left = [Leaving(f"t{n}", encode_turn(StoredTurn(f"t{n}", one))) for n, one in enumerate(said)]
    store, where = Pages(driver, Codec()), keys.page_key(RECORD, "e", 0)
    await store.put(RECORD, Transcript("e"), left, summary="", ttl=None)
    growing = await driver.load(where)
    await store.complete(RECORD, Transcript("e"), left)
    full = await driver.load(where)
    assert growing is not None
    assert full is not None
    (entry,), smallest = growing.tail, Codec([Preset()])
    content = smallest.open("page", entry)
    assert len(entry) > len(smallest.seal("page", content))
    assert full.body == smallest.seal("page", smallest.open("page", full.body or b""))


async def test_a_checkpoint_says_what_its_summary_covers(backend: Backend, small_pages: None) -> None:
    await talked(memory_of(backend), range(5))
    await talked(memory_of(backend, replace(KEPT, fold_batch_turns=6)), range(5, 11))
    transcript = await mark(backend)
    assert transcript.base == 9
    for page, upto in (1, 3), (2, 3):
        start = page * pages.TURNS
        copies = await Pages(backend.driver, backend.codec).between(
            RECORD, transcript, start, start + pages.TURNS
        )
        notes = copies[4 * page].notes
        assert (notes["upto"], covered(notes["summary"])) == (upto, [f"u{number}" for number in range(upto)])


async def test_fields_that_a_newer_version_wrote_survive(backend: Backend) -> None:
    memory = memory_of(backend)
    await talked(memory, range(3))
    record = await backend.driver.load(RECORD)
    assert record is not None
    body = json.loads((record.body or b"").partition(b"\n")[2])
    body["transcript"]["newer"] = {"a": 1}
    data = backend.codec.seal("body", body)
    assert await backend.driver.replace(RECORD, data, version="v", expect=record.version, ttl=KEEP)
    entry = backend.codec.seal("turn", {"turn_id": "t3", "user_message": "u3", "newer": 2})
    await backend.driver.append(RECORD, entry, initial_version="v", ttl=None)
    await talked(memory, range(4, 7))
    transcript = await mark(backend)
    assert (transcript.base, transcript.extra) == (5, {"newer": {"a": 1}})
    page = await backend.driver.load(keys.page_key(RECORD, transcript.epoch, 0))
    assert page is not None
    kept = [one for data in page.tail for one in Codec([Preset()]).open("page", data)["turns"]]
    assert {"turn_id": "t3", "user_message": "u3", "newer": 2} in kept


async def test_what_an_older_version_dropped_is_counted_and_reported(backend: Backend) -> None:
    memory = memory_of(backend)
    await talked(memory, range(5))
    before = await mark(backend)
    assert before.base == 3
    # An older version keeps the field, and drops turns as it always did.
    record = await backend.driver.load(RECORD)
    assert record is not None
    body = await stored(backend)
    forgotten = body.forgotten.adding(["t3", "t4"], now=0.0, keep_for=1.0)
    data = backend.codec.seal_body(replace(body, forgotten=forgotten))
    assert await backend.driver.replace(RECORD, data, version="v", expect=record.version, drop=2, ttl=KEEP)
    await talked(memory, range(5, 9))
    page = await memory.transcript()
    assert [(one.number, one.id) for one in page.turns] == [
        *((number, f"t{number}") for number in (0, 1, 2, 5, 6, 7, 8))
    ]
    assert page.missing == (3, 4)
    assert page.newest == 8
    assert [one.id for one in await all_of(memory)] == [one.id for one in page.turns]


@pytest.mark.parametrize("strategy", ["rolling_summary", "truncation"])
async def test_what_was_cut_before_keeps_its_numbers(strategy: str) -> None:
    store = MemoryStore()
    cut = config(strategy=strategy)
    async with Backend(MemoryDriver(store)) as one:
        await talked(memory := memory_of(one, cut), range(12))
        await at_most(memory, 4)
        page = await memory.transcript()
        first = page.oldest
        assert (said(page.turns)[0], page.newest) == (f"u{first}", 11)
    async with Backend(MemoryDriver(store)) as two:
        await talked(memory := memory_of(two), range(12, 150))
        found = await all_of(memory)
        assert [one.number for one in found] == [*range(first, 150)]
        assert said(found) == [f"u{number}" for number in range(first, 150)]
        assert ((await mark(two)).first, (await memory.transcript()).oldest) == (first, first)


async def read_by_one_that_never_folds(strategy: str) -> tuple[list[str], list[str]]:
    """Return what one process can read after others took turns out, and what was added since it first read.

    It keeps a transcript, and the others do not.
    """
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as one, Backend(MemoryDriver(store)) as two:
        await talked(cutting := memory_of(one, config(strategy=strategy)), range(6))
        await at_most(cutting, 4)
        assert (await stored(one)).transcript is None
        await (keeping := memory_of(two)).get_llm_context()
        await keeping.flush()
        first = (await keeping.transcript()).oldest
        assert first > 0
        await talked(cutting, range(6, 20))
        await at_most(cutting, 4)
        return said(await all_of(keeping)), [f"u{number}" for number in range(first, 20)]


@pytest.mark.parametrize("strategy", ["rolling_summary", "truncation"])
async def test_a_process_that_never_folds_has_others_keep_the_transcript(strategy: str) -> None:
    found, added = await read_by_one_that_never_folds(strategy)
    assert found == added


@pytest.mark.parametrize("strategy", ["rolling_summary", "truncation"])
async def test_a_process_that_makes_no_mark_is_noticed(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "or_mark", lambda step, snapshot: step)
    found, added = await read_by_one_that_never_folds(strategy)
    assert len(found) < len(added)


async def test_a_conversation_that_all_processes_keep_takes_no_write_for_its_mark() -> None:
    async with Backend(spy := SpyDriver(MemoryDriver())) as backend:
        memory = memory_of(backend)
        await memory.add_turn(turn(0))
        await memory.get_llm_context()
        await memory.flush()
        assert spy.count("replace") == 0


async def test_a_record_without_room_for_its_mark_is_left_as_it_is() -> None:
    class Full(MemoryDriver):
        is_full = False

        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            if self.is_full and key == RECORD:
                raise TooLarge("record", limit=1, size=2)
            return await super().replace(key, body, **options)

    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as one:
        await talked(memory_of(one, config()), range(6))
    full = Full(store)
    async with Backend(spy := SpyDriver(full)) as two:
        full.is_full = True
        memory = memory_of(two)
        for _ in range(3):
            await memory.get_llm_context()
            await memory.flush()
        assert spy.count("replace") == 1


async def test_once_kept_a_transcript_is_kept_whatever_the_settings(backend: Backend) -> None:
    await talked(memory_of(backend), range(5))
    other = Backend(backend.driver)
    memory = memory_of(other, config())
    await talked(memory, range(5, 9))
    assert said(await all_of(memory)) == [f"u{number}" for number in range(9)]


async def test_pages_live_as_long_as_their_record() -> None:
    now = 1_000.0
    store = MemoryStore()
    async with Backend(MemoryDriver(store, clock=lambda: now)) as opened:
        memory = memory_of(opened, config(transcript=True, transcript_ttl_s=60.0))
        await talked(memory, range(5))
        assert len(await names(opened)) == 1
        now += 61.0
        assert await names(opened) == []
        assert (await memory.transcript()).newest == -1


async def test_the_oldest_turn_is_the_first_whose_page_has_not_expired(small_pages: None) -> None:
    now = 1_000.0
    async with Backend(MemoryDriver(clock=lambda: now)) as opened:
        memory = memory_of(opened, config(transcript=True, transcript_ttl_s=60.0))
        for begin in range(0, 40, 10):
            await talked(memory, range(begin, begin + 10))
            await memory.flush()
            now += 25.0
        there = [one.number for one in await all_of(memory)]
        assert 0 < there[0] < there[-1] == 39
        assert there == [*range(there[0], 40)]
        page = await memory.transcript(after=-1, limit=3)
        assert [one.number for one in page.turns] == there[:3]
        assert (page.oldest, page.missing) == (there[0], ())
        # A user who scrolls up comes to the end at once.
        above = await memory.transcript(before=there[0], limit=3)
        assert (above.turns, above.oldest, above.newest) == ((), there[0], 39)


async def test_a_conversation_is_listed_as_long_as_its_record() -> None:
    now = 1_000.0
    async with Backend(MemoryDriver(clock=lambda: now)) as opened:
        await talked(memory_of(opened, config(transcript=True, transcript_ttl_s=60.0)), range(5))
        await touched(opened, KEY)
        now += 61.0
        assert (await opened.conversations.list("acme", "u1")).cards == ()


async def test_large_turns_spill_to_other_records_of_their_page() -> None:
    driver = MemoryDriver(max_record_bytes=15_000, max_entry_bytes=9_000)
    await driver.open()
    memory = DistributedShortTermMemory(driver, KEY, KEPT, summarizer=LedgerSummarizer())
    large = [turn(number, random_text(number)) for number in range(9)]
    for number, one in enumerate(large):
        await memory.add_turn(one, turn_id=f"t{number}")
    await memory.flush()
    assert [one.turn for one in await all_of(memory)] == large
    assert any("." in name for name in (await driver.scan("acme:u1:page", limit=100)).names)


async def test_what_a_page_spills_to_is_read_after_the_page_has_expired(small_pages: None) -> None:
    now = 1_000.0
    driver = MemoryDriver(max_record_bytes=6_000, clock=lambda: now)
    await driver.open()
    store, before = Pages(driver, Codec()), Transcript("e")
    for number in range(3):
        name = f"t{number}"
        one = Leaving(name, encode_turn(StoredTurn(name, turn(number, random_text(number)))))
        await store.put(RECORD, before, [one], summary="", ttl=60.0)
        before = before.moved([name], summarized=True)
        now += 25.0
    now += 15.0
    assert len((await driver.scan("acme:u1:page", limit=9)).names) == 1
    assert [*await read_units(store, RECORD, before, 0, 3)] == [2]


def random_text(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=3_500))


async def test_turns_that_are_too_large_for_one_entry_go_in_several(backend: Backend) -> None:
    driver = MemoryDriver(max_entry_bytes=9_000)
    await driver.open()
    transcript = Transcript("e")
    leaving = [Leaving(f"t{n}", encode_turn(StoredTurn(f"t{n}", turn(n, random_text(n))))) for n in range(12)]
    await Pages(driver, Codec()).put(RECORD, transcript, leaving, summary="s", ttl=None)
    after = transcript.moved([one.id for one in leaving], summarized=True)
    found = await read_units(Pages(driver, Codec()), RECORD, after, 0, 12)
    assert [one.id for one in found.values()] == [f"t{n}" for n in range(12)]


async def test_a_turn_that_has_no_room_beside_a_checkpoint_is_stored_without_it() -> None:
    driver = MemoryDriver(max_entry_bytes=4_000)
    await driver.open()
    store, left = (
        Pages(driver, Codec()),
        Leaving("t0", encode_turn(StoredTurn("t0", turn(0, random_text(0))))),
    )
    await store.put(RECORD, Transcript("e"), [left], summary=random_text(1), ttl=None)
    copies = await store.between(RECORD, Transcript("e", base=1, last=digest("t0")), 0, 1)
    assert copies[0].turn["turn_id"] == "t0"
    assert copies[0].notes == {}


def leaving(*ids: str) -> list[Leaving]:
    return [Leaving(one, encode_turn(StoredTurn(one, turn(one)))) for one in ids]


@pytest.mark.parametrize("newest_first", [False, True])
async def test_of_several_copies_the_highest_revision_counts(newest_first: bool) -> None:
    driver = MemoryDriver()
    await driver.open()
    store = Pages(driver, Codec())
    old, new = Transcript("e"), Transcript("e", rev=1)
    batches = [(old, leaving("a", "b", "c")), (new, leaving("a", "x", "y"))]
    for transcript, turns in batches[::-1] if newest_first else batches:
        await store.put(RECORD, transcript, turns, summary="", ttl=None)
    found = await read_units(store, RECORD, replace(new, base=3, last=digest("y")), 0, 3)
    assert [one.id for one in found.values()] == ["a", "x", "y"]


async def test_of_copies_that_differ_those_of_the_record_count() -> None:
    driver = MemoryDriver()
    await driver.open()
    store = Pages(driver, Codec())
    # The second process had acknowledged turns that the datastore lost, and stored them last.
    await store.put(RECORD, Transcript("e"), leaving("a", "b", "c"), summary="", ttl=None)
    await store.put(RECORD, Transcript("e"), leaving("a", "x", "y"), summary="", ttl=None)
    found = await read_units(store, RECORD, Transcript("e", base=3, last=digest("c")), 0, 3)
    assert [one.id for one in found.values()] == ["a", "b", "c"]


async def test_rewriting_a_page_keeps_what_was_added_meanwhile(
    small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SpyDriver(MemoryDriver())
    await driver.open()
    store = Pages(driver, Codec())
    await store.put(RECORD, Transcript("e"), leaving("a", "b", "c", "d"), summary="", ttl=None)
    fold = ledger.fold

    async def later(*given: Any, **options: Any) -> bool:
        turns = leaving("x", "y")
        await store.put(RECORD, Transcript("e", base=2, rev=1), turns, summary="", ttl=None)
        return await fold(*given, **options)

    monkeypatch.setattr(ledger, "fold", later)
    assert await store.compact(RECORD, "e", 0, {})
    found = await read_units(store, RECORD, Transcript("e", base=4, rev=1), 0, 4)
    assert [one.id for one in found.values()] == ["a", "b", "x", "y"]


async def test_rewriting_a_page_does_not_bring_it_back(
    small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = MemoryDriver()
    await driver.open()
    store = Pages(driver, Codec())
    await store.put(RECORD, Transcript("e"), leaving("a", "b", "c", "d"), summary="", ttl=None)
    fold = ledger.fold

    async def erased(*given: Any, **options: Any) -> bool:
        assert await pages.erase(driver, RECORD) == 1
        return await fold(*given, **options)

    monkeypatch.setattr(ledger, "fold", erased)
    assert not await store.compact(RECORD, "e", 0, {})
    assert (await driver.scan("acme:u1:page", limit=9)).names == ()


async def test_an_unreadable_page_is_an_error_and_no_hole(backend: Backend) -> None:
    memory = memory_of(backend)
    await talked(memory, range(5))
    where = keys.page_key(RECORD, (await mark(backend)).epoch, 0)
    for data in (b"x", Codec().seal("page", {"first": 0}), Codec().seal("page", {"first": 0, "turns": [{}]})):
        await backend.driver.replace(where, data, version="v", expect=ANY, ttl=None)
        with pytest.raises(Corrupt):
            await memory.transcript()


async def test_what_was_put_into_pages_is_not_held_in_memory_twice(backend: Backend) -> None:
    spy: Any = backend.driver.inner
    shared = SharedConversation(backend.driver, RECORD, backend.codec, lambda: 0.0, lambda _: None)
    one = StoredTurn("only here", turn(0))
    await shared.append(one, backend.codec.seal_turn(one), ttl=None)
    snapshot = (await shared.load("test")).transcribed()
    before = snapshot.body.transcript
    assert before is not None

    async def away(_: Key | str) -> None:
        raise Unavailable("the datastore is away")

    spy.before["replace"] = [away]
    body = replace(snapshot.body, transcript=before.moved(["only here"], summarized=True))
    with pytest.raises(Unavailable):
        await shared.replace(snapshot, body, drop=1)
    gc.collect()
    assert not [held for held in gc.get_objects() if isinstance(held, Leaving) and held.id == "only here"]


async def test_turns_are_put_into_pages_again_before_those_may_expire() -> None:
    now = 1_000.0
    spy = SpyDriver(MemoryDriver(clock=lambda: now))
    await spy.open()
    shared = SharedConversation(spy, RECORD, Codec(), lambda: now, lambda _: None)
    shared.archive.ttl = 60.0

    async def added(turn_id: str) -> None:
        one = StoredTurn(turn_id, turn(turn_id))
        await shared.append(one, Codec().seal_turn(one), ttl=60.0)

    async def away(_: Key | str) -> None:
        raise Unavailable("the datastore is away")

    for turn_id in ("t0", "t1", "t2"):
        await added(turn_id)
    snapshot = (await shared.load("test")).transcribed()
    before = snapshot.body.transcript
    assert before is not None
    body = replace(snapshot.body, transcript=before.moved(["t0", "t1"], summarized=True))
    spy.before["replace"] = [away, away]
    for _ in range(2):
        with pytest.raises(Unavailable):
            await shared.replace(snapshot, body, drop=2)
    assert spy.count("append", "page") == 1
    now += 50.0
    await added("t3")
    now += 20.0
    # The pages have expired, and the record has not.
    assert (await spy.scan("acme:u1:page", limit=9)).names == ()
    assert await shared.replace(snapshot, body, drop=2)
    after = (await shared.load("test")).body.transcript
    assert after is not None
    assert [*await read_units(shared.archive.pages, RECORD, after, 0, 2)] == [0, 1]


# Outages of a model

DOWN = replace(KEPT, retry_attempts=0, recovery_backlog_limit=1, degraded_retry_interval_s=3_600.0)
TRYING = replace(DOWN, degraded_retry_interval_s=0.0)


async def outage(backend: Backend, numbers: Sequence[int] = range(9)) -> None:
    """Add turns to a new conversation in another process, where no model is there: they move to pages."""
    summarizer = LedgerSummarizer()
    summarizer.fail = 1
    memory = memory_of(Backend(backend.driver), DOWN, summarizer=summarizer)
    await talked(memory, numbers)
    await at_most(memory, 3)
    assert (await mark(backend)).gap == 0
    await memory.close()


async def caught_up(backend: Backend, memory: DistributedShortTermMemory) -> None:
    """Wait until summaries cover all turns that are not recent."""

    async def done() -> bool:
        await memory.flush()
        return (await mark(backend)).gap is None

    await until(done)
    await memory.flush()


async def test_a_model_that_is_down_loses_no_turn(small_pages: None) -> None:
    now, summarizer = 1_000.0, LedgerSummarizer()
    summarizer.fail = 1
    settings = replace(KEPT, retry_attempts=0, recovery_backlog_limit=3, degraded_retry_interval_s=60.0)
    driver = MemoryDriver()
    await driver.open()
    memory = DistributedShortTermMemory(
        driver, KEY, replace(settings, fold_max_turns=7), summarizer=summarizer, clock=lambda: now
    )
    await talked(memory, range(30))
    await at_most(memory, 5)
    assert memory.health is MemoryHealth.DEGRADED
    assert memory.stats.dropped == 0
    assert not any(one.summarized for one in await all_of(memory))
    now += 61.0
    await memory.flush()
    assert memory.health is MemoryHealth.HEALTHY
    assert (await shown(memory))["summary"] == [f"u{number}" for number in range(28)]
    assert max(len(request["turns"]) for request in summarizer.requests) == 7
    found = await all_of(memory)
    assert said(found) == [f"u{number}" for number in range(30)]
    assert sum(one.summarized for one in found) == 28


async def test_a_tail_that_outgrows_summarizing_moves_to_pages() -> None:
    summarizer = LedgerSummarizer()
    summarizer.hold()
    driver = MemoryDriver()
    await driver.open()
    settings = replace(KEPT, fold_max_turns=5, recovery_backlog_limit=1)
    memory = DistributedShortTermMemory(driver, KEY, settings, summarizer=summarizer)
    for number in range(50):
        await memory.add_turn(turn(number))
    # The call that was running covers the oldest, and what came meanwhile is too much for the next ones.
    summarizer.release()
    await at_most(memory, 20)
    await memory.flush()
    assert memory.health is MemoryHealth.HEALTHY
    assert (await shown(memory))["summary"] == [f"u{number}" for number in range(48)]
    assert memory.stats.trimmed > 0
    assert said(await all_of(memory)) == [f"u{number}" for number in range(50)]


@pytest.mark.parametrize("gone", [1, 2])
async def test_turns_that_no_page_has_are_logged_once_and_stop_no_summary(
    gone: int, backend: Backend, small_pages: None, caplog: pytest.LogCaptureFixture
) -> None:
    await outage(backend)
    transcript = await mark(backend)
    assert (transcript.gap, transcript.base) == (0, 6)
    for page in range(gone):
        assert await backend.driver.delete(keys.page_key(RECORD, transcript.epoch, page))
    later = memory_of(Backend(backend.driver), TRYING)
    await caught_up(backend, later)
    lost = min(gone * pages.TURNS, transcript.base)
    assert (await shown(later))["summary"] == [f"u{number}" for number in range(lost, 7)]
    (message,) = [message for message in caplog.messages if "no summary covers" in message]
    assert message.startswith(f"{lost} of the turns 0 to 5 of a transcript are missing")


@pytest.mark.parametrize("whole", [False, True], ids=["an entry", "a record"])
async def test_a_damaged_page_does_not_stop_summarizing(
    whole: bool, backend: Backend, small_pages: None, caplog: pytest.LogCaptureFixture
) -> None:
    await outage(backend)
    page = keys.page_key(RECORD, (await mark(backend)).epoch, 0)
    if whole:
        await backend.driver.replace(page, b"damaged", version="v", expect=ANY, ttl=None)
    else:
        await backend.driver.append(page, b"damaged", initial_version="v", ttl=None)
    later = memory_of(Backend(backend.driver), TRYING)
    await caught_up(backend, later)
    assert (await shown(later))["summary"] == [f"u{number}" for number in range(4 if whole else 0, 7)]
    assert "a damaged page of a transcript" in caplog.text
    with pytest.raises(Corrupt):
        await later.transcript()


async def test_a_page_that_another_key_opens_is_not_passed_over(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await talked(memory_of(backend), range(9))
    transcript, codec = await mark(backend), Codec()
    archive = SharedConversation(backend.driver, RECORD, codec, lambda: 0.0, lambda _: None).archive

    def sealed(*_: object) -> object:
        raise KeyMismatch("it was sealed with another key")

    monkeypatch.setattr(Codec, "open", sealed)
    with pytest.raises(KeyMismatch):
        await archive.read_confirmed(transcript, 0, transcript.base)


class Demoted(WrapperDriver):
    """A former master of the pages, which lacks some of them until a write shows that it was replaced."""

    def __init__(self, inner: Driver, lacks: str) -> None:
        super().__init__(inner)
        self.lacks = lacks

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, shows_unconfirmed=True)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if isinstance(key, Key) and key.scope.endswith(":page"):
            if operation != "load":
                self.lacks = "nothing"
            elif key.name.endswith(self.lacks):
                return cast("T", None)
        return await send()


@pytest.mark.parametrize("lacks", ["", "1"], ids=["all pages", "one page"])
async def test_turns_that_a_server_does_not_show_are_no_hole(
    lacks: str, backend: Backend, small_pages: None
) -> None:
    settings = replace(KEPT, retry_attempts=0, recovery_backlog_limit=1, degraded_retry_interval_s=3_600.0)
    summarizer = LedgerSummarizer()
    summarizer.fail = 1
    memory = memory_of(backend, settings, summarizer=summarizer)
    await talked(memory, range(9))
    await at_most(memory, 3)
    other = Backend(Demoted(backend.driver, lacks))
    later = memory_of(other, TRYING)
    await caught_up(backend, later)
    assert (await shown(later))["summary"] == [f"u{number}" for number in range(7)]


async def test_a_summary_of_an_erased_conversation_is_not_stored_in_the_next(backend: Backend) -> None:
    await outage(backend)
    summarizer = LedgerSummarizer()
    summarizer.hold()
    memory = memory_of(backend, TRYING, summarizer=summarizer)
    await memory.get_llm_context()
    await summarizer.called.wait()
    assert await Backend(backend.driver).sessions.erase(KEY)
    await outage(backend, range(10, 19))
    summarizer.release()
    await caught_up(backend, memory)
    assert (await shown(memory))["summary"] == [f"u{number}" for number in range(10, 17)]


async def test_a_strategy_without_summaries_leaves_none_to_be_written(backend: Backend) -> None:
    await outage(backend)
    await talked(memory_of(backend, replace(KEPT, strategy="truncation")), range(9, 15))

    async def ended() -> bool:
        return (await mark(backend)).gap is None

    await until(ended)


# Erasure


async def test_an_erasure_leaves_no_page(backend: Backend, small_pages: None) -> None:
    other = MemoryKey("acme", "u1", "other")
    await talked(memory_of(backend), range(9))
    await talked(backend.memory(other, KEPT, summarizer=LedgerSummarizer()), range(9))
    receipt = await backend.sessions.erase_with_receipt("acme", "u1", "chat")
    assert receipt.erased["pages"] == 2
    assert receipt.complete
    assert len(await names(backend)) == 2
    assert await backend.sessions.erase_user("acme", "u1") == 1
    assert await names(backend) == []


@pytest.mark.parametrize("user", [False, True], ids=["conversation", "user"])
async def test_an_erasure_during_a_fold_leaves_no_page(user: bool, backend: Backend) -> None:
    spy: Any = backend.driver.inner

    async def erased(_: Key | str) -> None:
        # The turns are in their page, and the record is about to drop them.
        assert await names(backend)
        spy.before["replace"] = []
        await (backend.sessions.erase_user("acme", "u1") if user else backend.sessions.erase(KEY))

    async def nothing(_: Key | str) -> None:
        pass

    memory = memory_of(backend)
    for number in range(3):
        spy.before["replace"] = [nothing, erased]
        await memory.add_turn(turn(number))
    await memory.flush()
    assert await backend.driver.load(RECORD) is None

    async def late(_: Key | str) -> None:
        await backend.sessions.erase(KEY)

    # The erasure is over before the turns come to their page.
    for number in range(3):
        spy.before["replace"], spy.after["replace"] = [], [late]
        await memory.add_turn(turn(number))
    await memory.flush()
    assert await backend.driver.load(RECORD) is None
    assert await names(backend) == []


async def test_what_a_failure_leaves_of_an_erased_conversation_is_removed_later(backend: Backend) -> None:
    spy: Any = backend.driver.inner
    shared = SharedConversation(backend.driver, RECORD, backend.codec, lambda: 0.0, lambda _: None)
    for name in ("t0", "t1"):
        one = StoredTurn(name, turn(name))
        await shared.append(one, backend.codec.seal_turn(one), ttl=None)
    snapshot = (await shared.load("test")).transcribed()
    before = snapshot.body.transcript
    assert before is not None
    assert await backend.sessions.erase(KEY)
    body = replace(snapshot.body, transcript=before.moved(["t0"], summarized=True))
    assert not await shared.replace(snapshot, body, drop=1)
    assert len(await names(backend)) == 1

    async def away(_: Key | str) -> None:
        raise Unavailable("the datastore is away")

    async def load() -> Snapshot:
        return await shared.load("test")

    spy.before["scan"] = [away]
    with pytest.raises(Unavailable):
        await shared.archive.tidy(await load(), load)
    await shared.archive.tidy(await load(), load)
    assert await names(backend) == []


async def test_a_lost_race_alone_removes_no_page(backend: Backend) -> None:
    spy: Any = backend.driver.inner
    memory = memory_of(backend)

    async def other(_: Key | str) -> None:
        record = await backend.driver.load(RECORD)
        assert record is not None
        await ledger.replace(
            backend.driver, RECORD, ledger.Change(record.body or b"", version="w"), expect=record.version
        )

    async def nothing(_: Key | str) -> None:
        pass

    spy.before["replace"] = [nothing, other]
    await talked(memory, range(3))
    assert memory.stats.lost_races == 1
    assert said(await all_of(memory)) == ["u0", "u1", "u2"]
    assert (await mark(backend)).base == 1


async def test_an_answer_that_is_lost_stores_no_turn_twice(backend: Backend) -> None:
    spy: Any = backend.driver.inner

    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("the connection was cut")

    memory = memory_of(backend)
    for number in range(9):
        spy.after["replace"] = [lost, lost]
        await memory.add_turn(turn(number))
    await memory.flush()
    assert said(await all_of(memory)) == [f"u{number}" for number in range(9)]


async def test_no_import_takes_over_the_pages_of_another_record(backend: Backend) -> None:
    memory = memory_of(backend)
    await talked(memory, range(9))
    document = await backend.sessions.export(KEY, transcript=False)
    assert "transcript" not in document["body"]
    with_it = {**document, "body": {**document["body"], "transcript": {"epoch": "e", "base": 7}}}
    await backend.sessions.import_(with_it, on_conflict="replace")
    assert (await stored(backend)).transcript is None
    assert await names(backend) == []
    assert said(await all_of(memory)) == ["u7", "u8"]


# Purging

TRIMMED = ShortTermMemoryConfig(
    "truncation", budget=MemoryBudget(full_zone_turns=1, total_max_tokens=0), transcript=True
)


async def purged_before_each_write(backend: Backend, settings: object) -> tuple[list[str], list[bool]]:
    """Purge before each write of the record.

    Returns the whole conversation, and whether the body said so for each time at which there were pages.
    """
    spy: Any = backend.driver.inner
    moments: list[bool] = []

    async def purged(_: Key | str) -> None:
        if await names(backend):
            moments.append((await stored(backend)).transcript is not None)
        await backend.sessions.purge("acme", "u1")

    memory = memory_of(backend, settings)
    spy.before["replace"] = [purged] * 100
    for number in range(9):
        await talked(memory, [number])
        await at_most(memory, 2)
    return said(await all_of(memory)), moments


@pytest.mark.parametrize("settings", [KEPT, TRIMMED], ids=["folds", "trims"])
async def test_a_purge_during_folds_and_trims_removes_no_page(
    settings: object, backend: Backend, small_pages: None
) -> None:
    turns, moments = await purged_before_each_write(backend, settings)
    assert turns == [f"u{number}" for number in range(9)]
    # A trim takes no lease, so the pages come before the body that says so.
    assert moments.count(False) == (1 if settings is TRIMMED else 0)
    assert moments.count(True) > 2


async def test_a_purge_that_asks_the_body_alone_is_noticed(
    backend: Backend, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said_so(version: str | None, transcript: Transcript | None, epoch: str) -> bool:
        del version
        return transcript is not None and transcript.epoch == epoch

    monkeypatch.setattr(pages, "may_refer", said_so)
    turns, _ = await purged_before_each_write(backend, TRIMMED)
    assert turns != [f"u{number}" for number in range(9)]


async def test_a_purge_removes_the_pages_of_an_earlier_life(backend: Backend, small_pages: None) -> None:
    memory = memory_of(backend)
    await talked(memory, range(9))
    earlier = await names(backend)
    # As an erasure does that is killed before it comes to the pages.
    await backend.driver.delete(RECORD)
    await memory.add_turn(turn(20), turn_id="t20")
    assert (await backend.sessions.purge("acme", "u1", dry_run=True)).pages == len(earlier) == 2
    assert await names(backend) == earlier
    assert (await backend.sessions.purge("acme", "u1")).pages == 2
    assert await names(backend) == []
    await talked(memory, range(21, 29))
    assert (await backend.sessions.purge("acme", "u1")).pages == 0
    assert said(await all_of(memory)) == [f"u{number}" for number in range(20, 29)]


async def test_an_earlier_record_that_a_former_master_shows_removes_no_page(
    small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = MemoryDriver()
    monkeypatch.setattr(driver, "traits", replace(driver.traits, shows_unconfirmed=True))
    async with Backend(driver) as backend:
        memory = memory_of(backend)
        await memory.add_turn(turn(0), turn_id="t0")
        before = await backend.driver.load(RECORD)
        assert before is not None
        await talked(memory, range(1, 9))
        load, shown_before = driver.load, [replace(before, version="earlier")]

        async def loaded(key: Key, *, last: int | None = None) -> Any:
            return shown_before.pop() if key == RECORD and shown_before else await load(key, last=last)

        with monkeypatch.context() as patch:
            patch.setattr(driver, "load", loaded)
            assert (await backend.sessions.purge("acme", "u1")).pages == 0
        assert shown_before == []
        assert said(await all_of(memory)) == [f"u{number}" for number in range(9)]


async def test_an_erasure_removes_the_pages_of_every_life(backend: Backend, small_pages: None) -> None:
    memory = memory_of(backend)
    await talked(memory, range(9))
    await backend.driver.delete(RECORD)
    await talked(memory, range(20, 29))
    epochs = {keys.page_epoch(name) for name in await names(backend)}
    assert len(epochs) == 2
    receipt = await backend.sessions.erase_with_receipt("acme", "u1", "chat")
    assert (receipt.erased["pages"], receipt.complete) == (4, True)
    assert await names(backend) == []


# Settings


def test_the_memory_in_this_process_refuses_a_transcript() -> None:
    with pytest.raises(ConfigurationError, match="needs a shared memory"):
        DefaultShortTermMemory(config=KEPT, summarizer=LedgerSummarizer())


@pytest.mark.parametrize(
    "settings",
    [
        {"transcript_ttl_s": 1.0},
        {"transcript": True, "transcript_ttl_s": 0},
        {"transcript": True, "transcript_ttl_s": 2.0, "session_ttl_s": 1.0},
        {"transcript": "yes"},
    ],
)
def test_settings_that_would_lose_a_transcript_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="transcript"):
        config(**settings)


def test_a_record_lives_as_long_as_its_transcript() -> None:
    assert config(transcript=True, session_ttl_s=5.0).record_ttl_s == 5.0
    assert config(transcript=True, transcript_ttl_s=6.0).record_ttl_s == 6.0
    assert config(transcript=True).record_ttl_s is None


# Limits


@pytest.fixture
async def limited(small_pages: None) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(MemoryDriver()), limits=Limits(transcript_turns=6)) as opened:
        yield opened


async def test_beyond_its_limit_a_transcript_loses_its_oldest_turns(limited: Backend) -> None:
    memory = memory_of(limited)
    await talked(memory, range(40))
    found = await all_of(memory)
    assert [one.number for one in found if not one.retained] == [*range(32, 38)]
    assert (await memory.transcript(before=32)).turns == ()
    assert [keys.page_number(name) for name in await names(limited)] == [8, 9]


async def test_a_transcript_within_its_limit_loses_nothing(limited: Backend) -> None:
    memory = memory_of(limited)
    await talked(memory, range(8))
    assert [one.number for one in await all_of(memory)] == [*range(8)]


async def test_what_no_summary_covers_stays_beyond_the_limit(small_pages: None) -> None:
    now, summarizer = 1_000.0, LedgerSummarizer()
    summarizer.fail = 1
    settings = replace(KEPT, retry_attempts=0, recovery_backlog_limit=3, degraded_retry_interval_s=60.0)
    driver = MemoryDriver()
    await driver.open()
    memory = DistributedShortTermMemory(
        driver,
        KEY,
        replace(settings, fold_max_turns=7),
        summarizer=summarizer,
        guard=Guard(Limits(transcript_turns=6)),
        clock=lambda: now,
    )
    await talked(memory, range(30))
    await at_most(memory, 5)
    assert said(await all_of(memory)) == [f"u{number}" for number in range(30)]
    now += 61.0
    await memory.flush()
    assert (await shown(memory))["summary"] == [f"u{number}" for number in range(28)]
    assert [one.number for one in await all_of(memory)] == [*range(22, 30)]


async def test_a_page_that_could_not_be_removed_goes_with_the_next(limited: Backend) -> None:
    memory, driver = memory_of(limited), limited.driver
    await talked(memory, range(4))
    oldest = Key("acme:u1:page", (await names(limited))[0])
    await talked(memory, range(4, 14))
    assert oldest.name not in await names(limited)
    # What a process leaves that ends before it removes the page.
    await driver.replace(oldest, b"", version="v", expect=ANY, ttl=None)
    await talked(memory, range(14, 20))
    assert oldest.name not in await names(limited)


async def test_an_outage_as_a_page_is_removed_fails_no_summary(
    limited: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def down(*_: object) -> int:
        raise Unavailable("down", backend="memory", operation="scan")

    monkeypatch.setattr(Shortening, "removed_below", down)
    memory = memory_of(limited)
    await talked(memory, range(20))
    assert (await shown(memory))["summary"] == [f"u{number}" for number in range(18)]
    assert [one.number for one in await all_of(memory)] == [*range(12, 20)]
    assert "could not remove the oldest pages" in caplog.text


async def test_a_limit_takes_three_requests_for_a_page_that_goes() -> None:
    asked = dict[int | None, list[tuple[str, str]]]()
    for most in (None, 100):
        spy = SpyDriver(MemoryDriver())
        async with Backend(spy, limits=Limits(transcript_turns=most)) as opened:
            memory = memory_of(opened, replace(KEPT, fold_batch_turns=16))
            await talked(memory, range(200))
            spy.calls.clear()
            await talked(memory, range(200, 264))
            asked[most] = [call for call in spy.calls if call[0] in ("scan", "delete")]
    assert asked[None] == []
    assert asked[100] == [("scan", "page"), ("delete", "page"), ("scan", "part")]


@pytest.mark.parametrize("shows_unconfirmed", [False, True])
async def test_the_first_turns_that_leave_a_full_record_are_where_it_says(shows_unconfirmed: bool) -> None:
    driver = MemoryDriver(max_record_bytes=20_000)
    driver.traits = replace(driver.traits, shows_unconfirmed=shows_unconfirmed)
    async with Backend(driver) as backend:
        memory = memory_of(backend, config("truncation", 60, transcript=True, total_max_tokens=0))
        said = [f"u{number}" + "x" * 150 for number in range(100)]
        for number, one in enumerate(said):
            await memory.add_turn(ConversationTurn(one, "ok"), turn_id=f"t{number}")
        await memory.flush()
        assert (await backend.sessions.purge("acme")).pages == 0
        assert [one.turn.user_message for one in await all_of(memory)] == said
