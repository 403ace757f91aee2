"""A session that is written by a process which is killed at its n-th operation on the datastore.

    python -m tests.support.dying_transcript URL EVERY

Writes it once whole, and then for the users `u1`, `u1 + EVERY`, ... in processes that are killed before that
operation. Prints how many operations the whole takes, and how many appends each of the others acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stm_backends import Backend, MemoryKey
from stm_backends.drivers import plugins
from stm_backends.integrations.claude_agent_sdk import StmSessionStore
from tests.support.dying_session import DyingDriver, forked

KEY: Any = {"project_key": "p", "session_id": "s"}
AGENT: Any = {**KEY, "subpath": "subagents/agent-1"}

BATCHES: list[list[Any]] = [
    [
        {
            "type": "user",
            "uuid": f"{batch}-{number}",
            "message": {"role": "user", "content": f"{batch} {number}"},
        }
        for number in range(3)
    ]
    + [{"type": "custom-title", "customTitle": f"title {batch}"}]
    for batch in range(5)
]


async def write(store: StmSessionStore, acknowledged: Callable[[], object] = lambda: None) -> None:
    """Write the session and its subagent, always the same."""
    for batch in BATCHES:
        await store.append(AGENT, batch)
        await store.append(KEY, batch)
        acknowledged()


async def run(url: str, user: str, at: int, notes: Path) -> int:
    """Write it on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        store = StmSessionStore(backend, lambda project, one: MemoryKey("acme", user, f"{project}/{one}"))
        with notes.open("a", encoding="ascii", buffering=1) as file:
            await write(store, lambda: file.write(".\n"))
    return driver.done


def main(url: str, every: int, folder: Path) -> None:
    status, operations = forked(lambda: asyncio.run(run(url, "whole", 0, folder / "whole")))
    assert status == 0, status
    sys.stdout.write(f"{operations}\n")
    for at in range(1, operations + 1, every):
        notes = folder / str(at)
        notes.touch()
        status, _ = forked(lambda at=at, notes=notes: asyncio.run(run(url, f"u{at}", at, notes)))
        # Concurrent steps may take fewer operations than in the first run.
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
        sys.stdout.write(f"{len(notes.read_text('ascii').split())}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], int(sys.argv[2]), Path(made))
