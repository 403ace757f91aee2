"""Two imports of one conversation at once: each turn once, in order, and nothing that is half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stm_backends import Backend, ConversationTurn, MemoryKey, SessionExists, ShortTermMemoryConfig
from stm_backends.admin.importing import Import, OnConflict
from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.records import keys
from tests.support.transcripts import pages_of

KEY = MemoryKey("acme", "u", "s")
TURNS = [f"t{number}" for number in range(12)]


def document(ids: list[str] = TURNS) -> dict[str, Any]:
    turns = [{"turn_id": one, "user_message": one, "assistant_response": "Hi"} for one in ids]
    key = {"tenant_id": "acme", "user_id": "u", "session_id": "s"}
    return {"format": "stm-session", "version": 1, "key": key, "body": {}, "turns": turns}


class Stops(WrapperDriver):
    """Waits before its n-th append to a conversation, until it may go on."""

    def __init__(self, store: MemoryStore, number: int) -> None:
        super().__init__(MemoryDriver(store))
        self._left = number
        self.waits, self.goes_on = asyncio.Event(), asyncio.Event()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        if operation == "append" and isinstance(key, Key) and key.scope.endswith(":memory"):
            self._left -= 1
            if self._left == 0:
                self.waits.set()
                await self.goes_on.wait()
        return await send()


async def stored(store: MemoryStore) -> list[str]:
    async with Backend(MemoryDriver(store)) as backend:
        exported = await backend.sessions.export(KEY)
    return [turn["turn_id"] for turn in exported["turns"]]


async def mixed(on_conflict: OnConflict, *, live: bool = False) -> list[str]:
    """Let an import begin, another begin, the first one end, and the other one end; returns the turns.

    With `live`, someone adds a turn before the other one ends.
    """
    store = MemoryStore()
    first, second = Stops(store, 6), Stops(store, 3)
    async with Backend(first) as one, Backend(second) as other:
        begun = asyncio.create_task(one.sessions.import_(document(), on_conflict=on_conflict))
        await first.waits.wait()
        later = asyncio.create_task(other.sessions.import_(document(), on_conflict=on_conflict))
        await second.waits.wait()
        first.goes_on.set()
        await begun
        if live:
            turn = ConversationTurn("live", "Hi")
            await other.memory(KEY, ShortTermMemoryConfig("truncation")).add_turn(turn, turn_id="live")
        second.goes_on.set()
        await later
    return await stored(store)


@pytest.mark.parametrize("on_conflict", ["merge", "replace"])
async def test_two_imports_at_once_store_each_turn_once_and_in_order(on_conflict: OnConflict) -> None:
    assert await mixed(on_conflict) == TURNS


async def test_a_turn_that_someone_adds_meanwhile_stays() -> None:
    found = await mixed("replace", live=True)
    assert [one for one in found if one != "live"] == TURNS
    assert "live" in found


async def test_an_import_that_does_not_look_at_the_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def left(*_: Any) -> None: ...

    monkeypatch.setattr(Import, "_put_in_order", left)
    assert sorted(await mixed("replace")) == sorted(TURNS)
    assert await mixed("replace") != TURNS


async def test_an_import_that_refuses_leaves_that_of_another_alone() -> None:
    store = MemoryStore()
    first = Stops(store, 6)
    async with Backend(first) as one, Backend(MemoryDriver(store)) as other:
        begun = asyncio.create_task(one.sessions.import_(document()))
        await first.waits.wait()
        with pytest.raises(SessionExists):
            await other.sessions.import_(document())
        first.goes_on.set()
        await begun
        assert await pages_of(other.driver, KEY) == []
        assert await other.driver.load(keys.card_key(KEY))
    assert await stored(store) == TURNS
