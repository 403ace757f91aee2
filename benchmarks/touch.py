"""A process that touches every conversation of a tenant once, and prints its resident bytes as JSON.

They are those before, after and at the highest. The process reads pickled settings and the number of
conversations from its standard input. It imports what a service with one datastore imports, and none of the
benchmarks' other libraries.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.backend import Backend

TENANT, USER = "acme", "u1"
_AT_ONCE = 64
_ADDED = 10
"""Every so many conversations one gets a turn, too."""

_DRIVERS = {
    "sqlite": ("stm_backends.drivers.sqlite.driver", "SqliteDriver"),
    "redis": ("stm_backends_redis", "RedisDriver"),
    "postgres": ("stm_backends_postgres", "PostgresDriver"),
}


def key_of(number: int) -> MemoryKey:
    """Return the key of a conversation; names sort by number."""
    return MemoryKey(TENANT, USER, f"{number:09}")


def make_driver(settings: Any) -> Any:
    """Return the driver for these settings."""
    module, name = _DRIVERS[settings.backend]
    return getattr(importlib.import_module(module), name)(settings)


async def _touch(settings: Any, count: int) -> tuple[int, int, int]:
    async with Backend(make_driver(settings)) as backend:
        config = ShortTermMemoryConfig(strategy="truncation")
        before = _status("VmRSS")
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                memory = backend.memory(key_of(number), config)
                if not await memory.get_llm_context():
                    raise LookupError("a conversation is missing")
                if number % _ADDED == 0:
                    await memory.add_turn(ConversationTurn("One more question.", "One more answer."))

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        return before, _status("VmRSS"), _status("VmHWM")


def _status(name: str) -> int:
    """Return a size of this process in bytes, or 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def main() -> None:
    """Touch the conversations of the datastore that the parent process names."""
    settings, count = pickle.load(sys.stdin.buffer)  # noqa: S301 -- `benchmarks.scale` wrote it
    print(json.dumps(asyncio.run(_touch(settings, count))))


if __name__ == "__main__":
    main()
