"""Erasures and their receipts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

import pytest

from stm_backends.admin.receipt import COUNTED
from stm_backends.backend import Backend
from stm_backends.catalogue.index import Catalogue
from stm_backends.cli.erasing import show
from stm_backends.drivers.contract import ANY, Driver, Key
from stm_backends.drivers.erasing import NOT_STATED, expired_names, finish_erasure
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Denied, Unavailable
from stm_backends.records import keys
from stm_backends.testing.memory_contract import until
from stm_backends.types import ConversationTurn, MemoryKey, ShortTermMemoryConfig

T = TypeVar("T")

KEY = MemoryKey("acme", "ada", "chat")
OTHER = MemoryKey("acme", "ada", "other")
CONFIG = ShortTermMemoryConfig(strategy="truncation")
RUN = {"tool_context": {"tenant_id": "acme", "user_id": "ada"}}


@pytest.fixture
def backend(driver: Driver) -> Backend:
    return Backend(driver)


async def add(backend: Backend, key: MemoryKey, text: str = "Hello") -> None:
    memory = backend.memory(key, CONFIG)
    await memory.add_turn(ConversationTurn(text, "Hi"))
    await memory.close(timeout=5)
    await backend.conversations.get(key)


async def users(backend: Backend) -> list[str]:
    return [user async for user in backend.sessions.users("acme")]


async def fill(backend: Backend) -> None:
    for key in (KEY, OTHER):
        await add(backend, key)
    await backend.item_log(KEY, "langchain").add([{"a": 1}])
    await backend.state_store.save_memory_state(KEY.composite(), {})
    await backend.state_store.save_memory_state(f"kv:v1:{KEY.composite()}:notes", {})
    await backend.state_store.save_planner_state("token", RUN)


async def test_the_receipt_of_a_user_counts_every_kind(backend: Backend) -> None:
    await fill(backend)
    receipt = await backend.sessions.erase_with_receipt("acme", "ada")
    assert receipt.erased == {
        "conversations": 2,
        "cards": 4,
        "logs": 1,
        "states": 2,
        "paused_runs": 1,
        "directory_entries": 1,
    }
    assert (receipt.records, receipt.found, receipt.undecided) == (6, {}, 0)
    assert receipt.began <= receipt.ended
    assert (await backend.sessions.erase_with_receipt("acme", "ada")).erased == {}


async def test_a_receipt_is_json_and_says_what_was_erased_where(backend: Backend) -> None:
    await fill(backend)
    receipt = await backend.sessions.erase_with_receipt("acme", "ada", "chat")
    document = json.loads(json.dumps(receipt.as_json(datastore="sqlite:///stm.db")))
    assert set(document["erased"]) == set(COUNTED)
    assert document["erased"]["conversations"] == 1
    assert document["of"] == {"tenant_id": "acme", "user_id": "ada", "session_id": "chat"}
    assert (document["format"], document["version"]) == ("stm-erasure", 1)
    assert document["datastore"] == "sqlite:///stm.db"
    assert document["library"].startswith("stm-backends ")
    assert document["second_reading"] == {}
    assert backend.name in document["remains"].lower()
    assert datetime.fromisoformat(document["began"]) <= datetime.fromisoformat(document["ended"])


async def test_every_kind_that_a_receipt_counts_is_printed_by_a_name(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = await backend.sessions.erase_with_receipt("acme", "ada")
    for count in (1, 2):
        show(replace(receipt, erased=dict.fromkeys(COUNTED, count)), "acme:ada")
    printed = capsys.readouterr().out
    assert "1 page of transcripts," in printed
    assert "2 pages of transcripts," in printed


async def test_the_receipt_of_a_tenant_adds_up_its_users(backend: Backend) -> None:
    for user in ("ada", "bob", "c:d"):
        await add(backend, MemoryKey("acme", user, "chat"))
    receipt = await backend.sessions.erase_with_receipt("acme")
    assert receipt.erased == {"conversations": 3, "cards": 6, "directory_entries": 3}
    assert await users(backend) == []


async def test_what_a_pod_writes_meanwhile_is_in_the_receipt_and_listed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes when everything was erased, before the second reading: it may have been slow."""
    pod = Backend(backend.driver)
    await add(pod, KEY)
    delete = backend.driver.delete

    async def deleting(key: Key, **options: Any) -> bool:
        if key == keys.directory_key("acme", "ada"):
            monkeypatch.undo()
            await add(pod, KEY, "a late turn")
        return await delete(key, **options)

    monkeypatch.setattr(backend.driver, "delete", deleting)
    receipt = await backend.sessions.erase_with_receipt("acme", "ada")
    assert receipt.erased["conversations"] == 1
    assert receipt.found == {"conversations": 1, "cards": 2}
    assert await users(backend) == ["ada"]


