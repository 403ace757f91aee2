"""What answers took: summed once each, by day, for a conversation and for a user."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import pytest

from stm_backends import Summarizer, Usage
from stm_backends.admin.describing import catalogue_on
from stm_backends.backend import Backend
from stm_backends.catalogue import conversations
from stm_backends.catalogue.conversations import Conversations
from stm_backends.drivers.contract import KEEP, Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import ConfigurationError, InvalidState, SessionNotFound
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import messages_of, seal_messages
from stm_backends.records import keys, usage
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.testing import FakeClock
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryKey
from tests.support.catalogue import touched

KEY = MemoryKey("acme", "u1", "chat")
DAY = 86_400.0
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
TODAY = date(2026, 11, 29)
KEPT = config(zone=1, transcript=True, total_max_tokens=0, summary_max_tokens=100_000)
DROPPED = config(zone=1, transcript=False, total_max_tokens=0, summary_max_tokens=100_000)

OPENAI: dict[str, Any] = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
    "service_tier": "default",
}


def total_of(*said: Any, at: float = NOON) -> Usage:
    return usage.total([usage.stated({}, [(at, one) for one in said])])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOON)


def chat_on(
    driver: Driver, clock: FakeClock, settings: object = KEPT, summarizer: Summarizer | None = None
) -> Conversation:
    """Return a conversation as a process of its own has it."""
    return Conversation(
        driver,
        KEY,
        settings,
        summarizer=summarizer or LedgerSummarizer(),
        backgrounds=Backgrounds(driver, Codec(), clock=clock),
    )


async def asked(chat: Conversation, number: int, said: Any) -> None:
    await chat.add({"role": "user", "content": f"u{number}"}, id=f"u{number}")
    await chat.add({"role": "assistant", "content": f"a{number}"}, id=f"a{number}", usage=said)


# What is summed


def test_numbers_within_objects_have_their_path_as_their_name() -> None:
    found = total_of(OPENAI, OPENAI)
    assert found.total == {
        "prompt_tokens": 200,
        "completion_tokens": 40,
        "prompt_tokens_details.cached_tokens": 128,
        "prompt_tokens_details.audio_tokens": 0,
    }
    assert found.days == {TODAY: found.total}
    assert all(type(value) is int for value in found.total.values())


@pytest.mark.parametrize(
    "lie",
    [
        True,
        None,
        "7",
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
        2.0**54,
        [7],
        {},
        {"": {}},
    ],
)
def test_what_is_no_number_of_a_usage_is_in_no_sum(lie: Any) -> None:
    assert total_of({"n": lie}) == Usage()
    assert total_of({"n": lie, "tokens": 5}, {"n": 2}).total == {"tokens": 5, "n": 2}


def test_prices_are_added_up_as_decimals() -> None:
    assert total_of(*[{"cost": 0.1}] * 3).total == {"cost": 0.3}
    assert total_of({"cost": 1e-7}, {"cost": 2}).total == {"cost": 2.0000001}
    assert total_of({"cost": 5e-324}, {"cost": 1e-13}).total == {"cost": 0}


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_the_same_in_any_portions_and_through_the_store(seed: int) -> None:
    choice = random.Random(seed)
    said = [
        (
            choice.choice([0.0, 1.0, 9e10, NOON + DAY * choice.randint(-90, 0)]),
            {
                f"n{choice.randint(0, 40)}": choice.choice([1, 0.1, 1e-7, 12_345.678, 2**53, -1, True]),
                "x": {"y": choice.random()},
            },
        )
        for _ in range(600)
    ]
    whole = usage.stated({}, said)
    parts: usage.Sums = {}
    while said:
        count = choice.randint(1, 50)
        parts, said = usage.stated(parts, said[:count]), said[count:]
        parts = usage.load(json.loads(json.dumps(usage.dump(parts))))
    assert usage.total([parts]).total == usage.total([whole]).total
    assert len(usage.total([whole]).total) == usage.NAMES
    assert len(usage.total([whole]).days) == len(usage.total([parts]).days) == usage.DAYS


def test_the_oldest_of_many_days_are_added_up() -> None:
    sums = usage.stated({}, [(NOON - DAY * ago, {"n": 1}) for ago in range(100)])
    found = usage.total([sums])
    assert [*found.days][-1] == TODAY
    assert (len(found.days), found.total) == (62, {"n": 100})
    assert len(json.dumps(usage.dump(sums))) < 1_300


def test_a_lying_usage_takes_little_room() -> None:
    wide = {f"{n}{'x' * 60}": 2**53 for n in range(1_000)}
    deep: Any = 1
    for _ in range(90):
        deep = {"": deep}
    sums = usage.stated({}, [(NOON - DAY * ago, {**wide, "deep": deep, "y" * 99: 1}) for ago in range(200)])
    assert len(json.dumps(usage.dump(sums))) < 40_000


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"names": ["n"], "days": []},
        {"names": "n", "days": {"today": [1]}},
        {"names": ["n"], "days": {"20261129": [1]}},
        {"names": ["n"], "days": {"": [-1]}},
        {"names": ["n"], "days": {"": [True]}},
        {"names": ["n"], "days": {"": [1.5]}},
        {"names": ["n"], "days": {"": ["1e999999999"]}},
        {"names": ["n"], "days": {"": [10**31]}},
        {"names": [1], "days": {"": [1]}},
        {"names": None, "days": {"": [1]}},
    ],
)
def test_sums_that_were_not_stored_here_are_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"stored usage|stored sum|isoformat|YYYY"):
        usage.load(stored)


# Of a conversation


@pytest.mark.parametrize("settings", [KEPT, DROPPED])
async def test_each_answer_counts_once_on_its_day(driver: Driver, clock: FakeClock, settings: object) -> None:
    chats = [chat_on(driver, clock, settings) for _ in range(3)]
    for number in range(20):
        for _ in range(2):
            # Sent again by another process, as after a lost answer.
            await asked(chats[number % 3], number, OPENAI)
            await asked(chats[(number + 1) % 3], number, OPENAI)
        if number % 4 == 3:
            await chats[0].flush()
        if number == 9:
            clock.now += DAY
    record = Snapshot.of(await driver.load(keys.memory_key(KEY)), Codec())
    assert record.body.usage
    assert len(record.turns) < 30
    for chat in chats:
        found = await chat.usage()
        assert [*found.days] == [TODAY, date(2026, 11, 30)]
        assert [day["prompt_tokens"] for day in found.days.values()] == [1_000, 1_000]
        assert found.total["prompt_tokens_details.cached_tokens"] == 1_280


async def test_only_the_last_checkpoint_of_an_answer_counts(driver: Driver, clock: FakeClock) -> None:
    chat = chat_on(driver, clock)
    for number in range(6):
        await chat.add({"role": "user", "content": f"u{number}"}, id=f"u{number}")
        for length in range(1, 4):
            said: Any = {"role": "assistant", "content": "a" * length}
            await chat.add(said, id=f"a{number}", cut=True, usage={"n": length})
            assert (await chat.usage()).total == {"n": 10 * number + length}
        await chat.add({"role": "assistant", "content": "done"}, id=f"a{number}", usage={"n": 10})
    await chat.flush()
    assert (await chat.usage()).total == {"n": 60}


async def test_an_answer_that_stays_cut_off_counts(driver: Driver, clock: FakeClock) -> None:
    chat = chat_on(driver, clock)
    await chat.add({"role": "user", "content": "u"})
    await chat.add({"role": "assistant", "content": "a"}, id="a", cut=True, usage={"n": 3})
    await asked(chat, 1, {"n": 4})
    await chat.flush()
    assert (await chat.usage()).total == {"n": 7}


async def test_usage_is_there_while_no_model_is(driver: Driver, clock: FakeClock) -> None:
    down = config(
        zone=1,
        transcript=True,
        total_max_tokens=0,
        fold_max_turns=2,
        recovery_backlog_limit=2,
        retry_attempts=0,
        degraded_retry_interval_s=1e6,
    )
    summarizer = LedgerSummarizer()
    summarizer.fail = 10**9
    chat = chat_on(driver, clock, down, summarizer)
    for number in range(20):
        await asked(chat, number, {"n": 1})
        await chat.flush()
    assert chat.waiting
    assert (await chat.usage()).total == {"n": 20}


async def test_a_conversation_without_usage_has_none(driver: Driver, clock: FakeClock) -> None:
    chat = chat_on(driver, clock)
    assert await chat.usage() == Usage()
    await asked(chat, 0, None)
    await asked(chat, 1, {})
    assert await chat.usage() == Usage()
    assert b"usage" not in b"".join((await driver.load(keys.memory_key(KEY))).tail)  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [7, [1], "n", {"n": {1}}, {1: 2}])
async def test_a_usage_that_is_no_json_object_is_refused(
    driver: Driver, clock: FakeClock, wrong: Any
) -> None:
    chat = chat_on(driver, clock)
    with pytest.raises(InvalidState, match="usage"):
        await chat.add({"role": "assistant", "content": "a"}, usage=wrong)
    assert not (await chat.history()).messages


async def test_an_export_takes_usage_along(driver: Driver, clock: FakeClock) -> None:
    chat = chat_on(driver, clock)
    for number in range(9):
        await asked(chat, number, {"n": 1, "cost": 0.1})
    await chat.flush()
    async with Backend(driver) as backend, Backend(MemoryDriver()) as other:
        importing = other.sessions.importing()
        async for line in backend.sessions.export_lines(KEY):
            await importing.add(json.loads(json.dumps(line)))
        again = other.conversation(*_ids(KEY), KEPT, summarizer=LedgerSummarizer())
        assert await again.usage() == await chat.usage()
        assert (await other.conversations.usage("acme", "u1", days=None)).total == {"n": 9, "cost": 0.9}


def _ids(key: MemoryKey) -> tuple[str, str, str]:
    return key.tenant_id, key.user_id, key.session_id


# Without a transcript


async def test_instructions_stay_where_no_transcript_is_kept(driver: Driver, clock: FakeClock) -> None:
    chat = chat_on(driver, clock, DROPPED)
    rules: Any = {"role": "system", "content": "Be kind."}
    await chat.add(rules)
    for number in range(9):
        await asked(chat, number, None)
        await chat.flush()
    assert (await chat.messages())[0] == rules


# Of a user


class Shared(WrapperDriver):
    """A driver that stays open, so that a test may close one of its backends."""

    async def close(self) -> None:
        pass


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(Shared(driver)) as opened:
        yield opened


async def entry_added(driver: Driver, key: MemoryKey, at: float, said: dict[str, Any]) -> None:
    entry = messages_of(f"e{at}", [{"role": "assistant", "content": "a"}], at=at, usage=said)
    data = seal_messages(Codec(), entry)
    await driver.append(keys.memory_key(key), data, initial_version="v", ttl=None)


async def test_the_usage_of_a_user_is_that_of_the_conversations(driver: Driver, clock: FakeClock) -> None:
    codec = Codec()
    catalogue = catalogue_on(driver, codec, Directory(driver, codec), clock=clock)
    for place in range(4):
        key = MemoryKey("acme", "u1", f"chat{place}")
        for ago in reversed(range(place, 100, 10)):
            await entry_added(driver, key, NOON - DAY * ago, {"n": 1, f"n{place}": 2})
        await catalogue.touch(key, ttl=None)
    await entry_added(driver, MemoryKey("acme", "u2", "chat"), NOON, {"n": 1})
    listed = Conversations(driver, catalogue)
    assert (await listed.usage("acme", "u1", days=None)).total == {
        "n": 40, "n0": 20, "n1": 20, "n2": 20, "n3": 20,
    }  # fmt: skip
    found = await listed.usage("acme", "u1", days=12)
    assert [(TODAY - day).days for day in found.days] == [11, 10, 3, 2, 1, 0]
    assert found.total["n"] == 6
    assert (await listed.usage("acme", "u1", days=1)).total == {"n": 1, "n0": 2}
    for wrong in (0, -1, 63, True, 1.5):
        with pytest.raises(ConfigurationError):
            await listed.usage("acme", "u1", days=wrong)  # type: ignore[arg-type]


async def test_the_usage_of_a_user_reads_only_cards_and_only_recent_ones(
    driver: Driver, clock: FakeClock
) -> None:
    codec, spy = Codec(), SpyDriver(driver)
    catalogue = catalogue_on(spy, codec, Directory(spy, codec), clock=clock)
    for place in range(450):
        key = MemoryKey("acme", "u1", f"chat{place}")
        await entry_added(driver, key, NOON - DAY * (place // 10), {"n": 1})
        await catalogue.touch(key, ttl=None)
    del spy.calls[:]
    assert (await Conversations(spy, catalogue).usage("acme", "u1", days=7)).total == {"n": 70}
    assert {scope for _, scope in spy.calls} == {"recent", "card"}
    assert len(spy.calls) < 260


async def test_a_conversation_that_moves_to_the_front_meanwhile_counts(
    driver: Driver, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Codec()
    catalogue = catalogue_on(driver, codec, Directory(driver, codec), clock=clock)
    names = [MemoryKey("acme", "u1", f"chat{place}") for place in range(5)]
    for place, key in enumerate(names):
        await entry_added(driver, key, NOON - DAY * place, {"n": 1})
        await catalogue.touch(key, ttl=None)
    page, moved = catalogue.page, [names[-1]]

    async def moving(*args: Any, **options: Any) -> Any:
        found = await page(*args, **options)
        while moved:
            await entry_added(driver, key := moved.pop(), NOON, {"n": 10})
            await catalogue.touch(key, ttl=None)
        return found

    monkeypatch.setattr(conversations, "PAGE", 2)
    monkeypatch.setattr(catalogue, "page", moving)
    assert (await Conversations(driver, catalogue).usage("acme", "u1")).total == {"n": 15}
    assert (await Conversations(driver, catalogue).usage("acme", "u1", days=1)).total == {"n": 11}


async def test_the_card_has_the_usage_that_others_have_added(backend: Backend) -> None:
    other = Backend(backend.driver)
    ours, theirs = (one.conversation(*_ids(KEY)) for one in (backend, other))
    await asked(ours, 0, {"n": 1})
    await touched(backend, KEY)
    await ours.messages()
    await asked(theirs, 1, {"n": 10})
    await asked(ours, 2, {"n": 100})
    # A touch by what this process has seen would leave out that of the other.
    await backend.close()
    assert (await other.conversations.usage("acme", "u1")).total == {"n": 111}


async def test_a_process_that_knows_of_no_usage_leaves_that_of_others(backend: Backend) -> None:
    other = Backend(backend.driver)
    ours, theirs = (one.conversation(*_ids(KEY)) for one in (backend, other))
    await ours.add({"role": "user", "content": "u0"})
    await ours.messages()
    await touched(backend, KEY)
    await asked(theirs, 1, {"n": 10})
    await other.close()
    await ours.add({"role": "user", "content": "u2"})
    await backend.close()
    assert (await other.conversations.usage("acme", "u1")).total == {"n": 10}


async def test_a_rebuild_counts_what_a_killed_process_has_not_noted(backend: Backend) -> None:
    killed = Backend(backend.driver)
    await asked(killed.conversation(*_ids(KEY)), 0, {"n": 1})
    await touched(backend, KEY)
    for number in range(1, 4):
        await asked(killed.conversation(*_ids(KEY)), number, {"n": 1})
    await backend.conversations.rebuild("acme", "u1")
    assert (await backend.conversations.usage("acme", "u1")).total == {"n": 4}


async def test_an_erased_conversation_counts_no_longer(backend: Backend) -> None:
    chat = backend.conversation(*_ids(KEY))
    await asked(chat, 0, {"n": 1})
    await touched(backend, KEY)
    await backend.conversations.rebuild("acme", "u1")
    await backend.sessions.erase(KEY)
    assert await backend.conversations.usage("acme", "u1", days=None) == Usage()
    with pytest.raises(SessionNotFound):
        await backend.conversations.get(KEY)


async def test_a_card_whose_usage_is_damaged_is_left_out(backend: Backend) -> None:
    for place in range(2):
        await asked(backend.conversation("acme", "u1", f"c{place}"), 0, {"n": 1})
    for place in range(2):
        await touched(backend, MemoryKey("acme", "u1", f"c{place}"))
    await backend.conversations.rebuild("acme", "u1")
    where = keys.card_key(MemoryKey("acme", "u1", "c0"))
    record = await backend.driver.load(where)
    assert record is not None
    content = Codec().open("card", record.body or b"")
    content["usage"]["days"] = {"yesterday": [1]}
    await backend.driver.replace(
        where, expect=record.version, version="w", body=Codec().seal("card", content), drop=0, ttl=KEEP
    )
    assert (await backend.conversations.usage("acme", "u1")).total == {"n": 1}


def test_days_begin_at_midnight_in_utc() -> None:
    midnight = datetime(2026, 11, 29, tzinfo=UTC).timestamp()
    said = [(midnight + step, {"n": 1}) for step in (-0.5, 0.0, DAY - 0.5)]
    found = usage.total([usage.stated({}, said)])
    assert [row["n"] for row in found.days.values()] == [1, 2]
