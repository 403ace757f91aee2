"""What each library is asked to do, whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from benchmarks.peers.places import Place

SHOWN = 50
"""Turns of a page of history, and conversations of a sidebar."""

NEWEST = 20
"""Items that a model or a user is shown of the newest."""

SUMMARY = "The user wants a table for two and the guide found one with seats outdoors. " * 25


async def summarize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer at once: the time that a model takes is not measured."""
    return {"summary": SUMMARY}


class Conversation:
    """One conversation as a library keeps it, through one handle, as one task of a service holds it."""

    async def store(self, user: str, assistant: str) -> None:
        """Add one turn; return when the library says that it is stored."""
        raise NotImplementedError

    async def read(self) -> object:
        """Return what the library would show the model."""
        raise NotImplementedError

    async def questions(self) -> list[str]:
        """Return the user's message of every stored turn."""
        raise NotImplementedError

    async def history(self, middle: int) -> Sequence[object]:
        """Return `SHOWN` turns around one. Not implemented where no call returns only some older turns."""
        raise NotImplementedError

    async def newest(self) -> Sequence[object]:
        """Return the `NEWEST` items. Not implemented where no call returns only some of the newest."""
        raise NotImplementedError

    async def sidebar(self) -> Sequence[object]:
        """Return the `SHOWN` latest conversations of a user. Not implemented where no call lists them."""
        raise NotImplementedError

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        """Add older turns. What is stored is read as if they had been added one at a time."""
        for user, assistant in turns:
            await self.store(user, assistant)

    async def settle(self) -> None:
        """Wait for the library's work in the background."""

    async def exchange(self, user: str, assistant: str, thinking_s: float) -> None:
        """Do what a service does for one message: read, wait for the model, store."""
        await self.read()
        await asyncio.sleep(thinking_s)
        await self.store(user, assistant)


Opened = Callable[[Place], AbstractAsyncContextManager[Callable[[str], Conversation]]]
"""Opens a library's client at a place, and returns conversations by their names."""