async def test_an_erasure_ends_though_what_began_meanwhile_cannot_be_listed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pod = Backend(backend.driver)
    await add(pod, KEY)
    delete = backend.driver.delete

    async def away(self: Catalogue, key: MemoryKey) -> None:
        del self, key
        raise Unavailable("the datastore is away")

    async def deleting(key: Key, **options: Any) -> bool:
        if key == keys.directory_key("acme", "ada"):
            monkeypatch.undo()
            await add(pod, KEY, "a late turn")
            monkeypatch.setattr(Catalogue, "load", away)
        return await delete(key, **options)

    monkeypatch.setattr(backend.driver, "delete", deleting)
    receipt = await backend.sessions.erase_with_receipt("acme", "ada")
    assert (receipt.erased["conversations"], receipt.found["conversations"]) == (1, 1)
    assert "could not write to the catalogue" in caplog.text


async def test_a_pod_that_writes_afterwards_starts_a_new_conversation(backend: Backend) -> None:
    memory = Backend(backend.driver).memory(KEY, CONFIG)
    await memory.add_turn(ConversationTurn("before", "Hi"))
    receipt = await backend.sessions.erase_with_receipt("acme", "ada")
    assert receipt.found == {}
    await memory.add_turn(ConversationTurn("after", "Hi"))
    await memory.close(timeout=5)
    assert [turn.user_message for turn in await backend.memory(KEY, CONFIG).turns()] == ["after"]

    async def is_listed() -> bool:
        return await users(backend) == ["ada"]

    # A touch of what was erased may be taking the listing back, and then lists the user again.
    await until(is_listed, "the user is listed")


async def test_a_user_leaves_the_directory_with_the_last_conversation(backend: Backend) -> None:
    for key in (KEY, OTHER):
        await add(backend, key)
    await backend.sessions.erase(KEY)
    assert await users(backend) == ["ada"]
    await backend.sessions.erase(OTHER)
    assert await users(backend) == []


# What has expired


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Unswept(MemoryDriver):
    """Its writes do not remove what has expired."""

    _swept = 0


@pytest.fixture
async def aged() -> tuple[Backend, Clock]:
    """A backend with an expired record of each kind, and parts; the store has removed none of them."""
    clock = Clock()
    driver = Unswept(clock=clock, max_entry_bytes=20_000, max_record_bytes=50_000)
    backend = Backend(driver)
    await backend.open()
    await driver.replace(keys.directory_key("acme", "ada"), b"x", version="v", expect=ANY, ttl=60)
    for kind in keys.KINDS:
        where = Key(keys.scope("acme", "ada", kind), "old")
        await driver.replace(where, b"x", version="v", expect=ANY, ttl=60)
    await driver.replace(keys.planner_key("old"), b"x", version="v", expect=ANY, ttl=60)
    clock.now += 61
    return backend, clock


@pytest.mark.parametrize("owner", [("acme", "ada"), ("acme",)])
async def test_expired_records_that_still_exist_are_erased(
    aged: tuple[Backend, Clock], owner: tuple[str, ...]
) -> None:
    backend, _ = aged
    assert await users(backend) == []
    receipt = await backend.sessions.erase_with_receipt(*owner)
    assert (receipt.records, receipt.found) == (0, {})
    assert receipt.erased == {"expired": len(keys.KINDS)}
    # Nothing is in the store, expired or not.
    inner: Any = backend.driver.inner
    assert not inner._store.scopes  # noqa: SLF001 -- no operation shows it


