"""Searches by the index: they read what may match, and find what a search of everything finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConversationTurn,
    Limits,
    MemoryKey,
    Sealing,
    SessionNotFound,
    ShortTermMemoryConfig,
    StaticKeys,
)
from stm_backends.admin import searching
from stm_backends.admin.copying import Copy, Owner
from stm_backends.catalogue import word_index
from stm_backends.catalogue.portions import Logged, Portion, masks_of
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records import keys, operations, pages
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.mutants.searching import MISTAKES
from tests.support.catalogue import indexed as index_written
from tests.support.catalogue import touched

IDS = ("acme", "u1")
KEPT = config(zone=2, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)
SCOPE = keys.scope(*IDS, "words")


@pytest.fixture(autouse=True)
def settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations count as settled as soon as they are indexed; a test that adds to one moves its card."""
    monkeypatch.setattr(searching, "SETTLED_S", -4 * 3_600)


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as opened:
        yield opened


def key_of(session: str) -> MemoryKey:
    return MemoryKey(*IDS, session)


async def talked(
    backend: Backend, session: str, *said: str, settings: Any = KEPT, key: MemoryKey | None = None
) -> MemoryKey:
    key = key or key_of(session)
    memory = backend.memory(key, settings, summarizer=LedgerSummarizer() if settings.transcript else None)
    for text in said:
        await memory.add_turn(ConversationTurn(text, "noted"))
    await memory.flush()
    await touched(backend, key)
    return key


async def found(backend: Backend, words: str, owner: tuple[str, str] = IDS) -> dict[str, list[int | None]]:
    """Return the numbers of the matches, by the conversation; titles and summaries have none."""
    some, after = dict[str, list[int | None]](), None
    while True:
        results = await backend.conversations.search(*owner, words, after=after)
        for one in results.found:
            some[one.card.key.session_id] = [match.number for match in one.matches]
        if (after := results.after) is None:
            return some


async def places_of(backend: Backend, words: str) -> list[str]:
    """Return where the newest conversation that is found has words."""
    results = await backend.conversations.search(*IDS, words)
    return [match.where for one in results.found[:1] for match in one.matches]


async def indexed(backend: Backend, owner: tuple[str, str] = IDS) -> set[str]:
    """Search, and wait until what was read is indexed; returns the cards in the index that are settled."""
    await found(backend, "nothing", owner)
    await index_written(backend)
    known = await index_of(backend, owner).find(frozenset())
    return {card for card, some in known.items() if any(one.portion.settled for one in some)}


def index_of(backend: Backend, owner: tuple[str, str] = IDS) -> WordIndex:
    return WordIndex(backend.driver, backend.codec, backend.directory, owner)


async def words_known(backend: Backend, word: str, owner: tuple[str, str] = IDS) -> set[str]:
    """Return the cards of which the index has a word."""
    known = await index_of(backend, owner).find(frozenset([word]))
    return {card for card, some in known.items() if any(one.bits for one in some)}


async def numbers_known(backend: Backend, word: str, card: str) -> list[int]:
    """Return the numbers that the index has for a word, each as often as it has it."""
    known = (await index_of(backend).find(frozenset([word])))[card]
    return sorted(number for one in known for number in one.portion.numbers_in(one.bits))


def calls_of(backend: Backend) -> list[Any]:
    driver: Any = backend.driver
    while not isinstance(driver, SpyDriver):
        driver = driver.inner
    return driver.calls


async def test_a_search_reads_only_what_has_the_words_once_it_is_indexed(backend: Backend) -> None:
    for number in range(30):
        await talked(backend, f"chat {number:02}", f"hello own{number}", "shared word")
    assert len(await indexed(backend)) == 30
    before = len(calls_of(backend))
    assert await found(backend, "own7") == {"chat 07": [None, 0]}
    loads = [scope for operation, scope in calls_of(backend)[before:] if operation == "load"]
    assert sorted(loads) == ["card", "memory", "words"]
    assert len(await found(backend, "shared")) == 30


