"""Edits of a conversation of messages: what leaves the view, what stays readable, and who wins."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stm_backends import OnConflict, sync
from stm_backends.admin.describing import catalogue_on
from stm_backends.backend import Backend
from stm_backends.catalogue.portions import Logged, Portion, masks_of
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import (
    EditConflict,
    InvalidState,
    MessageNotFound,
    OutcomeUnknown,
    SessionExists,
    StorageError,
    Unavailable,
)
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.messages import Message
from stm_backends.records import keys, pages
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.records.compression import Preset
from stm_backends.records.directory import Directory
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.types import ConversationTurn
from tests.support.catalogue import touched
from tests.support.selection import few
from tests.unit.test_conversation import (
    IDS,
    KEPT,
    KEY,
    all_of,
    answers,
    asks,
    calls_of,
    chat_of,
    history_of,
    record_of,
    talked,
)

T = TypeVar("T")


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


async def opened(driver: Driver | None = None) -> Driver:
    driver = driver or MemoryDriver()
    await driver.open()
    return driver


def spy_of(backend: Backend) -> SpyDriver:
    found: Any = backend.driver
    while not isinstance(found, SpyDriver):
        found = found.inner
    return found


async def branch_of(chat: Conversation, revision: int) -> list[Message]:
    found = [one async for one in chat.each_message(revision=revision)]
    assert [one.number for one in found] == [*range(len(found))]
    return [one.message for one in found]


def questions(said: list[Message]) -> list[object]:
    return [message["content"] for message in said if message["role"] == "user"]


# Continuing from an earlier message


@pytest.mark.parametrize("turns", [3, 12])
@pytest.mark.parametrize("back", [1, 2, 5, 6, 7, 11, 15])
async def test_a_conversation_goes_on_at_an_earlier_message(backend: Backend, turns: int, back: int) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(turns))
    await chat.rewind(len(said) - 1 - back)
    assert await all_of(chat) == said[:-back]
    assert await all_of(chat_of(Backend(backend.driver))) == said[:-back]
    assert await branch_of(chat, 0) == said
    again = await talked(chat, range(100, 112))
    assert await all_of(chat) == said[:-back] + again
    assert await branch_of(chat, 0) == said
    assert covered((await record_of(backend)).body.summary) == questions(said[:-back] + again)[:-2]


@pytest.mark.parametrize("turns", [2, 12])
async def test_a_conversation_begins_anew(backend: Backend, turns: int) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(turns))
    await chat.rewind(-1)
    assert await all_of(chat) == await chat.messages() == []
    assert await branch_of(chat, 0) == said
    again = await talked(chat, range(100, 106))
    assert await all_of(chat) == again
    assert await branch_of(chat, 0) == said


async def test_a_model_is_shown_all_that_was_said_before(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(14))
    for to in range(len(said) - 2, -2, -3):
        await chat.rewind(to)
        await chat.flush()
        body, shown = (await record_of(backend)).body, await chat.messages()
        assert covered(body.summary) + questions(shown) == questions(said[: to + 1])
        assert questions(shown) or to < 0


async def test_an_answer_is_written_anew(backend: Backend) -> None:
    chat = backend.conversation(*IDS)
    await talked(chat, range(3))
    question = [one for one in await history_of(chat) if one.begins][-1]
    await chat.rewind(question.number)
    assert (await chat.history()).open
    assert (await chat.messages())[-1] == question.message
    await chat.add({"role": "assistant", "content": "another"})
    page = await chat.history()
    assert (page.messages[-1].message["content"], page.newest, page.open) == ("another", 11, False)
    assert page.revision == 1
    (branch,) = page.branches
    assert (branch.revision, branch.first, branch.newest) == (0, 11, 14)
    past = await chat.history(revision=0, after=9, limit=3)
    assert [one.message for one in past.messages] == [question.message, *answers(2)[:2]]
    assert [(one.number, one.retained) for one in past.messages] == [(10, True), (11, False), (12, False)]


async def test_going_to_the_last_message_changes_nothing(backend: Backend) -> None:
    chat = chat_of(backend)
    await talked(chat, range(3))
    before = await record_of(backend)
    await chat.rewind(14)
    assert await record_of(backend) == before
    await chat_of(Backend(await opened())).rewind(-1)


@pytest.mark.parametrize("to", [-1, 3, 15, 99])
async def test_a_message_that_is_not_there_is_no_place_to_go_on(backend: Backend, to: int) -> None:
    chat = chat_of(backend)
    await talked(chat, range(3))
    if to < 0:
        to, chat = 0, chat_of(Backend(await opened()))
    elif to == 3:
        await talked(chat, range(3, 12))
        for name in (await backend.driver.scan("acme:u1:page", limit=100)).names[:1]:
            await backend.driver.delete(Key("acme:u1:page", name))
    with pytest.raises(MessageNotFound):
        await chat.rewind(to)
    with pytest.raises(MessageNotFound):
        await chat.history(revision=7)


async def test_what_has_left_the_view_is_not_added_again(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(4))
    await chat.rewind(12)
    for one in (chat, chat_of(Backend(backend.driver))):
        await one.add(*answers(3), id="a3")
        await one.add(*answers(2), id="a2")
        await one.add(asks(1), id="q1")
        assert await all_of(one) == said[:13]


async def test_a_conversation_that_began_in_turns_goes_on_at_one(backend: Backend) -> None:
    memory = backend.memory(KEY, KEPT, summarizer=LedgerSummarizer())
    for number in range(9):
        await memory.add_turn(ConversationTurn(f"u{number}", f"a{number}"))
    await memory.flush()
    chat = chat_of(backend)
    for to in (7, 4):
        await chat.rewind(to)
        texts = [one.message["content"] for one in await history_of(chat)]
        assert texts == [text for n in range(to + 1) for text in (f"u{n}", f"a{n}")]
    await memory.add_turn(ConversationTurn("again", "so"))
    await talked(chat, range(20, 24))
    found = [one.turn.user_message async for one in memory.each_turn()]
    assert [text for text in found if text] == [
        "u0",
        "u1",
        "u2",
        "u3",
        "u4",
        "again",
        "u20",
        "u21",
        "u22",
        "u23",
    ]
    past = [one.message["content"] async for one in chat.each_message(revision=0)]
    assert past == [text for n in range(9) for text in (f"u{n}", f"a{n}")]


async def test_a_checkpoint_does_not_come_back_with_the_question(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(2))
    await chat.add(asks(2))
    for size in (1, 2):
        await chat.add(*answers(2)[:size], id="a2", cut=True)
    await chat.add(*answers(2), id="a2")
    await chat.rewind(10)
    assert await all_of(chat) == [*said, asks(2)]
    # Its process sends one that was on its way.
    await chat_of(Backend(backend.driver)).add(*answers(2)[:3], id="a2", cut=True)
    assert await all_of(chat) == [*said, asks(2)]


async def test_edits_of_a_long_tail_take_what_one_write_takes(backend: Backend) -> None:
    class Narrow(WrapperDriver):
        @property
        def traits(self) -> Traits:
            return replace(self.inner.traits, max_drop=3)

    for to in (28, 13, 11, 2):
        driver = Narrow(await opened())
        chat = chat_of(Backend(driver), replace(KEPT, fold_batch_turns=99))
        said: list[Message] = []
        for number in range(6):
            said += [asks(number), *answers(number)]
            await chat.add(*said[-5:])
        await chat.rewind(to)
        assert await all_of(chat) == said[: to + 1]
        assert await branch_of(chat, 0) == said
        said = said[: to + 1] + await talked(chat, range(20, 24))
        assert await all_of(chat) == said


class _Unconfirmed(WrapperDriver):
    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, shows_unconfirmed=True)


@pytest.mark.parametrize("seed", few(2, range(8)))
async def test_any_edits_in_any_processes_keep_every_branch(driver: Driver, seed: int) -> None:
    choice, model = random.Random(seed), LedgerSummarizer()
    driver = _Unconfirmed(driver) if seed % 2 else driver
    said: list[Message] = []
    past: list[list[Message]] = []
    number, backend = 0, Backend(driver)
    chat = chat_of(backend)
    while len(past) < 8:
        backend = Backend(driver, close_timeout_s=0.2)
        settings = config(
            zone=choice.randint(0, 3),
            transcript=True,
            total_max_tokens=0,
            summary_max_tokens=100_000,
            fold_max_turns=choice.randint(2, 9),
            fold_batch_turns=choice.randint(1, 4),
        )
        chat, model.fail = chat_of(backend, settings, summarizer=model), choice.choice([0, 0, 2])
        for _ in range(choice.randint(1, 5)):
            batch = [one for _ in range(choice.randint(1, 3)) for one in (asks(number), *answers(number))]
            cut = choice.randint(0, len(batch))
            for part in (batch[:cut], batch[cut:]):
                await chat.add(*part)
            said += batch
            number += 1
        for _ in range(choice.randint(0, 2)):
            if choice.random() < 0.5:
                await chat.flush()
            to = max(-1, len(said) - 2 - choice.choice([0, 1, 4, 9, 30]))
            if to < len(said) - 1:
                past.append(said)
                said = said[: to + 1]
                await chat.rewind(to)
        if choice.random() < 0.7:
            await chat.flush()
        await chat.close()
    assert await all_of(chat) == said
    for revision, was in enumerate(past):
        assert await branch_of(chat, revision) == was, revision
    await chat.flush()
    body = (await record_of(backend)).body
    summarized = 0 if body.transcript is None else body.transcript.summarized
    assert covered(body.summary) == questions(said[:summarized])


# Summaries


@pytest.mark.parametrize("since", [0, 3, 17, 40, 44, 99])
async def test_a_bad_summary_is_written_anew(backend: Backend, since: int) -> None:
    model = LedgerSummarizer()
    chat = chat_of(backend, summarizer=model)
    said = await talked(chat, range(5))
    model.answers = [{"summary": "- bad"}] * 4
    said += await talked(chat, range(5, 10))
    assert covered((await record_of(backend)).body.summary) != questions(said)[:-2]
    model.answers = []
    before = await record_of(backend)
    await chat.summarize_again(since=since)
    await chat.flush()
    after = await record_of(backend)
    assert after.turns == before.turns
    if since <= 17:
        assert covered(after.body.summary) == questions(said)[:-2]
        assert after.body.folded == before.body.folded
    assert (after == before) is (since >= 40)
    assert await all_of(chat) == said


# Copies


@pytest.mark.parametrize("turns", [2, 12])
@pytest.mark.parametrize("back", [0, 1, 3, 8])
async def test_a_copy_and_its_original_go_on_by_themselves(backend: Backend, turns: int, back: int) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(turns))
    copy = await chat.fork("copy", to=len(said) - 1 - back)
    kept = said[: len(said) - back]
    assert await all_of(copy) == kept
    ids = [one.id for one in await history_of(chat)][: len(kept)]
    assert [one.id for one in await history_of(copy)] == ids
    assert questions(await copy.messages())[-1:] == questions(kept)[-1:]
    assert [copied.session_id async for copied in backend.sessions.list("acme", "u1")] == ["chat", "copy"]
    await copy.add(asks(0), id="q0")
    more, again = await talked(chat, range(20, 26)), await talked(copy, range(30, 38))
    assert await all_of(chat) == said + more
    assert await all_of(copy) == kept + again
    other = Backend(backend.driver).conversation("acme", "u1", "copy", KEPT, summarizer=LedgerSummarizer())
    assert await all_of(other) == kept + again
    await other.rewind(3)
    assert await all_of(copy) == (kept + again)[:4]
    assert await branch_of(copy, 0) == kept + again
    record = Snapshot.of(await backend.driver.load(keys.memory_key(replace(KEY, session_id="copy"))), Codec())
    assert covered(record.body.summary) == []


async def test_a_summary_comes_along_with_a_copy(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(14))
    for to in range(len(said) - 1, 3, -3):
        copy = await chat.fork(f"copy-{to}", to=to)
        await copy.flush()
        where = keys.memory_key(replace(KEY, session_id=f"copy-{to}"))
        body = Snapshot.of(await backend.driver.load(where), Codec()).body
        shown = await copy.messages()
        assert covered(body.summary) + questions(shown) == questions(said[: to + 1])


async def test_a_copy_never_takes_the_place_of_a_conversation(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(9))
    other = backend.conversation("acme", "u1", "copy")
    with pytest.raises(MessageNotFound):
        await other.fork("another")
    await other.add(asks(50))
    with pytest.raises(SessionExists):
        await chat.fork("copy")

    async def adds(_: Key | str) -> None:
        await backend.conversation("acme", "u1", "late").add(asks(51))

    async def forks(_: Key | str) -> None:
        await chat_of(Backend(backend.driver)).fork("twice", to=9)

    spy_of(backend).before["append"] = [adds]
    with pytest.raises(SessionExists):
        await chat.fork("late")
    spy_of(backend).before["replace"] = [forks]
    with pytest.raises(SessionExists):
        await chat.fork("twice")
    assert await all_of(other) == [asks(50)]
    assert await all_of(backend.conversation("acme", "u1", "late")) == [asks(51)]
    assert await all_of(backend.conversation("acme", "u1", "twice")) == said[:10]


async def test_a_copy_of_what_is_edited_meanwhile_is_right_or_refused() -> None:
    outcomes = Counter[str]()
    for when in range(1, 90):
        driver = await opened(MemoryDriver(store := MemoryStore()))
        chat = chat_of(Backend(driver))
        said = await talked(chat, range(9))
        is_done = False

        async def edits() -> None:
            nonlocal is_done
            is_done = True
            await chat.rewind(12)  # noqa: B023 -- it is awaited in this round
            await talked(chat, range(20, 30))  # noqa: B023 -- likewise

        try:
            async with Backend(_At(MemoryDriver(store), when, then=edits)) as copying:
                await chat_of(copying).fork("copy", to=30)
            outcomes["right"] += 1
        except Unavailable:
            outcomes["refused"] += 1
        else:
            copy = Backend(driver).conversation("acme", "u1", "copy")
            assert await all_of(copy) in (said[:31], (await all_of(chat))[:31])
        if not is_done:
            assert outcomes["right"] > 3
            assert outcomes["refused"]
            return
    raise AssertionError("the copy made no end")


@pytest.mark.parametrize("done", few(1, [True, False]))
async def test_a_process_that_dies_has_copied_all_or_nothing(done: bool) -> None:
    outcomes = set[bool]()
    for when in range(1, 90):
        driver = await opened()
        said = await talked(chat_of(Backend(driver)), range(9))
        dying = _Killed(driver, when, done=done)
        with contextlib.suppress(StorageError):
            await chat_of(Backend(dying)).fork("copy", to=37)
        if not dying.is_dead:
            assert outcomes == {False, True}
            return
        backend = Backend(driver)
        copy = backend.conversation("acme", "u1", "copy", KEPT, summarizer=LedgerSummarizer())
        found = await all_of(copy)
        outcomes.add(bool(found))
        assert found in ([], said[:38])
        if not found:
            copy = await chat_of(backend).fork("copy", to=37)
        again = await talked(copy, range(20, 29))
        assert await all_of(copy) == said[:38] + again
    raise AssertionError("the copy made no end")


# Several at once


async def test_of_two_who_edit_at_once_one_wins_and_the_other_is_told(backend: Backend) -> None:
    chat, other = chat_of(backend), chat_of(Backend(backend.driver))
    said = await talked(chat, range(4))

    async def edits(_: Key | str) -> None:
        await other.rewind(16)

    spy_of(backend).before["replace"] = [edits]
    with pytest.raises(EditConflict):
        await chat.rewind(10)
    assert await all_of(chat) == said[:17]
    page = await chat.history()
    assert page.revision == 1
    await other.rewind(14)
    with pytest.raises(EditConflict):
        await chat.rewind(10, revision=page.revision)
    assert await all_of(chat) == said[:15]
    await chat.rewind(10, revision=2)
    assert await all_of(chat) == said[:11]


@pytest.mark.parametrize("to", [2, 12])
async def test_what_is_added_meanwhile_is_what_is_said_next(backend: Backend, to: int) -> None:
    chat, other = chat_of(backend), chat_of(Backend(backend.driver))
    said = await talked(chat, range(4))

    async def adds(_: Key | str) -> None:
        await other.add(asks(50))

    spy_of(backend).before["replace"] = [adds]
    await chat.rewind(to)
    assert await all_of(chat) == [*said[: to + 1], asks(50)]
    assert await branch_of(chat, 0) == said


@pytest.mark.parametrize("to", [2, 32])
async def test_a_summary_of_what_has_left_the_view_is_not_stored(backend: Backend, to: int) -> None:
    slow = LedgerSummarizer()
    slow.hold()
    other = chat_of(Backend(backend.driver), summarizer=slow)
    chat = chat_of(backend)
    said = [*await talked(chat, range(6)), asks(6), *answers(6)]
    await other.add(*said[30:])
    await slow.called.wait()
    await chat.rewind(to)
    slow.release()
    await other.flush()
    await chat.flush()
    assert await all_of(chat) == said[: to + 1]
    assert covered((await record_of(backend)).body.summary) == questions(said[: to + 1])[:-2]


@pytest.mark.parametrize("to", few(1, [2, 22, 27]))
async def test_a_reader_sees_what_was_there_before_or_after(to: int) -> None:
    """Each request of a reader is followed by an edit and what is said then."""
    driver = await opened()
    chat = chat_of(Backend(driver))
    said = await talked(chat, range(6))
    is_done, when, extra = False, 0, 0

    async def edits() -> None:
        nonlocal said, is_done
        await chat.rewind(to)
        said = said[: to + 1] + await talked(chat, range(100 * when, 100 * when + extra))
        is_done = True

    for when in range(1, 90):
        is_done, extra = False, when % 9

        reader = chat_of(Backend(_At(driver, when, then=edits)))
        before = said
        found = (await reader.history(limit=1_000)).messages
        assert [one.message for one in found] in (before, said)
        if not is_done:
            return
        said += await talked(chat, range(100 * when + 50, 100 * when + 59 - extra))
    raise AssertionError("the reader made no end")


# Faults


class _At(WrapperDriver):
    """Lets something happen at the n-th request, which may raise before or after it was done."""

    def __init__(
        self, inner: Driver, at: int, *, then: Callable[[], Awaitable[None]], done: bool = True
    ) -> None:
        super().__init__(inner)
        self._left, self._then, self._done = at, then, done

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        self._left -= 1
        is_now = self._left == 0
        if is_now and not self._done:
            await self._then()
        answer = await send()
        if is_now and self._done:
            await self._then()
        return answer


class _Killed(_At):
    """Is killed at the n-th request, before or after it was done."""

    def __init__(self, inner: Driver, at: int, *, done: bool) -> None:
        self.is_dead = False

        async def dies() -> None:
            self.is_dead = True

        super().__init__(inner, at, then=dies, done=done)

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, deadline=0.01)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        async def alive() -> T:
            if self.is_dead:
                raise Unavailable("the process is dead")
            return await send()

        answer = await super().call(operation, key, alive)
        if self.is_dead:
            raise OutcomeUnknown("the process is dead")
        return answer


@pytest.mark.parametrize("done", few(1, [True, False]))
@pytest.mark.parametrize("to", few(2, [22, 3, 42, -1]))
async def test_a_process_that_dies_has_edited_all_or_nothing(to: int, done: bool) -> None:
    outcomes = set[bool]()
    for when in range(1, 90):
        driver = await opened()
        chat = chat_of(Backend(driver))
        said = await talked(chat, range(9))
        dying = _Killed(driver, when, done=done)
        with contextlib.suppress(StorageError):
            await chat_of(Backend(dying)).rewind(to)
        if not dying.is_dead:
            assert outcomes == ({False, True} if done else {False})
            return
        next_one = chat_of(Backend(driver))
        page = await next_one.history(limit=1_000)
        outcomes.add(bool(page.revision))
        assert [one.message for one in page.messages] == (said[: to + 1] if page.revision else said)
        await next_one.rewind(to)
        again = await talked(next_one, range(100, 109))
        assert await all_of(next_one) == said[: to + 1] + again
        assert await branch_of(next_one, 0) == said
    raise AssertionError("the edit made no end")


async def test_an_edit_whose_answer_was_lost_is_done_once(driver: Driver, lose: Any) -> None:
    async with Backend(driver) as backend:
        chat = chat_of(backend)
        said = await talked(chat, range(4))
        lose("replace", done=True)
        await chat.rewind(7)
        page = await chat.history()
        assert ([one.message for one in page.messages], page.revision) == (said[:8], 1)


# What else is known of a conversation


class Kept(WrapperDriver):
    """A driver that stays open, so that a test may close one of its backends."""

    async def close(self) -> None:
        pass


async def used(chat: Conversation) -> float:
    return (await chat.usage()).total.get("n", 0)


@pytest.mark.parametrize("to", [-1, 3, 22, 38, 42])
async def test_what_has_left_the_view_was_paid_for_once(backend: Backend, to: int) -> None:
    chat, paid = chat_of(backend), 0

    async def answered(number: int) -> None:
        nonlocal paid
        paid += number
        await chat.add(asks(number), id=f"q{number}")
        await chat.add(*answers(number), id=f"a{number}", usage={"n": number})

    for number in range(1, 10):
        await answered(number)
        await chat.flush()
    stated = {one.id: one.usage for one in await history_of(chat) if one.usage}
    for after in (20, 30):
        await chat.rewind(to)
        assert await used(chat) == paid
        assert await used(chat_of(Backend(backend.driver))) == paid
        assert {one.id: one.usage for one in await history_of(chat) if one.usage}.items() <= stated.items()
        for number in range(after, after + 5):
            await answered(number)
            await chat.flush()
            assert await used(chat) == paid
    copy = await chat.fork("copy")
    assert await used(copy) == 0
    await copy.add(*answers(50), id="a50", usage={"n": 7})
    await talked(copy, range(60, 70))
    await copy.rewind(1)
    assert await used(copy) == 7
    await backend.conversations.rebuild("acme", "u1")
    assert (await backend.conversations.usage("acme", "u1")).total == {"n": paid + 7}


@pytest.mark.parametrize("to", [3, 22, 42])
async def test_usage_of_what_came_back_comes_along_to_another_datastore(backend: Backend, to: int) -> None:
    chat = chat_of(backend)
    for number in range(9):
        await chat.add(asks(number), id=f"q{number}")
        await chat.add(*answers(number), id=f"a{number}", usage={"n": 1})
    await chat.flush()
    await chat.rewind(to)
    async with Backend(await opened()) as other:
        importing = other.sessions.importing()
        async for line in backend.sessions.export_lines(KEY):
            await importing.add(line)
        again = chat_of(other)
        assert [one.usage for one in await history_of(again)] == [one.usage for one in await history_of(chat)]
        await talked(again, range(20, 29))
        assert await used(again) == 9


async def test_a_search_finds_what_is_in_view_alone(backend: Backend) -> None:
    async def found(word: str) -> list[tuple[str, list[int | None]]]:
        page = await backend.conversations.search("acme", "u1", word)
        return [(one.card.key.session_id, [match.number for match in one.matches]) for one in page.found]

    chat = chat_of(backend)
    for number in range(9):
        await chat.add({"role": "user", "content": f"ask{number}"}, {"role": "assistant", "content": "fine"})
    await chat.flush()
    for to, gone in ((14, "ask8"), (5, "ask4")):
        await touched(backend, KEY)
        assert await found(gone)
        await chat.rewind(to)
        assert await found(gone) == []
        assert [one for _, numbers in await found("ask2") for one in numbers if one is not None] == [4]
    copy = await chat.fork("copy", to=3)
    await touched(backend, replace(KEY, session_id="copy"))
    await copy.add({"role": "user", "content": "another"})
    assert {session for session, _ in await found("ask1")} == {"chat", "copy"}
    assert await found("another") == [("copy", [4])]


async def test_a_list_shows_what_is_in_view(driver: Driver) -> None:
    async with Backend(driver := Kept(driver)) as backend:
        chat = chat_of(backend)
        await talked(chat, range(9))
        await touched(backend, KEY)
        await backend.conversations.update(KEY, title="Mine", pinned=True)
        await chat.rewind(-1)
    async with Backend(driver) as again:
        (card,) = (await again.conversations.list("acme", "u1")).cards
        assert (card.title, card.pinned, card.turns, card.preview) == ("Mine", True, 0, "")
        await chat_of(again).add({"role": "user", "content": "Anew"})
        await again.conversations.update(KEY, title="")
    async with Backend(driver) as last:
        (card,) = (await last.conversations.list("acme", "u1")).cards
        assert (card.title, card.preview, card.turns) == ("Anew", "Anew", 1)


@pytest.mark.parametrize("to", [-1, 3, 42])
async def test_a_title_stays_with_a_summary(backend: Backend, to: int) -> None:
    model = LedgerSummarizer()
    model.answers = [{"summary": "- so", "title": "Tables"}] * 99
    chat = chat_of(backend, summarizer=model)
    await talked(chat, range(9))
    copy = await chat.fork("copy", to=max(to, 0))
    await chat.rewind(to)
    body = (await record_of(backend)).body
    assert body.title == ("Tables" if body.summary else "")
    where = keys.memory_key(replace(KEY, session_id="copy"))
    copied = Snapshot.of(await backend.driver.load(where), Codec()).body
    assert copied.title == ("Tables" if copied.summary else "")
    assert bool(body.summary) is (to == 42)
    await copy.close()


# One message


NEW: Message = {"role": "user", "content": "another word"}


def without(said: list[Message], *numbers: int) -> list[Message]:
    return [message for number, message in enumerate(said) if number not in numbers]


def instead(said: list[Message], number: int, message: Message = NEW) -> list[Message]:
    return [*said[:number], message, *said[number + 1 :]]


def told(body: Body) -> list[str]:
    """Return the questions that a summary covers."""
    return [text for text in covered(body.summary) if text]


async def messages_in(chat: Conversation, revision: int | None = None) -> list[Message]:
    return [one.message async for one in chat.each_message(revision=revision)]


async def stored(driver: Driver, *kinds: keys.Kind) -> bytes:
    """Return all that is stored of the user, as text."""
    codec, found = Codec().after(Preset()), b""
    for kind in kinds or keys.KINDS:
        scope = keys.scope("acme", "u1", kind)
        for name in (await driver.scan(scope, limit=1_000)).names:
            record = await driver.load(Key(scope, name))
            assert record is not None
            for value in filter(None, [record.body, *record.tail]):
                sealed_as: Any = value.partition(b"\n")[0].decode().split()[1]
                found += codec.open_encoded(sealed_as, value)
    return found


@pytest.mark.parametrize("number", [0, 5, 20, 25, 40, 45, 50, 55, 58])
async def test_a_message_is_replaced_wherever_it_is(backend: Backend, number: int) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(12))
    old = await history_of(chat)
    await chat.replace(number, NEW)
    expected = instead(said, number)
    for one in (chat, chat_of(Backend(backend.driver))):
        assert await all_of(one) == expected
    assert [one.id for one in await history_of(chat)] == [one.id for one in old]
    await chat.flush()
    snapshot = await record_of(backend)
    assert snapshot.body.transcript is not None
    assert not snapshot.body.transcript.patches
    shown = await chat.messages()
    assert covered(snapshot.body.summary) + questions(shown) == questions(expected)
    again = await talked(chat, range(100, 112))
    assert await all_of(chat) == expected + again
    assert covered((await record_of(backend)).body.summary) == questions(expected + again)[:-2]
    content = str(said[number]["content"]).encode()
    if said[number]["role"] == "user":
        assert b'"%b"' % content not in await stored(backend.driver)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 9), (18, 27), (20, 24), (45, 59), (50, 54), (0, 59)])
async def test_messages_are_removed_and_the_others_keep_their_numbers(
    backend: Backend, first: int, last: int
) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(12))
    await chat.remove(first, last)
    expected = without(said, *range(first, last + 1))
    for one in (chat, chat_of(Backend(backend.driver))):
        found = await history_of(one)
        assert [message.message for message in found] == expected
        assert [message.number for message in found] == [n for n in range(60) if not first <= n <= last]
    before = await record_of(backend)
    await chat.remove(first, last)
    assert (await record_of(backend)).body.transcript == before.body.transcript
    with pytest.raises(MessageNotFound):
        await chat.replace(first, NEW)
    await chat.flush()
    body, shown = (await record_of(backend)).body, await chat.messages()
    # An answer without its question is a turn, too.
    assert told(body) + questions(shown) == questions(expected)
    again = await talked(chat, range(100, 112))
    assert await messages_in(chat) == expected + again
    assert told((await record_of(backend)).body) == questions(expected + again)[:-2]
    kept = await stored(backend.driver)
    for number in range(first, last + 1):
        if said[number]["role"] == "user":
            assert b'"u%d"' % (number // 5) not in kept


async def test_a_message_that_is_not_there_is_not_edited(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(3))
    for edit in (chat.replace(15, NEW), chat.remove(14, 15), chat.remove(99)):
        with pytest.raises(MessageNotFound):
            await edit
    with pytest.raises(InvalidState):
        await chat.replace(3, {"no": "message"})
    assert await all_of(chat) == said
    assert (await chat.history()).revision == 0


async def test_a_turn_that_was_stored_as_one_is_removed_as_a_whole(backend: Backend) -> None:
    memory = backend.memory(KEY, KEPT, summarizer=LedgerSummarizer())
    for number in range(9):
        await memory.add_turn(ConversationTurn(f"u{number}", f"a{number}"), turn_id=f"t.{number}")
    await memory.flush()
    chat = chat_of(backend)
    with pytest.raises(InvalidState):
        await chat.replace(2, NEW)
    for number in (2, 8):
        await chat.remove(number)
        await memory.add_turn(ConversationTurn("twice", "so"), turn_id=f"t.{number}")
    left = [f"u{number}" for number in range(9) if number not in (2, 8)]
    assert [one.turn.user_message async for one in memory.each_turn()] == left
    await chat.add(NEW, id="t")
    await talked(chat, range(20, 24))
    assert [one.turn.user_message async for one in memory.each_turn()][: len(left)] == left
    assert NEW in await messages_in(chat)
    assert covered((await record_of(backend)).body.summary)[:7] == left


async def test_an_answer_leaves_no_checkpoint_and_no_repeat(backend: Backend) -> None:
    chat = chat_of(backend)
    await talked(chat, range(2))
    secret: Message = {"role": "assistant", "content": "a secret"}
    for text in ("a", "a secret"):
        await chat.add({"role": "assistant", "content": text}, id="a9", cut=True)
    for _ in range(2):
        await chat_of(Backend(backend.driver)).add(secret, id="a9")
    await chat.remove(10)
    assert b"secret" not in await stored(backend.driver)
    await chat_of(Backend(backend.driver)).add(secret, id="a9")
    assert len(await messages_in(chat)) == 10


async def test_instructions_and_an_open_question_are_edited_where_they_are_shown(backend: Backend) -> None:
    rules: Message = {"role": "system", "content": "Be brief."}
    others: Message = {"role": "system", "content": "Be kind."}
    settings = replace(KEPT, fold_max_turns=999)
    chat = chat_of(backend, settings)
    await chat.add(rules)
    await talked(chat, range(9))
    await chat.replace(0, others)
    assert (await chat.messages())[0] == others
    await chat.add(rules)
    number = (await chat.history()).newest
    await talked(chat, range(10, 19))
    await chat.remove(number)
    assert (await chat.messages())[0] == others
    await chat.remove(0)
    assert all(one["role"] != "system" or "kind" not in str(one) for one in await chat.messages())


async def test_what_was_edited_is_edited_on_later_branches_and_in_copies(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(9))
    await chat.rewind(32)
    await chat.replace(30, NEW)
    await chat.replace(5, NEW)
    await chat.remove(10, 14)
    expected = without(instead(instead(said, 5), 30), *range(10, 15))
    assert await messages_in(chat) == expected[:28]
    assert await messages_in(chat, 0) == expected
    copy = await chat.fork("copy", to=31)
    assert await messages_in(copy) == expected[:27]
    await chat.rewind(12)
    assert await messages_in(chat) == expected[:10]
    assert await messages_in(chat, 0) == expected
    again = await talked(chat, range(20, 29))
    assert await messages_in(chat) == expected[:10] + again
    assert await messages_in(chat, 0) == expected
    kept = await stored(backend.driver)
    assert b'"u1"' not in kept
    assert b'"u2"' not in kept


async def test_what_was_removed_is_found_no_more(backend: Backend) -> None:
    chat = chat_of(backend)
    for number in range(9):
        await chat.add({"role": "user", "content": f"ask{number}"}, {"role": "assistant", "content": "fine"})
    await chat.flush()
    await touched(backend, KEY)
    owner, card = ("acme", "u1"), keys.card_key(KEY).name
    index = WordIndex(backend.driver, Codec(), Directory(backend.driver, Codec()), owner)
    for number in (2, 16):
        word = f"ask{number // 2}"
        assert (await backend.conversations.search(*owner, word)).found
        await index.add(Logged(Portion(card, count=1), masks_of([word])))
        await chat.remove(number)
        assert card not in await index.find(frozenset([word]))
        assert not (await backend.conversations.search(*owner, word)).found


async def tells(driver: Driver, word: str, *kinds: keys.Kind) -> bool:
    return re.search(rb"\b%b\b" % word.encode(), await stored(driver, *kinds)) is not None


@pytest.mark.parametrize(
    ("number", "word", "kinds"),
    [
        (0, "u0", ["memory", "page", "card", "words"]),
        (15, "u3", ["memory", "page", "words"]),
        (45, "u9", ["memory", "words"]),
        (50, "bye", ["memory", "card", "words"]),
    ],
)
async def test_nothing_that_is_stored_tells_what_was_removed(
    backend: Backend, number: int, word: str, kinds: list[keys.Kind]
) -> None:
    chat, directory = chat_of(backend), Directory(backend.driver, Codec())
    await talked(chat, range(10))
    await chat.add({"role": "assistant", "content": "bye"}, id="last")
    await catalogue_on(backend.driver, Codec(), directory).touch(KEY)
    index = WordIndex(backend.driver, Codec(), directory, ("acme", "u1"))
    await index.add(Logged(Portion(keys.card_key(KEY).name, count=1), masks_of([word])))
    assert [kind for kind in keys.KINDS if await tells(backend.driver, word, kind)] == kinds
    await chat.remove(number)
    assert [kind for kind in keys.KINDS if await tells(backend.driver, word, kind)] == []


@pytest.mark.parametrize("size", [4, 64])
async def test_nothing_tells_it_whatever_another_process_does_meanwhile(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each request of one that adds, summarizes and indexes, another removes the oldest messages."""
    monkeypatch.setattr(pages, "TURNS", size)
    for when in range(1, 90):
        driver, is_done = await opened(), False
        async with Backend(Kept(driver)) as backend:
            chat = chat_of(backend)
            said = await talked(chat, range(3))

            async def edits() -> None:
                nonlocal is_done
                await chat.remove(0, 5)  # noqa: B023 -- it is awaited in this round
                is_done = True

            async with Backend(Kept(_At(driver, when, then=edits, done=False))) as other:
                said += await talked(chat_of(other), [3])
        left = await messages_in(chat_of(Backend(driver)))
        assert left == (said[6:] if is_done else said)
        if not is_done:
            return
        for word in ("u0", "u1"):
            assert [kind for kind in keys.KINDS if await tells(driver, word, kind)] == []
    raise AssertionError("the other made no end")


