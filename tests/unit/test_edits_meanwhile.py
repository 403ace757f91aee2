"""Edits of a conversation that meet what others do at the same time: copies, erasures, readers, faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import (
    ConfigurationError,
    EditConflict,
    InvalidKey,
    MessageNotFound,
    OutcomeUnknown,
    Unavailable,
)
from stm_backends.memory.shared import reading
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.messages import Message
from stm_backends.records import keys, pages
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.catalogue import touched
from tests.unit.test_conversation import IDS, KEPT, KEY, all_of, answers, asks, chat_of, talked
from tests.unit.test_editing import Kept, opened, spy_of

COPY = replace(KEY, session_id="copy")


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as made:
        yield made


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


async def pages_of(driver: Driver) -> list[str]:
    return [*(await driver.scan("acme:u1:page", limit=1_000)).names]


def copied(driver: Driver) -> Conversation:
    """Return the copy as another process opens it."""
    return Backend(driver).conversation("acme", "u1", "copy", KEPT, summarizer=LedgerSummarizer())


# Entries that come again


async def test_a_late_copy_of_what_was_taken_apart_does_not_let_the_rest_go(backend: Backend) -> None:
    chat = chat_of(backend, replace(KEPT, fold_batch_turns=99))
    await chat.add(asks(0), *answers(0), id="t0")
    for number in range(1, 21):
        await chat.add(*answers(number), id=f"a{number}")
    await chat.rewind(0)
    other = chat_of(Backend(backend.driver))
    await other.add(asks(0), *answers(0), id="t0")
    await other.messages()
    await other.flush()
    assert await all_of(other) == [asks(0)]


async def test_a_late_copy_of_the_first_entry_of_a_copy_has_no_effect(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(2))
    copy = await chat.fork("copy")
    where = keys.memory_key(COPY)
    first = await backend.driver.load(where)
    said += await talked(copy, range(20, 29))
    assert first is not None
    # Its first attempt was answered too late.
    await backend.driver.append(where, first.tail[0], initial_version="late", ttl=None)
    assert await all_of(copied(backend.driver)) == said


async def test_an_edited_conversation_is_imported_once_after_it_has_gone_on(backend: Backend) -> None:
    chat = chat_of(backend)
    said = (await talked(chat, range(4)))[:18]
    await chat.rewind(17)
    lines = [line async for line in backend.sessions.export_lines(KEY)]
    driver = await opened()
    for more in (range(20, 29), range(30, 31)):
        other = Backend(driver)
        importing = other.sessions.importing(on_conflict="merge")
        for line in lines:
            await importing.add(line)
        again = chat_of(other)
        said += await talked(again, more)
        assert await all_of(again) == said


# Erasures


class _Then(WrapperDriver):
    """Calls something after the first request."""

    def __init__(self, inner: Driver, then: Any) -> None:
        super().__init__(inner)
        self._then = then

    async def call(self, operation: Any, key: Key | str, send: Any) -> Any:
        answer = await send()
        then, self._then = self._then, None
        if then is not None:
            await then()
        return answer


@pytest.mark.parametrize("to", [2, 22])
async def test_an_edit_leaves_no_pages_of_what_was_erased_meanwhile(to: int) -> None:
    driver = await opened()
    await talked(chat_of(Backend(driver)), range(6))

    async def erases() -> None:
        assert await Backend(driver).sessions.erase(KEY)

    with pytest.raises((EditConflict, MessageNotFound)):
        await chat_of(Backend(_Then(driver, erases))).rewind(to)
    assert await pages_of(driver) == []


async def test_what_began_after_an_erasure_is_another_conversation(backend: Backend) -> None:
    chat = chat_of(backend)
    await chat.add(asks(0))

    async def begins_anew(_: Key | str) -> None:
        other = Backend(backend.driver)
        await other.sessions.erase(KEY)
        await other.conversation(*IDS).add(asks(1))

    spy_of(backend).before["replace"] = [begins_anew]
    with pytest.raises(EditConflict):
        await chat.rewind(-1)
    assert await all_of(chat) == [asks(1)]


# Faults


class _Full(WrapperDriver):
    """Refuses pages of another epoch than that of the original, once it is told."""

    epoch = ""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        if self.epoch and key.scope.endswith(":page") and self.epoch != keys.page_epoch(key.name):
            raise Unavailable("the datastore does not answer")
        return await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)


async def test_a_copy_that_fails_leaves_nothing_behind() -> None:
    driver = _Full(await opened())
    chat = chat_of(Backend(driver))
    await talked(chat, range(20))
    before = await pages_of(driver)
    driver.epoch = keys.page_epoch(before[0])
    with pytest.raises(Unavailable):
        await chat.fork("copy")
    assert await pages_of(driver) == before
    assert await driver.load(keys.memory_key(COPY)) is None


async def test_a_list_shows_what_is_in_view_after_an_edit_whose_answer_was_lost(driver: Driver) -> None:
    async def lost(_: Key | str) -> None:
        raise OutcomeUnknown("no answer")

    spy = SpyDriver(Kept(driver))
    async with Backend(spy) as backend:
        chat = backend.conversation(*IDS)
        for text in ("Ask", "Go on"):
            await chat.add({"role": "user", "content": text}, {"role": "assistant", "content": f"{text}!"})
        await touched(backend, KEY)
        spy.after["replace"] = [lost] * 3
        with pytest.raises(OutcomeUnknown):
            await chat.rewind(1)
    async with Backend(spy) as again:
        (card,) = (await again.conversations.list("acme", "u1")).cards
        assert (card.preview, card.turns) == ("Ask!", 2)


# Readers


@pytest.mark.parametrize("is_erased", [False, True])
async def test_who_reads_all_while_it_is_edited_reads_what_was_said_before(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, is_erased: bool
) -> None:
    monkeypatch.setattr(reading, "_AT_ONCE", 4)
    chat, found = chat_of(backend), list[Message]()
    await chat.add(asks(90))
    await chat.rewind(-1)
    said = await talked(chat, range(6))
    async for one in chat_of(Backend(backend.driver)).each_message():
        found.append(one.message)
        if len(found) == 4 and is_erased:
            await Backend(backend.driver).sessions.erase(KEY)
        elif len(found) == 4:
            await chat.rewind(1)
            await talked(chat, range(20, 26))
    assert found == (said[:4] if is_erased else said)


# What was given wrongly


@pytest.mark.parametrize("wrong", [True, "3", 1.5, -1])
async def test_a_number_or_a_revision_of_another_type_is_refused(backend: Backend, wrong: Any) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(3))
    await chat.rewind(13)
    with pytest.raises(ConfigurationError, match="to must be"):
        await chat.fork("copy", to=wrong)
    with pytest.raises(ConfigurationError, match="to must be"):
        await chat.rewind(-2 if wrong == -1 else wrong)
    with pytest.raises(ConfigurationError, match="revision must be"):
        await chat.rewind(2, revision=wrong)
    with pytest.raises(ConfigurationError, match="revision must be"):
        await chat.history(revision=wrong)
    with pytest.raises(ConfigurationError, match="revision must be"):
        await anext(chat.each_message(revision=wrong))
    assert await all_of(chat) == said[:14]


@pytest.mark.parametrize("wrong", ["", None, 3, "copy#short-term"])
async def test_a_copy_has_the_id_of_a_conversation(backend: Backend, wrong: Any) -> None:
    chat = chat_of(backend)
    await talked(chat, range(1))
    with pytest.raises(InvalidKey):
        await chat.fork(wrong)
