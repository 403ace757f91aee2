"""Stores of states for tests, with and without conditional saves; nothing in them is shared by reference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any


class PlainStore:
    """PenguiFlow's two methods: the last save wins.

    `pause` is called at the beginning and at the end of each operation, so that others may come between.
    """

    def __init__(self, delay: Callable[[], float] | None = None) -> None:
        self.texts: dict[str, str] = {}
        self.saves = 0
        self._delay = delay

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        await self._pause()
        text = self.texts.get(key)
        await self._pause()
        return None if text is None else json.loads(text)

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        text = json.dumps(state)
        await self._pause()
        self.texts[key] = text
        self.saves += 1
        await self._pause()

    def state(self, key: str) -> dict[str, Any]:
        """Return what is stored, without waiting."""
        return json.loads(self.texts[key])

    async def _pause(self) -> None:
        if self._delay is not None:
            await asyncio.sleep(self._delay())


class ConditionalStore(PlainStore):
    """A store with conditional saves: a save needs the version that was loaded."""

    def __init__(self, delay: Callable[[], float] | None = None) -> None:
        super().__init__(delay)
        self.races = 0

    async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        await self._pause()
        text, version = self.texts.get(key), self._version(key)
        await self._pause()
        return (None if text is None else json.loads(text)), version

    async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
        text = json.dumps(state)
        await self._pause()
        saved = self._version(key) == expect
        if saved:
            self.texts[key] = text
            self.saves += 1
        else:
            self.races += 1
        await self._pause()
        return saved

    def _version(self, key: str) -> str | None:
        return None if key not in self.texts else str(self.saves)


class Gate(ConditionalStore):
    """A store whose next operation of a kind waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: set[str] = set()
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()

    def close(self, *operations: str) -> None:
        self.closed = {*operations}
        self.reached.clear()
        self._opened.clear()

    def open(self) -> None:
        self.closed = set()
        self._opened.set()

    async def _wait(self, operation: str) -> None:
        if operation in self.closed:
            self.reached.set()
            await self._opened.wait()

    async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        loaded = await super().load_versioned(key)
        await self._wait("load")
        return loaded

    async def save_if(self, key: str, state: dict[str, Any], *, expect: str | None) -> bool:
        await self._wait("save")
        saved = await super().save_if(key, state, expect=expect)
        await self._wait("saved")
        return saved
