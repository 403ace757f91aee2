"""Libraries that lose turns, store them twice, raise, or hang, for `nox -s peers` to find out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.peers.conversation import Conversation
from benchmarks.peers.places import Place

LOST, DOUBLED, REFUSED = 3, 7, 9
"""The turns of each writer that go wrong."""


class _Losing(Conversation):
    """Lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def store(self, user: str, assistant: str) -> None:
        number = user.partition(", ")[2].partition(":")[0]
        if number == str(REFUSED):
            raise ConnectionError
        times = {str(LOST): 0, str(DOUBLED): 2}.get(number, 1)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{user}\n" * times)

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
