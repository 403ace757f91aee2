"""Searching conversations: whole words, in any script, wherever they are; nothing that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    KeyMismatch,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    sync,
)
from stm_backends.catalogue import conversations
from stm_backends.catalogue.conversations import Results
from stm_backends.catalogue.matching import SNIPPET_CHARACTERS, Found, Match, Query
from stm_backends.drivers.contract import ANY, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records import keys, operations, pages
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.catalogue import touched

IDS = ("acme", "u1")
KEPT = config(zone=2, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)
LAST_TURNS = ShortTermMemoryConfig("truncation")


def key_of(session: str) -> MemoryKey:
    return MemoryKey(*IDS, session)


async def talked(backend: Backend, session: str, *said: str, settings: object = LAST_TURNS) -> MemoryKey:
    """Add a turn for each text; returns the key of the conversation, which is in the list."""
    key = key_of(session)
    memory = backend.memory(key, settings, summarizer=LedgerSummarizer() if settings is KEPT else None)
    for text in said:
        await memory.add_turn(ConversationTurn(text, "noted"))
    await memory.flush()
    await touched(backend, key)
    return key


async def sessions_with(backend: Backend, words: str) -> list[str]:
    return [one.card.key.session_id for one in (await every(backend, words)).found]


async def every(backend: Backend, words: str, limit: int = 50) -> Results:
    """Return what all calls have found together."""
    found, after = list[Found](), None
    while True:
        some = await backend.conversations.search(*IDS, words, after=after, limit=limit)
        found += some.found
        if (after := some.after) is None:
            return Results(tuple(found), None)


async def matches_of(backend: Backend, words: str) -> list[Match]:
    (found,) = (await every(backend, words)).found
    return [*found.matches]


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


# What is found


async def test_a_word_is_found_in_what_was_said_with_its_number(backend: Backend) -> None:
    await talked(backend, "trip", "Plan a trip", "to Lisbon, in May", "or June")
    await talked(backend, "food", "Book a table")
    assert await sessions_with(backend, "lisbon") == ["trip"]
    assert await matches_of(backend, "LISBON") == [Match("message", "to Lisbon, in May noted", 1)]


async def test_all_words_have_to_be_in_one_turn_or_message(backend: Backend) -> None:
    await talked(backend, "trip", "a trip to Lisbon", "with a bicycle")
    assert await sessions_with(backend, "Lisbon trip") == ["trip"]
    assert not await sessions_with(backend, "Lisbon bicycle")


async def test_a_part_of_a_word_is_not_found(backend: Backend) -> None:
    await talked(backend, "trip", "a trip to Lisbon")
    assert not await sessions_with(backend, "Lisb")


async def test_what_has_left_the_record_is_found_by_its_number(backend: Backend, small_pages: None) -> None:
    await talked(backend, "long", *(f"word{number} said" for number in range(30)), settings=KEPT)
    for number in (0, 3, 4, 17, 29):
        said = [one for one in await matches_of(backend, f"word{number}") if one.where == "message"]
        assert [one.number for one in said] == [number]
    assert [one.number for one in await matches_of(backend, "said") if one.number is not None] == [29, 28, 27]


async def test_titles_and_summaries_are_searched(backend: Backend) -> None:
    key = await talked(backend, "chat", *(f"say{number}" for number in range(9)), settings=KEPT)
    await backend.conversations.update(key, title="Portugal in spring")
    assert await matches_of(backend, "spring portugal") == [Match("title", "Portugal in spring")]
    assert "summary" in [one.where for one in await matches_of(backend, "say0")]


async def test_the_tags_of_a_summary_are_neither_found_nor_shown(backend: Backend) -> None:
    chat = backend.conversation(*IDS, "chat")
    for number in range(60):
        question = {"role": "user", "content": f"I want place{number}."}
        await chat.add(question, {"role": "assistant", "content": "Done."})
    await chat.flush()
    (summary,) = [one for one in await matches_of(backend, "place0") if one.where == "summary"]
    assert "<" not in summary.snippet
    assert not await sessions_with(backend, "session summary")


async def test_what_is_looked_for_is_a_text(backend: Backend) -> None:
    with pytest.raises(ConfigurationError, match="words is int, not a string"):
        await backend.conversations.search("acme", "u1", 7)  # type: ignore[arg-type]


async def test_messages_are_found_as_they_were_said_and_tools_are_not(backend: Backend) -> None:
    chat = backend.conversation(*IDS, "chat")
    await chat.add(
        {"role": "system", "content": "About zebras"}, {"role": "user", "content": "Which animals?"}
    )
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    await chat.add(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "giraffes"},
        {"role": "assistant", "content": [{"type": "text", "text": "There are lions."}]},
    )
    await touched(backend, key_of("chat"))
    assert await matches_of(backend, "lions") == [Match("message", "There are lions.", 4)]
    assert not await sessions_with(backend, "giraffes")
    assert not await sessions_with(backend, "zebras")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("我们下周去东京出差", "东京"),
        ("来週、東京タワーに行きます", "東京"),
        ("来週、東京タワーに行きます", "タワー"),
        ("อยากไปเที่ยวเชียงใหม่", "เชียงใหม่"),
        ("서울에 가고 싶어요", "서울에"),
        ("Поездка в Лиссабон", "лиссабон"),
        ("Reise nach Zürich", "ZÜRICH"),
        ("رحلة إلى لشبونة", "لشبونة"),
    ],
)
async def test_words_of_every_script_are_found(backend: Backend, text: str, words: str) -> None:
    await talked(backend, "other", "the same in English")
    await talked(backend, "chat", text)
    assert await sessions_with(backend, words) == ["chat"]


async def test_characters_that_are_not_neighbours_are_another_word(backend: Backend) -> None:
    await talked(backend, "chat", "京都の東")
    assert not await sessions_with(backend, "東京")


async def test_without_a_word_nothing_is_found_and_nothing_is_read(backend: Backend) -> None:
    await talked(backend, "chat", "hello")
    driver = backend.driver
    while not isinstance(driver, SpyDriver):
        driver = driver.inner  # type: ignore[attr-defined]
    before = len(driver.calls)
    assert await backend.conversations.search(*IDS, " ?! ") == Results((), None)
    assert len(driver.calls) == before


# In order, in parts


async def test_results_are_in_the_order_of_the_list_and_come_once(backend: Backend) -> None:
    names = [f"chat {number:02}" for number in range(37)]
    for name in names:
        await talked(backend, name, "shared words" if int(name[-2:]) % 3 else "other words")
    wanted = [name for name in reversed(names) if int(name[-2:]) % 3]
    for limit in (1, 7, 50):
        found = (await every(backend, "shared", limit)).found
        assert [one.card.key.session_id for one in found] == wanted


async def test_a_call_reads_a_bounded_number_of_conversations(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "READ_MOST", 16)
    for number in range(20):
        await talked(backend, f"chat {number:02}", "oldest word" if number == 0 else "later")
    first = await backend.conversations.search(*IDS, "oldest")
    assert not first.found
    assert first.after
    second = await backend.conversations.search(*IDS, "oldest", after=first.after)
    assert [one.card.key.session_id for one in second.found] == ["chat 00"]
    assert second.after is None


async def test_the_place_of_another_search_is_accepted_and_any_other_text_refused(backend: Backend) -> None:
    await talked(backend, "chat", "hello")
    for bad in ("", "x", "AAAA"):
        with pytest.raises(ConfigurationError):
            await backend.conversations.search(*IDS, "hello", after=bad)
    with pytest.raises(ConfigurationError):
        await backend.conversations.search(*IDS, "hello", limit=0)


# What is gone, or may not be read


async def test_what_is_erased_is_not_found(backend: Backend) -> None:
    kept, erased = await talked(backend, "kept", "same words"), await talked(backend, "erased", "same words")
    await backend.sessions.erase(erased)
    assert await sessions_with(backend, "same") == [kept.session_id]
    await backend.sessions.erase_user(*IDS)
    assert not await sessions_with(backend, "same")


async def test_users_and_tenants_do_not_find_what_others_say(backend: Backend) -> None:
    await talked(backend, "chat", "secret words")
    for other in (("acme", "u2"), ("other", "u1")):
        assert await backend.conversations.search(*other, "secret") == Results((), None)


async def test_a_damaged_conversation_hides_no_other(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    bad = await talked(backend, "bad", "hello", "same words")
    await talked(backend, "good", "hello", "same words")
    await backend.driver.replace(keys.memory_key(bad), b"no envelope", version="v", expect=ANY, ttl=None)
    assert await sessions_with(backend, "same") == ["good"]
    assert "a search leaves out damaged data" in caplog.text


async def test_a_damaged_page_hides_no_other(backend: Backend, small_pages: None) -> None:
    await talked(backend, "long", *(f"word{number} said" for number in range(30)), settings=KEPT)
    scope = keys.scope(*IDS, "page")
    names = [name async for name in operations.names(backend.driver, scope)]
    await backend.driver.replace(Key(scope, names[1]), b"no envelope", version="v", expect=ANY, ttl=None)
    assert not [one for one in await every_match(backend, "word5") if one.where == "message"]
    assert [one.number for one in await every_match(backend, "word1") if one.where == "message"] == [1]


async def every_match(backend: Backend, words: str) -> list[Match]:
    return [match for one in (await every(backend, words)).found for match in one.matches]


async def test_sealed_conversations_are_searched_with_their_keys_alone() -> None:
    store = MemoryStore()
    sealing = Sealing(StaticKeys({"k1": b"1" * 32}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=sealing, close_timeout_s=0.2) as backend:
        await talked(backend, "chat", "secret words")
        assert await sessions_with(backend, "secret") == ["chat"]
    other = Sealing(StaticKeys({"k1": b"2" * 32}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=other) as backend:
        with pytest.raises(KeyMismatch):
            await backend.conversations.search(*IDS, "secret")


async def test_a_turn_that_leaves_the_record_meanwhile_is_found(driver: Driver, small_pages: None) -> None:
    async with Backend(driver, close_timeout_s=0.2) as backend:
        memory = backend.memory(key_of("long"), KEPT, summarizer=LedgerSummarizer())
        await memory.add_turn(ConversationTurn("needle", "noted"))
        await touched(backend, key_of("long"))
        done = asyncio.Event()

        async def searching() -> None:
            while not done.is_set():
                found = await every_match(backend, "needle")
                assert [one.number for one in found if one.where == "message"] == [0]
                await asyncio.sleep(0)

        searches = asyncio.create_task(searching())
        for number in range(40):
            await memory.add_turn(ConversationTurn(f"more {number}", "noted"))
            await asyncio.sleep(0)
        await memory.flush()
        done.set()
        await searches


# What is shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("needle", "needle"),
        ("before " * 100 + "needle " + "after " * 100, "needle"),
        ("x" * 1_000 + " needle", "needle"),
        ("needle " + "x" * 1_000, "needle"),
        ("针" + "长" * 500 + "东京" + "长" * 500, "东京"),
        ("İ" * 300 + " needle", "needle"),
        ("a\n\n\tb needle\r\nc", "needle"),
    ],
)
def test_a_snippet_is_short_and_shows_a_word_that_was_looked_for(text: str, words: str) -> None:
    query = Query.of(words)
    assert query.is_in(text)
    shown = query.snippet(text)
    assert len(shown) <= SNIPPET_CHARACTERS + 2
    assert "\n" not in shown
    assert words in shown


def test_blocking_programs_search_as_well(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        chat = backend.conversation(*IDS, "chat")
        chat.add({"role": "user", "content": "Plan a trip to Lisbon"})
        while not (results := backend.conversations.search(*IDS, "lisbon")).found:
            pass
        assert results.found[0].matches[-1] == Match("message", "Plan a trip to Lisbon", 0)
