"""Logs that belong to the log of a conversation: they live, and go, with it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import ConfigurationError, InvalidKey, LimitReached
from stm_backends.history.log import ItemLog
from stm_backends.records import keys, operations
from stm_backends.records.limits import Limits
from stm_backends.types import MemoryKey

KIND = "claude-agent-sdk"
KEY = MemoryKey("acme", "u", "chat")
DAY = 86_400.0

Item = dict[str, int]


def numbered(count: int) -> list[Item]:
    return [{"n": number} for number in range(count)]


@pytest.fixture
async def backend(driver: Driver) -> AsyncIterator[Backend]:
    backend = Backend(driver)
    await backend.open()
    yield backend
    await backend.close()


async def logs(backend: Backend, **options: object) -> list[str]:
    found = backend.sessions.logs("acme", "u", **options)  # type: ignore[arg-type]
    return [key.session_id async for _, key in found]


async def left(driver: Driver) -> list[str]:
    """Return the kinds of what is stored of the user."""
    scopes = [(kind, keys.scope("acme", "u", kind)) for kind in keys.KINDS]
    return [kind for kind, scope in scopes async for _ in operations.names(driver, scope)]


# Opening and listing


async def test_a_log_beside_another_has_its_own_items_and_is_found_by_name(backend: Backend) -> None:
    log = backend.item_log(KEY, KIND)
    await log.add(numbered(1))
    for name in ("agent/b", "agent/a:%é", "summary"):
        await log.beside(name).add([{"of": name}])
    assert await log.items() == numbered(1)
    assert await log.beside("agent/a:%é").items() == [{"of": "agent/a:%é"}]
    assert {name async for name in log.names_beside()} == {"agent/a:%é", "agent/b", "summary"}
    assert [name async for name in log.names_beside("agent/")] == ["agent/a:%é", "agent/b"]
    assert [name async for name in backend.item_log(MemoryKey("acme", "u", "cha"), KIND).names_beside()] == []


async def test_the_logs_of_a_user_can_be_listed_without_those_beside_others(backend: Backend) -> None:
    await backend.item_log(KEY, KIND).add(numbered(1))
    await backend.item_log(KEY, KIND).beside("x").add(numbered(1))
    await backend.item_log(MemoryKey("acme", "u", "other"), KIND).add(numbered(1))
    await backend.item_log(KEY, "langchain").add(numbered(1))
    assert sorted(await logs(backend)) == ["chat", "chat", "chat+beside/x", "other"]
    assert sorted(await logs(backend, kind=KIND, beside=False)) == ["chat", "other"]
    assert await logs(backend, kind=KIND, prefix="chat") == ["chat+beside/x"]
    assert await logs(backend, prefix="oth") == ["other"]


async def test_only_a_framework_with_several_logs_has_some_beside_another(backend: Backend) -> None:
    with pytest.raises(ConfigurationError, match="one log of langchain"):
        backend.item_log(KEY, "langchain").beside("x")
    with pytest.raises(InvalidKey, match="part of a conversation"):
        backend.item_log(KEY, KIND).beside("x").beside("y")
    with pytest.raises(InvalidKey, match="1,000 fit"):
        backend.item_log(KEY, KIND).beside("x" * 1_000)
    # One whose id leaves no room for a log beside it has none, and can be erased.
    long = MemoryKey("acme", "u", "x" * 995)
    await backend.item_log(long, KIND).add(numbered(1))
    assert [name async for name in backend.item_log(long, KIND).names_beside()] == []
    assert await backend.sessions.erase(long)


# In the list of conversations


async def test_what_is_beside_a_log_is_no_conversation_in_the_list(backend: Backend) -> None:
    await backend.item_log(KEY, KIND).add([{"type": "user", "message": {"content": "Book a table"}}])
    await backend.item_log(KEY, KIND).beside("agent/x").add([{"message": {"content": "Searching"}}])
    await backend.close()  # which makes the touches that wait
    await backend.open()
    assert await backend.conversations.rebuild("acme", "u") == 0
    (card,) = (await backend.conversations.list("acme", "u")).cards
    assert (card.key, card.title, card.turns) == (KEY, "Book a table", 1)
    lines = [
        line
        async for kind, key in backend.sessions.logs("acme", "u")
        async for line in backend.sessions.export_log_lines(key, kind)
    ]
    await backend.sessions.erase_user("acme", "u")
    importing = backend.sessions.importing()
    for line in lines:
        await importing.add(line)
    (card,) = (await backend.conversations.list("acme", "u")).cards
    assert card.key == KEY
    assert len(await backend.item_log(KEY, KIND).beside("agent/x").items()) == 1


async def test_a_log_beside_another_does_not_count_as_a_conversation(driver: Driver) -> None:
    backend = Backend(driver, limits=Limits(user_conversations=2))
    for session in ("a", "b"):
        log = backend.item_log(MemoryKey("acme", "u", session), KIND)
        await log.add(numbered(1))
        for number in range(3):
            await log.beside(str(number)).add(numbered(1))
    with pytest.raises(LimitReached):
        await backend.item_log(MemoryKey("acme", "u", "c"), KIND).add(numbered(1))
    await backend.sessions.erase(MemoryKey("acme", "u", "a"))
    await backend.item_log(MemoryKey("acme", "u", "c"), KIND).add(numbered(1))


# Erasing and purging


async def test_erasing_a_conversation_erases_the_logs_beside_its_own(backend: Backend) -> None:
    for session in ("chat", "chat2", "cha"):
        log = backend.item_log(MemoryKey("acme", "u", session), KIND)
        await log.add(numbered(1))
        # So many that some are in pages.
        for _ in range(200):
            await log.beside("agent/x").add(numbered(1))
        await log.beside("agent/large").add([{"text": "x" * 3_000_000}])
    receipt = await backend.sessions.erase_with_receipt("acme", "u", "chat")
    assert (receipt.erased["logs"], receipt.complete) == (3, True)
    assert receipt.erased["pages"] > 0
    parts = ("", "+beside/agent/large", "+beside/agent/x")
    assert sorted(await logs(backend)) == sorted(f"{one}{part}" for one in ("cha", "chat2") for part in parts)
    await backend.sessions.erase(MemoryKey("acme", "u", "cha"))
    await backend.sessions.erase(MemoryKey("acme", "u", "chat2"))
    await backend.close()
    await backend.open()
    assert await left(backend.driver) == []
    assert not await backend.sessions.has("acme")


async def test_what_is_added_beside_a_log_while_it_is_erased_is_in_the_receipt(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = backend.item_log(KEY, KIND)
    await log.add(numbered(1))
    delete = backend.driver.delete

    async def deleting(key: Key, **options: object) -> bool:
        done = await delete(key, **options)  # type: ignore[arg-type]
        if key == keys.log_key(KEY, KIND):
            await log.beside("late").add(numbered(1))
        return done

    monkeypatch.setattr(backend.driver, "delete", deleting)
    receipt = await backend.sessions.erase_with_receipt("acme", "u", "chat")
    assert (receipt.erased["logs"], receipt.found["logs"], receipt.complete) == (1, 1, False)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_log_beside_another_is_as_old_as_that(backend: Backend, dry_run: bool) -> None:
    now = time.time()
    ages = {"old": (100 * DAY, 0.0), "new": (0.0, 100 * DAY), "both": (100 * DAY, 100 * DAY)}
    for session, (own, beside) in ages.items():
        for age, name in ((own, ""), (beside, "x")):
            key, then = MemoryKey("acme", "u", session), now - age
            log = ItemLog(backend.driver, key, KIND, clock=lambda then=then: then)
            await (log.beside(name) if name else log).add(numbered(1))
    # One whose own log has expired, or was cleared, is judged by itself.
    gone = MemoryKey("acme", "u", "gone")
    orphan = ItemLog(backend.driver, gone, KIND, clock=lambda: now - 100 * DAY).beside("x")
    await orphan.add(numbered(1))
    purged = await backend.sessions.purge("acme", "u", older_than=DAY, dry_run=dry_run)
    assert (purged.logs, purged.kept, purged.empty) == (5, 1, 0)
    for session in ages:
        log = backend.item_log(MemoryKey("acme", "u", session), KIND)
        is_kept = dry_run or session == "new"
        assert [await log.items(), await log.beside("x").items()] == [numbered(is_kept)] * 2, session
    assert await orphan.items() == numbered(dry_run)
    again = await backend.sessions.purge("acme", "u", older_than=DAY)
    assert (again.logs, again.empty) == ((5, 0) if dry_run else (0, 5))


async def test_what_is_added_beside_a_log_after_it_was_purged_stays(backend: Backend) -> None:
    then = time.time() - 100 * DAY
    await ItemLog(backend.driver, KEY, KIND, clock=lambda: then).add(numbered(1))
    await backend.sessions.purge("acme", "u", older_than=DAY)
    await backend.item_log(KEY, KIND).beside("x").add(numbered(1))
    purged = await backend.sessions.purge("acme", "u", older_than=DAY)
    assert (purged.logs, purged.empty, purged.kept) == (0, 1, 1)
    assert await backend.item_log(KEY, KIND).beside("x").items() == numbered(1)