async def test_an_expired_conversation_is_erased_by_its_key(aged: tuple[Backend, Clock]) -> None:
    backend, _ = aged
    assert not await backend.sessions.erase(MemoryKey("acme", "ada", "old"))
    scope = keys.scope("acme", "ada", "memory")
    assert [name async for name in expired_names(backend.driver, scope)] == []


async def test_a_driver_without_these_methods_is_erased_all_the_same(driver: Driver) -> None:
    class Plain(WrapperDriver):
        def __getattribute__(self, name: str) -> Any:
            # Hides the driver within from those who look for its methods.
            if name in ("inner", "scan_expired", "finish_erasure"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    plain = Plain(driver)
    assert await finish_erasure(plain) == NOT_STATED
    assert [name async for name in expired_names(plain, "acme:ada:memory")] == []


async def test_the_methods_are_found_through_drivers_around_a_driver(driver: Driver) -> None:
    assert driver.name in (await finish_erasure(WrapperDriver(WrapperDriver(driver)))).text.lower()


# Saved states of several readings


async def saved(backend: Backend, *texts: str) -> Callable[[], Any]:
    for text in texts:
        await backend.state_store.save_memory_state(text, {"of": text})

    async def left() -> list[str]:
        return [text for text in texts if await backend.state_store.load_memory_state(text) is not None]

    return left


async def test_no_erasure_reaches_the_states_of_a_tenant_with_a_colon(backend: Backend) -> None:
    """PenguiFlow writes the ids as they are: the tenant `a:b` and its user `c` look like `a` and `b`."""
    raw = "kv:v1:a:b:c:chat:session:notes:diagnosis"
    left = await saved(backend, raw)
    for owner in (("a", "b"), ("a", "b:c"), ("a",)):
        receipt = await backend.sessions.erase_with_receipt(*owner)
        assert receipt.erased == {}
    assert await left() == [raw]
    receipt = await backend.sessions.erase_with_receipt("a:b", "c")
    assert (receipt.erased, receipt.undecided) == ({}, 1)
    assert await backend.state_store.delete_memory_state(raw)


async def test_a_receipt_says_if_undecided_states_could_not_be_listed(
    driver: Driver, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    class OfOneTenant(WrapperDriver):
        denied = 0

        async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
            if key == keys.OTHER_BLOBS:
                self.denied += 1
                raise Denied("this user lacks permission")
            return await send()

    await fill(backend)
    await add(backend, MemoryKey("acme", "bob", "chat"))
    narrow = OfOneTenant(driver)
    receipt = await Backend(narrow).sessions.erase_with_receipt("acme")
    assert (receipt.erased["conversations"], receipt.found, receipt.undecided) == (3, {}, None)
    assert receipt.as_json()["undecided_states"] is None
    assert narrow.denied == 1, "not once for each user"
    assert show(receipt, "acme")
    assert "Not checked, for lack of permission" in capsys.readouterr().err


async def test_states_below_a_composite_with_a_colon_are_erased_with_their_user(backend: Backend) -> None:
    key = MemoryKey("a:b", "c", "chat:1")
    own = f"kv:v1:{key.composite()}:pins"
    left = await saved(backend, own, f"kv:v1:{MemoryKey('a:b', 'c', 'chat').composite()}:pins")
    assert await backend.sessions.erase(key)
    assert own not in await left()
    assert await backend.sessions.erase_user("a:b", "c") == 1
    assert await left() == []


async def test_the_second_reading_of_a_conversation_reads_states_below_it(driver: Driver) -> None:
    class Late(WrapperDriver):
        """Another process saves a state again, just after it was erased."""

        async def delete(self, key: Key, *, expect: Any = ANY) -> bool:
            done = await super().delete(key, expect=expect)
            if done and key.scope.endswith(":blob"):
                await self.inner.replace(key, b"{}", version="late", expect=ANY, ttl=None)
            return done

    backend = Backend(Late(driver))
    await add(backend, KEY)
    await backend.state_store.save_memory_state(f"kv:v1:{KEY.composite()}:notes", {})
    receipt = await backend.sessions.erase_with_receipt("acme", "ada", "chat")
    assert receipt.erased["states"] == 1
    assert receipt.found == {"states": 1}
