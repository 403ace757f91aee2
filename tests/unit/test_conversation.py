"""Conversations of messages: stored as they were said, folded at turns, and shown in their own roles."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stm_backends import OnConflict, sync
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    OutcomeUnknown,
)
from stm_backends.memory.shared.conversation import Conversation, HistoryMessage
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import weight_of
from stm_backends.memory.units import messages_of, open_entry, seal_messages
from stm_backends.messages import SHAPES, Message, Part, Role, Shape, tokens_of
from stm_backends.records import keys, pages
from stm_backends.records.codec import Codec
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer, covered
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey, default_token_estimator
from tests.support.catalogue import touched
from tests.support.selection import few

KEY = MemoryKey("acme", "u1", "chat")
IDS = ("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)
KEPT = config(zone=2, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)


def asks(number: int) -> Message:
    return {"role": "user", "content": f"u{number}", "x_unknown": {"n": [number, None]}}


def answers(number: int) -> list[Message]:
    """Return an answer after two calls of tools at once."""
    calls = [
        {"id": f"c{number}-{place}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for place, name in enumerate(("search", "book"))
    ]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": f"r{number}"} for call in calls),
        {"role": "assistant", "content": f"a{number}"},
    ]


async def talked(chat: Conversation, numbers: Sequence[int]) -> list[Message]:
    """Add a question and its answer for each number; returns the messages."""
    said: list[Message] = []
    for number in numbers:
        question, answer = asks(number), answers(number)
        await chat.add(question, id=f"q{number}")
        await chat.add(*answer, id=f"a{number}")
        said += [question, *answer]
    await chat.flush()
    return said


async def history_of(chat: Conversation) -> list[HistoryMessage]:
    return [one async for one in chat.each_message()]


async def all_of(chat: Conversation) -> list[Message]:
    found = await history_of(chat)
    assert [one.number for one in found] == [*range(len(found))]
    return [one.message for one in found]


async def record_of(backend: Backend) -> Snapshot:
    return Snapshot.of(await backend.driver.load(RECORD), backend.codec)


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(SpyDriver(driver), close_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


def chat_of(backend: Backend, settings: object = KEPT, **options: Any) -> Conversation:
    return backend.conversation(
        *IDS, settings, summarizer=options.pop("summarizer", LedgerSummarizer()), **options
    )


# What is stored


async def test_messages_come_back_as_they_were_said(backend: Backend, small_pages: None) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(12))
    assert await all_of(chat) == said
    assert (await record_of(backend)).body.transcript is not None


async def test_without_a_configuration_a_conversation_keeps_and_shows_all(backend: Backend) -> None:
    chat = backend.conversation(*IDS)
    said = await talked(chat, range(5))
    assert await chat.messages() == said
    assert await all_of(chat) == said


async def test_max_tokens_says_how_much_is_kept_in_full_and_shown(backend: Backend) -> None:
    small, large = (backend.conversation("acme", "u1", name, max_tokens=most) for name, most in SIZES.items())
    said = [{"role": one, "content": f"{place} {'word ' * 50}"} for place in range(150) for one in ROLES]
    for chat in (small, large):
        for place in range(0, 300, 2):
            await chat.add(*said[place : place + 2])
        await chat.flush()
    # 150 turns, which are more than a conversation keeps in full by default.
    assert await large.messages() == said
    assert len(await large.messages(max_tokens=5_000)) < 100
    for most in (None, 50_000):
        first, *recent = await small.messages(max_tokens=most)
        assert first["role"] == "system"
        assert recent == said[-len(recent) :]
        assert 4 < len(recent) < 30
        shown = tokens_of([first, *recent], estimate=default_token_estimator)
        assert shown <= 2_000


SIZES = {"small": 2_000, "large": 50_000}
ROLES = ("user", "assistant")


async def test_an_object_without_settings_leaves_the_summarizer_that_was_given(backend: Backend) -> None:
    summarizer = LedgerSummarizer()
    asked = backend.conversation(*IDS, summarizer=summarizer)
    shown = backend.conversation(*IDS)
    for number in range(60):
        await asked.add(asks(number), {"role": "assistant", "content": "word " * 400})
    await shown.flush()
    assert summarizer.requests


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "many"])
async def test_max_tokens_is_a_number_and_not_beside_a_configuration(backend: Backend, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_tokens"):
        backend.conversation(*IDS, max_tokens=wrong)
    with pytest.raises(ConfigurationError, match="max_tokens"):
        backend.conversation(*IDS, KEPT, summarizer=LedgerSummarizer(), max_tokens=9_000)


async def test_an_addition_is_one_append_and_a_window_one_load(backend: Backend) -> None:
    chat = backend.conversation(*IDS)
    await chat.add(asks(0))
    await touched(backend, KEY)
    spy = backend.driver
    before = len(calls_of(spy))
    await chat.add(*answers(0))
    await chat.messages(max_tokens=1_000)
    assert [call for call in calls_of(spy)[before:] if call[1] == "memory"] == [
        ("append", "memory"),
        ("load", "memory"),
    ]


def calls_of(driver: Any) -> Sequence[tuple[str, str]]:
    while not isinstance(driver, SpyDriver):
        driver = driver.inner
    return driver.calls


async def test_a_question_is_there_and_open_while_nothing_answers_it(backend: Backend) -> None:
    chat = chat_of(backend)
    await talked(chat, [0])
    assert not (await chat.history()).open
    await chat.add(asks(1))
    assert (await chat.history()).open
    assert (await chat.messages())[-1] == asks(1)
    await chat.add(*answers(1)[:3])
    assert (await chat.history()).open
    await chat.add(*answers(1)[3:])
    assert not (await chat.history()).open


async def test_messages_added_twice_under_one_id_are_there_once(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(4))
    await talked(chat, range(4))
    other = Backend(backend.driver)
    again = chat_of(other)
    await talked(again, range(4))
    assert await all_of(chat) == said
    # Some have left the record.
    assert (await history_of(chat))[0].summarized


async def test_messages_whose_answer_was_lost_are_there_once(driver: Driver, lose: Any) -> None:
    async with Backend(driver) as backend:
        chat = chat_of(backend)
        lose("append", done=True, times=9)
        with pytest.raises(OutcomeUnknown):
            await chat.add(asks(0), id="q0")
        lose("append", done=True, times=0)
        await chat.add(asks(0), id="q0")
        assert await all_of(chat) == [asks(0)]


async def test_a_batch_is_stored_as_a_whole_or_not_at_all(backend: Backend) -> None:
    chat = chat_of(backend)
    for wrong in ({"role": "user", "content": {1, 2}}, {"content": "no role"}, "text"):
        with pytest.raises(InvalidState):
            await chat.add(asks(0), wrong)  # type: ignore[arg-type]
    await chat.add()
    assert await all_of(chat) == []


async def test_processes_that_add_at_once_lose_nothing(driver: Driver, small_pages: None) -> None:
    backends = [Backend(driver) for _ in range(3)]
    chats = [chat_of(one) for one in backends]
    expected: list[str] = []
    for number in range(30):
        await chats[number % 3].add(asks(number), *answers(number))
        expected.append(f"u{number}")
    for chat in chats:
        await chat.flush()
    found = [message["content"] for message in await all_of(chats[0]) if message["role"] == "user"]
    assert found == expected
    assert covered((await record_of(backends[0])).body.summary) == expected[:28]


async def test_what_is_returned_may_be_changed(backend: Backend) -> None:
    chat = chat_of(backend)
    await chat.add(asks(0))
    for message in (await chat.messages()) + [one.message for one in (await chat.history()).messages]:
        message["x_unknown"]["n"].clear()  # type: ignore[index]
    assert await chat.messages() == [asks(0)]


async def test_usage_and_a_cut_are_kept_with_the_last_message(backend: Backend, small_pages: None) -> None:
    chat = chat_of(backend)
    usage = {"input_tokens": 7, "cost": 0.25}
    await chat.add(asks(0))
    await chat.add(*answers(0), usage=usage, cut=True)
    await talked(chat, range(1, 9))
    found = (await history_of(chat))[:5]
    assert not found[0].retained
    assert [one.usage for one in found] == [None, None, None, None, usage]
    assert [one.cut for one in found] == [False, False, False, False, True]


# Checkpoints


async def test_an_answer_takes_the_place_of_its_checkpoints(backend: Backend) -> None:
    chat = chat_of(backend)
    await chat.add(asks(0))
    for text in ("It", "It is", "It is"):
        await chat.add({"role": "assistant", "content": text}, id="answer", cut=True)
        shown = (await chat.history()).messages[-1]
        assert (shown.message["content"], shown.cut, shown.number) == (text, True, 1)
    await chat.add({"role": "assistant", "content": "It is so."}, id="answer")
    await chat.add({"role": "assistant", "content": "It is"}, id="answer", cut=True)
    await chat.add({"role": "assistant", "content": "It is so."}, id="answer")
    assert [message["content"] for message in await all_of(chat)] == ["u0", "It is so."]
    assert (await record_of(backend)).repeats >= 2


async def test_a_checkpoint_that_something_follows_stays(backend: Backend) -> None:
    chat = chat_of(backend)
    await chat.add(asks(0))
    await chat.add({"role": "assistant", "content": "It"}, id="answer", cut=True)
    await chat.add(asks(1))
    await chat.add({"role": "assistant", "content": "It is so."}, id="answer")
    assert [message["content"] for message in await all_of(chat)] == ["u0", "It", "u1", "It is so."]


async def test_checkpoints_leave_the_record_with_their_answer(backend: Backend, small_pages: None) -> None:
    chat = chat_of(backend)
    expected: list[str] = []
    for number in range(8):
        await chat.add({"role": "user", "content": f"u{number}"})
        for length in range(1, 4):
            await chat.add({"role": "assistant", "content": "a" * length}, id=f"a{number}", cut=True)
        await chat.add({"role": "assistant", "content": f"a{number}"}, id=f"a{number}")
        expected += [f"u{number}", f"a{number}"]
    await chat.flush()
    assert [message["content"] for message in await all_of(chat)] == expected
    assert len((await record_of(backend)).turns) == 4


@pytest.mark.parametrize("after", [1, 4])
async def test_a_late_copy_of_a_checkpoint_that_was_replaced_adds_nothing(
    backend: Backend, small_pages: None, after: int
) -> None:
    chat = chat_of(backend)
    await chat.add(asks(0))
    for text in ("It", "It is"):
        await chat.add({"role": "assistant", "content": text}, id="answer", cut=True)
    record = await backend.driver.load(RECORD)
    assert record is not None
    said = await talked(chat, range(1, 1 + after))
    # The request for the first checkpoint was sent twice, and one was late.
    await backend.driver.append(RECORD, record.tail[1], initial_version="v", ttl=None)
    for number in range(5, 9):
        said += await talked(chat, [number])
    assert await all_of(chat) == [asks(0), {"role": "assistant", "content": "It is"}, *said]


# Folds


async def test_a_fold_takes_whole_turns_with_their_tools(backend: Backend, small_pages: None) -> None:
    summarizer = LedgerSummarizer()
    chat = chat_of(backend, summarizer=summarizer)
    await talked(chat, range(9))
    for request in summarizer.requests:
        assert all(turn["user"] and turn["assistant"] for turn in request["turns"])
    told = summarizer.requests[0]["turns"][0]
    assert told["trajectory_digest"]["tools_invoked"] == ["search", "book"]
    assert told["trajectory_digest"]["observations_summary"] == "- search: {} -> r0\n- book: {} -> r0"
    assert [one.turn.user_message for one in (await record_of(backend)).turns if one.begins] == ["u7", "u8"]


async def test_the_window_has_the_summary_and_then_recent_messages(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(6))
    first, *recent = await chat.messages()
    assert first["role"] == "system"
    assert covered(first["content"].partition("<session_summary>")[2]) == ["u0", "u1", "u2", "u3"]
    assert recent == said[20:]


async def test_the_last_turn_stays_however_little_is_kept(backend: Backend) -> None:
    chat = chat_of(backend, config(zone=0, transcript=True, total_max_tokens=0, summary_max_tokens=9_000))
    await talked(chat, range(3))
    await chat.add(asks(3))
    await chat.flush()
    assert (await chat.messages())[1:] == [asks(3)]
    await chat.add(*answers(3))
    await chat.flush()
    assert (await chat.messages())[1:] == [asks(3), *answers(3)]


async def test_turns_beyond_the_budget_are_folded(backend: Backend) -> None:
    small = config(zone=99, transcript=True, total_max_tokens=1_000, summary_max_tokens=500)
    chat = chat_of(backend, small)
    await talked(chat, range(10))
    left = (await record_of(backend)).turns
    assert 0 < len(left) < 30
    assert sum(one.said.weight for one in left if one.said) <= 16 * 500
    assert left[0].begins


@pytest.mark.parametrize("max_tokens", [1, 16, 79, 80, 100])
async def test_however_small_the_budget_is_a_conversation_stays_healthy(
    backend: Backend, max_tokens: int
) -> None:
    chat = backend.conversation(*IDS, max_tokens=max_tokens)
    await talked(chat, range(20))
    assert chat.health is MemoryHealth.HEALTHY
    assert len(await history_of(chat)) == 100


async def test_the_talk_about_an_image_goes_on_with_the_image_in_it(backend: Backend) -> None:
    chat = backend.conversation(*IDS)
    url = f"data:image/png;base64,{'iVBOR' * 16_000}"
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    await chat.add(shown)
    await talked(chat, range(8))
    assert (await chat.messages())[0] == shown


@pytest.mark.parametrize(("size", "media"), [(10, 0), (80_000, 1), (600_000, 3)])
def test_an_image_weighs_what_a_model_counts_for_each_256_kib(size: int, media: int) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * size}
    said = {"type": "text", "text": "What is on it?"}
    message = {"role": "user", "content": [said, {"type": "image", "source": source}]}
    without = {**message, "content": [said]}
    assert abs(weight_of(message) - weight_of(without) - media * 1_600 * 16) < 500


async def test_the_work_on_one_question_is_folded_while_it_goes_on(
    backend: Backend, small_pages: None
) -> None:
    settings = config(
        zone=2, transcript=True, total_max_tokens=3_000, summary_max_tokens=500, fold_max_turns=20
    )
    chat = chat_of(backend, settings)
    rules: Message = {"role": "system", "content": "Be kind."}
    said = [rules, asks(0), *answers(0), asks(1)]
    await chat.add(*said)
    for number in range(2, 90):
        steps = answers(number)[:3]
        await chat.add(steps[0])
        await chat.add(*steps[1:])
        await chat.flush()
        said += steps
    assert len((await record_of(backend)).turns) < 100
    assert await all_of(chat) == said
    shown = await chat.messages()
    assert [one["content"] for one in shown if one["role"] == "user"] == ["u1"]
    assert shown[0] == rules
    assert shown[-2:] == said[-2:]
    await chat.add({"role": "assistant", "content": "done"})
    await talked(chat, range(90, 93))
    assert shown[0] == rules
    assert [one["content"] for one in await chat.messages() if one["role"] == "user"] == ["u91", "u92"]


async def test_a_long_history_in_one_call_is_summarized_in_portions(backend: Backend) -> None:
    summarizer = LedgerSummarizer()
    chat = chat_of(
        backend,
        config(zone=2, transcript=True, total_max_tokens=0, fold_max_turns=10, summary_max_tokens=9_000),
        summarizer=summarizer,
    )
    said = [message for number in range(60) for message in (asks(number), *answers(number))]
    await chat.add(*said)
    more = await talked(chat, range(60, 63))
    assert await all_of(chat) == said + more
    assert covered((await record_of(backend)).body.summary) == [f"u{number}" for number in range(61)]
    assert max(len(request["turns"]) for request in summarizer.requests) <= 10


async def test_nothing_is_lost_and_recent_messages_are_shown_while_a_model_is_down(
    backend: Backend, small_pages: None
) -> None:
    summarizer = LedgerSummarizer()
    summarizer.fail = 10**9
    down = config(
        zone=2,
        transcript=True,
        total_max_tokens=0,
        fold_max_turns=4,
        recovery_backlog_limit=4,
        retry_attempts=0,
        degraded_retry_interval_s=0.0,
        summary_max_tokens=9_000,
    )
    chat = chat_of(backend, down, summarizer=summarizer)
    said = await talked(chat, range(40))
    assert await all_of(chat) == said
    shown = await chat.messages()
    assert shown[0]["role"] == "user"
    assert shown[-10:] == said[-10:]
    summarizer.fail = 0
    await talked(chat, [40])
    while chat.waiting:
        await chat.flush()
    assert covered((await record_of(backend)).body.summary) == [f"u{number}" for number in range(39)]


# History


async def test_history_comes_in_pages(backend: Backend, small_pages: None) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(10))
    page = await chat.history(limit=7)
    assert [one.message for one in page.messages] == said[-7:]
    found = [one.message for one in page.messages]
    while page.messages and page.messages[0].number > page.oldest:
        page = await chat.history(before=page.messages[0].number, limit=7)
        found = [*(one.message for one in page.messages), *found]
    assert found == said
    assert [one.number for one in (await chat.history(after=3, limit=2)).messages] == [4, 5]
    assert 17 in [one.number for one in (await chat.history(at=17, limit=3)).messages]
    assert (page.oldest, page.newest) == (0, 49)
    with pytest.raises(ConfigurationError):
        await chat.history(before=1, after=2)


async def test_a_history_says_where_turns_begin_and_what_a_summary_covers(
    backend: Backend, small_pages: None
) -> None:
    chat = chat_of(backend)
    await talked(chat, range(4))
    found = await history_of(chat)
    assert [one.number for one in found if one.begins] == [0, 5, 10, 15]
    assert [one.number for one in found if one.summarized] == [*range(10)]
    assert [one.number for one in found if one.retained] == [*range(10, 20)]
    assert [one.id for one in found[:3]] == ["q0.0", "a0.0", "a0.1"]
    assert all(one.at > 0 for one in found)


# Turns and messages


async def test_a_conversation_that_began_in_turns_goes_on_in_messages(
    backend: Backend, small_pages: None
) -> None:
    memory = backend.memory(KEY, KEPT, summarizer=LedgerSummarizer())
    for number in range(6):
        await memory.add_turn(ConversationTurn(f"t{number}", f"s{number}"), turn_id=f"t{number}")
    await memory.flush()
    chat = chat_of(backend)
    said = await talked(chat, range(1))
    both = [
        message
        for number in range(6)
        for message in (
            {"role": "user", "content": f"t{number}"},
            {"role": "assistant", "content": f"s{number}"},
        )
    ]
    assert [one.message for one in await history_of(chat)] == both + said
    assert (await chat.messages())[1:] == both[-2:] + said
    said += await talked(chat, range(1, 6))
    assert [one.message for one in await history_of(chat)] == both + said
    assert covered((await record_of(backend)).body.summary) == [f"t{n}" for n in range(6)] + [
        f"u{n}" for n in range(4)
    ]


async def test_a_memory_shows_messages_as_turns(backend: Backend) -> None:
    await talked(chat_of(backend), range(3))
    memory = backend.memory(KEY, KEPT, summarizer=LedgerSummarizer())
    shown = (await memory.get_llm_context())["conversation_memory"]
    assert covered(shown["summary"]) == ["u0"]
    assert [(turn["user"], turn["assistant"]) for turn in shown["recent_turns"]] == [
        ("u1", "a1"),
        ("u2", "a2"),
    ]
    assert shown["recent_turns"][0]["trajectory_digest"]["tools_invoked"] == ["search", "book"]
    assert [turn.user_message for turn in await memory.turns()] == ["u1", "u2"]
    await memory.add_turn(ConversationTurn("t", "s"))
    assert [turn.user_message for turn in await memory.turns()] == ["u1", "u2", "t"]


async def test_the_entries_of_item_logs_are_read(backend: Backend) -> None:
    codec = Codec()
    old = codec.seal("items", {"id": "x", "add": [asks(0), *answers(0)], "at": 5.0})
    await backend.driver.append(RECORD, old, initial_version="v", ttl=None)
    chat = chat_of(backend)
    await chat.add(asks(1))
    found = await history_of(chat)
    assert [one.message for one in found] == [asks(0), *answers(0), asks(1)]
    assert (found[0].id, found[0].at, found[0].begins) == ("x.0", 5.0, True)


def test_older_versions_refuse_what_they_would_show_without_its_text() -> None:
    codec = Codec()
    entry = messages_of("x", [asks(0)], at=1.0)
    with pytest.raises(Corrupt, match="'items', not a 'turn'"):
        codec.open_turn(seal_messages(codec, entry))
    body = Snapshot("v").plus_entries((b"",), (entry,)).body
    assert codec.seal_body(body).startswith(b"stm/2 conversation\n")
    assert codec.open_body(codec.seal_body(body)) == body


async def test_a_shape_of_ones_own_tells_others_where_turns_begin(backend: Backend) -> None:
    def role(message: Message) -> Role:
        return "user" if message["who"] == "me" else "assistant"

    own = dataclasses.replace(SHAPES["openai"], name="own", role=role)
    chat = chat_of(backend, shape=own)
    for number in range(4):
        await chat.add({"who": "me", "content": f"u{number}"}, {"who": "it", "content": "yes"})
    await chat.flush()
    with pytest.raises(InvalidState):
        await chat_of(backend).add({"who": "me", "content": "?"})
    assert covered((await record_of(backend)).body.summary) == ["u0", "u1"]
    assert [one.number for one in await history_of(chat_of(backend)) if one.begins] == [0, 2, 4, 6]
    assert [one.begins for one in (await record_of(backend)).turns] == [True, False, True, False]


def who_of(message: Message) -> Any:
    return message.get("who")


OWN = Shape(
    "own",
    role=lambda message: message["who"],
    parts=lambda message: [Part("text", ("said",), message["said"], ("said",))],
    says=lambda role, text: {"who": role, "said": text},
    block=str,
)


@pytest.mark.parametrize("shape", ["openai", OWN, dataclasses.replace(OWN, role=who_of)])
async def test_a_conversation_that_goes_on_in_another_shape_is_shown_and_summarized(
    backend: Backend, shape: str | Shape
) -> None:
    before: list[Message] = [
        {"type": kind, "data": {"content": f"{kind}{number}"}}
        for number in range(3)
        for kind in ("human", "ai")
    ]
    await chat_of(backend, config(zone=9)).add(*before)
    summarizer = LedgerSummarizer()
    chat = chat_of(backend, shape=shape, summarizer=summarizer)
    assert not (await chat.history()).open
    for number in range(3):
        says = SHAPES["openai"].says if isinstance(shape, str) else shape.says
        await chat.add(says("user", f"u{number}"), says("assistant", f"a{number}"))
    await chat.flush()
    assert chat.health is MemoryHealth.HEALTHY
    assert "human2" in str(summarizer.requests)


def test_an_entry_is_read_as_it_was_written() -> None:
    codec = Codec()
    for entry in (
        messages_of("x", [asks(0), *answers(0)], at=1.5),
        messages_of("x~1", [asks(0)], at=0.0, cut="x", usage={"n": 1}),
        messages_of("x", [asks(0), asks(1)], at=2.0, begins=[1]),
    ):
        assert open_entry(codec, seal_messages(codec, entry)) == entry


# The key, and the catalogue


@pytest.mark.parametrize("ids", [("", "u", "c"), ("t", " ", "c"), ("t", "u", "c#short-term")])
async def test_a_conversation_has_three_ids(backend: Backend, ids: tuple[str, str, str]) -> None:
    with pytest.raises(InvalidKey):
        backend.conversation(*ids)


async def test_a_conversation_is_in_the_list(backend: Backend) -> None:
    chat = chat_of(backend)
    await chat.add({"role": "system", "content": "Be kind."})
    await talked(chat, range(2))
    assert not (await record_of(backend)).body.summary
    await backend.conversations.rebuild("acme", "u1")
    (card,) = (await backend.conversations.list("acme", "u1")).cards
    assert (card.title, card.preview, card.turns) == ("u0", "a1", 11)


async def test_what_no_reader_may_see_is_an_error(backend: Backend) -> None:
    await backend.driver.append(
        RECORD, Codec().seal("items", {"id": "x", "pop": 1.0}), initial_version="v", ttl=None
    )
    with pytest.raises(Corrupt):
        await chat_of(backend).messages()


# At random


@pytest.mark.parametrize("seed", few(2, range(6)))
async def test_any_batches_in_any_processes_are_all_there_in_order(
    driver: Driver, small_pages: None, seed: int
) -> None:
    choice = random.Random(seed)
    said: list[Message] = []
    number, backend = 0, Backend(driver)
    chat = chat_of(backend)
    while number < 60:
        backend = Backend(driver, close_timeout_s=0.2)
        settings = config(
            zone=choice.randint(0, 3),
            transcript=True,
            total_max_tokens=0,
            summary_max_tokens=100_000,
            fold_max_turns=choice.randint(2, 9),
            fold_batch_turns=choice.randint(1, 4),
        )
        chat = chat_of(backend, settings)
        for _ in range(choice.randint(1, 9)):
            batch = [one for _ in range(choice.randint(1, 3)) for one in (asks(number), *answers(number))]
            cut = choice.randint(0, len(batch))
            for part in (batch[:cut], batch[cut:]):
                await chat.add(*part)
            said += batch
            number += 1
        if choice.random() < 0.7:
            await chat.flush()
        await chat.close()
    assert await all_of(chat) == said
    body = (await record_of(backend)).body
    summarized = 0 if body.transcript is None else body.transcript.summarized
    users = [message["content"] for message in said[:summarized] if message["role"] == "user"]
    assert covered(body.summary) == users


# Administration


@pytest.mark.parametrize("on_conflict", ["refuse", "merge", "replace"])
async def test_an_export_brings_all_messages_to_another_datastore(
    backend: Backend, small_pages: None, on_conflict: OnConflict
) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(9))
    await chat.add(asks(9), usage={"n": 1})
    await chat.flush()
    lines = [line async for line in backend.sessions.export_lines(KEY)]
    assert {line["version"] for line in lines} == {2}
    async with Backend(MemoryDriver()) as other:
        importing = other.sessions.importing(on_conflict=on_conflict)
        for line in lines:
            await importing.add(line)
        again = chat_of(other)
        assert await all_of(again) == [*said, asks(9)]
        before, after = await history_of(chat), await history_of(again)
        assert [one.id for one in after] == [one.id for one in before]
        assert [one.usage for one in after] == [one.usage for one in before]
        assert [one.at for one in after] == [one.at for one in before]
        assert await again.messages() == await chat.messages()
        # What has left is remembered, and what is there is recognized.
        await again.add(asks(0), id="q8")
        said += await talked(again, range(10, 13))
        assert (await all_of(again))[46:] == said[45:]


async def test_an_import_merges_messages_that_are_there(backend: Backend) -> None:
    chat = chat_of(backend)
    said = await talked(chat, range(2))
    lines = [line async for line in backend.sessions.export_lines(KEY)]
    await chat.add(asks(2))
    importing = backend.sessions.importing(on_conflict="merge")
    for line in lines:
        await importing.add(line)
    assert await all_of(chat) == [*said, asks(2)]


async def test_an_import_keeps_times_that_are_whole_numbers_of_seconds(backend: Backend) -> None:
    ids = dict(zip(("tenant_id", "user_id", "session_id"), IDS, strict=True))
    times = (10**400, 1_714_557_600)
    turns = [{"turn_id": f"row-{at}.0", "item": asks(0), "at": at} for at in times]
    document = {"format": "stm-session", "version": 2, "key": ids, "body": {"messages": True}, "turns": turns}
    await backend.sessions.import_(document)
    assert [one.at for one in await history_of(chat_of(backend))] == [0.0, 1_714_557_600.0]
    (card,) = (await backend.conversations.list("acme", "u1")).cards
    assert card.updated == 1_714_557_600.0


@pytest.mark.parametrize(
    "turn",
    [
        {"turn_id": "e.0", "item": {"role": "user", "content": "hi"}},
        {"turn_id": "e", "user_message": "hi", "assistant_response": "yes"},
    ],
)
async def test_an_import_refuses_what_could_not_be_read_again(backend: Backend, turn: dict[str, Any]) -> None:
    await chat_of(backend).add(asks(0))
    document = await backend.sessions.export(KEY)
    await backend.sessions.erase(KEY)
    deep: Any = "x"
    for _ in range(118):
        deep = [deep]
    document["turns"] = [
        {**turn, **({"item": {**turn["item"], "x": deep}} if "item" in turn else {"x": deep})}
    ]
    with pytest.raises(InvalidState, match="nested too deeply"):
        await backend.sessions.import_(document)


async def test_an_erased_conversation_leaves_nothing(backend: Backend, small_pages: None) -> None:
    chat = chat_of(backend)
    await talked(chat, range(9))
    await chat.close()
    assert (await backend.driver.scan("acme:u1:page", limit=100)).names
    assert await backend.sessions.erase(KEY)
    assert not (await backend.driver.scan("acme:u1:page", limit=100)).names
    assert await all_of(chat_of(backend)) == []


async def test_a_facade_without_an_event_loop_does_the_same(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"

    def work() -> None:
        with sync.open_backend(url) as backend:
            chat = backend.conversation(*IDS)
            chat.add(asks(0), *answers(0), id="x")
            chat.flush()
            assert chat.messages(max_tokens=1_000) == [asks(0), *answers(0)]
            assert [one.message for one in chat.each_message()] == [asks(0), *answers(0)]
            assert chat.history(limit=1).newest == 4

    await asyncio.to_thread(work)
