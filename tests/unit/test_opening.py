"""The typed ways to open a backend take what `open_backend` and the drivers take, and no other options."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from stm_backends import BackendOptions, MemoryKey, backend, open_memory, open_sqlite, opening, sync
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.sqlite import SqliteSettings

EVERYWHERE = get_type_hints(BackendOptions)


def own(options: type) -> dict[str, object]:
    """Return the options that only this driver takes, with their types."""
    return {name: kind for name, kind in get_type_hints(options).items() if name not in EVERYWHERE}


def test_the_options_of_every_backend_are_those_of_open_backend() -> None:
    parameters = inspect.signature(backend.open_backend).parameters.values()
    named = {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY} - {"url"}
    kinds = get_type_hints(backend.open_backend)
    assert {name: kinds[name] for name in named} == EVERYWHERE


def test_the_options_of_the_memory_driver_are_its_arguments() -> None:
    kinds = get_type_hints(MemoryDriver.__init__)
    taken = inspect.signature(MemoryDriver).parameters.keys() - {"store"}
    assert own(opening.MemoryOptions) == {"name": str | None, **{name: kinds[name] for name in taken}}


def test_the_options_of_the_sqlite_driver_are_its_settings() -> None:
    kinds, options = get_type_hints(SqliteSettings), own(opening.SqliteOptions)
    # A `Path` may be given, and the settings have the text of it; the clock is for tests.
    assert {*options} - {"clock"} == {field.name for field in fields(SqliteSettings)}
    assert [name for name in options if name not in ("clock", "path") and options[name] != kinds[name]] == []


async def test_each_opens_its_backend(tmp_path: Path) -> None:
    for opened in (open_memory(), open_memory("memory://"), open_sqlite(path=tmp_path / "chats.db")):
        async with opened as one:
            chat = one.conversation("acme", "u1", "chat")
            await chat.add({"role": "user", "content": "A table"})
            assert len((await chat.history()).messages) == 1


def test_a_program_without_an_event_loop_uses_them_too(tmp_path: Path) -> None:
    key = MemoryKey("acme", "u1", "chat")
    with sync.Backend(open_sqlite(f"sqlite:///{tmp_path}/chats.db", synchronous="full")) as one:
        assert one.memory(key).get_llm_context() == {"conversation_memory": {"recent_turns": []}}
