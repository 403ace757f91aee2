"""The tiers in a run: pods remember facts in sessions that they share, and end them at any moment.

A fact that is important is promoted when its session ends, whoever ends it and however often. So in the end
long-term memory has each important fact that was acknowledged since the last erasure of the user, as it was.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any, Final

from stm_backends import Backend, MemoryKey
from stm_backends.tiers import MemoryManager, SharedShortTermMemory
from tests.chaos.history import Event, Writer

TENANT: Final = "chaos-tiers"
SESSIONS: Final = 2
PACE: Final = 6
"""How many times the pause of a worker lies between two calls of the tiers in a pod."""

MOST: Final = 300
"""How many facts a life of a pod remembers; long-term memory keeps them all."""


def user(session: int) -> str:
    """Return whose session this is."""
    return f"t{session}"


def manager(backend: Backend, number: int) -> MemoryManager:
    """Return the memory of one user, with the session that all pods share."""
    owner = (TENANT, user(number))
    session = SharedShortTermMemory(backend, MemoryKey(*owner, "session"))
    return MemoryManager(backend=backend, owner=owner, short_term=session)


def fact(key: str) -> str:
    """Return what is remembered under a key."""
    return f"{key} is {zlib.crc32(key.encode()):08x}"


def drawn(chance: random.Random, process: str, count: int) -> tuple[int, str, float]:
    """Return the session, the key and the importance of the next fact; most are important."""
    return chance.randrange(SESSIONS), f"{process}/{count}", 0.8 if chance.random() < 0.7 else 0.2


async def note_all(backend: Backend, writer: Writer) -> None:
    """End every session once more, and note what long-term memory has."""
    for number in range(SESSIONS):
        memory = manager(backend, number)
        await memory.gc.on_session_end()
        found = {one.key: one.content for one in await memory.long_term.listed()}
        facts = {key: content for key, content in found.items() if "/" in key}
        altered = [key for key, content in facts.items() if content != fact(key)]
        writer.info("remembered", session=number, keys=sorted(facts), altered=altered)


def judged(events: Iterable[Event]) -> tuple[list[str], dict[str, float]]:
    """Return what no correct tiers would have done, and how much was looked at."""
    begun: dict[int, set[str]] = {}
    known: dict[int, set[str]] = {}
    keys: dict[int, set[str]] = {}
    violations: list[str] = []
    for event in events:
        data: dict[str, Any] = event.data
        if event.what == "remember":
            place = begun if event.phase == "invoke" else known
            if event.phase == "invoke" or (event.phase == "ok" and data["importance"] >= 0.5):
                place.setdefault(data["session"], set()).add(data["key"])
        elif event.what == "forget" and event.phase == "ok":
            known.pop(data["session"], None)
        elif event.what == "remembered":
            keys[data["session"]] = set(data["keys"])
            violations += [f"tiers: {key} was altered" for key in data["altered"]]
    for session, has in keys.items():
        lost, foreign = known.get(session, set()) - has, has - begun.get(session, set())
        violations += [f"tiers: {key} was acknowledged, and is not remembered" for key in sorted(lost)]
        violations += [f"tiers: {key} is remembered, and was never given to it" for key in sorted(foreign)]
    figures = {
        "facts acknowledged": sum(map(len, known.values())),
        "facts kept": sum(map(len, keys.values())),
    }
    return violations, figures