async def test_a_checkpoint_that_may_tell_it_is_not_used_again(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(12))
    await chat.remove(5)
    await chat.rewind(42)
    await chat.flush()
    body, shown = (await record_of(backend)).body, await chat.messages()
    assert told(body) + questions(shown) == questions(without(said, 5)[:42])
    assert not await tells(backend.driver, "u1")


async def test_an_answer_that_was_removed_was_paid_for(backend: Backend) -> None:
    chat = chat_of(backend)
    for number in range(9):
        await chat.add(asks(number))
        await chat.add({"role": "assistant", "content": "fine"}, usage={"n": 1})
    await chat.flush()
    for number in (17, 3):
        await chat.remove(number)
        assert await used(chat) == 9
    await talked(chat, range(20, 29))
    assert await used(chat) == 9


@pytest.mark.parametrize("number", [2, 12])
async def test_of_two_who_edit_one_message_at_once_one_is_told(backend: Backend, number: int) -> None:
    chat, other = chat_of(backend), chat_of(Backend(backend.driver))
    said = await talked(chat, range(6))

    async def edits(_: Key | str) -> None:
        await other.replace(number, NEW)

    spy_of(backend).before["replace"] = [edits]
    with pytest.raises(EditConflict):
        await chat.remove(number)
    assert await all_of(chat) == instead(said, number)
    with pytest.raises(EditConflict):
        await chat.replace(3, NEW, revision=0)
    await chat.replace(3, NEW, revision=1)


