"""State that the items of several logs change, each of them exactly once.

```
{"state": {...}, "coming": {ID: {"set": {...}, ...}}}
```

The changes of an item are announced before the item is stored, and taken over afterwards. If a process dies
in between, the next reader of the state asks for the fate of the item. If it is in its log, its changes are
taken over; if it never will be, they are dropped; if it may yet come, they are not shown. The process that
takes a note out of `coming` decides, with one conditional save. So no item is stored without its change, and
no change counts twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, cast

from stm_backends.errors import Corrupt, StorageError, Unavailable
from stm_backends.races import Lost, contend
from stm_backends.records import operations
from stm_backends.records.state_store import States

State: TypeAlias = dict[str, Any]
Fate: TypeAlias = Callable[[str, State], Awaitable[bool | None]]
"""Says of an id and its note whether the item is in its log; `None` if it may yet come."""


class SharedState:
    """A saved state that several processes change by the items of logs; see this module."""

    def __init__(self, store: States, name: str, fate: Fate, lock: Callable[[], asyncio.Lock]) -> None:
        self._store = store
        self._name = name
        self._fate = fate
        # One for all objects of this state in a process, else they would only lose races to each other.
        self._lock = lock
        self._known: tuple[State | None, str | None] | None = None

    async def read(self) -> State:
        """Return the state, with all items that are in their logs."""
        content, _ = await self._store.load_versioned(self._name)
        state, coming = _parts_of(content or {})
        if not coming:
            return state
        notes = [*coming.items()]
        found = await operations.together(notes, lambda note: self._fate(*note))
        fates = {entry: fate for (entry, _), fate in zip(notes, found, strict=True) if fate is not None}
        with suppress(StorageError):
            # For the next reader; a role may lack the right to save.
            await self.decide(fates)
        return _parts_of(_decided(content or {}, fates=fates) or {"state": state})[0]

    async def announce(self, entry: str, note: State) -> None:
        """Note an item that is about to be stored; `note["set"]` has its changes."""
        await self._change(partial(_announced, entry=entry, note=note))

    async def decide(self, fates: Mapping[str, bool]) -> None:
        """Take over announced items that were stored, and drop those that never will be."""
        await self._change(partial(_decided, fates=fates))

    async def adopt(self, part: Mapping[str, Any]) -> None:
        """Add fields that the state lacks."""
        await self._change(partial(_adopted, part=part))

    async def _change(self, change: Callable[[State], State | None]) -> None:
        """Save the result of a function on the state, despite concurrent saves; `None` changes nothing."""

        async def attempt() -> bool | Lost:
            known, self._known = self._known, None
            content, version = known or await self._store.load_versioned(self._name)
            after = change(content or {})
            if after is not None:
                saved = await self._store.save_versioned(self._name, after, expect=version)
                if saved is None:
                    return Lost(version)
                content, version = after, saved
            self._known = content, version
            return True

        async with self._lock():
            if await contend(attempt) is None:
                raise Unavailable("a state kept changing, and was not changed by this call")


def _parts_of(content: Mapping[str, Any]) -> tuple[State, dict[str, State]]:
    """Return the state, and the announced items. Raises `Corrupt` for anything else."""
    state, coming = content.get("state", {}), content.get("coming", {})
    if isinstance(state, dict) and isinstance(coming, dict):
        notes = cast("dict[str, State]", coming)
        if all(isinstance(note, dict) and isinstance(note.get("set"), dict) for note in notes.values()):  # pyright: ignore[reportUnnecessaryIsInstance] -- it was stored
            return cast("State", state), notes
    raise Corrupt("a saved state that logs share is damaged")


def _announced(content: State, *, entry: str, note: State) -> State:
    state, coming = _parts_of(content)
    return {**content, "state": state, "coming": {**coming, entry: note}}


def _decided(content: State, *, fates: Mapping[str, bool]) -> State | None:
    state, coming = _parts_of(content)
    known = [entry for entry in coming if entry in fates]
    taken = {name: value for entry in known if fates[entry] for name, value in coming[entry]["set"].items()}
    left = {entry: note for entry, note in coming.items() if entry not in fates}
    return {**content, "state": {**state, **taken}, "coming": left} if known else None


def _adopted(content: State, *, part: Mapping[str, Any]) -> State | None:
    state, _ = _parts_of(content)
    return {**content, "state": {**part, **state}} if part.keys() - state.keys() else None
