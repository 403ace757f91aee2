"""Libraries that lose turns, store them twice, raise, or hang, for `nox -s peers` to find out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.peers.conversation import Conversation, Message, text_of
from benchmarks.peers.places import Place

LOST, DOUBLED, REFUSED = 3, 7, 9
"""The turns of each writer that go wrong."""


class _Losing(Conversation):
    """Lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def store(self, user: str, assistant: str) -> None:
        self._write(user, user)

    async def add(self, *messages: Message) -> None:
        # Of an answer, the last one has the question's text.
        self._write(messages[-1]["content"], *map(text_of, messages))

    async def said(self) -> list[str]:
        return await self.questions()

    def _write(self, about: str, *lines: str) -> None:
        number = about.partition(", ")[2].partition(":")[0]
        if number == str(REFUSED):
            raise ConnectionError
        # What is lost of an exchange is its last message.
        kept = lines[:-1] if number == str(LOST) else lines
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in kept * (2 if number == str(DOUBLED) else 1))

    async def read(self) -> object:
        return await self.questions()

    async def questions(self) -> list[str]:
        return self._path.read_text("utf-8").splitlines() if self._path.exists() else []


@asynccontextmanager
async def losing(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    yield lambda name: _Losing(Path(place.folder, name))


@asynccontextmanager
async def hanging(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    await asyncio.Event().wait()
    yield lambda name: _Losing(Path(place.folder, name))