@pytest.mark.parametrize("done", few(1, [True, False]))
@pytest.mark.parametrize("number", few(1, [5, 25]))
@pytest.mark.parametrize("kind", ["replace", "remove"])
async def test_a_process_that_dies_has_edited_a_message_or_not(number: int, done: bool, kind: str) -> None:
    outcomes = set[bool]()
    for when in range(1, 90):
        driver = await opened()
        said = await talked(chat_of(Backend(driver)), range(6))
        expected = instead(said, number) if kind == "replace" else without(said, number, number + 1)
        dying = _Killed(driver, when, done=done)

        async def edits(chat: Conversation) -> None:
            await (chat.replace(number, NEW) if kind == "replace" else chat.remove(number, number + 1))

        with contextlib.suppress(StorageError):
            await edits(chat_of(Backend(dying)))
        if not dying.is_dead:
            assert outcomes == {False, True}
            return
        # One that is not killed, and that does not wait long for whoever has made the edit.
        async with Backend(_Killed(driver, 0, done=done)) as backend:
            chat = chat_of(backend)
            page = await chat.history(limit=1_000)
            outcomes.add(bool(page.revision))
            assert [one.message for one in page.messages] == (expected if page.revision else said)
            if page.revision == 0:
                await edits(chat)
            elif kind == "replace":
                # What is left to do is done before the next edit, or else in the background.
                await chat.summarize_again(since=18)
            await chat.flush()
            assert not await tells(driver, f"u{number // 5}")
            again = await talked(chat, range(100, 106))
            assert await messages_in(chat) == expected + again
            body = (await record_of(backend)).body
            assert told(body) == questions(expected + again)[:-2]
            assert body.transcript is not None
            assert not body.transcript.patches
    raise AssertionError("the edit made no end")


