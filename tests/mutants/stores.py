"""Broken state stores, and the correct one that they are variations of."""

from __future__ import annotations

import asyncio
import json
import posixpath
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from stm_backends.errors import Corrupt, Unavailable


class Shelf:
    """What the stores of one test have in common: the datastore."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.down = False

    @asynccontextmanager
    async def outage(self) -> AsyncGenerator[None]:
        """Cut the datastore off for as long as the context lasts."""
        self.down = True
        try:
            yield
        finally:
            self.down = False

    async def damage(self, key: str) -> None:
        """Make a saved state unreadable."""
        self.texts[key] = '{"half": '


class JsonStore:
    """A correct store, with conditional saves, of a few lines."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        text = self.dump(state)
        self.reach()
        self.put(self.at(key), text)

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        self.reach()
        return self.parse(self.shelf.texts.get(self.at(key)))

    async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        state = await self.load_memory_state(key)
        return state, None if state is None else str(self.shelf.versions[self.at(key)])

    async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
        text = self.dump(state)
        self.reach()
        version = self.shelf.versions.get(self.at(key))
        if (None if version is None else str(version)) != expect:
            return False
        self.put(self.at(key), text)
        return True

    def at(self, key: str) -> str:
        """Return where a key's state is."""
        return key

    def put(self, key: str, text: str) -> None:
        """Store a text, under a version that never was."""
        self.shelf.texts[key] = text
        self.shelf.versions[key] = self.shelf.versions.get(key, 0) + 1

    def reach(self) -> None:
        """Fail if the datastore is cut off."""
        if self.shelf.down:
            raise Unavailable("the shelf is out of reach", backend="shelf")

    def dump(self, state: Any) -> str:
        """Return a state as text. Raises `TypeError` for what JSON does not know."""
        _require_text_keys(state)
        return json.dumps(state)

    def parse(self, text: str | None) -> dict[str, Any] | None:
        """Return the state that a text holds."""
        try:
            return None if text is None else json.loads(text)
        except ValueError as error:
            raise Corrupt("the state does not parse", backend="shelf") from error


def _require_text_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(key, str):
                raise TypeError("a key is not text")
            _require_text_keys(item)
    elif isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _require_text_keys(item)


class Merges(JsonStore):
    """Updates the stored state with the new one."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        await super().save_memory_state(key, {**(await self.load_memory_state(key) or {}), **state})


class AppendsLists(JsonStore):
    """Adds to lists instead of replacing them."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        old = await self.load_memory_state(key) or {}
        merged = {
            name: old.get(name, []) + value if isinstance(value, list) else value
            for name, value in state.items()
        }
        await super().save_memory_state(key, merged)


class KeepsTheObject(JsonStore):
    """Keeps the very object that it was given."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.kept: dict[str, dict[str, Any]] = {}

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        await super().save_memory_state(key, state)
        self.kept[key] = state

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        return self.kept.get(key) or await super().load_memory_state(key)


class HandsOutItsCache(JsonStore):
    """Parses a state once and hands out the same object ever after."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.parsed: dict[str, dict[str, Any] | None] = {}

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        text = self.shelf.texts.get(key, "null")
        if text not in self.parsed:
            self.parsed[text] = await super().load_memory_state(key)
        return self.parsed[text]


class WritesLater(JsonStore):
    """Keeps saves to itself until it is asked for them."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.waiting: dict[str, str] = {}

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        self.waiting[key] = self.dump(state)

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        for name, text in self.waiting.items():
            self.put(name, text)
        self.waiting.clear()
        return await super().load_memory_state(key)


class OutageIsNoState(JsonStore):
    """Answers that there is no state when it cannot look."""

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        try:
            return await super().load_memory_state(key)
        except Unavailable:
            return None


class DamageIsNoState(JsonStore):
    """Answers that there is no state when it cannot read it."""

    def parse(self, text: str | None) -> dict[str, Any] | None:
        try:
            return super().parse(text)
        except Corrupt:
            return None


class MissingIsEmpty(JsonStore):
    """Makes up an empty state for a key that was never saved."""

    def parse(self, text: str | None) -> dict[str, Any] | None:
        return super().parse(text or "{}")


class CaselessStateKeys(JsonStore):
    """Has a collation that ignores case."""

    def at(self, key: str) -> str:
        return key.casefold()


class CutStateKeys(JsonStore):
    """Has a column that is too narrow, and cuts what does not fit."""

    def at(self, key: str) -> str:
        return key[:400]


class KeysArePaths(JsonStore):
    """Uses keys as the names of files."""

    def at(self, key: str) -> str:
        return posixpath.normpath(f"states/{key}.json")


class NumbersAreFloats(JsonStore):
    """Has one type of number."""

    def parse(self, text: str | None) -> dict[str, Any] | None:
        return None if text is None else json.loads(text, parse_int=float)


class TextThroughUtf8(JsonStore):
    """Replaces what UTF-8 cannot carry."""

    def dump(self, state: Any) -> str:
        super().dump(state)
        return json.dumps(state, ensure_ascii=False).encode(errors="replace").decode()


class NotANumberIsNull(JsonStore):
    """Stores null for what strict JSON has no word for."""

    def parse(self, text: str | None) -> dict[str, Any] | None:
        return None if text is None else json.loads(text, parse_constant=lambda _: None)


class AnythingIsText(JsonStore):
    """Stores the `repr` of what is not JSON."""

    def dump(self, state: Any) -> str:
        return json.dumps(state, default=repr, skipkeys=True)


class DeletesThenWrites(JsonStore):
    """Takes the old state away before it writes the new one."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        text = self.dump(state)
        self.shelf.texts.pop(key, None)
        await asyncio.sleep(0)
        self.put(key, text)


class WritesFieldByField(JsonStore):
    """Stores the fields of a state one after the other."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        self.put(key, "{}")
        for name, value in state.items():
            stored = json.loads(self.shelf.texts[key])
            self.put(key, self.dump({**stored, name: value}))
            await asyncio.sleep(0)


class ComparesThenSaves(JsonStore):
    """Looks at the version in one round trip and saves in the next."""

    async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
        _, version = await self.load_versioned(key)
        await asyncio.sleep(0)
        if version != expect:
            return False
        await self.save_memory_state(key, state)
        return True


class PlainSavesKeepTheVersion(JsonStore):
    """Counts conditional saves only."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        version = self.shelf.versions.get(key, 1)
        await super().save_memory_state(key, state)
        self.shelf.versions[key] = version