async def test_pages_are_read_where_the_words_are(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    await talked(backend, "long", *(f"turn{number} said" for number in range(40)))
    await indexed(backend)
    before = len(calls_of(backend))
    assert 17 in (await found(backend, "turn17"))["long"]
    assert calls_of(backend)[before:].count(("load", "page")) == 1
    for number in range(40):
        assert number in (await found(backend, f"turn{number}"))["long"]


async def test_what_is_said_after_it_was_indexed_is_found(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SETTLED_S", 2 * 3_600)
    internals: Any = backend
    catalogue, passed = internals._catalogue, 0.0  # noqa: SLF001 -- a backend has no clock of its own
    catalogue.clock = lambda: time.time() + passed
    await talked(backend, "chat", "first word")
    assert await indexed(backend) == set()
    passed = 4 * 3_600.0
    assert await indexed(backend) == {"chat"}
    await talked(backend, "chat", "second word")
    await backend.conversations.rebuild(*IDS)
    card = await catalogue.touch(key_of("chat"), at=catalogue.clock())
    assert card is not None
    for _ in range(2):
        assert 1 in (await found(backend, "second"))["chat"]
        assert 0 in (await found(backend, "first"))["chat"]
        passed = 8 * 3_600.0
        assert await indexed(backend) == {"chat"}


async def test_a_title_that_is_set_later_is_found(backend: Backend) -> None:
    key = await talked(backend, "chat", "hello")
    await indexed(backend)
    await backend.conversations.update(key, title="Portugal in spring")
    assert await found(backend, "portugal") == {"chat": [None]}
    await backend.conversations.update(key, title="Spain")
    assert not await found(backend, "portugal")
    assert await found(backend, "spain") == {"chat": [None]}


async def test_a_title_is_found_as_it_is_shown_whoever_gave_it(backend: Backend) -> None:
    async def naming(request: Any, /) -> Any:
        return {**await LedgerSummarizer()(request), "title": "Portugal in spring"}

    key = key_of("chat")
    memory = backend.memory(key, KEPT, summarizer=naming)
    for text in ("hello", "one", "two"):
        await memory.add_turn(ConversationTurn(text, "noted"))
    await memory.flush()
    await touched(backend, key)
    await backend.conversations.rebuild(*IDS)
    assert await indexed(backend) == {"chat"}
    assert "title" in await places_of(backend, "portugal")
    await backend.conversations.update(key, title="Spain")
    await index_of(backend).forget(keys.card_key(key).name)
    assert await indexed(backend) == {"chat"}
    await backend.conversations.update(key, title="")
    assert "title" in await places_of(backend, "portugal")


@asynccontextmanager
async def held_up() -> AsyncGenerator[asyncio.Event]:
    """Within, a process that indexes waits before its write; the event says that it does."""
    waits, goes_on = asyncio.Event(), asyncio.Event()
    add = WordIndex.add

    async def late(self: WordIndex, logged: Any) -> None:
        waits.set()
        await goes_on.wait()
        await add(self, logged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WordIndex, "add", late)
        yield waits
        goes_on.set()


async def test_a_conversation_that_is_erased_while_it_is_indexed_leaves_no_word(backend: Backend) -> None:
    key = await talked(backend, "chat", "secret")
    async with held_up() as waits:
        await found(backend, "nothing")
        await waits.wait()
        await backend.sessions.erase(key)
    await indexed(backend)
    assert not await words_known(backend, "secret")


async def test_the_tags_of_a_summary_are_no_words(backend: Backend) -> None:
    await talked(backend, "chat", *(f"say{number}" for number in range(9)))
    assert await indexed(backend)
    assert await words_known(backend, "say0")
    assert not await words_known(backend, "session")


# The promises that a mutant breaks


async def what_is_erased_leaves_no_word_in_the_index(backend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(word_index, "PORTIONS", 2)
    for number in range(5):
        await talked(backend, f"chat{number}", f"secret{number} shared")
    await indexed(backend)
    await backend.sessions.erase(key_of("chat1"))
    assert not await words_known(backend, "secret1")
    assert len(await found(backend, "shared")) == 4
    receipt = await backend.sessions.erase_with_receipt(*IDS)
    assert receipt.complete
    assert not [name async for name in operations.names(backend.driver, SCOPE)]


async def a_page_is_indexed_once_as_a_fold_fills_it(backend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages, "TURNS", 4)
    patch.setattr(searching, "TURNS", 4)
    for start in range(0, 20, 5):
        await talked(backend, "long", *(f"turn{number} said" for number in range(start, start + 5)))
        await index_written(backend)
    assert await words_known(backend, "turn15") == {"long"}
    assert not await words_known(backend, "turn19")
    for numbers in (range(16), range(20)):
        assert await numbers_known(backend, "said", "long") == [*numbers]
        await indexed(backend)


async def a_portion_that_an_erasure_has_left_hides_nothing(
    backend: Backend, patch: pytest.MonkeyPatch
) -> None:
    del patch
    await talked(backend, "chat", *(f"turn{number} said" for number in range(9)))
    stale = Portion("chat", "an earlier life", 0, 0, 9)
    await index_of(backend).add(Logged(stale, masks_of(["secret"] * 9)))
    assert not await found(backend, "secret")
    assert 0 in (await found(backend, "turn0"))["chat"]
    await indexed(backend)
    assert not await words_known(backend, "secret")


async def a_conversation_that_begins_again_meanwhile_has_its_own_words(
    backend: Backend, patch: pytest.MonkeyPatch
) -> None:
    del patch
    key = await talked(backend, "chat", "secret word")
    async with held_up() as waits:
        await found(backend, "nothing")
        await waits.wait()
        await backend.sessions.erase(key)
        await talked(backend, "chat", "another word")
    await index_written(backend)
    assert not await words_known(backend, "secret")
    assert 0 in (await found(backend, "another"))["chat"]


async def a_title_that_is_set_while_its_conversation_is_erased_leaves_no_word(
    backend: Backend, patch: pytest.MonkeyPatch
) -> None:
    key = await talked(backend, "chat", "hello")
    add = WordIndex.add

    async def late(self: WordIndex, logged: Any) -> None:
        await backend.sessions.erase(key)
        await add(self, logged)

    patch.setattr(WordIndex, "add", late)
    with pytest.raises(SessionNotFound):
        await backend.conversations.update(key, title="secret")
    assert not await words_known(backend, "secret")


async def searches_at_once_index_a_conversation_once(backend: Backend, patch: pytest.MonkeyPatch) -> None:
    del patch
    key = await talked(backend, "chat", "secret")
    async with held_up() as waits:
        await found(backend, "nothing")
        await waits.wait()
        await found(backend, "nothing")
    await indexed(backend)
    known = await index_of(backend).find(frozenset())
    assert len(known[keys.card_key(key).name]) == 1


CHECKS = {
    check.__name__: check
    for check in (
        what_is_erased_leaves_no_word_in_the_index,
        a_page_is_indexed_once_as_a_fold_fills_it,
        a_portion_that_an_erasure_has_left_hides_nothing,
        a_conversation_that_begins_again_meanwhile_has_its_own_words,
        a_title_that_is_set_while_its_conversation_is_erased_leaves_no_word,
        searches_at_once_index_a_conversation_once,
    )
}


@pytest.mark.parametrize("check", CHECKS)
async def test_the_index_keeps_what_it_promises(
    check: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await CHECKS[check](backend, monkeypatch)


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mutant_of_the_index_is_rejected(
    mistake: Callable[[pytest.MonkeyPatch], None], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await CHECKS[MISTAKES[mistake]](backend, monkeypatch)


# Pages that folds fill


async def test_neither_turns_nor_folds_wait_for_the_index(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    async with held_up() as waits:
        await talked(backend, "long", *(f"turn{number}" for number in range(20)))
        await waits.wait()
        assert 3 in (await found(backend, "turn3"))["long"]
        assert not await words_known(backend, "turn3")


async def test_closing_indexes_the_pages_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as backend:
        memory = backend.memory(key_of("long"), KEPT, summarizer=LedgerSummarizer())
        for number in range(20):
            await memory.add_turn(ConversationTurn(f"turn{number}", "noted"))
        await memory.flush()
    async with Backend(MemoryDriver(store)) as backend:
        assert await words_known(backend, "turn3") == {"long"}


async def test_pages_that_a_limit_will_drop_are_not_indexed_by_folds(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    async with Backend(driver, limits=Limits(transcript_turns=1_000), close_timeout_s=0.2) as backend:
        await talked(backend, "long", *(f"turn{number}" for number in range(20)))
        await index_written(backend)
        assert not await words_known(backend, "turn3")


async def test_pages_that_expire_are_not_indexed(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    await talked(
        backend, "long", *(f"turn{n}" for n in range(20)), settings=replace(KEPT, session_ttl_s=600.0)
    )
    await index_written(backend)
    assert not await words_known(backend, "turn3")


async def test_an_import_over_a_conversation_is_found_and_what_was_before_is_not(backend: Backend) -> None:
    await talked(backend, "chat", "before the import")
    document = await backend.sessions.export(key_of("chat"))
    await backend.sessions.erase(key_of("chat"))
    await talked(backend, "chat", "something else")
    assert await indexed(backend) == {"chat"}
    await backend.sessions.import_(document, on_conflict="replace")
    assert not await words_known(backend, "else")
    assert 0 in (await found(backend, "import"))["chat"]
    assert not await found(backend, "else")


async def test_a_conversation_that_expires_is_not_indexed(backend: Backend) -> None:
    settings = ShortTermMemoryConfig("truncation", session_ttl_s=600.0)
    await talked(backend, "short", "secret word", settings=settings)
    await talked(backend, "long", "other word", settings=ShortTermMemoryConfig("truncation"))
    assert await indexed(backend) == {"long"}
    assert {*await found(backend, "word")} == {"short", "long"}
    await backend.sessions.expire(*IDS, ttl=600.0)
    assert not await words_known(backend, "other")
    assert await indexed(backend) == set()
    assert {*await found(backend, "word")} == {"short", "long"}


async def test_a_copy_over_other_conversations_is_searched_as_it_is(backend: Backend) -> None:
    target = Backend(MemoryDriver(MemoryStore()), close_timeout_s=0.2)
    async with target:
        await talked(backend, "chat", "from the source")
        await talked(target, "chat", "from the target")
        assert await indexed(target) == {"chat"}
        copy = Copy(backend.driver, target.driver, [Owner(*IDS)], replace=True)
        await copy.copy()
        assert 0 in (await found(target, "source"))["chat"]
        assert not await words_known(target, "target")


async def test_a_purge_removes_the_words_of_what_it_removes(backend: Backend) -> None:
    await talked(backend, "gone", "secret word")
    await talked(backend, "kept", "other word")
    await indexed(backend)
    await backend.driver.delete(keys.memory_key(key_of("gone")))
    await backend.sessions.purge(*IDS)
    assert await words_known(backend, "word") == {"kept"}
    assert not await words_known(backend, "secret")


async def test_words_of_a_shortened_transcript_go_with_its_pages(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)
    monkeypatch.setattr(searching, "TURNS", 4)
    key, old = key_of("long"), time.time() - 200_000.0
    memory = backend.memory(key, KEPT, summarizer=LedgerSummarizer())
    for number in range(20):
        await memory.add_turn(ConversationTurn(f"turn{number}", "noted", ts=old if number < 9 else 0.0))
    await memory.flush()
    await touched(backend, key)
    await indexed(backend)
    await backend.sessions.purge(*IDS, transcripts_older_than=86_400.0)
    # The summary still has the word.
    assert await numbers_known(backend, "turn7", "long") == []
    assert await numbers_known(backend, "turn8", "long") == [8]
    assert 9 in (await found(backend, "turn9"))["long"]


@pytest.mark.parametrize("in_generation", [False, True])
async def test_a_shortened_conversation_is_found_by_its_title(backend: Backend, in_generation: bool) -> None:
    await talked(backend, "chat", "Portugal", "one", "two")
    await indexed(backend)
    if in_generation:
        await index_of(backend).make_generation()
    await index_of(backend).forget(keys.card_key(key_of("chat")).name, below=1)
    assert "title" in await places_of(backend, "portugal")
    assert await indexed(backend) == {"chat"}
    await backend.conversations.update(key_of("chat"), title="Spain")
    await index_of(backend).forget(keys.card_key(key_of("chat")).name, below=1)
    assert "title" in await places_of(backend, "spain")


async def test_an_index_that_cannot_be_read_hides_nothing_and_is_made_again(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    key = await talked(backend, "chat", "word")
    await indexed(backend)
    record = await backend.driver.load(Key(SCOPE, "log"))
    assert record is not None
    await backend.driver.append(Key(SCOPE, "log"), b"no envelope", initial_version="v", ttl=None)
    assert 0 in (await found(backend, "word"))["chat"]
    await backend.sessions.erase(key)
    assert not [name async for name in operations.names(backend.driver, SCOPE)]
    assert "cannot be read" in caplog.text


async def test_no_stored_byte_shows_a_word_of_sealed_conversations() -> None:
    store = MemoryStore()
    sealing = Sealing(StaticKeys({"k1": b"1" * 32}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=sealing, close_timeout_s=0.2) as backend:
        await talked(backend, "chat", "zanzibar")
        assert await indexed(backend) == {"chat"}
        assert await words_known(backend, "zanzibar") == {"chat"}
        plain = MemoryDriver(store)
        await plain.open()
        names = [name async for name in operations.names(plain, SCOPE)]
        for name in names:
            record = await plain.load(Key(SCOPE, name))
            assert record is not None
            for value in (record.body or b"", *record.tail):
                assert b"zanzibar" not in value
                assert value.startswith(operations.SEALED) or not value