@pytest.mark.parametrize("number", few(1, [5, 25]))
async def test_a_copy_of_what_a_process_has_half_removed_has_nothing_of_it(number: int) -> None:
    outcomes = set[bool]()
    for when in range(1, 90):
        driver = await opened()
        said = await talked(chat_of(Backend(driver)), range(6))
        dying = _Killed(driver, when, done=True)
        with contextlib.suppress(StorageError):
            await chat_of(Backend(dying)).remove(number)
        if not dying.is_dead:
            assert outcomes == {False, True}
            return
        # One that is not killed, and that does not wait long for whoever has made the edit.
        async with Backend(_Killed(driver, 0, done=True)) as backend:
            chat = chat_of(backend)
            is_edited = bool((await chat.history()).revision)
            outcomes.add(is_edited)
            copy = await chat.fork("copy")
            assert await messages_in(copy) == (without(said, number) if is_edited else said)
            assert is_edited != await tells(driver, f"u{number // 5}")
    raise AssertionError("the edit made no end")


@pytest.mark.parametrize("number", [0, 6, 22, 27])
async def test_a_reader_sees_a_message_as_it_was_or_is(number: int) -> None:
    """Each request of a reader is followed by an edit, which takes out more than a page."""
    for when in range(1, 90):
        driver = await opened()
        chat = chat_of(Backend(driver))
        said = await talked(chat, range(8))
        is_done = False

        async def edits() -> None:
            nonlocal is_done
            await chat.remove(number, number + 5)  # noqa: B023 -- it is awaited in this round
            is_done = True

        reader = chat_of(Backend(_At(driver, when, then=edits)))
        found = [one.message for one in (await reader.history(limit=1_000)).messages]
        assert found in (said, without(said, *range(number, number + 6)))
        if not is_done:
            return
    raise AssertionError("the reader made no end")


