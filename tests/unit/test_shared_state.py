"""State that items of several logs change: each item counts once, whoever dies and whoever reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stm_backends import Backend, Corrupt, Unavailable, open_backend
from stm_backends.history.shared_state import SharedState
from stm_backends.records.state_store import States

NAME = "kv:v1:acme:u1:%shared"


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with open_backend("memory://") as backend:
        yield backend


class Fates:
    """What is known of items; whatever is not, may yet come."""

    def __init__(self) -> None:
        self.known: dict[str, bool] = {}
        self.asked: list[str] = []

    async def __call__(self, entry: str, note: dict[str, Any]) -> bool | None:
        del note
        self.asked.append(entry)
        return self.known.get(entry)


def shared(store: States, fates: Fates) -> SharedState:
    lock = asyncio.Lock()
    return SharedState(store, NAME, fates, lambda: lock)


async def test_what_is_announced_is_shown_once_it_is_stored(backend: Backend) -> None:
    fates = Fates()
    state = shared(backend.state_store, fates)
    assert await state.read() == {}
    await state.announce("one", {"set": {"a": 1}})
    assert await state.read() == {}
    await state.decide({"one": True})
    assert await state.read() == {"a": 1}
    assert fates.asked == ["one"]


async def test_what_never_will_be_stored_is_dropped(backend: Backend) -> None:
    state = shared(backend.state_store, Fates())
    await state.announce("one", {"set": {"a": 1}})
    await state.decide({"one": False, "unknown": True})
    assert await state.read() == {}
    assert await backend.state_store.load_memory_state(NAME) == {"state": {}, "coming": {}}


async def test_a_reader_takes_over_what_a_process_left_behind(backend: Backend) -> None:
    fates = Fates()
    writer, reader = (shared(backend.state_store, fates) for _ in range(2))
    for entry in ("stored", "refused", "perhaps"):
        await writer.announce(entry, {"set": {entry: 1}})
    fates.known = {"stored": True, "refused": False}
    assert await reader.read() == {"stored": 1}
    assert await reader.read() == {"stored": 1}
    assert fates.asked.count("stored") == 1
    # The writer was only slow, and another has changed the same key since.
    await reader.announce("later", {"set": {"stored": 2}})
    await reader.decide({"later": True})
    await writer.decide({"stored": True})
    assert await writer.read() == {"stored": 2}


async def test_those_who_change_it_at_once_lose_nothing(backend: Backend) -> None:
    async def change(number: int) -> None:
        state = shared(backend.state_store, Fates())
        await state.announce(str(number), {"set": {str(number): number}})
        await state.decide({str(number): True})

    await asyncio.gather(*(change(number) for number in range(10)))
    assert await shared(backend.state_store, Fates()).read() == {str(number): number for number in range(10)}


async def test_what_is_adopted_replaces_nothing(backend: Backend) -> None:
    state = shared(backend.state_store, Fates())
    await state.adopt({"a": 1})
    await state.adopt({"a": 2, "b": 2})
    assert await state.read() == {"a": 1, "b": 2}


async def test_fields_of_a_newer_version_stay(backend: Backend) -> None:
    await backend.state_store.save_memory_state(NAME, {"state": {"a": 1}, "newer": 7})
    state = shared(backend.state_store, Fates())
    await state.announce("one", {"set": {"b": 1}, "more": 8})
    await state.decide({"one": True})
    assert await backend.state_store.load_memory_state(NAME) == {
        "state": {"a": 1, "b": 1},
        "coming": {},
        "newer": 7,
    }


@pytest.mark.parametrize(
    "stored", [{"state": []}, {"coming": []}, {"coming": {"a": {}}}, {"coming": {"a": 1}}]
)
async def test_a_damaged_state_is_an_error_and_is_not_overwritten(
    backend: Backend, stored: dict[str, Any]
) -> None:
    await backend.state_store.save_memory_state(NAME, stored)
    state = shared(backend.state_store, Fates())
    for work in (
        state.read(),
        state.announce("one", {"set": {}}),
        state.decide({"a": True}),
        state.adopt({}),
    ):
        with pytest.raises(Corrupt):
            await work
    assert await backend.state_store.load_memory_state(NAME) == stored


async def test_a_state_that_keeps_changing_is_an_error(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr("stm_backends.races.RACES", 3)
    monkeypatch.setattr(States, "save_versioned", lost)
    with pytest.raises(Unavailable, match="kept changing"):
        await shared(backend.state_store, Fates()).announce("one", {"set": {}})
