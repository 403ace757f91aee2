"""The JSON of the page: lists, history, what the model is shown and why not more, and what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Denied,
    MemoryHealth,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
)
from stm_backends.drivers.contract import ANY, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Unavailable
from stm_backends.inspect import reading
from stm_backends.inspect.read_only import ReadOnlyDriver
from stm_backends.inspect.shown import shown_of
from stm_backends.memory.view import render
from stm_backends.records import keys
from stm_backends.records.body import Lease
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support.catalogue import touched
from tests.support.inspected import Asked, alter, say

KEY = MemoryKey("acme", "u1", "trip")
OF = ["acme", "u1", "trip"]
ALL = config(zone=2, transcript=True, total_max_tokens=0)
NEWEST = ShortTermMemoryConfig("truncation")


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    async with Backend(driver, close_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
async def asked(driver: Driver, backend: Backend) -> Asked:
    """The page on the same datastore; its driver is open."""
    return Asked(driver)


def reasons(state: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {one["reason"]: (one["first"], one["last"]) for one in state["shown"]["left_out"]}


def numbers(state: dict[str, Any]) -> list[int]:
    return [part["number"] for part in state["shown"]["parts"] if part["number"] is not None]


# Lists


async def test_tenants_users_and_conversations_are_listed_by_last_activity(
    backend: Backend, asked: Asked
) -> None:
    for session, at in (("one", 1.7e9), ("two", 1.8e9)):
        key = MemoryKey("acme", "u1", session)
        await say(backend, key, 1, NEWEST, at=at)
        await touched(backend, key)
    assert await asked("tenants") == {"tenants": ["acme"], "more": False}
    assert (await asked("tenants", like="x"))["tenants"] == []
    assert (await asked("users", of=["acme"]))["users"] == ["u1"]
    found = await asked("conversations", of=["acme", "u1"])
    assert [one["key"] for one in found["conversations"]] == [["acme", "u1", "two"], ["acme", "u1", "one"]]
    assert (found["conversations"][0]["title"], found["after"]) == ("Wish 0", None)


async def test_a_list_goes_on_where_a_page_has_ended(
    backend: Backend, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.inspect.listing.PAGE", 2)
    for number in range(5):
        key = MemoryKey("acme", "u1", f"chat {number}")
        await say(backend, key, 1, NEWEST)
        await touched(backend, key)
    found, after = set[str](), None
    for _ in range(3):
        page = await asked("conversations", of=["acme", "u1"], after=after)
        found |= {one["key"][2] for one in page["conversations"]}
        after = page["after"]
    assert (len(found), after) == (5, None)


async def test_a_datastore_that_cannot_list_tenants_says_so(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tenants() -> Any:
        raise ConfigurationError("this datastore cannot list its tenants")

    monkeypatch.setattr(asked.backend.sessions, "tenants", tenants)
    assert (await asked("tenants"))["says"] == "this datastore cannot list its tenants"


async def test_filters_find_what_is_degraded_waits_is_large_or_over_budget(
    backend: Backend, asked: Asked
) -> None:
    for session, count in (("small", 1), ("large", 9), ("bad", 2), ("slow", 3)):
        await say(backend, MemoryKey("acme", "u1", session), count, NEWEST)
    await alter(backend, MemoryKey("acme", "u1", "bad"), health=MemoryHealth.DEGRADED, attempts=4)
    await alter(backend, MemoryKey("acme", "u1", "slow"), health=MemoryHealth.RETRY, attempts=1)

    async def listed(by: str, **more: Any) -> list[str]:
        found = await asked("filtered", of=["acme"], by=by, **more)
        assert (found["read"], found["damaged"], found["more"]) == (4, 0, False)
        return [one["key"][2] for one in found["conversations"]]

    assert await listed("degraded") == ["bad"]
    assert {*await listed("waiting")} == {"bad", "slow"}
    assert (await listed("largest"))[0] == "large"
    assert await listed("over", budget="100000") == []
    assert (await listed("over", budget="1"))[0] == "large"
    answer = await asked.answer("filtered", of=["acme"], by="other")
    assert (answer.status, answer.json()["kind"]) == (400, "ConfigurationError")


async def test_a_damaged_record_is_counted_and_others_are_listed(
    driver: Driver, backend: Backend, asked: Asked
) -> None:
    await say(backend, KEY, 1, NEWEST)
    bad = keys.memory_key(MemoryKey("acme", "u1", "bad"))
    await driver.replace(bad, b"nothing", version="v1", expect=ANY, ttl=None)
    found = await asked("filtered", of=["acme", "u1"], by="largest")
    assert (found["read"], found["damaged"], len(found["conversations"])) == (2, 1, 1)
    answer = await asked.answer("conversation", of=["acme", "u1", "bad"])
    assert (answer.status, answer.json()["kind"]) == (422, "Corrupt")


async def test_days_count_turns_tokens_and_bytes_of_pages_too(backend: Backend, asked: Asked) -> None:
    memory = backend.memory(KEY)
    now = time.time()
    for number in range(80):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=now - 86_400))
    await memory.add_turn(ConversationTurn("Today", "Noted.", ts=now))
    await memory.flush()
    await touched(backend, KEY)
    found = await asked("days", of=["acme"], days="3")
    assert [one["turns"] for one in found["days"]] == [0, 80, 1]
    assert all(one["tokens"] > 0 and one["bytes"] > 0 for one in found["days"][1:])
    assert (found["conversations"], found["more"]) == (1, False)


async def test_days_have_what_answers_took(backend: Backend, asked: Asked) -> None:
    chat = backend.conversation("acme", "u1", "chat")
    said = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    await chat.add(*said, usage={"output_tokens": 7})
    await touched(backend, MemoryKey("acme", "u1", "chat"))
    found = await asked("days", of=["acme", "u1"], days="2")
    assert found["days"][-1]["usage"] == {"output_tokens": 7}
    state = await asked("conversation", of=["acme", "u1", "chat"])
    assert state["usage"] == {"output_tokens": 7}


# One conversation


async def test_history_comes_in_pages_and_is_found_by_words(backend: Backend, asked: Asked) -> None:
    await say(backend, KEY, 150)
    page = await asked("history", of=OF)
    assert [one["number"] for one in page["units"]] == [*range(100, 150)]
    assert page["units"][-1]["lines"] == [["user", "Wish 149"], ["assistant", "Noted."]]
    assert (page["units"][0]["summarized"], page["units"][-1]["retained"]) == (True, True)
    older = await asked("history", of=OF, before="100")
    assert [one["number"] for one in older["units"]] == [*range(50, 100)]
    around = await asked("history", of=OF, at="3")
    assert 3 in [one["number"] for one in around["units"]]
    found = await asked("find", of=OF, words="wish 14")
    assert [one["number"] for one in found["found"]] == [*range(149, 139, -1), 14]
    assert (found["found"][-1]["snippet"], found["before"]) == ("Wish 14", None)


async def test_a_search_goes_on_where_it_has_stopped(
    backend: Backend, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    await say(backend, KEY, 30)
    monkeypatch.setattr(reading, "_AT_ONCE", 8)
    monkeypatch.setattr(reading, "_SEARCHED", 8)
    found, before = list[int](), None
    for _ in range(10):
        some = await asked("find", of=OF, words="Wish", before=None if before is None else str(before))
        found += [one["number"] for one in some["found"]]
        if (before := some["before"]) is None:
            break
    assert found == [*range(29, -1, -1)]


async def test_the_page_shows_what_the_model_is_shown(backend: Backend, driver: Driver) -> None:
    asked = Asked(driver, ALL)
    memory = backend.memory(KEY, ALL, summarizer=LedgerSummarizer())
    await say(backend, KEY, 7, ALL)
    context = (await memory.get_llm_context())["conversation_memory"]
    state = await asked("conversation", of=OF)
    assert state["config"]["given"]
    assert numbers(state) == [5, 6]
    said = [part["lines"][0][1] for part in state["shown"]["parts"]]
    assert said == [context["summary"], "Wish 5", "Wish 6"]
    assert reasons(state) == {"summarized": (0, 4)}
    assert state["shown"]["summary"]["shown"] == "whole"
    assert state["recent_from"] == 5
    snapshot = await memory.shared.load_copy("test")
    pending, recent = snapshot.split(ALL)
    view = render(
        ALL, health=MemoryHealth.HEALTHY, summary=snapshot.body.summary, pending=pending, recent=recent
    )
    assert state["shown"]["tokens"] == view.tokens


async def test_what_the_budget_cuts_is_named(backend: Backend, asked: Asked) -> None:
    await say(backend, KEY, 10, NEWEST)
    long = ConversationTurn("long " * 400, "Noted.", ts=1.7e9)
    await backend.memory(KEY, NEWEST).add_turn(long)
    budget = {"full_zone_turns": "11", "summary_max_tokens": "0", "total_max_tokens": "120"}
    state = await asked("conversation", of=OF, strategy="rolling_summary", **budget)
    assert reasons(state) == {"budget": (0, 9)}
    assert numbers(state) == [10]
    assert state["shown"]["parts"][-1]["cut"]
    assert state["shown"]["tokens"] <= 120
    (why,) = [one["why"] for one in state["shown"]["left_out"]]
    assert "total_max_tokens=120" in why


async def test_a_degraded_memory_says_what_it_hides_and_what_was_dropped(
    backend: Backend, asked: Asked
) -> None:
    # A memory that has not begun to summarize, so that nothing else changes the record.
    memory = backend.memory(KEY, config(zone=2, fold_batch_turns=100), summarizer=LedgerSummarizer())
    for number in range(12):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
    await alter(
        backend,
        KEY,
        health=MemoryHealth.DEGRADED,
        attempts=4,
        dropped=3,
        summary="They want a table.",
        folded=2,
        next_attempt_at=time.time() + 30,
    )
    state = await asked("conversation", of=OF)
    assert (state["happened"]["base"], state["recent_from"]) == (5, 12)
    assert reasons(state) == {"gone": (0, 4), "degraded": (5, 11)}
    gone = next(one["why"] for one in state["shown"]["left_out"] if one["reason"] == "gone")
    assert "3 were dropped without a summary" in gone
    assert (state["shown"]["summary"]["shown"], state["happened"]["dropped"]) == ("none", 3)
    assert "failed 4 times" in state["shown"]["summary"]["why"]


async def test_a_summary_that_lost_something_is_shown_with_its_cover(backend: Backend, asked: Asked) -> None:
    async def bad(request: Any) -> dict[str, str]:
        return {"summary": "They talked."}

    memory = backend.memory(KEY, ALL, summarizer=bad)
    for number in range(150):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
    await memory.flush()
    state = await asked("conversation", of=OF)
    assert (state["shown"]["summary"]["text"], reasons(state)["summarized"][0]) == ("They talked.", 0)
    covers = (await asked("covers", of=OF))["covers"]
    assert [one["left"] for one in covers] == sorted((one["left"] for one in covers), reverse=True)
    assert covers[0]["text"] == "They talked."
    assert covers[0]["end"] <= covers[0]["left"]
    page = await asked("history", of=OF, at="0")
    assert page["units"][0]["lines"][0] == ["user", "Wish 0"]


async def test_leases_edits_and_copies_are_told(backend: Backend, asked: Asked) -> None:
    chat = backend.conversation("acme", "u1", "trip")
    for number in range(3):
        await chat.add(
            {"role": "user", "content": f"Wish {number}"}, {"role": "assistant", "content": "Noted."}
        )
    await chat.rewind(3)
    await chat.remove(1)
    await chat.fork("copy")
    await alter(backend, KEY, lease=Lease(1.7e9, 60.0))
    happened = (await asked("conversation", of=OF))["happened"]
    assert happened["lease"] == {"at": 1.7e9, "until": 1.7e9 + 60, "overdue": None}
    assert happened["branches"] == [{"revision": 0, "first": 4, "newest": 5}]
    assert happened["revision"] > 0
    gone = await asked("history", of=OF, revision="0")
    assert [one["number"] for one in gone["units"]] == [*range(6)]
    copy = (await asked("conversation", of=["acme", "u1", "copy"]))["happened"]
    assert copy["fork"] == {"of": "trip", "to": 3}


OPENAI = [{"role": "user", "content": "Wish {}"}, {"role": "assistant", "content": "Noted {}."}]
ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "Wish {}"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Noted {}."}]},
]


def filled(message: Any, number: int) -> Any:
    if isinstance(message, str):
        return message.format(number)
    if isinstance(message, list):
        return [filled(one, number) for one in message]
    return {name: filled(value, number) for name, value in message.items()}


@pytest.mark.parametrize("said", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
async def test_messages_are_shown_by_their_numbers_and_the_rest_is_left_out(
    backend: Backend, asked: Asked, said: list[Any]
) -> None:
    chat = backend.conversation("acme", "u1", "trip")
    for number in range(20):
        await chat.add(*(filled(message, number) for message in said))
    whole = await asked("conversation", of=OF)
    assert whole["what"] == "messages"
    assert numbers(whole) == [*range(40)]
    assert reasons(whole) == {}
    small = await asked(
        "conversation",
        of=OF,
        strategy="rolling_summary",
        full_zone_turns="50",
        summary_max_tokens="0",
        total_max_tokens="100",
        overflow_policy="truncate_oldest",
    )
    shown = numbers(small)
    assert shown == [*range(shown[0], 40)]
    assert reasons(small) == {"budget": (0, shown[0] - 1)}
    assert small["shown"]["tokens"] <= 100


async def test_a_shape_of_the_callers_own_is_named_as_what_cannot_be_shown(
    backend: Backend, asked: Asked
) -> None:
    await backend.conversation("acme", "u1", "trip").add({"role": "user", "content": "Hello"})
    document = await backend.sessions.export(KEY)
    document["turns"].append({"turn_id": "own.0", "item": {"my": "own"}})
    await backend.sessions.import_(document, on_conflict="replace")
    state = await asked("conversation", of=OF)
    assert state["shown"]["error"]
    assert len((await asked("history", of=OF))["units"]) == 2


async def test_the_log_of_a_framework_is_shown_where_there_are_no_turns(
    backend: Backend, asked: Asked
) -> None:
    await backend.item_log(KEY, "openai-agents").add([{"role": "user", "content": "Wish"}])
    state = await asked("conversation", of=OF)
    assert (state["exists"], state["logs"]) == (False, ["openai-agents"])
    page = await asked("history", of=OF, log="openai-agents")
    assert page["units"][0]["lines"] == [["user", "Wish"]]
    assert (await asked.answer("history", of=OF, log="other")).status == 400


# Live, read-only, sealed, damaged


async def test_a_mark_that_was_seen_saves_the_rest_until_something_changes(
    backend: Backend, asked: Asked, calls: list[str]
) -> None:
    await say(backend, KEY, 2, NEWEST)
    await touched(backend, KEY)
    mark = (await asked("conversation", of=OF))["mark"]
    calls.clear()
    assert (await asked("conversation", of=OF, seen=mark))["same"]
    assert calls == ["load"]
    await say(backend, KEY, 1, NEWEST)
    assert (await asked("conversation", of=OF, seen=mark))["mark"] != mark


async def test_nothing_is_written_by_any_request(
    driver: Driver, backend: Backend, asked: Asked, calls: list[str]
) -> None:
    await say(backend, KEY, 150)
    await touched(backend, KEY)
    await backend.close()
    await driver.open()
    calls.clear()
    for name, query in (
        ("where", {}),
        ("tenants", {}),
        ("users", {"of": ["acme"]}),
        ("conversations", {"of": ["acme", "u1"]}),
        ("filtered", {"of": ["acme"], "by": "largest"}),
        ("days", {"of": ["acme"]}),
        ("conversation", {"of": OF}),
        ("history", {"of": OF}),
        ("find", {"of": OF, "words": "wish"}),
        ("covers", {"of": OF}),
    ):
        await asked(name, **query)
    await asyncio.sleep(0.05)
    assert {*calls} <= {"load", "scan"}


async def test_the_driver_of_the_page_refuses_to_write(driver: Driver) -> None:
    only = ReadOnlyDriver(driver)
    key = Key("acme:u1:memory", "trip")
    with pytest.raises(Denied):
        await only.append(key, b"entry", initial_version="v1", ttl=None)
    with pytest.raises(Denied):
        await only.replace(key, b"body", version="v1", expect=ANY, ttl=None)
    await driver.append(key, b"entry", initial_version="v1", ttl=None)
    assert not await only.delete(key)
    assert await only.load(key) is not None


async def test_sealed_data_is_shown_with_its_keys_alone() -> None:
    store = MemoryStore()
    sealing = Sealing(StaticKeys({"k1": b"1" * 32}, primary="k1"))
    async with Backend(MemoryDriver(store), sealing=sealing, close_timeout_s=0.2) as backend:
        await say(backend, KEY, 1, NEWEST)
    with_keys, without = Asked(MemoryDriver(store), sealing=sealing), Asked(MemoryDriver(store))
    async with with_keys.backend:
        assert len((await with_keys("history", of=OF))["units"]) == 1
        assert (await with_keys("users", of=["acme"]))["seal"] is None
    async with without.backend:
        assert (await without("users", of=["acme"]))["seal"] == "sealed"
        answer = await without.answer("history", of=OF)
        assert (answer.status, "sealed" in answer.json()["error"]) == (422, True)


async def test_an_outage_has_a_status_and_the_next_request_works(
    driver: Driver, backend: Backend, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    await say(backend, KEY, 1, NEWEST)
    load: Callable[..., Any] = driver.load

    async def down(*args: Any, **options: Any) -> Any:
        raise Unavailable("no answer", backend="test", operation="load")

    monkeypatch.setattr(driver, "load", down)
    answer = await asked.answer("conversation", of=OF)
    assert (answer.status, answer.json()["kind"]) == (503, "Unavailable")
    monkeypatch.setattr(driver, "load", load)
    assert (await asked("conversation", of=OF))["exists"]


@pytest.mark.parametrize(
    ("name", "query", "status"),
    [
        ("conversation", {"of": ["acme", "u1", "none"]}, 404),
        ("conversation", {"of": ["acme", "u1"]}, 400),
        ("conversation", {"of": ["acme", "u1", " "]}, 400),
        ("conversation", {"of": ["acme", "u1", 3]}, 400),
        ("conversation", {"of": "["}, 400),
        ("conversation", {}, 400),
        ("history", {"of": OF, "before": "x"}, 400),
        ("history", {"of": OF, "before": "1", "after": "2"}, 400),
        ("conversation", {"of": OF, "total_max_tokens": "-1"}, 400),
        ("conversation", {"of": OF, "strategy": "other"}, 400),
        ("days", {"of": ["acme"], "days": "9999"}, 400),
        ("nothing", {}, 404),
    ],
)
async def test_a_wrong_request_has_a_status(
    backend: Backend, asked: Asked, name: str, query: dict[str, Any], status: int
) -> None:
    await say(backend, KEY, 1, NEWEST)
    assert (await asked.answer(name, **query)).status == status


async def test_ids_may_be_any_text(backend: Backend, asked: Asked) -> None:
    for session in ("a b/c?d=e&f#g", "%2e%2e/..", "\u202e:\u00e9", '"><script>'):
        key = MemoryKey("ac/me", "u&1", session)
        await say(backend, key, 1, NEWEST)
        state = await asked("conversation", of=["ac/me", "u&1", session])
        assert state["key"] == ["ac/me", "u&1", session]


async def test_what_is_shown_needs_no_event_loop_and_no_datastore(backend: Backend) -> None:
    await say(backend, KEY, 3, NEWEST)
    snapshot = (await backend.memory(KEY).shared.load_copy("test")).transcribed()
    assert shown_of(snapshot, NEWEST).as_json()["tokens"] > 0