@pytest.mark.parametrize("number", [5, 20])
async def test_a_summary_of_what_was_removed_is_not_stored(backend: Backend, number: int) -> None:
    slow = LedgerSummarizer()
    slow.hold()
    other = chat_of(Backend(backend.driver), summarizer=slow)
    chat = chat_of(backend)
    said = [*await talked(chat, range(6)), asks(6), *answers(6)]
    await other.add(*said[30:])
    await slow.called.wait()
    await chat.remove(number)
    slow.release()
    await other.flush()
    await chat.flush()
    expected = without(said, number)
    assert await messages_in(chat) == expected
    assert told((await record_of(backend)).body) == questions(expected)[:-2]


async def test_what_was_edited_comes_along_to_another_datastore(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(9))
    await chat.remove(40)
    await chat.remove(5, 9)
    await chat.replace(41, NEW)
    async with Backend(await opened()) as other:
        importing = other.sessions.importing()
        async for line in backend.sessions.export_lines(KEY):
            await importing.add(line)
        again = chat_of(other)
        assert await history_of(again) == await history_of(chat)
        assert await messages_in(again) == without(instead(said, 41), *range(5, 10), 40)
        await talked(again, range(20, 25))


# Administration


async def test_an_erased_conversation_leaves_no_branch(backend: Backend) -> None:
    chat = chat_of(backend)
    await talked(chat, range(9))
    await chat.rewind(3)
    await talked(chat, range(20, 29))
    await chat.close()
    assert await backend.sessions.erase(KEY)
    assert not (await backend.driver.scan("acme:u1:page", limit=100)).names
    page = await chat_of(backend).history(revision=0)
    assert (page.messages, page.branches) == ((), ())


@pytest.mark.parametrize("on_conflict", ["refuse", "merge", "replace"])
@pytest.mark.parametrize(("turns", "to"), [(2, 7), (9, 3), (9, 42)])
async def test_branches_come_along_to_another_datastore(
    backend: Backend, turns: int, to: int, on_conflict: OnConflict
) -> None:
    chat = chat_of(backend)
    past = [await talked(chat, range(turns))]
    await chat.rewind(to)
    past.append(past[0][: to + 1] + await talked(chat, range(20, 21)))
    await chat.rewind(to - 1)
    said = past[0][:to]
    for _ in range(2):
        other = Backend(await opened())
        importing = other.sessions.importing(on_conflict=on_conflict)
        async for line in backend.sessions.export_lines(KEY):
            await importing.add(line)
        again = chat_of(other)
        assert await all_of(again) == said
        assert await again.messages() == await chat.messages()
        more = await talked(again, range(40, 50))
        assert await all_of(again) == said + more
        assert [await branch_of(again, revision) for revision in (0, 1)] == past
        said += await talked(chat, range(30, 40))


@pytest.mark.parametrize(("to", "most"), [(43, 4), (3, 12)])
async def test_continuing_takes_few_requests(to: int, most: int) -> None:
    spy = SpyDriver(MemoryDriver())
    async with Backend(spy) as backend:
        chat = chat_of(backend)
        await talked(chat, range(9))
        before = len(calls_of(spy))
        await chat.rewind(to)
        made = [call for call in calls_of(spy)[before:] if call[1] in ("memory", "page")]
        assert len(made) <= most
        assert made.count(("replace", "memory")) == 1


async def test_a_facade_without_an_event_loop_edits_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"

    def work() -> None:
        with sync.open_backend(url) as backend:
            chat = backend.conversation(*IDS)
            chat.add(asks(0), *answers(0))
            chat.rewind(0)
            assert [one.message for one in chat.each_message()] == [asks(0)]
            assert [one.message for one in chat.each_message(revision=0)] == [asks(0), *answers(0)]
            assert chat.history(revision=0).newest == 4
            chat.summarize_again()
            copy = chat.fork("copy")
            copy.add(*answers(0))
            assert [one.message for one in copy.each_message()] == [asks(0), *answers(0)]

    await asyncio.to_thread(work)
